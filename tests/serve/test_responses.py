"""/v1/responses, through the official client."""

import json

import pytest

from tests.models import TEXT, opinionated
from tests.serve.conftest import LIMITS, Running
from tiedgpt import Tokenizer
from tiedgpt.data import TEMPLATES
from tiedgpt.data.templates import encode_pieces
from tiedgpt.infer import Engine

openai = pytest.importorskip("openai")

OPTIONS = {"model": "tiny", "temperature": 0, "max_output_tokens": 7}
BEGIN = ["response.created", "response.in_progress", "response.output_item.added",
         "response.content_part.added"]  # fmt: skip
END = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


@pytest.fixture(scope="module")
def served():
    tokenizer = Tokenizer.train([TEXT], 300)
    with (
        Engine(opinionated(tokenizer, 128), tokenizer=tokenizer, slots=2, queue_size=8) as engine,
        Running(engine, LIMITS, template=TEMPLATES["plain"]) as running,
    ):
        yield running, engine


@pytest.fixture
def client(served):
    url = f"{served[0].url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def reply(engine, *messages, **options):
    """Return the engine's reply to (role, content) pairs."""
    conversation = [{"role": role, "content": content} for role, content in messages]
    ids, _ = encode_pieces(TEMPLATES["plain"].prompt(conversation), engine.tokenizer)
    options = {"max_new_tokens": 7, "temperature": 0} | options
    return engine.generate(ids, stop_ids=TEMPLATES["plain"].end_ids(engine.tokenizer), **options)


def test_a_response_is_the_engines_reply(client, served):
    ours = reply(served[1], ("system", "cat"), ("user", "the dog"))
    labels = {"store": True, "metadata": {"a": "b"}, "user": "me"}
    answer = client.responses.create(input="the dog", instructions="cat", **OPTIONS, **labels)
    assert answer.output_text == ours.text and answer.output[0].role == "assistant"
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == len(ours.ids) == 7
    assert answer.usage.total_tokens == answer.usage.input_tokens + 7
    assert (answer.instructions, answer.metadata, answer.temperature) == ("cat", {"a": "b"}, 0)


def test_a_reply_that_ends_is_completed(client, served):
    eos = served[1].tokenizer.eos_token_id
    answer = client.responses.create(
        input="the dog", **OPTIONS, extra_body={"logit_bias": {str(eos): 100}}
    )
    assert (answer.status, answer.incomplete_details, answer.output_text) == ("completed", None, "")


def test_output_items_are_read_back_as_input(client, served):
    first = client.responses.create(input="the dog", **OPTIONS)
    ours = reply(
        served[1], ("system", "cat"), ("user", "the dog"), ("assistant", first.output_text),
        ("user", "sat"),
    )  # fmt: skip
    last = {"role": "user", "content": [{"type": "input_text", "text": "sat"}]}
    for items in (first.output, [item.to_dict() for item in first.output]):
        conversation = [
            {"role": "developer", "content": "cat"}, {"role": "user", "content": "the dog"},
            *items, last,
        ]  # fmt: skip
        assert client.responses.create(input=conversation, **OPTIONS).output_text == ours.text


