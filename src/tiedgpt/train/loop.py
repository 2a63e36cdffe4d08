"""The loop: step after step, with evaluations, samples and checkpoints in between.

`train` yields what happens as it happens; whoever iterates shows it. State lives in the model, the
optimizer, the `Health` and the step number alone, so a run that stops and goes on equals one that
never stopped. What is trained, and on what, is a `Task` (`task.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tiedgpt.errors import CorruptInputError, DivergedError
from tiedgpt.train.card import write_card
from tiedgpt.train.checkpoint import load_newest, load_weights, save_checkpoint
from tiedgpt.train.diagnosis import first_not_finite
from tiedgpt.train.forking import adopt
from tiedgpt.train.health import WORSE, Health
from tiedgpt.train.measures import Measures
from tiedgpt.train.optim import Group, learning_rate, optimizers, parameter_groups
from tiedgpt.train.plan import Plan
from tiedgpt.train.run_directory import RunDirectory
from tiedgpt.train.step import train_step
from tiedgpt.train.task import Model, Score, Task


@dataclass(frozen=True)
class Started:
    """The model stands; `step` steps were done by earlier calls."""

    model: Model
    groups: list[Group]
    step: int
    notes: list[str]


@dataclass(frozen=True)
class Stepped:
    """A step was done: its number counts from 1."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    units: int
    """Tokens, or examples, trained on so far."""
    units_per_second: float
    measured: dict[str, float] = field(default_factory=dict)
    """What `measures.py` found, in the steps that it watches."""

    def metrics(self, unit: str) -> dict[str, float]:
        """Return it as it stands in metrics.jsonl."""
        line = asdict(self)
        units, speed = line.pop("units"), line.pop("units_per_second")
        measured = line.pop("measured")
        return line | {unit: units, f"{unit}_per_second": speed} | measured


@dataclass(frozen=True)
class Skipped:
    """A step left weights and optimizer as they were: its loss or gradient was not finite."""

    step: int
    why: str
    skipped_in_all: int


@dataclass(frozen=True)
class Evaluated:
    """The model was scored on what is held out, and showed what it does."""

    step: int
    score: Score
    sample: str


@dataclass(frozen=True)
class Ended:
    """No more steps: all are done, or it was asked to stop and the state was saved."""

    step: int
    finished: bool
    score: Score | None
    """Of the weights in model/."""
    notes: list[str] = field(default_factory=list)


Event = Started | Stepped | Skipped | Evaluated | Ended


