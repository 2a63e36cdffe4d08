"""Measure the loss of quality by the CPU kernels' precisions, against torch in fp32.

    python bench/quality.py MODEL TEXT [--tokens 20000] [--forms fp32 bf16 int8 int4]
        [--calibrate TEXT] [--llama Q4_0 Q4_K_M]

The text is read in windows of the whole context, one after the other, a token predicted from all
before it in its window. KL is sum p log(p/q) of a prediction in nats, p torch's and q the kernels'.
--calibrate adds int4 calibrated on a text, which must be another. --llama adds llama.cpp's types.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import tempfile
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
from tiedgpt.weights.convert import convert
from tiedgpt.weights.formats.packed.calibration import sample_ids
from tiedgpt.weights.formats.packed.panels import PRECISIONS
from tiedgpt.weights.formats.packed.writer import pack_gpt
from tiedgpt.weights.load import Loaded, load

AT_ONCE = 128
"""Tokens whose scores (n, V) are held."""


@dataclass
class Tally:
    """Measurements of one precision, a number for each predicted token."""

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
        """Return the printed row."""
        kl = np.array(self.divergence)
        return {
            "MB": round(self.megabytes, 1),
            "perplexity": round(float(np.exp(np.mean(self.nats))), 4),
            "KL, mean": float(f"{kl.mean():.3g}"),
            "KL, 99 % below": float(f"{np.quantile(kl, 0.99):.3g}"),
            "same greedy token": round(float(np.mean(self.same_choice)), 5),
        }


class Llama:
    """llama.cpp's context for one of its types, as far as `measure` uses a session."""

    def __init__(self, gguf: Path, kind: str, capacity: int) -> None:
        import llama_cpp as c

        logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)
        path = gguf.with_name(f"{kind}.gguf")
        asked = c.llama_model_quantize_default_params()
        asked.ftype = getattr(c, f"LLAMA_FTYPE_MOSTLY_{kind}")
        assert c.llama_model_quantize(str(gguf).encode(), str(path).encode(), asked) == 0
        options = c.llama_context_default_params()
        options.n_ctx = options.n_batch = capacity + -capacity % 256
        self.megabytes = path.stat().st_size / 1e6
        model = c.llama_model_load_from_file(str(path).encode(), c.llama_model_default_params())
        self.c, self.context = c, c.llama_init_from_model(model, options)
        self.n_vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
        self.capacity, self.length = capacity, 0
        self.batch = c.llama_batch_init(AT_ONCE, 0, 1)

    def cut(self, slot: int, length: int) -> None:
        """Forget everything."""
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), False)
        self.length = 0

    def read(self, slots: list[int], parts: list[list[int]], *, every: bool) -> list[NDArray]:
        """Return the logits (n, V) after each of n ids of the one part."""
        batch, (ids,) = self.batch, parts
        batch.n_tokens = len(ids)
        for at, id in enumerate(ids):
            batch.token[at], batch.pos[at], batch.logits[at] = id, self.length + at, 1
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
        assert self.c.llama_decode(self.context, batch) == 0
        self.length += len(ids)
        logits = self.c.llama_get_logits(self.context)
        return [np.ctypeslib.as_array(logits, shape=(len(ids), self.n_vocab)).copy()]


def llama_sessions(loaded: Loaded, tokenizer: Tokenizer, kinds: list[str], capacity: int):
    """Return llama.cpp's sessions by name; the files are deleted after opening."""
    sessions = {}
    if kinds:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "model.gguf")
            convert(loaded, path, "gguf", tokenizer=tokenizer, precision="fp32")
            sessions = {f"llama {kind}": Llama(path, kind, capacity) for kind in kinds}
    return sessions


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def measure(sessions: dict[str, Session], tallies: dict[str, Tally], ids: list[int]) -> None:
    """Read the ids by all sessions, window by window; the first is the reference."""
    window = next(iter(sessions.values())).capacity
    for start in range(0, len(ids) - 1, window):
        for session in sessions.values():
            session.truncate(0, 0)
        end = min(start + window, len(ids) - 1)  # the last token is not read
        for first in range(start, end, AT_ONCE):
            part = ids[first : min(first + AT_ONCE, end)]
            targets = np.array(ids[first + 1 : first + 1 + len(part)])
            reference = None
            for name, session in sessions.items():
                scores = log_softmax(session.read([0], [part], all_logits=[0])[0])
                reference = scores if reference is None else reference
                tallies[name].add(reference, scores, targets)


def table(found: dict[str, dict[str, float]]) -> str:
    columns = list(next(iter(found.values())))
    lines = [" " * 16 + "".join(f"{column:>19}" for column in columns)]
    for name, values in found.items():
        lines.append(f"{name:<16}" + "".join(f"{values[column]:>19}" for column in columns))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a model directory with its tokenizer")
    parser.add_argument("text", type=Path, help="a text that the model was not trained on")
    parser.add_argument("--tokens", type=int, default=20_000, help="of the text, at the most")
    parser.add_argument("--forms", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--calibrate", help="a text that int4 is calibrated on, or samples")
    parser.add_argument("--llama", nargs="+", default=[], help="llama.cpp's types, such as Q4_K_M")
    args = parser.parse_args()
    loaded = load(args.model, dtype=torch.float32)
    model, tokenizer = loaded.model, Tokenizer.from_pretrained(args.model)
    ids = tokenizer.encode(args.text.read_text(encoding="utf-8"))[: args.tokens]
    capacity = min(model.config.n_positions, len(ids))
    sessions: dict[str, Session] = {
        "torch fp32": TorchRunner(model).session(n_slots=1, capacity=capacity)
    }
    tallies = {"torch fp32": Tally(sum(p.nbytes for p in model.parameters()) / 1e6)}
    calibrations = dict.fromkeys(args.forms)
    if args.calibrate == "samples":
        calibrations["int4 calibrated"] = sample_ids(model)
    elif args.calibrate:
        calibrations["int4 calibrated"] = tokenizer.encode(Path(args.calibrate).read_text("utf-8"))
    for form, calibration in calibrations.items():
        packed = pack_gpt(model, form.split()[0], calibration=calibration)
        sessions[form] = PackedRunner(packed).session(n_slots=1, capacity=capacity)
        tallies[form] = Tally(packed.nbytes / 1e6)
    for name, session in llama_sessions(loaded, tokenizer, args.llama, capacity).items():
        sessions[name], tallies[name] = session, Tally(session.megabytes)
    measure(sessions, tallies, ids)
    found = {name: tally.summary() for name, tally in tallies.items()}
    print(table(found))
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "model": f"{args.model.name}, {model.config.parameter_count():,} parameters",
        "text": args.text.name,
        "tokens": len(ids) - 1,
        "context": capacity,
        "calibrated on": args.calibrate and Path(args.calibrate).name,
        "precisions": found,
    }
    args.results.mkdir(exist_ok=True)
    with (args.results / f"quality-{result['date']}.jsonl").open("a") as file:
        file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
