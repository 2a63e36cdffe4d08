"""Where a SOURCE lies: a path that exists, or else a name on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tiedgpt.errors import UserError
from tiedgpt.weights.registry import formats

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
CONFIGS = ("config.json", "generation_config.json")
NO_WEIGHTS = ("training_args.bin", "optimizer.*", "scheduler.*", "rng_state*", "adapter_model.*")


def local_directory(
    source: str | os.PathLike[str],
    patterns: Sequence[str] | None = None,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Path:
    """Return the directory or file that `source` names, fetched from the hub if need be.

    A path that exists wins over a hub name; a run directory stands for the model in it. Of a hub
    repository only files that match `patterns` are fetched; None means config.json and the weights
    in one of the formats that the repository has. `revision` is a branch, a tag or a commit of it.
    Raises `UserError` where there is neither a path nor a repository.
    """
    name = str(source)
    try:
        path = Path(source).expanduser()
        if path.is_dir() and not (path / "config.json").exists() and (path / "model").is_dir():
            return path / "model"
        if path.exists():
            return path
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a NUL in it
        raise UserError(f"{name[:80]!r} is no path: {error}") from None
    if not HUB_NAME.fullmatch(name) or name.startswith((".", "-")) or len(name) > 96:
        raise UserError(f"{name} does not exist", hint="check the name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = patterns or select_files(name, _listing(name, revision)) or _all_patterns()
        options: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir}
        return Path(snapshot_download(name, allow_patterns=list(patterns), **options))
    except UserError:
        raise
    except LocalEntryNotFoundError:
        why = "the hub cannot be reached"
    except HfHubHTTPError as error:
        why = f"the hub says {error.response.status_code}"
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0]
    raise UserError(f"{name} is no file or directory here, and {why}", hint="check the name")


def _listing(name: str, revision: str | None) -> list[str]:
    """Return the files of a repository; none where the hub cannot be reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        siblings = HfApi().model_info(name, revision=revision).siblings
    except HfHubHTTPError:
        raise
    except Exception:  # offline, by whichever HTTP library: the cache may have it all the same
        return []
    return [sibling.rfilename for sibling in siblings or []]


def select_files(name: str, files: Sequence[str]) -> list[str]:
    """Return the files of a repository to fetch: configs, and weights in one format.

    Raises `UserError` where it holds several models in that format.
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


def _all_patterns() -> list[str]:
    """Return the patterns of all files that a checkpoint may consist of."""
    groups = (patterns for format in formats() for patterns in format.hub_patterns)
    return [*_configs(), *(pattern for patterns in groups for pattern in patterns)]
