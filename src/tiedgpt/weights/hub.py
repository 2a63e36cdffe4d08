"""Where a SOURCE lies: a path that exists, or else a name on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tiedgpt.errors import UserError

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def local_directory(source: str | Path, patterns: Sequence[str]) -> Path:
    """Return the directory or file that `source` names, fetched from the hub if need be.

    A path that exists wins over a hub name; a run directory stands for the model in it. Of a hub
    repository only files that match `patterns` are fetched. Raises `UserError` where there is
    neither.
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
    if not HUB_NAME.fullmatch(name) or name in (".", "..") or len(name) > 96:
        raise UserError(f"{name} does not exist")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except LocalEntryNotFoundError:
        why = "the hub cannot be reached"
    except HfHubHTTPError as error:
        why = f"the hub says {error.response.status_code}"
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0]
    raise UserError(f"{name} is no file or directory here, and {why}")
