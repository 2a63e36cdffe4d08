"""Open a checkpoint: find its file, its format, and the config.json next to it.

SOURCE: a path that exists, else a name on the Hugging Face hub. A path is a file of any format in
`registry.py`, a directory with one, or a run directory, which stands for the model in it. A format
is recognized by content, and only headers are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import missing_run, model_directory, read_json, reading, suggest, suggest_path
from tiedgpt.weights.checkpoint import TIE_KEY, Checkpoint, Claim, claim_in
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.hub import asking_hub, is_hub_name
from tiedgpt.weights.registry import formats, suffixes

if TYPE_CHECKING:
    from torch import nn

BODIES = re.compile(r"(Model|For[A-Z]\w*)$")
PREDICTING = re.compile(
    r"LMHead|ForCausalLM|ForConditionalGeneration|ForMaskedLM|DoubleHeads|ForPreTraining|MTModel"
)
"""Names of architectures that predict tokens, although they end as those of bodies do."""
HUB_NAMES = ("openai-gpt", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2")
"""Well-known repositories, for hints at misspelt names."""
CONFIGS = ("config.json", "generation_config.json")
NO_WEIGHTS = ("training_args.bin", "optimizer.*", "scheduler.*", "rng_state*", "adapter_model.*")


def open_checkpoint(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """Return the tensors, config and claim of a checkpoint, without reading the tensors.

    The first bytes of a file select its formats. Formats with one container share the opened file,
    and names and shapes select one of them; if none fits, the first reports the missing tensors.
    `revision` and `cache_dir` are those of a hub repository.

    Raises `CorruptInputError` for files that are damaged or of no known format, `UserError` if
    `source` does not exist or is ambiguous.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise UserError(
            f"a checkpoint must be a path or a hub name, got {type(source).__name__}; torch.save a "
            "state dict first"
        )
    path = local_directory(source, revision=revision, cache_dir=cache_dir)
    directory, file = path.parent, path
    if path.is_dir():
        names = (path / name for format in formats() for name in format.file_names)
        directory, file = path, next(filter(Path.is_file, names), None) or _only_file(path)
    if not file.is_file():
        raise UserError(f"{file} is neither a file nor a directory")
    opened_file = OpenFile(file)
    head = opened_file.head
    opened: dict[Callable[[OpenFile], Checkpoint], Checkpoint] = {}
    candidates: list[Checkpoint] = []
    for format in formats() if head else ():
        if format.detect(opened_file):
            if format.open not in opened:
                opened[format.open] = _add_config(format.open(opened_file), path, directory)
            checkpoint = replace(opened[format.open], format=format)
            if format.detect_checkpoint(checkpoint):
                if checkpoint.claim.is_tied is None and (claim := format.claim(checkpoint)):
                    return replace(checkpoint, claim=claim)
                return checkpoint
            candidates.append(checkpoint)
    if candidates:
        return candidates[0]
    named = [format for format in formats() if file.name.endswith(format.suffixes)]
    if head and named:
        # Most often an error that says how it is damaged.
        checkpoint = _add_config(named[0].open(opened_file), path, directory)
        return replace(checkpoint, format=named[0])
    raise _unknown(file, head)


def open_module(module: nn.Module) -> Checkpoint:
    """Return a model in memory as a checkpoint, or raise `UserError` for an unknown class."""
    openers = (format.open_module for format in formats())
    return next(filter(None, openers))(module)


def _add_config(checkpoint: Checkpoint, source: Path, directory: Path) -> Checkpoint:
    """Add the source and config.json, whose values the file itself overrides."""
    checkpoint = replace(checkpoint, source=source)
    path = directory / "config.json"
    if not path.is_file():
        return checkpoint
    config, claim = read_json(path), checkpoint.claim
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


