"""Checkpoints built byte by byte, and tables of hostile and unsupported ones."""

import json
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from tiedgpt.weights.formats.openai_gpt2.tensorflow_bundle import MAGIC as TABLE_MAGIC
from tiedgpt.weights.formats.openai_gpt2.tensorflow_bundle import crc32c, mask_checksum
from tiedgpt.weights.source import open_checkpoint

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from onnx import ModelProto, TensorProto, external_data_helper, helper

# safetensors and torch.save


def safetensors_file(header, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def safetensors_entry(shape, start: int, end: int, dtype="F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write_zip(path: Path, members: dict[str, bytes], compression=zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in members.items():
            file.writestr(f"a/{name}", data)


# GGUF


def gguf_file(n_tensors=0, n_pairs=0, body=b"", version=3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_pairs) + body


def gguf_text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def gguf_pair(key: bytes, value_type: int, value: bytes = b"") -> bytes:
    return gguf_text(key) + struct.pack("<I", value_type) + value


def gguf_tensor(name=b"w", sizes=(32, 4), ggml_type=0, offset=0) -> bytes:
    body = gguf_text(name) + struct.pack("<I", len(sizes))
    return (
        body + b"".join(struct.pack("<Q", n) for n in sizes) + struct.pack("<IQ", ggml_type, offset)
    )


# llm.c


def llmc_file(*numbers: int, body: int = 0) -> bytes:
    return struct.pack("<256i", *numbers, *[0] * (256 - len(numbers))) + bytes(body)


# ONNX


def onnx_model(*tensors: TensorProto, nodes=()) -> ModelProto:
    return helper.make_model(helper.make_graph(list(nodes), "g", [], [], list(tensors)))


def onnx_file(*tensors: TensorProto) -> bytes:
    return onnx_model(*tensors).SerializeToString()


def onnx_tensor(name="w", shape=(4, 4), n_bytes=64) -> TensorProto:
    return TensorProto(name=name, data_type=1, dims=shape, raw_data=bytes(n_bytes))


def onnx_external(location="data.bin", offset=0, length=64, shape=(4, 4)) -> bytes:
    tensor = onnx_tensor(shape=shape)
    external_data_helper.set_external_data(tensor, location, offset=offset, length=length)
    tensor.ClearField("raw_data")
    return onnx_file(tensor)


def onnx_graphs(depth: int) -> bytes:
    """A graph inside a graph inside a graph."""
    model = onnx_model()
    graph = model.graph
    for _ in range(depth):
        graph = graph.node.add(op_type="If").attribute.add(name="then").g
    return model.SerializeToString()


# TensorFlow


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


def checksum(content: bytes) -> int:
    return mask_checksum(crc32c(content))


def table_entry(shape=(2, 3), dtype=1, shard=0, offset=0, size=24, crc=0, more=b"") -> bytes:
    dims = b"".join(message((2, message((1, n)))) for n in shape)
    fields = message((1, dtype), (2, dims), (3, shard), (4, offset), (5, size))
    return fields + varint(6 << 3 | 5) + struct.pack("<I", crc) + more


def table_block(*pairs: tuple[bytes, bytes]) -> bytes:
    run, before = b"", b""
    for key, value in pairs:
        shared = 0
        while shared < min(len(key), len(before)) and key[shared] == before[shared]:
            shared += 1
        run += varint(shared) + varint(len(key) - shared) + varint(len(value))
        run, before = run + key[shared:] + value, key
    return run + struct.pack("<II", 0, 1)


def table(*blocks: bytes, compression: int = 0, handles=None) -> bytes:
    """Return an index of these blocks."""

    def sealed(body: bytes, compression: int) -> bytes:
        return (
            body + bytes([compression]) + struct.pack("<I", checksum(body + bytes([compression])))
        )

    out, places = b"", []
    for body in blocks:
        places.append(varint(len(out)) + varint(len(body)))
        out += sealed(body, compression)
    index = table_block(*((bytes([97 + i]), handle) for i, handle in enumerate(handles or places)))
    handle = varint(len(out)) + varint(len(index))
    footer = (varint(0) + varint(0) + handle).ljust(40, b"\0") + TABLE_MAGIC
    return out + sealed(index, 0) + footer


TABLE_HEADER = (b"", message((1, 1), (3, message((1, 1)))))


def bundle(*entries: tuple[bytes, bytes], header: bytes = TABLE_HEADER[1]) -> bytes:
    return table(table_block((b"", header), *entries))


def write_bundle(directory: Path, index: bytes, data: bytes = bytes(24)) -> Path:
    (directory / "m.index").write_bytes(index)
    (directory / "m.data-00000-of-00001").write_bytes(data)
    return directory / "m.index"


# Hostile files


def save(value, **options) -> Callable[[Path], object]:
    return lambda path: torch.save(value, path, **options)


def save_members(members: dict[str, bytes], **options) -> Callable[[Path], object]:
    return lambda path: write_zip(path, members, **options)


def cut_a_storage(path: Path) -> None:
    """Save a shared matrix, and leave its last bytes out of the zip."""
    state = {"a": torch.arange(8.0), "b": torch.ones(100), "c": torch.ones(100)[:50]}
    torch.save({**state, "tied": state["b"]}, path)
    assert [*open_checkpoint(path).tensors] == ["a", "b", "c", "tied"]
    with zipfile.ZipFile(path) as saved:
        members = {info.filename: saved.read(info) for info in saved.infolist()}
    members = {n: m[:-40] if len(m) == 400 else m for n, m in members.items()}
    write_zip(path, {name.partition("/")[2]: member for name, member in members.items()})


class Grows:
    def __reduce__(self):
        return bytearray, (1 << 33,)


def deep_key(n_items: int, depth: int) -> bytes:
    """A pickled dict whose key is a tuple that holds a tuple `n_items` times, `depth` deep."""
    key = b"K\x00\x85q\x00" + (b"(" + b"h\x00" * n_items + b"tq\x00") * depth
    return b"\x80\x02}" + key + b"K\x00s."


def llmc_sizes(version, n_positions=6, rows=5, layers=2, heads=2, width=4, padded=8, **body):
    return llmc_file(20240326, version, n_positions, rows, layers, heads, width, padded, **body)


def one(**entry) -> bytes:
    """A safetensors file of a single entry over four bytes."""
    return safetensors_file({"a": safetensors_entry([1], 0, 4) | entry}, bytes(4))


EMPTY_DICT = pickle.dumps({}, protocol=2)
TOO_SHORT, AFTER, BESIDE = "fewer are left", "ends after the file", "is not beside it"
DAMAGED, CANNOT, WIRE = "is damaged or no ", "cannot be", "Wire format was corrupt"
SHAPE, HEADER, CUT = "invalid shape|overflow", "invalid JSON in header", "cut off"
UNKNOWN = "is of no known checkpoint format"
WORD = (b"w", table_entry())
HOSTILE = {
    "x.gguf": {
        "nothing": (b"", "is empty"),
        "only the magic": (b"GGUF", TOO_SHORT),
        "another magic": (b"GGUX" + bytes(30), "begins with b'GGUX'"),
        "a program": (b"PE\0\0", "damaged"),
        "the first version": (gguf_file(version=1), "version 1; 2 and 3 are read"),
        "big-endian": (gguf_file(version=3 << 24), "version 50331648"),
        "more tensors than bytes": (gguf_file(n_tensors=2**62), TOO_SHORT),
        "more pairs than bytes": (gguf_file(n_pairs=2**62), TOO_SHORT),
        "a huge key": (gguf_file(n_pairs=1, body=gguf_text(b"k", 2**63) + bytes(40)), TOO_SHORT),
        "a huge array": (
            gguf_file(n_pairs=1, body=gguf_pair(b"k", 9, struct.pack("<IQ", 4, 2**61) + bytes(40))),
            TOO_SHORT,
        ),
        "a huge array of texts": (
            gguf_file(n_pairs=1, body=gguf_pair(b"k", 9, struct.pack("<IQ", 8, 2**40) + bytes(40))),
            TOO_SHORT,
        ),
        "an unknown kind": (gguf_file(n_pairs=1, body=gguf_pair(b"k", 99, bytes(40))), "type 99"),
        "arrays without end": (
            gguf_file(n_pairs=1, body=gguf_pair(b"k", 9, struct.pack("<IQ", 9, 1) * 50)), "type 9",
        ),
        "a key twice": (
            gguf_file(n_pairs=2, body=gguf_pair(b"k", 4, bytes(4)) * 2), "occurs twice",
        ),
        "a claim that is a number": (
            gguf_file(n_pairs=1, body=gguf_pair(b"tiedgpt.tie_word_embeddings", 4, b"\1\0\0\0")),
            "tie_word_embeddings must be true or false, got 1",
        ),
        "an alignment of nothing": (
            gguf_file(n_pairs=1, body=gguf_pair(b"general.alignment", 4, bytes(4))),
            "general.alignment is 0",
        ),
        "data cut off": (gguf_file(n_tensors=1, body=gguf_tensor() + bytes(100)), AFTER),
        "a product that overflows": (
            gguf_file(n_tensors=1, body=gguf_tensor(sizes=(2**40, 2**40))), AFTER,
        ),
        "an offset past the end": (
            gguf_file(n_tensors=1, body=gguf_tensor(offset=2**50) + bytes(1000)), AFTER,
        ),
        "too many dimensions": (
            gguf_file(n_tensors=1, body=gguf_text(b"w") + struct.pack("<I", 2**31)), "dimensions",
        ),
        "a row that is no block": (
            gguf_file(n_tensors=1, body=gguf_tensor(sizes=(31, 4), ggml_type=8) + bytes(999)),
            "rows of 31 in blocks of 32",
        ),
        "a tensor twice": (
            gguf_file(n_tensors=2, body=gguf_tensor(sizes=(1,)) * 2 + bytes(1000)), "occurs twice",
        ),
        "a key of kilobytes": (
            gguf_file(n_pairs=1, body=gguf_pair(bytes(70_000), 4, bytes(4))), "more than 64 KiB",
        ),
        "a name of kilobytes": (
            gguf_file(n_tensors=1, body=gguf_tensor(bytes(70_000))), DAMAGED,
        ),
    },
    "x.onnx": {
        "out of the directory": (onnx_external("../secret"), BESIDE),
        "out by a roundabout way": (onnx_external("sub/../../secret"), BESIDE),
        "an absolute place": (onnx_external("/etc/passwd"), BESIDE),
        "no place": (onnx_external(""), BESIDE),
        "a file that is not there": (onnx_external("missing.bin"), BESIDE),
        "a link out of the directory": (onnx_external("link.bin"), "a link out of its directory"),
        "bytes past the end": (onnx_external(offset=1000), CANNOT),
        "a negative offset": (onnx_external(offset=-4), CANNOT),
        "another length": (onnx_external(length=32), CANNOT),
        "a huge shape": (onnx_external(shape=(2**40, 2**40), length=64), CANNOT),
        "raw data too short": (onnx_file(onnx_tensor(n_bytes=60)), DAMAGED),
        "raw data of a huge shape": (onnx_file(onnx_tensor(shape=(2**40, 2**20))), DAMAGED),
        "a negative size": (onnx_file(onnx_tensor(shape=(-4, -4))), DAMAGED),
        "a name twice": (onnx_file(onnx_tensor(), onnx_tensor()), "twice"),
        "graphs without end": (onnx_graphs(40), DAMAGED),
        "no graph": (b"\x08\x08", "holds no graph"),
        "a name of kilobytes": (onnx_file(onnx_tensor("x" * 70_000)), "a name .* nobody writes"),
        "a shape of megabytes": (
            b"\x3a\x88\x80\x40\x2a\x84\x80\x40\x0a\x80\x80\x40" + b"\1" * (1 << 20),
            "a shape that nobody writes",
        ),
        "a length past the end": (b"\x3a\xff\xff\xff\xff\x0f" + bytes(30), WIRE),
        "a number without end": (b"\x08" + b"\xff" * 30, WIRE),
        "field nought": (b"\x00\x00", WIRE),
        "an unknown wire type": (b"\x0b\x00", WIRE),
        "empty": (b"", "is empty"),
    },
    "x.bin": {
        "only the magic of llm.c": (struct.pack("<i", 20240326), "version 0"),
        "another magic": (llmc_file(20240520, 3, 6, 5, 2, 2, 4, 8), "begins neither as a zip"),
        "big-endian": (
            struct.pack(">256i", 20240326, 3, 6, 5, 2, 2, 4, 8, *[0] * 248), "begins neither as",
        ),
        "a version of its past": (llmc_sizes(2, padded=0), "version 2.*1 and 3 .* are read"),
        "bfloat16 of its past, also called 3": (llmc_sizes(3, padded=0), "'padded_vocab_size': 0"),
        "a version of its future": (llmc_sizes(9), "version 9"),
        "no layers": (llmc_sizes(3, layers=0), "'num_layers': 0"),
        "a negative width": (llmc_sizes(3, width=-4), "'channels': -4"),
        "less rows than tokens": (llmc_sizes(3, padded=4), "'padded_vocab_size': 4"),
        "sizes beyond every disk": (llmc_sizes(3, *[2**31 - 1] * 6), CUT),
        "layers beyond every memory": (llmc_sizes(5, 1, 1, 2**31 - 1, 1, 1, 1), CUT),
        "no body": (llmc_sizes(3), "3,232 bytes are described, 1,024 are there"),
        "a body too long": (llmc_sizes(3, body=10_000), "11,024 are there"),
        "a text": (b"Once upon a time", "begins neither as a zip file nor as a pickle"),
    },
    "x.safetensors": {
        "empty": (b"", "is empty"),
        "a huge header": (safetensors_file({}, length=2**62), "a header of 4,611,686,"),
        "too many tensors": (safetensors_file(b"[" * 40_000_000), "a header of 40,000,000 bytes"),
        "a header past the end": (safetensors_file({}, length=1000), "header length"),
        "not json": (safetensors_file(b"\x80{{{"), "UTF-8"),
        "a list": (safetensors_file(b"[]"), HEADER),
        "a hole": (
            safetensors_file(
                {"a": safetensors_entry([1], 0, 4), "b": safetensors_entry([1], 8, 12)}, bytes(12)
            ), "offset for tensor",
        ),
        "an overlap": (
            safetensors_file(
                {"a": safetensors_entry([2], 0, 8), "b": safetensors_entry([1], 4, 8)}, bytes(8)
            ), "offset for tensor",
        ),
        "bytes left over": (
            safetensors_file({"a": safetensors_entry([1], 0, 4)}, bytes(12)), "not fully covered",
        ),
        "cut off": (
            safetensors_file({"a": safetensors_entry([100], 0, 400)}, bytes(12)), "not fully",
        ),
        "shape and size differ": (one(shape=[3]), SHAPE),
        "a product that overflows": (one(shape=[2**40, 2**40]), SHAPE),
        "a negative size": (one(shape=[-1]), HEADER),
        "a bool for a size": (one(shape=[True]), HEADER),
        "a float for a size": (one(shape=[1.0]), HEADER),
        "an unknown type": (one(dtype="F13"), "F13"),
        "no type": (
            safetensors_file({"a": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "dtype",
        ),
        "an entry that is text": (safetensors_file({"a": "x"}), HEADER),
        "metadata that are text": (safetensors_file({"__metadata__": "x"}), HEADER),
        "a name that is no text": (one().replace(b'{"a"', b'{"\\ud800"'), DAMAGED),
        "deep": (
            safetensors_file(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "recursion limit",
        ),
    },
    "x.index": {
        "an empty file": (b"", "is empty"),
        "megabytes": (bytes(5 << 20), "larger than 4 MB"),
        "only the footer": (bytes(40) + TABLE_MAGIC, "outside the file"),
        "no header": (table(table_block(WORD)), DAMAGED),
        "nothing at all": (table(table_block()), DAMAGED),
        "no files of data": (bundle(WORD, header=message((1, 0))), "of-00000', which is not"),
        "a billion files of data": (bundle(WORD, header=message((1, 10**9))), "of-1000000000"),
        "a file of data too many": (bundle(WORD, header=message((1, 2))), "of-00002"),
        "a header of garbage": (bundle(WORD, header=b"\xff" * 9), DAMAGED),
        "an entry of garbage": (bundle((b"w", b"\x0f\x00")), DAMAGED),
        "a key twice": (table(table_block(TABLE_HEADER, WORD), table_block(WORD)), "repeated"),
        "no type": (bundle((b"w", table_entry(dtype=0))), CANNOT),
        "a shape larger than its bytes": (
            bundle((b"w", table_entry(shape=(2**40, 2**40)))), CANNOT,
        ),
        "a negative size": (bundle((b"w", table_entry(shape=(-2, -3)))), CANNOT),
        "an unknown rank": (
            bundle((b"w", table_entry(shape=(), more=message((2, b"\x18\1"))))), CANNOT,
        ),
        "65 dimensions": (bundle((b"w", table_entry(shape=(1,) * 65, size=4))), CANNOT),
        "another type's bytes": (bundle((b"w", table_entry(dtype=19))), CANNOT),
        "a shard that is not": (bundle((b"w", table_entry(shard=1))), "00001-of-00001"),
        "a negative shard": (bundle((b"w", table_entry(shard=-1))), BESIDE),
        "an offset past the end": (bundle((b"w", table_entry(offset=1))), "1 to 25 of 24"),
        "a negative offset": (bundle((b"w", table_entry(offset=-1))), "of 24"),
        "a huge text": (bundle((b"w", table_entry(dtype=7, size=2**60))), "of 24"),
        "snappy": (table(table_block(TABLE_HEADER, WORD), compression=1), "compressed"),
        "another compression": (
            table(table_block(TABLE_HEADER, WORD), compression=9), "compressed",
        ),
        "a block outside": (
            table(table_block(), handles=[varint(2**63) + varint(9)]), "outside the file",
        ),
        "a block of nothing": (
            table(table_block(), handles=[varint(0) + varint(0)]), "outside the file",
        ),
        "a block twice": (table(table_block(), handles=[b"\0\x08"] * 2), "overlap"),
        "half a handle": (table(table_block(), handles=[b"\0"]), DAMAGED),
        "more restart points than bytes": (table(struct.pack("<I", 2**31)), DAMAGED),
        "a key that shares too much": (table(b"\x05\x01\x00k" + bytes(4)), "longer than its block"),
        "a key that does not end": (table(b"\x00\x7f\x00k" + bytes(4)), "longer than its block"),
        "a key of kilobytes": (table(table_block((b"k" * 4097, b""))), "longer than its block"),
        "a value that does not end": (table(b"\x00\x00\x7f" + bytes(4)), "longer than its block"),
    },
    "x.pt": {
        "a tensor": (save(torch.ones(3)), "holds no state dict"),
        "a list": (save([torch.ones(3)]), "holds no state dict"),
        "a dict without tensors": (save({"a": 1}), "holds no state dict"),
        "an empty dict": (save({}), "holds no state dict"),
        "empty dicts": (save({"model": {"model": {}}}), "holds no state dict"),
        "a module": (save(torch.nn.Linear(2, 3)), "never run: save the state_dict"),
        "another zip file": (save_members({"hello.txt": b"hello"}), "no plain file of tensors"),
        "a compressed pickle": (
            save_members({"data.pkl": EMPTY_DICT}, compression=zipfile.ZIP_DEFLATED), "compressed",
        ),
        "a huge member": (
            save_members({"data.pkl": EMPTY_DICT, "byteorder": bytes((64 << 20) + 1)}),
            "not what torch",
        ),
        "a tensor larger than its storage": (
            save({"wte.weight": torch.ones(1).expand(2**40, 2**20)}),
            r"contradicts itself: 'wte\.weight'",
        ),
        "a storage cut short": (cut_a_storage, "cut short in the zip"),
        "bytes of any number": (save({"more": Grows()}), "bytearray"),
        "bytes of any number, before torch 1.6": (
            save({"more": Grows()}, _use_new_zipfile_serialization=False), "bytearray",
        ),
        "a tuple twice in a tuple": (
            save_members({"data.pkl": deep_key(2, 40)}), "tuples inside tuples",
        ),
        "a tuple 5000 times in a tuple": (
            save_members({"data.pkl": deep_key(5000, 3)}), "tuples inside tuples",
        ),
    },
    "x": {
        "nothing": (b"", "is empty"),
        "a text": (b"hello world", UNKNOWN),
        "a card": (b"# A model\n", UNKNOWN),
        "a message": (b"\x08\x01hello", UNKNOWN),
        "an empty object": (b"{}", UNKNOWN),
        "zeros": (bytes(50), UNKNOWN),
    },
}  # fmt: skip
"""Name of the file -> damage -> its content, or how it is written, and words of the error."""
UNSUPPORTED = {
    "a sparse tensor": ("x.pt", save({"w": torch.eye(3).to_sparse()}), "not read here"),
    "big-endian": ("x.index", bundle(WORD, header=message((1, 1), (2, 1))), "big-endian"),
    "a later TensorFlow": (
        "x.index", bundle(WORD, header=message((1, 1), (3, message((1, 9), (2, 9))))), "version 9",
    ),
}  # fmt: skip
