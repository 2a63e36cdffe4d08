"""/v1/completions returns the engine's results."""

import json
import threading

import pytest
from starlette.testclient import TestClient

from tests.infer.option_values import BAD_VALUES, SAMPLING
from tests.models import opinionated
from tiedgpt.cli.options import option_fields
from tiedgpt.infer import Engine, GenerationConfig
from tiedgpt.serve.app import create_app
from tiedgpt.serve.guards import Limits

PROMPT = "the cat sat"


def complete(client, **body):
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(client, status=400, path="/v1/completions", **body):
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def events(response):
    lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_completion_equals_the_engines(client, engine):
    ours = engine.generate(PROMPT, max_new_tokens=6, seed=3)
    answer = complete(client, prompt=PROMPT, max_tokens=6, seed=3)
    (choice,) = answer["choices"]
    assert choice["text"] == ours.text and choice["logprobs"] is None
    n = len(engine.tokenizer.encode(PROMPT))
    assert answer["usage"] == {
        "prompt_tokens": n, "completion_tokens": len(ours.ids), "total_tokens": n + len(ours.ids),
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"


def test_n_texts_of_one_seed_equal_the_engines(client, engine):
    ours = engine.generate([PROMPT, "the dog"], n=2, max_new_tokens=5, seed=1)
    answer = complete(client, prompt=[PROMPT, "the dog"], n=2, max_tokens=5, seed=1)
    assert [c["text"] for c in answer["choices"]] == [c.text for group in ours for c in group]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("form", ["text", "ids", "texts", "lists"])
def test_prompts_may_be_text_ids_or_lists_of_either(client, engine, form):
    ids = engine.tokenizer.encode(PROMPT)
    prompt = {"text": PROMPT, "ids": ids, "texts": [PROMPT] * 2, "lists": [ids] * 2}[form]
    answer = complete(client, prompt=prompt, max_tokens=4, temperature=0)
    ours = engine.generate(PROMPT, max_new_tokens=4, temperature=0).text
    assert [c["text"] for c in answer["choices"]] == [ours] * (1 + form.endswith("ts"))


def test_prompt_logprobs_equal_those_of_the_whole_text(client, engine):
    """And the second time, when the prefix is in a slot, they are the same numbers."""
    text = "the cat sat on the mat. naïve 日本"
    ids = engine.tokenizer.encode(text)
    scored = engine.score(text)
    for _ in range(2):
        answer = complete(client, prompt=ids, max_tokens=1, logprobs=1, echo=True, temperature=0)
        found = answer["choices"][0]["logprobs"]
        assert found["token_ids"][:-1] == ids and len(found["tokens"]) == len(ids) + 1
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:-1] == pytest.approx(scored.logprobs, abs=1e-5)
        greedy = [
            max(top.values()) == own
            for top, own in zip(
                found["top_logprobs"][1:-1], found["token_logprobs"][1:-1], strict=True
            )
        ]
        assert greedy == [rank == 1 for rank in scored.ranks]


def test_offsets_are_the_tokens_positions_in_the_text(client):
    choice = complete(
        client, prompt="naïve 日本", max_tokens=5, echo=True, logprobs=2, temperature=0
    )["choices"][0]
    text, found = choice["text"], choice["logprobs"]
    ends = [*found["text_offset"][1:], len(text)]
    for name, begin, end in zip(found["tokens"], found["text_offset"], ends, strict=True):
        if not name.startswith("bytes:") and name != "<|endoftext|>":
            assert text[begin:end].startswith(name)
    assert any(name.startswith("bytes:\\x") for name in found["tokens"])


def test_the_end_of_text_in_a_prompt_is_text_unless_special_tokens_are_parsed(client, engine):
    prompt = f"{PROMPT}<|endoftext|>{PROMPT}"
    for allow_special in (False, True):
        asked = {"allow_special": True} if allow_special else {}
        answer = complete(client, prompt=prompt, max_tokens=0, echo=True, logprobs=0, **asked)
        ids = engine.tokenizer.encode(prompt, allow_special=allow_special)
        assert (engine.tokenizer.eos_token_id in ids) == allow_special
        assert answer["usage"]["prompt_tokens"] == len(ids)
        assert answer["choices"][0]["text"] == prompt


