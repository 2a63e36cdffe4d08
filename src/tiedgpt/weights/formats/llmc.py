"""llm.c's checkpoints (`gpt2_124M.bin`, `model_*.bin`) and tokenizers (`gpt2_tokenizer.bin`).

A checkpoint (karpathy/llm.c, train_gpt2.c and train_gpt2.cu) is 256 little-endian int32, of which
the first eight are magic, version, max_seq_len, vocab_size, num_layers, num_heads, channels and
padded_vocab_size; then the `parameters`, each for all layers before the next begins. The file has
no names; the tensors get ours and lie, as llm.c has them, as (out, in). Rows of wte from vocab_size
on are padding, which is not read and is written as zeros.

A tokenizer is 256 int32 (magic, version, number of tokens and, from version 2 on, the id that ends
a text), then for each token its length in one byte and its bytes.

llm.c computes GPT-2's architecture only: LayerNorms with epsilon 1e-5, the tanh GELU, biases
everywhere, and one matrix that reads and predicts.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.files import reading, replacing, require_room
from tiedgpt.weights.checkpoint import Checkpoint, Claim, GPTCheckpoint, shapes
from tiedgpt.weights.registry import GPT2_ALONE, Format, TokenizerFile, Writer
from tiedgpt.weights.tensors import FLOATS, StoredTensor, tensor_in_file

if TYPE_CHECKING:
    from tiedgpt.core.model import GPT
    from tiedgpt.text.tokenizer import Tokenizer

MAGIC = (20240326).to_bytes(4, "little")
TOKENIZER_MAGIC = (20240328).to_bytes(4, "little")
OTHER_MAGICS = ((20240327).to_bytes(4, "little"), (20240520).to_bytes(4, "little"), TOKENIZER_MAGIC)
"""llm.c's debug states and token shards end in .bin, too."""
HEADER = struct.Struct("<256i")
DTYPES = {1: "float32", 3: "float32", 5: "bfloat16"}
"""Version -> dtype. Version 1 has no padding and no padded_vocab_size."""
VERSIONS = {"fp32": 3, "bf16": 5}
"""Precision -> the version that is written."""
FIELDS = {
    "max_seq_len": "n_positions",
    "vocab_size": "vocab_size",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "channels": "n_embd",
}
"""The header's names -> ours."""
COMPUTES = {
    "norm": "pre", "attention_windows": None, "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new", "bias": True, "tie_word_embeddings": True,
}  # fmt: skip
"""What llm.c computes, in our fields; its files do not say it."""
SIZES = (*FIELDS, "padded_vocab_size")
"""The header after magic and version."""
ROW_MULTIPLE = 128
"""wte is written with a multiple of this many rows, as llm.c wants it."""
MAX_TOKENIZER = 16 << 20
"""Bytes of a tokenizer; GPT-2's has 0.4 million."""
GPT2_VOCABULARY = 50_257


def detect(path: Path, head: bytes) -> bool:
    """Whether a file is a checkpoint of llm.c."""
    return head.startswith(MAGIC)


