"""Embeddings, tokens, metrics, and inspection over HTTP: the same numbers as in Python."""

import base64
import json

import numpy as np
import pytest
import torch

from tiedgpt import inspect
from tiedgpt.inspect.registry import INSPECTIONS

TEXT = "the cat sat on the mat"


OWN = {
    "vocabulary": {},
    "neighbours": {"token": 5},
    "patch": {"text": TEXT, "corrupted": TEXT.replace("cat", "mat"), "answer": 5, "wrong": 6},
}
"""Requests of the inspections that read no text, or another one, too."""


@pytest.mark.parametrize("name", [each.name for each in INSPECTIONS.values() if each.is_served])
def test_inspection_equals_the_librarys(client, engine, name):
    body = OWN.get(name, {"text": TEXT})
    response = client.post(f"/inspect/{name}", json=body)
    assert response.status_code == 200, response.text
    ours = getattr(inspect, name)(engine.model, engine.tokenizer, **body)
    theirs, ours = response.json(), json.loads(ours.to_json())
    assert theirs.keys() == ours.keys()
    for key, value in ours.items():
        if isinstance(value, list) and value and isinstance(value[0], (float, list)):
            np.testing.assert_allclose(
                np.array(theirs[key], float), np.array(value, float), atol=1e-6
            )
        else:
            assert theirs[key] == pytest.approx(value) if isinstance(value, float) else True


def test_inspections_of_many_texts_are_not_served(client):
    body = {"toward": TEXT, "away": "the dog"}
    assert client.post("/inspect/direction", json=body).status_code == 404


@pytest.mark.parametrize(
    "body", [{}, {"text": "a", "ids": [1]}, {"text": "a " * 60}, {"ids": [9999]}, {"ids": ["a"]},
             {"text": "a", "top": 0}, {"text": "a", "poke": 99},
             {"text": "a", "replace_at": 99}, {"text": "a", "what": 1}],
)  # fmt: skip
def test_bad_inspections_are_refused(client, body):
    response = client.post("/inspect/positions", json=body)
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_embeddings_equal_the_bodys_output(client, engine):
    response = client.post("/v1/embeddings", json={"input": [TEXT, "a"], "model": "tiny"})
    first, _ = (np.array(each["embedding"]) for each in response.json()["data"])
    ids = engine.tokenizer.encode(TEXT)
    with torch.no_grad():
        h = engine.model.body(torch.tensor([ids]))[0].numpy()
    mean = h.mean(0)
    np.testing.assert_allclose(first, mean / np.linalg.norm(mean), atol=1e-5)
    body = {"input": ids, "encoding_format": "base64", "pooling": "last"}
    packed = client.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    last = np.frombuffer(base64.b64decode(packed), "<f4")
    np.testing.assert_allclose(last, h[-1] / np.linalg.norm(h[-1]), atol=1e-5)


def test_texts_are_encoded_and_decoded(client, engine):
    answer = client.post("/tokenize", json={"prompt": TEXT, "add_special_tokens": False}).json()
    assert answer["tokens"] == engine.tokenizer.encode(TEXT)
    assert client.post("/detokenize", json=answer | {"x": 1}).status_code == 400
    end = client.post("/tokenize", json={"prompt": "<|endoftext|>"}).json()["tokens"]
    assert end == [engine.tokenizer.eos_token_id]
    tokens = {"tokens": answer["tokens"]}
    assert client.post("/detokenize", json=tokens).json() == {"prompt": TEXT}
    assert client.get("/tokenizer_info").json()["eos_token"] == "<|endoftext|>"


def test_metrics_have_vllms_names(client):
    client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, "temperature": 0})
    text = client.get("/metrics").text
    for name in (
        "num_requests_running 0.0", "num_requests_waiting 0.0", "generation_tokens_total",
        "prompt_tokens_total", "prefix_cache_hits_total", "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_sum", "e2e_request_latency_seconds_bucket",
        'request_success_total{finished_reason="length"}', 'http_responses_total{status="200"}',
    ):  # fmt: skip
        assert f"tiedgpt:{name}" in text
