"""A run's state on disk: a directory that appears whole, with a sum for each of its files.

checkpoints/step-000400/ holds model.safetensors, optimizer.safetensors, state.json and
manifest.json (size and sha256 of the others). It is written under a temporary name, synced,
renamed; then `latest` is replaced; then older ones are deleted. A damaged one is set aside under
another name and never deleted.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tiedgpt.errors import CorruptInputError, TiedGPTError
from tiedgpt.files import read_json, reading, remove, replacing, require_room, write_json, writing
from tiedgpt.train.objective import Objective
from tiedgpt.train.parallel import World, distribute_like
from tiedgpt.train.storage import checkpoint_path
from tiedgpt.weights.containers import SafetensorsFile, write_safetensors
from tiedgpt.weights.torch_file import stored_tensor

T = TypeVar("T")
KEPT = 2
"""Checkpoints that stay; older ones are deleted after a new one is safely there."""

NAME = re.compile(r"step-(\d{6,})")
FILES = "model.safetensors", "optimizer.safetensors", "state.json"


def save_checkpoint(
    directory: Path,
    step: int,
    objective: Objective,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: dict[str, Any],
    world: World,
    *,
    spared: int | None = None,
) -> None:
    """Write the state after `step` steps under `directory`.

    `state` is plain data that must come back; torch's random stream is added to it. Older ones are
    deleted, other than the newest before it and that of the step `spared`. All processes must call
    this, and the first writes.
    """
    weights, moments = world.state(objective, model, optimizers)
    held = {**moments, **_random_state(model)}
    path = checkpoint_path(directory, step)

    def write() -> None:
        tensors = (*weights.values(), *held.values())
        require_room(directory, sum(t.numel() * t.element_size() for t in tensors))
        if path.exists():
            set_aside(path)
        with replacing(path) as temporary:
            temporary.mkdir()
            for name, values in (("model", weights), ("optimizer", held)):
                stored = {key: stored_tensor(key, value) for key, value in values.items()}
                metadata = {"format": "tiedgpt"} if name == "model" else {}
                write_safetensors(temporary / f"{name}.safetensors", stored, metadata)
            write_json(temporary / "state.json", state | {"step": step})
            manifest = {file.name: _identity(file) for file in sorted(temporary.iterdir())}
            write_json(temporary / "manifest.json", manifest)
        _point_to(path)
        for old in list_checkpoints(directory)[:-KEPT]:
            if spared is None or old != checkpoint_path(directory, spared):
                remove(old)

    world.on_main(write)


def set_aside(path: Path) -> Path:
    """Give a checkpoint that cannot be used another name; return that."""
    aside, number = path.with_name(f"{path.name}.damaged"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    with writing(path):
        return path.rename(aside)


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints under `directory`, oldest first."""
    found = [path for path in directory.glob("step-*") if NAME.fullmatch(path.name)]
    return sorted(found, key=read_step)


def load_newest(
    directory: Path,
    objective: Objective,
    model: nn.Module,
    optimizers_at: Callable[[int], Sequence[torch.optim.Optimizer]],
) -> tuple[dict[str, Any] | None, list[str]]:
    """Bring back the newest good checkpoint; return its state (None: there is none) and notes.

    A damaged one is passed over, with a note, and kept under another name. Before one is
    loaded, `optimizers_at` is told after how many steps it was written, and returns the optimizers;
    it may change the model's parameters.
    """

    def load(path: Path) -> dict[str, Any]:
        optimizers = optimizers_at(read_step(path))
        load_weights(path, objective, model)
        load_moments(path, model, optimizers)
        _set_random_state(path)
        return read_json(path / "state.json")

    if not list_checkpoints(directory):
        return None, []
    path, state, damaged = load_first_good(directory, load)
    notes = [f"{note}; it is kept as {set_aside(bad)}" for bad, note in damaged.items()]
    _point_to(path)
    return state, notes


