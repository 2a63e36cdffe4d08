"""Files of a run that inspections read by default: its token shards and its held-out opening.

This module does not import torch: the registry names its functions.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from tiedgpt.data import Shards
from tiedgpt.errors import TiedGPTError
from tiedgpt.files import OPENING, read_json
from tiedgpt.weights.source import Source


def shards_in(path: str | Path) -> Shards | None:
    """Return the training side of a run's token shards, or of a folder of them."""
    for directory in (Path(path) / "data", Path(path)):
        if any(directory.glob("train_*.bin")):
            return Shards.in_directory(directory, "train")
    return None


def counts_in(source: Source, _tokenizer: object = None) -> str | None:
    """Return the path of a run whose training tokens can be counted, or None."""
    return str(source.given_path) if shards_in(source.given_path) else None


def stored_opening(source: Source, tokenizer: object, field: str = "text") -> str | None:
    """Return the held-out text that training stored with a run or a model, if there is one.

    A model that was tuned on conversations has a `question` there. None if no tokenizer reads it.
    """
    if tokenizer is None:
        return None
    path = source.path / OPENING
    with contextlib.suppress(TiedGPTError):
        text = read_json(path, source.read).get(field) if path.is_file() else None
        return text if isinstance(text, str) else None
    return None
