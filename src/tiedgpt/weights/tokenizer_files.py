"""The tokenizer that comes with a checkpoint, whoever wrote it: SOURCE -> Tokenizer.

A directory is searched for the files of each project. A file is recognized by its content; a file
of weights stands for its directory. `text/directory.py` reads the files of transformers and OpenAI;
the modules of the formats read the others: nanoGPT's `meta.pkl`, llm.c's `gpt2_tokenizer.bin`, and
what is inside a GGUF file or a .keras archive.
"""

from __future__ import annotations

from pathlib import Path

from tiedgpt.errors import UserError
from tiedgpt.text.directory import EXPECTED, FILE_NAMES, read_tokenizer
from tiedgpt.text.tokenizer import Tokenizer
from tiedgpt.weights import gguf, keras, llmc, nanogpt
from tiedgpt.weights.hub import local_directory
from tiedgpt.weights.plain_pickle import BEGINS

META = "meta.pkl"
TOKENS = "gpt2_tokenizer.bin"
_TORCH = (b"PK\x03\x04", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19")
"""How torch's files begin: as a zip, and before version 1.6 as the pickle of a magic number."""
_WEIGHTS = (
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".onnx", ".index", ".npy", ".h5",
    ".keras", ".weights.json",
)  # fmt: skip
_KERAS = "assets/tokenizer"
"""Where a preset of KerasHub keeps its files; the `tokenizer.json` above them names a class."""


def open_tokenizer(source: str | Path) -> Tokenizer:
    """Return the tokenizer of a directory, a file or a hub name, as `Tokenizer.from_pretrained`.

    Raises `UserError` where there is none or it is of a kind that is not supported,
    `CorruptInputError` where a file of it is damaged.
    """
    path = local_directory(source, [*FILE_NAMES, META, TOKENS, f"{_KERAS}/*"])
    if path.is_dir():
        found = _in_directory(path) or _in_only_gguf(path)
    else:
        found = _in_file(path)
    if found is None:
        raise UserError(
            f"{path} holds no tokenizer{'' if path.is_dir() else ', nor does its directory'}; "
            f"expected {EXPECTED}, or nanoGPT's {META} (kept in its data/NAME: copy it there), or "
            f"{TOKENS}; a model of GPT-2's vocabulary takes Tokenizer.from_pretrained('gpt2')"
        )
    return found


def _in_directory(directory: Path) -> Tokenizer | None:
    """Return the tokenizer of a directory, transformers' and OpenAI's files first."""
    if (directory / _KERAS).is_dir() and (found := read_tokenizer(directory / _KERAS)):
        return Tokenizer(*found, str(directory))
    if found := read_tokenizer(directory):
        return Tokenizer(*found, str(directory))
    if (directory / META).is_file():
        return nanogpt.tokenizer(directory / META)
    binary = sorted(directory.glob("*.bin"))
    files = [file for file in binary if _head(file).startswith(llmc.TOKENIZER_MAGIC)]
    if len(files) > 1:
        raise UserError(f"{directory} holds {len(files)} tokenizers of llm.c: name one")
    return llmc.tokenizer(files[0]) if files else None


def _in_only_gguf(directory: Path) -> Tokenizer | None:
    """Return the tokenizer inside a directory's GGUF file, if there is one such file."""
    files = [file for file in sorted(directory.glob("*.gguf")) if file.is_file()]
    if len(files) > 1:
        raise UserError(f"{directory} holds {len(files)} GGUF files: name one")
    return _in_file(files[0]) if files else None


def _in_file(path: Path) -> Tokenizer | None:
    """Return the tokenizer that a file is or holds; for a file of weights, its directory's.

    None where there is none, and for a file of another purpose.
    """
    head = _head(path)
    if gguf.detect(path, head):
        return gguf.tokenizer(path)
    if head.startswith(llmc.TOKENIZER_MAGIC):
        return llmc.tokenizer(path)
    if head.startswith(_TORCH[0]) and keras.detect(path, head):
        return keras.tokenizer(path) or _in_directory(path.parent)
    of_weights = head.startswith((llmc.MAGIC, *_TORCH)) or path.name.endswith(_WEIGHTS)
    if not of_weights and (found := read_tokenizer(path)):
        return Tokenizer(*found, str(path))
    if not of_weights and (path.suffix == ".pkl" or BEGINS.match(head)):
        return nanogpt.tokenizer(path)
    if of_weights or head[8:9] == b"{":  # so begins a safetensors file of any name
        return _in_directory(path.parent)
    return None


def _head(path: Path) -> bytes:
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(32)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the file") from error
