"""More tokens, or fewer, on the one matrix (and on an untied head).

Old rows keep their values bit for bit. In a tied model a new row is also a new answer: a random
row may win every softmax, and the model then emits nothing but new tokens. So new rows are drawn
close to the mean of the old ones: exp(h . mean) is at most the mean of exp(h . row), so a token at
the mean never takes more than its share (Hewitt 2021, "Initializing New Word Embeddings for
Pretrained Language Models"). The probability that they do take is measured and reported.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tiedgpt.core.model import GPT
from tiedgpt.errors import NoRoomError, UserError
from tiedgpt.options import read_number
from tiedgpt.runtime import eval_mode
from tiedgpt.tie.heads import (
    find_head_layers,
    find_second_names,
    find_unembeds,
    require_gpt,
    require_logits,
)
from tiedgpt.tie.ledgers import LedgerDifference, ledger
from tiedgpt.tie.surgery import NEW_OPTIMIZER

SPREAD = 0.01
"""Standard deviation of new rows about the mean row, in units of the old rows' own."""
N_STATES = 64
"""Hidden states on which the probability is measured if no sample is given."""

Sample = Tensor | Sequence[Sequence[int]] | None


@dataclass(frozen=True, repr=False)
class NewTokenProbability:
    """The probability that new tokens take, at hidden states of this model."""

    mean: float
    """Mean over the states of the new rows' summed probability."""
    largest: float
    """Its largest value over the states."""
    share: float
    """Their probability if all tokens were equally likely: new rows / all rows."""
    n_states: int

    def __str__(self) -> str:
        return (
            f"probability of the new tokens at {self.n_states} states: {self.mean:.3g} on average, "
            f"{self.largest:.3g} at most (their share of the vocabulary is {self.share:.3g})"
        )

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class VocabularyReport:
    """The vocabulary has another size."""

    rows_before: int
    rows_after: int
    matrices: tuple[str, ...]
    """Names of the parameters that were resized."""
    change: LedgerDifference
    new_tokens: NewTokenProbability | None = None
    """None if no row was added, or the weights are on the meta device."""

    def __str__(self) -> str:
        if not self.matrices:
            return f"vocabulary: {self.rows_before:,} tokens, as before"
        sizes = f"{self.rows_before:,} -> {self.rows_after:,} tokens"
        lines = [f"vocabulary: {sizes}, in {', '.join(self.matrices)}", str(self.change)]
        lines += [] if self.new_tokens is None else [str(self.new_tokens)]
        return "\n".join([*lines, NEW_OPTIMIZER])

    __repr__ = __str__


def resize_vocab(model: GPT, n: int, *, sample: Sample = None, seed: int = 0) -> VocabularyReport:
    """Give the vocabulary n tokens, in place: new rows at the end, or the first n kept.

    New rows of (V, D) have the mean of the old ones and a hundredth of their spread. The
    probability that they take is measured at the hidden states of `sample`, ids (B, T), or of
    random ids. `seed` alone decides the draw; torch's random stream is not touched. dtype, device
    and requires_grad stay.

    `wte.weight` becomes a new Parameter: an optimizer that holds the old one must be made anew.
    Raises `UserError` if a special id would be lost, the head cannot follow, or the old rows are
    not finite; `NoRoomError` if the rows do not fit in memory. Nothing has changed then.
    """
    model = require_gpt(model)
    n = read_number("n", n, int, least=1)
    seed = read_number("seed", seed, int, least=-(2**63))
    before, size = ledger(model), model.config.vocab_size
    if n == size:
        return VocabularyReport(n, n, (), before.difference(before))
    if n < size:
        return prune(model, range(n))
    tables = {
        name: _grow_table(name, old.detach(), n, seed) for name, old in _find_tables(model).items()
    }
    with _replace_tables(model, tables, {}):
        mass = _measure_new_tokens(model, sample, seed, size)
    change = before.difference(ledger(model))
    return VocabularyReport(size, n, tuple(tables), change, mass)


def add_tokens(model: GPT, n_new: int, *, sample: Sample = None, seed: int = 0) -> VocabularyReport:
    """Append rows for `n_new` tokens; their ids begin at the old vocabulary's size.

    The same as `resize_vocab(model, V + n_new)`.
    """
    n_new = read_number("n_new", n_new, int, least=1)
    size = require_gpt(model).config.vocab_size
    return resize_vocab(model, size + n_new, sample=sample, seed=seed)


def prune(model: GPT, keep_ids: Iterable[int]) -> VocabularyReport:
    """Keep only the rows of these ids, in this order: the i-th id becomes token i.

    Special ids in the config move with their tokens. Raises `UserError`, before anything changes,
    for ids outside the vocabulary or given twice, or if a special id would be lost. The
    tokenizer must be pruned in the same way.
    """
    model = require_gpt(model)
    before, size = ledger(model), model.config.vocab_size
    try:
        ids = [operator.index(i) for i in keep_ids]
    except TypeError:
        raise UserError("must be integers, the ids to keep", option="keep_ids") from None
    wrong = [i for i, times in Counter(ids).items() if times > 1 or not 0 <= i < size]
    if wrong or not ids:
        raise UserError(
            f"must be ids from 0 to {size - 1}, each once; got {wrong[:1]}", option="keep_ids"
        )
    ours = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id")}
    foreign = {key: id for key, id in model.foreign_config.items() if key.endswith("_token_id")}
    special = {k: v for k, v in (ours | foreign).items() if type(v) is int and 0 <= v < size}
    new_ids = {old: new for new, old in enumerate(ids)}
    if lost := [f"{name}={old}" for name, old in special.items() if old not in new_ids]:
        raise UserError(
            f"{' and '.join(lost)} would be lost with {size} -> {len(ids)} tokens: keep it, or "
            "set it to None in model.config (dataclasses.replace) or model.foreign_config first"
        )
    rows = {name: table.detach()[ids] for name, table in _find_tables(model).items()}
    moved = {name: new_ids[old] for name, old in special.items()}
    with _replace_tables(model, rows, {name: new for name, new in moved.items() if name in ours}):
        model.foreign_config |= {name: new for name, new in moved.items() if name in foreign}
    return VocabularyReport(size, len(ids), tuple(rows), before.difference(ledger(model)))


