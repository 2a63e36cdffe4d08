"""The tokenizer that comes with a checkpoint, whoever wrote it: SOURCE -> Tokenizer.

A directory is searched for the files of each project; a file is recognised by its content, and one
of weights stands for the directory that it lies in. What transformers and OpenAI keep is read by
`text/directory.py`; here are the others: nanoGPT's `meta.pkl`, llm.c's `gpt2_tokenizer.bin`, GGUF.
"""

from __future__ import annotations

from pathlib import Path

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.text.characters import tokenizer_of_ids
from tiedgpt.text.directory import EXPECTED, FILE_NAMES, read_tokenizer
from tiedgpt.text.tokenizer import Tokenizer
from tiedgpt.weights import keras, llmc
from tiedgpt.weights.hub import local_directory
from tiedgpt.weights.plain_pickle import BEGINS, read_plain_pickle

_AGAIN = "get the file again from where it came from"
META = "meta.pkl"
TOKENS = "gpt2_tokenizer.bin"

_GGUF = b"GGUF"
_TORCH = (b"PK\x03\x04", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19")
"""How torch's files begin: as a zip, and before version 1.6 as the pickle of a magic number."""
_WEIGHTS = (
    ".safetensors",
    ".index.json",
    ".bin",
    ".pt",
    ".pth",
    ".onnx",
    ".index",
    ".npy",
    ".h5",
    ".keras",
    ".weights.json",
)
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
        return _characters(directory / META)
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
    """Return the tokenizer that a file is or has inside, or that of the model whose weights it is.

    None where its directory has none, and for a file of another purpose.
    """
    head = _head(path)
    if head.startswith(_GGUF):
        from tiedgpt.weights import gguf

        return gguf.tokenizer(path)
    if head.startswith(llmc.TOKENIZER_MAGIC):
        return llmc.tokenizer(path)
    if head.startswith(b"PK\x03\x04") and keras.detect(path, head):
        return keras.tokenizer(path) or _in_directory(path.parent)
    of_weights = head.startswith((llmc.MAGIC, *_TORCH)) or path.name.endswith(_WEIGHTS)
    if not of_weights and (found := read_tokenizer(path)):
        return Tokenizer(*found, str(path))
    if not of_weights and (path.suffix == ".pkl" or BEGINS.match(head)):
        return _characters(path)
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


def _characters(file: Path) -> Tokenizer:
    """Return nanoGPT's vocabulary of characters, with its ids and no token more."""
    meta = read_plain_pickle(file)
    ids = meta.get("stoi") if isinstance(meta, dict) else None
    if not isinstance(ids, dict) or not ids:
        raise CorruptInputError(f"{file} has no stoi, which gives each character its id; {_AGAIN}")
    for character, id in ids.items():
        if type(character) is not str or type(id) is not int or not 0 <= id < len(ids):
            raise CorruptInputError(
                f"{file} gives {_shown(character)} the id {_shown(id)} among {len(ids)} characters"
                f"; {_AGAIN}"
            )
        if len(character) != 1:
            raise UserError(
                f"{file} gives an id to {_shown(character)}, which is not one character; only "
                f"vocabularies of single characters are read from such files"
            )
        if "\ud800" <= character <= "\udfff":
            raise CorruptInputError(f"{file} has {character!r}, which is no character; {_AGAIN}")
    if len(set(ids.values())) < len(ids):
        raise CorruptInputError(f"{file} gives two characters the same id; {_AGAIN}")
    back = meta.get("itos", {id: character for character, id in ids.items()})
    if back != {id: character for character, id in ids.items()}:
        raise CorruptInputError(f"{file}: its itos is not its stoi the other way round; {_AGAIN}")
    size = meta.get("vocab_size", len(ids))
    if type(size) is not int or size != len(ids):
        raise CorruptInputError(
            f"{file} says vocab_size {_shown(size)} and has {len(ids)} characters; {_AGAIN}"
        )
    return Tokenizer(tokenizer_of_ids(ids), None, str(file))


def _shown(value: object) -> str:
    """Show a value of a file in a line, whatever its length."""
    if not isinstance(value, str | int):
        return f"a {type(value).__name__}"
    text = repr(value) if isinstance(value, str) or -(10**20) < value < 10**20 else "a huge number"
    return text if len(text) <= 40 else text[:40] + "..."
