"""Special tokens: those that a tokenizer puts before a text, and those of a text."""

import pytest
import tokenizers
import transformers
from starlette.testclient import TestClient

from tests.models import TEXT, opinionated
from tests.serve.conftest import LIMITS
from tests.serve.test_completions import complete
from tests.serve.test_extensions import texts
from tiedgpt import Tokenizer
from tiedgpt.data import TEMPLATES
from tiedgpt.infer import Engine
from tiedgpt.serve.app import create_app

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "the dog"}
TEXTS = ["the cat", "", "naïve 日本"]


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """A tokenizer in transformers that begins each text with its end-of-text token."""
    directory = tmp_path_factory.mktemp("beginning")
    tokenizer = Tokenizer.train([TEXT], 300).with_special_tokens(["<|part|>"])
    rust = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    rust.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(directory)
    rust.save(str(directory / "tokenizer.json"))
    return transformers.AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def client(peer):
    tokenizer = Tokenizer.from_pretrained(peer.name_or_path)
    assert tokenizer.begin_ids == [peer.eos_token_id]
    with Engine(opinionated(tokenizer), tokenizer=tokenizer, slots=2, queue_size=8) as engine:
        app = create_app(engine, name="tiny", limits=LIMITS, template=TEMPLATES["plain"])
        yield TestClient(app, base_url="http://127.0.0.1")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("adds", [None, True, False])
def test_a_text_begins_as_in_transformers(client, peer, text, adds):
    expected = peer(text, add_special_tokens=adds is not False)["input_ids"]
    body = {"prompt": text, "add_special_tokens": adds}
    assert client.post("/tokenize", json=body).json()["tokens"] == expected
    expected = expected or [peer.eos_token_id]  # a model reads at least one token
    choice = complete(client, **body, return_token_ids=True, max_tokens=1)["choices"][0]
    assert choice["prompt_token_ids"] == expected
    for more in ({}, {"truncate_prompt_tokens": -1}):
        body = {"input": text, "add_special_tokens": adds, **more}
        usage = client.post("/v1/embeddings", json=body).json()["usage"]
        assert usage["prompt_tokens"] == len(expected)


@pytest.mark.parametrize("adds", [None, True, False])
def test_a_conversation_begins_with_a_special_token_only_if_asked(client, peer, adds):
    text = "User: the dog\n\nAssistant:"
    expected = peer(text, add_special_tokens=adds is True)["input_ids"]
    body = {"messages": [USER], "add_special_tokens": adds}
    assert client.post("/tokenize", json=body).json()["tokens"] == expected
    answer = client.post(CHAT, json=body | {"return_token_ids": True, "max_tokens": 1}).json()
    assert answer["prompt_token_ids"] == expected
    body = {"input": [USER], "add_special_tokens": adds, "max_output_tokens": 1}
    usage = client.post("/v1/responses", json=body).json()["usage"]
    assert usage["input_tokens"] == len(expected)


@pytest.mark.parametrize(
    ("prompt", "more", "begins"),
    [("the cat", {}, [0, 0, 3]), ("the cat", {"add_special_tokens": False}, [0, 3]),
     ("<|endoftext|>the cat", {"allow_special": True}, [0, 13, 16])],
)  # fmt: skip
def test_offsets_are_those_of_the_echo(client, prompt, more, begins):
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 3, "temperature": 0}
    choice = complete(client, **body, **more)["choices"][0]
    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    assert choice["text"].startswith(prompt) and offsets[: len(begins)] == begins
    assert offsets[len(begins)] == len(prompt) and offsets == sorted(offsets)
    for at, name in zip(begins[1:], tokens[1 : len(begins)], strict=True):
        assert choice["text"].startswith(name, at)


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
@pytest.mark.parametrize("skips", [None, False, True])
def test_special_tokens_are_left_out_of_a_text_as_in_transformers(client, peer, path, skips):
    special_id = peer.convert_tokens_to_ids("<|part|>")
    body = {"prompt": "the cat"} if path != CHAT else {"messages": [USER]}
    bias = {str(id): 90 for id in (special_id, *peer.encode("the cat", add_special_tokens=False))}
    body |= {"logit_bias": bias, "max_tokens": 24, "temperature": 0, "frequency_penalty": 2}
    answer = client.post(path, json=body | {"return_token_ids": True}).json()
    ids = answer["choices"][0]["token_ids"]
    assert 2 <= ids.count(special_id) <= 20
    expected = peer.decode(ids, skip_special_tokens=bool(skips))
    more = {} if skips is None else {"skip_special_tokens": skips}
    assert texts(client, path, body | more) == [(expected, "length", None)] * 2
    stop = {"stop_token_ids": [special_id], "include_stop_str_in_output": True}
    cut = ids[: ids.index(special_id) + 1]
    expected = peer.decode(cut, skip_special_tokens=bool(skips))
    assert texts(client, path, body | more | stop) == [(expected, "stop", special_id)] * 2