def begin_fork(
    directory: Path,
    objective: Objective,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
) -> list[str]:
    """Put the newest good checkpoint of another run into the model and its optimizers; say so.

    The directory is only read. Moments of a parameter that goes by another rule now are left out.
    """

    def load(path: Path) -> int:
        load_weights(path, objective, model)
        return load_moments(path, model, optimizers)

    path, kept, damaged = load_first_good(directory, load)
    total = sum(1 for _ in model.parameters())
    state = f"the optimizer's state of {kept} of {total} parameters"
    return [*damaged.values(), f"begins with {path}: its weights, and {state}"]


def load_first_good(directory: Path, load: Callable[[Path], T]) -> tuple[Path, T, dict[Path, str]]:
    """Load the newest good checkpoint; return its path, what `load` returned, and damaged ones.

    Of those that were passed over the error is told. Raises `CorruptInputError` where none is good.
    """
    damaged: dict[Path, str] = {}
    for path in reversed(list_checkpoints(directory)):
        try:
            verify(path)
            return path, load(path), damaged
        except (TiedGPTError, OSError) as error:
            damaged[path] = f"passed over a damaged checkpoint: {error}"
    why = "".join(f" ({note})" for note in list(damaged.values())[:1])
    raise CorruptInputError(f"no good checkpoint is left in {directory}{why}: begin a new run")


def verify(path: Path) -> dict[str, Any]:
    """Return the manifest; `TiedGPTError` unless every file is there and is what was saved."""
    manifest = read_json(path / "manifest.json")
    for name in FILES:
        with reading(path / name, "file of a checkpoint"):
            if manifest.get(name) != _identity(path / name):
                raise CorruptInputError(f"{path / name} is not what was saved")
    return manifest


def load_moments(path: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Give the optimizers what a checkpoint knows of parameters of the same rule; count those."""
    file = SafetensorsFile.open(path / "optimizer.safetensors")
    moments: dict[str, dict[str, Tensor]] = {}
    for entry in file.entries:
        name, key = entry.rsplit("/", 1)
        moments.setdefault(name, {})[key] = file.read(entry)
    names, given = {parameter: name for name, parameter in model.named_parameters()}, 0
    for optimizer in optimizers:
        by_momentum = "momentum" in optimizer.defaults
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            found = moments.get(names[parameter], {})
            if found and ("momentum_buffer" in found) == by_momentum:
                optimizer.state[parameter] = {
                    key: distribute_like(value, parameter) for key, value in found.items()
                }
                given += 1
    return given


def load_weights(path: Path, objective: Objective, model: nn.Module) -> None:
    """Put a checkpoint's weights into the model; `CorruptInputError` where they are another's."""
    weights = SafetensorsFile.open(path / "model.safetensors")
    saved = objective.state_to_save(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    if shapes != {name: entry.shape for name, entry in weights.entries.items()}:
        raise CorruptInputError(f"{path} is of another model than run.toml describes")
    with torch.no_grad():
        for name, tensor in saved.items():
            tensor.copy_(distribute_like(weights.read(name), tensor))


def _random_state(model: nn.Module) -> dict[str, Tensor]:
    states = {"random/cpu": torch.get_rng_state()}
    device = next(model.parameters()).device
    if device.type == "cuda":
        states["random/cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_state(path: Path) -> None:
    states = SafetensorsFile.open(path / "optimizer.safetensors")
    torch.set_rng_state(states.read("random/cpu"))
    if "random/cuda" in states.entries:
        torch.cuda.set_rng_state(states.read("random/cuda"))


def _point_to(path: Path) -> None:
    """Write the name of a checkpoint to `latest`."""
    with replacing(path.with_name("latest")) as temporary:
        temporary.write_text(path.name + "\n")


def read_step(path: Path) -> int:
    """Return the number of steps after which a checkpoint was written."""
    return int(path.name.removeprefix("step-"))


def _identity(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}
