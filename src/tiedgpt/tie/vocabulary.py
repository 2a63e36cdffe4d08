"""More tokens, or fewer, on the one matrix (and on a head's own, where there is one).

Old rows keep their values bit for bit. A new row read by a tied model is also a new answer: drawn
at random it may win every softmax, and the model then emits nothing but new tokens. So new rows
are drawn close to the mean of the old ones: exp(h . mean) is at most the mean of exp(h . row), and
a token at the mean never takes more than its share (Hewitt 2021, "Initializing New Word Embeddings
for Pretrained Language Models"). What they do take is measured and reported.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tiedgpt.core.model import GPT
from tiedgpt.errors import NoRoomError, UserError
from tiedgpt.tie.heads import describe, inference, n_scored, require_gpt, tables
from tiedgpt.tie.reports import REMAKE_OPTIMIZER, Change, Mass, VocabularyReport
from tiedgpt.tie.storages import count

SPREAD = 0.1
"""Standard deviation of new rows about the mean, in units of the old rows' covariance."""

MOST_OF_SHARE = 2.0
"""New rows that take more than this multiple of their share are drawn closer to the mean."""

HALVINGS = 10
"""How often the spread is halved before the new rows are put at the mean itself."""

Ids = Sequence[Sequence[int]]

N_STATES = 64
"""Hidden states on which the new tokens' probability is measured where no sample is given."""


def resize_vocab(
    model: GPT, n: int, *, sample: Tensor | Ids | None = None, seed: int = 0
) -> VocabularyReport:
    """Give the vocabulary n tokens, in place: new rows at the end, or the first n kept.

    New rows of (V, D) come from the mean and covariance of the old ones, with a tenth of their
    spread, halved until they take at most twice their share of probability at the states that are
    looked at: those of `sample`, ids (B, T), or of random ids. `seed` alone decides the draw;
    torch's own random stream is not touched. dtype, device and requires_grad stay.

    `wte.weight` becomes a new Parameter: an optimizer that holds the old one must be made anew.
    Raises `UserError` if a special id would be lost, the head cannot follow or the old rows have
    no finite mean; `NoRoomError` if the rows do not fit in memory. Nothing has changed then.
    """
    model = require_gpt(model)
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n < 2**63:
        raise UserError(f"n={n!r} is no number of tokens: give a whole number above 0, of 63 bits")
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise UserError(f"seed={seed!r} is no seed: give a whole number of at most 64 bits")
    before = model.config.vocab_size
    if n == before:
        total = count(model.parameters())
        return VocabularyReport(before, n, (), Change(total, total))
    if n < before:
        return _select(model, list(range(n)))
    grown = tables(model)
    drawn = {name: _Draw.of(name, table, n - before, seed) for name, table in grown.items()}
    states = _states(model, _ids(model, sample), seed)
    total = count(model.parameters())
    spread = SPREAD
    with _replaced(model, {name: draw.grown(spread) for name, draw in drawn.items()}, n):
        mass = None if states is None else _mass(model, states, before, spread)
        for halving in range(1, HALVINGS + 1):
            if mass is None or mass.largest <= MOST_OF_SHARE * mass.share:
                break
            spread = SPREAD / 2**halving if halving < HALVINGS else 0.0
            with torch.no_grad():
                for name, draw in drawn.items():
                    model.get_parameter(name)[before:] = draw.rows(spread)
            mass = _mass(model, states, before, spread)
    return VocabularyReport(
        rows_before=before,
        rows_after=n,
        matrices=tuple(grown),
        change=Change(total, count(model.parameters())),
        mass=mass,
        notes=(REMAKE_OPTIMIZER,),
    )


