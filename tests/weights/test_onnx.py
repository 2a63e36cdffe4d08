"""ONNX: onnxruntime computes our files alike, and any graph is audited."""

import json
import os
import shutil
import subprocess
import sys
import warnings

import numpy as np
import onnxruntime
import pytest
import torch

from tests.models import random_gpt
from tests.tie.checkpoints import D, V, matrix
from tests.tie.checkpoints import write_onnx as write_theirs
from tests.weights.raw_files import onnx_model
from tiedgpt import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.infer import Engine
from tiedgpt.tie import audit, ledger
from tiedgpt.weights.formats.onnx.writer import write as write_onnx
from tiedgpt.weights.gpt import shapes
from tiedgpt.weights.source import open_checkpoint

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import onnx
    from onnx import TensorProto, helper, numpy_helper

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
    return random_gpt(**{"n_positions": 64} | values)


class Session:
    """A file in onnxruntime with the keys and values of its past tokens."""

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
def test_onnxruntime_computes_the_models_logits(tmp_path, numbers, kind):
    model = made(**KINDS[kind])
    write_onnx(model, tmp_path / "a.onnx")
    expected = ours(model, numbers)
    at_once = Session(tmp_path / "a.onnx", model, 3)(numbers)
    assert np.allclose(at_once, expected, rtol=0, atol=1e-5)
    step = Session(tmp_path / "a.onnx", model, 3)
    pieces = [step(piece) for piece in np.split(numbers, [9, 10, 11, 15], axis=1)]
    assert np.allclose(np.concatenate(pieces, axis=1), expected, rtol=0, atol=1e-5)
    assert step.past["past_key_values.2.key"].shape == (3, 4, 24, 8)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["GPT-2", "GPT-1", "banded twice"])
def test_prompts_of_different_lengths_give_the_results_of_solo_runs(tmp_path, numbers, kind, side):
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
def test_the_file_passes_the_checker_and_declares_its_shapes(tmp_path, kind, precision):
    model = made(**KINDS[kind])
    write_onnx(model, tmp_path / "a.onnx", precision=precision)
    file = onnx.load(tmp_path / "a.onnx")
    onnx.checker.check_model(file, full_check=True)
    assert (file.producer_name, file.opset_import[0].version) == ("tiedgpt", 17)
    inferred = onnx.shape_inference.infer_shapes(
        file, check_type=True, strict_mode=True, data_prop=True
    )
    inferred_types = {value.name: value.type.tensor_type for value in inferred.graph.value_info}
    assert [d.dim_value for d in inferred_types["h.2.mlp.c_fc.out"].shape.dim][
        2
    ] == model.config.inner_dim
    floats = TensorProto.FLOAT16 if precision == "fp16" else TensorProto.FLOAT
    assert {value.elem_type for name, value in inferred_types.items() if "h." in name} == {floats}


def test_the_names_match_optimum(tmp_path, tiny):
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


def test_w_is_one_initializer_with_two_uses(tmp_path, tiny):
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


def test_float16_files_match_the_model(tmp_path, numbers):
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
        write_onnx(model.to(dtype), tmp_path / "own.onnx", precision=precision)
        assert (tmp_path / "own.onnx").read_bytes() == path.read_bytes()
        model = made()


def test_padding_in_float16_gives_no_nan(tmp_path):
    model = made()
    write_onnx(model, tmp_path / "a.onnx", precision="fp16")
    logits = Session(tmp_path / "a.onnx", model, 2, np.float16)(
        np.full((2, 5), 4), [[0, 0, 0, 0, 1], [1, 1, 1, 1, 1]]
    )
    assert np.isfinite(logits).all()
    assert np.allclose(logits[0, 4], logits[1, 0], atol=0.02)


