"""Tokens a second with drafts from the text itself, and without, on the CPU kernels.

    python bench/speculation.py [--size gpt2] [--classes fp32 bf16 int8 4-bit] [--batch 1 8]
                                [--texts ...] [--rounds 7]

What drafts gain depends on the text alone, and random weights copy nothing. So position embeddings
are put into the model that say, at each position, which token comes next: its greedy text is then
known, and every product is done as ever. The texts, 256 tokens after a prompt of 256:

    copies       the prompt again: as far as drafts can help
    edits        the prompt again, one token in 16 replaced by another
    snatches     4 to 8 tokens from anywhere in the prompt, then 4 new ones, and so on
    misleads     12 tokens thrown like dice: much has occurred before, and another token follows
    draws        the random weights' own text, drawn at temperature 1: nothing repeats

Drafts and no drafts take turns in one run; ratios are medians over rounds. Only steps are timed in
which prompts have been read. Tokens a step: those of one sequence, 1 without drafts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from safetensors.numpy import load_file

from formats import add_options, files_of
from tiedgpt.infer import GenerationConfig
from tiedgpt.infer.packed_session import PackedRunner
from tiedgpt.infer.scheduler import Request, Scheduler
from tiedgpt.infer.sequence import SequenceState, decode
from tiedgpt.weights.formats.packed import PackedModel, open_packed
from turns import cores, facts, in_turn, keep, per_second, show
from ways import CLASSES

PROMPT = 256
LOUD = 50.0
"""Times a token's row of W: what a position says drowns what the blocks say."""
IDS = 50_000
DRAWS = "draws"


def copies(dice: random.Random, prompt: list[int], n: int) -> list[int]:
    return [prompt[at % PROMPT] for at in range(n)]


def edits(dice: random.Random, prompt: list[int], n: int) -> list[int]:
    return [
        dice.randrange(IDS) if dice.random() < 1 / 16 else prompt[at % PROMPT] for at in range(n)
    ]


def snatches(dice: random.Random, prompt: list[int], n: int) -> list[int]:
    text: list[int] = []
    while len(text) < n:
        start = dice.randrange(PROMPT - 8)
        text += prompt[start : start + dice.randint(4, 8)]
        text += [dice.randrange(IDS) for _ in range(4)]
    return text[:n]


def misleads(dice: random.Random, prompt: list[int], n: int) -> list[int]:
    return [dice.choice(prompt[:12]) for _ in range(n)]


TEXTS: dict[str, Callable[[random.Random, list[int], int], list[int]]] = {
    "copies": copies,
    "edits": edits,
    "snatches": snatches,
    "misleads": misleads,
}


@dataclass(frozen=True)
class Turn:
    """What one turn was."""

    seconds: float
    tokens: int
    steps: int
    ids: list[list[int]]


def saying(model: PackedModel, rows: np.ndarray, text: list[int]) -> PackedModel:
    """Return a model whose greedy text is this one; rows (V, D) are those of W."""
    wpe = np.zeros_like(model.arrays["wpe"])
    wpe[: len(text) - 1, : rows.shape[1]] = LOUD * rows[text[1:]]
    return replace(model, arrays=model.arrays | {"wpe": wpe})


def turn(runner: PackedRunner, prompt: list[int], batch: int, config: GenerationConfig) -> Turn:
    """Let `batch` sequences run; time what comes after their prompts."""
    scheduler = Scheduler(runner.session(n_slots=batch, capacity=PROMPT + config.max_new_tokens))
    texts = [
        SequenceState(prompt, config, model=runner.config, copies=copy) for copy in range(batch)
    ]
    for text in texts:
        scheduler.add(Request(partial(decode, sequence=text), prompt=prompt, sequence=text))
    while not all(text.new_ids for text in texts):
        scheduler.step()
    read = sum(len(text.new_ids) for text in texts)
    steps, began = 0, time.perf_counter()
    while scheduler.running or scheduler.waiting:
        scheduler.step()
        steps += 1
    seconds = time.perf_counter() - began
    ids = [text.new_ids for text in texts]
    return Turn(seconds, sum(map(len, ids)) - read, steps, ids)


def one_text(
    text: str, model: PackedModel, rows: np.ndarray, batch: int, given: argparse.Namespace
) -> dict[str, object]:
    """Measure a text with drafts and without; return a row of results."""
    dice, n = random.Random(0), given.tokens
    prompt = dice.sample(range(IDS), PROMPT)
    if text == "misleads":
        prompt = [dice.choice(prompt[:12]) for _ in range(PROMPT)]
    expected = [] if text == DRAWS else TEXTS[text](dice, prompt, n)
    if text != DRAWS:
        model = saying(model, rows, prompt + expected)
    runner = PackedRunner(model, threads=given.threads)
    asked = GenerationConfig(max_new_tokens=n, temperature=1.0 if text == DRAWS else 0.0, seed=0)
    configs = {"plain": asked, "drafts": replace(asked, speculate="ngram")}
    last: dict[str, Turn] = {}

    def way(name: str) -> float:
        last[name] = turn(runner, prompt, batch, configs[name])
        return last[name].seconds

    seconds = in_turn({name: (lambda name=name: way(name)) for name in configs}, given.rounds)
    if last["plain"].ids != last["drafts"].ids or (expected and last["plain"].ids[0] != expected):
        raise SystemExit(f"{text}: not the text that it should be")
    ratios = [p / d for p, d in zip(seconds["plain"], seconds["drafts"], strict=True)]
    return {
        "text": text,
        "sequences": batch,
        "tokens/s": per_second(seconds, last["plain"].tokens),
        "drafts are faster by (median of ratios)": round(statistics.median(ratios), 3),
        "lowest and highest ratio": [round(min(ratios), 3), round(max(ratios), 3)],
        "tokens a step": round(last["drafts"].tokens / batch / last["drafts"].steps, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--texts", nargs="+", choices=[*TEXTS, DRAWS], default=[*TEXTS, DRAWS])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=cores())
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.tokens = 1, 64
    with files_of(given) as files:
        rows = load_file(files.hf / "model.safetensors")["transformer.wte.weight"]
        for name in given.classes:
            model = open_packed(files.packed(CLASSES[name][0]))
            for batch in given.batch:
                found = [one_text(text, model, rows, batch, given) for text in given.texts]
                for row in found:
                    keep("speculation", {**facts(given), "class": name, **row}, given.quick)
                show_all(f"{name}, {batch} sequences", found)


def show_all(title: str, found: list[dict[str, object]]) -> None:
    """Print a table: a line for each text."""
    of = "tokens/s"
    show(
        title,
        {
            str(row["text"]): (
                row[of]["plain"], row[of]["drafts"],  # type: ignore[index]
                row["drafts are faster by (median of ratios)"], row["tokens a step"],
            )
            for row in found
        },
        ("plain tokens/s", "with drafts", "ratio", "tokens a step"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
