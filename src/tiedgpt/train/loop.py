"""The loop: step after step, with evaluations, samples and checkpoints in between.

`train` yields what happens as it happens; whoever iterates shows it. State lives in the model, the
optimizer, the `Health` and the step number alone, so a run that stops and goes on equals one that
never stopped. What is trained, and on what, is a `Task` (`task.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tiedgpt.errors import CorruptInputError, DivergedError
from tiedgpt.train.card import write_card
from tiedgpt.train.checkpoint import (
    checkpoints,
    load_newest,
    load_weights,
    save_checkpoint,
    verify_step,
)
from tiedgpt.train.compiling import compile_now
from tiedgpt.train.diagnosis import first_not_finite
from tiedgpt.train.events import Ended, Evaluated, Event, Skipped, Started, Stepped, Untied
from tiedgpt.train.forking import adopt
from tiedgpt.train.health import WORSE, Health
from tiedgpt.train.measures import Measures
from tiedgpt.train.parallel import World
from tiedgpt.train.plan import Plan
from tiedgpt.train.recomputing import in_training
from tiedgpt.train.run_directory import RunDirectory
from tiedgpt.train.sharding import own_part
from tiedgpt.train.step import train_step
from tiedgpt.train.task import Score, Task
from tiedgpt.train.untying import Optimizers, arranged, untie_in_training


def train(
    run: RunDirectory,
    task: Task,
    plan: Plan,
    device: torch.device,
    *,
    fork: Path | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    track: Callable[[Mapping[str, Any]], None] | None = None,
    world: World | None = None,
) -> Iterator[Event]:
    """Train to the end of the plan from wherever the run's directory stands.

    `track` is given each line of metrics.jsonl when it is written.

    `fork` is the directory of another run's checkpoints, whose newest this one begins with. In a
    `world` of several processes all call this and see the same events; the first one writes.

    A step whose loss or gradient is not finite is skipped. Raises `DivergedError` where too many
    are, where the loss runs away, and where weights are not finite; the last checkpoint is kept.
    """
    world = world or World(device)
    world.lead(lambda: world.require_work(plan))
    torch.manual_seed(plan.seed)
    model = task.build().train()
    if not checkpoints(run.checkpoints):
        task.begin(model)
    model = world.place(in_training(model, plan))
    groups, rules = arranged(model, plan, 0)
    rules = world.optimizers(rules)

    def rules_at(step: int) -> Optimizers:
        nonlocal groups, rules
        groups, rules = arranged(model, plan, step)
        rules = world.optimizers(rules)
        return rules

    state, notes = world.after_first(lambda: load_newest(run.checkpoints, model, rules_at))
    health = Health.of(state or {})
    step = saved_at = 0 if state is None else state["step"]
    if state is None and fork is not None:
        notes += adopt(fork, model, rules)
        save_checkpoint(run.checkpoints, step, model, rules, health.state(), world=world)
    world.lead(lambda: run.cut_metrics(step))
    batch_of = task.batches(plan)
    if plan.compile == "on" and world.size == 1 and step < plan.steps:
        notes.append(f"compiled the blocks in {compile_now(model, batch_of(step), plan):.1f} s")
    yield Started(model, groups, step, notes)
    measures = Measures(model, task, plan, device)
    growth = plan.growth(task.row_units)

    def write(line: Mapping[str, Any]) -> None:
        if world.leads:
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
        found = world.with_whole(model, task, lambda whole: task.evaluate(whole, plan, n_batches))
        if not math.isfinite(found.nats):
            raise diverged(DivergedError(f"the validation loss became {found.nats}"))
        return found

    def require_finite() -> None:
        parts = ((name, own_part(parameter)) for name, parameter in model.named_parameters())
        name = next((name for name, part in parts if not bool(part.isfinite().all())), None)
        if world.any(name is not None):
            raise diverged(DivergedError(f"{name or 'a matrix'} is no longer finite"))

    def sample() -> str:
        return world.with_whole(model, task, lambda whole: task.sample(whole, plan, step))

    def publish(directory: Path) -> None:
        world.with_whole(model, task, lambda whole: task.publish(whole, directory))

    def card(last: Mapping[str, Any] | None) -> None:
        world.lead(lambda: write_card(run, model, last))

    def diagnosis() -> str:
        return world.with_whole(model, task, lambda whole: first_not_finite(whole, batch, plan))

    def save() -> None:
        nonlocal saved_at
        if step > saved_at:
            require_finite()
            world.lead(run.sync_metrics)
            state = health.state()
            spared = health.best_step
            save_checkpoint(run.checkpoints, step, model, rules, state, spared=spared, world=world)
            saved_at = step

    def enough() -> bool:
        out_of_patience = plan.patience is not None and health.stale >= plan.patience
        return step >= plan.steps or out_of_patience

    def take(best: int | None) -> bool:
        """Put the best weights in place of the last, if they can still be read."""
        try:
            if best is not None:
                verify_step(run.checkpoints, best)
                arranged(model, plan, best)
                load_weights(run.checkpoints, best, model)
            return best is not None
        except CorruptInputError as error:
            told.append(f"the weights that validated best, of step {best}, are lost: {error}")
            return False

    lr, told = plan.lr, list[str]()
    while not enough() and not world.any(stop_requested()):
        if step == plan.untie_at:
            groups, rules = untie_in_training(model, rules, plan)
            write({"step": step + 1, "untied": "a head of its own, W's copy, predicts from here"})
            yield Untied(step, groups)
        began = time.perf_counter()
        lr = plan.rate(step)
        for group in (group for rule in rules for group in rule.param_groups):
            group["lr"] = lr
        batch, result = batch_of(step), None
        world.reseed(plan.seed, step)
        step += 1
        try:
            with measures.watching(step) if world.size == 1 else nullcontext():
                result = train_step(model, rules, batch, plan, world)
        except DivergedError as error:
            why = str(error)
        seconds = time.perf_counter() - began
        units = growth.units_before(step)
        if result is None:
            health.skip(step)
            write({"step": step, "skipped": why, "lr": lr, task.unit: units})
            yield Skipped(step, why, health.skipped_in_all)
        else:
            health.stepped(result.loss, result.grad_norm)
            speed = (units - growth.units_before(step - 1)) / seconds
            measured = measures.found(step, speed / world.size)
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
            where = diagnosis()
            raise diverged(error, f"; {where}" if where else "") from None
        improved = False
        if step % plan.eval_every == 0 and step < plan.steps:
            partly = evaluate(plan.eval_batches)
            shown = sample()
            write({"step": step, **task.metrics(partly), "sample": shown})
            improved = health.evaluated(step, partly.nats)
            yield Evaluated(step, partly, shown)
        if (improved or step % plan.save_every == 0) and step < plan.steps:
            save()

    save()
    if not enough():
        if step:
            publish(run.model)
            card(None)
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
    publish(run.model)
    card(last)
    if plan.patience is None and last_loss > WORSE * best_loss and take(best):
        publish(run.best)
        told.append(
            f"validation was better after step {best:,} ({best_loss:.4f}) than after the last "
            f"({last_loss:.4f}): those weights are in {run.best}; --patience makes them the model"
        )
    write(last)  # the last thing that is written: with it the run is finished
    yield Ended(step, finished=True, score=final, notes=told)
