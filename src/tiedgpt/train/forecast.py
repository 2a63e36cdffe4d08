"""What a run would take, before it begins: memory of each device by part, and time.

    forecast(TrainOptions(data=("my.txt",), size="gpt2", steps=1000), "8xH100-80GB")

The devices are this machine's, or ones that are only described. Every term comes with its formula:

    N parameters, N' trained, V vocabulary, T positions, D width, L layers, I width inside the MLP,
    H heads, b rows that a device computes at a time, w devices

Activations are those of `core/layers.py` with attention that keeps no scores. Blocks with a window
are counted as dense ones, and frozen parameters as if their gradients were computed. For a small
model on a CPU the sum is within a quarter of what a step allocates; recomputing takes less.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.loss import chunk_rows
from tiedgpt.errors import NoRoomError, UserError
from tiedgpt.files import format_bytes
from tiedgpt.train.measures import GPUS, model_flops, peak_flops
from tiedgpt.train.objective import Data, Model, Objective, Progress, predicts_tokens
from tiedgpt.train.objectives import open_sources
from tiedgpt.train.options import TrainOptions, parse_bytes
from tiedgpt.train.pace import step_seconds
from tiedgpt.train.parallel import Parallel, World
from tiedgpt.train.plan import Dtype, Plan, Recompute
from tiedgpt.train.prepare import prepare
from tiedgpt.train.sizing import (
    choose_dtype,
    choose_size,
    count_lasting,
    draft_numbers,
    finish_plan,
    list_micro_batches,
    measure_free,
    resize,
    training_device,
)
from tiedgpt.train.storage import RunDirectory
from tiedgpt.train.tune_options import AnyOptions

FLOPS_USE = 0.4
"""Share of a device's peak that a step is assumed to reach, where none was measured."""
UNKNOWN_FLOPS = 1e12
"""Of a device that nothing is known of."""
USABLE = 0.92
"""Of a GPU's memory: the rest is CUDA's context, libraries and gaps between tensors."""
GPUS_OF_A_NODE = 8
NETWORK = 50e9
"""Bytes a second between nodes, for each GPU: InfiniBand of 400 Gb/s."""
LARGEST_FLEET = 4096
SCORE_BYTES = 10
"""Of a score of attention with dropout on a CPU: the score, its softmax, and what is dropped."""
BLOCK = "(4 D^2 + 2 D I)"
"""The parameters in the matrices of a block."""
MEASURED_SECONDS = 2.0


@dataclass(frozen=True)
class Fleet:
    """Equal devices that train one model together."""

    name: str
    count: int
    memory: float
    """Bytes that a run may take of each."""
    flops: float
    """Operations a second that each reaches at the most."""
    link: float = math.inf
    """Bytes a second from each to another."""
    parallel: Parallel = "ddp"
    is_here: bool = False

    @property
    def is_cpu(self) -> bool:
        """Whether it is this machine's processor."""
        return self.is_here and "cpu" in self.name

    @property
    def n_shards(self) -> int:
        """The devices that a matrix is shared out among."""
        return self.count if self.parallel == "fsdp" else 1


class Term(NamedTuple):
    """A part of the memory of a device."""

    n_bytes: int
    formula: str


@dataclass(frozen=True)
class Forecast:
    """What a run would be, and what it would take."""

    options: AnyOptions
    objective: Objective
    data: Data
    plan: Plan
    fleet: Fleet
    memory: dict[str, Term]
    """The parts, of each device."""
    times: dict[str, tuple[float, str]]
    """Seconds of a step, and by which reckoning: the largest decides."""
    fits: bool
    """Whether a device has room for all parts."""
    remedy: str | None
    """What would fit, where this does not."""

    @property
    def n_bytes(self) -> int:
        """What it takes of each device."""
        return sum(term.n_bytes for term in self.memory.values())

    @property
    def step_seconds(self) -> float:
        """How long a step takes."""
        return max(seconds for seconds, _ in self.times.values())

    @property
    def problem(self) -> NoRoomError:
        """The error for a run that does not fit."""
        return NoRoomError(
            f"training needs {format_bytes(self.n_bytes)} on each device, and {self.fleet.name} "
            f"has room for {format_bytes(self.fleet.memory)}",
            hint=self.remedy or "use a smaller model",
        )

    def tables(self) -> dict[str, Any]:
        """Return it as plain data."""
        plan, config = self.plan, self.objective.config
        names = ("steps", "batch_size", "micro_batch", "optimizer", "dtype", "recompute")
        trained = self.objective.n_trained or config.parameter_count()
        epochs = plan.steps * plan.batch_size / self.data.epoch_rows
        return {
            "parameters": config.parameter_count(),
            "trained": trained,
            self.data.unit: plan.steps * plan.batch_size * self.data.row_units,
            "epochs": epochs,
            "plan": {name: getattr(plan, name) for name in names},
            "devices": {
                "name": self.fleet.name,
                "count": self.fleet.count,
                "parallel": self.fleet.parallel if self.fleet.count > 1 else None,
                "room_bytes": int(self.fleet.memory),
            },
            "memory": {part: term._asdict() for part, term in self.memory.items()},
            "memory_bytes": self.n_bytes,
            "fits": self.fits,
            "remedy": self.remedy,
            "step": {name: {"seconds": s, "by": how} for name, (s, how) in self.times.items()},
            "step_seconds": self.step_seconds,
            "seconds": self.step_seconds * plan.steps,
        }


