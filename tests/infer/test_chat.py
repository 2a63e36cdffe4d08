"""Engine.chat: the reply to a conversation, by the model's own template."""

from dataclasses import replace

import pytest

from tests.models import TEXT, opinionated, save_model
from tiedgpt import Tokenizer
from tiedgpt.data import TEMPLATES, write_template
from tiedgpt.errors import UserError
from tiedgpt.infer import Engine, GenerationConfig

TEMPLATE = TEMPLATES["plain"]
USER = {"role": "user", "content": "the dog"}
SYSTEM = {"role": "system", "content": "cat"}


@pytest.fixture(scope="module")
def chatting(engine):
    with Engine(engine.model, tokenizer=engine.tokenizer, template=TEMPLATE) as chatting:
        yield chatting


@pytest.fixture(scope="module")
def reply(engine):
    """The reply to the text that the template stands for, written by hand."""
    text = "cat\n\nUser: the dog\n\nAssistant:"
    ends = [engine.tokenizer.eos_token_id]
    return engine.generate(text, max_new_tokens=7, temperature=0, stop_ids=ends)


@pytest.mark.parametrize(
    "arguments",
    [{"max_new_tokens": 7, "temperature": 0},
     {"config": GenerationConfig(max_new_tokens=7, temperature=0)},
     {"config": GenerationConfig(temperature=0), "max_new_tokens": 7, "stop_ids": [290]}],
)  # fmt: skip
def test_a_reply_continues_the_templates_text(chatting, reply, arguments):
    assert chatting.chat([SYSTEM, USER], **arguments).ids == reply.ids
    streamed = chatting.stream_chat([SYSTEM, USER], **arguments)
    assert [token.id for token in streamed] == reply.ids and streamed.result().text == reply.text
    assert chatting.chat(iter([SYSTEM, USER]), **arguments).ids == reply.ids
    assert len(chatting.chat([SYSTEM, USER], n=3, max_new_tokens=2)) == 3


def test_a_reply_ends_with_the_template_or_the_context(chatting, engine):
    end = engine.tokenizer.eos_token_id
    done = chatting.chat([USER], logit_bias={end: 100})
    assert (done.ids, done.text, done.finish_reason) == ([end], "", "stop")
    long = chatting.chat([USER], logit_bias={end: -100})
    n_prompt = len(engine.tokenizer.encode("User: the dog\n\nAssistant:"))
    assert len(long.ids) == 48 - n_prompt and long.finish_reason == "length"


def test_the_templates_end_ends_a_beam(chatting, engine):
    end = engine.tokenizer.eos_token_id
    text = "User: the dog\n\nAssistant:"
    options = {"num_beams": 2, "max_new_tokens": 7}
    assert chatting.chat([USER], **options) == engine.generate(text, **options)
    ended = chatting.chat([USER], logit_bias={end: 100}, **options)
    assert (ended.ids, ended.text, ended.finish_reason) == ([end], "", "stop")


def test_a_reply_continues_after_its_end_if_asked(chatting, engine):
    end = engine.tokenizer.eos_token_id
    options = {"logit_bias": {end: 100}, "max_new_tokens": 5, "temperature": 0}
    for ids in ([], [290]):
        done = chatting.chat([USER], ignore_eos=True, stop_ids=ids, **options)
        assert (done.ids, done.finish_reason) == ([end] * 5, "length")
    streamed = chatting.stream_chat([USER], ignore_eos=True, **options)
    assert [token.id for token in streamed] == [end] * 5


@pytest.mark.parametrize("name", ["model", "run"])
def test_the_template_of_a_run_or_a_directory_is_used(tmp_path, name, reply):
    path = tmp_path / name if name == "model" else tmp_path / name / "model"
    tokenizer = Tokenizer.train([TEXT], 300)
    save_model(path, opinionated(tokenizer), tokenizer)
    options = {"max_new_tokens": 7, "temperature": 0}
    with Engine(tmp_path / name) as engine:
        assert engine.template is None
        with pytest.raises(UserError, match="no chat template"):
            engine.chat([USER])
    write_template(replace(TEMPLATE, default_system="cat"), tokenizer, path)
    with Engine(tmp_path / name) as engine:
        assert engine.chat([USER], **options).ids == reply.ids
        assert engine.chat([SYSTEM, USER], **options).ids == reply.ids
        engine.tokenizer = None
        with pytest.raises(UserError, match="no tokenizer"):
            engine.chat([USER])
    (path / "chat_template.jinja").write_text("{{ messages }}")
    with Engine(tmp_path / name) as engine:
        assert engine.generate("the", max_new_tokens=1).ids
        with pytest.raises(UserError, match="chatml or plain"):
            engine.chat([USER])
    with Engine(tmp_path / name, template=TEMPLATE) as engine:
        assert engine.chat([SYSTEM, USER], **options).ids == reply.ids


@pytest.mark.parametrize(
    ("messages", "named"),
    [(None, "messages"), (5, "messages"), ([], "messages"), ({}, "messages"), (USER, "messages"),
     (iter([]), "messages"), ("", "messages"), ("the dog", "messages"),
     (["the dog"], "messages"), ([{"role": "user"}], "messages"),
     ([{"content": "the dog"}], "messages"), ([USER | {"content": None}], "messages"),
     ([USER | {"content": ["the dog"]}], "messages"), ([USER | {"role": "wizard"}], "wizard")],
)  # fmt: skip
def test_other_messages_are_refused(chatting, messages, named):
    for call in (chatting.chat, chatting.stream_chat):
        with pytest.raises(UserError, match=named):
            call(messages)


def test_transformers_name_for_it_leads_here(engine):
    with pytest.raises(AttributeError, match=r"Engine\(source\)\.chat\(messages\)"):
        engine.tokenizer.apply_chat_template([USER])
