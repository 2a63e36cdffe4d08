"""A model's source and all that is found out about it, each fact once.

    source = Source("runs/my-1")      a path that exists, else a name on the Hugging Face hub
    source.checkpoint, source.gpt     its tensors, config and claim; under our names
    source.decide()                   whether its head is the embedding
    source.tokenizer                  the tokenizer that comes with it

A path is a file of any format in `registry.py`, a directory with one, or a run directory, which
stands for the model in it. A format is recognized by content, and only headers are read. A `Source`
is a path for every function that takes one; those that know it take the facts from it.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.files import (
    exists,
    missing_run,
    model_directory,
    read_json,
    reading,
    suggest,
    suggest_path,
)
from tiedgpt.weights.checkpoint import (
    EMBEDDING,
    HEAD,
    TIE_KEY,
    Checkpoint,
    Claim,
    GPTCheckpoint,
    claim_in,
)
from tiedgpt.weights.decision import TieDecision, decide_tie
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.gpt import MAX_NAME_LENGTH
from tiedgpt.weights.hub import download
from tiedgpt.weights.registry import formats, suffixes
from tiedgpt.weights.tensors import printable
from tiedgpt.weights.wrappers import find_nested_gpt

if TYPE_CHECKING:
    from torch import nn

    from tiedgpt.text.tokenizer import Tokenizer

BODIES = re.compile(r"(Model|For[A-Z]\w*)$")
PREDICTING = re.compile(
    r"LMHead|ForCausalLM|ForConditionalGeneration|ForMaskedLM|DoubleHeads|ForPreTraining|MTModel"
)
"""Names of architectures that predict tokens, although they end as those of bodies do."""
HUB_NAMES = ("openai-gpt", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2")
"""Well-known repositories, for hints at misspelt names."""


@dataclass(eq=False)
class Source(os.PathLike[str]):
    """A path, a hub name or a module, with facts that are each read when they are first used."""

    source: str | os.PathLike[str] | nn.Module
    revision: str | None = None
    """Branch, tag or commit of a hub repository."""
    cache_dir: str | os.PathLike[str] | None = None
    """Directory of the hub's cache."""
    weights: bool = True
    """Whether the weights of a hub repository are fetched, too."""
    opened: Checkpoint | None = None
    """Checkpoint of a module that the caller has opened."""
    read: Callable[[Path], bytes] = field(default_factory=partial(cache, Path.read_bytes))
    """Function that reads a small file, each once."""
    open: Callable[[Path, Callable[[Path], bytes]], OpenFile] = field(
        default_factory=partial(cache, OpenFile)
    )
    """Function that opens a file, each once."""

    @classmethod
    def of(cls, source: str | os.PathLike[str] | nn.Module, **options: Any) -> Source:
        """Return the source itself, or a new one of a path, a hub name or a module."""
        return source if isinstance(source, cls) else cls(source, **options)

    def __str__(self) -> str:
        return str(self.source)

    def __fspath__(self) -> str:
        return str(self.path)

    @cached_property
    def path(self) -> Path:
        """Local path of the source, downloaded from the hub if necessary.

        Raises `UserError` if there is neither a path nor a repository.
        """
        if not isinstance(self.source, (str, os.PathLike)):
            got = type(self.source).__name__
            raise UserError(
                f"a checkpoint must be a path or a hub name, got {got}; torch.save a state dict "
                "first"
            )
        name = str(self.source)
        try:
            path = Path(self.source).expanduser()
            if exists(path):
                return model_directory(path)
            no_run = missing_run(path)
        except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a NUL in it
            raise UserError(f"{name[:80]!r} is no path: {error}") from None
        if no_run is not None and len(path.parts) > 1:
            raise no_run
        try:
            return download(
                name, weights=self.weights, revision=self.revision, cache_dir=self.cache_dir
            )
        except UserError as error:  # a bare name may also be meant for a run, or a file here
            near = "" if no_run is None else no_run.hint or ""
            if not near.startswith("did you mean"):
                near = suggest_path(name) or suggest(name, HUB_NAMES)
            raise UserError(error.message, hint=near or error.hint) from None

    @property
    def given_path(self) -> Path:
        """The path given, such as that of a run; for a hub name, its local copy."""
        path = Path(str(self.source)).expanduser()
        return path if path.exists() else self.path

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The tensors, config and claim, without reading the tensors.

        The first bytes of a file select its formats. Formats with one container share the opened
        file, and names and shapes select one of them; if none fits, the first reports the missing
        tensors. Raises `CorruptInputError` for files that are damaged or of no known format,
        `UserError` for an ambiguous directory, or a module of an unknown class.
        """
        if self.opened is not None:
            return self.opened
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(self.source, torch.nn.Module):
            return next(filter(None, (format.open_module for format in formats())))(self.source)
        path = file_path = self.path
        directory = path if path.is_dir() else path.parent
        if path.is_dir():
            names = (path / name for format in formats() for name in format.file_names)
            file_path = next(filter(Path.is_file, names), None) or self._find_only_file()
        if not file_path.is_file():
            raise UserError(f"{file_path} is neither a file nor a directory")
        file = self.open(file_path, self.read)
        opened: dict[Callable[[OpenFile], Checkpoint], Checkpoint] = {}
        candidates: list[Checkpoint] = []
        for format in formats() if file.head else ():
            if format.detect(file):
                if format.open not in opened:
                    opened[format.open] = _add_config(format.open(file), path, directory, self.read)
                checkpoint = replace(opened[format.open], format=format)
                if format.detect_checkpoint(checkpoint):
                    if checkpoint.claim.is_tied is None and (claim := format.claim(checkpoint)):
                        return replace(checkpoint, claim=claim)
                    return checkpoint
                candidates.append(checkpoint)
        if candidates:
            return candidates[0]
        named = [format for format in formats() if file_path.name.endswith(format.suffixes)]
        if file.head and named:
            # Most often an error that says how it is damaged.
            checkpoint = _add_config(named[0].open(file), path, directory, self.read)
            return replace(checkpoint, format=named[0])
        raise _unknown(file_path, file.head)

    @cached_property
    def gpt(self) -> GPTCheckpoint:
        """The GPT under our names, with checked matrices.

        Raises `UserError` for another architecture, `CorruptInputError` if its tensors contradict
        each other, or if neither W nor a head is a matrix.
        """
        checkpoint, path = self.checkpoint, str(self.checkpoint.source)
        assert checkpoint.format is not None
        try:
            gpt = checkpoint.format.to_gpt(checkpoint)
        except (CorruptInputError, UserError) as error:
            if path in str(error):
                raise
            raise type(error)(f"{path}: {error.problem()}", hint=error.hint) from None
        matrices = {name: gpt.tensors[name] for name in (EMBEDDING, HEAD) if name in gpt.tensors}
        for name, matrix in matrices.items():
            if not (len(matrix.shape) == 2 and all(matrix.shape)):
                shape = f"must be a matrix (V, D), got {matrix.shape}"
                raise CorruptInputError(f"{path}: {name} {shape}")
        if matrices:
            return gpt
        nested = find_nested_gpt(checkpoint.tensors)
        if nested is None:
            raise CorruptInputError(f"{path}: {EMBEDDING} is missing; this is no GPT")
        prefix, other = map(printable, nested)
        raise CorruptInputError(
            f"{path} holds a GPT, named {prefix[:80]}*, inside a model that has other "
            f"tensors, such as {other[:MAX_NAME_LENGTH]}",
            hint="save the GPT's own state_dict()",
        )

    def decide(self, **options: Any) -> TieDecision:
        """Return whether the head is the embedding; options as in `decide_tie`."""
        gpt = None
        if self.checkpoint.format is not None:
            with contextlib.suppress(TiedGPTError):  # another architecture, or damaged
                gpt = self.gpt.tensors
        return decide_tie(self.checkpoint, gpt, **options)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the model's directory or file; None without one.

        Raises `UserError` for a kind that is not supported, `CorruptInputError` for a damaged file.
        """
        from tiedgpt.weights.tokenizer_files import tokenizer_in_directory, tokenizer_in_file

        find = tokenizer_in_directory if self.path.is_dir() else tokenizer_in_file
        return find(self.path, self.read, self.open)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end a text by generation_config.json: a chat model has several."""
        path = self.path / "generation_config.json"
        value = read_json(path, self.read).get("eos_token_id") if path.exists() else None
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(id) is int and id >= 0 for id in ids):
            raise CorruptInputError(f"{path}: eos_token_id must be ids, got {value!r}")
        return tuple(ids)

    def _find_only_file(self) -> Path:
        """Return the only file of weights in a directory without any of the usual names."""
        with reading(self.path, "directory of a model"):
            files = list(filter(self._has_weights, sorted(self.path.iterdir())))
        if len(files) == 1:
            return files[0]
        if files:
            names = ", ".join(file.name for file in files[:6])
            raise UserError(
                f"{self.path} holds {len(files)} files of weights ({names})", hint="name one"
            )
        if (self.path / "adapter_config.json").exists():
            raise UserError(
                f"{self.path} holds an adapter, not a model", hint="merge it first, then look"
            )
        raise UserError(f"{self.path} has no weights: no {', '.join(suffixes())}")

    def _has_weights(self, path: Path) -> bool:
        """Whether a file has a suffix of weights, and its content is not of a project's others."""
        owners = [format for format in formats() if path.name.endswith(format.suffixes)]
        return (
            path.is_file()
            and bool(owners)
            and all(owner.is_model_file(self.open(path, self.read)) for owner in owners)
        )


