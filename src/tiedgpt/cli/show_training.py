"""Show a training run: the plan, a progress bar, samples and the result."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from tiedgpt.cli.console import bar, console, fact, note
from tiedgpt.cli.run_arguments import RunArguments
from tiedgpt.cli.source import program
from tiedgpt.core.config import GPTConfig
from tiedgpt.files import format_count
from tiedgpt.train import events
from tiedgpt.train.plan.memory import describe_memory
from tiedgpt.train.plan.values import Plan
from tiedgpt.train.store.directory import RunDirectory
from tiedgpt.train.tasks.publisher import Publisher
from tiedgpt.train.tasks.registry import find_record

MEMORIZED_NATS = 0.1
"""A loss on the examples trained on below which they are called memorized: nine of ten tokens."""
READABLE = 500_000
"""Tokens of training, of a fresh model, below which its texts may be rough."""
SMOOTHING = 0.9


class Display:
    """Progress on stderr, results on stdout."""

    planned: events.Planned
    """Plan, data and directory of the run, once it is planned."""
    steps = 0
    """Number of steps of the current plan."""

    def __init__(self, args: RunArguments, began: float, *, silent: bool = False) -> None:
        self.args = args
        self._times = [began, time.perf_counter()]
        self.err = console(stderr=True, silent=silent)
        self._loss = self._speed = 0.0
        self._seen = 0
        self._unit = self._skipped = ""
        self._scoring: TaskID | None = None

    def say(self, *texts: str) -> None:
        """Show notes."""
        note(*texts, to=self.err)

    def _show_plan(self, event: events.Planned) -> None:
        """Show the data, the model and the duration of a run."""
        self.planned, self.steps = event, event.plan.steps
        self._times.append(time.perf_counter())
        options, plan, data = event.options, event.plan, event.data
        self.say(*data.notes)
        self._unit, self._batch_units = data.unit, plan.batch_size * data.row_units
        config = event.config
        data_kind, amount = next(iter(data.description.items()), ("data", data.unit))
        names = ("standard input" if name == "-" else name for name in options.data)
        source = ", ".join(names) or "the documentation inside this Python"
        facts = {
            data_kind: f"{source}: {amount}",
            "tokens": data.description.get("tokens"),
            "model": f"{options.start or plan.size}: "
            + _count_parameters(config, event.publisher)
            + ("" if data.n_trained is None else f"; {data.n_trained:,} are trained"),
            "chosen": plan.reason,
            "training": self._describe_training(event),
            "run": f"{event.directory.path}; Ctrl-C saves and stops, the same command resumes",
            "memory": "" if plan.memory is None else describe_memory(plan),
        }
        if self.args.verbose:
            n_scored = plan.eval_batches * plan.micro_batch * data.row_units
            facts |= {
                "shape": f"{format_count(config.n_layer, 'block')} of width {config.n_embd}, "
                f"{format_count(config.n_head, 'head')}, {config.n_positions} positions",
                "schedule": f"peak learning rate {plan.lr:g}, {plan.warmup:,} warm-up steps, then "
                f"{plan.schedule}",
                "evaluated": f"every {format_count(plan.eval_every, 'step')} on about {n_scored:,} "
                f"{data.unit}",
            }
        for label, text in facts.items():
            if text:
                fact(label, text, to=self.err)

    def _describe_training(self, event: events.Planned) -> str:
        """Describe the duration, the device and the micro-batches of a training."""
        plan, data, where = event.plan, event.data, str(event.device)
        if event.device.type == "cpu":
            where = format_count(torch.get_num_threads(), "CPU thread")
        if event.n_processes > 1:
            where += f" in each of {event.n_processes} processes"
        rows = f" x {data.row_units}" if data.row_units > 1 else ""
        takes = "" if plan.minutes is None else f", about {format_count(plan.minutes, 'minute')}"
        epochs = plan.steps * plan.batch_size / data.epoch_rows
        parts = math.ceil(math.ceil(plan.batch_size / event.n_processes) / plan.micro_batch)
        changes = {
            f"each batch in {parts} micro-batches": parts > 1,
            "activation checkpointing": plan.recompute == "blocks",
            "blocks compiled": plan.compile == "on",
        }
        return "; ".join(
            [
                f"{format_count(plan.steps, 'step')} of {plan.batch_size}{rows} {data.unit}, "
                f"{epochs:.1f} epochs{takes}",
                f"in {plan.dtype} on {where}",
                *(what for what, so in changes.items() if so),
            ]
        )

    @contextlib.contextmanager
    def training(self, plan: Plan) -> Iterator[None]:
        """Show a bar while steps are done."""
        columns = (
            TextColumn("{task.fields[what]}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.description}left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.err) as self._progress:
            self._task = self._progress.add_task("", what="training", total=plan.steps)
            yield

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Show a bar while text is read."""
        with bar("reading text", to=self.err) as self._show_reading:
            yield

    def _show_scoring(self, event: events.Scored) -> None:
        """Show how many batches of the final score are done."""
        if self._scoring is None:
            done = next(t.completed for t in self._progress.tasks if t.id == self._task)
            self._progress.update(self._task, total=done)  # also if the run ended early
            self._scoring = self._progress.add_task("", what="scoring", total=event.total)
        self._progress.update(self._scoring, completed=event.batches)

    def event(self, event: events.Event) -> None:
        """Show something that happened in training."""
        self.say(*getattr(event, "notes", ()))
        match event:
            case events.Note():
                self.say(event.text)
            case events.Encoded():
                self._show_reading(event.done, event.total)
            case events.Scored():
                self._show_scoring(event)
            case events.AlreadyFinished():
                record = find_record(RunDirectory(event.path).read_record()["options"])
                command = f": `{program()} {record.verb} {event.path}` {record.use}"
                command = command if record.verb else ""
                self.say(
                    f"{event.path} is finished{command}; more --minutes, --steps or --epochs "
                    "continue the training"
                )
            case events.Planned():
                self._show_plan(event)
            case events.Started():
                for group in event.groups if self.args.verbose else ():
                    fact("optimizer", str(group), to=self.err)
                if event.step:
                    self.say(f"resuming after step {event.step:,}")
                self._progress.reset(self._task, completed=event.step)
            case events.Replanned():
                self.steps = event.plan.steps
                self._progress.update(self._task, total=self.steps)
            case events.Ended() if event.finished:
                self._progress.update(self._task, completed=event.step, total=event.step)
            case events.Stepped():
                self._show_step(event)
            case events.Skipped():
                self.say(
                    f"step {event.step:,} was skipped, without an update: {event.why} "
                    f"({event.skipped_in_all:,} skipped so far)"
                )
                self._skipped = f"{event.skipped_in_all:,} skipped  "
            case events.Evaluated():
                sample = " ".join(event.sample.replace("\ufffd", "").split())
                line = Text.assemble(
                    (f"step {event.step:>7,}  ", "bold"),
                    f"val {_format_scores(event.metrics, 3)}  ",
                    (f"| {sample}" if sample else "", "dim"),
                )
                line.truncate(self.err.width - 1)
                self.err.print(line)

    def _show_step(self, event: events.Stepped) -> None:
        """Show the loss and the speed, each an exponential mean without a bias at the start."""
        self._seen += 1
        if self._seen == 1 and self.args.verbose:
            began, imported, planned = self._times
            fact(
                "start",
                f"{imported - began:.1f} s for imports, {planned - imported:.1f} s for the data "
                f"and the plan; the first step after {time.perf_counter() - began:.1f} s",
                to=self.err,
            )
        share = max(1 - SMOOTHING, 1 / self._seen)
        self._loss += share * (event.loss - self._loss)
        self._speed += share * (event.units_per_second - self._speed)
        status = f"loss {self._loss:.3f}  {self._skipped}{self._speed:,.0f} {self._unit}/s  "
        self._progress.update(self._task, completed=event.step, description=status)

    def show_stop(self, event: events.Ended, command: str) -> None:
        """Show that the run was saved, and the command that resumes it."""
        if event.step < self.steps:
            self.say(f"stopped and saved after step {event.step:,} of {self.steps:,}; to resume:")
        else:
            model = self.planned.directory.model
            self.say(f"stopped before the final score; the model is in {model}; to score it:")
        self.err.print(f"  {command}")

    def show_end(self, ended: events.Ended | events.AlreadyFinished) -> None:
        """Show how good the model is, samples, its size, and what to do next."""
        if isinstance(ended, events.AlreadyFinished):
            return
        directory, options = self.planned.directory, self.planned.options
        publisher, data = self.planned.publisher, self.planned.data
        out, config = console(), self.planned.config
        if self.args.format == "json":
            where = {"run": str(directory.path), "model": str(directory.model), "steps": ended.step}
            counts = {"parameters": config.parameter_count()}
            counts["trained"] = data.n_trained or config.parameter_count()
            print(json.dumps(where | counts | ended.metrics))
            return
        showcase = publisher.show(directory.path, directory.model)
        for title, text in showcase.samples:
            out.print(Text(f"--- {title}", "bold"))
            out.print(Text(f"{text}\n"))
        seen = ended.step * self._batch_units
        if data.text_tokens is not None and seen < READABLE and options.start is None:
            self.say(f"the model was trained on only {seen:,} tokens: its texts may be poor")
        scored_on = "the examples trained on" if data.memorizes else "held-out data"
        if ended.scored is not None:
            scored = format_count(ended.scored, data.unit.removesuffix("s"))
            scored_on = f"{scored} of the {scored_on.removeprefix('the ')}; --score all takes all"
        elif data.memorizes:
            memorized = ended.metrics["val_loss"] < MEMORIZED_NATS
            scored_on += ", which are "
            scored_on += "memorized" if memorized else "not memorized yet: train for more --steps"
        else:
            scored_on = f"all {scored_on}"
        score = f"{'' if data.memorizes else 'validation '}{_format_scores(ended.metrics, 4)}, on "
        score += scored_on
        sample_loss = f"loss {ended.sample_nats:.4f}"
        if sample_loss not in score:
            score += f"; {sample_loss} on the part scored during training"
        fact("score", score, to=out)
        if showcase.accuracy:
            fact("in words", showcase.accuracy, to=out)
        fact("model", _count_parameters(config, publisher), to=out)
        loads = ", which transformers loads too" if publisher.transformers_class else ""
        fact("saved in", f"{directory.model}{loads}", to=out)
        steps = [f"{program()} {command}" for command in showcase.commands]
        steps += showcase.python.splitlines()
        if steps:
            out.print(Text("\nnext", "bold"))
            out.print("\n".join(f"  {step}" for step in steps))


def _count_parameters(config: GPTConfig, publisher: Publisher) -> str:
    """Return the parameter count and what predicts."""
    return f"{config.parameter_count():,} parameters; {publisher.describe()}"


def _format_scores(metrics: Mapping[str, float], digits: int) -> str:
    names = {key: key.removeprefix("val_").replace("_", " ") for key in metrics}
    return ", ".join(f"{names[key]} {value:.{digits}f}" for key, value in metrics.items())
