"""The trainer: step after step, with evaluations, samples and checkpoints in between.

`Trainer.run` yields what happens as it happens; whoever iterates shows it. State lives in the
model, the optimizers, the `Health` and the step number alone, so a run that stops and resumes
equals one that never stopped. What is trained is an
`Objective`, on `Data` (`objective.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from tiedgpt.errors import DivergedError, TiedGPTError
from tiedgpt.train.blocks import compile_now, prepare_blocks
from tiedgpt.train.card import write_card
from tiedgpt.train.checkpoint import (
    list_checkpoints,
    load_newest,
    load_weights,
    save_checkpoint,
    verify,
)
from tiedgpt.train.events import (
    Ended,
    Evaluated,
    Event,
    Replanned,
    Skipped,
    Started,
    Stepped,
)
from tiedgpt.train.measures import Measures
from tiedgpt.train.metrics import PART
from tiedgpt.train.objective import Data, Model, Objective, Score, body_of
from tiedgpt.train.optim import make_optimizers, set_rate
from tiedgpt.train.pace import Checks
from tiedgpt.train.parallel import World
from tiedgpt.train.plan import Plan
from tiedgpt.train.sizing import replan
from tiedgpt.train.step import (
    WORSE,
    Health,
    StepResult,
    find_not_finite,
    require_finite,
    train_step,
)
from tiedgpt.train.storage import RunDirectory, checkpoint_path, plan_tables

T = TypeVar("T")


class Trainer:
    """Trains an objective on data by a plan, in a run's directory.

        for event in Trainer(run, objective, data, plan, device).run():
            ...

    `track` is given each line of metrics.jsonl when it is written. In a `world` of several
    processes all make a trainer and see the same events; the first one writes. A plan with a time
    follows the clock to the `deadline`, in seconds of `time.perf_counter`; without one the time
    begins now.
    """

    def __init__(
        self,
        run: RunDirectory,
        objective: Objective,
        data: Data,
        plan: Plan,
        device: torch.device,
        *,
        stop_requested: Callable[[], bool] = lambda: False,
        track: Callable[[Mapping[str, Any]], None] | None = None,
        world: World | None = None,
        deadline: float | None = None,
    ) -> None:
        self.directory, self.objective, self.data, self.plan = run, objective, data, plan
        self.stop_requested, self.track = stop_requested, track
        self.world = world or World(device)
        self.step = self.saved_at = 0
        self.deadline = deadline
        self.checks: Checks | None = None
        self.notes: list[str] = []
        self.batch_units = plan.batch_size * data.row_units

    def run(self) -> Iterator[Event]:
        """Train to the end of the plan from wherever the run's directory stands.

        A step whose loss or gradient is not finite is skipped. Raises `DivergedError` where too
        many are, where the loss runs away, and where weights are not finite; the last checkpoint
        is kept.
        """
        try:
            yield self._begin()
            while not self._is_done() and not self.world.any(self.stop_requested()):
                yield from self._replan()
                yield self._next_step()
                self.health.require_sound(self.step)
                yield from self._pause()
            self._save()
            yield self._finish() if self._is_done() else self._stop()
        except DivergedError as error:
            raise self._diagnose(error) from None

    def _begin(self) -> Started:
        """Build the model and bring back the newest checkpoint, or begin at step 0."""
        world, plan, run = self.world, self.plan, self.directory
        world.on_main(lambda: world.require_work(plan))
        torch.manual_seed(plan.seed)
        model = self.objective.build().train()
        if not list_checkpoints(run.checkpoints):
            self.objective.begin(model)
        self.model: Model = world.place(prepare_blocks(model, plan))
        self.groups, optimizers = make_optimizers(self.objective, self.model, plan)
        self.optimizers = world.optimizers(optimizers)
        state, notes = world.main_first(
            lambda: load_newest(
                run.checkpoints,
                self.objective,
                self.model,
                self.optimizers,
                is_verified=not world.is_main,
            )
        )
        self.health = Health.from_state(state or {})
        if state is not None:
            self.step = self.saved_at = state["step"]
            if (last_loss := world.on_main(lambda: run.read_end_loss(self.step))) is not None:
                self.health.reopen(self.step, last_loss)
        world.on_main(lambda: run.cut_metrics(self.step))
        self.batch_of = self.data.batches(plan.batch_size, plan.seed)
        if plan.compile == "on" and world.size == 1 and self.step < plan.steps:
            seconds = compile_now(self.objective, self.model, self.batch_of(self.step), plan)
            notes.append(f"compiled the blocks in {seconds:.1f} s")
        self.measures = Measures(self.model, self.data, plan, world)
        if plan.minutes is not None:
            self.checks = Checks(plan, self.step, self.deadline)
        return Started(self.model, self.groups, self.step, notes)

    def _replan(self) -> Iterator[Replanned]:
        """Change the number of steps if they would not end with the time.

        The state is saved first, so that no step has to be repeated by another plan.
        """
        checks, before = self.checks, self.plan
        if checks is None:
            return
        now = self.world.on_main(time.perf_counter)
        pace = self.world.on_main(lambda: checks.measure(before, self.step, now))
        if pace is None:
            return
        left = self.world.on_main(lambda: checks.deadline - now)
        plan = replan(before, self.data, self.step, left, pace, self.world.size)
        if plan is None:
            return
        self._save()
        self.plan = plan
        if self.world.is_main and (tables := self.directory.read_record()):
            self.directory.write_record(tables | plan_tables(plan))
        note = f"slower than planned: {plan.steps:,} of {before.steps:,} steps fit into the time"
        if plan.steps > before.steps:
            note = f"faster than planned: {plan.steps:,} steps instead of {before.steps:,}"
        yield Replanned(self.step, plan, [note])

    def _next_step(self) -> Stepped | Skipped:
        """Do a step, or skip it where its loss or gradient is not finite."""
        began, world = time.perf_counter(), self.world
        set_rate(self.optimizers, self.plan.rate(self.step))
        batch = self.batch_of(self.step)
        world.reseed(self.plan.seed, self.step)
        self.step += 1
        try:
            with self.measures.watching(self.step):
                result = train_step(
                    self.model, self.optimizers, batch, self.plan, world, objective=self.objective
                )
        except DivergedError as error:
            return self._skip_step(str(error))
        return self._finish_step(result, time.perf_counter() - began)

    def _finish_step(self, result: StepResult, seconds: float) -> Stepped:
        self.health.add_step(result.loss, result.grad_norm)
        units, speed = self.step * self.batch_units, self.batch_units / seconds
        stepped = Stepped(
            step=self.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=self.plan.rate(self.step - 1),
            units=units,
            units_per_second=speed,
            measured=self.measures.metrics(self.step, speed),
        )
        self._write(stepped.metrics(self.data.unit))
        return stepped

    def _skip_step(self, why: str) -> Skipped:
        self.health.add_skip(self.step)
        units = {self.data.unit: self.step * self.batch_units}
        rate = self.plan.rate(self.step - 1)
        self._write({"step": self.step, "skipped": why, "lr": rate, **units})
        return Skipped(self.step, why, self.health.skipped_in_all)

    def _pause(self) -> Iterator[Evaluated]:
        """Between two steps, evaluate and save where the plan says so, or validation improved."""
        if self.step >= self.plan.steps:
            return
        plan, improved = self.plan, False
        if self.step % plan.eval_every == 0 and self.step < plan.steps:
            score = self._evaluate(plan.eval_batches)
            sample = self._on_full_model(
                lambda model: self.objective.sample(model, self.data, self.step, plan.seed)
            )
            metrics = self.objective.metrics(score)
            self._write({"step": self.step, **metrics, "sample": sample})
            improved = self.health.add_evaluation(self.step, score.nats)
            yield Evaluated(self.step, score, metrics, sample)
        if improved or self.step % plan.save_every == 0:
            self._save()

    def _evaluate(self, n_batches: int | None = None) -> Score:
        require_finite(self.model, self.world)
        batches = self.data.held_out(self.plan.micro_batch, n_batches)
        autocast = self.plan.autocast
        score = self._on_full_model(lambda model: self.objective.score(model, batches, autocast))
        if not math.isfinite(score.nats):
            raise DivergedError(f"the validation loss became {score.nats}")
        return score

    def _is_done(self) -> bool:
        return self.step >= self.plan.steps or self.health.is_over(self.plan)

    def _stop(self) -> Ended:
        """Publish the weights as they are, of a run that was asked to stop."""
        if self.step:
            self._publish(None)
        return Ended(self.step, finished=False, score=None)

    def _finish(self) -> Ended:
        """Score and publish the best weights, or the last where the plan asks for them."""
        line: dict[str, Any] = {"step": self.step, "final": True}
        best, best_loss = self.health.best_step, self.health.best_loss
        part = self._evaluate(self.plan.eval_batches)  # comparable with the evaluations before
        line |= {f"{PART}{name}": value for name, value in self.objective.metrics(part).items()}
        nats = part.nats
        if self.step < self.plan.steps:
            self.notes.append(
                f"ended after step {self.step:,} of {self.plan.steps:,}: validation was best after "
                f"step {best:,}; more --minutes, --steps or --epochs continue"
            )
        if self.plan.keep == "last" and nats > WORSE * best_loss:
            self.notes.append(
                f"validation was better after step {best:,} ({best_loss:.4f}) than after the last "
                f"({nats:.4f}): --keep best keeps those weights"
            )
        elif self.plan.keep == "best" and best_loss < nats and self._load_best(best):
            line["best_step"] = best
            if f"{best_loss:.4f}" != f"{nats:.4f}":
                self.notes.append(
                    f"the best validation was after step {best:,} ({best_loss:.4f}, and {nats:.4f} "
                    f"after the last, {self.step:,}): those weights are in {self.directory.model}"
                )
            nats = best_loss
        score = self._evaluate(self.plan.final_batches)
        metrics = self.objective.metrics(score)
        line |= metrics
        self._publish(line)
        self._write(line)  # the last thing that is written: with it the run is finished
        return Ended(self.step, True, score, metrics, nats, self.notes)

    def _load_best(self, best: int | None) -> bool:
        """Put the best weights in place of the last, if they can still be read."""
        if best is None:
            return False
        path = checkpoint_path(self.directory.checkpoints, best)
        try:
            verify(path)
            load_weights(path, self.objective, self.model)
        except TiedGPTError as error:
            self.notes.append(f"the weights that validated best, of step {best}, are lost: {error}")
            return False
        return True

    def _save(self) -> None:
        """Write a checkpoint, unless this step has one."""
        if self.step > self.saved_at:
            require_finite(self.model, self.world)
            self.world.on_main(self.directory.sync_metrics)
            self._write_checkpoint()
            self.saved_at = self.step

    def _write_checkpoint(self) -> None:
        save_checkpoint(
            self.directory.checkpoints,
            self.step,
            self.objective,
            self.model,
            self.optimizers,
            self.health.state(),
            self.world,
            spared=self.health.best_step,
        )

    def _publish(self, last: Mapping[str, Any] | None) -> None:
        """Write the model and its card; `last` is the line that is about to close the metrics."""
        objective, config = self.objective, body_of(self.model).config
        described = self.data.description | {"predicts": objective.describe(config)}
        self._on_full_model(lambda model: objective.publish(model, self.directory.model))
        self.world.on_main(lambda: write_card(self.directory, self.model, described, last))

    def _write(self, line: Mapping[str, Any]) -> None:
        if self.world.is_main:
            self.directory.write_metrics(line)
            if self.track is not None:
                self.track(line)

    def _on_full_model(self, act: Callable[[Model], T]) -> T:
        """Return what `act` returned of the whole model, in the first process."""
        return self.world.with_full_model(self.model, self.objective, act)

    def _diagnose(self, error: DivergedError) -> DivergedError:
        """Say with the error where it began, what was before it, and what to do."""
        run, before = self.directory, max(0, self.step - 1)
        batch, rate = self.batch_of(before), self.plan.rate(before)
        where = self._on_full_model(
            lambda model: find_not_finite(self.objective, model, batch, self.plan)
        )
        kept = "nothing was saved yet"
        if self.saved_at:
            kept = f"the state after step {self.saved_at} is kept in {run.checkpoints}"
        return DivergedError(
            f"{error} at step {self.step}{where}; rate {rate:.3g}, {self.health}; {kept}",
            hint="train again with a lower --lr in another --out",
        )
