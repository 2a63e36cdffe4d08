"""Requests as other programs send them: null, default, label and unknown fields, whole bodies."""

import inspect
import json
import re
import time

import pytest
from starlette.testclient import TestClient

from tests.serve.conftest import LIMITS, Running
from tests.serve.test_completions import events, refused
from tiedgpt.data import TEMPLATES
from tiedgpt.serve.app import create_app

openai = pytest.importorskip("openai")
types = openai.types.chat
OPENAI = openai.OpenAI(api_key="none", base_url="http://127.0.0.1")
USER = {"role": "user", "content": "the dog"}
ROUTES = {
    "/v1/completions": (
        OPENAI.completions, {"prompt": "the cat", "max_tokens": 4, "temperature": 0}
    ),
    "/v1/chat/completions": (
        OPENAI.chat.completions, {"messages": [USER], "max_tokens": 4, "temperature": 0}
    ),
    "/v1/embeddings": (OPENAI.embeddings, {"input": "the cat"}),
    "/v1/responses": (
        OPENAI.responses, {"input": "the dog", "max_output_tokens": 4, "temperature": 0}
    ),
}  # fmt: skip
NO_BODY = {"extra_headers", "extra_query", "extra_body", "timeout"}
PARAMETERS = [
    (path, name)
    for path, (resource, _) in ROUTES.items()
    for name in inspect.signature(resource.create).parameters
    if name not in NO_BODY
]
"""Every field of the installed client's methods."""


@pytest.fixture(scope="module")
def client(engine):
    app = create_app(engine, name="tiny", limits=LIMITS, template=TEMPLATES["plain"])
    return TestClient(app, base_url="http://127.0.0.1")


def text_of(answer):
    """Return the text of an answer, or its vector."""
    if "output" in answer:
        return answer["output"][0]["content"][0]["text"]
    if answer["object"] == "list":
        return answer["data"][0]["embedding"]
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def same(client, path, more):
    """Require the answer of a request to be that of the request without some fields."""
    body = ROUTES[path][1]
    response = client.post(path, json=body | more)
    assert response.status_code == 200, response.text
    assert text_of(response.json()) == text_of(client.post(path, json=body).json())


@pytest.mark.parametrize(("path", "name"), PARAMETERS)
def test_null_is_absent(client, path, name):
    if name in ROUTES[path][1]:
        body = ROUTES[path][1] | {name: None}
        absent = {field: value for field, value in body.items() if value is not None}
        assert (
            client.post(path, json=body).status_code == client.post(path, json=absent).status_code
        )
    else:
        same(client, path, {name: None})


INNER_NULLS = [
    {"unknown": None},
    {"logit_bias": {"5": None}},
    {"stop": [None]},
    {"stream_options": {"include_usage": None, "unknown": None}},
    {"response_format": {"type": "text", "json_schema": None, "unknown": None}},
    {"messages": [USER | {"name": None, "unknown": None, "tool_calls": None}]},
    {"messages": [USER | {"content": [
        {"type": "text", "text": "the dog", "annotations": None, "unknown": None}
    ]}]},
]  # fmt: skip


@pytest.mark.parametrize("more", INNER_NULLS, ids=str)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_null_is_absent_at_every_level(client, path, more):
    if "messages" not in more or "chat" in path:
        same(client, path, more)


def test_null_in_a_json_schema_is_a_value(client):
    pytest.importorskip("llguidance")
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"enum": [None]}},
    }
    answer = client.post(
        "/v1/completions", json={"prompt": "a", "response_format": response_format}
    ).json()
    assert json.loads(text_of(answer)) is None


