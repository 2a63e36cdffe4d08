"""A GPT -> a directory that is packed for our CPU kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np

from tiedgpt.core.model import GPT
from tiedgpt.errors import CheckFailedError
from tiedgpt.weights.packed.file import open_packed, save_packed
from tiedgpt.weights.packed.gpt import pack_gpt
from tiedgpt.weights.packed.panels import Form


def write_packed(model: GPT, path: Path, *, precision: str, **_: Any) -> None:
    """Write a packed directory and see that the bytes of every array come back.

    Raises `UserError` for a model that is not plain, `CheckFailedError` for other bytes.
    """
    packed = pack_gpt(model, cast(Form, precision))
    save_packed(packed, path, model.foreign_config)
    again = open_packed(path)
    for name, array in packed.arrays.items():
        if not np.array_equal(array.view(np.uint8), again.arrays[name].view(np.uint8)):
            raise CheckFailedError(f"{path.name}: {name} does not come back as it was; not kept")
