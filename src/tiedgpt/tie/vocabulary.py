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
from tiedgpt.tie.heads import (
    Unembed,
    count_logits,
    describe,
    head_layers,
    inference,
    require_gpt,
    second_names,
)
from tiedgpt.tie.surgery import NEW_OPTIMIZER, Change

SPREAD = 0.1
"""Standard deviation of new rows about the mean, in units of the old rows' covariance."""
MOST_OF_SHARE = 2.0
"""New rows that take more than this multiple of their share are drawn closer to the mean."""
HALVINGS = 10
"""How often the spread is halved before the new rows are put at the mean itself."""
N_STATES = 64
"""Hidden states on which the probability is measured if no sample is given."""

Ids = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Mass:
    """The probability that new tokens take, at hidden states of this model."""

    mean: float
    """Mean over the states of the new rows' summed probability."""
    largest: float
    """Its largest value over the states."""
    share: float
    """Their probability if all tokens were equally likely: new rows / all rows."""
    n_states: int
    spread: float
    """Standard deviation of the new rows about the mean row, in units of the old rows' own."""

    def __str__(self) -> str:
        return (
            f"probability of the new tokens at {self.n_states} states: {self.mean:.3g} on average, "
            f"{self.largest:.3g} at most (their share of the vocabulary is {self.share:.3g}); "
            f"drawn with {self.spread:.3g} of the old rows' spread about their mean"
        )


@dataclass(frozen=True)
class VocabularyReport:
    """The vocabulary has another size."""

    rows_before: int
    rows_after: int
    matrices: tuple[str, ...]
    """Names of the parameters that were resized."""
    change: Change
    mass: Mass | None = None
    """None if no row was added, or the weights are on the meta device."""
    old_ids: tuple[int, ...] | None = None
    """After `prune`: the old id of each new id."""
    notes: tuple[str, ...] = (NEW_OPTIMIZER,)

    def __str__(self) -> str:
        if self.rows_before == self.rows_after and self.old_ids is None:
            return f"vocabulary: {self.rows_before:,} tokens, as before"
        sizes = f"{self.rows_before:,} -> {self.rows_after:,} tokens"
        lines = [f"vocabulary: {sizes}, in {', '.join(self.matrices)}", *self.change.lines()]
        lines += [] if self.mass is None else [str(self.mass)]
        return "\n".join([*lines, *self.notes])


