"""Tied against untied: the whole study, from a text to its report, in a directory that goes on.

data/ and tokenizer/     the text, encoded once
study.json               everything that decides the trainings; a second start must agree with it
NAME-seed-N/             result.json; of a GPT model/, and while it trains checkpoint.pt
report.md, report.html   what was found; figures/ holds the pictures of the first
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from tiedgpt import __version__
from tiedgpt.core.config import GPTConfig
from tiedgpt.data import Batches, Corpus, Shards, encode_corpus, plan_split, python_documentation
from tiedgpt.errors import UserError
from tiedgpt.evaluate.intervals import Interval, t_interval
from tiedgpt.files import read_json, write_json, writing
from tiedgpt.plots.figure import require_figures
from tiedgpt.study.models import NAMES, build
from tiedgpt.study.training import (
    GROUPS,
    Data,
    Numbers,
    Setting,
    deciles,
    train,
    train_step,
)
from tiedgpt.text import Tokenizer

SHAPE: Numbers = {"n_positions": 128, "n_embd": 96, "n_layer": 2, "n_head": 3}
NO_DROPOUT: Numbers = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
VOCABULARY = 300, 2048
"""The smallest and the largest."""
CHARACTERS_A_TOKEN = 500
"""Of text for each token of the vocabulary, as far as that allows."""
STEPS_SHARE = 0.8
"""Of the time; the rest is for measuring and for the report."""
TIMED_STEPS = 5
LEAST_STEPS = 24
RECORD = "study.json"


@dataclass(frozen=True)
class Study:
    """What was found: `runs` has each training's numbers, by model and in the order of the seeds.

    A difference is a model's loss less the tied GPT's of the same seed, in nats a token: above 0
    the tied one is better.
    """

    setting: Setting
    seeds: tuple[int, ...]
    train_tokens: int
    val_tokens: int
    target_shares: list[float]
    """Share of the validation targets in each decile."""
    median_counts: list[float]
    """Of the tokens of each decile that occur, in the training text."""
    runs: dict[str, list[Numbers]]

    @property
    def tokens(self) -> int:
        """Tokens that each training saw."""
        return self.setting.steps * self.setting.batch_size * self.setting.config.n_positions

    @property
    def passes(self) -> float:
        """How often each training saw the text."""
        return self.tokens / self.train_tokens

    def loss(self, name: str) -> tuple[float, Interval]:
        """Return a model's mean validation loss and its 95 % interval over the seeds."""
        values = [run["loss"] for run in self.runs[name]]
        return float(np.mean(values)), t_interval(values)

    def difference(self, name: str, decile: int | None = None) -> tuple[float, Interval]:
        """Return the mean difference of a model to the tied GPT, paired by seed."""
        pairs = zip(self.runs[name], self.runs["tied"], strict=True)
        if decile is None:
            values = [one["loss"] - tied["loss"] for one, tied in pairs]
        else:
            values = [one["by_decile"][decile] - tied["by_decile"][decile] for one, tied in pairs]
        return float(np.mean(values)), t_interval(values)

    def conclusion(self) -> str:
        """Return in one sentence what the differences of the GPTs show, with their intervals."""
        parts = []
        for name, other in (
            ("untied", "the untied GPT"),
            ("untied-equal", "an untied GPT of equal size"),
        ):
            mean, (low, high) = self.difference(name)
            numbers = f"{mean:+.3f} nats, 95 % interval {low:+.3f} to {high:+.3f}"
            if low <= 0 <= high:
                parts.append(f"no difference from {other} is shown ({numbers}, which includes 0)")
            else:
                parts.append(f"{other} is {'worse' if mean > 0 else 'better'} ({numbers})")
        return (
            f"Measured against the tied GPT after {self.tokens:,} tokens, {self.passes:.1f} passes "
            f"over this text, with {len(self.seeds)} seeds: {parts[0]}, and {parts[1]}."
        )

    def as_dict(self) -> Numbers:
        """Return the numbers behind the report, as JSON holds them."""
        compared: dict[str, Numbers] = {}
        for name, runs in self.runs.items():
            mean, interval = self.loss(name)
            differences = [self.difference(name, g) for g in (None, *range(GROUPS))]
            compared[name] = {
                "parameters": runs[0]["parameters"],
                "loss": mean,
                "loss_interval": interval,
                "difference": differences[0][0],
                "difference_interval": differences[0][1],
                "difference_by_decile": [difference for difference, _ in differences[1:]],
                "by_seed": [run["loss"] for run in runs],
            }
        return {
            "conclusion": self.conclusion(),
            "seeds": list(self.seeds),
            "steps": self.setting.steps,
            "tokens": self.tokens,
            "passes": self.passes,
            "models": compared,
        }


