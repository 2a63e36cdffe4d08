"""ONNX: initializers and their uses, and our own files as models; hostile files are refused."""

import json
import shutil
import sys
import warnings

import numpy as np
import pytest
import torch

from tests.tie.checkpoints import D, V, matrix
from tests.tie.checkpoints import write_onnx as write_theirs
from tests.weights.test_onnx_write import made
from tiedgpt import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.tie import audit
from tiedgpt.weights.formats.onnx.writer import write as write_onnx
from tiedgpt.weights.sources import open_checkpoint

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import onnx
    from onnx import TensorProto, external_data_helper, helper, numpy_helper


def graph_of(*tensors, nodes=()):
    return helper.make_model(helper.make_graph(list(nodes), "g", [], [], list(tensors)))


@pytest.mark.parametrize("external", [False, True])
def test_initializers_are_what_onnx_reads(tmp_path, external):
    path = write_theirs(tmp_path / "a.onnx", "other", external=external)
    checkpoint = open_checkpoint(path)
    theirs = {
        t.name: numpy_helper.to_array(t, str(tmp_path)) for t in onnx.load(path).graph.initializer
    }
    assert set(checkpoint.tensors) == set(theirs)
    for name, expected in theirs.items():
        ours = checkpoint.tensors[name]
        assert ours.shape == expected.shape
        assert np.array_equal(ours.rows(0, len(expected)), expected)
        assert np.array_equal(ours.transpose().rows(2, 7), expected.T[2:7])
    assert checkpoint.usage.reads == ("W", "wpe")
    assert checkpoint.usage.predicts == ("H",)
    assert checkpoint.usage.products == ("block", "H")


def test_float_data_and_constants(tmp_path):
    w = matrix(rows=4)
    listed = helper.make_tensor("w", TensorProto.FLOAT, w.shape, w.flatten())
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(w * 2, "x"))
    onnx.save(graph_of(listed, nodes=[constant]), tmp_path / "a.onnx")
    tensors = open_checkpoint(tmp_path / "a.onnx").tensors
    assert np.array_equal(tensors["w"].rows(0, 4), w)
    assert np.array_equal(tensors["c"].rows(0, 4), w * 2)


def test_values_that_are_not_raw_are_read_and_texts_and_integers_are_listed(tmp_path):
    halves = helper.make_tensor("w", TensorProto.FLOAT16, [2, 2], np.arange(4, dtype=np.float16))
    texts = helper.make_tensor("t", TensorProto.STRING, [2], [b"a", b"b"])
    whole = helper.make_tensor("i", TensorProto.INT4, [4], [1, 2, 3, 4])
    onnx.save(graph_of(halves, texts, whole), tmp_path / "a.onnx")
    tensors = open_checkpoint(tmp_path / "a.onnx").tensors
    assert np.array_equal(tensors["w"].rows(0, 2), [[0, 1], [2, 3]])
    assert (tensors["t"].shape, tensors["t"].is_decodable) == ((2,), False)
    assert (tensors["i"].shape, tensors["i"].is_decodable) == ((4,), False)


def external(location="data.bin", offset=0, length=64, shape=(4, 4)):
    tensor = TensorProto(name="w", data_type=1, dims=shape)
    tensor.raw_data = bytes(64)
    external_data_helper.set_external_data(tensor, location, offset=offset, length=length)
    tensor.ClearField("raw_data")
    return graph_of(tensor).SerializeToString()


def raw(shape=(4, 4), n_bytes=64) -> bytes:
    tensor = TensorProto(name="w", data_type=1, dims=shape, raw_data=bytes(n_bytes))
    return graph_of(tensor).SerializeToString()


def deep() -> bytes:
    model = graph_of()
    graph = model.graph
    for _ in range(40):
        node = graph.node.add(op_type="If")
        graph = node.attribute.add(name="then").g
    return model.SerializeToString()


HOSTILE = {
    "out of the directory": external("../secret"),
    "out by a roundabout way": external("sub/../../secret"),
    "an absolute place": external("/etc/passwd"),
    "no place": external(""),
    "a file that is not there": external("missing.bin"),
    "bytes past the end": external(offset=1000),
    "a negative offset": external(offset=-4),
    "another length": external(length=32),
    "a huge shape": external(shape=(2**40, 2**40), length=64),
    "raw data too short": raw(n_bytes=60),
    "raw data of a huge shape": raw(shape=(2**40, 2**20)),
    "a negative size": raw(shape=(-4, -4)),
    "a name twice": graph_of(*[TensorProto(name="w", data_type=1)] * 2).SerializeToString(),
    "graphs without end": deep(),
    "no graph": b"\x08\x08",
    "a link out of the directory": external("link.bin"),
    "a name of megabytes": graph_of(
        numpy_helper.from_array(matrix(), "x" * 70_000)
    ).SerializeToString(),
    "a shape of megabytes": b"\x3a\x88\x80\x40\x2a\x84\x80\x40\x0a\x80\x80\x40" + b"\1" * (1 << 20),
    "a length past the end": b"\x3a\xff\xff\xff\xff\x0f" + bytes(30),
    "a number without end": b"\x08" + b"\xff" * 30,
    "field nought": b"\x00\x00",
    "an unknown wire type": b"\x0b\x00",
    "empty": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_bytes(bytes(64))
    (tmp_path / "in" / "data.bin").write_bytes(bytes(64))
    (tmp_path / "in" / "link.bin").symlink_to(tmp_path / "secret")
    path = tmp_path / "in" / "x.onnx"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(CorruptInputError, match=r"x\.onnx"):
        open_checkpoint(path)


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
    found = audit(graph_ending_in(tmp_path / "c.onnx", padded, P=matrix(2, D, 128)))
    assert found.verdict == "broken" and found.matrices[1].names == ("P",)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    path = write_theirs(tmp_path / "a.onnx", "one")
    monkeypatch.setitem(sys.modules, "onnx", None)
    for use in (lambda: open_checkpoint(path), lambda: write_onnx(made(), tmp_path / "b.onnx")):
        with pytest.raises(UserError, match=r"needs the package onnx .*'tiedgpt\[formats\]'"):
            use()


def test_the_metadata_of_others_are_let_be(tmp_path):
    model = graph_of(helper.make_tensor("w", TensorProto.FLOAT, (4,), [1, 2, 3, 4]))
    helper.set_model_props(model, {"author": "x" * 200_000, "tie_word_embeddings": "no", "e": ""})
    onnx.save(model, tmp_path / "a.onnx")
    checkpoint = open_checkpoint(tmp_path / "a.onnx")
    assert (checkpoint.config, checkpoint.claim.is_tied) == ({}, None)


# Our own files


def alike(model: GPT, other: GPT) -> bool:
    ours, theirs = model.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_a_directory_with_it_and_another_config_beside(tmp_path):
    model = made(norm="post")
    write_onnx(model, tmp_path / "a.onnx")
    assert alike(GPT.from_pretrained(tmp_path), model)
    model.save_pretrained(tmp_path / "m")
    shutil.copy(tmp_path / "m" / "config.json", tmp_path)
    assert GPT.from_pretrained(tmp_path / "a.onnx").config == model.config


def test_what_others_export_is_not_read_as_a_model(tmp_path):
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
def test_what_was_changed_is_refused_and_says_why(tmp_path, change, words):
    with pytest.raises((CorruptInputError, UserError), match=words):
        GPT.from_pretrained(changed(tmp_path, change))
