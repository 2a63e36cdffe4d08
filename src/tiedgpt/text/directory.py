"""The files of a tokenizer -> a Hugging Face tokenizer and its settings.

The files are `tokenizer.json`; `vocab.json` with `merges.txt` (older versions of transformers);
`encoder.json` with `vocab.bpe` (OpenAI's GPT-2); `encoder_bpe_40000.json` with `vocab_40000.bpe`
(OpenAI's GPT-1); `vocab.txt` (BERT's WordPiece). The tokens tell whether a pair is a byte-level BPE
or GPT-1's. Added tokens and settings are in `tokenizer_config.json`, or before version 4.34 of
transformers in `added_tokens.json` and `special_tokens_map.json`. Ids are those of transformers'
`AutoTokenizer`. Files are checked here: an error names the file in one line.
"""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import read_json, reading
from tiedgpt.text.bpe import BYTE_ALPHABET, END_OF_TEXT, SPECIAL, add_ends, byte_level_tokenizer
from tiedgpt.text.gpt1 import END_OF_WORD, UNKNOWN, lower_case_tokenizer
from tiedgpt.text.pieces import bert_tokenizer

TOKENIZER_JSON = "tokenizer.json"
PAIRS = [
    ("vocab.json", "merges.txt"),
    ("encoder.json", "vocab.bpe"),
    ("encoder_bpe_40000.json", "vocab_40000.bpe"),
]
WORDPIECE = "vocab.txt"
SENTENCEPIECE = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model")
CONFIG = "tokenizer_config.json"
ADDED = "added_tokens.json"
NAMES = "special_tokens_map.json"
MODEL_CONFIG = "config.json"
VOCABULARIES = [
    TOKENIZER_JSON,
    WORDPIECE,
    *SENTENCEPIECE,
    *(name for pair in PAIRS for name in pair),
]
FILE_NAMES = [*VOCABULARIES, CONFIG, ADDED, NAMES, MODEL_CONFIG]
EXPECTED = (
    f"{TOKENIZER_JSON}, or {' or '.join(' with '.join(pair) for pair in PAIRS)}, or {WORDPIECE}"
)
DOWNLOAD_AGAIN = "download the file again"
TOKEN_NAMES = tuple(
    "bos_token eos_token unk_token sep_token pad_token cls_token mask_token".split()
)
CLASSES = {"gpt2": "GPT2Tokenizer", "openai-gpt": "OpenAIGPTTokenizer"}
"""Transformers' class of a tokenizer whose settings name none, by the type of its model."""
CLASS_TOKENS = {
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token"), END_OF_TEXT),
    "OpenAIGPTTokenizer": {"unk_token": UNKNOWN},
    "BertTokenizer": {
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    },
}
"""Special tokens that a class has if its settings name no others."""
TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")

Settings = dict[str, Any]
Read = Callable[[Path], bytes]


def read_tokenizer(
    path: Path, read: Read = Path.read_bytes
) -> tuple[tokenizers.Tokenizer, Settings] | None:
    """Return the tokenizer at `path`, a directory or a file, and its settings.

    Return None if `path` has no tokenizer file. `read` reads a file. Raises CorruptInputError if
    one of them is damaged, UserError if it cannot be read.
    """
    directory = path if path.is_dir() else path.parent
    settings = _read_settings(directory, read)
    file = path / TOKENIZER_JSON if path.is_dir() else path
    pairs = [pair for pair in PAIRS if path.is_dir() or path.name in pair]
    pairs = [pair for pair in pairs if all((directory / name).is_file() for name in pair)]
    words = path / WORDPIECE if path.is_dir() else path
    is_wordpiece = words.is_file() and words.name == WORDPIECE
    if file.is_file() and file.suffix == ".json" and not (pairs and file == path):
        with reading(file, "tokenizer", DOWNLOAD_AGAIN):
            rust = tokenizers.Tokenizer.from_buffer(read(file))
        settings = _with_class_tokens(settings, lambda token: rust.token_to_id(token) is not None)
        _apply_settings(rust, settings)
    elif pairs and not (is_wordpiece and settings["tokenizer_class"] == "BertTokenizer"):
        vocabulary, merges = pairs[0]
        rust, settings = _read_pair(directory / vocabulary, directory / merges, settings, read)
    elif is_wordpiece:
        rust, settings = _read_wordpiece(words, settings, read)
    else:
        models_there = [directory / name for name in SENTENCEPIECE]
        _refuse_sentencepiece([path] if path in models_there else models_there)
        return None
    _add_tokens(rust, settings, directory, read)
    return rust, settings


def token_of(settings: Settings, key: str) -> str | None:
    """Return the token under `key`, which is a string or an object with `content`."""
    named = settings.get(key)
    token = named.get("content") if isinstance(named, dict) else named
    return token if isinstance(token, str) else None


