"""TensorFlow checkpoints: what its Saver writes is read bit for bit; hostile files are refused."""

import shutil
import struct
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.weights.fixtures.make_tensorflow import BRAIN, DIRECTORY, TYPES, values
from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.weights.checkpoint import decode
from tiedgpt.weights.formats.openai_gpt2.tensorflow_bundle import MAGIC, crc32c
from tiedgpt.weights.formats.openai_gpt2.tensorflow_bundle import mask_checksum as mask
from tiedgpt.weights.sources import open_checkpoint

INDEX = "model.ckpt.index"
DATA = "model.ckpt.data-00000-of-00001"


def numbers(tensor):
    rows, _ = tensor.matrix_shape
    return tensor.rows(0, rows).reshape(tensor.shape)


# Files of TensorFlow's own.


def test_every_tensor_is_what_was_saved():
    checkpoint = open_checkpoint(DIRECTORY / "gpt2" / INDEX)
    expected = values()
    assert checkpoint.container == "TensorFlow"
    assert checkpoint.config == {
        "vocab_size": 61, "n_positions": 16, "n_embd": 12, "n_head": 3, "n_layer": 2,
    }  # fmt: skip
    assert [file.name for file in checkpoint.files] == [INDEX, DATA]
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in checkpoint.tensors.items():
        assert (tensor.dtype, tensor.shape) == ("float32", expected[name].shape)
        assert np.array_equal(numbers(tensor), expected[name]), name


def test_a_checkpoint_in_two_files_with_optimizer_slots_is_read():
    checkpoint = open_checkpoint(DIRECTORY / "tuned" / INDEX)
    assert len({tensor.storage.place for tensor in checkpoint.tensors.values()}) == 2
    for name, value in values().items():
        assert np.array_equal(numbers(checkpoint.tensors[name]), value)
        assert checkpoint.tensors[f"{name}/Adam"].shape == value.shape
    step = checkpoint.tensors["global_step"]
    assert (step.shape, step.dtype, step.native(0, 1).item()) == ((), "int64", 1)


def test_every_type_is_listed_and_those_of_numbers_are_read():
    tensors = open_checkpoint(DIRECTORY / "types" / INDEX).tensors
    for name, value in TYPES.items():
        native = tensors[name].native(0, tensors[name].matrix_shape[0])
        assert tensors[name].shape == value.shape
        assert native.tobytes() == value.tobytes(), name
    brain = tensors["brain"]
    assert brain.dtype == "bfloat16"
    assert np.array_equal(decode(brain.native(0, 2), "bfloat16"), BRAIN)
    assert (tensors["text"].dtype, tensors["text"].is_decodable) == ("string", False)


def test_a_tensor_in_slices_is_refused_by_name():
    with pytest.raises(UserError, match=r"model/wte.* is stored in slices"):
        open_checkpoint(DIRECTORY / "sliced" / INDEX)


# Damage.


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(DIRECTORY / "gpt2", tmp_path / "gpt2")


def test_a_changed_byte_in_the_data_is_found_when_its_tensor_is_read(copy):
    content = bytearray((copy / DATA).read_bytes())
    tensors = open_checkpoint(copy / INDEX).tensors
    for name in ("model/h0/attn/c_attn/w", "model/wte", "model/ln_f/b"):
        at = tensors[name].storage.stop - 1
        damaged = content.copy()
        damaged[at] ^= 16
        (copy / DATA).write_bytes(damaged)
        for other, tensor in open_checkpoint(copy / INDEX).tensors.items():
            if other != name:
                numbers(tensor)
                continue
            for _ in range(2):  # it stays an error, also for rows that are sound
                with pytest.raises(CorruptInputError, match=f"{name} do not match their checksum"):
                    tensor.rows(0, 1)


def test_a_changed_byte_anywhere_in_the_index_is_an_error_or_changes_nothing(copy):
    content = (copy / INDEX).read_bytes()
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        (copy / INDEX).write_bytes(damaged)
        try:
            tensors = open_checkpoint(copy / INDEX).tensors
        except CorruptInputError as error:
            assert INDEX in str(error)
        else:  # the block of the (empty) meta index is not needed, nor is the footer's padding
            assert len(tensors) == 28


