"""Keras 3's saved weights, and the GPT-2 of KerasHub in them.

    model.weights.h5      HDF5; "layers/transformer_decoder_1/_feedforward_layer_norm/vars/0"
    model.weights.json    which of model_00000.weights.h5, ... holds the variables of which layer
    model.keras           a zip of uncompressed files: config.json, model.weights.h5 or its shards,
                          and, of a whole task, the tokenizer's files

(keras-team/keras `src/saving/saving_lib.py`.) h5py lists the arrays; their data are read directly
from their place in the file or archive. An optimizer's variables are left out. No class that a
config names is ever imported. Against files made to harm, HDF5's C library gives no guarantee: on
a heap whose list of free blocks is a circle it never returns.

KerasHub (`models/gpt2/gpt2_backbone.py`, `gpt2_causal_lm.py`) stores matrices as (in, out).
Queries, keys and values are separate arrays with an axis for the heads, (D, H, D/H), and the
attention's output is (H, D/H, D): so the weights themselves say how many heads there are.
GPT2Backbone computes the tanh form of GELU. GPT2CausalLM predicts with the matrix that reads.
"""

from __future__ import annotations

import io
import json
import re
import struct
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import beside, read_json, reading
from tiedgpt.weights.checkpoint import GPT2, Checkpoint, GPTCheckpoint
from tiedgpt.weights.packages import require_package
from tiedgpt.weights.tensors import (
    Storage,
    StoredTensor,
    join_qkv,
    plain_reader,
    printable,
    tensor_in_file,
)

if TYPE_CHECKING:
    from tiedgpt.text.tokenizer import Tokenizer

HDF5_MAGIC, ZIP_MAGIC = b"\x89HDF\r\n\x1a\n", b"PK\3\4"
WEIGHTS, INDEX, CONFIG = "model.weights.h5", "model.weights.json", "config.json"
TOKENIZER = "assets/preprocessor/tokenizer"
MAX_TEXT = 16 << 20
"""Bytes of a text file in an archive."""

BACKBONE, TASK = "GPT2Backbone", "GPT2CausalLM"
EMBEDDING = "reversible_embedding/vars/0"
TOP_NAMES = {
    EMBEDDING: "wte.weight",
    "position_embedding/vars/0": "wpe.weight",
    "layer_normalization/vars/0": "ln_f.weight",
    "layer_normalization/vars/1": "ln_f.bias",
}
BLOCK_NAMES = {
    "_self_attention_layer_norm": "ln_1",
    "_self_attention_layer/query_dense": "attn.query",
    "_self_attention_layer/key_dense": "attn.key",
    "_self_attention_layer/value_dense": "attn.value",
    "_self_attention_layer/output_dense": "attn.c_proj",
    "_feedforward_layer_norm": "ln_2",
    "_feedforward_intermediate_dense": "mlp.c_fc",
    "_feedforward_output_dense": "mlp.c_proj",
}
_BODY = re.compile(r"(?:.*/)?(?:layers|_layer_checkpoint_dependencies)/")
"""What precedes a layer's name: the task's path to its backbone, and Keras's list."""
_BLOCK = re.compile(r"transformer_decoder(?:_([1-9]\d{0,5}))?/([\w/]+)/vars/([01])")


def detect(path: Path, head: bytes) -> bool:
    """Whether it is HDF5, an index of such files, or a zip that holds one."""
    if not head.startswith(ZIP_MAGIC):
        return head.startswith(HDF5_MAGIC) or path.name.endswith(".weights.json")
    try:
        with reading(path, ".keras archive"), zipfile.ZipFile(path) as archive:
            names = archive.NameToInfo
    except CorruptInputError:  # whoever opens it says how it is damaged
        return False
    return CONFIG in names and (WEIGHTS in names or INDEX in names)