def _read_settings(directory: Path, read: Read) -> Settings:
    """Return the settings of a tokenizer, with the class that transformers gives it."""
    settings, names, model = (
        read_json(directory / name, read) if (directory / name).is_file() else {}
        for name in (CONFIG, NAMES, MODEL_CONFIG)
    )
    settings = {key: value for key, value in settings.items() if value is not None}
    if "added_tokens_decoder" not in settings:
        settings |= {key: value for key, value in names.items() if value is not None}
    named = settings.get("tokenizer_class") or model.get("tokenizer_class")
    if not isinstance(named, str):
        named = CLASSES.get(str(model.get("model_type")), "")
    return settings | {"tokenizer_class": named.removesuffix("Fast")}


def _with_class_tokens(settings: Settings, has_token: Callable[[str], bool]) -> Settings:
    """Return the settings with the special tokens of their class that the vocabulary has."""
    tokens = CLASS_TOKENS.get(settings["tokenizer_class"], {})
    return {key: token for key, token in tokens.items() if has_token(token)} | settings


def _apply_settings(rust: tokenizers.Tokenizer, settings: Settings) -> None:
    """Change the rules of a `tokenizer.json` as its class does by the settings."""
    class_name, cutter = settings["tokenizer_class"], rust.pre_tokenizer
    if class_name == "GPT2Tokenizer" and isinstance(cutter, pre_tokenizers.ByteLevel):
        rust.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=settings.get("add_prefix_space") is True, use_regex=cutter.use_regex
        )
    if class_name == "BertTokenizer" and isinstance(rust.model, models.WordPiece):
        ours = bert_tokenizer(rust.model, **_bert_options(settings))
        rust.normalizer, rust.pre_tokenizer = ours.normalizer, ours.pre_tokenizer
        rust.decoder = ours.decoder


def _read_pair(
    vocabulary_file: Path, merges_file: Path, settings: Settings, read: Read
) -> tuple[tokenizers.Tokenizer, Settings]:
    vocabulary = _read_ids(vocabulary_file, read)
    of_bytes = vocabulary.keys() >= set(BYTE_ALPHABET)
    if not of_bytes and not any(token.endswith(END_OF_WORD) for token in vocabulary):
        raise UserError(
            f"{vocabulary_file}: lacks some of the 256 bytes, so it is not byte-level, and has no "
            f"token that ends with {END_OF_WORD}, as GPT-1's",
            hint="use GPT-2's or GPT-1's kind of BPE",
        )
    class_name = "GPT2Tokenizer" if of_bytes else "OpenAIGPTTokenizer"
    settings = _with_class_tokens(
        settings | {"tokenizer_class": class_name}, vocabulary.__contains__
    )
    ending = "" if of_bytes else END_OF_WORD
    unknown = token_of(settings, "unk_token") or UNKNOWN
    options = {} if of_bytes else {"unk_token": unknown, "end_of_word_suffix": ending}
    with reading(merges_file, f"list of the merges of {vocabulary_file.name}", DOWNLOAD_AGAIN):
        lines = _read_lines(merges_file, read)
        lines = lines[1:] if lines[0].startswith("#version") else lines
        merges: list[Any] = [tuple(line.split(" ")) for line in lines if line]
        model = models.BPE(vocab=vocabulary, merges=merges, **options)
    # Merging starts from one byte, or from one character that may end a word.
    reachable = {"".join(merge) for merge in merges}
    reachable |= {token for token in vocabulary if len(token.removesuffix(ending)) == 1}
    reachable |= {token.content for token in _named_tokens(settings, vocabulary_file.parent)}
    lost = [token for token in vocabulary.keys() - reachable if not SPECIAL.fullmatch(token)]
    if lost:
        raise CorruptInputError(
            f"{merges_file}: no line makes {min(lost)!r} and {len(lost) - 1} other tokens of "
            f"{vocabulary_file.name}; it is cut off or of another vocabulary; {DOWNLOAD_AGAIN}"
        )
    if not of_bytes:
        return lower_case_tokenizer(model), settings
    rust = byte_level_tokenizer(model, prefix_space=settings.get("add_prefix_space") is True)
    keys = (key for key in ("bos_token", "eos_token") if settings.get(f"add_{key}") is True)
    ends = {key.removesuffix("_token"): token_of(settings, key) for key in keys}
    ends = {name: token for name, token in ends.items() if token in vocabulary}
    if ends:
        add_ends(rust, **ends)
    return rust, settings


def _read_wordpiece(
    file: Path, settings: Settings, read: Read
) -> tuple[tokenizers.Tokenizer, Settings]:
    """Return the WordPiece of a `vocab.txt`, a token a line, with `BertTokenizer`'s settings."""
    with reading(file, "vocabulary of WordPiece", DOWNLOAD_AGAIN):
        tokens = _read_lines(file, read)
    vocabulary = {token: id for id, token in enumerate(tokens) if token}
    settings = _with_class_tokens(
        settings | {"tokenizer_class": "BertTokenizer"}, vocabulary.__contains__
    )
    unknown = token_of(settings, "unk_token") or CLASS_TOKENS["BertTokenizer"]["unk_token"]
    if unknown not in vocabulary:
        raise CorruptInputError(
            f"{file}: has no line {unknown!r}, the token for unknown words; it is cut off or no "
            f"vocabulary of WordPiece; {DOWNLOAD_AGAIN}"
        )
    model = models.WordPiece(vocab=vocabulary, unk_token=unknown)
    return bert_tokenizer(model, **_bert_options(settings)), settings


