"""lm-evaluation-harness through our adapter, and through its own transformers model, in turn.

    python bench/harness.py [--size gpt2] [--kinds choices letters cloze rolling] [--threads 2]

Both read the same fp32 weights on the CPU. The harness's model runs at its best batch size of those
tried, with its cache for continuations of one token, except where texts are scored whole: there it
confuses windows. Each turn has new documents. Needs tiedgpt[eval] and transformers.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

from formats import Files, add_options, files_of, invented
from turns import cores, facts, faster_by, in_turn, keep, per_second, show

BATCHES = (1, 8, 32)
KINDS = {
    "choices": (16, 64, (12,) * 4),
    "letters": (4, 400, (1,) * 4),
    "cloze": (32, 80, (1,)),
    "rolling": (3, 0, (1000,)),
}
"""Documents a turn, tokens of the context, tokens of each continuation: as HellaSwag, MMLU with
examples, LAMBADA and WikiText."""


class Documents:
    """New requests of one kind at each call."""

    def __init__(self, kind: str, encode: Callable[..., list[int]], decode: Callable[..., str]):
        self.kind, self.decode = kind, decode
        self.ids = encode(invented(60_000))
        self.at = itertools.cycle(range(0, len(self.ids) - 2000, 397))

    def text(self, n: int) -> str:
        """Return a text of about n tokens."""
        at = next(self.at)
        return self.decode(self.ids[at : at + n])

    def requests(self) -> list[Any]:
        """Return a turn's requests."""
        from lm_eval.api.instance import Instance

        n, n_context, continuations = KINDS[self.kind]
        made = []
        for number in range(n):
            context = self.text(n_context)
            for letter, length in zip("abcd", continuations, strict=False):
                said = self.text(length) if length > 1 else letter  # " a" is one token
                arguments = (said,) if self.kind == "rolling" else (context, f" {said}")
                made.append(Instance(self.kind, {}, arguments, number))
        return made


def one_kind(kind: str, files: Files, args: argparse.Namespace) -> None:
    """Measure one kind of requests; keep and show it."""
    import torch
    from lm_eval.models.huggingface import HFLM

    from tiedgpt.evaluate.harness import HarnessModel

    torch.set_num_threads(args.threads)
    ours = HarnessModel(str(files.hf), precision="fp32", threads=args.threads)
    theirs = HFLM(
        str(files.hf), device="cpu", dtype="float32", logits_cache=kind != "rolling", batch_size=1
    )
    documents = Documents(kind, ours.tok_encode, ours.engine.tokenizer.decode)

    def timed(model: Any, batch: int = 0) -> float:
        if batch:
            model.batch_size_per_gpu = batch
        score = model.loglikelihood_rolling if kind == "rolling" else model.loglikelihood
        requests = documents.requests()
        began = time.perf_counter()
        score(requests, disable_tqdm=True)
        return time.perf_counter() - began

    tried = {batch: timed(theirs, batch) for batch in BATCHES}
    best = min(tried, key=tried.__getitem__)
    ways = {"ours": lambda: timed(ours), f"harness, {best} at once": lambda: timed(theirs, best)}
    seconds = in_turn(ways, args.rounds)
    row = {
        **facts(args),
        "kind": kind,
        "documents, tokens of context and continuations": KINDS[kind],
        "harness's batch sizes tried (seconds)": {k: round(v, 2) for k, v in tried.items()},
        "documents/s": per_second(seconds, KINDS[kind][0]),
        "ours takes less by (median of ratios)": faster_by(seconds, "ours"),
    }
    keep("harness", row, args.quick)
    ratios = row["ours takes less by (median of ratios)"]
    cells = {way: (rate, ratios.get(way)) for way, rate in row["documents/s"].items()}
    show(kind, cells, ("documents/s", "ours faster by"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--threads", type=int, default=cores())
    args = parser.parse_args()
    if args.quick:
        args.rounds = 1
    with files_of(args) as files:
        for kind in args.kinds:
            one_kind(kind, files, args)


if __name__ == "__main__":
    main()