def add_tokens(
    model: GPT, n_new: int, *, sample: Tensor | Ids | None = None, seed: int = 0
) -> VocabularyReport:
    """Append rows for `n_new` tokens, with ids from the old vocabulary's size on.

    See `resize_vocab`, which this is with n = V + n_new.
    """
    model = require_gpt(model)
    if isinstance(n_new, bool) or not isinstance(n_new, int) or n_new < 1:
        raise UserError(f"n_new={n_new!r} is no number of tokens: give a whole number above 0")
    return resize_vocab(model, model.config.vocab_size + n_new, sample=sample, seed=seed)


def prune(model: GPT, keep_ids: Iterable[int]) -> VocabularyReport:
    """Keep the rows of these ids alone, in this order: the i-th becomes token i.

    Special ids in the config move with their tokens. Raises `UserError`, before anything changes,
    for ids outside the vocabulary or given twice, and where a special id would be lost. The
    report's `old_ids` says what each new id was; a tokenizer must be pruned alike.
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
    place = {old: new for new, old in enumerate(ids)}
    special = _special_ids(model)
    lost = [f"{name}={old}" for name, old in special.items() if old not in place]
    if lost:
        raise UserError(
            f"{' and '.join(lost)} would be lost with {before} -> {len(ids)} tokens: keep it, or "
            "set it to None in model.config (dataclasses.replace) or model.foreign_config first"
        )
    chosen = tables(model)
    total = count(model.parameters())
    moved = {name: place[old] for name, old in special.items()}
    own = {name: new for name, new in moved.items() if hasattr(model.config, name)}
    with torch.no_grad():
        rows = {
            name: table.detach()[torch.tensor(ids, device=table.device)]
            for name, table in chosen.items()
        }
    with _replaced(model, rows, len(ids), own):
        model.foreign_config |= {name: new for name, new in moved.items() if name not in own}
    return VocabularyReport(
        rows_before=before,
        rows_after=len(ids),
        matrices=tuple(chosen),
        change=Change(total, count(model.parameters())),
        notes=(REMAKE_OPTIMIZER,),
    )


def _special_ids(model: GPT) -> dict[str, int]:
    """Return the ids inside the vocabulary that the config or the file's config gives a role."""
    named = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id")}
    named |= {k: v for k, v in model.foreign_config.items() if k.endswith("_token_id")}
    size = model.config.vocab_size
    return {k: v for k, v in named.items() if type(v) is int and 0 <= v < size}


@dataclasses.dataclass(frozen=True)
class _Draw:
    """Old rows, their mean, and how far from it new ones are drawn at the full spread."""

    old: Tensor
    mean: Tensor
    """(D,), or () for a bias, in float32."""
    deviations: Tensor
    """(n_new, D) or (n_new,), of the old rows' covariance, in float32."""

    @classmethod
    @torch.no_grad()
    def of(cls, name: str, table: nn.Parameter, n_new: int, seed: int) -> _Draw:
        """Draw from N(0, covariance of the rows); on the meta device only shapes."""
        old = table.detach()
        try:
            deviations = torch.zeros(n_new, *old.shape[1:], device=old.device)
        except RuntimeError as error:
            raise NoRoomError(f"no memory for {n_new:,} rows more: {error}") from None
        if old.is_meta:
            return cls(old, torch.zeros(old.shape[1:], device="meta"), deviations)
        mean = old.mean(0, dtype=torch.float32)
        _require_finite(name, old, mean)
        if old.ndim == 2 and old.shape[0] > 1:  # a bias has no direction to tell tokens apart by
            centred = old.float() - mean
            covariance = (centred.T @ centred).double() / (old.shape[0] - 1)
            _require_finite(name, old, covariance)
            values, vectors = torch.linalg.eigh(covariance)
            root = (vectors * values.clamp(min=0).sqrt()).float()  # root root^T = covariance
            normal = torch.randn(
                n_new, old.shape[1], generator=torch.Generator().manual_seed(seed)
            ).to(old.device)
            deviations = normal @ root.T
        return cls(old, mean, deviations)

    def rows(self, spread: float) -> Tensor:
        """Return the new rows alone."""
        return (self.mean + spread * self.deviations).to(self.old.dtype)

    def grown(self, spread: float) -> Tensor:
        """Return the old rows and the new ones after them."""
        try:
            return torch.cat([self.old, self.rows(spread)])
        except RuntimeError as error:
            raise NoRoomError(f"no memory for the larger matrix: {error}") from None