GENERATION = [
    {"n": 1}, {"stream": False}, {"stop": []}, {"logit_bias": {}}, {"top_p": 1}, {"top_p": 1.0},
    {"presence_penalty": 0, "frequency_penalty": 0.0}, {"stream_options": {}},
    {"response_format": {"type": "text"}},
    {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "bad_words": []},
    {"top_k": 0}, {"top_k": -1}, {"min_p": 0.0, "repetition_penalty": 1.0}, {"ignore_eos": False},
    {"stop_token_ids": [], "min_tokens": 0, "include_stop_str_in_output": False},
    {"return_token_ids": False, "allowed_token_ids": [], "add_special_tokens": True},
    {"priority": 0, "request_id": "a", "cache_salt": "b", "skip_special_tokens": False},
    {"skip_special_tokens": True, "spaces_between_special_tokens": True},
    {"cache_prompt": True, "id_slot": -1, "typical_p": 1.0, "mirostat": 0, "n_keep": 0},
    {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
    {"safety_identifier": "me", "prompt_cache_key": "k", "prompt_cache_retention": "24h"},
]  # fmt: skip
CHAT = [
    {"tools": []}, {"functions": []}, {"tool_choice": "none"}, {"function_call": "none"},
    {"tool_choice": "auto", "parallel_tool_calls": True}, {"modalities": ["text"]},
    {"verbosity": "low", "reasoning_effort": "medium"}, {"logprobs": False, "top_logprobs": 0},
    {"prediction": {"type": "content", "content": "the"}}, {"add_generation_prompt": True},
    {"continue_final_message": False, "chat_template_kwargs": {"enable_thinking": False}},
    {"echo": False, "include_reasoning": True},
]  # fmt: skip
WITHOUT_EFFECT = {
    "/v1/completions": [*GENERATION, {"best_of": 1}, {"echo": False}, {"suffix": ""}],
    "/v1/chat/completions": GENERATION + CHAT,
    "/v1/embeddings": [
        {"user": "me"}, {"encoding_format": "float"}, {"dimensions": 32}, {"normalize": True},
        {"truncate_prompt_tokens": -1}, {"add_special_tokens": True},
    ],
    "/v1/responses": [
        {"store": True}, {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"background": False, "truncation": "disabled", "reasoning": {"effort": "low"}},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}, "service_tier": "auto"},
        {"include": ["reasoning.encrypted_content"], "user": "me", "metadata": {"a": "b"}},
        {"text": {"format": {"type": "text"}}, "response_format": {"type": "text"}},
        {"input": [USER]}, {"input": [{"type": "message", **USER}]}, {"top_logprobs": 0},
        {"return_token_ids": False},
        {"input": [USER | {"content": [{"type": "input_text", "text": "the dog"}]}]},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "more"), [(path, more) for path, rows in WITHOUT_EFFECT.items() for more in rows],
    ids=str,
)  # fmt: skip
def test_defaults_and_labels_are_accepted(client, path, more):
    same(client, path, more)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
