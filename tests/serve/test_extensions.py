"""Fields of vLLM and llama.cpp beyond OpenAI's."""

import jinja2
import pytest
import torch
import transformers
from starlette.testclient import TestClient

from tests.serve.conftest import LIMITS
from tests.serve.test_completions import complete, events, refused
from tiedgpt.data import TEMPLATES
from tiedgpt.data.templates import write_template
from tiedgpt.infer import Engine
from tiedgpt.serve.app import create_app

CHAT = "/v1/chat/completions"
MESSAGES = [
    {"role": "system", "content": "cat"},
    {"role": "user", "content": "the dog"},
    {"role": "assistant", "content": "sat on"},
]


@pytest.fixture(scope="module")
def client(engine):
    app = create_app(engine, name="tiny", limits=LIMITS, template=TEMPLATES["plain"])
    return TestClient(app, base_url="http://127.0.0.1")


@pytest.fixture(scope="module")
def peer(engine, tmp_path_factory):
    """The tokenizer in transformers, with the template."""
    directory = tmp_path_factory.mktemp("tokenizer")
    engine.tokenizer.save_pretrained(directory)
    write_template(TEMPLATES["plain"], engine.tokenizer, directory)
    return transformers.AutoTokenizer.from_pretrained(directory)


def texts(client, path, body):
    """Return the text and the end of an answer and of a stream."""
    answer = client.post(path, json=body).json()["choices"][0]
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        choices = [chunk["choices"][0] for chunk in events(response)]
    if path == CHAT:
        answer = answer | {"text": answer["message"]["content"]}
        choices = [choice | {"text": choice["delta"].get("content", "")} for choice in choices]
    streamed = choices[-1] | {"text": "".join(choice["text"] for choice in choices)}
    names = ("text", "finish_reason", "stop_reason")
    return [tuple(choice[name] for name in names) for choice in (answer, streamed)]


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_the_reason_of_a_stop_is_told(client, engine, path):
    body = {"prompt": "the cat"} if path != CHAT else {"messages": MESSAGES[:2]}
    body |= {"max_tokens": 12, "temperature": 1, "seed": 4}
    ask = client.post(path, json=body | {"return_token_ids": True}).json()["choices"][0]
    ids, text = ask["token_ids"], engine.tokenizer.decode(ask["token_ids"])
    letter = next(character for character in text if character.isascii())
    at, eos = text.index(letter), engine.tokenizer.eos_token_id
    first = engine.tokenizer.decode(ids[: ids.index(ids[2])])
    table = [
        ({}, (text, "length", None)),
        ({"stop": ["@@@"] * 63 + [letter]}, (text[:at], "stop", letter)),
        ({"stop": letter, "include_stop_str_in_output": True}, (text[: at + 1], "stop", letter)),
        ({"stop_token_ids": [ids[2]]}, (first, "stop", ids[2])),
        ({"logit_bias": {str(eos): 100}}, ("", "stop", None)),
        ({"logit_bias": {str(eos): 100}, "ignore_eos": True}, ("", "length", None)),
    ]
    for more, expected in table:
        assert texts(client, path, body | more) == [expected] * 2, more


def test_min_tokens_is_the_least_length(client, engine):
    bias = {str(engine.tokenizer.eos_token_id): 100}
    body = {"prompt": "the cat", "max_tokens": 9, "temperature": 0, "logit_bias": bias}
    counts = [complete(client, **body, min_tokens=n)["usage"]["completion_tokens"] for n in (0, 5)]
    assert counts == [1, 6]


