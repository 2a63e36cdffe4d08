"""What a person sees of a training run: the plan, a progress bar, samples, and the end."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.cells import set_cell_size
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tiedgpt.cli.program import program
from tiedgpt.cli.training_words import changes, labelled, next_steps, parameters, scored, units
from tiedgpt.core.config import GPTConfig
from tiedgpt.evaluate.perplexity import Score
from tiedgpt.infer import Engine
from tiedgpt.train.blocks import decide
from tiedgpt.train.events import Ended, Evaluated, Event, Skipped, Started, Stepped, Untied
from tiedgpt.train.memory import memory_line
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.parallel import World
from tiedgpt.train.plan import Plan
from tiedgpt.train.run_directory import RunDirectory
from tiedgpt.train.tasks.labelled import Labelled, LabelScore
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

    def __init__(self, out: Path, command: str, *, silent: bool = False) -> None:
        self.out = out
        self.command = command
        self.err = PatientConsole(stderr=True, highlight=False, quiet=silent)
        self._progress: Progress | None = None
        self._smooth: float | None = None
        self._unit = ""
        self._validated = self._skipped = ""

    def say(self, text: str) -> None:
        """Show a line of progress."""
        self.err.print(escape(text), soft_wrap=not self.err.is_terminal)

    @contextlib.contextmanager
    def encoding(self) -> Iterator[Callable[[int, int], None]]:
        """Show a bar while text is encoded."""
        with self._bar("{task.percentage:>3.0f}%") as progress:
            task = progress.add_task("reading text", total=None)
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
        config, self._unit = task.config, task.unit
        device = world.device
        where = device.type if world.size > 1 else str(device)
        if device.type == "cpu":
            where += f", {torch.get_num_threads()} threads"
        if world.size > 1:
            where += f", in {world.size} processes"
        parts = math.ceil(world.share(plan.batch_size) / plan.micro_batch)
        rows = f" x {task.row_units}" if task.row_units > 1 else ""
        seen = plan.growth(task.row_units).units_before(plan.steps)
        epochs = seen / max(1, units(task))
        self.say(
            f"{self._data(options, task)}\n"
            f"model     {options.start or options.size}: {config.n_layer} blocks of width "
            f"{config.n_embd}, {config.n_head} heads, {config.n_positions} positions\n"
            f"          {self._head(task)}\n"
            f"training  {plan.steps:,} steps of {plan.batch_size}{rows} {task.unit}"
            f"{f' in {parts} parts' if parts > 1 else ''} ({epochs:.1f} epochs), "
            f"peak rate {plan.lr:g} ({plan.schedule}), "
            f"products in {plan.dtype} on {where}\n{changes(plan)}"
            f"          validated every {plan.eval_every} steps on about "
            f"{plan.eval_batches * plan.micro_batch * task.row_units:,} {task.unit}, at the end "
            "on all"
        )
        if plan.memory is not None:
            self.say(f"memory    {memory_line(plan, config, task.row_tokens, world)}")
        elif plan.recompute == "blocks":
            self.say("memory    blocks are computed again in backward")
        if (lacks := decide(options.compile, world.device)[1]) is not None:
            self.say(lacks)

    def _data(self, options: TrainOptions, task: LanguageModelling | Labelled) -> str:
        """Return what is trained on, in two lines."""
        source = ", ".join(options.data) or "the documentation inside this Python"
        tokens = f"tokens    {task.tokenizer.kind} vocabulary of {len(task.tokenizer):,}"
        if isinstance(task, Labelled):
            longest = max(len(ids) for _, row in task.train for ids in row.rows)
            return (
                f"examples  {source}: {len(task.train):,}; {len(task.held_out):,} more to validate "
                f"on{labelled(task.examples.labels)}\n{tokens}, the longest row has {longest:,}"
            )
        train, val = task.encoded.train, task.encoded.val
        return (
            f"text      {source}: {train.documents:,} documents, {train.utf8_bytes / 1e6:.2f} MB, "
            f"{train.tokens:,} tokens; {val.tokens:,} more to validate on\n"
            f"{tokens}, {train.utf8_bytes / max(1, train.tokens):.2f} bytes a token"
        )

    def _head(self, task: LanguageModelling | Labelled) -> str:
        """Return what predicts, in a line."""
        if isinstance(task, LanguageModelling):
            return parameters(task.config)
        head = task.head_class.__name__
        return f"{task.config.parameter_count():,} parameters, and a {head} on its states"

    @contextlib.contextmanager
    def training(self, plan: Plan) -> Iterator[None]:
        """Show a bar while steps are done."""
        with self._bar("{task.fields[status]}") as self._progress:
            self._task = self._progress.add_task("training", total=plan.steps, status="")
            yield

    def event(self, event: Event) -> None:
        """Show something that happened in training."""
        assert self._progress is not None
        match event:
            case Started():
                for note in event.notes:
                    self.say(note)
                for group in event.groups:
                    self.say(f"          {group}")
                if event.step:
                    self.say(f"going on after step {event.step:,}")
                self._progress.reset(self._task, completed=event.step)
            case Stepped():
                before = event.loss if self._smooth is None else self._smooth
                self._smooth = SMOOTHING * before + (1 - SMOOTHING) * event.loss
                status = (
                    f"loss {self._smooth:.3f}{self._validated}{self._skipped}  "
                    f"{event.units_per_second:,.0f} {self._unit}/s"
                )
                self._progress.update(self._task, completed=event.step, status=status)
            case Skipped():
                self.say(
                    f"step {event.step:>6,}  skipped, the weights stay: {event.why} "
                    f"({event.skipped_in_all:,} so far)"
                )
                self._skipped = f"  {event.skipped_in_all:,} skipped"
                self._progress.update(self._task, completed=event.step)
            case Untied():
                self.say(f"step {event.step:>6,}  untied: a head begins as W's copy")
            case Ended():
                for note in event.notes:
                    self.say(note)
            case Evaluated():
                self._validated = f"  val {event.score.nats:.3f}"
                line = f"step {event.step:>6,}  val {scored(event.score)}  | "
                room = max(0, self.err.width - len(line) - 1)
                sample = set_cell_size(" ".join(event.sample.split()), room).rstrip()
                self.say(line + sample)

    def interrupted(self, ended: Ended, plan: Plan) -> None:
        """Say what was saved and how to go on."""
        self.say(
            f"stopped and saved after step {ended.step:,} of {plan.steps:,}; to go on:\n"
            f"  {self.command}"
        )

    def finished(
        self,
        directory: RunDirectory,
        options: TrainOptions,
        task: LanguageModelling | Labelled,
        ended: Ended,
    ) -> None:
        """Show how good the model is, samples, its size, and what to do next."""
        out = PatientConsole(highlight=False, soft_wrap=True)
        if isinstance(task, Labelled):
            assert isinstance(ended.score, LabelScore)
            out.print(f"validation {scored(ended.score)} ({ended.score.examples:,} examples)")
            out.print(self._head(task))
            out.print(escape(next_steps(task, directory.model)))
            return
        assert isinstance(ended.score, Score)
        prompt = "" if options.data else "Return a new"
        config = self._samples(out, directory, prompt)
        out.print(
            f"validation loss {ended.score.nats:.4f} nats a token, "
            f"{ended.score.bits_per_byte:.4f} bits per byte ({ended.score.tokens:,} tokens)"
        )
        out.print(parameters(config))
        how = f' --prompt "{prompt}"' if prompt else ""
        theirs = model_type_of(config) is not TIEDGPT
        loads = ", which transformers loads too" if theirs else ""
        out.print(
            f"saved in {directory.model}{loads}\n\nnext:\n"
            f"  {program()} generate {self.out}{how}\n"
            f"  {program()} plot {self.out}\n"
            f"  {program()} tie show {self.out}\n"
            f"  {program()} train your.txt --size small --minutes 10"
        )

    def _samples(self, out: Console, directory: RunDirectory, prompt: str) -> GPTConfig:
        """Show two texts that the model wrote; return its config."""
        engine = Engine(directory.model, backend="torch")
        config = engine.model.config
        for number, begin in enumerate(("", prompt)):
            start = [config.bos_token_id or 0]
            text = engine.generate(
                begin or start,
                max_new_tokens=min(FINAL_SAMPLE_TOKENS, config.n_positions),
                temperature=0.7,
                top_k=40,
                seed=number,
                context_end="slide",
            ).text
            out.rule(f"sample {number + 1}" + (f": from {begin!r}" if begin else ""))
            out.print(escape(begin + text.rstrip()))
        out.rule()
        return config

    def _bar(self, last_column: str) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn(last_column),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}")
            if "status" in last_column
            else TextColumn(""),
            TimeRemainingColumn(),
            console=self.err,
        )