REFUSED = {
    "/v1/completions": [
        ("best_of", 2, "not supported: use n"), ("tools", 2, "not supported: .*response_format"),
        ("logprob_token_ids", 2, "inspect positions"), ("wizard", 2, "a field of this request$"),
        ("suffix", "x", "prompt"), ("use_beam_search", True, "num_beams"),
        ("stream_options", {"include_usage": True}, "stream"), ("messages", [], "/v1/chat"),
        ("min_tokens", 5, "5 is more than 4"), ("prompt_logprobs", 1, "echo"),
    ],
    "/v1/chat/completions": [
        ("tools", [TOOL], "response_format"), ("tool_choice", "required", "response_format"),
        ("modalities", ["text", "audio"], "text"), ("audio", {"voice": "a"}, "text"),
        ("service_tier", "priority", "one"), ("web_search_options", {}, "prompt"),
        ("moderation", {"model": "m"}, "yourself"), ("prompt", "a", "/v1/completions"),
        ("messages", [USER | {"tool_calls": [TOOL]}], "tools"),
        ("messages", [USER | {"content": [{"type": "image_url"}]}], "text"),
        ("messages", [USER, {"object": "chat.completion", "choices": [{"message": USER}]}],
         r"^messages\.1 .*choices\[0\]\.message"),
        ("messages", [USER, {"index": 0, "message": USER}], r"^messages\.1 .*the message alone"),
        ("messages", [{"role": "user", "text": "a"}], r"^messages\.0 .*content"),
    ],
    "/v1/embeddings": [("dimensions", 31, "32")],
    "/v1/responses": [
        ("previous_response_id", "resp_1", "earlier messages"), ("background", True, "stream"),
        ("conversation", "conv_1", "earlier messages"), ("tools", [TOOL], "response_format"),
        ("truncation", "auto", "shorten"), ("input", 5, "messages"), ("n", 2, "1"),
        ("input", [{"type": "function_call_output", "call_id": "a", "output": "b"}], ""),
        ("input", [USER | {"content": [{"type": "input_image"}]}], "content.*text"),
        ("input", [USER, {"object": "response", "created_at": 1, "output": [USER]}],
         r"^input\.1 .*items of the answer's output"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "name", "value", "remedy"),
    [(path, *row) for path, rows in REFUSED.items() for row in rows], ids=str,
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_what_to_do(client, path, name, value, remedy):
    error = refused(client, path=path, **ROUTES[path][1] | {name: value})
    assert error["param"].split(".")[0] == name
    assert re.search(remedy, error["message"])


@pytest.mark.parametrize(
    ("path", "name", "nearest"),
    [
        *(("/v1/completions", *row) for row in [
            ("max_token", "max_tokens"), ("temprature", "temperature"), ("topk", "top_k"),
            ("top_K", "top_k"), ("stops", "stop"), ("maxTokens", "max_tokens"),
            ("n_predict", "max_tokens"), ("max_completion_tokens", "max_tokens"),
            ("repeat_penalty", "repetition_penalty"), ("stop_ids", "stop_token_ids"),
            ("guided_json", "json_schema"), ("stop_str", "stop"), ("max_new_tokens", "max_tokens"),
            ("num_return_sequences", "n"),
        ]),
        ("/v1/chat/completions", "max_completion_token", "max_completion_tokens"),
        ("/v1/chat/completions", "max_output_tokens", "max_tokens"),
        ("/v1/chat/completions", "message", "messages"),
        ("/v1/responses", "max_tokens", "max_output_tokens"),
        ("/v1/responses", "instruction", "instructions"),
        ("/v1/embeddings", "inputs", "input"),
        ("/v1/embeddings", "encoding", "encoding_format"),
        ("/tokenize", "promt", "prompt"),
        ("/inspect/positions", "replace_att", "replace_at"),
    ],
)  # fmt: skip
def test_an_unknown_field_gets_the_nearest_known_name(client, path, name, nearest):
    body = ROUTES[path][1] if path in ROUTES else {}
    error = refused(client, path=path, **body | {name: 1})
    assert error["param"] == name and error["message"].endswith(f": use {nearest}"), error


def test_an_unknown_field_of_a_message_gets_its_path(client):
    body = {"messages": [USER, {"role": "user", "content": "a", "contents": "b"}]}
    error = refused(client, path="/v1/chat/completions", **body)
    assert error["param"] == "messages.1.contents" and error["message"].endswith(": use content"), (
        error
    )


STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
PARTS = {"role": "user", "content": [{"type": "text", "text": "the dog"}]}
BODIES = {
    "guidellm, completions": ("/v1/completions", {
        "model": "tiny", "stream": True, "stream_options": CONTINUOUS, "max_tokens": 4,
        "stop": None, "ignore_eos": True, "prompt": "the cat",
    }),
    "guidellm, chat": ("/v1/chat/completions", {
        "model": "tiny", "stream": True, "stream_options": CONTINUOUS, "stop": None,
        "max_completion_tokens": 4, "ignore_eos": True, "messages": [PARTS],
    }),
    "vllm bench serve, completions": ("/v1/completions", {
        "model": "tiny", "prompt": "the cat", "repetition_penalty": 1.0, "max_tokens": 4,
        "logprobs": None, "ignore_eos": True, "temperature": 0.0, **STREAM,
    }),
    "vllm bench serve, chat": ("/v1/chat/completions", {
        "model": "tiny", "messages": [PARTS], "max_completion_tokens": 4, "ignore_eos": True,
        "temperature": 0.0, **STREAM,
    }),
    "lm-eval, scoring": ("/v1/completions", {
        "model": "tiny", "prompt": [[5, 6, 7], [5, 6, 8, 9]], "temperature": 0, "max_tokens": 1,
        "logprobs": 1, "seed": 1234, "echo": True,
    }),
    "lm-eval, generation": ("/v1/completions", {
        "prompt": [[5, 6, 7]], "model": "tiny", "max_tokens": 4, "temperature": 0,
        "stop": ["\n\n", "Q:", "</s>", "<|im_end|>", "<|endoftext|>"], "seed": 1234,
    }),
    "lm-eval, chat": ("/v1/chat/completions", {
        "messages": [{"type": "text", **USER}], "model": "tiny", "max_tokens": 4,
        "temperature": 0, "stop": ["<|endoftext|>"], "seed": 1234,
    }),
    "langchain, completions": ("/v1/completions", {
        "model": "tiny", "prompt": ["the cat"], "frequency_penalty": 0, "max_tokens": 4, "n": 1,
        "presence_penalty": 0, "temperature": 0.7, "top_p": 1, "logit_bias": None, "seed": None,
        "logprobs": None, "stop": None,
    }),
    "langchain, chat": ("/v1/chat/completions", {
        "messages": [{"content": "cat", "role": "system"}, {"content": "dog", "role": "user"}],
        "model": "tiny", "stream": True, "temperature": 0.0, "max_completion_tokens": 4,
        "stream_options": {"include_usage": True},
    }),
    "langchain, responses": ("/v1/responses", {
        "input": [{"content": "the dog", "role": "user", "type": "message"}], "model": "tiny",
        "max_output_tokens": 4, "temperature": 0.0, "stream": True,
    }),
    "litellm": ("/v1/chat/completions", {
        "model": "tiny", "messages": [
            {"role": "system", "content": [{
                "type": "text", "text": "cat", "cache_control": {"type": "ephemeral"}
            }]},
            {"role": "user", "content": "dog"},
        ],
        "max_tokens": 4, "temperature": 0.2, "user": "u", "stream": True,
        "stream_options": {"include_usage": True},
    }),
    "AI SDK, chat": ("/v1/chat/completions", {
        "model": "tiny", "messages": [{"role": "system", "content": "cat"}, USER],
        "max_tokens": 4, "temperature": 0, "stop": ["\n"], **STREAM,
    }),
    "AI SDK, object": ("/v1/chat/completions", {
        "model": "tiny", "messages": [PARTS], "max_completion_tokens": 4, "reasoning_effort": None,
        "response_format": {"type": "json_schema", "json_schema": {
            "schema": {"enum": [1, 2]}, "strict": True, "name": "response", "description": None,
        }}, "store": False,
    }),
    "AI SDK, responses": ("/v1/responses", {
        "model": "tiny", "input": [
            {"role": "developer", "content": "cat"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "a"}], "id": "msg_1"},
            {"role": "user", "content": [{"type": "input_text", "text": "the dog"}]},
        ],
        "temperature": 0, "max_output_tokens": 4, "store": True, "text": {"verbosity": "low"},
        "stream": True, "include": ["reasoning.encrypted_content"],
    }),
    "llama.cpp's page": ("/v1/chat/completions", {
        "messages": [USER], "stream": True, "reasoning_format": "auto", "temperature": 0.8,
        "max_tokens": 4, "dynatemp_range": 0, "top_k": 40, "top_p": 0.95, "min_p": 0.05,
        "xtc_probability": 0, "xtc_threshold": 0.1, "typical_p": 1, "presence_penalty": 0,
        "frequency_penalty": 0, "dry_multiplier": 0, "timings_per_token": True,
        "return_progress": True,
    }),
}  # fmt: skip
"""Bodies that programs send by default, with small lengths."""