def _find_tables(model: GPT) -> dict[str, nn.Parameter]:
    """Return the parameters with one entry per token: W, and those of an untied head.

    Raises `UserError` for a head in which anything else has V entries, parameter or buffer.
    """
    tables = {"wte.weight": model.wte.weight}
    if model.head is None:
        return tables
    size, layers = model.config.vocab_size, (*find_head_layers(model), *find_unembeds(model))
    names = {f"{layer}.{suffix}" for layer in layers for suffix in ("weight", "bias")}
    names -= set(find_second_names(model))
    for name, tensor in [*model.head.named_parameters("head"), *model.head.named_buffers("head")]:
        if name in names:
            tables[name] = model.get_parameter(name)
        elif size in tensor.shape:
            raise UserError(
                f"{name} {tuple(tensor.shape)} cannot follow: it is wte.weight under a second "
                "name, or no matrix (V, D) or bias of one",
                hint="resize before the head is replaced",
            )
    return tables


@torch.no_grad()
def _grow_table(name: str, old: Tensor, n: int, seed: int) -> Tensor:
    """Return a table of n rows: the old rows, then rows drawn around their mean.

    A bias gets the mean itself.
    On the meta device the table has only a shape. Raises as `resize_vocab` does.
    """
    n_old = len(old)
    try:
        table = old.new_empty(n, *old.shape[1:])
    except RuntimeError as error:
        raise NoRoomError(f"no memory for {n - n_old:,} rows more: {error}") from None
    table[:n_old] = old
    if old.is_meta:
        return table
    if len(wrong := (~old.isfinite()).reshape(n_old, -1).any(1).nonzero()):
        raise UserError(
            f"{name} is not finite in row {int(wrong[0])}, one of {len(wrong):,}",
            hint="repair or prune its rows before new ones are drawn",
        )
    new = old.mean(0, dtype=torch.float32)
    if old.ndim == 2:  # the difference of two random rows has twice the covariance of all rows
        generator = torch.Generator().manual_seed(seed)
        pairs = torch.randint(n_old, (2, n - n_old), generator=generator, device="cpu")
        some, others = (old[rows].float() for rows in pairs.to(old.device))
        new = new + SPREAD / 2**0.5 * (some - others)
    table[n_old:] = new
    return table


@contextmanager
def _replace_tables(model: GPT, tables: dict[str, Tensor], ids: dict[str, Any]) -> Iterator[None]:
    """Put new tables in place, each as a Parameter, and the special ids of the new config.

    If the head cannot follow, or the body fails, the model is put back as it was.
    """
    config, foreign, n = model.config, model.foreign_config.copy(), len(tables["wte.weight"])
    new_config = dataclasses.replace(config, vocab_size=n, **ids)
    old = {name: model.get_parameter(name) for name in tables}
    try:
        for name, table in tables.items():
            _set_table(model, name, nn.Parameter(table, requires_grad=old[name].requires_grad))
        model.config = new_config
        if model.head is not None:  # a size in its code shows only when it is called
            require_logits(model, model.head)
        yield
    except BaseException:
        for name, parameter in old.items():
            _set_table(model, name, parameter)
        model.config, model.foreign_config = config, foreign
        raise


def _set_table(model: GPT, name: str, parameter: nn.Parameter) -> None:
    owner_name, _, last = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    setattr(owner, last, parameter)
    for size in ("out_features", "num_embeddings"):
        if hasattr(owner, size):
            setattr(owner, size, len(parameter))


@torch.no_grad()
def _measure_new_tokens(
    model: GPT, sample: Sample, seed: int, n_old: int
) -> NewTokenProbability | None:
    """Measure the probability of all rows from n_old on, after each id of a sample (B, T)."""
    if model.wte.weight.is_meta:
        return None
    if sample is None:
        length = min(16, model.config.n_positions)
        shape = (-(-N_STATES // length), length)
        generator = torch.Generator().manual_seed(seed)
        sample = torch.randint(n_old, shape, generator=generator, device="cpu")
    try:
        ids = torch.as_tensor(sample, device=model.wte.weight.device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UserError(
            f"must be rows of equally many ids (B, T): {error}", option="sample"
        ) from None
    with eval_mode(model):
        parts = model.body(ids).flatten(0, 1).split(N_STATES)  # (N, D)
        masses = [model.logits(h).float().softmax(-1)[:, n_old:].sum(-1) for h in parts]
    mass, share = torch.cat(masses), 1 - n_old / model.config.vocab_size
    return NewTokenProbability(float(mass.mean()), float(mass.max()), share, len(mass))
