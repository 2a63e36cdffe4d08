"""Keras 3's saved weights, and the GPT-2 of KerasHub in them.

    model.weights.h5      HDF5; "layers/transformer_decoder_1/_feedforward_layer_norm/vars/0"
    model.weights.json    which of model_00000.weights.h5, ... holds the variables of which layer
    model.keras           a zip of uncompressed files: config.json, model.weights.h5 or its shards,
                          and, of a whole task, the tokenizer's files

(keras-team/keras `src/saving/saving_lib.py`.) h5py lists the arrays; their data are read directly
from their place in the file or archive. An optimizer's variables are left out. No class that a
config names is ever imported. Against files made to harm, HDF5's C library gives no guarantee.

KerasHub (`models/gpt2/gpt2_backbone.py`, `gpt2_causal_lm.py`) stores matrices as (in, out).
Queries, keys and values are separate arrays with an axis for the heads, (D, H, D/H), and the
attention's output is (H, D/H, D): so the weights themselves say how many heads there are.
GPT2Backbone computes the tanh form of GELU. GPT2CausalLM predicts with the matrix that reads.
"""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.files import beside, read_json
from tiedgpt.weights.checkpoint import Checkpoint, GPTCheckpoint, LazyTensor
from tiedgpt.weights.keras_archive import (
    CONFIG,
    INDEX,
    WEIGHTS,
    ZIP_MAGIC,
    is_archive,
    open_archive,
    read_json_member,
    read_member,
    stored_range,
)
from tiedgpt.weights.packages import require_package
from tiedgpt.weights.tensors import Native, Storage, StoredTensor, joined, plain_reader, printable

if TYPE_CHECKING:
    from tiedgpt.text.tokenizer import Tokenizer

FORMAT = "Keras HDF5"
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
EMBEDDING = "reversible_embedding/vars/0"
OPTIMIZER = "optimizer/"
ASSETS = "assets/preprocessor/tokenizer"
TOKENIZER_FILES = ("vocabulary.json", "merges.txt")
MAX_SHARDS = 4096

BACKBONE, TASK = "GPT2Backbone", "GPT2CausalLM"
TOP_NAMES = {
    "reversible_embedding/vars/0": "wte.weight",
    "position_embedding/vars/0": "wpe.weight",
    "layer_normalization/vars/0": "ln_f.weight",
    "layer_normalization/vars/1": "ln_f.bias",
}
BLOCK_NAMES = {
    "_self_attention_layer_norm": "ln_1",
    "_self_attention_layer/output_dense": "attn.c_proj",
    "_feedforward_layer_norm": "ln_2",
    "_feedforward_intermediate_dense": "mlp.c_fc",
    "_feedforward_output_dense": "mlp.c_proj",
}
QKV = tuple(f"_self_attention_layer/{part}_dense" for part in ("query", "key", "value"))
"""The parts of c_attn in its order."""
KINDS = ("weight", "bias")
"""vars/0 and vars/1."""
SIZES = {
    "vocabulary_size": "vocab_size",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "hidden_dim": "n_embd",
    "intermediate_dim": "n_inner",
    "max_sequence_length": "n_positions",
}
"""GPT2Backbone's arguments -> ours."""
DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
ALWAYS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "norm": "pre",
    "bias": True,
    "tie_word_embeddings": True,
}
_BODY = re.compile(r"(?:.*/)?(?:layers|_layer_checkpoint_dependencies)/")
"""What precedes a layer's name: the task's path to its backbone, and Keras's list."""
_BLOCK = re.compile(r"transformer_decoder(?:_([1-9]\d{0,5}))?/([\w/]+)/vars/([01])")


def detect(path: Path, head: bytes) -> bool:
    """Whether it is HDF5, an index of such files, or a zip that holds one."""
    if head.startswith(ZIP_MAGIC):
        return is_archive(path)
    return head.startswith(HDF5_MAGIC) or path.name.endswith(".weights.json")


def read(path: Path) -> Checkpoint:
    """Open a `.weights.h5`, a `.weights.json` with its shards beside it, or a `.keras` archive.

    Raises `CorruptInputError` for damaged files, `UserError` for data that Keras does not write
    this way (chunked, compressed, in another file).
    """
    h5py = require_package("h5py", "reading Keras's HDF5 files")
    with path.open("rb") as file:
        head = file.read(8)
    config: dict[str, Any] = {}
    if head == HDF5_MAGIC:
        places = [(path, 0, path.stat().st_size)]
    elif head.startswith(ZIP_MAGIC):
        places, config = _in_archive(path)
    else:
        shards = [beside(path, name) for name in _shards(path, read_json(path))]
        places = [(shard, 0, shard.stat().st_size) for shard in shards]
    tensors: dict[str, StoredTensor] = {}
    for place in places:
        opened = _tensors(h5py, *place)
        if twice := tensors.keys() & opened.keys():
            raise CorruptInputError(f"{path}: two shards hold {printable(min(twice))[:200]}")
        tensors |= opened
    embeddings = tuple(name for name in tensors if name.endswith(EMBEDDING))
    tied = len(embeddings) == 1
    files = dict.fromkeys([path, *(file for file, _, _ in places)])
    return Checkpoint(
        path, FORMAT, tensors, config, files=tuple(files), reads=embeddings, predicts=embeddings,
        claim=True if tied else None,
        claim_source="Keras's ReversibleEmbedding: one matrix reads and predicts" if tied
        else "the file does not say whether the head is tied",
    )  # fmt: skip


