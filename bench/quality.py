"""What the CPU kernels' precisions cost a trained model, against torch in fp32 on the same text.

    python bench/quality.py MODEL TEXT [--tokens 20000] [--forms fp32 bf16 int8 int4]

The text is read in windows of the whole context, one after the other, a token predicted from all
before it in its window. KL is sum p log(p/q) of a prediction in nats, p torch's and q the kernels'.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tiedgpt import Tokenizer
from tiedgpt.infer.packed_session import PackedRunner
from tiedgpt.infer.session import Session
from tiedgpt.infer.torch_session import TorchRunner
from tiedgpt.weights.load import load
from tiedgpt.weights.packed_panels import PRECISIONS
from tiedgpt.weights.packed_write import pack_gpt

AT_ONCE = 128
"""Tokens whose scores (n, V) are held."""


@dataclass
class Tally:
    """What is counted of one precision, a number for each predicted token."""

    megabytes: float
    nats: list[float] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)
    same_choice: list[bool] = field(default_factory=list)

    def add(self, p: NDArray[np.float64], q: NDArray[np.float64], targets: NDArray[np.int64]):
        """Count log-probabilities (n, V) of the reference, and of this one, of n targets."""
        self.nats += (-q[np.arange(len(q)), targets]).tolist()
        self.divergence += (np.exp(p) * (p - q)).sum(axis=1).tolist()
        self.same_choice += (p.argmax(axis=1) == q.argmax(axis=1)).tolist()

    def summary(self) -> dict[str, float]:
        """Return what is printed of it."""
        kl = np.array(self.divergence)
        return {
            "MB": round(self.megabytes, 1),
            "perplexity": round(float(np.exp(np.mean(self.nats))), 4),
            "KL, mean": float(f"{kl.mean():.3g}"),
            "KL, 99 % below": float(f"{np.quantile(kl, 0.99):.3g}"),
            "same greedy token": round(float(np.mean(self.same_choice)), 5),
        }


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def measure(sessions: dict[str, Session], tallies: dict[str, Tally], ids: list[int]) -> None:
    """Read the ids by all sessions, window by window; the first is the reference."""
    window = next(iter(sessions.values())).capacity
    for start in range(0, len(ids) - 1, window):
        for session in sessions.values():
            session.cut(0, 0)
        end = min(start + window, len(ids) - 1)  # the last token is not read
        for first in range(start, end, AT_ONCE):
            part = ids[first : min(first + AT_ONCE, end)]
            targets = np.array(ids[first + 1 : first + 1 + len(part)])
            reference = None
            for name, session in sessions.items():
                scores = log_softmax(session.read([0], [part], every=True)[0])
                reference = scores if reference is None else reference
                tallies[name].add(reference, scores, targets)


def table(found: dict[str, dict[str, float]]) -> str:
    columns = list(next(iter(found.values())))
    lines = [" " * 12 + "".join(f"{column:>19}" for column in columns)]
    for name, values in found.items():
        lines.append(f"{name:<12}" + "".join(f"{values[column]:>19}" for column in columns))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a model directory with its tokenizer")
    parser.add_argument("text", type=Path, help="a text that the model was not trained on")
    parser.add_argument("--tokens", type=int, default=20_000, help="of the text, at the most")
    parser.add_argument("--forms", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    model = load(given.model, dtype=torch.float32).model
    text = given.text.read_text(encoding="utf-8")
    ids = Tokenizer.from_pretrained(given.model).encode(text)[: given.tokens]
    capacity = min(model.config.n_positions, len(ids))
    sessions: dict[str, Session] = {
        "torch fp32": TorchRunner(model).session(slots=1, capacity=capacity)
    }
    tallies = {"torch fp32": Tally(sum(p.nbytes for p in model.parameters()) / 1e6)}
    for form in given.forms:
        packed = pack_gpt(model, form)
        sessions[form] = PackedRunner(packed).session(slots=1, capacity=capacity)
        tallies[form] = Tally(packed.nbytes / 1e6)
    measure(sessions, tallies, ids)
    found = {name: tally.summary() for name, tally in tallies.items()}
    print(table(found))
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "model": f"{given.model.name}, {model.config.parameter_count():,} parameters",
        "text": given.text.name,
        "tokens": len(ids) - 1,
        "context": capacity,
        "precisions": found,
    }
    given.results.mkdir(exist_ok=True)
    with (given.results / f"quality-{result['date']}.jsonl").open("a") as file:
        file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
