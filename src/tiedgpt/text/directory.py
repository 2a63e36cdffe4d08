"""The files of a tokenizer -> a Hugging Face tokenizer and its settings; and back to a directory.

The files are `tokenizer.json`; `vocab.json` with `merges.txt` (older versions of transformers);
`encoder.json` with `vocab.bpe` (OpenAI's GPT-2); `encoder_bpe_40000.json` with `vocab_40000.bpe`
(OpenAI's GPT-1). The tokens tell whether such a pair is a byte-level BPE or GPT-1's. Files are
checked here: an error names the file in one line.
"""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import read_json, reading
from tiedgpt.text.bpe import BYTE_ALPHABET, SPECIAL, byte_level_tokenizer
from tiedgpt.text.gpt1 import END_OF_WORD, UNKNOWN, lower_case_tokenizer

TOKENIZER_JSON = "tokenizer.json"
PAIRS = [
    ("vocab.json", "merges.txt"),
    ("encoder.json", "vocab.bpe"),
    ("encoder_bpe_40000.json", "vocab_40000.bpe"),
]
CONFIG = "tokenizer_config.json"
ADDED = "added_tokens.json"
FILE_NAMES = [TOKENIZER_JSON, CONFIG, ADDED, *(name for pair in PAIRS for name in pair)]
EXPECTED = f"{TOKENIZER_JSON}, or {' or '.join(' with '.join(pair) for pair in PAIRS)}"
DOWNLOAD_AGAIN = "download the file again"


def read_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]] | None:
    """Return the tokenizer at `path`, a directory or a file, and its `tokenizer_config.json`.

    Return None if `path` has no tokenizer file. Raises CorruptInputError if one of them is damaged,
    UserError if it cannot be read.
    """
    directory = path if path.is_dir() else path.parent
    config = read_json(directory / CONFIG) if (directory / CONFIG).is_file() else {}
    file = path / TOKENIZER_JSON if path.is_dir() else path
    pairs = [pair for pair in PAIRS if path.is_dir() or path.name in pair]
    if file.is_file() and file.suffix == ".json" and not (pairs and file == path):
        with reading(file, "tokenizer", DOWNLOAD_AGAIN):
            return tokenizers.Tokenizer.from_buffer(file.read_bytes()), config
    for vocabulary, merges in pairs:
        if (directory / vocabulary).is_file() and (directory / merges).is_file():
            return _read_pair(directory / vocabulary, directory / merges, config)
    return None


def token_of(config: dict[str, Any], key: str) -> str | None:
    """Return the token under `key`, which is a string or an object with `content`."""
    named = config.get(key)
    token = named.get("content") if isinstance(named, dict) else named
    return token if isinstance(token, str) else None


def _read_pair(
    vocabulary_file: Path, merges_file: Path, config: dict[str, Any]
) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    vocabulary = _read_ids(vocabulary_file)
    of_bytes = vocabulary.keys() >= set(BYTE_ALPHABET)
    if not of_bytes and not any(token.endswith(END_OF_WORD) for token in vocabulary):
        raise UserError(
            f"{vocabulary_file}: lacks some of the 256 bytes, so it is not byte-level, and has no "
            f"token that ends with {END_OF_WORD}, as GPT-1's",
            hint="use GPT-2's or GPT-1's kind of BPE",
        )
    unknown, ending = token_of(config, "unk_token") or UNKNOWN, "" if of_bytes else END_OF_WORD
    options = {} if of_bytes else {"unk_token": unknown, "end_of_word_suffix": ending}
    with reading(merges_file, f"list of the merges of {vocabulary_file.name}", DOWNLOAD_AGAIN):
        lines = merges_file.read_text(encoding="utf-8").split("\n")
        lines = lines[1:] if lines[0].startswith("#version") else lines
        merges: list[Any] = [tuple(line.split(" ")) for line in lines if line]
        model = models.BPE(vocab=vocabulary, merges=merges, **options)
    # Merging starts from one byte, or from one character that may end a word.
    reachable = {"".join(merge) for merge in merges}
    reachable |= {token for token in vocabulary if len(token.removesuffix(ending)) == 1}
    unmade = [token for token in vocabulary if token not in reachable]
    lost = [token for token in unmade if not SPECIAL.fullmatch(token)]
    if lost:
        raise CorruptInputError(
            f"{merges_file}: no line makes {lost[0]!r} and {len(lost) - 1} other tokens of "
            f"{vocabulary_file.name}; it is cut off or of another vocabulary; {DOWNLOAD_AGAIN}"
        )
    if of_bytes:
        rust = byte_level_tokenizer(model, prefix_space=config.get("add_prefix_space") is True)
    else:
        rust = lower_case_tokenizer(model)
        config = config | {"unk_token": unknown}
        unmade = list({*unmade, unknown} & vocabulary.keys())
    rust.add_special_tokens(sorted(unmade, key=vocabulary.__getitem__))
    if (vocabulary_file.parent / ADDED).is_file():
        _add_tokens(rust, vocabulary_file.parent / ADDED)
    return rust, config


def _add_tokens(rust: tokenizers.Tokenizer, file: Path) -> None:
    ids = _read_ids(file)
    rust.add_special_tokens(sorted(ids, key=ids.__getitem__))
    for token, id in ids.items():
        if rust.token_to_id(token) != id:
            raise CorruptInputError(
                f"{file}: gives {token!r} the id {id}, but after the vocabulary it is "
                f"{rust.token_to_id(token)}; correct or remove the file"
            )


def _read_ids(file: Path) -> dict[str, int]:
    ids = read_json(file)
    sound = all(type(id) is int and 0 <= id < 1 << 32 for id in ids.values())
    if not sound or "" in ids or len(set(ids.values())) < len(ids):
        raise CorruptInputError(f"{file}: not one id for each token; {DOWNLOAD_AGAIN}")
    return ids