def tokenizer(path: Path) -> Tokenizer | None:
    """Return the tokenizer inside a .keras archive of a whole task; None where there is none.

    Raises `CorruptInputError` and `UserError` as `read`.
    """
    from tiedgpt.text.directory import read_tokenizer
    from tiedgpt.text.tokenizer import Tokenizer

    with tempfile.TemporaryDirectory() as directory, open_archive(path) as archive:
        for name in TOKENIZER_FILES:
            if f"{ASSETS}/{name}" in archive.NameToInfo:
                content = read_member(path, archive, f"{ASSETS}/{name}")
                (Path(directory) / name).write_bytes(content)
        found = read_tokenizer(Path(directory))
    return Tokenizer(*found, str(path)) if found else None


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


def _tensors(h5py: Any, path: Path, begin: int, size: int) -> dict[str, StoredTensor]:
    """Return the arrays of an HDF5 file that is `size` bytes of `path` from `begin` on."""
    tensors: dict[str, StoredTensor] = {}

    def visit(name: str, item: Any) -> None:  # links to other files are not followed
        if isinstance(item, h5py.Dataset) and not name.startswith(OPTIMIZER):
            tensors[name] = _tensor(path, begin, size, name, item)

    try:
        with path.open("rb") as file, h5py.File(_Part(file, begin, size), "r") as hdf5:
            hdf5.visititems(visit)
    except TiedGPTError:
        raise
    except Exception as error:  # OSError, KeyError, RuntimeError, TypeError, ... of a damaged file
        why = printable(str(error))[:200]
        raise CorruptInputError(f"{path} is damaged or no HDF5 file: {why}") from None
    return tensors


def _tensor(path: Path, begin: int, size: int, name: str, dataset: Any) -> StoredTensor:
    shape, dtype, shown = tuple(dataset.shape or ()), dataset.dtype, printable(name)[:200]
    bfloat16 = dtype.kind == "V" and dtype.itemsize == 2  # Keras writes two opaque bytes
    kind = "bfloat16" if bfloat16 else str(dtype)
    if not bfloat16 and dtype.kind not in "fiub":
        return StoredTensor(name, shape, kind, 0, Storage((str(path), name), 0, 0), None)
    offset, n_bytes = dataset.id.get_offset(), dataset.size * dtype.itemsize
    if offset is None and n_bytes:
        raise UserError(
            f"{path}: {shown} is compressed, chunked, in another file or was never written, which "
            "Keras does not do: save the model again with Keras"
        )
    offset = offset or 0
    if offset + n_bytes > size:
        raise CorruptInputError(
            f"{path} is truncated or damaged: {shown} of shape {shape} takes {n_bytes:,} bytes "
            f"from byte {offset:,}, the file has {size:,}"
        )
    start, columns = begin + offset, shape[-1] if shape else 1
    reader = plain_reader(path, start, columns, dtype.itemsize)
    storage = Storage(str(path), start, start + n_bytes)
    return StoredTensor(name, shape, kind, n_bytes, storage, reader)


def _shards(path: Path, index: dict[str, Any]) -> list[str]:
    """Return the names of the files among which an index divides the variables."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptInputError(f"{path} has no weight_map")
    names: set[str] = set()
    for layer, shards in weight_map.items():
        listed = shards if isinstance(shards, list) else [shards]
        if not listed or not all(isinstance(name, str) for name in listed):
            raise CorruptInputError(f"{path} names no file for {printable(layer)[:200]}")
        names.update(listed)
    if len(names) > MAX_SHARDS:
        raise CorruptInputError(f"{path} names {len(names):,} files")
    return sorted(names)


def _in_archive(path: Path) -> tuple[list[tuple[Path, int, int]], dict[str, Any]]:
    """Return where the HDF5 files are in an archive, and its config.json under "keras"."""
    with open_archive(path) as archive:
        config = read_json_member(path, archive, CONFIG)
        names = [WEIGHTS]
        if WEIGHTS not in archive.NameToInfo:
            names = _shards(path, read_json_member(path, archive, INDEX))
        return [(path, *stored_range(path, archive, name)) for name in names], {"keras": config}


# The GPT-2 of KerasHub


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT in what Keras saved.

    Raises `UserError` for other models, `CorruptInputError` where variables contradict each other.
    """
    source = str(checkpoint.source)
    fields: dict[str, Any] = dict(ALWAYS) | _claimed(source, checkpoint.config)
    tensors: dict[str, LazyTensor] = {}
    qkv: dict[str, dict[str, StoredTensor]] = {}
    n_heads: set[int] = set()
    for path, stored in checkpoint.tensors.items():
        name, part = _our_name(path)
        if part not in QKV:
            if name in tensors:
                raise CorruptInputError(f"{source} holds {name} twice, in two models")
            tensors[name] = _in_our_layout(stored, name)
            continue
        parts = qkv.setdefault(name, {})
        if part in parts:
            raise CorruptInputError(f"{source} holds {printable(path)[:200]} twice")
        parts[part] = _heads_joined(source, stored, name, n_heads)
    if "wte.weight" not in tensors or not qkv:
        raise UserError(
            f"{source} holds a Keras model other than KerasHub's {BACKBONE}; only that one is read"
        )
    for name, parts in qkv.items():
        tensors[name] = _c_attn(source, name, parts)
    if len(n_heads) > 1 or fields.setdefault("n_head", min(n_heads)) not in n_heads:
        raise CorruptInputError(
            f"{source}: its layers have {' and '.join(map(str, sorted(n_heads)))} heads, expected "
            f"{fields.get('n_head', 'one number')}"
        )
    return GPTCheckpoint("KerasHub GPT-2", fields, tensors)