def check(events, text):
    """Require the events of a stream to be complete, in order, and to add up to a text."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    middle = ["response.output_text.delta"] * len(deltas)
    assert types == [*BEGIN, *middle, *END, f"response.{events[-1].response.status}"]
    assert "".join(deltas) == text == events[-1].response.output_text
    assert [event.text for event in events if event.type == "response.output_text.done"] == [text]
    ids = {getattr(event, "item_id", None) for event in events} - {None}
    assert ids == {events[-1].response.output[0].id}
    assert events[0].response.id == events[-1].response.id
    assert events[-1].response.usage.output_tokens == 7


def test_a_stream_adds_up_to_the_response(client, served):
    ours = reply(served[1], ("user", "the dog"))
    with client.responses.create(input="the dog", stream=True, **OPTIONS) as stream:
        check(list(stream), ours.text)
    with client.responses.stream(input="the dog", **OPTIONS) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"
    eos = served[1].tokenizer.eos_token_id
    ended = {"logit_bias": {str(eos): 100}}
    with client.responses.stream(input="the dog", extra_body=ended, **OPTIONS) as stream:
        assert stream.get_final_response().output_text == ""


def test_logprobs_are_included_when_asked_for(client, served):
    ours = reply(served[1], ("user", "the dog"))
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = client.responses.create(input="the dog", **OPTIONS, **options)
    tokens = answer.output[0].content[0].logprobs
    assert [token.logprob for token in tokens] == pytest.approx(ours.logprobs, abs=1e-5)
    assert all(len(token.top_logprobs) == 2 for token in tokens)
    with client.responses.create(input="the dog", stream=True, **OPTIONS, **options) as stream:
        pieces = [e.logprobs for e in stream if e.type == "response.output_text.delta"]
    assert [one.logprob for piece in pieces for one in piece] == pytest.approx(
        ours.logprobs, abs=1e-5
    )


@pytest.mark.parametrize(
    "text_format",
    [
        {"type": "json_schema", "name": "x", "schema": {"enum": [1, 2]}, "strict": True},
        {"type": "json_object"},
    ],
)
def test_the_text_follows_its_format(client, text_format):
    pytest.importorskip("llguidance")
    options = OPTIONS | {"max_output_tokens": 60, "temperature": 1}
    bias = {"extra_body": {"seed": 3, "logit_bias": {"92": 20}}}
    answer = client.responses.create(
        input="the dog", text={"format": text_format}, **options, **bias
    )
    value = json.loads(answer.output_text)
    assert value in (1, 2) or isinstance(value, dict)
    assert answer.text.format.type == text_format["type"]


FORMAT = {"type": "json_object"}
JSON_FORMAT = {"type": "json_schema", "name": "x"}


@pytest.mark.parametrize(
    ("fields", "param", "pattern"),
    [
        ({"max_output_tokens": 500}, "max_output_tokens", "at most .* got 500"),
        ({"max_output_tokens": 2049, "context_end": "slide"}, "max_output_tokens", "at most 2,048"),
        ({"max_output_tokens": 4, "min_tokens": 5}, "min_tokens", "max_output_tokens.* 5 is more"),
        ({"input": []}, "input", "a text or a list of 1 to 1,024 messages"),
        ({"input": ["a"]}, "input", "a text or a list of 1 to 1,024 messages"),
        ({"input": {"role": "user"}}, "input", "a text or a list of 1 to 1,024 messages"),
        ({"input": [{"role": "user", "content": "a"}] * 1025}, "input", "1 to 1,024 messages"),
        ({"input": [{"role": "user"}]}, "input.0.content", "required"),
        ({"text": {"format": JSON_FORMAT}}, "text.format.schema", "required"),
        ({"text": {"format": FORMAT}, "response_format": {"type": "text"}}, "text.format", "exclu"),
        ({"text": {"format": {"type": "text"}}, "response_format": FORMAT}, "text.format", "exclu"),
        ({"text": {"format": FORMAT}, "response_format": FORMAT}, "text.format", "exclude"),
        ({"return_token_ids": True}, "return_token_ids", "logprobs"),
    ],
)
def test_errors_name_the_fields_that_were_sent(client, fields, param, pattern):
    body = {"input": "the dog"} | fields
    with pytest.raises(openai.BadRequestError, match=pattern) as caught:
        client.post("/responses", body=body, cast_to=object)
    assert caught.value.param == param


def test_the_clients_errors(client):
    for options, name in (({"previous_response_id": "r"}, "previous_response_id"),
                          ({"input": [{"role": "wizard", "content": "a"}]}, "input"),
                          ({"input": "the dog " * 99}, "input")):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**{"input": "the dog"} | OPTIONS | options)
        assert caught.value.param == name
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="a", model="gpt-9")


def test_a_model_without_a_template_leads_to_completions(running):
    with (
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="/v1/completions") as caught,
    ):
        client.responses.create(input="the dog", **OPTIONS)
    assert caught.value.code == "no_chat_template"