def read(path: Path) -> Checkpoint:
    """Open a `.weights.h5`, a `.weights.json` with its shards beside it, or a `.keras` archive.

    Raises `CorruptInputError` for damaged files, `UserError` for data that Keras does not write
    this way (chunked, compressed, in another file).
    """
    h5py = require_package("h5py", "reading Keras's HDF5 files")
    config: dict[str, Any] = {}
    with reading(path, "file of Keras"), path.open("rb") as file:
        head = file.read(8)
        if head.startswith(ZIP_MAGIC):
            with zipfile.ZipFile(path) as archive:
                config = {"keras": dict(json.loads(_text(archive, CONFIG)))}
                whole = WEIGHTS in archive.NameToInfo
                names = [WEIGHTS] if whole else _shards(json.loads(_text(archive, INDEX)))
                places = [(path, *_range(path, archive, name)) for name in names]
        else:
            names = [] if head == HDF5_MAGIC else _shards(read_json(path))
            shards = [beside(path, name) for name in names] or [path]
            places = [(shard, 0, shard.stat().st_size) for shard in shards]
    tensors: dict[str, StoredTensor] = {}
    for place in places:
        _add_tensors(h5py, tensors, *place)
    embeddings = tuple(name for name in tensors if name.endswith(EMBEDDING))
    claim, claim_source = None, "the file does not say whether the head is tied"
    if len(embeddings) == 1:
        claim, claim_source = True, "Keras's ReversibleEmbedding: one matrix reads and predicts"
    files = tuple(dict.fromkeys([path, *(file for file, _, _ in places)]))
    return Checkpoint(
        path, "Keras HDF5", tensors, config, files=files, reads=embeddings, predicts=embeddings,
        claim=claim, claim_source=claim_source,
    )  # fmt: skip


def tokenizer(path: Path) -> Tokenizer | None:
    """Return the tokenizer inside a .keras archive of a whole task; None where there is none.

    Raises `CorruptInputError` and `UserError` as `read`.
    """
    from tiedgpt.text.directory import read_tokenizer
    from tiedgpt.text.tokenizer import Tokenizer

    with (
        tempfile.TemporaryDirectory() as directory,
        reading(path, ".keras archive"),
        zipfile.ZipFile(path) as archive,
    ):
        for name in ("vocabulary.json", "merges.txt"):
            if f"{TOKENIZER}/{name}" in archive.NameToInfo:
                (Path(directory) / name).write_bytes(_text(archive, f"{TOKENIZER}/{name}"))
        found = read_tokenizer(Path(directory))
    return Tokenizer(*found, str(path)) if found else None


def _text(archive: zipfile.ZipFile, name: str) -> bytes:
    info = _member(archive, name)
    if info.file_size > MAX_TEXT:
        raise ValueError(f"its {name} has {info.file_size:,} bytes")
    return archive.read(info)


