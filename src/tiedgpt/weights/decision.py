"""Is the head the embedding? The one decision about a checkpoint or a model in memory.

    decide_tie(checkpoint)           -> TieDecision
    decide_tie(checkpoint, roles)    the same, where the two matrices are known

Loading, `tie show`, `tie audit` and `tie fix` use it and decide nothing themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Literal

from tiedgpt.weights.checkpoint import Checkpoint, Claim
from tiedgpt.weights.formats.transformers import MODEL_TYPES
from tiedgpt.weights.roles import Roles, find_roles

Kind = Literal[
    "tied", "tied, stored twice", "untied as claimed", "broken", "contradicts the claim", "no head"
]
SOUND: tuple[Kind, ...] = ("tied", "tied, stored twice", "untied as claimed", "no head")
"""Kinds with which nothing is wrong."""
Model = Literal["tied", "untied"]
Keep = Literal["input", "output", "both"]
Outcome = tuple[Kind, Model | None]
UNTIED: Outcome = ("untied as claimed", "untied")
BROKEN: Outcome = ("broken", None)
CONTRADICTION: Outcome = ("contradicts the claim", None)

TABLE: dict[str, tuple[Outcome, Outcome]] = {
    # what the matrices are: where a tie or nothing is claimed, where an untied head is claimed
    "one": (("tied", "tied"), CONTRADICTION),
    "one in two Parameters": (("broken", "tied"), CONTRADICTION),
    "two": (BROKEN, UNTIED),
    "two equal": (("tied, stored twice", "tied"), UNTIED),
    "two equal in training": (("broken", "tied"), UNTIED),
    "misfit": (BROKEN, BROKEN),
    "computed head": (BROKEN, ("untied as claimed", None)),
    "no head": (("no head", "tied"), ("no head", None)),
}
"""The kind, and what is loaded where nobody says more (None: that is an error).

The claim is the file's own, else that of the config.json beside it, else what the format or the
project means: minGPT is untied by design. In GGUF, and in a module without a config, two matrices
that differ are an untied head although nothing claims it.
"""


@dataclass(frozen=True)
class TieDecision:
    """What a checkpoint or a model is, by its matrices and its claim."""

    kind: Kind
    model: Model | None
    """What is loaded where nobody says more; None if somebody must."""
    reason: str
    """Why, in words that follow the checkpoint's name and a colon."""
    choices: tuple[Keep, ...]
    """If two matrices must be told apart: what may stay. Empty if there is nothing to choose."""
    claim: Claim
    roles: Roles
    source: str
    """The checkpoint's path, or the class of a model in memory."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return self.kind in SOUND

    @property
    def command(self) -> str:
        """The command that writes a corrected copy of a file, with the first of the choices."""
        path = Path(self.source)
        names = f"{quote(self.source)} {quote(f'{path.stem if path.suffix else path.name}-fixed')}"
        return f"tiedgpt tie fix {names}" + "".join(f" --keep {c}" for c in self.choices[:1])


def decide_tie(checkpoint: Checkpoint, roles: Roles | None = None) -> TieDecision:
    """Hold the claim against the matrices that are there, by `TABLE`.

    Matrices are read only if both are there and it depends on their numbers.
    """
    roles = find_roles(checkpoint) if roles is None else roles
    claim = checkpoint.claim
    matrices, reason = _describe(checkpoint, roles)
    is_untied = claim.is_tied is False or (matrices == "two" and claim.different_is_untied)
    kind, model = TABLE[matrices][is_untied]
    choices = () if kind in SOUND else _list_choices(checkpoint, roles)
    return TieDecision(kind, model, reason, choices, claim, roles, str(checkpoint.source))


def _describe(checkpoint: Checkpoint, roles: Roles) -> tuple[str, str]:
    """Return what the matrices are, a key of `TABLE`, and in words why that decides.

    A vocabulary has one size: two sizes do not fit in a GPT, whatever is claimed. One matrix
    stored as (D, V) where loaders expect (V, D) does not fit either.
    """
    claim, name = checkpoint.claim, roles.matrix.name
    is_untied = claim.is_tied is False
    if checkpoint.usage.head_computation or roles.unreadable:
        what = "something other than the embedding, or is not read here"
        return "computed head", f"the head computes with {what}"
    if roles.transposed and not checkpoint.any_layout:
        names = " and ".join(roles.transposed)
        return "misfit", f"{names} is transposed: its columns are tokens"
    if roles.input is None or roles.output is None:
        if checkpoint.usage.headless:
            return "no head", f"{name} reads, and by its architecture nothing predicts"
        missing = "head" if roles.input else "embedding"
        lost = f"{claim.source}, and there is one matrix, {name}: the {missing} is missing"
        return "one", lost if is_untied else f"{name} reads and predicts"
    if roles.is_shared and (checkpoint.in_memory or not is_untied):
        if is_untied:
            return "one", f"{claim.source}, and there is one matrix, {name}"
        if roles.has_two_parameters:
            why = "two Parameters lie on one storage, and an optimizer steps both"
            return "one in two Parameters", why
        return "one", f"{name} reads and predicts"
    reads, predicts = roles.input, roles.output
    shapes = f"{reads.name} is {reads.shape} and {predicts.name} is {predicts.shape}"
    if not roles.has_one_width:
        return "misfit", f"{shapes}: their widths differ"
    if roles.extra_rows and _has_one_vocabulary(checkpoint):
        return "misfit", f"{shapes}: both need a row for each token"
    if is_untied:
        return "two", claim.source
    names = f"{reads.name} and {predicts.name}"
    if roles.is_equal and not roles.extra_rows:
        if checkpoint.in_memory and (reads.trainable or predicts.trainable):
            why = f"{names} are equal, and the next training step parts them"
            return "two equal in training", why
        return "two equal", f"{names} are equal: tied"
    apart = roles.comparison or "cannot be compared"
    why = f"{names} {apart}, and {claim.source}"
    return "two", claim.source if claim.different_is_untied else why


def _has_one_vocabulary(checkpoint: Checkpoint) -> bool:
    """Whether the embedding must have the head's rows: in a GPT; some models read more tokens."""
    is_any_module = checkpoint.in_memory and not checkpoint.config
    return not is_any_module and checkpoint.config.get("model_type") in (None, *MODEL_TYPES)


def _list_choices(checkpoint: Checkpoint, roles: Roles) -> tuple[Keep, ...]:
    """Return which of two matrices may stay, where their numbers or the claim do not tell."""
    if (
        roles.pair is None
        or roles.is_shared
        or roles.unreadable
        or checkpoint.usage.head_computation
    ):
        return ()
    if not roles.has_one_width:
        return ("input",)
    is_untied = checkpoint.claim.is_tied is False
    if not roles.extra_rows:
        return () if is_untied or roles.is_equal else ("input", "output", "both")
    vocabulary = checkpoint.vocabulary
    if vocabulary is None:
        return "input", "output"
    if roles.is_equal and not is_untied:
        return ()
    return ("input",) if roles.pair[1].shape[0] < vocabulary else ("input", "output")