def resize_vocab(
    model: GPT, n: int, *, sample: Tensor | Ids | None = None, seed: int = 0
) -> VocabularyReport:
    """Give the vocabulary n tokens, in place: new rows at the end, or the first n kept.

    New rows of (V, D) come from the mean and covariance of the old ones, with a tenth of their
    spread, halved until they take at most twice their share of probability. The probability is
    measured at the hidden states of `sample`, ids (B, T), or of random ids. `seed` alone decides
    the draw; torch's random stream is not touched. dtype, device and requires_grad stay.

    `wte.weight` becomes a new Parameter: an optimizer that holds the old one must be made anew.
    Raises `UserError` if a special id would be lost, the head cannot follow, or the old rows have
    no finite mean; `NoRoomError` if the rows do not fit in memory. Nothing has changed then.
    """
    model = require_gpt(model)
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n < 2**63:
        raise UserError(f"n must be a number of tokens, give a whole number above 0; got {n!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise UserError(f"seed must fit 64 bits, give a whole number; got {seed!r}")
    before = model.config.vocab_size
    parameters = dict(model.named_parameters())
    if n == before:
        return VocabularyReport(before, n, (), Change.since(parameters, model))
    if n < before:
        return _select(model, list(range(n)))
    grown = {name: _grow(name, old.detach(), n, seed) for name, old in _tables(model).items()}
    states = _states(model, _ids(model, sample), seed)
    mass = None
    with _replaced(model, {name: rows.table for name, rows in grown.items()}, n):
        for halvings in range(HALVINGS + 1):
            spread = SPREAD / 2**halvings if halvings < HALVINGS else 0.0
            for rows in grown.values():
                rows.draw(spread)
            mass = None if states is None else _mass(model, states, before, spread)
            if mass is None or mass.largest <= MOST_OF_SHARE * mass.share:
                break
    return VocabularyReport(before, n, tuple(grown), Change.since(parameters, model), mass)


def add_tokens(
    model: GPT, n_new: int, *, sample: Tensor | Ids | None = None, seed: int = 0
) -> VocabularyReport:
    """Append rows for `n_new` tokens; their ids begin at the old vocabulary's size.

    The same as `resize_vocab(model, V + n_new)`.
    """
    model = require_gpt(model)
    if isinstance(n_new, bool) or not isinstance(n_new, int) or n_new < 1:
        raise UserError(f"n_new must be a whole number above 0, got {n_new!r}")
    return resize_vocab(model, model.config.vocab_size + n_new, sample=sample, seed=seed)


def prune(model: GPT, keep_ids: Iterable[int]) -> VocabularyReport:
    """Keep only the rows of these ids, in this order: the i-th id becomes token i.

    Special ids in the config move with their tokens. Raises `UserError`, before anything changes,
    for ids outside the vocabulary or given twice, or if a special id would be lost. The report's
    `old_ids` holds the old id of each new id; the tokenizer must be pruned in the same way.
    """
    model = require_gpt(model)
    try:
        ids = [operator.index(i) for i in keep_ids]
    except TypeError:
        raise UserError("keep_ids must be whole numbers, the ids to keep") from None
    size = model.config.vocab_size
    if not ids:
        raise UserError("keep_ids is empty: a vocabulary has at least one token")
    if wrong := [i for i in ids if not 0 <= i < size]:
        raise UserError(f"keep_ids has {wrong[0]}, no id of a vocabulary of {size} tokens")
    if len(set(ids)) != len(ids):
        twice = next(i for i, times in Counter(ids).items() if times > 1)
        raise UserError(f"keep_ids has {twice} twice: a token keeps one row")
    return dataclasses.replace(_select(model, ids), old_ids=tuple(ids))


def _select(model: GPT, ids: list[int]) -> VocabularyReport:
    """Keep these rows, in this order, in every table; move the special ids."""
    before = model.config.vocab_size
    parameters = dict(model.named_parameters())
    special = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id")}
    special |= {key: id for key, id in model.foreign_config.items() if key.endswith("_token_id")}
    special = {k: id for k, id in special.items() if type(id) is int and 0 <= id < before}
    place = {old: new for new, old in enumerate(ids)}
    lost = [f"{name}={old}" for name, old in special.items() if old not in place]
    if lost:
        raise UserError(
            f"{' and '.join(lost)} would be lost with {before} -> {len(ids)} tokens: keep it, or "
            "set it to None in model.config (dataclasses.replace) or model.foreign_config first"
        )
    moved = {name: place[old] for name, old in special.items()}
    own = {name: new for name, new in moved.items() if hasattr(model.config, name)}
    with torch.no_grad():
        rows = {
            name: table.detach()[torch.tensor(ids, device=table.device)]
            for name, table in _tables(model).items()
        }
    with _replaced(model, rows, len(ids), own):
        model.foreign_config |= {name: new for name, new in moved.items() if name not in own}
    return VocabularyReport(before, len(ids), tuple(rows), Change.since(parameters, model))


def _tables(model: GPT) -> dict[str, nn.Parameter]:
    """Return the parameters with one entry per token: W, and those of an untied head.

    Raises `UserError` for a head in which anything else has V entries, parameter or buffer.
    """
    found = {"wte.weight": model.wte.weight}
    if model.head is None:
        return found
    if second := second_names(model):
        raise UserError(
            f"{second[0]} is wte.weight under a second name; resize before the head is replaced"
        )
    size, layers = model.config.vocab_size, head_layers(model)
    for name, tensor in [*model.head.named_parameters("head"), *model.head.named_buffers("head")]:
        if size not in tensor.shape:
            continue
        owner, _, kind = name.rpartition(".")
        product = isinstance(model.get_submodule(owner), (nn.Linear, Unembed))
        matrix = kind == "weight" and owner in layers
        bias = kind == "bias" and product and tensor.shape == (size,)
        if not (matrix or bias) or not isinstance(tensor, nn.Parameter):
            raise UserError(
                f"{name} {tuple(tensor.shape)} has {size} entries in a head that is no plain "
                "product with a matrix (V, D): resize before the head is replaced"
            )
        found[name] = tensor
    return found


@dataclass(frozen=True)
class _Grown:
    """The old rows with room for new ones, and what the new ones are drawn from."""

    table: Tensor
    """(n, D), or (n,) for a bias."""
    n_old: int
    mean: Tensor
    """(D,) or (), in float32."""
    deviations: Tensor
    """(n_new, D) or (n_new,): drawn from N(0, covariance of the old rows), in float32."""

    def draw(self, spread: float) -> None:
        """Write the new rows."""
        self.table[self.n_old :] = self.mean + spread * self.deviations


@torch.no_grad()
def _grow(name: str, old: Tensor, n: int, seed: int) -> _Grown:
    """Allocate and copy; on the meta device only shapes. Raises as `resize_vocab` does."""
    n_old, shape = len(old), old.shape[1:]
    try:
        table = torch.empty(n, *shape, dtype=old.dtype, device=old.device)
        deviations = torch.zeros(n - n_old, *shape, device=old.device)
    except RuntimeError as error:
        raise NoRoomError(f"no memory for {n - n_old:,} rows more: {error}") from None
    table[:n_old] = old
    if old.is_meta:
        return _Grown(table, n_old, torch.zeros(shape, device="meta"), deviations)
    mean = old.mean(0, dtype=torch.float32)
    _require_finite(name, old, mean)
    if old.ndim == 2 and n_old > 1:  # the entries of a bias have no directions
        centred = old.float() - mean
        covariance = (centred.T @ centred).double() / (n_old - 1)
        _require_finite(name, old, covariance)
        values, vectors = torch.linalg.eigh(covariance)
        root = (vectors * values.clamp(min=0).sqrt()).float()  # root root^T = covariance
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(n - n_old, *shape, generator=generator).to(old.device)
        deviations = normal @ root.T
    return _Grown(table, n_old, mean, deviations)


def _require_finite(name: str, old: Tensor, moments: Tensor) -> None:
    """Refuse rows without a finite mean and covariance."""
    if moments.isfinite().all():
        return
    rows = (~old.isfinite()).reshape(len(old), -1).any(1).nonzero().flatten().tolist()
    what = f"not finite in row {rows[0]}, one of {len(rows):,}" if rows else "too large for float32"
    raise UserError(
        f"{name} is {what}: new rows are drawn about the mean of all, so repair or prune these "
        "first"
    )


@contextmanager
def _replaced(
    model: GPT, rows: dict[str, Tensor], n: int, special_ids: dict[str, Any] | None = None
) -> Iterator[None]:
    """Put the new rows in place, each as a Parameter, and check that the head follows.

    If anything fails, here or in the body, the model is put back as it was.
    """
    config, foreign = model.config, dict(model.foreign_config)
    new_config = dataclasses.replace(config, vocab_size=n, **(special_ids or {}))
    old = {name: model.get_parameter(name) for name in rows}
    try:
        for name, new in rows.items():
            _set(model, name, nn.Parameter(new, requires_grad=old[name].requires_grad))
        model.config = new_config
        _require_logits(model, n)
        yield
    except BaseException:
        for name, parameter in old.items():
            _set(model, name, parameter)
        model.config, model.foreign_config = config, foreign
        raise


def _set(model: GPT, name: str, parameter: nn.Parameter) -> None:
    owner_name, _, last = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    setattr(owner, last, parameter)
    for size in ("out_features", "num_embeddings"):
        if hasattr(owner, size):
            setattr(owner, size, parameter.shape[0])


def _require_logits(model: GPT, n: int) -> None:
    """Call the head once: a size in its code, which no table shows, shows here."""
    if model.head is None:
        return
    try:
        n_logits = count_logits(model, model.head)
        wrong = "" if n_logits == n else f"{describe(model.head)} scores {n_logits:,} tokens then"
    except UserError as error:
        wrong = str(error)
    if wrong:
        raise UserError(
            f"the head cannot follow to {n:,} tokens: {wrong}; nothing was changed, resize before "
            "the head is replaced"
        )


def _ids(model: GPT, sample: Tensor | Ids | None) -> Tensor | None:
    """Return ids (B, T), which may have been given as lists; refuse those outside V."""
    if sample is None:
        return None
    try:
        ids = torch.as_tensor(sample)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UserError(f"sample must hold ids (B, T), rows of one length: {error}") from None
    size = model.config.vocab_size
    whole = ids.ndim == 2 and ids.dtype in (torch.int64, torch.int32) and not ids.is_meta
    if not whole or not ids.numel() or not 0 <= ids.min() <= ids.max() < size:
        raise UserError(
            f"sample must hold ids (B, T) of a vocabulary of {size} tokens, got {ids.dtype} "
            f"{tuple(ids.shape)}"
        )
    return ids


@torch.no_grad()
def _states(model: GPT, sample: Tensor | None, seed: int) -> Tensor | None:
    """Return hidden states (N, D) as the head gets them; None on the meta device."""
    weight = model.wte.weight
    if weight.is_meta:
        return None
    if sample is None:
        length = min(16, model.config.n_positions)
        shape = (-(-N_STATES // length), length)
        generator = torch.Generator().manual_seed(seed)
        sample = torch.randint(model.config.vocab_size, shape, generator=generator)
    with inference(model):
        return model.body(sample.to(weight.device)).flatten(0, 1)


@torch.no_grad()
def _mass(model: GPT, states: Tensor, n_old: int, spread: float) -> Mass:
    """Measure the probability of all rows from n_old on, at the states (N, D)."""
    with inference(model):
        masses = torch.cat(
            [
                model.logits(part).float().softmax(-1)[:, n_old:].sum(-1)
                for part in states.split(N_STATES)
            ]
        )
    return Mass(
        mean=float(masses.mean()),
        largest=float(masses.max()),
        share=1 - n_old / model.config.vocab_size,
        n_states=len(masses),
        spread=spread,
    )
