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
from tiedgpt.core.config import GPTConfig
from tiedgpt.data import EncodedCorpus
from tiedgpt.infer import Engine
from tiedgpt.text import Tokenizer
from tiedgpt.train.loop import Ended, Evaluated, Event, Started, Stepped
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.plan import Plan
from tiedgpt.train.run_directory import RunDirectory

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

    def __init__(self, out: Path, command: str) -> None:
        self.out = out
        self.command = command
        self.err = PatientConsole(stderr=True, highlight=False)
        self._progress: Progress | None = None
        self._smooth: float | None = None

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
        config: GPTConfig,
        plan: Plan,
        encoded: EncodedCorpus,
        tokenizer: Tokenizer,
        device: torch.device,
        notes: list[str],
    ) -> None:
        """Show what was chosen."""
        for note in notes:
            self.say(note)
        train, val = encoded.train, encoded.val
        epochs = plan.steps * plan.batch_size * config.n_positions / max(1, train.tokens)
        source = ", ".join(options.data) or "the documentation inside this Python"
        threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
        parts = math.ceil(plan.batch_size / plan.micro_batch)
        self.say(
            f"text      {source}: {train.documents:,} documents, {train.utf8_bytes / 1e6:.2f} MB, "
            f"{train.tokens:,} tokens; {val.tokens:,} more to validate on\n"
            f"tokens    {tokenizer.kind} vocabulary of {len(tokenizer):,}, "
            f"{train.utf8_bytes / max(1, train.tokens):.2f} bytes a token\n"
            f"model     {options.size}: {config.n_layer} blocks of width {config.n_embd}, "
            f"{config.n_head} heads, {config.n_positions} positions\n"
            f"          {parameters(config)}\n"
            f"training  {plan.steps:,} steps of {plan.batch_size} x {config.n_positions} tokens"
            f"{f' in {parts} parts' if parts > 1 else ''} ({epochs:.1f} epochs), "
            f"peak rate {plan.lr:g}, products in {plan.dtype} on {device}{threads}\n"
            f"          validated every {plan.eval_every} steps on about "
            f"{plan.eval_batches * plan.micro_batch * config.n_positions:,} tokens, at the end on "
            "all"
        )

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
                status = f"loss {self._smooth:.3f}  {event.tokens_per_second:,.0f} tokens/s"
                self._progress.update(self._task, completed=event.step, status=status)
            case Evaluated():
                line = (
                    f"step {event.step:>6,}  val {event.score.nats:.3f} nats, "
                    f"{event.score.bits_per_byte:.3f} bits/byte  | "
                )
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
        self, directory: RunDirectory, options: TrainOptions, config: GPTConfig, ended: Ended
    ) -> None:
        """Show how good the model is, two samples, its size, and what to do next."""
        assert ended.score is not None
        out = PatientConsole(highlight=False, soft_wrap=True)
        engine = Engine(directory.model)
        prompt = "" if options.data else "Return a new"
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
        out.print(
            f"validation loss {ended.score.nats:.4f} nats a token, "
            f"{ended.score.bits_per_byte:.4f} bits per byte ({ended.score.tokens:,} tokens)"
        )
        out.print(parameters(config))
        how = f' --prompt "{prompt}"' if prompt else ""
        out.print(
            f"saved in {directory.model}, which transformers loads too\n\nnext:\n"
            f"  {program()} generate {self.out}{how}\n"
            f"  {program()} tie show {self.out}\n"
            f"  {program()} train your.txt --size small --minutes 10"
        )

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


def parameters(config: GPTConfig) -> str:
    """Return the parameter count and what it counts."""
    shape = f"{config.vocab_size:,} x {config.n_embd}"
    how = (
        f"one matrix of {shape} counted once: it reads and predicts"
        if config.tie_word_embeddings
        else f"a matrix of {shape} reads and another predicts"
    )
    return f"{config.parameter_count():,} parameters; {how}"
