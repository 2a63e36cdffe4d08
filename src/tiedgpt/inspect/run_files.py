"""Files of a run that inspections read by default: its token shards and its held-out opening.

This module does not import torch: the registry names its functions.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tiedgpt.data import Shards
from tiedgpt.errors import TiedGPTError
from tiedgpt.files import OPENING, read_json

ModelPath = str | os.PathLike[str]


def shards_in(source: ModelPath) -> Shards | None:
    """Return the training side of a run's token shards, or of a folder of them."""
    for directory in (Path(source) / "data", Path(source)):
        if any(directory.glob("train_*.bin")):
            return Shards.in_directory(directory, "train")
    return None


def counts_in(source: ModelPath) -> str | None:
    """Return the path of a run whose training tokens can be counted, or None."""
    return os.fspath(source) if shards_in(source) else None


def stored_opening(source: ModelPath, field: str = "text") -> str | None:
    """Return the held-out text that training stored with a run or a model, if there is one.

    A model that was tuned on conversations has a `question` there.
    """
    for directory in (Path(source), Path(source) / "model"):
        with contextlib.suppress(TiedGPTError):
            text = read_json(directory / OPENING).get(field)
            if isinstance(text, str):
                return text
    return None