def open_llmc(path: Path) -> Checkpoint:
    """Read the header.

    Raises `CorruptInputError` where it is invalid or the file has another length than it says.
    """
    with reading(path, "checkpoint of llm.c"), path.open("rb") as file:
        raw = file.read(HEADER.size)
        _, version, *rest = HEADER.unpack(raw.ljust(HEADER.size, b"\0"))
        sizes = dict(zip(SIZES, rest, strict=False))
        if version == 1:
            sizes["padded_vocab_size"] = sizes["vocab_size"]
        rows, padded, width = (sizes[n] for n in ("vocab_size", "padded_vocab_size", "channels"))
        known = raw.startswith(MAGIC) and version in DTYPES
        if not known or min(sizes.values()) < 1 or padded < rows:
            raise ValueError(
                f"its header says version {version} with {sizes}; versions 1 and 3 (float32) and 5 "
                "(bfloat16) are read"
            )
        dtype = DTYPES[version]
        layout = (sizes["num_layers"], width, padded, sizes["max_seq_len"])
        expected, n_bytes = HEADER.size + count(*layout) * FLOATS[dtype], path.stat().st_size
        if expected != n_bytes:
            raise ValueError(f"{expected:,} bytes are described, {n_bytes:,} are there: cut off?")
    tensors: dict[str, StoredTensor] = {}
    at = HEADER.size
    for name, shape in parameters(*layout):
        stored = (rows, width) if name == "wte.weight" else shape
        tensors[name] = tensor_in_file(path, name, stored, dtype, at, FLOATS[dtype])
        at += math.prod(shape) * FLOATS[dtype]
    return Checkpoint(
        path, "llm.c", tensors, config=sizes, files=(path,),
        claim=Claim(source="the llm.c format has one matrix, wte, that reads and predicts"),
    )  # fmt: skip


def to_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT in a checkpoint of llm.c."""
    fields = {ours: checkpoint.config[theirs] for theirs, ours in FIELDS.items()}
    return GPTCheckpoint("llm.c", fields | COMPUTES, dict(checkpoint.tensors))


def parameters(
    n_layer: int, width: int, rows: int, n_positions: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Return our name and the shape of each parameter, in the file's order."""
    config = GPTConfig(
        vocab_size=rows, n_positions=n_positions, n_embd=width, n_layer=n_layer, n_head=1
    )
    by_kind: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in shapes(config).items():
        kind = name.split(".", 2)[2] if name.startswith("h.") else name
        by_kind.setdefault(kind, []).append((name, shape))
    return [parameter for layers in by_kind.values() for parameter in layers]


def count(n_layer: int, width: int, rows: int, n_positions: int) -> int:
    """Return how many numbers `parameters` describes, without a loop over the layers."""
    return (rows + n_positions + 2 + n_layer * (12 * width + 13)) * width


