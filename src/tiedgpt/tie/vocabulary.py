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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tiedgpt.core.model import GPT
from tiedgpt.errors import NoRoomError, UserError
from tiedgpt.tie.heads import Unembed, aliases, matrices, require_gpt
from tiedgpt.tie.reports import REMAKE_OPTIMIZER, Change, Mass, VocabularyReport
from tiedgpt.tie.storages import count

SPREAD = 0.1
"""Standard deviation of new rows about the mean, in units of the old rows' covariance."""

MOST_OF_SHARE = 2.0
"""New rows that take more than this multiple of their share are drawn closer to the mean."""

HALVINGS = 10
"""How often the spread is halved before the new rows are put at the mean itself."""

N_STATES = 64
"""Hidden states on which the new tokens' probability is measured where no sample is given."""


def resize_vocab(
    model: GPT, n: int, *, sample: Tensor | None = None, seed: int = 0
) -> VocabularyReport:
    """Give the vocabulary n tokens, in place: new rows at the end, or the first n kept.

    New rows of (V, D) come from the mean and covariance of the old ones, with a tenth of their
    spread, halved until they take at most twice their share of probability at the states that are
    looked at: those of `sample`, ids (B, T), or of random ids. `seed` alone decides the draw;
    torch's own random stream is not touched. dtype, device and requires_grad stay.

    `wte.weight` becomes a new Parameter: an optimizer that holds the old one must be made anew.
    Raises `UserError`, before anything changes, if a special id would be lost or the head has
    other parts of V entries; `NoRoomError` if the rows do not fit in memory.
    """
    model = require_gpt(model)
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UserError(f"n={n!r} is no number of tokens: give a whole number above 0")
    before = model.config.vocab_size
    if n == before:
        total = count(model.parameters())
        return VocabularyReport(before, n, (), Change(total, total))
    if n < before:
        return _select(model, list(range(n)))
    tables = _tables(model)
    drawn = {name: _Draw.of(table, n - before, seed) for name, table in tables.items()}
    states = _states(model, sample, seed)
    total = count(model.parameters())
    spread = SPREAD
    _replace(model, {name: draw.grown(spread) for name, draw in drawn.items()}, n)
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
        matrices=tuple(tables),
        change=Change(total, count(model.parameters())),
        mass=mass,
        notes=(REMAKE_OPTIMIZER,),
    )


def add_tokens(
    model: GPT, n_new: int, *, sample: Tensor | None = None, seed: int = 0
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
    tables = _tables(model)
    total = count(model.parameters())
    moved = {name: place[old] for name, old in special.items()}
    own = {name: new for name, new in moved.items() if hasattr(model.config, name)}
    with torch.no_grad():
        rows = {
            name: table.detach()[torch.tensor(ids, device=table.device)]
            for name, table in tables.items()
        }
    _replace(model, rows, len(ids), own)
    model.foreign_config |= {name: new for name, new in moved.items() if name not in own}
    return VocabularyReport(
        rows_before=before,
        rows_after=len(ids),
        matrices=tuple(tables),
        change=Change(total, count(model.parameters())),
        notes=(REMAKE_OPTIMIZER,),
    )


def _special_ids(model: GPT) -> dict[str, int]:
    """Return the ids inside the vocabulary that the config or the file's config gives a role."""
    named = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id")}
    named |= {k: v for k, v in model.foreign_config.items() if k.endswith("_token_id")}
    size = model.config.vocab_size
    return {k: v for k, v in named.items() if type(v) is int and 0 <= v < size}


def _tables(model: GPT) -> dict[str, nn.Parameter]:
    """Return the parameters that have one entry a token: W, and those of a head of its own."""
    tables = {"wte.weight": model.wte.weight}
    if model.head is None:
        return tables
    if second := aliases(model.head, model):
        raise UserError(
            f"{second[0]} is wte.weight under a second name; resize before the head is replaced"
        )
    size = model.config.vocab_size
    for name in matrices(model.head, model):
        tables[f"{name}.weight"] = model.get_parameter(f"{name}.weight")
    faces = [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, Unembed))]
    for name, parameter in model.head.named_parameters("head"):
        owner, _, last = name.rpartition(".")
        if name in tables or size not in parameter.shape:
            continue
        if last != "bias" or owner not in faces or parameter.shape != (size,):
            raise UserError(
                f"{name} {tuple(parameter.shape)} has {size} entries in a head that is no plain "
                "product with a matrix (V, D): resize before the head is replaced"
            )
        tables[name] = parameter
    return tables


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
    def of(cls, table: nn.Parameter, n_new: int, seed: int) -> _Draw:
        """Draw from N(0, covariance of the rows); on the meta device only shapes."""
        old = table.detach()
        try:
            deviations = torch.zeros(n_new, *old.shape[1:], device=old.device)
        except RuntimeError as error:
            raise NoRoomError(f"no memory for {n_new:,} rows more: {error}") from None
        if old.is_meta:
            return cls(old, torch.zeros(old.shape[1:], device="meta"), deviations)
        mean = old.mean(0, dtype=torch.float32)
        if old.ndim == 2 and old.shape[0] > 1:  # a bias has no direction to tell tokens apart by
            centred = old.float() - mean
            covariance = (centred.T @ centred).double() / (old.shape[0] - 1)
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


def _replace(
    model: GPT, rows: dict[str, Tensor], n: int, special_ids: dict[str, Any] | None = None
) -> None:
    """Put the new rows in place, each as a Parameter; nothing can fail half-way."""
    config = dataclasses.replace(model.config, vocab_size=n, **(special_ids or {}))
    for name, new in rows.items():
        owner_name, _, last = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        old = model.get_parameter(name)
        setattr(owner, last, nn.Parameter(new, requires_grad=old.requires_grad))
        if isinstance(owner, nn.Linear):
            owner.out_features = n
    model.config = config


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
    with _inference(model):
        return model.body(sample.to(weight.device)).flatten(0, 1)


@torch.no_grad()
def _mass(model: GPT, states: Tensor | None, n_old: int, spread: float) -> Mass | None:
    """Measure the probability of all rows from n_old on at the states (N, D)."""
    if states is None:
        return None
    with _inference(model):
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


@contextmanager
def _inference(model: GPT) -> Iterator[None]:
    """Switch dropout off for a while, module by module as it was."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