def open_checkpoint(source: str | os.PathLike[str], **options: Any) -> Checkpoint:
    """Return the checkpoint of a source; see `Source.checkpoint`."""
    return Source.of(source, **options).checkpoint


def _add_config(
    checkpoint: Checkpoint, source: Path, directory: Path, read: Callable[[Path], bytes]
) -> Checkpoint:
    """Add the source and config.json, whose values the file itself overrides."""
    checkpoint = replace(checkpoint, source=source)
    path = directory / "config.json"
    if not path.is_file():
        return checkpoint
    config, claim = read_json(path, read), checkpoint.claim
    beside = claim_in(config, path)
    if beside is not None and claim.is_tied is None:
        claim = beside
    elif claim == Claim():
        claim = Claim(source=f"config.json does not say {TIE_KEY}")
    names = config.get("architectures")
    names = list(map(str, names)) if isinstance(names, list) else []
    headless = names and all(BODIES.search(n) and not PREDICTING.search(n) for n in names)
    usage = replace(checkpoint.usage, headless=bool(headless))
    return replace(checkpoint, config=config | dict(checkpoint.config), claim=claim, usage=usage)


def _unknown(file: Path, head: bytes) -> UserError | CorruptInputError:
    """Return the error about a file that no format knows."""
    if file.suffix == ".json":
        hint = f"name the directory {file.parent} instead"
        return UserError(f"{file} holds no weights", hint=hint)
    titles = ", ".join(format.title for format in formats())
    return CorruptInputError(
        f"{file} is {'of no known checkpoint format' if head else 'empty'}: read are those of "
        f"{titles}"
    )