@pytest.mark.parametrize("program", BODIES)
def test_what_programs_send_by_default_is_answered(client, program):
    if "json_schema" in str(BODIES[program]):
        pytest.importorskip("llguidance")
    path, body = BODIES[program]
    if not body.get("stream"):
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        return
    with client.stream("POST", path, json=body) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
        assert response.status_code == 200, lines
    last = json.loads(lines[-1].removeprefix("data: "))
    if path == "/v1/responses":
        assert last["response"]["usage"]["output_tokens"] <= 4
    if body.get("ignore_eos"):
        assert last["usage"]["completion_tokens"] == 4


WRITTEN = [
    types.ChatCompletionMessage(role="assistant", content="sat").model_dump(),
    types.ChatCompletionMessage(role="assistant", content=None).model_dump(),
    types.ChatCompletionMessage(role="assistant", refusal="no", annotations=[]).model_dump(),
    types.chat_completion_chunk.ChoiceDelta(role="assistant", content="sat").model_dump(),
    {"role": "assistant", "content": ""}, {"role": "assistant", "tool_calls": []},
    {"role": "assistant", "content": "sat", "refusal": "", "function_call": None, "audio": None},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
]  # fmt: skip


@pytest.mark.parametrize("message", WRITTEN, ids=str)
def test_messages_that_servers_write_are_accepted_back(client, message):
    body = {"messages": [USER, message, USER], "max_tokens": 2}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text