def test_max_tokens_0_scores_and_writes_nothing(client, engine):
    answer = complete(client, prompt=PROMPT, max_tokens=0, logprobs=0, echo=True)
    (choice,) = answer["choices"]
    assert choice["text"] == PROMPT and answer["usage"]["completion_tokens"] == 0
    n_prompt = len(engine.tokenizer.encode(PROMPT))
    assert len(choice["logprobs"]["token_logprobs"]) == n_prompt
    assert choice["logprobs"]["top_logprobs"] is None


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("max_tokens", [9, 0])
def test_a_stream_joins_to_the_completion(client, echo, max_tokens):
    body = {"prompt": [PROMPT, "naïve"], "n": 2, "max_tokens": max_tokens, "seed": 2}
    body |= {"logprobs": 2, "echo": echo}
    whole = complete(client, **body)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/completions", json=body | options) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, last = events(response)
    assert not echo or "".join(c["text"] for c in whole["choices"]).count(PROMPT) == 2
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert [p["finish_reason"] for p in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        for column in ("token_ids", "token_logprobs", "text_offset", "top_token_ids"):
            streamed = [x for p in mine if p["logprobs"] for x in p["logprobs"][column]]
            expected = choice["logprobs"][column]
            if column == "token_logprobs":  # torch rounds otherwise in a batch of another size
                expected = pytest.approx(expected, abs=1e-5)
            assert streamed == expected


def test_an_echo_is_streamed_first(client):
    body = {"prompt": PROMPT, "max_tokens": 3, "stream": True, "echo": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert events(response)[0]["choices"][0]["text"] == PROMPT


def test_stop_bias_and_constraints_are_followed(client):
    pytest.importorskip("llguidance")
    whole = complete(client, prompt=PROMPT, max_tokens=9, temperature=0)["choices"][0]["text"]
    stop = whole[3:5]
    cut = complete(client, prompt=PROMPT, max_tokens=9, temperature=0, stop=[stop])["choices"][0]
    assert cut["text"] == whole[: whole.index(stop)] and cut["finish_reason"] == "stop"
    same = complete(client, prompt=PROMPT, max_tokens=3, logit_bias={"7": 100}, logprobs=0)
    assert same["choices"][0]["logprobs"]["token_ids"] == [7] * 3
    assert complete(client, prompt=PROMPT, regex="[ab]{3}")["choices"][0]["text"].strip("ab") == ""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}}
    answer = complete(client, prompt=PROMPT, response_format=form)["choices"][0]["text"]
    assert json.loads(answer) in (1, 2)


FIELDS = {
    "max_new_tokens": "max_tokens", "top_logprobs": "logprobs", "min_new_tokens": "min_tokens",
    "stop_ids": "stop_token_ids", "include_stop": "include_stop_str_in_output",
}  # fmt: skip
"""Options of the engine whose field has another name."""
NOT_SERVED = {"processors", "prompt_logprobs", "length_penalty", "early_stopping"}
ONLY_SERVED = {
    "logit_bias", "top_logprobs", "min_new_tokens", "ignore_eos", "stop_ids", "include_stop",
    "skip_special_tokens",
}  # fmt: skip
"""Options of OpenAI's and vLLM's APIs that the command line lacks."""
ALLOWED = {"max_tokens": [0], "seed": [-1]}
"""Values that OpenAI's API allows and the engine does not."""
HOSTILE = {
    "prompt": [5, [], [1, "a"], [[-1]], [[True]], {"a": 1}, [["a"]], ["a"] * 129, [9999], [1.5]],
    "max_tokens": [10**9, 10**30], "temperature": [2.1], "n": [9, 10**6], "logprobs": [21, 10**6],
    "stop": [["a"] * 65, "a" * 257], "seed": [2**200, -(2**64)], "repetition_penalty": [11],
    "logit_bias": [{"1": 101}, {"9999": 1}, {str(n): 1 for n in range(301)}],
    "suffix": ["x"], "echo": [1, "yes"], "stream": ["no"], "presence_penalty": [3],
    "frequency_penalty": [-3], "regex": ["a" * 65_537], "grammar": ['start: "a" start | start "b"'],
    "response_format": [{"type": "xml"}, "json", 5], "model": [5, "x" * 513], "unknown": [1],
    "stream_options": [5, {"x": 1}], "best_of": [2, True],
}  # fmt: skip
for name, values in BAD_VALUES.items():
    field = FIELDS.get(name, name)
    if name not in NOT_SERVED:
        values = [x for x in values if x not in ALLOWED.get(field, []) and not isinstance(x, bytes)]
        HOSTILE[field] = [*HOSTILE.get(field, []), *values]