def open_tokenizer(source: str | os.PathLike[str]) -> Tokenizer:
    """Return the tokenizer of a directory, a file or a hub name, as `Tokenizer.from_pretrained`.

    Raises `UserError` if none exists or it is of a kind that is not supported,
    `CorruptInputError` if a file of it is damaged.
    """
    source = Source.of(source, weights=False)
    if source.tokenizer is None:
        from tiedgpt.text.directory import EXPECTED

        records = (format.tokenizer for format in formats())
        names = (record.hub_name for record in records if record is not None)
        raise UserError(
            f"{source.path} holds no tokenizer"
            f"{'' if source.path.is_dir() else ', nor does its directory'}",
            hint=f"expected {EXPECTED}, or {' or '.join(filter(None, names))} (nanoGPT keeps its "
            "own in data/NAME: copy it there); a model of GPT-2's vocabulary takes "
            "Tokenizer.from_pretrained('gpt2')",
        )
    return source.tokenizer


def tokenizer_for(model: Any, tokenizer: Any, *, needed: bool = False) -> Tokenizer | None:
    """Return the tokenizer given, or the tokenizer in the directory of a model path.

    `tokenizer` may be ours, a path, or one of transformers or `tokenizers`. None if none exists;
    if it is `needed`, `UserError`.
    """
    import tokenizers

    from tiedgpt.text.directory import TOKEN_NAMES
    from tiedgpt.text.tokenizer import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if isinstance(backend, tokenizers.Tokenizer):
        named: dict[str, Any] = getattr(tokenizer, "special_tokens_map", {})
        tokens = {key: str(named[key]) for key in TOKEN_NAMES if named.get(key)}
        return Tokenizer(tokenizers.Tokenizer.from_str(backend.to_str()), tokens)
    if isinstance(tokenizer, (str, os.PathLike)):
        return open_tokenizer(tokenizer)
    if tokenizer is None and isinstance(model, (str, os.PathLike)):
        if needed:
            return open_tokenizer(model)
        with contextlib.suppress(UserError):
            return Source.of(model, weights=False).tokenizer
    if not isinstance(tokenizer, (Tokenizer, type(None))):
        type_name = type(tokenizer).__name__
        raise UserError(
            f"must be a tiedgpt.Tokenizer or where one is, got {type_name}", option="tokenizer"
        )
    if needed and tokenizer is None:
        raise UserError(
            "the model has no tokenizer", hint="give one, or ids in the place of the text"
        )
    return tokenizer
