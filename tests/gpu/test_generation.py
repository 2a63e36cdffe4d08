"""Engines, inspections and files of a model on a GPU equal those of the CPU."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from tests.infer.option_values import SAMPLING
from tests.models import TEXT, opinionated
from tiedgpt import GPT, Tokenizer
from tiedgpt.heads import SequenceClassifier
from tiedgpt.heads.predictions import predict
from tiedgpt.infer import Engine
from tiedgpt.inspect.registry import INSPECTIONS
from tiedgpt.tie import audit, resize_vocab, tie, untie
from tiedgpt.weights.convert import convert
from tiedgpt.weights.load import load

PROMPTS = [[1, 2, 3], [4], [7] * 30, list(range(40))]
OPTIONS = [
    {"temperature": 0},
    {"temperature": 0, "context_end": "slide", "max_new_tokens": 30},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0, "logit_bias": {7: 4.0, 8: -100.0}},
    {"num_beams": 3},
    *SAMPLING,
    {"n": 2, "top_k": 9},
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([TEXT], 300)


@pytest.fixture(scope="module")
def model(tokenizer):
    return opinionated(tokenizer)


@pytest.fixture
def there(model, gpu):
    """The model on the GPU."""
    return copy.deepcopy(model).to(gpu)


def ids_of(completions):
    return [ids_of(one) if isinstance(one, list) else one.ids for one in completions]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options))
def test_texts_equal_those_of_the_cpu(model, gpu, options):
    with Engine(model) as here, Engine(model, device=gpu) as engine:
        assert engine.model.wte.weight.device.type == gpu.type
        options = {"max_new_tokens": 8, "seed": 5, **options}
        expected = here.generate(PROMPTS, **options)
        assert ids_of(engine.generate(PROMPTS, **options)) == ids_of(expected)


def test_greedy_decoding_equals_a_loop_without_a_cache(there):
    ids = torch.tensor([[1, 2, 3]], device=there.wte.weight.device)
    with torch.no_grad():
        for _ in range(20):
            ids = torch.cat([ids, there(ids)[:, -1:].argmax(-1)], 1)
    with Engine(there) as engine:
        engine.end_ids = ()
        engine.runner.model.config = replace(there.config, eos_token_id=None)
        assert (
            engine.generate([1, 2, 3], max_new_tokens=20, temperature=0).ids == ids[0, 3:].tolist()
        )


def test_scores_equal_those_of_the_cpu(model, gpu):
    with Engine(model) as here, Engine(model, device=gpu) as engine:
        expected = here.score(PROMPTS[2:])
        for scored, other in zip(engine.score(PROMPTS[2:]), expected, strict=True):
            assert scored.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_generates(model, gpu, precision):
    with Engine(model, precision, device=gpu) as engine:
        assert len(engine.generate([1, 2], max_new_tokens=5, temperature=0).ids) > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
def test_kernels_take_a_model_from_the_gpu(there, model, precision):
    options = {"precision": precision, "backend": "kernels"}
    with Engine(there, **options) as engine, Engine(model, **options) as here:
        ids = [one.generate([1, 2], max_new_tokens=9, temperature=0).ids for one in (engine, here)]
        assert ids[0] == ids[1]


ARGUMENTS = {
    "patch": {"text": "the cat sat", "corrupted": "the dog sat", "answer": 5},
    "direction": {"toward": "the cat", "away": "the dog"},
    "neighbours": {"token": 5},
}


@pytest.mark.parametrize("name", INSPECTIONS)
def test_inspections_equal_those_of_the_cpu(name, model, there, tokenizer):
    inspection = INSPECTIONS[name]
    text = {"text": "the cat sat on the mat"} if inspection.reads_text else {}
    options = text | ARGUMENTS.get(name, {})
    results = [
        json.loads(inspection.function(one, tokenizer, **options).to_json())
        for one in (model, there)
    ]
    assert results[0].keys() == results[1].keys()
    for key, value in results[0].items():
        numbers = flatten(value)
        assert flatten(results[1][key]) == pytest.approx(numbers, rel=2e-3, abs=2e-3), key


def flatten(value):
    """Return the numbers in nested lists and dictionaries."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in flatten(item)]
    return [float(value)] if isinstance(value, (int, float)) else []


def test_heads_answer_as_on_the_cpu(model, gpu, tokenizer):
    head = SequenceClassifier(copy.deepcopy(model), labels=["a", "b"]).eval()
    records = [{"text": "the cat"}, {"text": "the"}]
    expected = list(predict(head, tokenizer, records))
    for answer, other in zip(predict(head.to(gpu), tokenizer, records), expected, strict=True):
        assert answer["probability"] == pytest.approx(other["probability"], abs=1e-4)
    fresh = SequenceClassifier(head.gpt, labels=["a", "b", "c"])
    assert fresh(torch.ones(1, 4, dtype=torch.long, device=gpu)).shape == (1, 3)


def test_the_tie_is_changed_on_the_gpu(there, gpu):
    untie(there)
    assert there.head.weight.device.type == gpu.type
    tie(there)
    resize_vocab(there, there.config.vocab_size + 11)
    assert audit(there).verdict == "tied" and there.wte.weight.device.type == gpu.type


@pytest.mark.parametrize("to", ["transformers", "nanogpt", "packed", "gguf", "onnx"])
def test_a_model_on_the_gpu_is_written_in_every_format(model, gpu, tokenizer, tmp_path, to):
    if to in ("gguf", "onnx"):
        pytest.importorskip(to)
    model.save_pretrained(tmp_path / "model")
    loaded = load(tmp_path / "model")
    loaded.model.to(gpu)
    name = {"gguf": "model.gguf", "onnx": "model.onnx", "nanogpt": "ckpt.pt"}.get(to, "copy")
    options = {"approximate_gelu": True} if to == "nanogpt" else {}
    written = convert(loaded, tmp_path / name, to, tokenizer=tokenizer, **options)
    assert written.exact or written.difference <= written.tolerance


def test_saved_weights_of_the_gpu_are_loaded_again(there, model, tmp_path):
    there.save_pretrained(tmp_path / "model")
    again = GPT.from_pretrained(tmp_path / "model")
    for a, b in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
