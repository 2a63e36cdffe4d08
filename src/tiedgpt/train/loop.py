"""The loop: step after step, with evaluations, samples and checkpoints in between.

`train` yields what happens as it happens; whoever iterates shows it. State lives in the model, the
optimizer and the step number alone, so a run that stops and goes on equals one that never stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice

import torch

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.data import Batches, Shards, in_order, open_encoded
from tiedgpt.errors import CorruptInputError, DivergedError
from tiedgpt.evaluate.perplexity import Score, score
from tiedgpt.infer import Engine
from tiedgpt.text import Tokenizer
from tiedgpt.train.checkpoint import load_newest, save_checkpoint
from tiedgpt.train.optim import Group, learning_rate, optimizers, parameter_groups
from tiedgpt.train.plan import Plan
from tiedgpt.train.planning import FINAL_EVALUATION_TOKENS
from tiedgpt.train.run_directory import RunDirectory
from tiedgpt.train.step import train_step

SAMPLE_TOKENS = 48


@dataclass(frozen=True)
class Started:
    """The model stands; `step` steps were done by earlier calls."""

    model: GPT
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
    tokens: int
    """Tokens trained on so far."""
    tokens_per_second: float


@dataclass(frozen=True)
class Evaluated:
    """The model was scored on validation text, and continued an empty text."""

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
    config: GPTConfig,
    plan: Plan,
    tokenizer: Tokenizer,
    device: torch.device,
    *,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Train to the end of the plan from wherever the run's directory stands.

    Raises `DivergedError` where loss or gradient leave the finite numbers; the last checkpoint is
    kept.
    """
    torch.manual_seed(plan.seed)
    model = GPT(config).to(device).train()
    groups = parameter_groups(model, matrices=plan.optimizer, weight_decay=plan.weight_decay)
    rules = optimizers(groups, lr=plan.lr)
    state, notes = load_newest(run.checkpoints, model, rules)
    step = 0 if state is None else state["step"]
    run.cut_metrics(step)
    yield Started(model, groups, step, notes)
    saved_at = step

    shards, held_out = _open_data(run)
    batches = Batches(
        shards, batch_size=plan.batch_size, n_positions=config.n_positions, seed=plan.seed
    )
    byte_lengths = tokenizer.byte_lengths()
    tokens_per_step = plan.batch_size * config.n_positions

    def evaluate(n_batches: int) -> Score:
        require_finite()
        windows = in_order(held_out, batch_size=plan.micro_batch, n_positions=config.n_positions)
        found = score(model, islice(windows, n_batches), byte_lengths, autocast=plan.autocast)
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

    def publish() -> None:
        model.save_pretrained(run.model)
        tokenizer.save_pretrained(run.model)

    while step < plan.steps and not stop_requested():
        began = time.perf_counter()
        lr = learning_rate(step, peak=plan.lr, warmup=plan.warmup, steps=plan.steps)
        for group in (group for rule in rules for group in rule.param_groups):
            group["lr"] = lr
        try:
            result = train_step(model, rules, batches.batch(step), plan)
        except DivergedError as error:
            raise DivergedError(_diagnosis(run, error, step + 1, saved_at)) from None
        step += 1
        seconds = time.perf_counter() - began
        stepped = Stepped(
            step=step,
            **asdict(result),
            lr=lr,
            tokens=step * tokens_per_step,
            tokens_per_second=tokens_per_step / seconds,
        )
        run.write_metrics(asdict(stepped))
        yield stepped
        if step % plan.eval_every == 0 and step < plan.steps:
            partly = evaluate(plan.eval_batches)
            run.write_metrics({"step": step, **_val(partly)})
            yield Evaluated(step, partly, _sample(model, tokenizer, plan.seed))
        if step % plan.save_every == 0 and step < plan.steps:
            save()
            saved_at = step

    finished = step >= plan.steps
    if step > saved_at or finished:
        save()
    final = None
    if finished:
        rows = max(1, FINAL_EVALUATION_TOKENS // config.n_positions // plan.micro_batch)
        final = evaluate(rows)
    if step:
        publish()
    if final is not None:  # the last thing that is written: with it the run is finished
        run.write_metrics({"step": step, "final": True, **_val(final)})
    yield Ended(step, finished, final)


def _open_data(run: RunDirectory) -> tuple[Shards, Shards]:
    """Open both sides; they hold what was counted when they were written."""
    encoded = open_encoded(run.data)
    opened = []
    for side, counts in (("train", encoded.train), ("val", encoded.val)):
        shards = Shards.in_directory(run.data, side)
        if len(shards) != counts.tokens:
            raise CorruptInputError(
                f"{run.data} holds {len(shards):,} {side} tokens and {counts.tokens:,} were "
                "written: shards are missing or changed; train in another --out"
            )
        opened.append(shards)
    return opened[0], opened[1]


def _diagnosis(run: RunDirectory, error: Exception, step: int, saved_at: int) -> str:
    kept = (
        f"the state after step {saved_at} is kept in {run.checkpoints}"
        if saved_at
        else "nothing was saved yet"
    )
    return f"{error} at step {step}; {kept}: train again with a lower --lr in another --out"


def _val(score: Score) -> dict[str, float]:
    return {"val_loss": score.nats, "val_bits_per_byte": score.bits_per_byte}


def _sample(model: GPT, tokenizer: Tokenizer, seed: int) -> str:
    """Return how the model begins a text; no random stream of the training is touched."""
    engine = Engine(model, tokenizer=tokenizer)
    start = [model.config.bos_token_id or 0]
    return engine.generate(
        start, max_new_tokens=SAMPLE_TOKENS, temperature=0.8, top_k=50, seed=seed
    ).text
