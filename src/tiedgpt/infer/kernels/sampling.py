"""Batched sampling from logits: penalties, filters and a draw, one row per chunk of work.

A row's result depends on that row alone, bit for bit. `sampling_kernels.py` is compiled. It chooses
the tokens of `infer/sampling.py`, the definition in plain numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast, get_type_hints

import numpy as np
from numpy.typing import NDArray

from tiedgpt.errors import UserError
from tiedgpt.infer.generation_config import GenerationConfig
from tiedgpt.infer.kernels import code_files
from tiedgpt.infer.kernels.arguments import LANES, TokenLists
from tiedgpt.infer.kernels.compile_cache import Kernel
from tiedgpt.infer.kernels.thread_pool import ThreadPool
from tiedgpt.infer.sampling import NextToken, SamplingInput, no_token_error

LogitRows = NDArray[np.float32] | Sequence[NDArray[np.float32]]
"""(N, V), or N arrays (V,); contiguous rows are not copied."""
SCRATCH = 6
"""Arrays of a vocabulary's size that a thread works on."""


class SamplingRow(NamedTuple):
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
    xtc_probability: float
    xtc_threshold: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    uniform: float = 0.0
    """A random number from [0, 1) for the draw."""
    xtc_uniform: float = 0.0
    """This and other names in `UNIFORMS`: XTC is applied if it is below `xtc_probability`."""
    seen: int = 0
    """The part of `TokenLists.seen` that is this row's: it begins here."""
    generated: int = 0
    """Its ids from here on were generated."""
    seen_end: int = 0
    bias: int = 0
    """The part of `TokenLists.bias` that is this row's: it begins here."""
    bias_end: int = 0
    spared: int = 0
    """The part of `TokenLists.spared` that is this row's: it begins here."""
    spared_end: int = 0
    token: int = -1
    """The token that was chosen; one that is given is ranked instead."""
    rank: int = 0
    n_kept: int = 0
    """How many tokens could be drawn."""
    logprob: float = 0.0
    highest: float = 0.0
    """The highest logit after bias and penalties."""


ROW_DTYPE = np.dtype([*get_type_hints(SamplingRow).items()])
fill_rows = Kernel("tiedgpt.infer.kernels.sampling_kernels", "fill_rows")


def is_compiled() -> bool:
    """Whether this CPU's machine code is there, so that nothing is compiled first."""
    return bool(fill_rows.functions or code_files.find(fill_rows.module, f"{fill_rows.name}-*"))


def prepare() -> None:
    """Load the kernel, or start to compile it while other kernels are compiled."""
    none = np.zeros(0, np.int64)
    lists = TokenLists(none, none, none, np.zeros(0, np.float32))
    fill_rows.prepare(np.zeros(0, ROW_DTYPE), 0, lists, np.zeros((0, 0, 0), np.float32))


def sample(pool: ThreadPool, inputs: Sequence[SamplingInput]) -> list[NextToken | UserError]:
    """Sample a token for each; return an error in the place of one that cannot be chosen."""
    table = _choose(pool, inputs)
    results = [
        no_token_error(highest) or NextToken(token, logprob)
        for token, logprob, highest in table[["token", "logprob", "highest"]].tolist()
    ]
    tokens = {
        at: result.token
        for at, (row, result) in enumerate(zip(inputs, results, strict=True))
        if row.model_logits is not None and isinstance(result, NextToken)
    }
    if tokens:  # processors changed the logits: logprobs are of the model's own
        logits = [cast("NDArray[np.float32]", inputs[at].model_logits) for at in tokens]
        logprobs, _ = score_targets(pool, logits, list(tokens.values()))
        for (at, token), logprob in zip(tokens.items(), logprobs, strict=True):
            results[at] = NextToken(token, logprob)
    return results


def filter_logits(row: SamplingInput) -> NDArray[np.int32]:
    """Return the ids that may be drawn, from the lowest, as `infer.sampling.filter_logits`."""
    pool = ThreadPool(1)
    table = _choose(pool, [row])
    ids, scores = pool.scratch(0, 0)[0, :2, : table["n_kept"][0]]
    finite: NDArray[np.int32] = ids.view(np.int32)[scores > -np.inf]
    return finite


def _choose(pool: ThreadPool, inputs: Sequence[SamplingInput]) -> NDArray[Any]:
    """Return a row for each input, with its token."""
    arrays = [np.ascontiguousarray(row.logits, np.float32) for row in inputs]
    size = len(arrays[0]) if arrays else 0
    rows, bias = list[SamplingRow](), list[float]()
    seen, bias_ids, spared = list[int](), list[int](), list[int]()
    for row, array in zip(inputs, arrays, strict=True):
        config, starts = row.config, (len(seen), len(bias_ids), len(spared))
        if config.penalizes:
            seen += row.seen
        bias_ids += config.logit_bias
        bias += config.logit_bias.values()
        spared += row.spared
        rows.append(SamplingRow(
            address=array.ctypes.data, n_tokens=min(row.n_tokens, size), uniform=row.uniform,
            seen=starts[0], seen_end=len(seen), bias=starts[1], bias_end=len(bias_ids),
            generated=min(starts[0] + row.n_prompt, len(seen)), spared=starts[2],
            spared_end=len(spared), **(config.numbers | row.uniforms),
        ))  # fmt: skip
    for ids in filter(None, (seen, bias_ids)):
        if not 0 <= min(ids) <= max(ids) < size:
            raise UserError(f"an id is outside the {size} logits: {min(ids)} or {max(ids)}")
    ids_seen, ids_biased, ids_spared = (np.array(x, np.int64) for x in (seen, bias_ids, spared))
    lists = TokenLists(ids_seen, ids_biased, ids_spared, np.array(bias, np.float32))
    return _run(pool, rows, arrays, lists)


def score_targets(
    pool: ThreadPool, logits: LogitRows, targets: Sequence[int], n_tokens: int | None = None
) -> tuple[list[float], list[int]]:
    """Return each row's logprob of its target, and the target's rank, 1 for the likeliest.

    The rank counts ids with a higher logit, and lower ids with the same, up to `n_tokens`.
    """
    arrays = [np.ascontiguousarray(row, np.float32) for row in logits]
    numbers = GenerationConfig().numbers
    rows = [
        SamplingRow(
            array.ctypes.data, len(array) if n_tokens is None else n_tokens, token=token, **numbers
        )
        for array, token in zip(arrays, targets, strict=True)
    ]
    none = np.zeros(0, np.int64)
    lists = TokenLists(none, none, none, np.zeros(0, np.float32))
    table = _run(pool, rows, arrays, lists)
    return table["logprob"].tolist(), table["rank"].tolist()


def _run(
    pool: ThreadPool, rows: list[SamplingRow], logits: list[NDArray[np.float32]], lists: TokenLists
) -> NDArray[Any]:
    """Return the rows as kernels filled them."""
    table = np.array(rows, ROW_DTYPE)
    size = len(logits[0]) if logits else 0
    scratch = pool.scratch(SCRATCH, (size // LANES + 3) * LANES)  # vectors end beyond the last
    pool.run(fill_rows, 1, table, size, lists, scratch, chunks=len(table), alive=logits)
    return table
