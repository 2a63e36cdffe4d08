"""A conversation in the terminal: it ends where the template says, and names its limits."""

import io
import sys
from dataclasses import replace

import pytest
import torch

from tests.models import save_model
from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.data import TEMPLATES, read_template, write_template
from tiedgpt.errors import CorruptInputError
from tiedgpt.infer import Engine


@pytest.fixture
def saved(tmp_path):
    """Save a model that says one token, whatever it reads."""

    def save(says, template="chatml", max_turns=None, default_system=None):
        tokenizer = Tokenizer.characters(["userasitn system hello:\n"])
        known = TEMPLATES["chatml"]
        tokenizer = tokenizer.with_special_tokens((*known.tokens, "<|endoftext|>"))
        torch.manual_seed(0)
        shape = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
        model = GPT(GPTConfig(vocab_size=len(tokenizer), **shape))
        (token,) = tokenizer.encode(says, allow_special=True)
        with torch.no_grad():
            model.ln_f.weight.zero_()
            model.ln_f.bias.normal_()
            model.wte.weight[token] = 100 * model.ln_f.bias
        path = save_model(tmp_path / f"model-{token}", model, tokenizer)
        if template is not None:
            changes = {"max_turns": max_turns, "default_system": default_system}
            write_template(replace(TEMPLATES[template], **changes), tokenizer, path)
        return path

    return save


@pytest.fixture
def chat(monkeypatch, capsys):
    def chat(path, said, *options):
        monkeypatch.setattr(sys, "stdin", io.StringIO(said))
        code = main(["chat", str(path), "--temperature", "0", *options])
        out, err = capsys.readouterr()
        return code, out, " ".join(err.split())

    return chat


def test_a_reply_ends_at_the_templates_end_token(saved, chat):
    code, out, err = chat(saved("<|im_end|>"), "hello\n\nhello\n/exit\nhello\n")
    assert (code, out) == (0, "\n\n") and "cut off" not in err
    code, out, err = chat(saved("<|im_end|>"), "HELLO\nhello\n")
    assert (code, out) == (0, "\n") and "'H'" in err  # which this tokenizer does not know


def test_a_long_conversation_drops_its_oldest_turns(saved, chat):
    code, out, err = chat(saved("i"), "hello\n" * 4 + "/new\nhello\n")
    first, *others, fresh = out.splitlines()
    assert code == 0 and first == fresh == "i" * 32
    assert len(others) == 3 and all(set(reply) == {"i"} and len(reply) >= 16 for reply in others)
    assert err.count("the reply was cut off after") == 5
    assert err.count("its oldest turn was dropped") == 3


def test_a_model_tuned_on_single_exchanges_gets_each_message_alone(saved, chat):
    path = saved("i", max_turns=1)
    code, out, err = chat(path, "hello\n" * 4)
    assert (code, out) == (0, f"{'i' * 32}\n" * 4)
    assert "single exchanges" in err and "--keep-history" in err and "dropped" not in err
    code, _, err = chat(path, "hello\n" * 4, "--keep-history")
    assert code == 0 and "single exchanges" not in err and err.count("was dropped") == 3
    _, _, err = chat(saved("t", max_turns=2), "hello\n")
    assert "single exchanges" not in err


def test_the_length_of_replies_is_an_option(saved, chat):
    code, out, err = chat(saved("i"), "hello\nhello\n", "--max-new-tokens", "3")
    assert (code, out) == (0, "iii\niii\n") and "dropped" not in err


def test_a_too_long_message_is_refused_and_the_conversation_continues(saved, chat):
    code, out, err = chat(saved("i"), "hello " * 20 + "\nhello\n")
    assert code == 0 and out == "i" * 32 + "\n"
    assert "the message has" in err and "send a shorter message" in err
    _, _, err = chat(saved("i"), "hello\n", "--system", "hello " * 20)
    assert "--system have" in err and "a shorter message or --system" in err


@pytest.mark.parametrize(("system", "n_system"), [(None, 11), ("", 0), ("hello", 5)])
def test_the_default_system_message_is_sent_unless_one_is_given(saved, chat, system, n_system):
    """The reply fills the context of 64 tokens; the message alone takes 25."""
    path = saved("i", default_system="hello hello")
    options = [] if system is None else ["--system", system]
    code, out, err = chat(path, "hello\n", *options)
    assert (code, len(out.strip())) == (0, 64 - 25 - (10 + n_system))
    assert ("system message: 'hello hello'" in err) == (system is None)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"num_beams": 2}])
def test_generate_ends_at_the_templates_end_token_too(saved, options):
    path = saved("<|im_end|>")
    with Engine(path) as engine:
        end = read_template(path).end_ids(engine.tokenizer)[-1]
        said = engine.generate("hello", max_new_tokens=5, **options)
        assert (said.ids, said.text, said.finish_reason) == ([end], "", "stop")
    (path / "generation_config.json").write_text('{"eos_token_id": "no id"}')
    with pytest.raises(CorruptInputError, match=r"generation_config.json: eos_token_id must be"):
        Engine(path)


def test_a_converted_model_chats(saved, chat, tmp_path, capsys):
    dest = str(tmp_path / "converted")
    assert main(["convert", str(saved("<|im_end|>")), dest, "--precision", "bf16"]) == 0
    capsys.readouterr()
    assert chat(dest, "hello\n") == (0, "\n", "")


@pytest.mark.parametrize("template", [None, "foreign"])
def test_a_model_without_a_template_of_ours_is_refused(saved, chat, template):
    path, problem = saved("i", None), "has no chat template"
    if template is not None:
        (path / "chat_template.jinja").write_text("{{ messages }}")
        problem = "chat_template.jinja holds a chat template that tiedgpt did not write"
    code, out, err = chat(path, "hello\n")
    assert (code, out) == (1, "") and problem in err
