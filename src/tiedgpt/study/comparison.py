"""Tied against untied: the whole study, from a text to its report, in a directory that goes on.

study.json               what decides the trainings, and what each finished one found
NAME-seed-N/model/       a trained GPT, for `tiedgpt inspect`
report.md, report.html   what was found; figures/ holds the pictures of the first
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tiedgpt import __version__
from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.data import Corpus, Shards, encode_corpus, plan_split, python_documentation
from tiedgpt.data.split import digest
from tiedgpt.errors import UserError
from tiedgpt.evaluate.intervals import t_interval
from tiedgpt.files import read_json, write_json, writing
from tiedgpt.plots.figure import require_figures
from tiedgpt.study.models import NAMES
from tiedgpt.study.training import BATCH_SIZE, GROUPS, Numbers, Setting, train
from tiedgpt.text import Tokenizer

STEPS = 600
"""About ten minutes for twelve trainings on two cores."""
SHAPE: Numbers = {
    "n_positions": 128, "n_embd": 96, "n_layer": 2, "n_head": 3,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
VOCABULARY = 300, 2048
"""The smallest and the largest."""
CHARACTERS_A_TOKEN = 500
"""Of text for each token of the vocabulary, as far as that allows."""
RECORD = "study.json"
Row = tuple[str, ...]


@dataclass(frozen=True)
class Study:
    """What was found: `runs` has each training's numbers, by model and in the order of the seeds.

    Losses are in nats a token. A difference is a model's loss less the tied GPT's of the same seed:
    above 0 the tied one is better.
    """

    setting: Setting
    seeds: tuple[int, ...]
    runs: dict[str, list[Numbers]]

    def values(self, name: str, *keys: str) -> np.ndarray:
        """Return (S, ...) a model's numbers under nested keys, one row for each seed."""
        return np.array([reduce(operator.getitem, keys, run) for run in self.runs[name]])

    def differences(self, name: str, *keys: str) -> np.ndarray:
        """Return (S, ...) how much more such numbers are than the tied GPT's of the same seed."""
        return self.values(name, *keys) - self.values("tied", *keys)

    def conclusion(self) -> str:
        """Return in one sentence what the differences of the GPTs show, with their intervals."""
        found = []
        others = {"untied": "untied GPT", "untied-equal": "untied GPT of its size"}
        for name, other in others.items():
            mean, low, high = over_seeds(self.differences(name, "loss"))
            shows = f"the {other} is {'worse' if mean > 0 else 'better'}"
            if low <= 0 <= high:
                shows = f"no difference from the {other} is shown"
            found.append(f"{shows} ({mean:+.3f} nats, 95 % interval {low:+.3f} to {high:+.3f})")
        setting = self.setting
        tokens = setting.steps * BATCH_SIZE * setting.config.n_positions
        return (
            f"Measured against the tied GPT, with {len(self.seeds)} seeds of "
            f"{tokens / len(setting.train):.1f} passes over this text: {' and '.join(found)}."
        )

    def table(self) -> tuple[Row, list[Row]]:
        """Return the columns and the rows that sum the models up."""
        rows: list[Row] = []
        for name, label in NAMES.items():
            less = "" if name == "tied" else with_interval(self.differences(name, "loss"), "+.4f")
            loss = with_interval(self.values(name, "loss"))
            rows.append((label, f"{self.runs[name][0]['parameters']:,}", loss, less))
        return ("model", "parameters", "loss, nats a token", "less the tied GPT's"), rows

    def as_dict(self) -> Numbers:
        """Return the numbers behind the report, as JSON holds them: mean, low, high and all."""
        models: Numbers = {name: {"runs": runs} for name, runs in self.runs.items()}
        for name, model in models.items():
            model["loss"] = over_seeds(self.values(name, "loss"))
            model["difference"] = over_seeds(self.differences(name, "loss"))
        budget = {"seeds": self.seeds, "steps": self.setting.steps}
        return {"conclusion": self.conclusion(), **budget, "models": models}


def over_seeds(values: np.ndarray) -> tuple[float, float, float]:
    """Return the mean of a number (S,) over the seeds, and the ends of its 95 % interval."""
    return float(values.mean()), *t_interval(values.tolist())


def with_interval(values: np.ndarray, form: str = ".4f") -> str:
    """Return the mean of a number (S,) and half its 95 % interval, as a table shows it."""
    mean, low, high = over_seeds(values)
    return f"{mean:{form}} +- {(high - low) / 2:.4f}"