def test_every_option_of_the_command_line_is_a_field_with_its_bounds_and_help(client):
    flags = {
        field.name: field.metadata["help"] for field in option_fields(GenerationConfig, "generate")
    }
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    for request in ("CompletionRequest", "ChatRequest"):
        fields = schemas[request]["properties"]
        for name in GenerationConfig.__dataclass_fields__:
            is_served = FIELDS.get(name, name) in fields
            assert is_served == (name not in NOT_SERVED), name
            assert is_served == (name in flags or name in ONLY_SERVED), name
        for name in flags.keys() - {"max_new_tokens"}:
            assert fields[name]["description"] == flags[name]
    for name, expected in (("min_p", (0, 1)), ("top_p", (0, 1))):
        bounds = fields[name]["anyOf"][0]
        assert (bounds["minimum"], bounds["maximum"]) == expected
    assert set(fields["context_end"]["anyOf"][0]["enum"]) == {"stop", "slide"}


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"context_end": "slide", "temperature": 0},
        {"timeout": 0.0, "seed": 1},
        *({"seed": 1, **options} for options in SAMPLING),
    ],
    ids=str,
)
def test_beams_a_sliding_context_a_timeout_and_sampling_equal_the_engines(client, engine, options):
    length = engine.runner.config.n_positions + 5 if "context_end" in options else 9
    told = complete(client, prompt=PROMPT, max_tokens=length, **options)
    expected = engine.generate(PROMPT, max_new_tokens=length, **options)
    assert told["choices"][0]["text"] == expected.text
    assert told["usage"]["completion_tokens"] == len(expected.ids)
    assert told["choices"][0]["finish_reason"] in (expected.finish_reason, "length")


@pytest.mark.parametrize("other", [{"n": 2}, {"stream": True}, {"logprobs": 0}, {"top_p": 0.5}])
def test_beams_exclude_options_that_need_single_tokens(client, other):
    error = refused(client, prompt="a", num_beams=2, **other)
    assert error["param"] == "num_beams" and next(iter(other)) in error["message"], error


@pytest.mark.parametrize("field", HOSTILE)
def test_a_bad_field_is_named(client, field):
    for value in HOSTILE[field]:
        body = json.dumps({"prompt": "a", "max_tokens": 2} | {field: value})
        headers = {"content-type": "application/json"}
        response = client.post("/v1/completions", content=body, headers=headers)
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"].split(".")[0] == field, value
        assert len(error["message"]) < 500


