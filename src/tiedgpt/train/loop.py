"""The training loop: steps, evaluations, samples and checkpoints.

`Trainer.run` yields events, and its caller shows them. The model, the optimizers, the `RunState`,
the plan and the step number are the whole state, so a resumed run equals an uninterrupted one. The
trainer knows an `Objective` and its `Data`, but no text, labels or heads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from tiedgpt.errors import DivergedError, NoRoomError, TiedGPTError
from tiedgpt.files import format_count
from tiedgpt.signatures import checked
from tiedgpt.train.card import write_card
from tiedgpt.train.checkpoint import (
    describe_origin,
    list_checkpoints,
    load_newest,
    load_weights,
    save_checkpoint,
    verify,
)
from tiedgpt.train.dataset import Data, Progress
from tiedgpt.train.distributed import Processes
from tiedgpt.train.events import Ended, Evaluated, Event, Replanned, Skipped, Started, Stepped
from tiedgpt.train.machine import Measures
from tiedgpt.train.metrics import PART_PREFIX
from tiedgpt.train.objective import Arrays, Model, Objective, Score, body_of
from tiedgpt.train.optim.groups import make_optimizers
from tiedgpt.train.planning import PaceChecks, Plan, halve_micro_batch, replan, require_rows
from tiedgpt.train.step import (
    WORSE_RATIO,
    Accelerate,
    RunState,
    compile_now,
    find_not_finite,
    find_not_finite_weights,
    prepare_blocks,
    read_state,
    train_step,
)
from tiedgpt.train.storage import GOES_ON, RunDirectory, checkpoint_path, plan_tables

T = TypeVar("T")


class StopRequestedError(Exception):
    """A stop was requested between two batches of an evaluation."""


class Trainer:
    """Train an objective on data by a plan, in a run's directory.

        for event in Trainer(run, objective, data, plan, device).run():
            ...

    `track` receives each line of metrics.jsonl. `stop_requested` is called between steps and
    between the batches of an evaluation. `progress` receives the number of scored batches of the
    final score, and their total. Each of several `processes` makes a trainer and sees the same
    events; rank 0 writes. A step runs inside `accelerate(model)`, such as `fast_training`. A plan
    with minutes ends at the `deadline`, in seconds of the `clock`; default: from now.
    """

    @checked
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
        processes: Processes | None = None,
        deadline: float | None = None,
        progress: Progress | None = None,
        accelerate: Accelerate = nullcontext,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.directory, self.objective, self.data, self.plan = run, objective, data, plan
        self.next_plan: Plan | None = None  # replaces `plan` after its step `since`
        self.stop_requested, self.track, self.progress = stop_requested, track, progress
        self.accelerate, self.clock, self.deadline = accelerate, clock, deadline
        self.checks: PaceChecks | None = None
        self.processes = processes or Processes(device)
        self.step = self.saved_at = 0
        self.planned_steps = plan.steps
        self.notes: list[str] = []
        self.state = RunState()
        self.origin = self.processes.on_main(describe_origin, objective.config, run.tokenizer)
        self.batch_units = plan.batch_size * data.row_units
        self.batch_of = data.batches(plan.batch_size, plan.seed)
        self.processes.on_main(require_rows, plan.batch_size, self.processes.size)
        torch.manual_seed(plan.seed)
        model = objective.build().train()
        if not list_checkpoints(run.checkpoints):
            objective.begin(model)
        self.model: Model = self.processes.place(prepare_blocks(model, plan))
        self.groups, self.optimizers = make_optimizers(
            objective, self.model, plan, is_sharded=self.processes.n_shards > 1
        )
        self.measures = Measures(
            self.model, data, plan.dtype, self.processes.device, self.processes.size
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
                yield from self._next_step()
                self.state.require_sound(self.step)
                yield from self._pause()
            self._save()
            if self._is_done() and self.state.first_loss is None:
                raise DivergedError("no step had a finite loss and gradient, and the run ended")
            yield self._finish() if self._is_done() else self._stop()
        except DivergedError as error:
            raise self._diagnose(error) from None

    def _begin(self) -> Iterator[Started | Replanned]:
        """Load the newest checkpoint, or begin at step 0."""
        processes, plan, run = self.processes, self.plan, self.directory
        state, notes = processes.main_first(
            load_newest,
            run.checkpoints,
            self.objective,
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
            with self.accelerate(self.model):
                seconds = compile_now(self.objective, self.model, self.batch_of(self.step), plan)
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
            now, deadline = self.processes.broadcast((self.clock(), self.deadline))
            self.checks = PaceChecks(self.plan, self.step, now, deadline)

    def _replan(self) -> Iterator[Replanned]:
        """Change the plan where a later one begins, or the steps would not end with the time."""
        before, next_plan, checks = self.plan, self.next_plan, self.checks
        if next_plan is not None and next_plan.since <= self.step:
            if self._is_done() and not self._reopen():
                return
            self.plan, self.next_plan = next_plan, None
            yield Replanned(self.step, next_plan, [])
            self._start_clock()
        if checks is None or self._is_done():
            return
        now = self.processes.broadcast(self.clock())
        pace = checks.measure(before, self.step, now)
        if pace is None:
            return
        seconds, n_processes = checks.deadline - now, self.processes.size
        plan = replan(before, self.data.held_out_rows, self.step, seconds, pace, n_processes)
        if plan is None:
            return
        yield self._set_plan(plan, [])

    def _reopen(self) -> bool:
        """Evaluate where a finished run is prolonged; return false if a stop was requested."""
        score = self._evaluate(self.plan.eval_batches)
        if score is None:
            return False
        metrics = self.objective.metrics(score)
        self._write({"step": self.step, **metrics, GOES_ON: "by a plan of more steps"})
        self.state.reopen(self.step, score.nats)
        return True

    def _set_plan(self, plan: Plan, notes: list[str]) -> Replanned:
        """Go on by another plan: save it in a checkpoint, then in run.toml."""
        self.plan = plan
        self._save()
        if self.processes.is_main and (tables := self.directory.read_record()):
            self.directory.write_record(tables | plan_tables(plan))
        return Replanned(self.step, plan, notes)

    def _next_step(self) -> Iterator[Stepped | Skipped | Replanned]:
        """Do a step, in smaller micro-batches if a GPU has no room for it.

        A step whose loss or gradient is not finite is skipped.
        """
        began, processes, plan = self.clock(), self.processes, self.plan
        lr, batch, unit = plan.rate(self.step), self.batch_of(self.step), self.data.unit
        for group in (group for each in self.optimizers for group in each.param_groups):
            group["lr"] = lr
        if not processes.is_main:  # so that a resumed run drops the same elements
            torch.manual_seed(hash((plan.seed, processes.rank, self.step)))
        step = self.step + 1
        units = step * self.batch_units
        try:
            with self.measures.watching(step), self.accelerate(self.model):
                result = train_step(
                    self.model, self.optimizers, batch, plan, processes, objective=self.objective
                )
        except DivergedError as error:
            self.step, why = step, str(error)
            self.state.add_skip(step)
            self._write({"step": step, "skipped": why, "lr": lr, unit: units})
            yield Skipped(step, why, self.state.skipped_in_all)
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
        speed = self.batch_units / (self.clock() - began)
        measured = self.measures.metrics(step, speed)
        stepped = Stepped(step, result.loss, result.grad_norm, lr, units, speed, measured)
        self._write(stepped.metrics(unit))
        yield stepped

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

    def _pause(self) -> Iterator[Evaluated | Replanned]:
        """Evaluate and save if the plan says so; save if validation improved; plan again."""
        plan, improved = self.plan, False
        if self.step < plan.steps and self.step % plan.eval_every == 0:
            score = self._evaluate(plan.eval_batches)
            self.state.evaluation_due = score is None
            if score is None:
                return
            sample = self._on_full_model(self.objective.sample, self.data, self.step, plan.seed)
            metrics = self.objective.metrics(score)
            self._write({"step": self.step, **metrics, "sample": sample})
            improved = self.state.add_evaluation(self.step, score.nats)
            yield Evaluated(self.step, score, metrics, sample)
        yield from self._replan()
        if self.step < plan.steps and (improved or self.step % plan.save_every == 0):
            self._save()

    def _evaluate(self, n_batches: int | None, progress: Progress | None = None) -> Score | None:
        """Score held-out data, all for None; return None if a stop was requested meanwhile."""
        self._require_finite()
        plan = self.plan
        total = n_batches or math.ceil(self.data.held_out_rows / plan.micro_batch)

        def watch(batches: Iterable[Arrays]) -> Iterator[Arrays]:
            for number, batch in enumerate(batches):
                if self.stop_requested():
                    raise StopRequestedError
                if progress is not None:
                    progress(number, total)
                yield batch

        def score_unless_stopped(model: Model) -> Score | None:
            batches = self.data.held_out(plan.micro_batch, n_batches)
            try:
                return self.objective.score(model, watch(batches), plan.autocast)
            except StopRequestedError:
                return None

        score = self._on_full_model(score_unless_stopped)
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

    def _finish(self) -> Ended:
        """Publish the best weights, or the last if the plan keeps those; then score them."""
        line: dict[str, Any] = {"step": self.step, "final": True}
        best, best_loss = self.state.best_step, self.state.best_loss
        last = self._evaluate(self.plan.eval_batches)  # comparable with the earlier ones
        if last is None:
            return self._stop()
        line |= {
            f"{PART_PREFIX}{name}": value for name, value in self.objective.metrics(last).items()
        }
        nats = last.nats
        if self.step < self.plan.steps:
            self.notes.append(
                f"ended after step {self.step:,} of {self.plan.steps:,}: "
                "the validation loss no longer improved"
            )
        elif self.step != self.planned_steps:
            pace = "slower" if self.step < self.planned_steps else "faster"
            self.notes.append(
                f"steps were {pace} than measured before: {self.step:,} fit into the time instead "
                f"of {self.planned_steps:,}"
            )
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
        score = self._evaluate(n_batches, self.progress)
        if score is None:
            return Ended(self.step, finished=False, score=None)
        if n_batches is not None:
            line["scored"] = n_batches * self.plan.micro_batch * self.data.row_units
        metrics = self.objective.metrics(score)
        line |= metrics
        self._write_card(line)
        self._write(line)  # the last line: with it the run is finished
        return Ended(self.step, True, score, metrics, nats, self.notes, line.get("scored"))

    def _load_best(self, best: int | None) -> bool:
        """Load the best weights into the model; return whether they could be read."""
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
            self._require_finite()
            self.processes.on_main(self.directory.sync_metrics)
            save_checkpoint(
                self.directory.checkpoints,
                self.step,
                self.objective,
                self.model,
                self.optimizers,
                {"run": self.state.to_save(), "plan": asdict(self.plan), **self.origin},
                self.processes,
                spared=self.state.best_step,
            )
            self.saved_at = self.step

    def _publish(self) -> None:
        """Write the model and its card."""
        self._on_full_model(self.objective.publish, self.directory.model)
        self._write_card(None)

    def _write_card(self, last: Mapping[str, Any] | None) -> None:
        """Write the model card; `last` is the final line of the metrics, not yet written."""
        config = body_of(self.model).config
        described = self.data.description | {"predicts": self.objective.describe(config)}
        self.processes.on_main(write_card, self.directory, self.model, described, last)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self.processes.is_main:
            self.directory.write_metrics(line)
            if self.track is not None:
                self.track(line)

    def _on_full_model(self, act: Callable[..., T], *arguments: Any) -> T:
        """Return `act(model, *arguments)` of rank 0 on the unsharded model."""
        return self.processes.with_full_model(self.model, self.objective, act, *arguments)

    def _diagnose(self, error: DivergedError) -> DivergedError:
        """Add the step, the last losses and a remedy to the error."""
        run, before = self.directory, max(0, self.step - 1)
        batch, lr = self.batch_of(before), self.plan.rate(before)
        where = self._on_full_model(find_not_finite, self.objective, batch, self.plan)
        saved = "nothing was saved yet"
        if self.saved_at:
            saved = f"the state after step {self.saved_at} is kept in {run.checkpoints}"
        remedy = "train again with a lower --lr in another --out"
        if self.state.first_loss is None:  # the weights are those of the beginning
            remedy = "check the data, the weights of --start and the loss of --objective"
        return DivergedError(
            f"{error} at step {self.step}{where}; learning rate {lr:.3g}, {self.state}; {saved}",
            hint=remedy,
        )
