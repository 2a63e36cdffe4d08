"""llm.c's model checkpoints (`gpt2_124M.bin`, `model_*.bin`): a header, then one run of numbers.

Layout (karpathy/llm.c, train_gpt2.c and train_gpt2.cu): 256 little-endian int32, of which the
first eight are magic, version, max_seq_len, vocab_size, num_layers, num_heads, channels and
padded_vocab_size; then the parameters of `parameters`, each for all layers before the next begins.
The file names no tensor; here they bear our names and lie, as llm.c has them, as (out, in). Rows of
wte past vocab_size are padding that no softmax sees: they are no part of what is read. No torch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.tensors import Storage, StoredTensor, plain_reader

MAGIC = 20240326
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
VERSIONS = {1: ("float32", 4), 3: ("float32", 4), 5: ("bfloat16", 2)}
"""Version -> type and bytes of a number. 1, the first, has no padding and no padded_vocab_size."""
SIZES = (
    "max_seq_len", "vocab_size", "num_layers", "num_heads", "channels", "padded_vocab_size",
)  # fmt: skip
"""What the header holds after magic and version."""
BLOCK = {
    "ln_1.weight": (1,), "ln_1.bias": (1,),
    "attn.c_attn.weight": (3, 1), "attn.c_attn.bias": (3,),
    "attn.c_proj.weight": (1, 1), "attn.c_proj.bias": (1,),
    "ln_2.weight": (1,), "ln_2.bias": (1,),
    "mlp.c_fc.weight": (4, 1), "mlp.c_fc.bias": (4,),
    "mlp.c_proj.weight": (1, 4), "mlp.c_proj.bias": (1,),
}  # fmt: skip
"""A layer's parameters in the file's order, their sizes in units of D."""
CLAIM_RULE = "the llm.c format: one matrix, wte, reads and predicts"


def open_llmc(path: Path) -> Checkpoint:
    """Read the header; `CorruptInputError` where it lies or the file is not exactly as long."""
    try:
        with path.open("rb") as file:
            raw = file.read(HEADER_BYTES)
            file_size = path.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    sizes, dtype, width = _header(path, raw)
    rows, channels = sizes["padded_vocab_size"], sizes["channels"]
    _check_length(path, sizes, width, file_size)
    tensors: dict[str, StoredTensor] = {}
    at = HEADER_BYTES
    for name, shape in parameters(sizes["num_layers"], channels, rows, sizes["max_seq_len"]):
        stored = shape if name != "wte.weight" else (sizes["vocab_size"], channels)
        size = math.prod(stored) * width
        tensors[name] = StoredTensor(
            name, stored, dtype, size, Storage(str(path), at, at + size),
            plain_reader(path, at, stored[-1], width),
        )  # fmt: skip
        at += math.prod(shape) * width
    return Checkpoint(
        path, "llm.c", tensors, config=sizes, claim_source=CLAIM_RULE, files=(path,)
    )  # fmt: skip


def parameters(
    n_layer: int, width: int, rows: int, n_positions: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield our name and the shape of each parameter, in the file's order."""
    yield "wte.weight", (rows, width)
    yield "wpe.weight", (n_positions, width)
    for name, units in BLOCK.items():
        for layer in range(n_layer):
            yield f"h.{layer}.{name}", tuple(n * width for n in units)
    yield "ln_f.weight", (width,)
    yield "ln_f.bias", (width,)


def count(n_layer: int, width: int, rows: int, n_positions: int) -> int:
    """Return how many numbers `parameters` describes, without walking over the layers."""
    block = sum(math.prod(n * width for n in units) for units in BLOCK.values())
    return (rows + n_positions + 2) * width + n_layer * block


def _header(path: Path, raw: bytes) -> tuple[dict[str, int], str, int]:
    """Return the sizes that the header tells, the numbers' type and their bytes."""
    if len(raw) < HEADER_BYTES:
        raise CorruptInputError(
            f"{path} is cut off or no llm.c checkpoint: {len(raw):,} bytes, and the header alone "
            f"takes {HEADER_BYTES:,}"
        )
    magic, version, *rest = struct.unpack(f"<{HEADER_INTS}i", raw)
    if magic != MAGIC:
        raise CorruptInputError(f"{path} is no llm.c checkpoint: it does not begin with {MAGIC}")
    sizes = dict(zip(SIZES, rest, strict=False))
    if version == 1 and sizes["padded_vocab_size"] == 0:
        sizes["padded_vocab_size"] = sizes["vocab_size"]
    if version not in VERSIONS or (version == 3 and sizes["padded_vocab_size"] == 0):
        raise CorruptInputError(
            f"{path}: version {version} of llm.c's checkpoints is not read here; 1 and 3 (float32) "
            "and 5 (bfloat16) are: write it anew with llm.c as it is today"
        )
    for name, value in sizes.items():
        if value < 1:
            raise CorruptInputError(f"{path}: its header says {name}={value}, which is no size")
    if sizes["padded_vocab_size"] < sizes["vocab_size"]:
        raise CorruptInputError(
            f"{path}: its header says padded_vocab_size={sizes['padded_vocab_size']}, less than "
            f"vocab_size={sizes['vocab_size']}"
        )
    dtype, width = VERSIONS[version]
    return sizes, dtype, width


def _check_length(path: Path, sizes: dict[str, int], width: int, file_size: int) -> None:
    numbers = count(
        sizes["num_layers"], sizes["channels"], sizes["padded_vocab_size"], sizes["max_seq_len"]
    )
    expected = HEADER_BYTES + numbers * width
    if expected != file_size:
        raise CorruptInputError(
            f"{path} is {'cut off' if file_size < expected else 'too long'}, or its header lies: "
            f"it describes {expected:,} bytes, the file has {file_size:,}"
        )