BODIES = [
    b"", b"{", b"[]", b'"a"', b"5", b"null", b"\xff\xfe", b'{"prompt": "\\ud800"}',
    b'{"max_tokens": NaN}', b'{"temperature": NaN}', b'{"temperature": Infinity}',
    b'{"max_tokens": 1' + b"0" * 400 + b"}", b'{"seed": 1' + b"0" * 5000 + b"}",
    b"[" * 10_000, b'{"a":' * 10_000, b"{" + b",".join(b'"%d":null' % n for n in range(301)) + b"}",
    b'{"prompt": [' + b"[1]," * 50_000 + b"[1]]}", b"\x1f\x8b" + b"\0" * 1000,
    b'{"prompt": "a"} x', b"{'prompt': 'a'}", b'{"prompt": "a",}', b"prompt=a", b"\0", b" " * 1000,
    b'{"prompt": "a", "json_schema": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
    b'{"prompt": "a", "logit_bias": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_a_hostile_body_is_refused(client, number):
    headers = {"content-type": "application/json"}
    response = client.post("/v1/completions", content=BODIES[number], headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


def test_the_context_is_never_cut_silently(client):
    for n, (param, said) in {40: ("max_tokens", "at most 8, got 9"), 49: ("prompt", "48")}.items():
        error = refused(client, prompt=[5] * n, max_tokens=9)
        assert error["code"] == "context_length_exceeded" and error["param"] == param, error
        assert said in error["message"]
    assert len(complete(client, prompt=[5] * 40, max_tokens=8, logit_bias={"7": 100})["choices"])
    complete(client, prompt=[5] * 48, max_tokens=0, echo=True, logprobs=1)


def test_an_empty_prompt_starts_a_text_and_a_tiny_temperature_is_greedy(client, engine):
    assert complete(client, prompt="", max_tokens=2)["usage"]["prompt_tokens"] == 1
    ours = engine.generate(PROMPT, max_new_tokens=5, temperature=0).text
    answer = complete(client, prompt=PROMPT, max_tokens=5, temperature=1e-300)
    assert answer["choices"][0]["text"] == ours


def test_another_models_name_is_not_found(client):
    assert client.get("/v1/models/gpt-9").status_code == 404
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.get("/v1/models/tiny").json()["max_model_len"] == 48


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/completions", {"prompt": "a", "max_tokens": 1}), ("/v1/embeddings", {"input": "a"}),
     ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})],
)  # fmt: skip
def test_every_route_knows_its_models_name(client, path, field):
    assert client.post(path, json={"model": "tiny", **field}).status_code == 200
    error = refused(client, 404, path, model="gpt-9", **field)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_too_many_texts_are_refused_and_the_server_continues(client, engine):
    assert refused(client, prompt=["a"] * 12, n=2)["param"] == "prompt"
    go_on = threading.Event()

    def wait(ids, n_prompt, logits):
        assert go_on.wait(60)
        return logits

    options = {"max_new_tokens": 40, "temperature": 0, "processors": [wait]}
    waiting = [engine.submit("a", **options) for _ in range(12)]
    response = client.post("/v1/completions", json={"prompt": "a"})
    go_on.set()
    for generation in waiting:
        generation.cancel()
        generation.result()
    assert response.status_code == 429 and response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "rate_limit_error"
    complete(client, prompt="a", max_tokens=2)


@pytest.fixture(scope="module")
def bare(engine):
    """A client of a model without a tokenizer."""
    with Engine(engine.model, queue_size=8) as engine:
        app = create_app(engine, name="bare", limits=Limits(queue=8))
        yield TestClient(app, base_url="http://127.0.0.1")


def test_a_model_without_a_tokenizer_reads_and_writes_ids(bare, engine):
    ours = engine.generate([5, 7], max_new_tokens=6, temperature=0).ids
    body = {"prompt": [5, 7], "max_tokens": 6, "temperature": 0}
    (choice,) = complete(bare, **body, logprobs=1, echo=True)["choices"]
    assert choice["text"] == " ".join(map(str, [5, 7, *ours]))
    assert choice["logprobs"]["token_ids"] == [5, 7, *ours]
    with bare.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        pieces = [event["choices"][0]["text"] for event in events(response)]
    assert "".join(pieces) == " ".join(map(str, ours))
    assert complete(bare, max_tokens=2)["usage"]["prompt_tokens"] == 1
    for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        error = refused(bare, path=path, **{field: "a text"})
        assert error["param"] == field and "no tokenizer" in error["message"], error


def test_chat_is_refused_without_a_template(client):
    body = {"messages": [{"role": "user", "content": "hello"}]}
    error = refused(client, path="/v1/chat/completions", **body)
    assert error["code"] == "no_chat_template" and "/v1/completions" in error["message"]


def test_a_tokenizer_that_explodes_is_a_request_refused(exploding):
    tokenizer, text = exploding
    with Engine(opinionated(tokenizer), tokenizer=tokenizer, queue_size=8) as engine:
        app = create_app(engine, name="bare", limits=Limits(queue=8))
        client = TestClient(app, base_url="http://127.0.0.1")
        for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
            error = refused(client, path=path, **{field: text})
            assert error["param"] == field and "tokenizer.json" in error["message"], error
        complete(client, prompt="ab", max_tokens=2)
