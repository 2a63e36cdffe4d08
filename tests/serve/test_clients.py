"""The official client, as people use it."""

import asyncio

import pytest

openai = pytest.importorskip("openai")

PROMPT = "the cat sat"


@pytest.fixture
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_openai_client_completes_and_streams(client, engine):
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    ours = engine.generate(PROMPT, max_new_tokens=6, temperature=0)
    answer = client.completions.create(**options, logprobs=2, echo=True)
    assert answer.choices[0].text == PROMPT + ours.text
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    assert answer.choices[0].logprobs.token_logprobs[-6:] == pytest.approx(ours.logprobs, abs=1e-5)
    with client.completions.create(**options, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == ours.text
    extra = client.completions.create(**options, extra_body={"top_k": 3, "regex": "a{5}"})
    assert set(extra.choices[0].text) == {"a"}


def test_the_asynchronous_client_streams(running, engine):
    ours = engine.generate(PROMPT, max_new_tokens=6, temperature=0).text

    async def one():
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
            stream = await client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=6, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

    assert asyncio.run(one()) == ours


def test_the_openai_client_lists_models_and_embeds(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    embedded = client.embeddings.create(model="tiny", input=[PROMPT, "a"])  # asks for base64
    assert sum(x * x for x in embedded.data[1].embedding) == pytest.approx(1, abs=1e-5)


def test_the_openai_client_raises_its_error_classes(client):
    with pytest.raises(openai.NotFoundError, match="model"):
        client.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[5] * 99)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
