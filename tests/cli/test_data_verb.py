"""`tiedgpt data show` as a user meets it."""

import json

import pytest
from rich.console import Console

from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.cli import data
from tiedgpt.cli.main import main
from tiedgpt.data import TEMPLATES, write_template


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = Tokenizer.train(["Hello there, user. Hello there, assistant."] * 2, 300)
    tokenizer.save_pretrained("tok")
    chat = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello é\x1b[3m"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    (tmp_path / "pairs.jsonl").write_text(
        '{"prompt": "Hi ", "completion": "there"}\nnonsense\n'
        + json.dumps({"prompt": "Hi", "completion": " no" * 30})
    )
    return tmp_path


def test_trained_tokens_are_marked_without_colour(folder, capsys):
    assert main(["data", "show", "chat.jsonl", "--tokenizer", "tok"]) == 0
    out = capsys.readouterr().out
    assert (
        "<|endoftext|><|im_start|>user\nHi?<|im_end|>\n"
        "<|im_start|>assistant\n{+Hello é\\x1b[3m<|im_end|>+}\n" in out
    )
    assert "kind      messages, by the template chatml" in out
    assert "examples  1, the longest of" in out and "{+these tokens are trained+}" in out


def test_records_that_are_read_as_text_have_a_note(folder, capsys):
    (folder / "chat.txt").write_text((folder / "chat.jsonl").read_text() * 2)
    assert main(["data", "show", "chat.txt", "--tokenizer", "tok"]) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert "conversations in lines of JSON" in err and "mv chat.txt chat.jsonl" in err


def test_a_long_example_is_shown_without_its_middle(folder, capsys):
    (folder / "long.txt").write_text("abcdefghij" * 500)
    assert main(["data", "show", "long.txt", "--tokenizer", "tok"]) == 0
    out = capsys.readouterr().out
    assert "+}\n[... 4,701 tokens ...]\n{+" in out and len(out) < 1000
    assert out.count("abcdefghij") == 28, "14 and a part before the gap, 14 and a part after it"


def test_trained_tokens_are_green_in_a_terminal(folder, capsys, monkeypatch):
    monkeypatch.setattr(
        data, "console", lambda: Console(force_terminal=True, color_system="standard", width=80)
    )
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["data", "show", "chat.jsonl", "--tokenizer", "tok"]) == 0
    out = capsys.readouterr().out
    assert "{+" not in out and "\x1b[32m" in out and "\x1b[3m" not in out
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["data", "show", "chat.jsonl", "--tokenizer", "tok"]) == 0
    assert "{+Hello" in capsys.readouterr().out.replace("\x1b[0m", "")


def test_dropped_examples_are_reported_with_place_and_reason(folder, capsys):
    command = ["data", "show", "pairs.jsonl", "--tokenizer", "tok"]
    assert main(command) == 3
    assert "pairs.jsonl:2: not a JSON object" in capsys.readouterr().err
    command += ["--skip-bad", "--context", "20"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "Hi {+there<|endoftext|>+}" in out and "examples  1," in out
    err = " ".join(err.split())
    assert "bad lines that were skipped: 1 (first: pairs.jsonl:2: not a JSON" in err
    assert "longer than the context, dropped: 1 (first: pairs.jsonl:3)" in err
    assert "prompts that end in a space" in err and "(first: pairs.jsonl:1)" in err
    assert main([*command, "--too-long", "error"]) == 1
    assert "--too-long cut" in capsys.readouterr().err


def test_json_has_every_token_and_the_counts(folder, capsys):
    command = ["data", "show", "pairs.jsonl", "--tokenizer", "tok", "--skip-bad", "-f", "json"]
    assert main([*command, "--examples", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "completion" and found["examples"] == 2
    assert found["remarks"]["skipped"]["count"] == 1
    (shown,) = found["shown"]
    assert shown["place"] == "pairs.jsonl:1"
    pairs = list(zip(shown["tokens"], shown["trained"], strict=True))
    assert "".join(token for token, trained in pairs if trained) == "there<|endoftext|>"
    assert len(shown["ids"]) == len(pairs) == found["tokens"] - found["longest"]


def test_the_template_beside_the_tokenizer_is_used_unless_it_is_foreign(folder, capsys):
    tokenizer = Tokenizer.from_pretrained("tok")
    write_template(TEMPLATES["plain"], tokenizer, "tok")
    command = ["data", "show", "chat.jsonl", "--tokenizer", "tok"]
    assert main(command) == 0
    assert "User: Hi?\n\nAssistant:{+ Hello" in capsys.readouterr().out
    (folder / "tok" / "chat_template.jinja").write_text("{{ messages }}")
    assert main(command) == 1
    assert "chat_template.jinja holds a chat template that" in capsys.readouterr().err
    assert main([*command, "--template", "chatml"]) == 0
    command[2] = "pairs.jsonl"
    assert main([*command, "--skip-bad"]) == 0, "pairs need no template"


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
@pytest.mark.parametrize(
    "command",
    [["data", "show", "pairs.jsonl", "--tokenizer", "tok", "-f", "json"],
     ["tune", "pairs.jsonl", "--from", "gpt", "--steps", "1", "--out", "run"],
     ["train", "texts.jsonl", "--text-field", "body", "--start", "gpt", "--steps", "1",
      "--out", "run", "--context", "8"],
     ["train", "labels.jsonl", "--task", "classify", "--start", "gpt", "--steps", "1",
      "--out", "run"],
     ["eval", "gpt", "cloze.jsonl", "--format", "json"]],
    ids=lambda command: " ".join(command[:2]),
)  # fmt: skip
def test_an_encoding_that_is_named_counts_for_lines_of_every_verb(
    folder, capsys, encoding, command
):
    shape = {"n_positions": 128, "n_embd": 8, "n_layer": 1, "n_head": 2}
    tokenizer = Tokenizer.from_pretrained("tok")
    config = GPTConfig(vocab_size=len(tokenizer), **shape, eos_token_id=tokenizer.eos_token_id)
    GPT(config).save_pretrained("gpt")
    tokenizer.save_pretrained("gpt")
    rows = {
        "pairs.jsonl": [{"prompt": f"größer {n}", "completion": " é"} for n in range(7)],
        "texts.jsonl": [{"body": f"größer und größer {n}" * 5} for n in range(7)],
        "labels.jsonl": [{"text": f"größer {n}", "label": "äö"[n % 2]} for n in range(29)],
        "cloze.jsonl": [{"context": f"größer {n}", "completion": " é"} for n in range(7)],
    }
    for name, records in rows.items():
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (folder / name).write_bytes(lines.encode(encoding))
    if encoding == "cp1252":
        assert main(command) == 3
        assert "no text in UTF-8" in capsys.readouterr().err
    assert main([*command, "--encoding", encoding]) == 0
    out = capsys.readouterr().out
    if command[:2] == ["data", "show"]:
        (first, *_) = json.loads(out)["shown"]
        assert "".join(first["tokens"]) == "größer 0 é<|endoftext|>"
