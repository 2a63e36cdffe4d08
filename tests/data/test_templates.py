"""Chat templates: data in, text out, and the same in transformers."""

import json
from dataclasses import replace

import jinja2
import pytest

from tiedgpt import Tokenizer
from tiedgpt.data import TEMPLATES, Template, read_template, write_template
from tiedgpt.data.templates import Role, encode_pieces
from tiedgpt.errors import UserError

TOKENIZER = Tokenizer.train(["the user says hello, the assistant says hello\n\nhello"] * 3, 320)
ODD = Template(
    "odd",
    {
        "user": Role("Q#}\"' ", "{", "\\n\n", "[end]"),
        "assistant": Role("[start]Ä😀:", "  ", "{% x %}[end]\n<|endoftext|>", "~", counted=True),
        "system": Role(),
    },
    begin="{{ x }}<|endoftext|>",
    tokens=("[start]", "[end]"),
)
CLERK = "You are a kind clerk.\n"
ODD_SYSTEM = "{{ x }} {% y %} {# z #} -#}\n\"quoted\" 'it' \\n ü😀\u2028 <b>\t"
EVERY = {
    **TEMPLATES,
    "odd": ODD,
    "kind chatml": replace(TEMPLATES["chatml"], default_system=CLERK),
    "kind plain": replace(TEMPLATES["plain"], default_system=CLERK, max_turns=1),
    "odd system": replace(ODD, default_system=ODD_SYSTEM),
    "empty system": replace(TEMPLATES["chatml"], default_system=""),
}
CHAT = [
    {"role": "system", "content": "Be brief.\n\n"},
    {"role": "user", "content": "\n\nhello 'there'  "},
    {"role": "assistant", "content": "hello ü😀!"},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "not this", "train": False},
    {"role": "user", "content": " x"},
    {"role": "assistant", "content": " yes\n\n"},
    {"role": "assistant", "content": "", "train": True},
]


@pytest.mark.parametrize("name", EVERY)
def test_a_written_template_is_read_back(name, tmp_path):
    template = EVERY[name]
    tokenizer = TOKENIZER.with_special_tokens(template.tokens)
    (tmp_path / "generation_config.json").write_text('{"_from_model_config": true, "top_k": 7}')
    write_template(template, tokenizer, tmp_path)
    assert read_template(tmp_path) == template
    ends = template.end_ids(tokenizer)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert written == {"top_k": 7, "eos_token_id": ends}
    end = tokenizer.eos_token_id
    assert ends == ([end, len(TOKENIZER) + 1] if template.name == "chatml" else [end])


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_was_written_without_a_default_system_message_is_read(name, tmp_path):
    jinja = TEMPLATES[name].jinja()
    assert "default_system" not in jinja and "set messages" not in jinja
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/model/chat_template.jinja").write_text(jinja)
    for path in (tmp_path / "run", str(tmp_path / "run/model")):
        assert read_template(path).default_system is None


USER = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("system", [CLERK, ODD_SYSTEM, ""])
@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (USER, "{}\n\nUser: hello\n\nAssistant:"),
        ([], "{}\n\nAssistant:"),
        ([{"role": "system", "content": "No."}, *USER], "No.\n\nUser: hello\n\nAssistant:"),
        ([{"role": "system", "content": ""}, *USER], "\n\nUser: hello\n\nAssistant:"),
        ([*USER, {"role": "system", "content": "No."}],
         "{}\n\nUser: hello\n\nNo.\n\nAssistant:"),
    ],
)  # fmt: skip
def test_the_default_system_message_begins_a_conversation_without_one(system, messages, expected):
    """Here, and in the Jinja that transformers and llama.cpp run."""
    template = replace(TEMPLATES["plain"], default_system=system)
    text = expected.replace("{}", system)
    assert "".join(piece.text for piece in template.prompt(iter(messages))) == text
    source = template.jinja().replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    jinja = jinja2.Environment().from_string(source)
    options = {"add_generation_prompt": True, "eos_token": "<|endoftext|>"}
    assert jinja.render(messages=messages, **options) == text
    roles = {"assistant": TEMPLATES["plain"].roles["assistant"]}
    with pytest.raises(UserError, match="default_system"):
        Template("no system", roles, default_system=system)


