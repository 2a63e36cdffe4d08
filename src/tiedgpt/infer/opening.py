"""A model or a source -> a runner that computes it at a precision, and its tokenizer.

torch is imported here, when a runner is made that needs it, and nowhere else on the engine's way.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.infer.session import Runner
from tiedgpt.text import Tokenizer

if TYPE_CHECKING:
    from tiedgpt.core.model import GPT

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
MAX_PADDING = 1024
"""Rows that a vocabulary is padded by, at the most, to a round number."""


@dataclass(frozen=True)
class Opened:
    """What an engine is made of."""

    runner: Runner
    tokenizer: Tokenizer | None
    notes: tuple[str, ...]
    """What opening has to tell: two equal matrices, tied; a tokenizer shorter than the model."""


def runner_for(
    model_or_source: GPT | str | os.PathLike[str],
    precision: str = "auto",
    *,
    tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
    resolve: str | None = None,
    **config: Any,
) -> Opened:
    """Return what computes a model; see `Engine` for the arguments and for what is raised."""
    if precision not in PRECISIONS:
        raise UserError(f"precision={precision!r} is none of {', '.join(PRECISIONS)}")
    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = Tokenizer.from_pretrained(os.fspath(tokenizer))
    notes: tuple[str, ...] = ()
    if isinstance(model_or_source, (str, os.PathLike)):
        runner, notes = _from_source(model_or_source, precision, resolve=resolve, **config)
        tokenizer = tokenizer or _tokenizer_of(os.fspath(model_or_source))
    elif resolve is not None or config:
        raise UserError("resolve and config are for a source that is loaded")
    else:
        runner = _from_model(model_or_source, precision)
    return Opened(runner, tokenizer, notes + _compared(tokenizer, runner.config.vocab_size))


def _from_model(model: GPT, precision: str) -> Runner:
    """Return a runner of a model, copied where its precision is another."""
    import copy

    from tiedgpt.core.model import GPT
    from tiedgpt.infer.torch_session import DTYPES, TorchRunner

    if not isinstance(model, GPT):
        raise UserError(f"{type(model).__name__} is neither a GPT nor a path or hub name")
    dtype = DTYPES[precision]
    if dtype not in (None, model.wte.weight.dtype):
        model = copy.deepcopy(model).to(dtype)
    return TorchRunner(model)


def _from_source(
    source: str | os.PathLike[str], precision: str, *, resolve: str | None, **config: Any
) -> tuple[Runner, tuple[str, ...]]:
    """Return a runner of what is loaded, on the GPU where there is one, and notes."""
    import torch

    from tiedgpt.infer.torch_session import DTYPES, TorchRunner
    from tiedgpt.weights.load import load

    loaded = load(source, dtype=DTYPES[precision], resolve=resolve, **config)
    loaded.model.to("cuda" if torch.cuda.is_available() else "cpu")
    return TorchRunner(loaded.model), loaded.notes


def _compared(tokenizer: Tokenizer | None, vocab_size: int) -> tuple[str, ...]:
    """Compare a tokenizer with the model's rows; return what is worth a note."""
    if tokenizer is not None and len(tokenizer) > vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {vocab_size}"
            ": they do not belong together"
        )
    if tokenizer is not None and len(tokenizer) < vocab_size - MAX_PADDING:
        return (
            f"the tokenizer has {len(tokenizer):,} tokens and the model rows for "
            f"{vocab_size:,}: the others are never drawn",
        )
    return ()


def _tokenizer_of(source: str) -> Tokenizer | None:
    """Return the tokenizer beside a model; without one only ids can be continued."""
    try:
        return Tokenizer.from_pretrained(source)
    except CorruptInputError:
        raise
    except UserError:
        return None
