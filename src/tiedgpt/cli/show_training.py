"""What a person sees of a training run: the plan, a progress bar, samples, and the end."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from tiedgpt.cli.source import program
from tiedgpt.core.config import GPTConfig
from tiedgpt.infer import Engine
from tiedgpt.train.blocks import decide
from tiedgpt.train.events import (
    Ended,
    Evaluated,
    Event,
    Replanned,
    Skipped,
    Started,
    Stepped,
    Untied,
)
from tiedgpt.train.memory import memory_line
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.parallel import World
from tiedgpt.train.plan import Plan
from tiedgpt.train.run_directory import RunDirectory
from tiedgpt.train.tasks.labelled import Labelled
from tiedgpt.train.tasks.language import LanguageModelling
from tiedgpt.weights.huggingface import TIEDGPT, model_type_of

FINAL_SAMPLE_TOKENS = 160
SMOOTHING = 0.9


class PatientConsole(Console):
    """A console whose reader may go away: training goes on without being shown."""

    def on_broken_pipe(self) -> None:
        """Say no more."""
        self.quiet = True
        sys.stderr = sys.stdout = open(os.devnull, "w")


class Display:
    """Progress on stderr, results on stdout."""

    def __init__(self, out: Path, *, silent: bool = False) -> None:
        self.out = out
        self.err = PatientConsole(stderr=True, highlight=False, quiet=silent)
        self._smooth: float | None = None
        self._validated = self._skipped = ""

    def say(self, text: str) -> None:
        """Show a line of progress."""
        self.err.print(escape(text), soft_wrap=not self.err.is_terminal)

    @contextlib.contextmanager
    def bar(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Show a bar while text is encoded, or rates are tried."""
        with Progress(what, BarColumn(bar_width=None), console=self.err) as progress:
            task = progress.add_task("", total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)

    def plan(
        self,
        options: TrainOptions,
        plan: Plan,
        task: LanguageModelling | Labelled,
        world: World,
    ) -> None:
        """Show what was chosen."""
        for note in task.notes:
            self.say(note)
        config, where = task.config, str(world.device)
        if world.device.type == "cpu":
            where = f"cpu, {torch.get_num_threads()} threads"
        if world.size > 1:
            where += f", in {world.size} processes"
        parts = math.ceil(world.share(plan.batch_size) / plan.micro_batch)
        rows = f" x {task.row_units}" if task.row_units > 1 else ""
        examples = len(task.train) if isinstance(task, Labelled) else task.encoded.train.tokens
        epochs = plan.growth(task.row_units).units_before(plan.steps) / max(1, examples)
        source = ", ".join(options.data) or "the documentation inside this Python"
        described = task.describe()
        kind = next(iter(described))
        self.say(
            f"{kind:<9} {source}: {described[kind]}\n"
            f"tokens    {described['tokens']}\n"
            f"model     {options.start or options.size}: {config.n_layer} blocks of width "
            f"{config.n_embd}, {config.n_head} heads, {config.n_positions} positions\n"
            f"          {_parameters(config, described)}\n"
            f"training  {plan.steps:,} steps of {plan.batch_size}{rows} {task.unit}"
            f"{f' in {parts} parts' if parts > 1 else ''} ({epochs:.1f} epochs), "
            f"peak rate {plan.lr:g} ({plan.schedule}), products in {plan.dtype} on {where}\n"
            f"          validated every {plan.eval_every} steps on about "
            f"{plan.eval_batches * plan.micro_batch * task.row_units:,} {task.unit}, at the end "
            "on all"
        )
        changes = {
            "batches grow for": plan.batch_warmup,
            "rows grow for": plan.length_warmup,
            "untied after": plan.untie_at,
        }
        for what, steps in changes.items():
            if steps:
                self.say(f"          {what} {steps:,} steps")
        if plan.memory is not None:
            self.say(f"memory    {memory_line(plan)}")
        elif plan.recompute == "blocks":
            self.say("memory    blocks are computed again in backward")
        if (lacks := decide(options.compile, world.device)[1]) is not None:
            self.say(lacks)

    @contextlib.contextmanager
    def training(self, plan: Plan) -> Iterator[None]:
        """Show a bar while steps are done."""
        columns = (
            TextColumn("training"), BarColumn(bar_width=None),
            TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self.err) as self._progress:
            self._task = self._progress.add_task("", total=plan.steps)
            yield

    def event(self, event: Event) -> None:
        """Show something that happened in training."""
        for note in getattr(event, "notes", ()):
            self.say(note)
        match event:
            case Started():
                for group in event.groups:
                    self.say(f"          {group}")
                if event.step:
                    self.say(f"going on after step {event.step:,}")
                self._progress.reset(self._task, completed=event.step)
            case Replanned():
                self._progress.update(self._task, total=event.plan.steps)
            case Stepped():
                before = event.loss if self._smooth is None else self._smooth
                self._smooth = SMOOTHING * before + (1 - SMOOTHING) * event.loss
                status = (
                    f"loss {self._smooth:.3f}{self._validated}{self._skipped}  "
                    f"{event.units_per_second:,.0f}/s"
                )
                self._progress.update(self._task, completed=event.step, description=status)
            case Skipped():
                self.say(
                    f"step {event.step:>6,}  skipped, the weights stay: {event.why} "
                    f"({event.skipped_in_all:,} so far)"
                )
                self._skipped = f"  {event.skipped_in_all:,} skipped"
            case Untied():
                self.say(f"step {event.step:>6,}  untied: a head begins as W's copy")
            case Evaluated():
                self._validated = f"  val {event.score.nats:.3f}"
                line = Text(f"step {event.step:>6,}  val {_scored(event.metrics, 3)}")
                line.append("  | " + " ".join(event.sample.split()))
                line.truncate(self.err.width - 1)
                self.err.print(line)

    def finished(
        self,
        directory: RunDirectory,
        options: TrainOptions,
        task: LanguageModelling | Labelled,
        ended: Ended,
    ) -> None:
        """Show how good the model is, samples, its size, and what to do next."""
        out = PatientConsole(highlight=False, soft_wrap=True)
        config = task.config
        if isinstance(task, Labelled):
            theirs = task.head_class.class_in_transformers(config) is not None
            steps = _next_in_python(task, directory.model)
        else:
            prompt = "" if options.data else "Return a new"
            config = _show_samples(out, directory, prompt)
            theirs = model_type_of(config) is not TIEDGPT
            how = f' --prompt "{prompt}"' if prompt else ""
            steps = (
                f"next:\n  {program()} generate {self.out}{how}\n"
                f"  {program()} plot {self.out}\n"
                f"  {program()} tie show {self.out}\n"
                f"  {program()} train your.txt --size small --minutes 10"
            )
        loads = ", which transformers loads too" if theirs else ""
        out.print(
            f"validation {_scored(ended.metrics, 4)}\n"
            f"{_parameters(config, task.describe(config))}\n"
            f"saved in {directory.model}{loads}\n\n{steps}",
            markup=False,
        )


