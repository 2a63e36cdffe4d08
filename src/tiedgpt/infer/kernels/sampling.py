"""Batched sampling from logits: penalties, filters and a draw, one row per chunk of work.

A row's result depends on that row alone, bit for bit. `sampling_kernels.py` is compiled.
`infer/sampling.py` is the reference in plain numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from tiedgpt.errors import UserError
from tiedgpt.infer.generation_config import GenerationConfig
from tiedgpt.infer.kernels.arguments import LANES, TokenLists
from tiedgpt.infer.kernels.compile_cache import Kernel
from tiedgpt.infer.kernels.thread_pool import ThreadPool
from tiedgpt.infer.sampling import NextToken, SamplingInput, no_token_error

Logits = NDArray[np.float32] | Sequence[NDArray[np.float32]]
"""(N, V), or N arrays (V,); contiguous rows are not copied."""
SCRATCH = 5
"""Arrays of a vocabulary's size that a thread works on."""


class Row(NamedTuple):
    """One row of logits: how its token is chosen, and the result."""

    address: int
    """Where the logits begin in memory."""
    n_tokens: int
    """Ids from here on are never chosen."""
    temperature: float
    """This and the following are `GenerationConfig.numbers`."""
    top_k: float
    top_p: float
    min_p: float
    top_n_sigma: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    uniform: float = 0.0
    """A random number from [0, 1) for the draw."""
    seen: int = 0
    """The part of `TokenLists.seen` that is this row's: it begins here."""
    generated: int = 0
    """Its ids from here on were generated."""
    seen_end: int = 0
    bias: int = 0
    """The part of `TokenLists.bias` that is this row's: it begins here."""
    bias_end: int = 0
    token: int = -1
    """The token that was chosen; one that is given is ranked instead."""
    rank: int = 0
    logprob: float = 0.0
    highest: float = 0.0
    """The highest logit after bias and penalties."""


ROW = np.dtype([*get_type_hints(Row).items()])
fill_rows = Kernel("tiedgpt.infer.kernels.sampling_kernels", "fill_rows")


def sample(pool: ThreadPool, inputs: Sequence[SamplingInput]) -> list[NextToken | UserError]:
    """Sample a token for each; return an error in the place of one that cannot be chosen."""
    arrays = [np.ascontiguousarray(row.logits, np.float32) for row in inputs]
    size = len(arrays[0]) if arrays else 0
    rows, seen, bias_ids, bias = list[Row](), list[int](), list[int](), list[float]()
    for row, array in zip(inputs, arrays, strict=True):
        config, seen_start, bias_start = row.config, len(seen), len(bias_ids)
        if config.penalizes:
            seen += row.seen
        bias_ids += config.logit_bias
        bias += config.logit_bias.values()
        rows.append(Row(
            address=array.ctypes.data, n_tokens=min(row.n_tokens, size), uniform=row.uniform,
            seen=seen_start, generated=min(seen_start + row.n_prompt, len(seen)),
            seen_end=len(seen), bias=bias_start, bias_end=len(bias_ids), **config.numbers,
        ))  # fmt: skip
    for ids in filter(None, (seen, bias_ids)):
        if not 0 <= min(ids) <= max(ids) < size:
            raise UserError(f"an id is outside the {size} logits: {min(ids)} or {max(ids)}")
    lists = TokenLists(
        np.array(seen, np.int64), np.array(bias_ids, np.int64), np.array(bias, np.float32)
    )
    table = _run(pool, rows, arrays, lists)
    return [
        no_token_error(highest) or NextToken(token, logprob)
        for token, logprob, highest in table[["token", "logprob", "highest"]].tolist()
    ]


def score_targets(
    pool: ThreadPool, logits: Logits, targets: Sequence[int], n_tokens: int | None = None
) -> tuple[list[float], list[int]]:
    """Return each row's logprob of its target, and the target's rank, 1 for the likeliest.

    The rank counts ids with a higher logit, and lower ids with the same, up to `n_tokens`.
    """
    arrays = [np.ascontiguousarray(row, np.float32) for row in logits]
    numbers = GenerationConfig().numbers
    rows = [
        Row(array.ctypes.data, len(array) if n_tokens is None else n_tokens, token=token, **numbers)
        for array, token in zip(arrays, targets, strict=True)
    ]
    none = np.zeros(0, np.int64)
    table = _run(pool, rows, arrays, TokenLists(none, none, np.zeros(0, np.float32)))
    return table["logprob"].tolist(), table["rank"].tolist()


def _run(
    pool: ThreadPool, rows: list[Row], logits: list[NDArray[np.float32]], lists: TokenLists
) -> NDArray[Any]:
    """Return the rows as kernels filled them."""
    table = np.array(rows, ROW)
    size = len(logits[0]) if logits else 0
    scratch = pool.scratch(SCRATCH, (size // LANES + 3) * LANES)  # vectors end beyond the last
    pool.run(fill_rows, 1, table, size, lists, scratch, chunks=len(table), alive=logits)
    return table