def test_a_template_that_was_changed_or_is_foreign_is_refused(tmp_path):
    assert read_template(tmp_path) is None
    ours = TEMPLATES["plain"].jinja()
    for text in (
        "{{ messages[0].content }}",
        ours + " ",
        ours.replace("User:", "Uzer:", 1),
        ours.replace("counted", "trained", 1),
        "{#- tiedgpt template {} -#}\n",
        "{#- tiedgpt template [1] -#}\n",
        "",
    ):
        (tmp_path / "chat_template.jinja").write_text(text)
        with pytest.raises(UserError, match=r"chat_template\.jinja .* not executed: name one of"):
            read_template(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    for foreign in ("{{ messages }}", [{"name": "default", "template": "x"}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": foreign}))
        with pytest.raises(UserError, match=r"tokenizer_config\.json holds a chat template that"):
            read_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": ours}))
    assert read_template(tmp_path) == TEMPLATES["plain"]


@pytest.mark.parametrize(
    "roles",
    [
        {"user": Role("Q:", "\n"), "assistant": Role("A:", suffix="<|endoftext|>", counted=True)},
        {"assistant": Role("A:", after="<|im_end|>", counted=True)},
        {"assistant": Role("A:", after="<|endoftext|>.", counted=True)},
        {"assistant": Role("A:", after="<|endoftext|>")},
        {},
    ],
)
def test_a_template_needs_an_end_token(roles):
    with pytest.raises(UserError, match="would never stop"):
        Template("endless", roles)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [([{"role": "system", "content": "No."}], "No."), (USER, CLERK + "\n\nUser: hello"),
     ([{"role": "assistant", "content": "Yes"}], CLERK + "\n\nAssistant: Yes")],
)  # fmt: skip
def test_a_message_is_continued_after_the_default_system_message_or_its_own(messages, expected):
    pieces = EVERY["kind plain"].continuation(iter(messages))
    assert "".join(piece.text for piece in pieces) == expected


def test_tokens_that_the_tokenizer_lacks_are_an_error_and_nothing_is_written(tmp_path):
    with pytest.raises(UserError, match=r"no special token <\|im_end\|>"):
        write_template(TEMPLATES["chatml"], TOKENIZER, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_reply_follows_its_prompt(name):
    template = TEMPLATES[name]
    tokenizer = TOKENIZER.with_special_tokens(template.tokens)
    prompt, counted = encode_pieces(template.prompt(CHAT[:2]), tokenizer)
    whole, mask = encode_pieces(template.pieces(CHAT[:3]), tokenizer)
    assert whole[: len(prompt)] == prompt and not any(counted)
    assert mask.index(True) == len(prompt)
    assert not tokenizer.decode(prompt).endswith(" ")


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("kind", ["bpe", "characters"])
def test_transformers_makes_the_same_ids_and_mask(name, kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    template, tokenizer = EVERY[name], TOKENIZER
    if kind == "characters":
        texts = [template.jinja(), str(CHAT), "\n", template.default_system or ""]
        tokenizer = Tokenizer.characters(texts)
    tokenizer = tokenizer.with_special_tokens(template.tokens)
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "old"}))
    write_template(template, tokenizer, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    for messages in (CHAT, CHAT[1:]):  # with a system message, and without
        found = theirs.apply_chat_template(messages, **options)
        ids, counted = encode_pieces(template.pieces(messages), tokenizer)
        assert found["input_ids"] == ids
        assert list(map(bool, found["assistant_masks"])) == counted
    for messages in (CHAT[:2], CHAT[1:2]):
        prompt = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        assert prompt["input_ids"] == encode_pieces(template.prompt(messages), tokenizer)[0]
    pairs = [("system", "Be brief."), ("user", "say it"), ("assistant", "hello"), ("user", "and")]
    chat = [{"role": role, "content": content} for role, content in pairs]
    for messages in (chat[:1], chat[:2], chat[:3], chat[1:2], chat[1:3], chat[3:], chat):
        prompt = theirs.apply_chat_template(messages, continue_final_message=True, return_dict=True)
        assert prompt["input_ids"] == encode_pieces(template.continuation(messages), tokenizer)[0]
    assert theirs.apply_chat_template(CHAT[:2], tokenize=False) == tokenizer.decode(
        encode_pieces(template.pieces(CHAT[:2]), tokenizer)[0]
    )
    generation = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert generation.eos_token_id == template.end_ids(tokenizer)
    with pytest.raises(Exception, match="no such role: robot"):
        theirs.apply_chat_template([{"role": "robot", "content": "x"}])
