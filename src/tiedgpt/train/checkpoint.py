"""A run's state on disk: a directory that appears whole, with a sum for each of its files.

checkpoints/step-000400/ holds model.safetensors, optimizer.safetensors, state.json and
manifest.json (size and sha256 of the others). It is written under a temporary name, synced,
renamed; then `latest` is replaced; then older ones are deleted. A damaged one is set aside under
another name and never deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.files import read_json, remove, replacing, require_room, write_json, writing
from tiedgpt.train.parallel import World, laid_out_like
from tiedgpt.train.task import Task
from tiedgpt.weights.safetensors_file import SafetensorsFile, write_safetensors
from tiedgpt.weights.torch_file import stored_tensor

KEPT = 2
"""Checkpoints that stay; older ones are deleted after a new one is safely there."""

NAME = re.compile(r"step-(\d{6,})")


def save_checkpoint(
    directory: Path,
    step: int,
    task: Task,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: dict[str, Any],
    *,
    spared: int | None = None,
    world: World | None = None,
) -> Path:
    """Write the state after `step` steps under `directory`; return its path.

    `state` is plain data that must come back; torch's random stream is added to it. Older ones are
    deleted, other than the newest before it and that of the step `spared`. In a `world` of several
    processes all must call this, and the first writes.
    """
    world = world or World(torch.device("cpu"))
    weights, moments = world.state(task, model, optimizers)
    held = {name: value if value.ndim else value.reshape(1) for name, value in moments.items()}
    held |= {f"random/{name}": value for name, value in _random_state(model).items()}
    path = checkpoint_path(directory, step)

    def write() -> Path:
        tensors = (*weights.values(), *held.values())
        require_room(directory, sum(t.numel() * t.element_size() for t in tensors))
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
        for old in checkpoints(directory)[:-KEPT]:
            if spared is None or old != checkpoint_path(directory, spared):
                remove(old)
        return path

    return world.lead(write)


def set_aside(path: Path) -> Path | None:
    """Give a checkpoint that cannot be used another name, if it is there; return that."""
    if not path.exists():
        return None
    endings = chain([".damaged"], (f".damaged-{number}" for number in count(2)))
    free = (path.with_name(path.name + ending) for ending in endings)
    aside = next(place for place in free if not place.exists())
    with writing(path):
        path.rename(aside)
    return aside


def checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints under `directory`, oldest first."""
    found = [path for path in directory.glob("step-*") if NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def load_newest(
    directory: Path,
    task: Task,
    model: nn.Module,
    optimizers_at: Callable[[int], Sequence[torch.optim.Optimizer]],
) -> tuple[dict[str, Any] | None, list[str]]:
    """Bring back the newest good checkpoint; return its state (None: there is none) and notes.

    A damaged one is passed over, told of in the notes, and kept under another name. Before one is
    loaded, `optimizers_at` is told after how many steps it was written, and returns the optimizers;
    it may change the model's parameters.
    """
    damaged: list[tuple[Path, Exception]] = []
    for path in reversed(checkpoints(directory)):
        try:
            verify(path)
            state = _load(path, task, model, optimizers_at(step_of(path)))
        except (TiedGPTError, OSError) as error:
            damaged.append((path, error))
            continue
        notes = [
            f"passed over a damaged checkpoint: {error}; it is kept as {set_aside(bad)}"
            for bad, error in damaged
        ]
        _point_to(path)
        return state, notes
    if damaged:
        raise CorruptInputError(
            f"no good checkpoint is left in {directory} ({damaged[0][1]}); train in another --out"
        )
    return None, []


def load_weights(directory: Path, step: int, task: Task, model: nn.Module) -> None:
    """Put the weights of a step's checkpoint into the model.

    Raises `CorruptInputError`, before the model is touched, where it is damaged.
    """
    path = checkpoint_path(directory, step)
    verify(path)
    _load_weights(path, task, model)


def verify(path: Path) -> None:
    """Raise `CorruptInputError` unless every file has the size and sha256 of the manifest."""
    try:
        manifest = read_json(path / "manifest.json")
    except UserError as error:
        raise CorruptInputError(str(error)) from None
    if set(manifest) != {"model.safetensors", "optimizer.safetensors", "state.json"}:
        raise CorruptInputError(f"{path / 'manifest.json'} does not list a checkpoint's files")
    for name, known in manifest.items():
        file = path / name
        try:
            found = _identity(file)
        except OSError as error:
            raise CorruptInputError(f"cannot read {file}: {error.strerror}") from None
        if known != found:
            raise CorruptInputError(f"{file} is not what was saved")


def load_moments(path: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Give the optimizers what a checkpoint knows of parameters of the same rule; count those."""
    return _give(_read_moments(path), model, optimizers)


def _give(
    moments: dict[str, dict[str, Tensor]],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
) -> int:
    names, given = {parameter: name for name, parameter in model.named_parameters()}, 0
    for optimizer in optimizers:
        by_momentum = "momentum" in optimizer.defaults
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            found = moments.get(names[parameter], {})
            if found and ("momentum_buffer" in found) == by_momentum:
                optimizer.state[parameter] = {
                    key: laid_out_like(value, parameter) for key, value in found.items()
                }
                given += 1
    return given


def _load(
    path: Path, task: Task, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    state, moments = read_json(path / "state.json"), _read_moments(path)
    _load_weights(path, task, model)
    random = moments.pop("random", {})
    if "cpu" in random:
        torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"])
    _give(moments, model, optimizers)
    return state


def _read_moments(path: Path) -> dict[str, dict[str, Tensor]]:
    """Return what the optimizers hold of each parameter, by name, and under `random` the streams.

    The number of a parameter's steps is a tensor without axes there.
    """
    file = SafetensorsFile.open(path / "optimizer.safetensors")
    found: dict[str, dict[str, Tensor]] = {}
    for entry in file.entries:
        name, key = entry.rsplit("/", 1)
        value = file.read(entry)
        found.setdefault(name, {})[key] = value.reshape(()) if key == "step" else value
    return found


def _load_weights(path: Path, task: Task, model: nn.Module) -> None:
    weights = SafetensorsFile.open(path / "model.safetensors")
    saved = task.state_to_save(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    if shapes != {name: entry.shape for name, entry in weights.entries.items()}:
        raise CorruptInputError(f"{path} is of another model than run.toml describes")
    with torch.no_grad():
        for name, tensor in saved.items():
            tensor.copy_(laid_out_like(weights.read(name), tensor))


def _point_to(path: Path) -> None:
    """Have `latest` name a checkpoint."""
    latest = path.with_name("latest")
    with contextlib.suppress(OSError):
        if latest.read_text(errors="replace") == path.name + "\n":
            return
    with replacing(latest) as temporary:
        temporary.write_text(path.name + "\n")


def step_of(path: Path) -> int:
    """Return the number of steps after which a checkpoint was written."""
    return int(path.name.removeprefix("step-"))


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return directory / f"step-{step:06d}"


def _random_state(model: nn.Module) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    device = next(model.parameters()).device
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _identity(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}
