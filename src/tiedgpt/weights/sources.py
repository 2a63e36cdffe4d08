"""The path and the checkpoint of a source, for callers that need no more of it."""

from __future__ import annotations

import os
from pathlib import Path

from tiedgpt.weights.source import Source, open_checkpoint

__all__ = ["local_directory", "open_checkpoint"]


def local_directory(source: str | os.PathLike[str]) -> Path:
    """Return the local path of a source."""
    return Source.of(source).path
