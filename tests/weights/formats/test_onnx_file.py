"""ONNX: initializers and their uses, read without onnx; hostile files are refused."""

import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tie.checkpoints import D, V, matrix, write_onnx
from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.tie import audit
from tiedgpt.weights.formats.onnx_file import TYPES, open_onnx

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import onnx
    from onnx import TensorProto, external_data_helper, helper, numpy_helper


def graph_of(*tensors, nodes=()):
    return helper.make_model(helper.make_graph(list(nodes), "g", [], [], list(tensors)))


@pytest.mark.parametrize("external", [False, True])
def test_initializers_are_what_onnx_reads(tmp_path, external):
    path = write_onnx(tmp_path / "a.onnx", "other", external=external)
    checkpoint = open_onnx(path)
    theirs = {
        t.name: numpy_helper.to_array(t, str(tmp_path)) for t in onnx.load(path).graph.initializer
    }
    assert set(checkpoint.tensors) == set(theirs)
    for name, expected in theirs.items():
        ours = checkpoint.tensors[name]
        assert ours.shape == expected.shape
        assert np.array_equal(ours.rows(0, len(expected)), expected)
        assert np.array_equal(ours.columns(2, 7), expected.T[2:7])
    assert checkpoint.reads == ("W", "wpe")
    assert checkpoint.predicts == ("H",)
    assert checkpoint.products == ("block", "H")


@pytest.mark.parametrize("kind", ["FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE"])
def test_raw_data_of_every_float(tmp_path, kind):
    import ml_dtypes

    dtype = {"FLOAT16": np.float16, "BFLOAT16": ml_dtypes.bfloat16, "DOUBLE": np.float64}.get(
        kind, np.float32
    )
    w = matrix().astype(dtype)
    tensor = helper.make_tensor("w", getattr(TensorProto, kind), w.shape, w.tobytes(), raw=True)
    onnx.save(graph_of(tensor), tmp_path / "a.onnx")
    ours = open_onnx(tmp_path / "a.onnx").tensors["w"]
    assert np.array_equal(ours.rows(0, 97), w.astype(np.float64))


def test_float_data_and_constants(tmp_path):
    w = matrix(rows=4)
    listed = helper.make_tensor("w", TensorProto.FLOAT, w.shape, w.flatten())
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(w * 2, "x"))
    onnx.save(graph_of(listed, nodes=[constant]), tmp_path / "a.onnx")
    tensors = open_onnx(tmp_path / "a.onnx").tensors
    assert np.array_equal(tensors["w"].rows(0, 4), w)
    assert np.array_equal(tensors["c"].rows(0, 4), w * 2)


def test_values_that_are_not_raw_are_listed_and_not_read(tmp_path):
    odd = helper.make_tensor("w", TensorProto.FLOAT16, [4], np.ones(4, np.float16))
    onnx.save(graph_of(odd), tmp_path / "a.onnx")
    found = open_onnx(tmp_path / "a.onnx").tensors["w"]
    assert (found.shape, found.is_decodable) == ((4,), False)


def test_the_table_of_types_is_theirs():
    for number, (_, width) in TYPES.items():
        assert helper.tensor_dtype_to_np_dtype(number).itemsize == width


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
    path = tmp_path / "in" / "x.onnx"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(CorruptInputError, match=r"x\.onnx"):
        open_onnx(path)


def test_the_sound_ones_of_these_are_read(tmp_path):
    (tmp_path / "data.bin").write_bytes(bytes(64))
    for data in (external(), raw()):
        (tmp_path / "x.onnx").write_bytes(data)
        assert not open_onnx(tmp_path / "x.onnx").tensors["w"].rows(0, 4).any()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_changed_bytes_give_our_error_or_a_sound_file(tmp_path, data):
    path = tmp_path / "a.onnx"
    if not path.exists():
        write_onnx(path, "other", external=True)
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        whole = whole[: data.draw(st.integers(0, len(whole)))]
    (tmp_path / "b.onnx").write_bytes(whole)
    try:
        for found in open_onnx(tmp_path / "b.onnx").tensors.values():
            if found.is_decodable:
                found.rows(0, found.matrix_shape[0])
    except TiedGPTError:
        pass


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


def test_a_name_of_megabytes_is_refused(tmp_path):
    tensor = numpy_helper.from_array(matrix(), "x" * 70_000)
    (tmp_path / "a.onnx").write_bytes(graph_of(tensor).SerializeToString())
    with pytest.raises(CorruptInputError, match="70,000 bytes"):
        open_onnx(tmp_path / "a.onnx")


def test_a_link_out_of_the_directory_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_bytes(bytes(64))
    (tmp_path / "in" / "data.bin").symlink_to(tmp_path / "secret")
    (tmp_path / "in" / "x.onnx").write_bytes(external())
    with pytest.raises(CorruptInputError, match=r"'w' lies in data\.bin, a link out"):
        open_onnx(tmp_path / "in" / "x.onnx")


def test_a_shape_of_megabytes_is_refused(tmp_path):
    shape = b"\x0a\x80\x80\x40" + b"\x01" * (1 << 20)  # field 1, a mebibyte of packed sizes
    tensor = b"\x2a" + b"\x84\x80\x40" + shape
    graph = b"\x3a" + b"\x88\x80\x40" + tensor
    (tmp_path / "x.onnx").write_bytes(graph)
    with pytest.raises(CorruptInputError, match="a shape of 1,048,576 bytes"):
        open_onnx(tmp_path / "x.onnx")


def test_the_metadata_of_others_are_let_be(tmp_path):
    model = graph_of(helper.make_tensor("w", TensorProto.FLOAT, (4,), [1, 2, 3, 4]))
    helper.set_model_props(model, {"author": "x" * 200_000, "tie_word_embeddings": "no", "e": ""})
    onnx.save(model, tmp_path / "a.onnx")
    checkpoint = open_onnx(tmp_path / "a.onnx")
    assert (checkpoint.config, checkpoint.claim) == ({}, None)