def test_token_ids_of_prompt_and_text_are_returned(client, engine):
    body = {"temperature": 0, "max_tokens": 5, "return_token_ids": True}
    ours = engine.generate("the cat", max_new_tokens=5, temperature=0).ids
    prompt = engine.tokenizer.encode("the cat")
    choice = complete(client, prompt="the cat", **body)["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, ours)
    streamed = {"prompt": "the cat", **body, "stream": True}
    with client.stream("POST", "/v1/completions", json=streamed) as response:
        choices = [chunk["choices"][0] for chunk in events(response)]
    assert [choice.get("prompt_token_ids") for choice in choices] == [prompt] + [None] * 5
    assert [id for choice in choices for id in choice["token_ids"]] == ours
    chat = client.post(CHAT, json={"messages": MESSAGES[:2], **body}).json()
    assert chat["usage"]["prompt_tokens"] == len(chat["prompt_token_ids"])
    with client.stream("POST", CHAT, json={"messages": MESSAGES[:2], **body, "stream": True}) as r:
        chunks = events(r)
    assert [c.get("prompt_token_ids") for c in chunks] == [chat["prompt_token_ids"]] + [None] * 5
    streamed = [id for chunk in chunks for id in chunk["choices"][0]["token_ids"]]
    assert streamed == chat["choices"][0]["token_ids"]


def test_tokens_are_written_as_ids_in_chat_too(client):
    body = {"messages": MESSAGES[:2], "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    answer = client.post(CHAT, json=body | {"return_tokens_as_token_ids": True}).json()
    for token in answer["choices"][0]["logprobs"]["content"]:
        for one in (token, *token["top_logprobs"]):
            assert one["token"] == f"token_id:{one['token_id']}"


@pytest.mark.parametrize(
    ("n", "fields"),
    [
        (2, {}),
        (2, {"add_generation_prompt": True}),
        (2, {"add_generation_prompt": False}),
        (3, {"add_generation_prompt": False}),
        (3, {"continue_final_message": True}),
        (1, {"continue_final_message": True, "add_generation_prompt": False}),
    ],
)
def test_prompts_of_conversations_equal_transformers(client, peer, n, fields):
    is_open = fields.get("continue_final_message", False)
    adds = fields.get("add_generation_prompt", not is_open)
    expected = peer.apply_chat_template(
        MESSAGES[:n], add_generation_prompt=adds, continue_final_message=is_open, tokenize=True,
        return_dict=True,
    )["input_ids"]  # fmt: skip
    tokens = client.post("/tokenize", json={"messages": MESSAGES[:n], **fields}).json()
    assert (tokens["tokens"], tokens["count"]) == (expected, len(expected))
    body = {"messages": MESSAGES[:n], **fields, "return_token_ids": True, "max_tokens": 2}
    assert client.post(CHAT, json=body).json()["prompt_token_ids"] == expected


def test_a_message_is_continued_or_answered_and_not_both(client):
    body = {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True}
    for path in (CHAT, "/tokenize"):
        assert refused(client, path=path, **body)["param"] == "continue_final_message"
    for body in ({}, {"prompt": "a", "messages": MESSAGES}):
        assert refused(client, path="/tokenize", **body)["param"] == "prompt"


def test_the_tokenizer_describes_itself(client, peer, engine):
    info = client.get("/tokenizer_info").json()
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (info["eos_token"], info["vocab_size"]) == (peer.eos_token, len(peer))
    template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(
        info["chat_template"]
    )
    for adds in (True, False):
        rendered = template.render(messages=MESSAGES, add_generation_prompt=adds)
        assert rendered == peer.apply_chat_template(
            MESSAGES, add_generation_prompt=adds, tokenize=False
        )
    tokens = client.post("/tokenize", json={"prompt": "the cat", "return_token_strs": True}).json()
    assert tokens["token_strs"] == [peer.decode([id]) for id in tokens["tokens"]]


def test_embeddings_are_truncated_and_normalized_as_asked(client, engine):
    def embed(text, **fields):
        answer = client.post("/v1/embeddings", json={"input": text, **fields}).json()
        return torch.tensor(answer["data"][0]["embedding"]), answer["usage"]["prompt_tokens"]

    ids = list(range(5, 65))  # longer than the context
    h = engine.model.body(torch.tensor([ids[:7]]))[0].mean(0)
    raw, n_tokens = embed(ids, truncate_prompt_tokens=7, normalize=False)
    torch.testing.assert_close(raw, h, atol=1e-5, rtol=1e-5)
    assert n_tokens == 7 and embed(ids, truncate_prompt_tokens=-1)[1] == 48
    unit, _ = embed(ids, truncate_prompt_tokens=7)
    torch.testing.assert_close(unit, h / h.norm(), atol=1e-5, rtol=1e-5)
    assert refused(client, path="/v1/embeddings", input=ids)["param"] == "input"


def test_cached_tokens_are_those_of_the_slot(directory):
    body = {"prompt": list(range(5, 42)), "max_tokens": 2}
    with Engine(directory, queue_size=8) as engine:
        client = TestClient(create_app(engine, limits=LIMITS), base_url="http://127.0.0.1")
        usages = [complete(client, **body)["usage"] for _ in range(2)]
        tokens = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert tokens == [0, 36]
        more = {"stream": True, "stream_options": {"include_usage": True}}
        with client.stream("POST", "/v1/completions", json=body | more) as response:
            assert events(response)[-1]["usage"] == usages[1]


def test_an_echo_that_times_out_has_no_logprobs(client):
    answer = complete(client, prompt="the cat sat", echo=True, logprobs=2, timeout=0.0)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None] * len(logprobs["tokens"])
    assert answer["choices"][0]["text"] == "the cat sat"
