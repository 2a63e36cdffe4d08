"""Embeddings, tokens, metrics, and inspection over HTTP: the same numbers as in Python."""

import base64
import json

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from tiedgpt import inspect
from tiedgpt.inspect.registry import INSPECTIONS
from tiedgpt.serve.app import create_app

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


def test_an_inspection_that_is_not_served_is_missing(client):
    body = {"toward": TEXT, "away": "the dog"}
    assert client.post("/inspect/direction", json=body).status_code == 404


@pytest.mark.parametrize(
    "body", [{}, {"text": "a", "ids": [1]}, {"text": "a " * 60}, {"ids": [9999]}, {"ids": ["a"]},
             {"text": "a", "top": 0}, {"text": "a", "replace_at": 99}, {"text": "a", "what": 1}],
)  # fmt: skip
def test_bad_inspections_are_refused(client, body):
    response = client.post("/inspect/positions", json=body)
    assert response.status_code == 400 and response.json()["error"]["message"]


@pytest.mark.parametrize("value", [5.5, -1, ["a"], True])
@pytest.mark.parametrize(
    ("name", "option"),
    [
        (o.name, n)
        for o in INSPECTIONS.values()
        for n, f in o.options.items()
        if f.type == int | str
    ],
)
def test_a_token_that_is_no_id_and_no_text_is_told_what_it_may_be(client, name, option, value):
    body = OWN.get(name, {"text": TEXT}) | {option: value}
    error = client.post(f"/inspect/{name}", json=body).json()["error"]
    assert (error["param"], error["message"]) == (
        option,
        f"{option} must be a token's id >= 0, or its text",
    )


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


def read_metrics(client):
    """Return {name without the prefix and the model's label: value}, by Prometheus's own parser."""
    samples = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            is_labelled = "model_name" in sample.labels or "http_responses" in sample.name
            assert is_labelled and sample.name.startswith("tiedgpt:")
            samples[sample.name.removeprefix("tiedgpt:"), *labels.values()] = sample.value
    return samples


def test_metrics_are_those_that_vllms_dashboards_read(engine):
    """These are the families of vLLM's grafana.json, and its label of the model."""
    client = TestClient(create_app(engine, name="tiny"), base_url="http://127.0.0.1")
    bodies = [{"prompt": [3] * n, "max_tokens": m} for n, m in ((5, 7), (11, 2))]
    usages = [
        client.post("/v1/completions", json=body | {"logit_bias": {"7": 100}}).json()["usage"]
        for body in bodies
    ]
    metrics = read_metrics(client)
    assert [usage["prompt_tokens"] for usage in usages] == [5, 11]
    for name, values in {"prompt": (5, 11), "generation": (7, 2)}.items():
        assert metrics[f"{name}_tokens_total",] == sum(values)
        assert metrics[f"request_{name}_tokens_sum",] == sum(values)
        for edge in (1, 2, 5, 10, 20):
            counted = metrics[f"request_{name}_tokens_bucket", f"{edge}.0"]
            assert counted == sum(value <= edge for value in values)
    assert metrics["request_max_num_generation_tokens_sum",] == 9
    assert metrics["request_success_total", "length"] == 2
    assert metrics["http_responses_total", "200"] == 2
    seconds = {}
    for name in ("request_queue_time", "request_prefill_time", "request_decode_time",
                 "request_inference_time", "request_time_per_output_token", "e2e_request_latency",
                 "time_to_first_token"):  # fmt: skip
        assert metrics[f"{name}_seconds_count",] == 2
        seconds[name] = metrics[f"{name}_seconds_sum",]
        assert seconds[name] > 0
    assert metrics["inter_token_latency_seconds_count",] == 6 + 1
    queue, prefill, decode, inference, per_token, request, first = seconds.values()
    assert prefill + decode == pytest.approx(inference, rel=1e-6)
    assert queue + inference < request and queue + prefill < first and per_token < decode
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert metrics[name,] == 0


def test_the_cache_usage_is_the_filled_share_of_all_slots(engine):
    client = TestClient(create_app(engine), base_url="http://127.0.0.1")
    shares = []

    def look(ids, n_prompt, logits):
        shares.append(read_metrics(client)["kv_cache_usage_perc",])
        return logits

    engine.generate([1] * 5, max_new_tokens=3, processors=[look], logit_bias={7: 100})
    assert shares == pytest.approx([n / (4 * 48) for n in (5, 6, 7)])