def train(
    run: RunDirectory,
    task: Task,
    plan: Plan,
    device: torch.device,
    *,
    fork: Path | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    track: Callable[[Mapping[str, Any]], None] | None = None,
) -> Iterator[Event]:
    """Train to the end of the plan from wherever the run's directory stands.

    `track` is given each line of metrics.jsonl when it is written.

    `fork` is the directory of another run's checkpoints, whose newest this one begins with.

    A step whose loss or gradient is not finite is skipped. Raises `DivergedError` where too many
    are, where the loss runs away, and where weights are not finite; the last checkpoint is kept.
    """
    torch.manual_seed(plan.seed)
    model = task.build().to(device).train()
    groups = parameter_groups(model, matrices=plan.optimizer, weight_decay=plan.weight_decay)
    rules = optimizers(groups, lr=plan.lr)
    state, notes = load_newest(run.checkpoints, model, rules)
    health = Health.of(state or {})
    step = saved_at = 0 if state is None else state["step"]
    if state is None:
        task.begin(model)
        if fork is not None:
            notes += adopt(fork, model, rules)
            save_checkpoint(run.checkpoints, step, model, rules, health.state())
    run.cut_metrics(step)
    yield Started(model, groups, step, notes)
    batch_of = task.batches(plan)
    measures = Measures(model, task, plan, device)
    units_per_step = plan.batch_size * task.row_units

    def write(line: Mapping[str, Any]) -> None:
        run.write_metrics(line)
        if track is not None:
            track(line)

    def diverged(error: Exception, where: str = "") -> DivergedError:
        kept = f"the state after step {saved_at} is kept in {run.checkpoints}"
        return DivergedError(
            f"{error} at step {step}{where}; rate {lr:.3g}, {health}; "
            f"{kept if saved_at else 'nothing was saved yet'}: train again with a lower --lr in "
            f"another --out{f', or go on from there with --fork {run.path}' if saved_at else ''}"
        )

    def evaluate(n_batches: int | None = None) -> Score:
        require_finite()
        found = task.evaluate(model, plan, n_batches)
        if not math.isfinite(found.nats):
            raise diverged(DivergedError(f"the validation loss became {found.nats}"))
        return found

    def require_finite() -> None:
        for name, parameter in model.named_parameters():
            if not bool(parameter.isfinite().all()):
                raise diverged(DivergedError(f"{name} is no longer finite"))

    def save() -> None:
        nonlocal saved_at
        if step > saved_at:
            require_finite()
            run.sync_metrics()
            state = health.state()
            spared = health.best_step
            save_checkpoint(run.checkpoints, step, model, rules, state, spared=spared)
            saved_at = step

    def enough() -> bool:
        out_of_patience = plan.patience is not None and health.stale >= plan.patience
        return step >= plan.steps or out_of_patience

    def take(best: int | None) -> bool:
        """Put the best weights in place of the last, if they can still be read."""
        try:
            if best is not None:
                load_weights(run.checkpoints, best, model)
            return best is not None
        except CorruptInputError as error:
            told.append(f"the weights that validated best, of step {best}, are lost: {error}")
            return False

    lr, told = plan.lr, list[str]()
    while not enough() and not stop_requested():
        began = time.perf_counter()
        lr = learning_rate(step, peak=plan.lr, warmup=plan.warmup, steps=plan.steps)
        for group in (group for rule in rules for group in rule.param_groups):
            group["lr"] = lr
        batch, result = batch_of(step), None
        step += 1
        try:
            with measures.watching(step):
                result = train_step(model, rules, batch, plan)
        except DivergedError as error:
            why = str(error)
        seconds = time.perf_counter() - began
        units = step * units_per_step
        if result is None:
            health.skip(step)
            write({"step": step, "skipped": why, "lr": lr, task.unit: units})
            yield Skipped(step, why, health.skipped_in_all)
        else:
            health.stepped(result.loss, result.grad_norm)
            speed = units_per_step / seconds
            measured = measures.found(step, speed)
            stepped = Stepped(
                step=step,
                **asdict(result),
                lr=lr,
                units=units,
                units_per_second=speed,
                measured=measured,
            )
            write(stepped.metrics(task.unit))
            yield stepped
        try:
            health.require_sound(step, skip_limit=plan.skip_limit)
        except DivergedError as error:
            where = first_not_finite(model, batch, plan)
            raise diverged(error, f"; {where}" if where else "") from None
        improved = False
        if step % plan.eval_every == 0 and step < plan.steps:
            partly = evaluate(plan.eval_batches)
            sample = task.sample(model, plan, step)
            write({"step": step, **task.metrics(partly), "sample": sample})
            improved = health.evaluated(step, partly.nats)
            yield Evaluated(step, partly, sample)
        if (improved or step % plan.save_every == 0) and step < plan.steps:
            save()

    save()
    if not enough():
        if step:
            task.publish(model, run.model)
            write_card(run, model, None)
        yield Ended(step, finished=False, score=None)
        return
    last: dict[str, Any] = {"step": step, "final": True}
    best, best_loss = health.best_step, health.best_loss
    partly = evaluate(plan.eval_batches)  # what the evaluations before can be compared with
    last_loss = partly.nats
    last |= {f"part_{name}": value for name, value in task.metrics(partly).items()}
    if plan.patience is not None and best_loss <= last_loss and take(best):
        last["best_step"] = best
        told.append(
            f"the best validation was after step {best:,} ({best_loss:.4f}, and {last_loss:.4f} "
            f"after the last, {step:,}): those weights are in {run.model}"
        )
    final = evaluate()
    last |= task.metrics(final)
    task.publish(model, run.model)
    write_card(run, model, last)
    if plan.patience is None and last_loss > WORSE * best_loss and take(best):
        task.publish(model, run.best)
        told.append(
            f"validation was better after step {best:,} ({best_loss:.4f}) than after the last "
            f"({last_loss:.4f}): those weights are in {run.best}; --patience makes them the model"
        )
    write(last)  # the last thing that is written: with it the run is finished
    yield Ended(step, finished=True, score=final, notes=told)