def test_a_refusal_is_the_assistants_text(client):
    def n_tokens(message):
        body = {"messages": [USER, {"role": "assistant", **message}]}
        return client.post("/tokenize", json=body).json()["tokens"]

    written = n_tokens({"content": "no"})
    assert n_tokens({"content": None, "refusal": "no"}) == written
    assert n_tokens({"content": [{"type": "refusal", "refusal": "no"}]}) == written


def test_the_clients_second_turn_repeats_the_first_answer(engine):
    options = {"model": "tiny", "max_tokens": 3, "temperature": 0, "seed": 1}
    with (
        Running(engine, template=TEMPLATES["plain"]) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        create = client.chat.completions.create
        first = create(messages=[USER], **options).choices[0].message
        second = create(messages=[USER, first, USER], **options)
        assert create(messages=[USER, first.to_dict(), USER], **options).usage == second.usage
        with client.chat.completions.stream(messages=[USER], **options) as stream:
            for _ in stream:
                streamed = stream.current_completion_snapshot.choices[0].message
        assert streamed.content == first.content
        again = create(messages=[USER, streamed, USER], **options)
        assert again.choices[0].message.content == second.choices[0].message.content


def test_the_first_event_comes_when_the_prompt_has_been_read(engine, monkeypatch):
    """The time to the first event is the time to the first token."""
    session = type(engine.runner.session(n_slots=1, capacity=8))
    read, n_read = session.read, []

    def slowly(self, *arguments, **named):
        time.sleep(0.1)
        n_read.append(1)
        return read(self, *arguments, **named)

    monkeypatch.setattr(session, "read", slowly)
    with (
        Running(engine, template=TEMPLATES["plain"]) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for create, body in (
            (client.chat.completions.create, {"messages": [USER]}),
            (client.completions.create, {"prompt": "the cat", "echo": True}),
        ):
            n_read.clear()
            stream = create(model="tiny", max_tokens=2, stream=True, **body)
            next(stream)
            assert n_read
            assert [c.choices[0].finish_reason for c in stream][-1]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_of_every_event_counts_the_tokens_so_far(client, path):
    body = ROUTES[path][1] | {
        "stream": True, "stream_options": CONTINUOUS, "ignore_eos": True, "return_token_ids": True
    }  # fmt: skip
    with client.stream("POST", path, json=body) as response:
        *chunks, last = events(response)
    ids = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [sum(ids[: at + 1]) for at in range(len(ids))]
    assert counts[-1] == last["usage"]["completion_tokens"] == 4
    assert chunks[-1]["choices"][0]["finish_reason"] == "length" and ids[-1] == 1
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0


def test_a_request_id_is_echoed(client):
    for sent, echoed in (("abc-1", True), ("a b", False), ("x" * 129, False)):
        response = client.get("/version", headers={"X-Request-Id": sent})
        assert (response.headers["x-request-id"] == sent) == echoed