def test_a_missing_file_of_data_is_named(copy):
    (copy / DATA).unlink()
    with pytest.raises(CorruptInputError, match=r"data-00000-of-00001.*not beside it"):
        open_checkpoint(copy / INDEX)
    (copy / DATA).mkdir()
    with pytest.raises(CorruptInputError, match="data-00000-of-00001"):
        open_checkpoint(copy / INDEX)


def test_without_the_package_of_checksums_the_error_names_the_extra(copy, monkeypatch):
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(UserError, match=r"pip install 'tiedgpt\[formats\]'"):
        open_checkpoint(copy / INDEX)


def test_checksums_are_castagnolis_and_masked_as_leveldb_does():
    assert crc32c(b"123456789") == crc32c(b"6789", crc32c(b"12345")) == 0xE3069283
    assert (mask(0), mask(1 << 15)) == (0xA282EAD8, 0xA282EAD9)


# Tables built byte by byte.


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def message(*fields) -> bytes:
    """Encode (number, value): an int as a varint, bytes with their length."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def entry(shape=(2, 3), kind=1, shard=0, offset=0, size=24, crc=0, more=b"") -> bytes:
    dims = b"".join(message((2, message((1, n)))) for n in shape)
    fields_of = message((1, kind), (2, dims), (3, shard), (4, offset), (5, size))
    return fields_of + varint(6 << 3 | 5) + struct.pack("<I", crc) + more


def pair(key: bytes, value: bytes, before: bytes = b"") -> bytes:
    shared = 0
    while shared < min(len(key), len(before)) and key[shared] == before[shared]:
        shared += 1
    return varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value


def block(pairs: list[tuple[bytes, bytes]]) -> bytes:
    befores = [b"", *(key for key, _ in pairs)]
    run = b"".join(pair(k, v, b) for (k, v), b in zip(pairs, befores, strict=False))
    return run + struct.pack("<II", 0, 1)


def sealed(body: bytes, kind: int = 0) -> bytes:
    return body + bytes([kind]) + struct.pack("<I", mask(crc32c(body + bytes([kind]))))


def table(blocks: list[bytes], kind: int = 0, handles=None, index=None) -> bytes:
    out, places = b"", []
    for body in blocks:
        places.append(varint(len(out)) + varint(len(body)))
        out += sealed(body, kind)
    places = handles or places
    body = index or block([(bytes([97 + at]), handle) for at, handle in enumerate(places)])
    handle = varint(len(out)) + varint(len(body))
    footer = (varint(0) + varint(0) + handle).ljust(40, b"\0") + MAGIC
    return out + sealed(body) + footer


HEADER = message((1, 1), (3, message((1, 1))))


def bundle(*entries, header=HEADER) -> bytes:
    return table([block([(b"", header), *entries])])


def write(directory, index: bytes, data: bytes = bytes(24)):
    (directory / "m.index").write_bytes(index)
    (directory / "m.data-00000-of-00001").write_bytes(data)
    return directory / "m.index"


def test_a_table_of_several_blocks_is_read(tmp_path):
    data = np.arange(600, dtype="<f4")
    keys = [(b"k%03d" % at, data[6 * at : 6 * at + 6].tobytes()) for at in range(100)]
    entries = [
        (key, entry(offset=24 * at, crc=mask(crc32c(raw)))) for at, (key, raw) in enumerate(keys)
    ]
    blocks = [[(b"", HEADER), *entries[:40]], entries[40:41], entries[41:]]
    path = write(tmp_path, table([block(pairs) for pairs in blocks]), data.tobytes())
    stored = open_checkpoint(path).tensors
    assert list(stored) == [key.decode() for key, _ in keys]
    assert np.array_equal(np.stack([numbers(t) for t in stored.values()]).ravel(), data)


ONE = (b"w", entry())
HOSTILE = {
    "an empty file": b"",
    "megabytes": bytes(5 << 20),
    "only the footer": bytes(40) + MAGIC,
    "no header": table([block([ONE])]),
    "nothing at all": table([block([])]),
    "no files of data": bundle(ONE, header=message((1, 0))),
    "a billion files of data": bundle(ONE, header=message((1, 10**9))),
    "a file of data too many": bundle(ONE, header=message((1, 2))),
    "a header of garbage": bundle(ONE, header=b"\xff" * 9),
    "an entry of garbage": bundle((b"w", b"\x0f\x00")),
    "a key twice": table([block([(b"", HEADER), ONE]), block([ONE])]),
    "no type": bundle((b"w", entry(kind=0))),
    "a shape larger than its bytes": bundle((b"w", entry(shape=(2**40, 2**40)))),
    "a negative size": bundle((b"w", entry(shape=(-2, -3)))),
    "an unknown rank": bundle((b"w", entry(shape=(), more=message((2, b"\x18\1"))))),
    "65 dimensions": bundle((b"w", entry(shape=(1,) * 65, size=4))),
    "another type's bytes": bundle((b"w", entry(kind=19))),
    "a shard that is not": bundle((b"w", entry(shard=1))),
    "a negative shard": bundle((b"w", entry(shard=-1))),
    "an offset past the end": bundle((b"w", entry(offset=1))),
    "a negative offset": bundle((b"w", entry(offset=-1))),
    "a huge text": bundle((b"w", entry(kind=7, size=2**60))),
    "snappy": table([block([(b"", HEADER), ONE])], kind=1),
    "another compression": table([block([(b"", HEADER), ONE])], kind=9),
    "a block outside": table([block([])], handles=[varint(2**63) + varint(9)]),
    "a block of nothing": table([block([])], handles=[varint(0) + varint(0)]),
    "a block twice": table([block([])], handles=[b"\0\x08"] * 2),
    "half a handle": table([block([])], handles=[b"\0"]),
    "more restart points than bytes": table([struct.pack("<I", 2**31)]),
    "a key that shares too much": table([b"\x05\x01\x00k" + bytes(4)]),
    "a key that does not end": table([b"\x00\x7f\x00k" + bytes(4)]),
    "a key of kilobytes": table([block([(b"k" * 4097, b"")])]),
    "a value that does not end": table([b"\x00\x00\x7f" + bytes(4)]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tables_are_refused(name, tmp_path):
    with pytest.raises(CorruptInputError, match=r"m\.(index|data)") as error:
        open_checkpoint(write(tmp_path, HOSTILE[name]))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (message((1, 1), (2, 1)), "big-endian"),
        (message((1, 1), (3, message((1, 9), (2, 9)))), "version 9"),
    ],
)
def test_unsupported_features_are_user_errors(header, why, tmp_path):
    with pytest.raises(UserError, match=why):
        open_checkpoint(write(tmp_path, bundle(ONE, header=header)))


def test_a_name_is_never_a_path(tmp_path):
    path = write(tmp_path, bundle((b"../../etc/passwd", entry(crc=mask(crc32c(bytes(24)))))))
    tensor = open_checkpoint(path).tensors["../../etc/passwd"]
    assert tensor.storage.place == str(tmp_path / "m.data-00000-of-00001")


def test_an_unknown_type_is_listed_and_not_read(tmp_path):
    tensor = open_checkpoint(write(tmp_path, bundle((b"w", entry(kind=77))))).tensors["w"]
    assert (tensor.shape, tensor.dtype, tensor.is_decodable) == (
        (2, 3),
        "TensorFlow type 77",
        False,
    )


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_changed_entries_with_valid_checksums_give_our_error_or_a_valid_file(tmp_path, data):
    sound = entry(crc=mask(crc32c(bytes(24))))
    pairs = [(b"", HEADER), (b"a", sound), (b"b", sound)]
    body = bytearray(block(pairs))
    for _ in range(data.draw(st.integers(0, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del body[data.draw(st.integers(0, len(body))) :]
    try:
        for tensor in open_checkpoint(write(tmp_path, table([bytes(body)]))).tensors.values():
            if tensor.is_decodable:
                numbers(tensor)
    except TiedGPTError:
        pass