def _our_name(path: str) -> tuple[str, str]:
    """Return our name of a variable, and its layer in a block; unknown paths stay as they are."""
    inner = _BODY.sub("", path, count=1)
    block = _BLOCK.fullmatch(inner)
    if block is None:
        return TOP_NAMES.get(inner, path), ""
    layer, part, kind = int(block[1] or 0), block[2], KINDS[int(block[3])]
    ours = "attn.c_attn" if part in QKV else BLOCK_NAMES.get(part)
    return (path if ours is None else f"h.{layer}.{ours}.{kind}"), part


def _claimed(source: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json says under GPTConfig's names; {} where there is none."""
    described: Any = config.get("keras", config)
    if "class_name" not in described:
        return {}
    if described.get("class_name") == TASK and isinstance(described.get("config"), Mapping):
        described = described["config"].get("backbone")
    if not isinstance(described, Mapping) or described.get("class_name") != BACKBONE:
        named = described.get("class_name") if isinstance(described, Mapping) else described
        raise UserError(
            f"{source} holds a {printable(str(named))[:80]} of Keras; only KerasHub's "
            f"{BACKBONE} and {TASK} are read"
        )
    inner = described.get("config")
    if not isinstance(inner, Mapping):
        raise CorruptInputError(f"{source}: its config.json does not describe its {BACKBONE}")
    fields = {ours: inner[theirs] for theirs, ours in SIZES.items() if inner.get(theirs)}
    if not all(type(value) is int and value > 0 for value in fields.values()):
        raise CorruptInputError(f"{source}: sizes in its config.json must be positive integers")
    if isinstance(inner.get("dropout"), (int, float)):
        fields |= dict.fromkeys(DROPOUTS, inner["dropout"])
    if fields.get("n_inner") == 4 * fields.get("n_embd", 0):
        del fields["n_inner"]
    return fields


def _heads_joined(source: str, stored: StoredTensor, name: str, n_heads: set[int]) -> StoredTensor:
    """Return (D, H, D/H) as (D, D), and a bias of (H, D/H) as (D,); add H to `n_heads`."""
    if len(stored.shape) != (3 if name.endswith(".weight") else 2) or not stored.count:
        raise CorruptInputError(
            f"{source}: {printable(stored.name)[:200]} is {stored.shape}, without an axis of heads"
        )
    heads, head_dim = stored.shape[-2:]
    n_heads.add(heads)
    whole, width = stored.read, heads * head_dim

    def read(first: int, end: int, left: int, right: int) -> Native:
        assert whole is not None
        rows = whole(first * heads, end * heads, 0, head_dim)
        return rows.reshape(end - first, width)[:, left:right]

    return replace(stored, shape=(*stored.shape[:-2], width), read=None if whole is None else read)


def _c_attn(source: str, name: str, parts: dict[str, StoredTensor]) -> LazyTensor:
    """Return queries, keys and values as the rows of one matrix, (3 D, D)."""
    if missing := [part for part in QKV if part not in parts]:
        raise CorruptInputError(f"{source}: {missing[0]} is missing in {name}")
    ordered = [parts[part] for part in QKV]
    whole = joined(name, [part.turned() if len(part.shape) == 2 else part for part in ordered])
    if whole is None:
        shapes = ", ".join(f"{part.shape} {part.dtype}" for part in ordered)
        raise CorruptInputError(f"{source}: the parts of {name} differ: {shapes}")
    return LazyTensor(whole)


def _in_our_layout(stored: StoredTensor, name: str) -> LazyTensor:
    """Return a variable under our name; matrices of blocks are to be transposed.

    The attention's output is (H, D/H, D), which is (D, D).
    """
    if name.endswith("attn.c_proj.weight") and len(stored.shape) == 3:
        stored = stored.reshaped((stored.shape[0] * stored.shape[1], stored.shape[2]))
    return LazyTensor(stored, transposed=name.startswith("h.") and name.endswith(".weight"))