def parse_devices(text: str) -> Fleet:
    """Return the devices in "8xH100-80GB", "H200" or "16 x A100-40GB"; `UserError` for others."""
    match = re.fullmatch(r"(?:(\d+) ?x ?)?(.*?)(?:[- ](\d+)GB)?", text.strip(), re.IGNORECASE)
    assert match is not None
    names = {name.upper().replace(" ", "-"): name for name in GPUS}
    name, count = names.get(match[2].upper().replace(" ", "-")), int(match[1] or 1)
    if name is None or not 1 <= count <= LARGEST_FLEET:
        raise UserError(
            f"must be as 8xH100-80GB, got {text!r}",
            option="devices",
            hint=f"the GPUs are {', '.join(names)}; 1 to {LARGEST_FLEET:,} of them",
        )
    gpu = GPUS[name]
    memory = gpu.memory if match[3] is None else 1e9 * int(match[3])
    short = name.replace(" ", "-")
    link = gpu.link if count <= GPUS_OF_A_NODE else min(gpu.link, NETWORK)
    return Fleet(f"{count}x{short}-{memory / 1e9:.0f}GB", count, USABLE * memory, gpu.flops, link)


def describe_here(options: AnyOptions, device: torch.device) -> Fleet:
    """Return the device of this machine that would train."""
    dtype = choose_dtype(device) if options.dtype == "auto" else options.dtype
    room = measure_free(device)
    if options.memory is not None:
        room = min(room, parse_bytes(options.memory))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    flops = peak_flops(device, dtype) or UNKNOWN_FLOPS
    return Fleet(f"this machine ({name})", 1, room, flops, is_here=True)


def forecast(
    options: AnyOptions,
    devices: str | None = None,
    parallel: Parallel | None = None,
    progress: Progress | None = None,
) -> Forecast:
    """Return what a run by these options would be, on this machine or on devices as 8xH100-80GB.

    The text is encoded as `train` does it, in a temporary directory that is deleted. On this
    machine a few steps are measured where they fit; elsewhere the time is reckoned. Raises
    `UserError` for devices that are not known, and whatever `train` raises for bad data.
    """
    device = training_device(options.device)
    fleet = describe_here(options, device) if devices is None else parse_devices(devices)
    fleet = replace(fleet, parallel=parallel or "ddp")
    with tempfile.TemporaryDirectory() as temporary:
        sources = open_sources(options)
        own = sources.adapt(options)
        run = RunDirectory(Path(temporary) / "run")
        objective, data = prepare(run, own, sources, None, progress)
        first = objective, data

        def speed_of(sized: TrainOptions) -> float:
            pair = resize(*first, sized)
            draft = draft_for(sized, *pair, fleet)
            a_step = max(seconds for seconds, _ in count_step(*pair, draft, fleet).values())
            return draft.batch_size * pair[1].row_units / a_step

        world = World(device)
        own, objective, data, reason, _ = choose_size(
            own, objective, data, world, None if fleet.is_here else speed_of
        )
        draft = draft_for(own, objective, data, fleet)
        memory = count_memory(objective, data, draft, fleet)
        fits, remedy = has_room(memory, fleet), None
        times = count_step(objective, data, draft, fleet)
        if fleet.is_here and fits:
            a_step = step_seconds(objective, data, draft, world, seconds=MEASURED_SECONDS)
            times = {"measured": (a_step, "steps of a throw-away model, here and now")}
        elif not fits:
            remedy = find_remedy(own, objective, data, draft, fleet)
        a_step, duration = max(seconds for seconds, _ in times.values()), own.duration
        left = 60 * duration.amount if duration.unit == "minutes" else 0.0
        plan = finish_plan(draft, own, data, fleet.count, reason=reason, a_step=a_step, left=left)
        return Forecast(own, objective, data, plan, fleet, memory, times, fits, remedy)


