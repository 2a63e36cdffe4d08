"""Checkpoints: a run's state in a directory that appears by one rename.

checkpoints/step-000400/ holds model.safetensors, optimizer.safetensors, state.json and
manifest.json (size and sha256 of the others). Each process of a sharded model writes its own parts,
in the safetensors layout of `torch.distributed.checkpoint`. The directory is written under a
temporary name, synced and renamed; then `latest` is replaced; then older checkpoints are deleted.
Damaged checkpoints are renamed and never deleted.

The state also holds the config, the plan and the sha256 of the tokenizer's files, which a resumed
run must have (`require_unchanged`).

Any number of processes can read a checkpoint: each reads the rows that it holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.files import read_json, reading, remove, replacing, require_room, write_json, writing
from tiedgpt.train.distributed import Processes
from tiedgpt.train.plan.memory import halve_micro_batch
from tiedgpt.train.plan.values import Plan
from tiedgpt.train.step.state import read_state
from tiedgpt.train.store.directory import RunDirectory, checkpoint_path
from tiedgpt.weights.containers import write_safetensors
from tiedgpt.weights.torch_file import stored_tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

MAX_CHECKPOINTS = 2
"""Number of checkpoints that are kept."""

NAME = re.compile(r"step-(\d{6,})")
LATER_FIELDS = (
    "steps", "micro_batch", "eval_every", "eval_batches", "save_every", "cooldown", "minutes",
    "final_batches", "reason", "since",
)  # fmt: skip
"""Fields in which a later plan of the same run differs."""
RANDOM = {"random/cpu", "random/cuda"}


def save_checkpoint(
    directory: Path,
    step: int,
    weights: Mapping[str, Tensor],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: dict[str, Any],
    processes: Processes,
    *,
    spared: int | None,
) -> None:
    """Write the state after `step` steps under `directory`.

    `weights` are the tensors to save of the model, by name. `state` is plain data;
    torch's random state is saved with it. Older checkpoints are deleted,
    except the one before and that of the step `spared`. All processes must call this: rank 0
    writes, or each process its parts of a sharded model.
    """
    weights = {name: tensor.detach() for name, tensor in weights.items()}
    moments = {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for optimizer in optimizers
        if parameter in optimizer.state
        for key, value in sorted(optimizer.state[parameter].items())
    }
    for name, value in moments.items():
        if not isinstance(value, Tensor):
            raise UserError(
                f"optimizer state {name} is {value!r}, but a checkpoint holds only tensors",
                hint="keep it in the optimizer as torch.tensor(...)",
            )
    tensors = {**moments, **(_random_state(model) if processes.is_main else {})}
    path = checkpoint_path(directory, step)
    with contextlib.ExitStack() as stack:

        def begin() -> Path:
            together = (*weights.values(), *tensors.values())
            require_room(directory, sum(t.numel() * t.element_size() for t in together))
            if path.exists():
                set_aside(path)
            temporary = stack.enter_context(replacing(path))
            temporary.mkdir()
            return temporary

        def finish() -> None:
            write_json(temporary / "state.json", state | {"step": step})
            write_json(temporary / "manifest.json", _identify(temporary.iterdir()))
            stack.close()
            _point_to(path)
            for old in list_checkpoints(directory)[:-MAX_CHECKPOINTS]:
                if spared is None or old != checkpoint_path(directory, spared):
                    remove(old)

        temporary = processes.on_main(begin)
        if processes.n_shards > 1:
            _write_shards(temporary, {**weights, **tensors}, processes)
        else:
            processes.on_main(_write_files, temporary, weights, tensors)
        processes.on_main(finish)


def _write_files(
    directory: Path, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]
) -> None:
    """Write whole tensors."""
    for name, values in (("model", weights), ("optimizer", moments)):
        stored = {key: stored_tensor(key, value) for key, value in values.items()}
        metadata = {"format": "tiedgpt"} if name == "model" else {}
        write_safetensors(directory / f"{name}.safetensors", stored, metadata)


def _write_shards(directory: Path, tensors: dict[str, Any], processes: Processes) -> None:
    """Write the shards of this process; if one process fails, all do.

    Raises `CorruptInputError` if rank 0 does not see the files of all: the disk is not shared.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    try:
        with writing(directory), _first_failure():
            save(dict(sorted(tensors.items())), storage_writer=writer)
    except TiedGPTError as error:
        processes.leave_to_main(error.exit_code)
        raise

    def require_all() -> None:
        missing = tensors.keys() - _read_shapes(directory).keys()
        if missing:
            raise CorruptInputError(f"{directory} lacks {min(missing)}")

    processes.on_main(require_all)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint; return its new path."""
    aside, number = path.with_name(f"{path.name}.damaged"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    with writing(path):
        return path.rename(aside)


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints under `directory`, oldest first."""
    paths = [path for path in directory.glob("step-*") if NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step-")))


def load_newest(
    directory: Path,
    weights: Mapping[str, Tensor],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    is_verified: bool = False,
) -> tuple[dict[str, Any] | None, list[str]]:
    """Load the newest good checkpoint; return its state, or None without checkpoints, and notes.

    Damaged checkpoints are renamed, with a note. `is_verified`: another process has just verified
    the newest. Raises `CorruptInputError` if all are damaged.
    """
    damaged: dict[Path, str] = {}
    for path in reversed(list_checkpoints(directory)):
        try:
            if not is_verified:
                verify(path)
            load_weights(path, weights)
            _load_moments(path, model, optimizers)
            _set_random_state(path, model)
            state = read_json(path / "state.json")
        except (TiedGPTError, OSError) as error:
            damaged[path] = f"passed over a damaged checkpoint: {error}"
            continue
        notes = [f"{note}; it is kept as {set_aside(bad)}" for bad, note in damaged.items()]
        _point_to(path)
        return state, notes
    if not damaged:
        return None, []
    first = next(iter(damaged.values()))
    raise CorruptInputError(f"no good checkpoint is left in {directory} ({first}): begin a new run")


def verify(path: Path) -> dict[str, Any]:
    """Return the manifest; `TiedGPTError` if a file is missing or was changed."""
    manifest = read_json(path / "manifest.json")
    files = {file.name for file in path.glob("*.safetensors")} | {"state.json"}
    if wrong := sorted(files ^ manifest.keys()):
        raise CorruptInputError(f"{path / wrong[0]} is missing or was not saved")
    with reading(path, "checkpoint"):
        for name, identity in _identify(path / name for name in manifest).items():
            if manifest[name] != identity:
                raise CorruptInputError(f"{path / name} is not what was saved")
    return manifest


def describe_origin(config: GPTConfig, tokenizer: Path) -> dict[str, Any]:
    """Return the config and the sha256 of the tokenizer's files, for a checkpoint's state."""
    files = (file for file in tokenizer.glob("[!.]*") if file.is_file())
    with reading(tokenizer, "tokenizer"):
        digests = {name: identity["sha256"] for name, identity in _identify(files).items()}
    return {"model": asdict(config), "tokenizer": digests}


def require_unchanged(run: RunDirectory, config: GPTConfig, plan: Plan) -> None:
    """Raise `CorruptInputError` if run.toml or the tokenizer changed since the newest checkpoint.

    A plan that begins later than the checkpoint's (`since`) is a new one, and may differ. A
    checkpoint without a config and a tokenizer is compared by its plan only.
    """
    path, state = _read_newest_state(run.checkpoints)
    if path is None:
        return
    _, saved = read_state(state)
    halved = saved
    while plan.micro_batch < halved.micro_batch:  # right after the checkpoint was saved
        halved = halve_micro_batch(halved, saved.since)
    saved = plan if plan == halved else saved
    now, then = describe_origin(config, run.tokenizer), {**state, "training": asdict(saved)}
    if plan.since <= saved.since:
        now["training"] = asdict(plan)
    ignored = LATER_FIELDS if plan.since < saved.since else ()
    remedy = f"restore it, or train in another --out, with --start {run.model}"
    for table, values in json.loads(json.dumps(now)).items():  # tuples are lists in a state
        before = then.get(table, values)
        for name in sorted((values.keys() | before.keys()) - {*ignored}):
            was, value = before.get(name), values.get(name)
            if was == value:
                continue
            change = f"{run.record}: {name} was {was!r} at {path.name} and is {value!r}"
            if table == "tokenizer":
                change = f"{run.tokenizer / name} is not the file that {path.name} was trained with"
            if table == "training":
                later = max(state["step"], saved.since + 1)
                remedy = f"restore it, or set since = {later} too, to change the plan on purpose"
            raise CorruptInputError(change, hint=remedy)


def _read_newest_state(directory: Path) -> tuple[Path | None, dict[str, Any]]:
    """Return the newest checkpoint with an undamaged state, and the state."""
    for path in reversed(list_checkpoints(directory)):
        file = path / "state.json"
        with contextlib.suppress(TiedGPTError, OSError):
            if read_json(path / "manifest.json").get(file.name) == _identity(file):
                return path, read_json(file)
    return None, {}


def _load_moments(
    path: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Load the optimizers' state."""
    shapes = _read_shapes(path)
    names = {parameter: name for name, parameter in model.named_parameters()}
    targets: dict[str, Tensor] = {}
    states = []
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            prefix = f"{names[parameter]}/"
            entries = [entry for entry in shapes if entry.startswith(prefix)]
            targets |= {entry: _empty_like(shapes[entry], parameter) for entry in entries}
            state = {entry.removeprefix(prefix): targets[entry] for entry in entries}
            if state:
                states.append((optimizer, parameter, state))
    _read_tensors(path, targets)
    for optimizer, parameter, state in states:
        optimizer.state[parameter] = state


def load_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Fill the weights by name; `CorruptInputError` if the checkpoint has another model's."""
    shapes = {name: entry.size for name, entry in _read_shapes(path).items() if "/" not in name}
    if shapes != {name: tensor.shape for name, tensor in weights.items()}:
        raise CorruptInputError(f"{path} is of another model than run.toml describes")
    _read_tensors(path, dict(weights))


def _read_shapes(path: Path) -> dict[str, TensorStorageMetadata]:
    """Return the metadata of each tensor; `CorruptInputError` if a part of one is missing."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    shapes: dict[str, Any] = {}
    with reading(path, "checkpoint"):
        shapes |= HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    for name, metadata in shapes.items():
        if sum(chunk.sizes.numel() for chunk in metadata.chunks) != metadata.size.numel():
            raise CorruptInputError(f"{path} lacks a part of {name}")
    return shapes


def _read_tensors(path: Path, tensors: dict[str, Any]) -> None:
    """Fill tensors, or the parts of them that this process holds."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(path))
    with reading(path, "checkpoint"), torch.no_grad(), _first_failure():
        load(tensors, storage_reader=reader, no_dist=True)


@contextlib.contextmanager
def _first_failure() -> Iterator[None]:
    """Raise the first error of any process in place of DCP's summary."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # reading alone is intended
            yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from None


def _empty_like(metadata: TensorStorageMetadata, parameter: Tensor) -> Tensor:
    """Return a tensor to read into, with the parameter's layout if it has its shape."""
    if metadata.size == parameter.shape:
        return torch.empty_like(parameter, dtype=metadata.properties.dtype, requires_grad=False)
    return torch.empty(metadata.size, dtype=metadata.properties.dtype, device=parameter.device)


def _random_state(model: nn.Module) -> dict[str, Tensor]:
    states = {"random/cpu": torch.get_rng_state()}
    device = next(model.parameters()).device
    if device.type == "cuda":
        states["random/cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_state(path: Path, model: nn.Module) -> None:
    shapes = _read_shapes(path)
    if "random/cpu" not in shapes:
        raise CorruptInputError(f"{path} lacks the state of the random stream")
    states = {
        name: torch.empty(shapes[name].size, dtype=torch.uint8, device="cpu")
        for name in RANDOM & shapes.keys()
    }
    _read_tensors(path, states)
    torch.set_rng_state(states["random/cpu"])
    device = next(model.parameters()).device
    if "random/cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["random/cuda"], device)


def _point_to(path: Path) -> None:
    """Write the name of a checkpoint to `latest`."""
    with replacing(path.with_name("latest")) as temporary:
        temporary.write_text(path.name + "\n")


def _identify(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return the size and the sha256 of each file by its name, read by several threads."""
    every = sorted(files)
    with ThreadPoolExecutor() as threads:
        return dict(zip((file.name for file in every), threads.map(_identity, every), strict=True))


def _identity(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}