def _require_finite(name: str, old: Tensor, moments: Tensor) -> None:
    """Refuse to draw about rows without a finite mean and covariance."""
    if moments.isfinite().all():
        return
    rows = (~old.isfinite()).reshape(len(old), -1).any(1).nonzero().flatten().tolist()
    what = f"not finite in row {rows[0]}, one of {len(rows):,}" if rows else "too large for float32"
    raise UserError(
        f"{name} is {what}: new rows are drawn about the mean of all, so mend or prune these first"
    )


@contextmanager
def _replaced(
    model: GPT, rows: dict[str, Tensor], n: int, special_ids: dict[str, Any] | None = None
) -> Iterator[None]:
    """Put the new rows in place, each as a Parameter, and see that the head scores them.

    Whatever fails, here or in the body, leaves the model as it was.
    """
    config, foreign = model.config, dict(model.foreign_config)
    new_config = dataclasses.replace(config, vocab_size=n, **(special_ids or {}))
    old = {name: model.get_parameter(name) for name in rows}
    n_outputs = {name: getattr(_owner(model, name), "out_features", None) for name in rows}
    try:
        for name, new in rows.items():
            _set(model, name, nn.Parameter(new, requires_grad=old[name].requires_grad), n)
        model.config = new_config
        _require_scores(model, n)
        yield
    except BaseException:
        for name, parameter in old.items():
            _set(model, name, parameter, n_outputs[name])
        model.config, model.foreign_config = config, foreign
        raise


def _owner(model: GPT, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _set(model: GPT, name: str, parameter: nn.Parameter, n_outputs: int | None) -> None:
    owner = _owner(model, name)
    setattr(owner, name.rpartition(".")[2], parameter)
    if isinstance(owner, nn.Linear) and n_outputs is not None:
        owner.out_features = n_outputs


def _require_scores(model: GPT, n: int) -> None:
    """Try the head on one row: what no table shows (a size in its code) shows here."""
    if model.head is None:
        return
    try:
        scored = n_scored(model, model.head)
        wrong = "" if scored == n else f"{describe(model.head)} scores {scored:,} tokens then"
    except UserError as error:
        wrong = str(error)
    if wrong:
        raise UserError(
            f"the head cannot follow to {n:,} tokens: {wrong}; nothing was changed, resize before "
            "the head is replaced"
        )


def _ids(model: GPT, sample: Tensor | Ids | None) -> Tensor | None:
    """Return ids (B, T), which may have been given as lists; those outside V are refused."""
    if sample is None:
        return None
    try:
        ids = torch.as_tensor(sample)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UserError(f"sample holds no ids (B, T), rows of one length: {error}") from None
    size = model.config.vocab_size
    if not ids.numel() or ids.is_meta or not 0 <= ids.min() <= ids.max() < size:
        raise UserError(f"sample {tuple(ids.shape)} must hold ids of a vocabulary of {size} tokens")
    return ids


@torch.no_grad()
def _states(model: GPT, sample: Tensor | None, seed: int) -> Tensor | None:
    """Return hidden states (N, D) that the head is given; None on the meta device."""
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
def _mass(model: GPT, states: Tensor | None, n_old: int, spread: float) -> Mass | None:
    """Measure the probability of all rows from n_old on at the states (N, D)."""
    if states is None:
        return None
    with inference(model):
        parts = [
            model.logits(part).float().softmax(-1)[:, n_old:].sum(-1)
            for part in states.split(N_STATES)
        ]
    masses = torch.cat(parts)
    return Mass(
        mean=float(masses.mean()),
        largest=float(masses.max()),
        share=1 - n_old / model.config.vocab_size,
        n_states=len(masses),
        spread=spread,
    )