def _parameters(config: GPTConfig, described: Mapping[str, str]) -> str:
    """Return the parameter count and what predicts."""
    return f"{config.parameter_count():,} parameters; {described['predicts']}"


def _scored(metrics: Mapping[str, float], digits: int) -> str:
    names = {key: key.removeprefix("val_").replace("_", " ") for key in metrics}
    return ", ".join(f"{names[key]} {value:.{digits}f}" for key, value in metrics.items())


def _next_in_python(task: Labelled, model: Path) -> str:
    """Return how the head is used."""
    head = task.head_class.__name__
    names = (head, *(name for name in ("best_spans", "pad") if name in task.use))
    return (
        "next, in Python:\n"
        "  from tiedgpt import Tokenizer\n"
        f"  from tiedgpt.heads import {', '.join(names)}\n"
        f"  head = {head}.from_pretrained({str(model)!r})\n"
        f"  tokenizer = Tokenizer.from_pretrained({str(model)!r})\n"
        f"  {task.use}"
    )


def _show_samples(out: Console, directory: RunDirectory, prompt: str) -> GPTConfig:
    """Show two texts that the model wrote; return its config."""
    engine = Engine(directory.model, backend="torch", slots=1)
    config = engine.model.config
    for number, begin in enumerate(("", prompt)):
        text = engine.generate(
            begin or [config.bos_token_id or 0],
            max_new_tokens=min(FINAL_SAMPLE_TOKENS, config.n_positions),
            temperature=0.7,
            top_k=40,
            seed=number,
            context_end="slide",
        ).text
        out.rule(f"sample {number + 1}" + (f": from {begin!r}" if begin else ""))
        out.print(begin + text.rstrip(), markup=False)
    out.rule()
    return config