def draft_for(options: AnyOptions, objective: Objective, data: Data, fleet: Fleet) -> Plan:
    """Return the numbers of a plan, with the most rows at a time that fit, or else the fewest."""
    dtype: Dtype | None = None if fleet.is_here else "bf16"
    draft = draft_numbers(options, objective, data, training_device(options.device), dtype)
    if not fleet.is_here and draft.dtype != "bf16":
        raise UserError(f"--dtype {draft.dtype}: speeds of --devices are known in bf16 alone")
    if draft.batch_size < fleet.count:
        raise UserError(
            f"a batch of {draft.batch_size} rows for {fleet.count} devices",
            hint="describe fewer, or give a larger --batch-size",
        )
    recompute: Recompute = "off" if options.recompute == "auto" else options.recompute
    for micro in list_micro_batches(options, -(-draft.batch_size // fleet.count), data):
        plan = replace(draft, micro_batch=micro, recompute=recompute)
        if has_room(count_memory(objective, data, plan, fleet), fleet):
            break
    return plan


def count_memory(objective: Objective, data: Data, plan: Plan, fleet: Fleet) -> dict[str, Term]:
    """Return the parts of the memory of each device: what lasts, what is copied, what a step is."""
    config, w, shards = objective.config, fleet.count, fleet.n_shards
    w_matrix, block = config.vocab_size * config.n_embd, _count_block(config)
    formulas = {"weights": "4 N", "gradients": "4 N'", "optimizer state": "8 N'"}
    if plan.optimizer == "muon" and objective.n_trained is None:
        formulas["optimizer state"] = "(8 N' - 4 (12 L D^2))"
    over, lasting = f" / {w}" if shards > 1 else "", count_lasting(objective, plan)
    terms = {part: Term(n // shards, formulas[part] + over) for part, n in lasting.items()}
    if shards > 1:
        gathered = 4 * (w_matrix + config.n_positions * config.n_embd + 2 * block)
        terms["gathered weights"] = Term(gathered, f"4 (V D + T D + 2 {BLOCK})")
        terms["gathered gradients"] = Term(4 * (w_matrix + block), f"4 (V D + {BLOCK})")
    elif w > 1:
        terms["gradient buckets"] = Term(lasting["gradients"], "4 N'")
    if plan.dtype == "bf16" and not fleet.is_cpu:
        layers = 1 if plan.recompute == "blocks" else config.n_layer
        copies = 2 * (layers * block + w_matrix)
        terms["weights in bf16"] = Term(copies, f"2 ({layers} {BLOCK} + V D)")
    if objective.n_trained is None and predicts_tokens(build_on_meta(objective)):
        parts = 2 if plan.micro_batch < -(-plan.batch_size // w) else 1
        terms["W's gradients apart"] = Term(4 * parts * w_matrix, f"{4 * parts} V D")
    return terms | _count_activations(objective, data, plan, fleet)


def _count_activations(
    objective: Objective, data: Data, plan: Plan, fleet: Fleet
) -> dict[str, Term]:
    """Return what forward keeps for backward, and what the loss and backward take."""
    config, rows, t = objective.config, plan.micro_batch, data.row_tokens
    d, inner, n_layer = config.n_embd, config.inner_dim, config.n_layer
    is_narrow, tokens = plan.dtype == "bf16", rows * t
    size, layers = 2 if is_narrow else 4, 1 if plan.recompute == "blocks" else n_layer
    widths = 8 + 6 * size + (2 if config.resid_pdrop else 0)
    kept = tokens * layers * (widths * d + 2 * size * inner)
    formula = f"{layers} b T ({widths} D + {2 * size} I)"
    if layers < n_layer:
        kept, formula = kept + 4 * tokens * n_layer * d, f"4 b T D L + {formula}"
    terms = {"activations": Term(kept, formula)}
    if fleet.is_cpu and config.attn_pdrop:  # whose kernel keeps no scores, but drops none either
        scores = SCORE_BYTES * rows * layers * config.n_head * t * t
        terms["attention scores"] = Term(scores, f"{SCORE_BYTES} x {layers} b H T^2")
    terms["backward of a block"] = Term(tokens * (4 * d + size * inner), f"b T (4 D + {size} I)")
    if predicts_tokens(build_on_meta(objective)):
        chunk = chunk_rows(
            tokens, config.vocab_size, torch.bfloat16 if is_narrow else torch.float32
        )
        number = 6 if is_narrow and not fleet.is_cpu else size
        n_bytes = number * chunk * config.vocab_size + 8 * tokens * d
        terms["logits and loss"] = Term(n_bytes, f"{number} x {chunk:,} V + 8 b T D")
    return terms


def _count_block(config: GPTConfig) -> int:
    """Return the parameters in the matrices of a block."""
    return 4 * config.n_embd * config.n_embd + 2 * config.n_embd * config.inner_dim


def has_room(memory: dict[str, Term], fleet: Fleet) -> bool:
    """Whether each device has room for all parts."""
    return sum(term.n_bytes for term in memory.values()) <= fleet.memory


def count_step(
    objective: Objective, data: Data, plan: Plan, fleet: Fleet
) -> dict[str, tuple[float, str]]:
    """Return the seconds of a step by what may decide them, each with how they are reckoned."""
    w, rows = fleet.count, -(-plan.batch_size // fleet.count)
    flops = model_flops(build_on_meta(objective), data.row_tokens)
    flops *= 4 / 3 if plan.recompute == "blocks" else 1
    seconds = rows * data.row_tokens * flops / (FLOPS_USE * fleet.flops)
    times = {
        "compute": (
            seconds,
            f"{flops / 1e9:.3g} GFLOP a token at {FLOPS_USE:.0%}, assumed, of "
            f"{fleet.flops / 1e12:,.3g} TFLOP/s",
        )
    }
    if w > 1:
        n = objective.config.parameter_count()
        factor = 12 * math.ceil(rows / plan.micro_batch) if fleet.n_shards > 1 else 8
        n_bytes = factor * n * (w - 1) / w
        times["traffic"] = (
            n_bytes / fleet.link,
            f"{factor} N (w - 1) / w bytes at {fleet.link / 1e9:,.0f} GB/s, assumed to overlap",
        )
    return times


def find_remedy(
    options: AnyOptions,
    objective: Objective,
    data: Data,
    draft: Plan,
    fleet: Fleet,
) -> str | None:
    """Return the options with which it would fit, the smallest change first; None for none."""
    fleets = [fleet]
    if fleet.is_here:
        alone = sorted(GPUS, key=lambda name: GPUS[name].memory)
        fleets += [parse_devices(f"{count}x{name}") for count in (1, 8) for name in alone]
    else:
        kind, count = fleet.name.partition("x")[2], fleet.count
        while (count := 2 * count) <= LARGEST_FLEET:
            fleets.append(parse_devices(f"{count}x{kind}"))
    modes: list[Parallel] = ["ddp", "fsdp"]
    recomputes: list[Recompute] = ["off", "blocks"]
    for devices, mode, recompute in itertools.product(fleets, modes, recomputes):
        each = replace(devices, parallel=mode)
        batch = max(draft.batch_size, each.count)
        plan = replace(draft, micro_batch=1, recompute=recompute, batch_size=batch)
        plan = plan if each.is_here else replace(plan, dtype="bf16")
        if not has_room(count_memory(objective, data, plan, each), each):
            continue
        changes = {
            f"--devices {each.name}": devices is not fleet,
            f"--parallel {mode}": each.count > 1 and mode != fleet.parallel,
            "--recompute blocks": recompute == "blocks" != draft.recompute,
            f"--batch-size {batch}": batch > draft.batch_size,
            "--micro-batch 1": draft.micro_batch > 1,
        }
        return f"it fits with {' '.join(what for what, is_new in changes.items() if is_new)}"
    return None


@functools.lru_cache(maxsize=1)
def build_on_meta(objective: Objective) -> Model:
    """Return the model without memory for its weights."""
    with torch.device("meta"):
        model: Model = objective.build()
    return model
