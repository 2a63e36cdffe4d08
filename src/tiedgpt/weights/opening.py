"""Open any checkpoint: the format is recognized by content, and only headers are read.

SOURCE: a file of any format in `registry.py`; a directory with one; a run directory, which stands
for the model in it; or a hub name. What config.json beside the weights says is taken along.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import read_json, reading
from tiedgpt.weights.checkpoint import TIE_KEY, Checkpoint, Claim, claim_in
from tiedgpt.weights.hub import local_directory
from tiedgpt.weights.registry import formats, head_of, suffixes

BODIES = re.compile(r"(Model|For[A-Z]\w*)$")
PREDICTING = re.compile(
    r"LMHead|ForCausalLM|ForConditionalGeneration|ForMaskedLM|DoubleHeads|ForPreTraining|MTModel"
)
"""Architectures that end as bodies and classifiers do, and those that predict tokens all the same;
of any other name nothing is known."""


def open_checkpoint(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """Return what a checkpoint holds, without reading its tensors.

    `revision` and `cache_dir` are of a repository of the hub. Raises `CorruptInputError` for files
    that are damaged or of no known format, `UserError` where there is nothing at `source` or it is
    unclear what is meant.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise UserError(
            f"a checkpoint must be a path or a hub name, got {type(source).__name__}; torch.save a "
            "state dict first"
        )
    path = local_directory(source, revision=revision, cache_dir=cache_dir)
    directory, file = (path, _weights_in(path)) if path.is_dir() else (path.parent, path)
    return replace(_open_file(file, directory / "config.json"), source=path)


def _weights_in(directory: Path) -> Path:
    """Return the file of a directory that holds, or lists, its weights."""
    for format in formats():
        for name in format.file_names:
            if (directory / name).is_file():
                return directory / name
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
    return bool(owners) and all(owner.is_model_file(file, head_of(file)) for owner in owners)


def _open_file(path: Path, config_path: Path) -> Checkpoint:
    """Recognize a file and open it.

    A file is asked of each format by its first bytes. Formats that share a container open it
    together, and names and shapes tell whose it is; one that nobody recognizes is read as the
    first's, which says what is missing.
    """
    if not path.is_file():
        raise UserError(f"{path} is neither a file nor a directory")
    head = head_of(path)
    opened: dict[Callable[[Path], Checkpoint], Checkpoint] = {}
    candidates: list[Checkpoint] = []
    for format in formats() if head else ():
        if format.detect(path, head):
            if format.open not in opened:
                opened[format.open] = _with_config(format.open(path), config_path)
            checkpoint = replace(opened[format.open], format=format)
            if format.recognizes(checkpoint):
                own = checkpoint.claim.is_tied is None and format.claim(checkpoint)
                return replace(checkpoint, claim=own or checkpoint.claim)
            candidates.append(checkpoint)
    if candidates:
        return candidates[0]
    named = [format for format in formats() if path.name.endswith(format.suffixes)]
    if head and named:
        # Most often an error that says how it is damaged.
        return replace(_with_config(named[0].open(path), config_path), format=named[0])
    if path.suffix == ".json":
        raise UserError(
            f"{path} holds no weights", hint=f"name the directory {path.parent} instead"
        )
    titles = ", ".join(format.title for format in formats())
    raise CorruptInputError(
        f"{path} is {'of no known checkpoint format' if head else 'empty'}: read are those of "
        f"{titles}"
    )


def _with_config(checkpoint: Checkpoint, config_path: Path) -> Checkpoint:
    """Add what config.json says, where there is one; what the file says of itself holds."""
    if not config_path.is_file():
        return checkpoint
    config, claim = read_json(config_path), checkpoint.claim
    beside = claim_in(config, config_path)
    if beside is not None and claim.is_tied is None:
        claim = beside
    elif claim == Claim():
        claim = Claim(source=f"config.json does not say {TIE_KEY}")
    names = config.get("architectures")
    names = list(map(str, names)) if isinstance(names, list) else []
    headless = names and all(BODIES.search(n) and not PREDICTING.search(n) for n in names)
    usage = replace(checkpoint.usage, headless=bool(headless))
    return replace(checkpoint, config=config | dict(checkpoint.config), claim=claim, usage=usage)