def test_large_models_have_external_data(tmp_path, numbers):
    model = made()
    path = tmp_path / "in" / "a.onnx"
    write_onnx(model, path, largest_file=1000)
    assert sorted(file.name for file in path.parent.iterdir()) == ["a.onnx", "a.onnx_data"]
    assert [file.name for file in open_checkpoint(path).files] == ["a.onnx", "a.onnx_data"]
    assert path.stat().st_size < 40_000
    onnx.checker.check_model(str(path), full_check=True)
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        assert entries["location"] == "a.onnx_data" and int(entries["offset"]) % 4096 == 0
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
for precision in ('fp32', 'bf16'):
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
def test_gpt2_is_written_in_the_memory_of_one_tensor_and_matches(tmp_path):
    path = tmp_path / "a.onnx"
    result = subprocess.run(
        [sys.executable, "-c", PEAK, path], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) < 100
    assert 0 < path.stat().st_size - 497_759_232 < 100_000
    model = GPT.from_pretrained(path)
    ids = np.random.default_rng(0).integers(0, 50257, (2, 40))
    session = Session(path, model, 2)
    assert np.allclose(session(ids), ours(model, ids), rtol=0, atol=1e-5)
    prompt = ids[0].tolist()
    expected = Engine(model).generate(prompt, max_new_tokens=32, temperature=0).ids
    assert greedy(Session(path, model), prompt, 32) == expected
    assert audit(path).verdict == "tied"


@pytest.mark.parametrize("external", [False, True])
def test_initializers_match_the_onnx_package(tmp_path, external):
    path = write_theirs(tmp_path / "a.onnx", "other", external=external)
    checkpoint = open_checkpoint(path)
    peer = {
        t.name: numpy_helper.to_array(t, str(tmp_path)) for t in onnx.load(path).graph.initializer
    }
    assert set(checkpoint.tensors) == set(peer)
    for name in peer.keys() - {"one"}:  # the matrices
        ours, expected = checkpoint.tensors[name], peer[name]
        assert ours.shape == expected.shape
        assert np.array_equal(ours.rows(0, len(expected)), expected)
        assert np.array_equal(ours.transpose().rows(2, 7), expected.T[2:7])
    assert checkpoint.usage.reads == ("W", "wpe")
    assert checkpoint.usage.predicts == ("H",)
    assert checkpoint.usage.products == ("block", "H")


def test_values_of_every_kind_are_read_or_listed(tmp_path):
    w = matrix(rows=4)
    kinds = {
        "listed": (helper.make_tensor("listed", TensorProto.FLOAT, w.shape, w.flatten()), w),
        "halves": (helper.make_tensor("halves", TensorProto.FLOAT16, w.shape, w), np.float16(w)),
        "texts": (helper.make_tensor("texts", TensorProto.STRING, [2], [b"a", b"b"]), None),
        "integers": (helper.make_tensor("integers", TensorProto.INT4, [4], [1, 2, 3, 4]), None),
    }
    for dtype in (np.float64, np.float32, np.float16):
        array = w.astype(dtype)
        kinds[dtype.__name__] = (numpy_helper.from_array(array, dtype.__name__), array)
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(w * 2, "x"))
    onnx.save(onnx_model(*(t for t, _ in kinds.values()), nodes=[constant]), tmp_path / "a.onnx")
    tensors = open_checkpoint(tmp_path / "a.onnx").tensors
    assert np.array_equal(tensors["c"].rows(0, 4), w * 2)
    for name, (_, expected) in kinds.items():
        if expected is None:
            assert len(tensors[name].shape) == 1 and not tensors[name].is_decodable
        else:
            assert tensors[name].dtype == expected.dtype.name
            assert np.array_equal(tensors[name].rows(0, 4), expected)


def graph_ending_in(path, nodes, **heads):
    """A graph that gathers rows of W and ends in these nodes."""
    stored = {"W": matrix(), "block": matrix(4, D, D), **heads}
    first = [
        helper.make_node("Gather", ["W", "ids"], ["x"]),
        helper.make_node("MatMul", ["x", "block"], ["z"]),
    ]
    graph = helper.make_graph(
        first + nodes, "tiny",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [5])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in stored.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph), path)
    return path


