"""The training loop: steps, evaluations, samples and checkpoints.

`Trainer.run` yields events, and its caller shows them. The model, the optimizers, the `RunState`,
the plan and the step number are the whole state, so a resumed run equals an uninterrupted one. The
trainer knows a `Task` and its `Data`, but no text, labels or heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from tiedgpt.errors import DivergedError, NoRoomError, TiedGPTError
from tiedgpt.evaluate.perplexity import running_totals
from tiedgpt.files import format_count
from tiedgpt.runtime import find_device
from tiedgpt.signatures import checked
from tiedgpt.train.distributed import Processes
from tiedgpt.train.events import (
    Ended,
    Evaluated,
    Event,
    Replanned,
    Scored,
    Skipped,
    Started,
    Stepped,
)
from tiedgpt.train.plan.draft import require_rows
from tiedgpt.train.plan.memory import halve_micro_batch
from tiedgpt.train.plan.time import Clock, PaceChecks, compare_steps, replan
from tiedgpt.train.plan.values import Plan
from tiedgpt.train.step.blocks import compile_now, training_layers
from tiedgpt.train.step.loss import Arrays, Model
from tiedgpt.train.step.measures import Measures
from tiedgpt.train.step.optim.groups import make_optimizers
from tiedgpt.train.step.state import WORSE_RATIO, RunState, read_state
from tiedgpt.train.step.step import find_not_finite, find_not_finite_weights, train_step
from tiedgpt.train.store.card import write_card
from tiedgpt.train.store.checkpoint import (
    describe_origin,
    list_checkpoints,
    load_newest,
    load_weights,
    save_checkpoint,
    verify,
)
from tiedgpt.train.store.directory import GOES_ON, checkpoint_path, plan_tables
from tiedgpt.train.store.metrics import PART_PREFIX
from tiedgpt.train.store.run import Run
from tiedgpt.train.tasks.rows import Data
from tiedgpt.train.tasks.task import Score, Task


class Trainer:
    """Train a task on data in a run's directory, by its config and its plan.

        for event in Trainer(task, data, Run(directory, config, plan)).run():
            ...

    `stop_requested` is called between steps and between the batches of an evaluation. Each of
    several `processes` makes a trainer; rank 0 writes, and yields what concerns evaluations.
    """

    @checked
    def __init__(
        self,
        task: Task,
        data: Data,
        run: Run,
        processes: Processes | None = None,
        *,
        stop_requested: Callable[[], bool] = lambda: False,
        clock: Clock | None = None,
    ) -> None:
        self.task, self.data, self.directory = task, data, run.directory
        self.config, self.plan = run.config, run.plan
        self.next_plan: Plan | None = None  # replaces `plan` after its step `since`
        self.stop_requested, self.clock = stop_requested, clock or Clock()
        self.checks: PaceChecks | None = None
        self.processes = processes or Processes(find_device(task.options.device))
        self.step = self.saved_at = 0
        self.planned_steps = run.plan.steps
        self.notes: list[str] = []
        self.state = RunState()
        self.publisher = task.publisher(run.config, data)
        self.origin = self.processes.on_main(describe_origin, run.config, self.directory.tokenizer)
        self.batch_units = run.plan.batch_size * data.row_units
        self.batch_of = data.batches(run.plan.batch_size, run.plan.seed)
        self.processes.on_main(require_rows, run.plan.batch_size, self.processes.size)
        torch.manual_seed(run.plan.seed)
        model = task.build(run.config, data).train()
        if not list_checkpoints(self.directory.checkpoints):
            task.begin(model, data)
        self.model: Model = self.processes.place(model)
        self.weights = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad or task.saves_frozen
        }
        self.groups, self.optimizers = make_optimizers(
            self.model, run.plan, is_sharded=self.processes.n_shards > 1
        )
        self.measures = Measures(
            self.model, data, run.plan.dtype, self.processes.device, self.processes.size
        )

    def run(self) -> Iterator[Event]:
        """Train to the end of the plan, from the newest checkpoint of the run's directory.

        A step whose loss or gradient is not finite is skipped. Raises `DivergedError` for too many
        skipped steps, a run of skipped steps alone, a loss that grows, and weights that are not
        finite; the last checkpoint stays.
        """
        try:
            yield from self._begin()
            if self.state.evaluation_due:
                yield from self._pause()
            while not self._is_done() and not self.processes.any(self.stop_requested()):
                yield from self._do_steps()
                yield from self._pause()
            self._save()
            if self._is_done() and self.state.first_loss is None:
                raise DivergedError("no step had a finite loss and gradient, and the run ended")
            yield (yield from self._finish()) if self._is_done() else self._stop()
        except DivergedError as error:
            raise self._diagnose(error) from None

    def _begin(self) -> Iterator[Started | Replanned | Scored]:
        """Load the newest checkpoint, or begin at step 0."""
        processes, plan, run = self.processes, self.plan, self.directory
        state, notes = processes.main_first(
            load_newest,
            run.checkpoints,
            self.weights,
            self.model,
            self.optimizers,
            is_verified=not processes.is_main,
        )
        saved = plan
        if state is not None:
            self.state, saved = read_state(state)
            self.step = self.saved_at = state["step"]
        repeated = ["sample"] if self.state.evaluation_due else []
        if saved.since < plan.since:  # the later plan begins at its step
            self.plan, self.next_plan = saved, plan
            repeated += [GOES_ON] if plan.since == self.step else []
        processes.on_main(run.cut_metrics, self.step, repeated)
        if plan.compile == "on" and processes.size == 1 and self.step < plan.steps:
            seconds = compile_now(self.task, self.model, self.batch_of(self.step), plan)
            notes.append(f"compiled the blocks in {seconds:.1f} s")
        yield Started(self.model, self.groups, self.step, notes)
        if saved.since > plan.since:  # killed between the checkpoint and run.toml
            yield self._set_plan(saved, [])
        if self.next_plan is None:
            self._start_clock()
        yield from self._replan()

    def _start_clock(self) -> None:
        """Compare a plan with minutes with the clock from now on."""
        if self.plan.minutes is not None:
            now, deadline = self.processes.broadcast((self.clock.now(), self.clock.deadline))
            self.checks = PaceChecks(self.plan, self.step, now, deadline)

    def _replan(self) -> Iterator[Replanned | Scored]:
        """Change the plan where a later one begins, or the steps would not end with the time."""
        before, next_plan, checks = self.plan, self.next_plan, self.checks
        if next_plan is not None and next_plan.since <= self.step:
            line: Mapping[str, Any] = {}
            if self._is_done():
                score = yield from self._evaluate(self.plan.eval_batches)
                if score is None:
                    return
                line = {"step": self.step, **score.metrics(), GOES_ON: "by a plan of more steps"}
                self._write(line)
                self.state.reopen(self.step, score.nats)
            self.plan, self.next_plan = next_plan, None
            yield Replanned(self.step, next_plan, [], line=line)
            self._start_clock()
        if checks is None or self._is_done():
            return
        now = self.processes.broadcast(self.clock.now())
        pace = checks.measure(before, self.step, now)
        if pace is None:
            return
        seconds, n_processes = checks.deadline - now, self.processes.size
        plan = replan(before, self.data.held_out_rows, self.step, seconds, pace, n_processes)
        if plan is None:
            return
        yield self._set_plan(plan, [])

    def _set_plan(self, plan: Plan, notes: list[str]) -> Replanned:
        """Go on by another plan: save it in a checkpoint, then in run.toml."""
        self.plan = plan
        self._save()
        if self.processes.is_main and (tables := self.directory.read_record()):
            self.directory.write_record(tables | plan_tables(plan))
        return Replanned(self.step, plan, notes)

    def _do_steps(self) -> Iterator[Stepped | Skipped | Replanned]:
        """Do the steps to the next pause, or to a requested stop."""
        with training_layers(self.model, self.plan):
            while True:
                yield from self._next_step()
                self.state.require_sound(self.step)
                stops = self.processes.any(self.stop_requested())
                if stops or self._is_done() or self._needs_pause():
                    return

    def _needs_pause(self) -> bool:
        """Return whether an evaluation, a checkpoint or a comparison with the clock is due."""
        plan, checks, next_plan = self.plan, self.checks, self.next_plan
        if self.step % plan.eval_every == 0 or self.step % plan.save_every == 0:
            return True
        if next_plan is not None and next_plan.since <= self.step:
            return True
        if checks is None:
            return False
        return checks.is_due(plan, self.step, self.processes.broadcast(self.clock.now()))

    def _next_step(self) -> Iterator[Stepped | Skipped | Replanned]:
        """Do a step, in smaller micro-batches if a GPU has no room for it.

        A step whose loss or gradient is not finite is skipped.
        """
        began, processes, plan = self.clock.now(), self.processes, self.plan
        lr, batch, unit = plan.rate(self.step), self.batch_of(self.step), self.data.unit
        for group in (group for each in self.optimizers for group in each.param_groups):
            group["lr"] = lr * group["lr_factor"]
        if not processes.is_main:  # so that a resumed run drops the same elements
            torch.manual_seed(hash((plan.seed, processes.rank, self.step)))
        step = self.step + 1
        units = step * self.batch_units
        try:
            with self.measures.watching(step):
                result = train_step(
                    self.model, self.optimizers, batch, plan, processes, objective=self.task
                )
        except DivergedError as error:
            self.step, why = step, str(error)
            self.state.add_skip(step)
            line = self._write({"step": step, "skipped": why, "lr": lr, unit: units})
            yield Skipped(step, why, self.state.skipped_in_all, line=line)
            return
        except torch.OutOfMemoryError:
            self.model.zero_grad(set_to_none=True)
            result = None
        if result is None:  # outside of the `except`, which holds the step's tensors
            yield self._halve_micro_batch()
            yield from self._next_step()
            return
        self.step = step
        self.state.add_step(result.loss, result.grad_norm)
        speed = self.batch_units / (self.clock.now() - began)
        line = {"step": step, "loss": result.loss, "grad_norm": result.grad_norm, "lr": lr}
        line |= {unit: units, f"{unit}_per_second": speed, **self.measures.metrics(step, speed)}
        self._write(line)
        yield Stepped(step, result.loss, result.grad_norm, lr, units, speed, line=line)

    def _halve_micro_batch(self) -> Replanned:
        """Go on with half of the rows at a time."""
        before, device = self.plan, self.processes.device
        rows = format_count(before.micro_batch, "sequence")
        if before.micro_batch == 1 or self.processes.size > 1:
            raise NoRoomError(
                f"{device} has no room for {rows} at a time",
                hint="use a smaller --micro-batch, --recompute blocks, or a smaller model",
            )
        if device.type == "cuda":
            torch.cuda.empty_cache()
        plan = halve_micro_batch(before, self.step)
        note = f"{device} has no room for {rows} at a time: {plan.micro_batch} from here on"
        return self._set_plan(plan, [note])

    def _pause(self) -> Iterator[Evaluated | Replanned | Scored]:
        """Evaluate and save if the plan says so; save if validation improved; plan again."""
        plan, improved = self.plan, False
        if self.step < plan.steps and self.step % plan.eval_every == 0:
            score = yield from self._evaluate(plan.eval_batches)
            self.state.evaluation_due = score is None
            if score is None:
                return
            sample = self._on_full_model(self.task.sample, self.data, self.step, plan.seed)
            metrics = score.metrics()
            line = self._write({"step": self.step, **metrics, "sample": sample})
            improved = self.state.add_evaluation(self.step, score.nats)
            yield Evaluated(self.step, score, metrics, sample, line=line)
        yield from self._replan()
        if self.step < plan.steps and (improved or self.step % plan.save_every == 0):
            self._save()

    def _evaluate(
        self, n_batches: int | None, *, shows_progress: bool = False
    ) -> Generator[Scored, None, Score | None]:
        """Score held-out data, all for None; return None if a stop was requested meanwhile."""
        self._require_finite()
        plan, stops = self.plan, list[int]()
        total = n_batches or math.ceil(self.data.held_out_rows / plan.micro_batch)
        model = self._full_model()

        def batches() -> Iterator[Arrays]:
            for batch in self.data.held_out(plan.micro_batch, n_batches):
                if self.stop_requested():
                    stops.append(self.step)
                    return
                yield batch

        def score_batches() -> Generator[Scored, None, Score | None]:
            measure, sums = partial(self.task.measure, model, self.data), list[float]()
            totals = running_totals(model, batches(), measure, autocast=plan.autocast)
            with closing(totals):
                for number, current in enumerate(totals, 1):
                    sums = current
                    if shows_progress:
                        yield Scored(number, total)
            return None if stops else self.task.score(self.data, sums)

        score = yield from self.processes.steps_on_main(score_batches)
        if score is not None and not math.isfinite(score.nats):
            raise DivergedError(f"the validation loss became {score.nats}")
        return score

    def _require_finite(self) -> None:
        """Raise `DivergedError` in all processes if weights are not finite in any."""
        name = find_not_finite_weights(self.model)
        if self.processes.any(name is not None):
            raise DivergedError(f"{name or 'a matrix'} is no longer finite")

    def _is_done(self) -> bool:
        return self.step >= self.plan.steps or self.state.is_over(self.plan)

    def _stop(self) -> Ended:
        """Publish the current weights of a run that was asked to stop, if they were trained."""
        if self.state.first_loss is not None:
            self._publish()
        return Ended(self.step, finished=False, score=None)

    def _finish(self) -> Generator[Scored, None, Ended]:
        """Publish the best weights, or the last if the plan keeps those; then score them."""
        line: dict[str, Any] = {"step": self.step, "final": True}
        best, best_loss = self.state.best_step, self.state.best_loss
        last = yield from self._evaluate(self.plan.eval_batches)  # comparable with the earlier ones
        if last is None:
            return self._stop()
        line |= {f"{PART_PREFIX}{name}": value for name, value in last.metrics().items()}
        nats = last.nats
        if self.step < self.plan.steps:
            self.notes.append(
                f"ended after step {self.step:,} of {self.plan.steps:,}: "
                "the validation loss no longer improved"
            )
        elif self.step != self.planned_steps:
            self.notes.append(compare_steps(self.step, self.planned_steps))
        if self.plan.keep == "last" and nats > WORSE_RATIO * best_loss:
            self.notes.append(
                f"validation was better after step {best:,} ({best_loss:.4f}) than after the last "
                f"({nats:.4f}): --keep best keeps those weights"
            )
        elif self.plan.keep == "best" and best_loss < nats and self._load_best(best):
            line["best_step"] = best
            if f"{best_loss:.4f}" != f"{nats:.4f}":
                self.notes.append(
                    f"validation was best after step {best:,} ({best_loss:.4f}, and {nats:.4f} "
                    f"after the last): those weights are in {self.directory.model}"
                )
            nats = best_loss
        self._publish()
        n_batches = self.plan.final_batches
        score = yield from self._evaluate(n_batches, shows_progress=True)
        if score is None:
            return Ended(self.step, finished=False, score=None)
        if n_batches is not None:
            line["scored"] = n_batches * self.plan.micro_batch * self.data.row_units
        metrics, scored = score.metrics(), line.get("scored")
        line |= metrics
        self._write_card(line)
        self._write(line)  # the last line: with it the run is finished
        return Ended(self.step, True, score, metrics, nats, self.notes, scored, line=line)

    def _load_best(self, best: int | None) -> bool:
        """Load the best weights into the model; return whether they could be read."""
        if best is None:
            return False
        path = checkpoint_path(self.directory.checkpoints, best)
        try:
            verify(path)
            load_weights(path, self.weights)
        except TiedGPTError as error:
            self.notes.append(f"the weights that validated best, of step {best}, are lost: {error}")
            return False
        return True

    def _save(self) -> None:
        """Write a checkpoint, unless this step has one."""
        if self.step > self.saved_at:
            self._require_finite()
            self.processes.on_main(self.directory.sync_metrics)
            save_checkpoint(
                self.directory.checkpoints,
                self.step,
                self.weights,
                self.model,
                self.optimizers,
                {"run": self.state.to_save(), "plan": asdict(self.plan), **self.origin},
                self.processes,
                spared=self.state.best_step,
            )
            self.saved_at = self.step

    def _publish(self) -> None:
        """Write the model and its card."""
        self._on_full_model(self.publisher.publish, self.directory.model)
        self._write_card(None)

    def _write_card(self, last: Mapping[str, Any] | None) -> None:
        """Write the model card; `last` is the final line of the metrics, not yet written."""
        described = self.data.description | {"predicts": self.publisher.describe()}
        self.processes.on_main(write_card, self.directory, self.model, described, last)

    def _write(self, line: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add a line to the metrics; return it."""
        if self.processes.is_main:
            self.directory.write_metrics(line)
        return line

    def _on_full_model(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Return `act(model, *arguments)` of rank 0 on the unsharded model."""
        return self.processes.on_main(act, self._full_model(), *arguments)

    def _full_model(self) -> Model:
        build = partial(self.task.build, self.config, self.data)
        return self.processes.full_model(self.model, build)

    def _diagnose(self, error: DivergedError) -> DivergedError:
        """Add the step, the last losses and a remedy to the error."""
        before = max(0, self.step - 1)
        batch, lr = self.batch_of(before), self.plan.rate(before)
        where = self._on_full_model(find_not_finite, self.task, batch, self.plan)
        saved = "nothing was saved yet"
        if self.saved_at:
            directory = self.directory.checkpoints
            saved = f"the state after step {self.saved_at} is kept in {directory}"
        problem = f"{error} at step {self.step}{where}; learning rate {lr:.3g}"
        return self.state.explain(f"{problem}, {self.state}; {saved}")
