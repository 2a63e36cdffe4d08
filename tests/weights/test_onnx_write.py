"""ONNX files of ours: sound by onnx's own checker, and onnxruntime computes what the model does."""

import os
import subprocess
import sys
import warnings

import numpy as np
import onnxruntime
import pytest
import torch

from tests.conftest import TINY
from tiedgpt import GPT, GPTConfig
from tiedgpt.infer import Engine
from tiedgpt.tie import audit, ledger
from tiedgpt.weights.checkpoint import shapes
from tiedgpt.weights.formats.onnx.writer import write as write_onnx

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import onnx
    from onnx import TensorProto, numpy_helper

KINDS = {
    "GPT-2": {},
    "GPT-1": {"norm": "post"},
    "no biases": {"bias": False},
    "a head of its own": {"tie_word_embeddings": False},
    "banded": {"attention_windows": (64, 3)},
    "banded twice": {"attention_windows": (5, 1, 64), "norm": "post"},
    "exact gelu": {"activation_function": "gelu"},
    "relu": {"activation_function": "relu", "n_inner": 40},
    "silu": {"activation_function": "silu", "layer_norm_epsilon": 1e-3},
}


def made(**values) -> GPT:
    torch.manual_seed(7)
    model = GPT(GPTConfig(**{**TINY, "n_positions": 64, **values})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "ln_" in name and "weight" in name else 0.0, 0.2)
    return model


class Session:
    """A file in onnxruntime, with the keys and values of what it was given so far."""

    def __init__(self, path, model: GPT, batch: int = 1, dtype=np.float32):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        options.optimized_model_filepath = str(path) + ".optimized"
        self.run = onnxruntime.InferenceSession(path, options).run
        config = model.config
        empty = np.zeros((batch, config.n_head, 0, config.head_dim), dtype)
        self.past = {
            f"past_key_values.{layer}.{kind}": empty
            for layer in range(config.n_layer)
            for kind in ("key", "value")
        }
        self.mask = np.zeros((batch, 0), np.int64)

    def __call__(self, ids, mask=None) -> np.ndarray:
        """(B, T) -> logits (B, T, V), as transformers prepares the inputs for optimum."""
        ids = np.asarray(ids)
        mask = np.ones_like(ids) if mask is None else np.asarray(mask)
        self.mask = np.concatenate([self.mask, mask], axis=1)
        positions = self.mask.cumsum(1) - 1
        positions[self.mask == 0] = 1
        feed = {"input_ids": ids, "attention_mask": self.mask}
        feed["position_ids"] = positions[:, -ids.shape[1] :]
        logits, *present = self.run(None, feed | self.past)
        self.past = dict(zip(self.past, present, strict=True))
        return logits


@torch.no_grad()
def ours(model: GPT, ids) -> np.ndarray:
    return model(torch.as_tensor(np.asarray(ids))).numpy()


@pytest.fixture
def numbers() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 97, (3, 24))


@pytest.mark.parametrize("kind", KINDS)
def test_onnxruntime_computes_what_the_model_does(tmp_path, numbers, kind):
    model = made(**KINDS[kind])
    write_onnx(model, tmp_path / "a.onnx")
    expected = ours(model, numbers)
    at_once = Session(tmp_path / "a.onnx", model, 3)(numbers)
    assert np.allclose(at_once, expected, rtol=0, atol=1e-5)
    step = Session(tmp_path / "a.onnx", model, 3)
    pieces = [step(part) for part in np.split(numbers, [9, 10, 11, 15], axis=1)]
    assert np.allclose(np.concatenate(pieces, axis=1), expected, rtol=0, atol=1e-5)
    assert step.past["past_key_values.2.key"].shape == (3, 4, 24, 8)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["GPT-2", "GPT-1", "banded twice"])