def tied_vs_untied(
    corpus: Corpus | None = None,
    out: str | Path = "runs/tied-vs-untied",
    *,
    seeds: Sequence[int] = (0, 1, 2),
    steps: int = STEPS,
    say: Callable[[str], None] = lambda text: None,
) -> Study:
    """Train the four models once for each seed, measure them, and write the report into `out`.

    `corpus` None is Python's documentation. In an `out` that holds the same study, the trainings
    that are finished are kept. `say` is told what happens.

    Raises `UserError` for fewer than two seeds, a text that is too small, and an `out` that cannot
    be written or holds another study; `CorruptInputError` and `NoRoomError` for files.
    """
    out, seeds = Path(out), tuple(seeds)
    if len(set(seeds)) < 2 or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        given = " ".join(map(str, seeds))
        raise UserError(
            f"seeds={given!r}: an interval needs two or more, all different and from 0",
            hint="use 0 1 2",
        )
    if steps < 1:
        raise UserError(f"steps must be at least 1, got {steps}")
    require_figures(out / "loss.svg")
    corpus = python_documentation() if corpus is None else corpus
    record = _record(out, corpus, steps)
    with TemporaryDirectory(prefix="tiedgpt-", ignore_cleanup_errors=True) as place:
        say("encoding the text")
        setting = _prepare(corpus, Path(place) / "data", steps)
        _train_all(setting, seeds, out, record, say)
    runs = {name: [record["runs"][f"{name}-seed-{seed}"] for seed in seeds] for name in NAMES}
    study = Study(setting, seeds, runs)
    from tiedgpt.study.report import write_report

    write_report(study, out)
    return study


def _record(out: Path, corpus: Corpus, steps: int) -> Numbers:
    """Return what `out` holds of this study, or the record of a new one; nothing is written."""
    text = sha256(b"".join(digest(document.text) for document in corpus)).hexdigest()
    new: Numbers = {"version": __version__, "steps": steps, "sha256_of_text": text, "runs": {}}
    with writing(out):
        holds_something = out.exists() and any(out.iterdir())
    if not holds_something:
        return new
    if not (out / RECORD).exists():
        raise UserError(
            f"{out} is not empty and holds no study", hint="give --out another directory"
        )
    record = new | read_json(out / RECORD)
    for name, value in new.items():
        if name != "runs" and record[name] != value:
            raise UserError(
                f"{out} holds a study of another {name.replace('_', ' ')} ({record[name]}, not "
                f"{value})",
                hint="give the same text and options to resume, or another --out",
            )
    return record


def _prepare(corpus: Corpus, directory: Path, steps: int) -> Setting:
    """Encode the text into a new directory; `UserError` where it is too small."""
    split = plan_split(corpus)
    least, most = VOCABULARY
    size = max(least, min(most, split.characters // CHARACTERS_A_TOKEN))
    tokenizer = Tokenizer.train((part.text for side, part in split if side == "train"), size)
    encode_corpus(split, tokenizer, directory)
    config = GPTConfig(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **SHAPE,
    )
    train_side, val_side = (Shards.in_directory(directory, side) for side in ("train", "val"))
    setting = Setting(config, steps, tokenizer, train_side, val_side)
    enough = len(train_side) > config.n_positions and len(setting.seen) >= GROUPS
    if not enough or not setting.targets.all():
        raise UserError(
            f"the text is too small for a study: of {len(train_side):,} tokens to train on and "
            f"{len(val_side):,} to validate on, not every decile of frequency has a target",
            hint="use more text",
        )
    return setting


def _train_all(
    setting: Setting, seeds: Sequence[int], out: Path, record: Numbers, say: Callable[[str], None]
) -> None:
    """Run the trainings that the record lacks, and write it after each."""
    write_json(out / RECORD, record)
    for seed in seeds:
        for name in NAMES:
            label = f"{name}-seed-{seed}"
            if label in record["runs"]:
                continue
            model, found = train(name, setting, seed)
            if isinstance(model, GPT):
                model.save_pretrained(out / label / "model")
                setting.tokenizer.save_pretrained(out / label / "model")
            record["runs"][label] = found
            write_json(out / RECORD, record)
            say(f"{label}: {setting.steps:,} steps, loss {found['loss']:.4f}")