def _bert_options(settings: Settings) -> dict[str, Any]:
    strip_accents = settings.get("strip_accents")
    return {
        "lowercase": settings.get("do_lower_case", True) is not False,
        "chinese": settings.get("tokenize_chinese_chars", True) is not False,
        "strip_accents": strip_accents if isinstance(strip_accents, bool) else None,
    }


def _refuse_sentencepiece(files: list[Path]) -> None:
    """Raise `UserError` if there is a model of SentencePiece alone."""
    for file in files:
        if file.is_file():
            name = repr(str(file.parent))
            command = f"t.AutoTokenizer.from_pretrained({name}).save_pretrained({name})"
            raise UserError(
                f"{file} is a model of SentencePiece, which transformers turns into a "
                f"{TOKENIZER_JSON}",
                hint=f"pip install transformers sentencepiece protobuf; "
                f'python -c "import transformers as t; {command}"',
            )


def _add_tokens(
    rust: tokenizers.Tokenizer, settings: Settings, directory: Path, read: Read
) -> None:
    """Add the tokens that the files name to those of the vocabulary, as transformers does.

    Raises CorruptInputError if a file gives a token another id than it has.
    """
    added, file = settings.get("added_tokens_decoder"), directory / CONFIG
    contents = {token.content for token in rust.get_added_tokens_decoder().values()}
    if added is not None:
        if not isinstance(added, dict) or not all(id.isdecimal() for id in added):
            raise CorruptInputError(f"{file}: added_tokens_decoder is not a token for each id")
        tokens = {int(id): _added_token(value, file) for id, value in added.items()}
    else:
        file = directory / ADDED
        named = {token.content for token in _named_tokens(settings, directory)}
        ids = _read_ids(file, read) if file.is_file() else {}
        tokens = {
            id: AddedToken(token, special=token in named, normalized=token not in named)
            for token, id in ids.items()
            if token not in contents
        }
    rust.add_tokens([token for _, token in sorted(tokens.items())])
    for id, token in tokens.items():
        if rust.token_to_id(token.content) != id:
            raise CorruptInputError(
                f"{file}: gives {token.content!r} the id {id}, but after the vocabulary it is "
                f"{rust.token_to_id(token.content)}; correct or remove the file"
            )
    present = {token.content: token for token in rust.get_added_tokens_decoder().values()}
    of_class = {token_of(settings, key) for key in TOKEN_NAMES}
    for token in _named_tokens(settings, directory):
        if token.content not in present and rust.token_to_id(token.content) is not None:
            rust.add_tokens([token])
        elif token.content in of_class & present.keys() and not present[token.content].special:
            present[token.content].special = True
            rust.add_tokens([present[token.content]])


def _named_tokens(settings: Settings, directory: Path) -> Iterator[AddedToken]:
    """Yield the special tokens that the settings name."""
    values: list[Any] = [settings[key] for key in TOKEN_NAMES if key in settings]
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    if not isinstance(extra, (dict, list)):
        raise CorruptInputError(f"{directory / CONFIG}: the special tokens {extra!r} are no list")
    values += extra.values() if isinstance(extra, dict) else extra
    others = [key for key in settings if key.endswith("_token") and key not in TOKEN_NAMES]
    values += [settings[key] for key in others if isinstance(settings[key], str)]
    for value in values:
        token = _added_token(value, directory / CONFIG)
        token.special = True
        yield token


def _added_token(value: Any, file: Path) -> AddedToken:
    """Return a token of a settings file: its text, or an object of `AddedToken`'s fields."""
    options: Any = {"content": value, "special": True} if isinstance(value, str) else value
    try:
        token = AddedToken(**{key: options[key] for key in options if key in TOKEN_FIELDS})
    except (TypeError, IndexError):
        raise CorruptInputError(f"{file}: {value!r} is no token") from None
    if not isinstance(options, dict) or not token.content:
        raise CorruptInputError(f"{file}: {value!r} is no token: it has no text")
    return token


def _read_lines(file: Path, read: Read) -> list[str]:
    """Return the lines of a text, whose ends are those of any system."""
    return io.TextIOWrapper(io.BytesIO(read(file)), "utf-8").read().split("\n")


def _read_ids(file: Path, read: Read) -> dict[str, int]:
    ids = read_json(file, read)
    sound = all(type(id) is int and 0 <= id < 1 << 32 for id in ids.values())
    if not sound or "" in ids or len(set(ids.values())) < len(ids):
        raise CorruptInputError(f"{file}: not one id for each token; {DOWNLOAD_AGAIN}")
    return ids
