"""A `GPT` -> a packed model in memory, and a packed directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tiedgpt.core.embedding import TiedEmbedding
from tiedgpt.core.layers import MLP, Attention, Block
from tiedgpt.core.model import GPT
from tiedgpt.errors import CheckFailedError, UserError
from tiedgpt.files import replacing, require_room, write_json
from tiedgpt.weights.containers import write_safetensors
from tiedgpt.weights.formats.packed import (
    ALIGNMENT,
    FILE,
    FORMAT_NAME,
    PADDING,
    PROGRAM,
    VERSION,
    PackedModel,
    layout,
    open_packed,
    place_of,
)
from tiedgpt.weights.formats.packed.calibration import calibrate
from tiedgpt.weights.formats.packed.panels import Precision, pack
from tiedgpt.weights.formats.transformers import PACKED, config_json
from tiedgpt.weights.load import Progress
from tiedgpt.weights.parameters import parameters_for
from tiedgpt.weights.tensors import StoredTensor
from tiedgpt.weights.torch_file import stored_tensor

MODULES = {
    GPT, TiedEmbedding, Block, Attention, MLP, nn.Linear, nn.Embedding, nn.LayerNorm,
    nn.Dropout, nn.Identity, nn.ModuleList,
}  # fmt: skip


def can_pack(model: GPT) -> bool:
    """Return whether a model computes what its config says and nothing else."""
    try:
        _parameters(model)
    except UserError:
        return False
    return True


def _parameters(model: GPT) -> dict[str, Tensor]:
    """Return the parameters of a plain model by name; raise `UserError` for any other."""
    parameters = parameters_for(PROGRAM, model)
    others = sorted(
        type(module).__name__ for module in model.modules() if type(module) not in MODULES
    )
    if others:
        raise UserError(
            f"a model with {others[0]} cannot be packed",
            hint="merge adapters and unwrap modules, or compute it with torch",
        )
    return parameters


def pack_gpt(
    model: GPT, precision: Precision, *, calibration: Any = None, progress: Progress | None = None
) -> PackedModel:
    """Pack a model, one tensor at a time; the model is not modified.

    `calibration` is for int4: ids (N,) of some 32,000 tokens to correct rounding errors
    (`calibration.py`). `progress` receives the rounded bytes. Raises `UserError` for a model that
    is not a plain GPT or not finite, and for ids outside the vocabulary.
    """
    _parameters(model)
    scales: dict[str, NDArray[np.float32]] = {}
    if calibration is not None:
        if precision != "int4":
            raise UserError(f"is for precision int4, got {precision}", option="calibration")
        model, scales = calibrate(model, calibration, progress)
    arrays = {
        name: np.zeros(shape, dtype)
        for name, (shape, dtype) in layout(model.config, precision).items()
    }
    for name, parameter in parameters_for(PROGRAM, model).items():
        values: NDArray[np.float32] = parameter.detach().to("cpu", torch.float32).numpy()
        key, index = place_of(name)
        if not key.endswith(".weights"):
            arrays[key][index][..., : values.shape[-1]] = values
            continue
        try:
            panels = pack(values, precision, scales.get(name))
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        arrays[key][index] = panels.weights
        arrays[key.replace("weights", "scales")][index] = panels.scales
    return PackedModel(model.config, precision, arrays)


def save_packed(
    model: PackedModel, directory: str | os.PathLike[str], foreign: Mapping[str, Any] | None = None
) -> None:
    """Write config.json and packed.safetensors.

    `foreign` holds keys for config.json that change nothing here. Raises `UserError` where the
    directory holds a model that is not packed, `NoRoomError` where the disk is too full.
    """
    directory = Path(directory)
    if (directory / "config.json").exists() and not (directory / FILE).exists():
        raise UserError(f"{directory} holds another model", hint="give a directory of its own")
    require_room(directory, model.nbytes)
    with replacing(directory / FILE) as temporary:
        _write_arrays(temporary, model)
    config = config_json(model.config, foreign or {}, model.precision, PACKED)
    write_json(directory / "config.json", config)


def _write_arrays(path: Path, model: PackedModel) -> None:
    """Write a safetensors file in which every array begins at a multiple of 64 bytes."""
    tensors: dict[str, StoredTensor] = {}
    n_bytes = 0
    for name, array in sorted(model.arrays.items(), key=lambda item: item[1].nbytes % ALIGNMENT):
        if n_bytes % ALIGNMENT:
            tensors[PADDING] = stored_tensor(
                PADDING, torch.zeros(-n_bytes % ALIGNMENT, dtype=torch.uint8, device="cpu")
            )
            n_bytes += tensors[PADDING].n_bytes
        is_bf16 = array.dtype == np.uint16
        tensor = torch.from_numpy(array.view(np.int16) if is_bf16 else array)
        tensor = tensor.view(torch.bfloat16) if is_bf16 else tensor
        tensors[name] = stored_tensor(name, tensor)
        n_bytes += array.nbytes
    metadata = {"format": FORMAT_NAME, "version": VERSION, "precision": model.precision}
    write_safetensors(path, tensors, metadata, alignment=ALIGNMENT)


def write(
    model: GPT,
    path: Path,
    *,
    precision: str,
    calibration: Any = None,
    progress: Progress | None = None,
    **_: Any,
) -> None:
    """Write a packed directory and check that the bytes of every array come back.

    Raises `UserError` for a model that is not plain, `CheckFailedError` for other bytes.
    """
    packed = pack_gpt(model, cast(Precision, precision), calibration=calibration, progress=progress)
    save_packed(packed, path, model.foreign_config)
    again = open_packed(path)
    for name, array in packed.arrays.items():
        if not np.array_equal(array.view(np.uint8), again.arrays[name].view(np.uint8)):
            raise CheckFailedError(f"{path.name}: {name} was not written as it is")