def _member(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    info = archive.getinfo(name)
    if info.compress_type or info.compress_size != info.file_size:
        raise UserError(
            f"{archive.filename}: {name!r} in it is compressed, which Keras does not do: unpack "
            "it, put its files into a directory, and give that"
        )
    return info


def _range(path: Path, archive: zipfile.ZipFile, name: str) -> tuple[int, int]:
    """Return where a member's bytes begin, after its local header, and how many there are."""
    info = _member(archive, name)
    archive.open(info).close()  # checks the local header
    with path.open("rb") as file:
        file.seek(info.header_offset + 26)
        begin = info.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
    if begin + info.file_size > path.stat().st_size:
        raise ValueError(f"{name} is truncated")
    return begin, info.file_size


def _shards(index: Any) -> list[str]:
    """Return the names of the files among which an index divides the variables."""
    listed = [[s] if isinstance(s, str) else s for s in index["weight_map"].values()]
    names = sorted({name for shards in listed for name in shards})
    if not names:
        raise ValueError("its weight_map names no files")
    return names


class _Part(io.RawIOBase):
    """`size` bytes of a file from byte `begin` on, as a file that h5py can open."""

    def __init__(self, file: BinaryIO, begin: int, size: int) -> None:
        self.file, self.begin, self.size, self.at = file, begin, size, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        self.file.seek(self.begin + self.at)
        content = self.file.read(max(0, min(len(buffer), self.size - self.at)))
        buffer[: len(content)] = content
        self.at += len(content)
        return len(content)


def _add_tensors(
    h5py: Any, tensors: dict[str, StoredTensor], path: Path, begin: int, size: int
) -> None:
    """Add the arrays of an HDF5 file that is `size` bytes of `path` from `begin` on."""

    def visit(name: str, item: Any) -> None:  # links to other files are not followed
        if isinstance(item, h5py.Dataset) and not name.startswith("optimizer/"):
            if name in tensors:
                raise ValueError(f"two shards hold {name}")
            tensors[name] = _tensor(path, begin, size, name, item)

    with (
        reading(path, "HDF5 file"),
        path.open("rb") as file,
        h5py.File(_Part(file, begin, size), "r") as hdf5,
    ):
        hdf5.visititems(visit)


def _tensor(path: Path, begin: int, size: int, name: str, dataset: Any) -> StoredTensor:
    shape, dtype = tuple(dataset.shape or ()), dataset.dtype
    bfloat16 = dtype.kind == "V" and dtype.itemsize == 2  # Keras writes two opaque bytes
    kind = "bfloat16" if bfloat16 else str(dtype)
    if not bfloat16 and dtype.kind not in "fiub":
        return StoredTensor(name, shape, kind, 0, Storage((str(path), name), 0, 0), None)
    offset = dataset.id.get_offset()
    if offset is None and dataset.size:
        raise UserError(
            f"{path}: {printable(name)[:200]} is compressed, chunked, in another file or was never "
            "written, which Keras does not do: save the model again with Keras"
        )
    tensor = tensor_in_file(path, name, shape, kind, begin + (offset or 0), dtype.itemsize)
    if tensor.storage.stop > begin + size:
        raise ValueError(f"{name} of shape {shape} ends after the file")
    return tensor


# The GPT-2 of KerasHub


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT in what Keras saved.

    Raises `UserError` for other models, `CorruptInputError` where variables contradict each other.
    """
    source = str(checkpoint.source)
    fields = GPT2 | _dropout(source, checkpoint.config)
    tensors: dict[str, StoredTensor] = {}
    n_heads: set[int] = set()
    for path, stored in checkpoint.tensors.items():
        name = _our_name(path)
        if name in tensors:
            raise CorruptInputError(f"{source} holds {name} twice, in two models")
        matrix = name.startswith("h.") and name.endswith(".weight")
        if re.search(r"attn\.(query|key|value)", name):
            if len(stored.shape) != 2 + matrix or not stored.count:
                raise CorruptInputError(
                    f"{source}: {printable(path)[:200]} is {stored.shape}, without an axis of heads"
                )
            n_heads.add(stored.shape[-2])
            stored = _heads_joined(stored)
        elif name.endswith("attn.c_proj.weight") and len(stored.shape) == 3:  # (H, D/H, D)
            stored = stored.reshaped((stored.shape[0] * stored.shape[1], stored.shape[2]))
        tensors[name] = stored.turned() if matrix else stored
    if "wte.weight" not in tensors or not n_heads:
        raise UserError(
            f"{source} holds a Keras model other than KerasHub's {BACKBONE}; only that one is read"
        )
    if len(n_heads) > 1:
        numbers = " and ".join(map(str, sorted(n_heads)))
        raise CorruptInputError(f"{source}: its layers have {numbers} heads")
    join_qkv(source, tensors)
    return GPTCheckpoint("KerasHub GPT-2", fields | {"n_head": min(n_heads)}, tensors)


def _our_name(path: str) -> str:
    """Return our name of a variable; unknown paths stay as they are."""
    inner = _BODY.sub("", path, count=1)
    block = _BLOCK.fullmatch(inner)
    if block is None or block[2] not in BLOCK_NAMES:
        return TOP_NAMES.get(inner, path)
    return f"h.{block[1] or 0}.{BLOCK_NAMES[block[2]]}.{('weight', 'bias')[int(block[3])]}"


def _dropout(source: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dropout that config.json says, where there is one; weights say all sizes."""
    described = config.get("keras", config)
    with reading(Path(source), "config.json of KerasHub"):
        if "class_name" not in described:
            return {}
        if described["class_name"] == TASK:
            described = described["config"]["backbone"]
        if described["class_name"] != BACKBONE:
            raise UserError(
                f"{source} holds a {printable(str(described['class_name']))[:80]} of Keras; only "
                f"KerasHub's {BACKBONE} and {TASK} are read"
            )
        dropout = described["config"].get("dropout", 0.0)
    return dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), dropout)


def _heads_joined(stored: StoredTensor) -> StoredTensor:
    """Return (D, H, D/H) as (D, D), and a bias of (H, D/H) as (D,), on the same bytes."""
    width = stored.shape[-2] * stored.shape[-1]
    path, start = Path(str(stored.storage.place)), stored.storage.start
    reader = stored.read and plain_reader(path, start, width, stored.n_bytes // stored.count)
    return replace(stored, shape=(*stored.shape[:-2], width), read=reader)