def tied_vs_untied(
    corpus: Corpus | None = None,
    out: str | Path = "runs/tied-vs-untied",
    *,
    seeds: Sequence[int] = (0, 1, 2),
    minutes: float = 10.0,
    steps: int | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[str, int, int], None] = lambda name, step, steps: None,
) -> Study:
    """Train the four models once for each seed, measure them, and write the report into `out`.

    `corpus` None is Python's documentation. `steps`, of each training, replaces `minutes`, of which
    they are otherwise derived by this machine's pace. A study that was stopped goes on. `say` is
    told what happens, `progress` is given a training's name, its step and all its steps.

    Raises `UserError` for fewer than two seeds, a text that is too small, and an `out` that cannot
    be written or holds another study; `CorruptInputError` and `NoRoomError` for files.
    """
    out, seeds = Path(out), tuple(seeds)
    if len(set(seeds)) < 2 or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        given = " ".join(map(str, seeds))
        raise UserError(
            f"seeds={given!r}: an interval needs two or more, all different and from 0: use 0 1 2"
        )
    if not minutes > 0 or (steps is not None and steps < 1):
        raise UserError("minutes must be above 0, and steps at least 1")
    require_figures(out / "loss.svg")
    corpus = python_documentation() if corpus is None else corpus
    _open(out, corpus, {"version": __version__, "steps_asked": steps, "minutes": minutes})
    data = _prepare(out, corpus, say)
    setting = _setting(out, data, len(seeds), minutes, say)
    runs: dict[str, list[Numbers]] = {name: [] for name in NAMES}
    for seed in seeds:
        for name in NAMES:
            label = f"{name}-seed-{seed}"

            def shown(step: int, label: str = label) -> None:
                progress(label, step, setting.steps)

            runs[name].append(train(name, setting, data, seed, out / label, shown))
    targets = data.val.read(1, len(data.val))
    study = Study(
        setting=setting,
        seeds=seeds,
        train_tokens=len(data.train),
        val_tokens=len(targets),
        target_shares=(np.bincount(data.group[targets], minlength=GROUPS) / len(targets)).tolist(),
        median_counts=[
            float(np.median(data.counts[(data.group == g) & (data.counts > 0)]))
            for g in range(GROUPS)
        ],
        runs=runs,
    )
    from tiedgpt.study.report import write_report

    write_report(study, data, out)
    return study


def _open(out: Path, corpus: Corpus, asked: Numbers) -> None:
    """Make the directory of a new study, or see that it is the same study that goes on."""
    digest = hashlib.sha256()
    for document in corpus:
        digest.update(hashlib.sha256(document.text.encode()).digest())
    asked |= {"sha256_of_text": digest.hexdigest()}
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        others = any(out.iterdir())
    if not (out / RECORD).exists():
        if others:
            raise UserError(f"{out} is not empty and holds no study: give --out another directory")
        write_json(out / RECORD, asked)
    record = read_json(out / RECORD)
    for name, value in asked.items():
        if record.get(name) != value:
            raise UserError(
                f"{out} holds a study of another {name.replace('_', ' ')} ({record.get(name)}, not "
                f"{value}): give the same text and options to go on, or another --out"
            )


def _prepare(out: Path, corpus: Corpus, say: Callable[[str], None]) -> Data:
    """Return the text as tokens, encoded now or by an earlier start."""
    if not (out / "data").exists():
        say("encoding the text")
        split = plan_split(corpus)
        least, most = VOCABULARY
        size = max(least, min(most, split.characters // CHARACTERS_A_TOKEN))
        texts = (document.text for side, document in split if side == "train")
        tokenizer = Tokenizer.train(texts, size)
        tokenizer.save_pretrained(out / "tokenizer")
        encode_corpus(split, tokenizer, out / "data")
    tokenizer = Tokenizer.from_pretrained(out / "tokenizer")
    train_side, val_side = (Shards.in_directory(out / "data", side) for side in ("train", "val"))
    counts = np.bincount(train_side.read(0, len(train_side)), minlength=len(tokenizer))
    data = Data(tokenizer, train_side, val_side, counts, deciles(counts))
    targets = np.bincount(data.group[val_side.read(1, len(val_side))], minlength=GROUPS)
    if len(train_side) <= SHAPE["n_positions"] or (counts > 0).sum() < GROUPS or not targets.all():
        raise UserError(
            f"the text is too small for a study: of {len(train_side):,} tokens to train on and "
            f"{len(val_side):,} to validate on, not every decile of frequency has a target: use "
            "more text"
        )
    return data


def _setting(
    out: Path, data: Data, n_seeds: int, minutes: float, say: Callable[[str], None]
) -> Setting:
    """Return the setting that the record has, or a new one by this machine's pace."""
    record, bos = read_json(out / RECORD), data.tokenizer.bos_token_id
    special: Numbers = {"bos_token_id": bos, "eos_token_id": data.tokenizer.eos_token_id}
    config = GPTConfig(vocab_size=len(data.tokenizer), **SHAPE, **NO_DROPOUT, **special)
    steps = record.get("steps") or record["steps_asked"]
    if steps is None:
        say("measuring this machine")
        pace = n_seeds * sum(_seconds_a_step(name, config, data) for name in NAMES)
        steps = max(LEAST_STEPS, int(STEPS_SHARE * 60 * minutes / pace))
    setting = Setting(config=config, steps=steps)
    write_json(out / RECORD, record | asdict(setting))
    return setting


def _seconds_a_step(name: str, config: GPTConfig, data: Data) -> float:
    """Return the median seconds of a few steps, the first left out."""
    model, setting, seconds = build(name, config, 0), Setting(config=config, steps=1), []
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    sizes = {"batch_size": setting.batch_size, "n_positions": config.n_positions}
    batches = Batches(data.train, **sizes, seed=0)
    for step in range(1 + TIMED_STEPS):
        began = time.perf_counter()
        train_step(model, optimizer, batches.batch(step), setting.lr)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])