def test_prompts_of_different_lengths_are_as_each_alone(tmp_path, numbers, kind, side):
    model = made(**KINDS[kind])
    write_onnx(model, tmp_path / "a.onnx")
    lengths = (9, 4, 1)
    mask = np.stack([np.arange(9) < n for n in lengths]).astype(np.int64)
    mask = mask[:, ::-1] if side == "left" else mask
    ids = np.full((3, 9), 5)
    for row, n in enumerate(lengths):
        ids[row, mask[row] == 1] = numbers[row, :n]
    session = Session(tmp_path / "a.onnx", model, 3)
    first = session(ids, mask)
    after = [session(np.stack([numbers[i, n : n + 3] for i, n in enumerate(lengths)]))]
    after.append(session(np.stack([numbers[i, n + 3 : n + 4] for i, n in enumerate(lengths)])))
    for row, n in enumerate(lengths):
        alone = ours(model, numbers[row : row + 1, : n + 4])[0]
        assert np.allclose(first[row, mask[row] == 1], alone[:n], rtol=0, atol=1e-5)
        assert np.allclose(np.concatenate(after, 1)[row], alone[n:], rtol=0, atol=1e-5)


def greedy(session: Session, prompt: list[int], count: int) -> list[int]:
    ids = [int(session([prompt])[0, -1].argmax())]
    while len(ids) < count:
        ids.append(int(session([ids[-1:]])[0, -1].argmax()))
    return ids


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_sound_and_says_its_shapes(tmp_path, kind, precision):
    model = made(**KINDS[kind])
    write_onnx(model, tmp_path / "a.onnx", precision=precision)
    file = onnx.load(tmp_path / "a.onnx")
    onnx.checker.check_model(file, full_check=True)
    assert (file.producer_name, file.opset_import[0].version) == ("tiedgpt", 17)
    inferred = onnx.shape_inference.infer_shapes(
        file, check_type=True, strict_mode=True, data_prop=True
    )
    known = {value.name: value.type.tensor_type for value in inferred.graph.value_info}
    assert [d.dim_value for d in known["h.2.mlp.c_fc.out"].shape.dim][2] == model.config.inner_dim
    floats = TensorProto.FLOAT16 if precision == "fp16" else TensorProto.FLOAT
    assert {value.elem_type for name, value in known.items() if "h." in name} == {floats}


def test_the_names_are_those_of_optimum(tmp_path, tiny):
    write_onnx(tiny, tmp_path / "a.onnx")
    graph = onnx.load(tmp_path / "a.onnx").graph

    def shape(value):
        return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]

    inputs = {value.name: shape(value) for value in graph.input}
    outputs = {value.name: shape(value) for value in graph.output}
    new, past = "sequence_length", "past_sequence_length"
    assert list(inputs)[:4] == [
        "input_ids", "attention_mask", "position_ids", "past_key_values.0.key",
    ]  # fmt: skip
    assert inputs["attention_mask"] == ["batch_size", f"{past} + {new}"]
    assert inputs["past_key_values.2.value"] == ["batch_size", 4, past, 8]
    assert list(outputs)[:3] == ["logits", "present.0.key", "present.0.value"]
    assert outputs["logits"] == ["batch_size", new, 97]
    assert outputs["present.2.key"] == ["batch_size", 4, f"{past} + {new}", 8]
    assert (len(inputs), len(outputs)) == (9, 7)


def test_w_is_one_initializer_for_both_faces(tmp_path, tiny):
    path = tmp_path / "a.onnx"
    write_onnx(tiny, path)
    graph = onnx.load(path).graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    assert stored.keys() == shapes(tiny.config).keys()
    uses = [node.op_type for node in graph.node if "wte.weight" in node.input]
    assert uses == ["Gather", "Gemm"]
    parameters = 4 * tiny.config.parameter_count()
    assert 0 < path.stat().st_size - parameters < 24_000 < stored["wte.weight"].nbytes * 2
    assert audit(path).verdict == "tied"
    assert ledger(path).total == tiny.config.parameter_count()
    Session(path, tiny)
    optimized = onnx.load(f"{path}.optimized").graph.initializer
    assert [t.name for t in optimized if 97 in t.dims] == ["wte.weight"]


