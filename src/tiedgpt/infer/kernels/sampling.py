"""Batched sampling from logits: penalties, filters and a draw, one row per chunk of work.

A row's result depends on that row alone, bit for bit. `rows.py` is what is compiled.
`infer/sampling.py` is the reference in plain numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiedgpt.errors import UserError
from tiedgpt.infer.kernels.arguments import LANES
from tiedgpt.infer.kernels.compile_cache import Kernel
from tiedgpt.infer.kernels.thread_pool import ThreadPool
from tiedgpt.infer.options import GenerationConfig
from tiedgpt.infer.sampling import Choice, Chosen, biases, no_choice

Logits = NDArray[np.float32] | Sequence[NDArray[np.float32]]
"""(N, V), or N arrays (V,); no row is copied that is contiguous."""

ROW = np.dtype(
    [
        *((name, np.int64) for name in ("address", "n_tokens", "token")),
        *((name, np.float64) for name in ("uniform", "temperature", "top_k", "top_p", "min_p")),
        *((name, np.float64) for name in ("typical_p", "repetition", "presence", "frequency")),
        *((name, np.int64) for name in ("seen", "generated", "seen_end", "bias", "bias_end")),
        ("rank", np.int64), ("logprob", np.float64), ("highest", np.float64),
    ]
)  # fmt: skip
"""A row of logits, how its token is chosen, and what comes of it.

From `temperature` to `frequency` they are `GenerationConfig.numbers`. `seen` to `seen_end` are its
ids of prompt and text among those of all rows, `bias` to `bias_end` its ids whose logits are
changed. A `token` that is not negative is not chosen but ranked.
"""
NOT_KNOWN = (0, 0.0, 0.0)
"""Rank, logprob and highest logit, before."""


fill_rows = Kernel("rows", "fill_rows")


def choose(pool: ThreadPool, choices: Sequence[Choice]) -> list[Chosen | UserError]:
    """Choose a token for each; the error where none can be chosen."""
    arrays = _contiguous([choice.logits for choice in choices])
    size = len(arrays[0]) if arrays else 0
    rows = list[tuple[float, ...]]()
    seen, biased, added = list[int](), list[int](), list[float]()  # of all rows
    for choice, array in zip(choices, arrays, strict=True):
        config, first_seen, first_biased = choice.config, len(seen), len(biased)
        if config.penalizes:
            seen += choice.seen
        if config.logit_bias or config.bad_words:
            bias = biases(config, choice.seen)
            biased += bias
            added += bias.values()
        generated = min(first_seen + choice.n_prompt, len(seen))
        rows.append((
            _address(array), min(choice.n_tokens, size), -1, choice.uniform, *config.numbers,
            first_seen, generated, len(seen), first_biased, len(biased), *NOT_KNOWN,
        ))  # fmt: skip
    for ids in filter(None, (seen, biased)):
        if not 0 <= min(ids) <= max(ids) < size:
            raise UserError(f"an id of no row of {size} logits: {min(ids)} or {max(ids)}")
    table = _run(pool, rows, size, arrays, seen, biased, added)
    return [
        no_choice(highest) or Chosen(token, logprob)
        for token, logprob, highest in table[["token", "logprob", "highest"]].tolist()
    ]


def score(
    pool: ThreadPool, logits: Logits, targets: Sequence[int], n_tokens: int | None = None
) -> tuple[list[float], list[int]]:
    """Return each row's logprob of its target, and the target's rank, 1 for the likeliest.

    The rank counts ids with a higher logit, and lower ids with the same, up to `n_tokens`.
    """
    arrays = _contiguous(logits)
    size = len(arrays[0]) if arrays else 0
    n_tokens = size if n_tokens is None else n_tokens
    plain = (*GenerationConfig().numbers, 0, 0, 0, 0, 0, *NOT_KNOWN)
    rows = [
        (_address(array), n_tokens, target, 0.0, *plain)
        for array, target in zip(arrays, targets, strict=True)
    ]
    table = _run(pool, rows, size, arrays, [], [], [])
    return table["logprob"].tolist(), table["rank"].tolist()


def _contiguous(logits: Logits) -> list[NDArray[np.float32]]:
    return [np.ascontiguousarray(row, np.float32) for row in logits]


def _address(array: NDArray[np.float32]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _run(
    pool: ThreadPool,
    rows: list[tuple[float, ...]],
    size: int,
    alive: list[NDArray[np.float32]],
    seen: list[int],
    biased: list[int],
    added: list[float],
) -> NDArray[Any]:
    """Return the rows as kernels filled them."""
    table = np.array(rows, ROW)
    ids = np.array(seen, np.int64), np.array(biased, np.int64), np.array(added, np.float32)
    scratch = pool.scratch(7, (size // LANES + 3) * LANES)  # vectors are written beyond the last
    pool.run(fill_rows, 1, table, size, *ids, scratch, chunks=len(table), alive=alive)
    return table