def _only_file(directory: Path) -> Path:
    """Return the only file of weights in a directory without any of the usual names."""
    with reading(directory, "directory of a model"):
        files = [f for f in sorted(directory.iterdir()) if f.is_file() and _has_weights(f)]
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:6])
        raise UserError(
            f"{directory} holds {len(files)} files of weights ({names})", hint="name one"
        )
    if (directory / "adapter_config.json").exists():
        raise UserError(
            f"{directory} holds an adapter, not a model", hint="merge it first, then look"
        )
    raise UserError(f"{directory} has no weights: no {', '.join(suffixes())}")


def _has_weights(file: Path) -> bool:
    """Whether a file has a suffix of weights, and its content is not of a project's others."""
    owners = [format for format in formats() if file.name.endswith(format.suffixes)]
    return bool(owners) and all(owner.is_model_file(OpenFile(file)) for owner in owners)


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


def local_directory(
    source: str | os.PathLike[str],
    patterns: Iterable[str] | None = None,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Path:
    """Return the path of `source`, downloaded from the hub if necessary.

    A path that exists wins over a hub name; a run directory stands for the model in it. Only files
    of a hub repository that match `patterns` are fetched; None means config.json and the weights in
    one format. `revision` is a branch, a tag or a commit. Raises `UserError` if there is neither a
    path nor a repository.
    """
    name = str(source)
    try:
        path = Path(source).expanduser()
        if path.exists():
            return model_directory(path)
        no_run = missing_run(path)
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a NUL in it
        raise UserError(f"{name[:80]!r} is no path: {error}") from None
    if no_run is not None and len(path.parts) > 1:
        raise no_run
    try:
        return _fetch(name, patterns, revision=revision, cache_dir=cache_dir)
    except UserError as error:  # a bare name may also be meant for a run, or a file here
        near = "" if no_run is None else no_run.hint or ""
        if not near.startswith("did you mean"):
            near = suggest_path(name) or suggest(name, HUB_NAMES)
        raise UserError(error.message, hint=near or error.hint) from None


def _fetch(name: str, patterns: Iterable[str] | None, **options: Any) -> Path:
    """Return the directory of the cache into which a repository's files were fetched."""
    if not is_hub_name(name):
        raise UserError(f"{name} does not exist", hint="check the name")
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    with asking_hub(f"{name} is no file or directory here"):
        if patterns is None:
            try:
                siblings = HfApi().model_info(name, revision=options["revision"]).siblings or []
                patterns = select_files(name, [sibling.rfilename for sibling in siblings])
            except (HfHubHTTPError, UserError):
                raise
            except Exception:  # offline, by any HTTP library: the cache may have it all the same
                patterns = ()
        groups = (group for format in formats() for group in format.hub_patterns)
        patterns = list(patterns) or [
            *_configs(),
            *(pattern for group in groups for pattern in group),
        ]
        return Path(snapshot_download(name, allow_patterns=patterns, **options))


def select_files(name: str, files: Sequence[str]) -> list[str]:
    """Return the files of a repository to fetch: configs, and weights in one format.

    Raises `UserError` if it holds several models in that format.
    """

    def matching(patterns: Sequence[str]) -> list[str]:
        return [file for file in top if any(fnmatch(Path(file).name, p) for p in patterns)]

    names = [name for format in formats() for name in format.file_names]
    folders = {Path(name).parent for name in names}
    top = [file for file in files if Path(file).parent in folders]
    others = matching(NO_WEIGHTS)
    configs = matching(_configs())
    for format in formats():
        for patterns in format.hub_patterns:
            weights = [file for file in matching(patterns) if file not in others]
            if format.is_whole_in_one_file and len(weights) > 1:
                raise UserError(
                    f"{name} holds {len(weights)} files of weights ({', '.join(weights[:6])})",
                    hint="download one of them and name it",
                )
            if weights:
                return configs + weights
    return configs


def _configs() -> list[str]:
    return [*CONFIGS, *(name for format in formats() for name in format.hub_configs)]