def test_a_graph_that_ends_in_another_product_is_not_tied(tmp_path):
    nbits = helper.make_node("MatMulNBits", ["z", "B", "scales"], ["logits"], K=D, N=V, bits=4)
    packed = {"B": np.zeros((V, 1, D // 2), np.uint8), "scales": np.ones(V, np.float32)}
    path = graph_ending_in(tmp_path / "a.onnx", [nbits], **packed)
    with pytest.raises(UserError, match=r"multiplies nowhere .* B \(97, 1, 16\).*--output"):
        audit(path)
    halves = [helper.make_node("MatMul", ["z", name], [f"l{name}"]) for name in "HI"]
    halves.append(helper.make_node("Concat", ["lH", "lI"], ["logits"], axis=-1))
    path = graph_ending_in(tmp_path / "b.onnx", halves, H=matrix(2, D, 48), I=matrix(3, D, 49))
    with pytest.raises(UserError, match="--output"):
        audit(path)
    padded = [helper.make_node("MatMul", ["z", "P"], ["logits"])]
    report = audit(graph_ending_in(tmp_path / "c.onnx", padded, P=matrix(2, D, 128)))
    assert report.verdict == "broken" and report.matrices[1].names == ("P",)


def test_foreign_metadata_are_ignored(tmp_path):
    model = onnx_model(helper.make_tensor("w", TensorProto.FLOAT, (4,), [1, 2, 3, 4]))
    helper.set_model_props(model, {"author": "x" * 200_000, "tie_word_embeddings": "no", "e": ""})
    onnx.save(model, tmp_path / "a.onnx")
    checkpoint = open_checkpoint(tmp_path / "a.onnx")
    assert (checkpoint.config, checkpoint.claim.is_tied) == ({}, None)


# Our own files


def test_an_adjacent_config_of_an_onnx_file_is_checked(tmp_path):
    model = made(norm="post")
    write_onnx(model, tmp_path / "a.onnx")
    assert GPT.from_pretrained(tmp_path).config == model.config
    model.save_pretrained(tmp_path / "m")
    shutil.copy(tmp_path / "m" / "config.json", tmp_path)
    assert GPT.from_pretrained(tmp_path / "a.onnx").config == model.config


def test_exports_of_other_programs_are_not_loaded(tmp_path):
    write_theirs(tmp_path / "a.onnx", "gemm", names=("wte.weight", ""))
    with pytest.raises(UserError, match="tiedgpt did not write: `tie` looks into it"):
        GPT.from_pretrained(tmp_path / "a.onnx")


def changed(tmp_path, change, **values):
    """Write a file, change it with onnx itself, and return its path."""
    write_onnx(made(**values), tmp_path / "a.onnx")
    file = onnx.load(tmp_path / "a.onnx")
    change(file)
    onnx.save(file, tmp_path / "b.onnx")
    return tmp_path / "b.onnx"


def config(**values):
    def change(file):
        entry = file.metadata_props[0]
        kept = json.loads(entry.value) | values
        entry.value = json.dumps({k: v for k, v in kept.items() if v != "REMOVE"})

    return change


def metadata(text):
    def change(file):
        file.metadata_props[0].value = text

    return change


def without(name):
    def change(file):
        at = [tensor.name for tensor in file.graph.initializer].index(name)
        del file.graph.initializer[at]

    return change


def head_of_its_own(file):
    matrix = numpy_helper.from_array(np.ones((97, 32), np.float32), "copy")
    file.graph.initializer.append(matrix)
    (gemm,) = (node for node in file.graph.node if node.op_type == "Gemm")
    gemm.input[1] = "copy"


def transposed(file):
    (matrix,) = (t for t in file.graph.initializer if t.name == "h.1.mlp.c_fc.weight")
    matrix.dims[:] = matrix.dims[::-1]


def twice(file):
    file.metadata_props.append(file.metadata_props[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (config(rotary=True), "says rotary, which this version .* does not know"),
        (config(n_head=5), "n_head=5"),
        (config(n_head="REMOVE"), "does not say how many heads"),
        (config(n_layer=4), "n_layer=4, the weights have 3"),
        (config(tie_word_embeddings=3), "does not say whether its head is tied"),
        (config(tie_word_embeddings=False), "head.weight predicts, its graph predicts with wte"),
        (config(activation_function=["relu"]), "activation_function"),
        (config(attention_windows=[1, "two"]), "attention_windows"),
        (metadata("{"), r"b\.onnx is damaged"),
        (metadata("[" * 50_000), r"b\.onnx is damaged"),
        (metadata("[]"), "metadata under 'tiedgpt' are no config"),
        (twice, "metadata under 'tiedgpt' are no config"),
        (without("h.2.ln_1.bias"), r"h\.2\.ln_1\.bias is missing"),
        (without("wte.weight"), r"graph predicts with"),
        (head_of_its_own, r"its graph predicts with copy: it was changed"),
        (transposed, r"h\.1\.mlp\.c_fc\.weight is \(32, 128\), not \(128, 32\)"),
    ],
)
def test_changed_files_are_refused_with_the_reason(tmp_path, change, words):
    with pytest.raises((CorruptInputError, UserError), match=words):
        GPT.from_pretrained(changed(tmp_path, change))
