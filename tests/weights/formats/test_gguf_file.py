"""GGUF: what llama.cpp's library writes is read as it reads it; hostile files are refused."""

import struct
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tie.checkpoints import matrix, write_gguf
from tiedgpt.errors import CorruptInputError, TiedGPTError
from tiedgpt.weights.formats.gguf_file import TYPES, StoredArray, open_gguf, read_pairs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gguf


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_rows_are_what_their_library_reads(tmp_path, kind):
    path = write_gguf(tmp_path / "a.gguf", {"w": matrix(), "n": matrix()[0]}, kind=kind)
    checkpoint = open_gguf(path)
    assert checkpoint.config["general.architecture"] == "gpt2"
    theirs = {t.name: t for t in gguf.GGUFReader(path).tensors}
    for name, ours in checkpoint.tensors.items():
        expected = gguf.quants.dequantize(theirs[name].data, theirs[name].tensor_type)
        assert ours.n_bytes == theirs[name].n_bytes
        rows = ours.matrix_shape[0]
        assert np.array_equal(ours.rows(0, rows), expected.reshape(ours.matrix_shape))
    w = checkpoint.tensors["w"]
    assert w.shape == (97, 32)
    assert np.array_equal(w.rows(3, 5), w.rows(0, 97)[3:5])


def test_the_table_of_types_is_theirs():
    theirs = {int(t): sizes for t, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: (block, size) for number, (_, block, size) in TYPES.items()} == theirs


def header(n_tensors=0, n_pairs=0, body=b"", version=3):
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_pairs) + body


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def tensor(name=b"w", sizes=(32, 4), kind=0, offset=0) -> bytes:
    body = text(name) + struct.pack("<I", len(sizes))
    return body + b"".join(struct.pack("<Q", n) for n in sizes) + struct.pack("<IQ", kind, offset)


HOSTILE = {
    "nothing": b"",
    "only the magic": b"GGUF",
    "another magic": b"GGUX" + bytes(30),
    "the first version": header(version=1),
    "big-endian": header(version=3 << 24),
    "more tensors than bytes": header(n_tensors=2**62),
    "more pairs than bytes": header(n_pairs=2**62),
    "a huge key": header(n_pairs=1, body=text(b"k", 2**63) + bytes(40)),
    "a huge array": header(
        n_pairs=1, body=text(b"k") + struct.pack("<IIQ", 9, 4, 2**61) + bytes(40)
    ),
    "a huge array of texts": header(
        n_pairs=1, body=text(b"k") + struct.pack("<IIQ", 9, 8, 2**40) + bytes(40)
    ),
    "an unknown kind": header(n_pairs=1, body=text(b"k") + struct.pack("<I", 99) + bytes(40)),
    "arrays without end": header(
        n_pairs=1, body=text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50
    ),
    "a key twice": header(n_pairs=2, body=(text(b"k") + struct.pack("<II", 4, 1)) * 2),
    "an alignment of nothing": header(
        n_pairs=1, body=text(b"general.alignment") + struct.pack("<II", 4, 0)
    ),
    "data cut off": header(n_tensors=1, body=tensor() + bytes(100)),
    "a product that overflows": header(n_tensors=1, body=tensor(sizes=(2**40, 2**40))),
    "an offset past the end": header(n_tensors=1, body=tensor(offset=2**50) + bytes(1000)),
    "too many dimensions": header(n_tensors=1, body=text(b"w") + struct.pack("<I", 2**31)),
    "a row that is no block": header(n_tensors=1, body=tensor(sizes=(31, 4), kind=8) + bytes(999)),
    "a tensor twice": header(n_tensors=2, body=tensor(sizes=(1,)) * 2 + bytes(1000)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(name, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(CorruptInputError, match=r"x\.gguf"):
        open_gguf(path)


def test_a_type_of_the_future_is_listed_and_not_read(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(header(n_tensors=1, body=tensor(kind=77)))
    found = open_gguf(path).tensors["w"]
    assert (found.shape, found.dtype, found.is_decodable) == ((4, 32), "ggml type 77", False)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = write_gguf(tmp_path / "a.gguf", {"w": matrix()}).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in range(0, len(whole) - 32, 41):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptInputError):
            open_gguf(path)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_changed_bytes_give_our_error_or_a_sound_file(tmp_path, data):
    path = tmp_path / "a.gguf"
    if not path.exists():
        write_gguf(path, {"w": matrix(rows=4)})
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "b.gguf").write_bytes(whole)
    try:
        for found in open_gguf(tmp_path / "b.gguf").tensors.values():
            if found.is_decodable:
                found.rows(0, found.matrix_shape[0])
    except TiedGPTError:
        pass


def test_a_name_of_megabytes_is_refused_and_a_long_text_is_stepped_over(tmp_path):
    long = bytes(70_000)
    for name, body in {"key": text(long) + struct.pack("<II", 4, 1), "name": tensor(long)}.items():
        n_pairs = int(name == "key")
        path = tmp_path / name
        path.write_bytes(header(n_tensors=1 - n_pairs, n_pairs=n_pairs, body=body))
        with pytest.raises(CorruptInputError, match="70,000 bytes is none"):
            open_gguf(path)
    value = text(b"note") + struct.pack("<I", 8) + text(long)
    (tmp_path / "value").write_bytes(header(n_pairs=1, body=value))
    assert open_gguf(tmp_path / "value").config == {}


def array(kind: int, length: int, body: bytes, key=b"k") -> bytes:
    return text(key) + struct.pack("<IIQ", 9, kind, length) + body


def test_arrays_are_stepped_over_and_read_when_asked_for(tmp_path):
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "gpt2")
    wanted = {
        "texts": ["", "ein", "Ġwö", "🚀" * 3],
        "whole": [1, -2, 3],
        "floats": [0.5, -2.0],
        "flags": [True, False],
        "one": ["x"],
    }
    for key, values in wanted.items():
        writer.add_array(key, values)
    writer.add_tensor("w", matrix())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    pairs = read_pairs(path)
    assert all(isinstance(pairs[key], StoredArray) for key in wanted)
    assert {key: pairs[key].values() for key in wanted} == wanted
    assert not open_gguf(path).config.keys() & wanted.keys()


def test_arrays_of_arrays_and_texts_that_are_none_are_refused_when_read(tmp_path):
    bodies = {
        "arrays": array(9, 1, struct.pack("<IQB", 0, 1, 7)),
        "UTF-8": array(8, 2, text(b"fine") + text(b"\xff\xfe")),
    }
    for why, body in bodies.items():
        path = tmp_path / "x.gguf"
        path.write_bytes(header(n_pairs=1, body=body))
        with pytest.raises(CorruptInputError, match=why):
            read_pairs(path)["k"].values()


def test_an_array_that_is_gone_when_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(header(n_pairs=1, body=array(4, 100, bytes(400))))
    found = read_pairs(path)["k"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptInputError, match="cut off"):
        found.values()


def test_our_own_pair_says_whether_two_matrices_are_meant(tmp_path):
    def file(value: bytes) -> bytes:
        return header(n_pairs=1, body=text(b"tiedgpt.tie_word_embeddings") + value)

    path = tmp_path / "x.gguf"
    for value in (True, False):
        path.write_bytes(file(struct.pack("<I?", 7, value)))
        assert open_gguf(path).claim is value
        assert str(value).lower() in open_gguf(path).claim_source
    path.write_bytes(file(struct.pack("<II", 4, 1)))
    with pytest.raises(CorruptInputError, match="neither true nor false"):
        open_gguf(path)
