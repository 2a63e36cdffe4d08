"""A run's state on disk: a directory that appears whole, with a sum for each of its files.

checkpoints/step-000400/ holds model.safetensors, optimizer.safetensors, state.json and
manifest.json (size and sha256 of the others). It is written under a temporary name, synced,
renamed; then `latest` is replaced; then older ones are deleted.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tiedgpt.errors import CorruptInputError, TiedGPTError
from tiedgpt.files import read_json, remove, replacing, require_room, write_json
from tiedgpt.weights.formats.safetensors_file import SafetensorsFile, Stored, write_safetensors

KEPT = 2
"""Checkpoints that stay; older ones are deleted after a new one is safely there."""

NAME = re.compile(r"step-(\d{6,})")


def save_checkpoint(
    directory: Path,
    step: int,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: dict[str, Any],
) -> Path:
    """Write the state after `step` steps under `directory`; return its path.

    `state` is plain data that must come back; torch's random stream is added to it.
    """
    parameters = dict(model.named_parameters())
    moments = {
        f"{name}/{key}": Stored(value if value.ndim else value.reshape(1))
        for name, parameter in parameters.items()
        for optimizer in optimizers
        if parameter in optimizer.state
        for key, value in optimizer.state[parameter].items()
    }
    random = {f"random/{name}": Stored(value) for name, value in _random_state(model).items()}
    sizes = [s.tensor.numel() * s.tensor.element_size() for s in moments.values()]
    require_room(
        directory, sum(sizes) + sum(p.numel() * p.element_size() for p in model.parameters())
    )
    path = directory / f"step-{step:06d}"
    remove(path)  # a damaged one that was passed over
    with replacing(path) as temporary:
        temporary.mkdir()
        weights = {name: Stored(parameter) for name, parameter in parameters.items()}
        write_safetensors(temporary / "model.safetensors", weights, {"format": "tiedgpt"})
        write_safetensors(temporary / "optimizer.safetensors", moments | random, {})
        write_json(temporary / "state.json", state | {"step": step})
        write_json(temporary / "manifest.json", _manifest(temporary))
    with replacing(directory / "latest") as temporary:
        temporary.write_text(path.name + "\n")
    for old in checkpoints(directory)[:-KEPT]:
        remove(old)
    return path


def checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints under `directory`, oldest first."""
    found = [path for path in directory.glob("step-*") if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def load_newest(
    directory: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Bring back the newest good checkpoint; return its state (None: there is none) and notes.

    A damaged one is passed over, told of in the notes, and left where it is.
    """
    notes: list[str] = []
    for path in reversed(checkpoints(directory)):
        try:
            verify(path)
            return _load(path, model, optimizers), notes
        except TiedGPTError as error:
            notes.append(f"passed over a damaged checkpoint: {error}")
    if notes:
        raise CorruptInputError(
            f"no good checkpoint is left in {directory} ({notes[0]}); train in another --out"
        )
    return None, notes


def verify(path: Path) -> None:
    """Raise `CorruptInputError` unless every file has the size and sha256 of the manifest."""
    manifest = read_json(path / "manifest.json")
    if set(manifest) != {"model.safetensors", "optimizer.safetensors", "state.json"}:
        raise CorruptInputError(f"{path / 'manifest.json'} does not list a checkpoint's files")
    for name, known in manifest.items():
        file = path / name
        if not file.exists() or known != _identity(file):
            raise CorruptInputError(f"{file} is not what was saved")


def _load(
    path: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    weights = SafetensorsFile.open(path / "model.safetensors")
    moments = SafetensorsFile.open(path / "optimizer.safetensors")
    state: dict[Tensor, dict[str, Tensor]] = {}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if shapes != {name: entry.shape for name, entry in weights.entries.items()}:
        raise CorruptInputError(f"{path} is of another model than run.toml describes")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.read(name))
            state[parameter] = {}
    parameters = dict(model.named_parameters())
    for entry in moments.entries:
        name, key = entry.rsplit("/", 1)
        value = moments.read(entry)
        if name == "random":
            _set_random_state(key, value)
        else:
            parameter = parameters[name]
            value = value.reshape(()) if key == "step" else value
            state[parameter][key] = value.to(parameter.device)
    for optimizer in optimizers:
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        optimizer.state.update({p: state[p] for p in own if state[p]})
    return read_json(path / "state.json")


def _random_state(model: nn.Module) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    device = next(model.parameters()).device
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_state(device: str, state: Tensor) -> None:
    if device == "cuda":
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def _manifest(directory: Path) -> dict[str, Any]:
    return {file.name: _identity(file) for file in sorted(directory.iterdir())}


def _identity(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}