def write(
    model: GPT,
    path: Path,
    *,
    tokenizer: Tokenizer | None = None,
    precision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    approximate_gelu: bool = False,
) -> None:
    """Write a checkpoint for llm.c in "fp32" or "bf16"; None is the model's own dtype.

    Raises `UserError`, before anything is written, for what llm.c does not compute: an untied head,
    adapters, GPT-1's norm, banded attention, another activation, MLP width or epsilon.
    `approximate_gelu` allows a model of the exact GELU. Missing biases are written as zeros. The
    file has no place for the tokenizer.
    """
    import torch

    from tiedgpt.weights.parameters import PRECISIONS, convert_tensor, parameters_for

    config = model.config
    tensors, precision = parameters_for(WRITER, model, precision, approximate_gelu=approximate_gelu)
    dtype = PRECISIONS[precision]
    rows = -(-config.vocab_size // ROW_MULTIPLE) * ROW_MULTIPLE
    layout = (config.n_layer, config.n_embd, rows, config.n_positions)
    n_bytes = count(*layout) * dtype.itemsize
    require_room(path.parent, HEADER.size + n_bytes)
    sizes = [getattr(config, ours) for ours in FIELDS.values()]
    header = [int.from_bytes(MAGIC, "little"), VERSIONS[precision], *sizes, rows]
    done = 0
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(HEADER.pack(*header, *[0] * (256 - len(header))))
        for name, shape in parameters(*layout):
            size, written = math.prod(shape) * dtype.itemsize, 0
            if name in tensors:
                flat = convert_tensor(name, tensors[name], dtype).flatten()
                written = file.write(flat.view(torch.uint8).numpy().data)
            file.write(bytes(size - written))
            done += size
            if progress is not None:
                progress(done, n_bytes)


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a file that begins with TOKENIZER_MAGIC.

    It is a byte-level BPE, or of characters where each token is one. Raises as `read_tokens`.
    """
    from tiedgpt.text.characters import tokenizer_of_ids
    from tiedgpt.text.codec import SPECIAL
    from tiedgpt.text.merges import tokenizer_of_tokens
    from tiedgpt.text.tokenizer import Tokenizer

    tokens, end_of_text = read_tokens(path)
    if set(tokens).issuperset(bytes([byte]) for byte in range(256)):
        rust = tokenizer_of_tokens(tokens, str(path))
    else:
        texts = [token.decode("utf-8", errors="replace") for token in tokens]
        n_characters = next((id for id, text in enumerate(texts) if len(text) > 1), len(texts))
        ids = {text: id for id, text in enumerate(texts[:n_characters])}
        specials = texts[n_characters:]
        if "\ufffd" in ids or not all(SPECIAL.fullmatch(text) for text in specials):
            raise UserError(
                f"{path}: its tokens are neither a byte-level BPE's, with all 256 bytes, nor "
                "characters",
                hint="give the tokenizer that the model was trained with",
            )
        rust = tokenizer_of_ids(ids)
        rust.add_special_tokens(specials)
    if end_of_text is None:
        return Tokenizer(rust, None, str(path))
    end = rust.id_to_token(end_of_text)
    return Tokenizer(rust, {"bos_token": end, "eos_token": end}, str(path))


def read_tokens(path: Path) -> tuple[list[bytes], int | None]:
    """Return the bytes of each token and the id that ends a text, None where the file is silent.

    Raises `CorruptInputError` for a damaged file or another version, `UserError` if it cannot be
    read.
    """
    with reading(path, "tokenizer of llm.c"), path.open("rb") as file:
        return _parse_tokens(file.read(MAX_TOKENIZER + 1))


def _parse_tokens(content: bytes) -> tuple[list[bytes], int | None]:
    header = content[: HEADER.size].ljust(HEADER.size, b"\0")
    _, version, n_tokens, end, *_ = HEADER.unpack(header)
    tokens: list[bytes] = []
    at = HEADER.size
    while at < len(content) and content[at]:
        tokens.append(content[at + 1 : at + 1 + content[at]])
        at += 1 + content[at]
    end_of_text: int | None = end
    if version == 1 and not end:  # version 1 was written for GPT-2, whose last id ends a text
        end_of_text = n_tokens - 1 if n_tokens == GPT2_VOCABULARY else None
    if (
        not content.startswith(TOKENIZER_MAGIC) or version not in (1, 2) or at != len(content)
        or not tokens or not len(tokens) == len(set(tokens)) == n_tokens
        or not 0 <= (end_of_text or 0) < n_tokens
    ):  # fmt: skip
        raise ValueError(
            f"its header says version {version}, {n_tokens} different tokens and {end} for the end "
            f"of a text; {len(tokens)} are there: download the file again"
        )
    return tokens, end_of_text


def _is_model_file(path: Path, head: bytes) -> bool:
    return not head.startswith(OTHER_MAGICS)


def _is_tokenizer(path: Path, head: bytes) -> bool:
    return head.startswith(TOKENIZER_MAGIC)


WRITER = Writer(
    write=write,
    program="llm.c",
    precisions=("fp32", "bf16"),
    suffix=".bin",
    options=("approximate_gelu",),
    fixed=GPT2_ALONE,
    activation="gelu_new",
)
FORMAT = Format(
    name="llmc",
    title="llm.c",
    about="`.bin`, fp32 and bf16",
    about_tokenizer="`gpt2_tokenizer.bin`",
    detect=detect,
    open=open_llmc,
    to_gpt=to_gpt,
    suffixes=(".bin",),
    is_model_file=_is_model_file,
    tokenizer=TokenizerFile(
        read=read_tokenizer, detect=_is_tokenizer, pattern="*.bin", hub_name="gpt2_tokenizer.bin"
    ),
    writer=WRITER,
)
