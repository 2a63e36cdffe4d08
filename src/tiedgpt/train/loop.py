"""The loop: step after step, with evaluations, samples and checkpoints in between.

`train` yields what happens as it happens; whoever iterates shows it. State lives in the model, the
optimizer and the step number alone, so a run that stops and goes on equals one that never stopped.
What is trained, and on what, is a `Task` (`task.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from tiedgpt.errors import DivergedError
from tiedgpt.train.checkpoint import load_newest, save_checkpoint
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

    def metrics(self, unit: str) -> dict[str, float]:
        """Return it as it stands in metrics.jsonl."""
        line = asdict(self)
        units, speed = line.pop("units"), line.pop("units_per_second")
        return line | {unit: units, f"{unit}_per_second": speed}


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


Event = Started | Stepped | Evaluated | Ended


def train(
    run: RunDirectory,
    task: Task,
    plan: Plan,
    device: torch.device,
    *,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Train to the end of the plan from wherever the run's directory stands.

    Raises `DivergedError` where loss or gradient leave the finite numbers; the last checkpoint is
    kept.
    """
    torch.manual_seed(plan.seed)
    model = task.build().to(device).train()
    groups = parameter_groups(model, matrices=plan.optimizer, weight_decay=plan.weight_decay)
    rules = optimizers(groups, lr=plan.lr)
    state, notes = load_newest(run.checkpoints, model, rules)
    if state is None:
        task.begin(model)
    step = 0 if state is None else state["step"]
    run.cut_metrics(step)
    yield Started(model, groups, step, notes)
    saved_at = step
    batch_of = task.batches(plan)
    units_per_step = plan.batch_size * task.row_units

    def evaluate(n_batches: int | None = None) -> Score:
        require_finite()
        found = task.evaluate(model, plan, n_batches)
        if not math.isfinite(found.nats):
            error = DivergedError(f"the validation loss became {found.nats}")
            raise DivergedError(_diagnosis(run, error, step, saved_at))
        return found

    def require_finite() -> None:
        for name, parameter in model.named_parameters():
            if not bool(parameter.isfinite().all()):
                error = DivergedError(f"{name} is no longer finite")
                raise DivergedError(_diagnosis(run, error, step, saved_at))

    def save() -> None:
        require_finite()
        save_checkpoint(run.checkpoints, step, model, rules, {})

    while step < plan.steps and not stop_requested():
        began = time.perf_counter()
        lr = learning_rate(step, peak=plan.lr, warmup=plan.warmup, steps=plan.steps)
        for group in (group for rule in rules for group in rule.param_groups):
            group["lr"] = lr
        try:
            result = train_step(model, rules, batch_of(step), plan)
        except DivergedError as error:
            raise DivergedError(_diagnosis(run, error, step + 1, saved_at)) from None
        step += 1
        seconds = time.perf_counter() - began
        stepped = Stepped(
            step=step,
            **asdict(result),
            lr=lr,
            units=step * units_per_step,
            units_per_second=units_per_step / seconds,
        )
        run.write_metrics(stepped.metrics(task.unit))
        yield stepped
        if step % plan.eval_every == 0 and step < plan.steps:
            partly = evaluate(plan.eval_batches)
            run.write_metrics({"step": step, **task.metrics(partly)})
            yield Evaluated(step, partly, task.sample(model, plan, step))
        if step % plan.save_every == 0 and step < plan.steps:
            save()
            saved_at = step

    finished = step >= plan.steps
    if step > saved_at or finished:
        save()
    final = evaluate() if finished else None
    if step:
        task.publish(model, run.model)
    if final is not None:  # the last thing that is written: with it the run is finished
        run.write_metrics({"step": step, "final": True, **task.metrics(final)})
    yield Ended(step, finished, final)


def _diagnosis(run: RunDirectory, error: Exception, step: int, saved_at: int) -> str:
    kept = (
        f"the state after step {saved_at} is kept in {run.checkpoints}"
        if saved_at
        else "nothing was saved yet"
    )
    return f"{error} at step {step}; {kept}: train again with a lower --lr in another --out"
