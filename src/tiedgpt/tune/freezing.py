"""Choose the trained parameters by name, and count them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import groupby

from torch import nn

from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.heads import Head
from tiedgpt.signatures import checked, require_type
from tiedgpt.tie.heads import is_tied

Model = GPT | Head
TWO_CHOICES = (
    "the model is tied: wte.weight reads tokens and predicts them, and there is no head to train "
    "alone. Two choices: train wte, on both sides; or untie the model first (tiedgpt.tie.untie), "
    "and its head is a matrix of its own"
)


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of one part of the model, or of neighbouring blocks with equal counts."""

    name: str
    moving: int
    """Parameters that are trained."""
    frozen: int
    """Parameters that are frozen."""


@dataclass(frozen=True, repr=False)
class TrainableParameters:
    """Counts of trained and frozen parameters; `print` it."""

    groups: tuple[ParameterCount, ...]
    embedding: str
    """The use of the matrix W, in words."""

    @property
    def moving(self) -> int:
        """The number of parameters that are trained, each counted once."""
        return sum(group.moving for group in self.groups)

    @property
    def total(self) -> int:
        """The number of all parameters, each counted once."""
        return sum(group.moving + group.frozen for group in self.groups)

    def __str__(self) -> str:
        rows = [
            f"  {group.name:<20}{group.moving:>14,} trained{group.frozen:>16,} frozen"
            for group in self.groups
        ]
        share = 100 * self.moving / max(1, self.total)
        first = f"{self.moving:,} of {self.total:,} parameters are trained ({share:.2f} %)"
        return "\n".join([first, *rows, self.embedding])

    __repr__ = __str__


@checked
def freeze(model: Model, patterns: str | Sequence[str]) -> TrainableParameters:
    """Freeze parameters, in place; return the counts of trained and frozen ones.

    A pattern is a parameter's name or its beginning up to a dot: "wte", "h.0", "h.*.attn". `*`
    matches anything, `body` everything but the head. A pattern with "+" trains its parameters
    instead: "body,+h.11". Patterns are a list, or a string with commas; the last match decides.
    Parameters without a match do not change.

    Raises `UserError`, with nothing changed, for a pattern that fits no parameter, for a choice
    that leaves nothing to train, and for a head to train alone in a tied model, which has none.
    """
    tied = predicts_with_w(model)
    patterns = patterns.split(",") if isinstance(patterns, str) else patterns
    named = dict(model.named_parameters())
    trained = {name: parameter.requires_grad for name, parameter in named.items()}
    for pattern in filter(None, (pattern.strip() for pattern in patterns)):
        matches = [name for name in named if _fits(name, pattern.removeprefix("+"))]
        if not matches:
            if pattern.removeprefix("+") in ("head", "lm_head") and tied:
                raise UserError(f"--freeze {pattern}: {TWO_CHOICES}")
            there = ", ".join(dict.fromkeys(_component(name).split(".")[0] for name in named))
            raise UserError(f"--freeze {pattern}: no parameter has such a name: body, {there}")
        trained |= dict.fromkeys(matches, pattern.startswith("+"))
    if not any(trained.values()):
        why = TWO_CHOICES if tied else "train some part of it again with +NAME"
        raise UserError(f"--freeze {','.join(patterns)} leaves nothing to train: {why}")
    for name, parameter in named.items():
        parameter.requires_grad_(trained[name])
    return count_trainable(model)


def count_trainable(model: Model) -> TrainableParameters:
    """Return the counts of trained and frozen parameters of a model."""
    counts: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        count = counts.setdefault(_component(name), [0, 0])
        count[not parameter.requires_grad] += parameter.numel()
    groups = []
    for (is_block, moves, stays), alike in groupby(
        counts.items(), key=lambda item: (item[0].startswith("h."), *item[1])
    ):
        names = [name for name, _ in alike]
        if is_block:
            name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            groups.append(ParameterCount(name, moves * len(names), stays * len(names)))
        else:
            groups += [ParameterCount(name, moves, stays) for name in names]
    return TrainableParameters(tuple(groups), _describe_w(model))


def gpt_of(model: nn.Module) -> GPT:
    """Return the GPT, or the one under a head of `tiedgpt.heads`; `UserError` for another model."""
    require_type("the function", "model", model, nn.Module)
    gpt = model.gpt if isinstance(model, Head) else model
    if not isinstance(gpt, GPT):
        raise UserError(
            f"{type(model).__name__} is neither a tiedgpt.GPT nor a head of tiedgpt.heads",
            hint="give the model inside it",
        )
    return gpt


def predicts_with_w(model: Model) -> bool:
    """Whether W predicts tokens in this model: tied, and not under a classifier."""
    return is_tied(gpt_of(model)) and getattr(model, "predicts_tokens", True)


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern is a parameter's name or the beginning of it, up to a dot."""
    inner = name.removeprefix("gpt.")
    if pattern == "body":
        return inner.split(".")[0] in ("wte", "wpe", "h", "ln_f")
    names = (name, inner)
    return any(fnmatch(n, pattern) or fnmatch(n, f"{pattern}.*") for n in names)


def _component(name: str) -> str:
    """Return the part of the model that a parameter belongs to: wte, h.0, ln_f, head, score."""
    parts = name.removeprefix("gpt.").split(".")
    return ".".join(parts[:2]) if parts[0] == "h" else parts[0]


def _describe_w(model: Model) -> str:
    """Return the use of W, and whether it is trained."""
    wte = gpt_of(model).wte
    is_trained = any(parameter.requires_grad for parameter in wte.parameters())
    if not predicts_with_w(model):
        return f"W (wte) only reads, and is {'trained' if is_trained else 'frozen'}"
    if is_trained:
        return "W (wte) reads and predicts: its rows change as inputs and as outputs"
    return "W (wte) reads and predicts: it is frozen as input and as output"
