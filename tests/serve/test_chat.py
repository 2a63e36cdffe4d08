"""/v1/chat/completions, where the tokenizer carries a template of ours."""

import re
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from tests.serve.conftest import LIMITS, Running
from tests.serve.test_completions import events, refused
from tiedgpt.data import TEMPLATES
from tiedgpt.data.templates import encode_pieces
from tiedgpt.serve.app import create_app

PATH = "/v1/chat/completions"
MESSAGES = [
    {"role": "system", "content": "cat"},
    {
        "role": "user",
        "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "dog"}],
    },
]


@pytest.fixture(scope="module")
def client(engine):
    app = create_app(engine, name="tiny", limits=LIMITS, template=TEMPLATES["plain"])
    return TestClient(app, base_url="http://127.0.0.1")


@pytest.fixture
def reply(engine):
    messages = [MESSAGES[0], {"role": "user", "content": "the dog"}]
    prompt, _ = encode_pieces(TEMPLATES["plain"].prompt(messages), engine.tokenizer)
    return engine.generate(prompt, max_new_tokens=8, temperature=0)


BODY = {"messages": MESSAGES, "temperature": 0, "max_completion_tokens": 8}


def test_a_reply_equals_the_engines(client, reply):
    answer = client.post(PATH, json=BODY | {"logprobs": True, "top_logprobs": 2}).json()
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": reply.text, "refusal": None}
    content = choice["logprobs"]["content"]
    assert [token["token_id"] for token in content] == reply.ids
    assert [token["logprob"] for token in content] == pytest.approx(reply.logprobs, abs=1e-5)
    assert all(len(token["top_logprobs"]) == 2 for token in content)


def test_the_default_system_message_is_read_unless_one_is_given(engine, reply):
    template = replace(TEMPLATES["plain"], default_system="cat")
    app = create_app(engine, name="tiny", limits=LIMITS, template=template)
    client = TestClient(app, base_url="http://127.0.0.1")

    def answer(messages):
        body = BODY | {"messages": messages, "logprobs": True}
        choice = client.post(PATH, json=body).json()["choices"][0]
        return [token["logprob"] for token in choice["logprobs"]["content"]]

    assert answer(MESSAGES[1:]) == pytest.approx(reply.logprobs, abs=1e-5)
    other = answer([{"role": "developer", "content": "dog"}, MESSAGES[1]])
    assert other != pytest.approx(reply.logprobs, abs=1e-3)


def test_streamed_pieces_join_to_the_reply(client, reply):
    body = BODY | {"stream": True, "logprobs": True}
    with client.stream("POST", PATH, json=body) as response:
        chunks = [chunk["choices"][0] for chunk in events(response)]
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == reply.text
    assert [bool(chunk["finish_reason"]) for chunk in chunks] == [False] * (len(chunks) - 1) + [
        True
    ]
    told = [
        token["token_id"] for c in chunks if c["logprobs"] for token in c["logprobs"]["content"]
    ]
    assert told == reply.ids


def test_beams_reply_as_the_engines(client, engine):
    messages = [MESSAGES[0], {"role": "user", "content": "the dog"}]
    prompt, _ = encode_pieces(TEMPLATES["plain"].prompt(messages), engine.tokenizer)
    ours = engine.generate(prompt, max_new_tokens=8, num_beams=3)
    answer = client.post(PATH, json=BODY | {"num_beams": 3}).json()
    assert answer["choices"][0]["message"]["content"] == ours.text


def test_the_official_client_chats(engine, reply):
    openai = pytest.importorskip("openai")
    with (
        Running(engine, template=TEMPLATES["plain"]) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = client.chat.completions.create(model="tiny", **BODY)
        assert answer.choices[0].message.content == reply.text


def test_fields_without_effect_are_accepted(client, reply):
    messages = [{"role": "developer", "content": "cat"}, {"role": "user", "content": "the dog"}]
    ignored = {
        "metadata": {"a": "b"}, "store": True, "user": "me", "parallel_tool_calls": False,
        "reasoning_effort": "low", "tool_choice": "none",
    }  # fmt: skip
    answer = client.post(PATH, json=BODY | ignored | {"messages": messages})
    assert answer.json()["choices"][0]["message"]["content"] == reply.text


def test_a_max_tokens_above_the_context_names_the_largest_allowed(client):
    error = refused(client, path=PATH, **BODY | {"max_completion_tokens": 256})
    largest = int(re.search("at most ([0-9]+), got 256", error["message"])[1])
    assert error["param"] == "max_completion_tokens", error
    assert error["message"].startswith("max_completion_tokens")
    body = BODY | {"max_completion_tokens": largest}
    assert client.post(PATH, json=body).status_code == 200


@pytest.mark.parametrize(
    ("body", "named"),
    [({"messages": []}, "messages"), ({"messages": [{"role": "user"}]}, "messages"),
     ({"messages": [{"role": "wizard", "content": "a"}]}, "messages: .*wizard.*developer"),
     ({"top_logprobs": 1}, "top_logprobs"), ({"max_completion_tokens": 99}, "context")],
)  # fmt: skip
def test_bad_conversations_are_refused(client, body, named):
    error = refused(client, path=PATH, **BODY | body)
    assert re.search(named, f"{error['param']}: {error['message']} {error['code']}")