def test_sixteen_bits(tmp_path, numbers):
    model = made()
    for precision, dtype, close in (
        ("fp16", torch.float16, 0.02), ("bf16", torch.bfloat16, 1e-5),
    ):  # fmt: skip
        path = tmp_path / f"{precision}.onnx"
        write_onnx(model, path, precision=precision)
        assert path.stat().st_size - 2 * model.config.parameter_count() < 30_000
        rounded = made().to(dtype).float()
        session = Session(path, model, 3, np.float16 if precision == "fp16" else np.float32)
        assert np.allclose(session(numbers), ours(rounded, numbers), rtol=0, atol=close)
        assert audit(path).verdict == "tied"
        write_onnx(model.to(dtype), tmp_path / "own.onnx")
        assert (tmp_path / "own.onnx").read_bytes() == path.read_bytes()
        model = made()


def test_padding_in_sixteen_bits_is_no_nan(tmp_path):
    model = made()
    write_onnx(model, tmp_path / "a.onnx", precision="fp16")
    logits = Session(tmp_path / "a.onnx", model, 2, np.float16)(
        np.full((2, 5), 4), [[0, 0, 0, 0, 1], [1, 1, 1, 1, 1]]
    )
    assert np.isfinite(logits).all()
    assert np.allclose(logits[0, 4], logits[1, 0], atol=0.02)


def test_large_models_put_their_weights_beside(tmp_path, numbers):
    model = made()
    path = tmp_path / "in" / "a.onnx"
    write_onnx(model, path, largest_file=1000)
    assert sorted(file.name for file in path.parent.iterdir()) == ["a.onnx", "a.onnx_data"]
    assert path.stat().st_size < 40_000
    onnx.checker.check_model(str(path), full_check=True)
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        assert place["location"] == "a.onnx_data" and int(place["offset"]) % 4096 == 0
    expected = ours(model, numbers)
    assert np.allclose(Session(path, model, 3)(numbers), expected, rtol=0, atol=1e-5)
    assert audit(path).verdict == "tied"
    assert torch.equal(GPT.from_pretrained(path).wte.weight, model.wte.weight)


PEAK = """
import sys, torch
from pathlib import Path
from tiedgpt import GPT, GPTConfig
from tiedgpt.weights.formats.onnx.writer import write as write_onnx
def kilobytes(key):
    return int(next(x for x in open('/proc/self/status') if key in x).split()[1])
torch.manual_seed(0)
model = GPT(GPTConfig.preset('gpt2')).eval()
for precision in (None, 'bf16'):
    write_onnx(GPT(GPTConfig(vocab_size=9, n_positions=4, n_embd=8, n_layer=1, n_head=1)),
               Path(sys.argv[1]), precision=precision)
Path('/proc/self/clear_refs').write_text('5')
before = kilobytes('VmRSS')
write_onnx(model, Path(sys.argv[1]))
write_onnx(model, Path(sys.argv[1] + '16'), precision='bf16')
print((kilobytes('VmHWM') - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="Linux tells the peak")
def test_gpt2_is_written_in_the_room_of_a_tensor_and_runs_alike(tmp_path):
    path = tmp_path / "a.onnx"
    told = subprocess.run(
        [sys.executable, "-c", PEAK, path], capture_output=True, text=True, check=True
    )
    assert int(told.stdout) < 100
    assert 0 < path.stat().st_size - 497_759_232 < 100_000
    model = GPT.from_pretrained(path)
    ids = np.random.default_rng(0).integers(0, 50257, (2, 40))
    session = Session(path, model, 2)
    assert np.allclose(session(ids), ours(model, ids), rtol=0, atol=1e-5)
    prompt = ids[0].tolist()
    expected = Engine(model).generate(prompt, max_new_tokens=32, temperature=0).ids
    assert greedy(Session(path, model), prompt, 32) == expected
    assert audit(path).verdict == "tied"
