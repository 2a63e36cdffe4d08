"""Is the head the embedding? The one decision about a checkpoint or a model in memory.

    decide_tie(checkpoint)           -> TieDecision
    decide_tie(checkpoint, roles)    the same, where the two matrices are known

Loading, `tie show`, `tie audit` and `tie fix` use it and decide nothing themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from tiedgpt.weights.checkpoint import Checkpoint, Claim
from tiedgpt.weights.comparison import Comparison
from tiedgpt.weights.formats.transformers import MODEL_TYPES
from tiedgpt.weights.roles import Roles, find_roles

Kind = Literal[
    "tied", "tied twice", "untied as claimed", "broken", "contradicts the claim", "no head"
]
SOUND: tuple[Kind, ...] = ("tied", "tied twice", "untied as claimed", "no head")
"""Kinds with which nothing is wrong."""
Model = Literal["tied", "untied"]
Keep = Literal["input", "output", "both"]


class _Judgement(NamedTuple):
    kind: Kind
    model: Model | None
    reason: str


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

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return self.kind in SOUND

    @property
    def comparison(self) -> Comparison | None:
        """How far apart the two matrices are; None if there is one, or they cannot be compared."""
        return self.roles.comparison

    @property
    def command(self) -> str:
        """The command that mends a file, with the option that it asks for."""
        keep = f" --keep {' | '.join(self.choices)}" if self.choices else ""
        return f"`tiedgpt tie fix MODEL DEST{keep}`"


def decide_tie(checkpoint: Checkpoint, roles: Roles | None = None) -> TieDecision:
    """Hold the claim against the matrices that are there.

    The claim comes first. It is the file's own, else that of the config.json beside it, else what
    the format or the project means: minGPT is untied by design, and in a GGUF file output.weight
    predicts where it differs from token_embd.weight.

        claim            the matrices                            kind                   loads as
        tied or nothing  one, or two names of one storage        tied                   tied
        tied or nothing  two, equal, in a file                   tied twice             tied
        tied or nothing  two that differ, or do not fit          broken                 an error
        untied           two of one shape, equal or not          untied as claimed      untied
        untied           one                                     contradicts the claim  an error
        untied           two that do not fit                     broken                 an error
        nothing          two that differ, in a module without a  untied as claimed      untied
                         config or in GGUF
        anything         no head: a body, a classifier           no head                tied

    One stored as (D, V) where loaders expect (V, D) is broken. In memory, two Parameters where one
    is meant are broken as well: the next training step parts them. A vocabulary has one size: with
    rows on one side only, a GPT is broken whatever is claimed. Matrices are read only if both are
    there and it depends on their numbers.
    """
    roles = find_roles(checkpoint) if roles is None else roles
    judgement = _judge(checkpoint, roles)
    sound = judgement.kind in SOUND
    choices = () if sound else _choices(checkpoint, roles)
    return TieDecision(*judgement, choices, checkpoint.claim, roles)


def _judge(checkpoint: Checkpoint, roles: Roles) -> _Judgement:
    claim, in_memory = checkpoint.claim, checkpoint.in_memory
    if checkpoint.usage.derived or roles.unreadable:
        reason = "the head computes with something other than the embedding, or is not read here"
        kind: Kind = "untied as claimed" if claim.is_tied is False else "broken"
        return _Judgement(kind, None, reason)
    if roles.transposed and not checkpoint.any_layout:
        names = " and ".join(roles.transposed)
        return _Judgement("broken", None, f"{names} is transposed: its columns are tokens")
    if roles.pair is None and checkpoint.usage.headless:
        model: Model | None = None if claim.is_tied is False else "tied"
        reason = f"{roles.matrix.name} reads, and by its architecture nothing predicts"
        return _Judgement("no head", model, reason)
    if roles.pair is None or (roles.shared and (in_memory or claim.is_tied is not False)):
        return _judge_one(checkpoint, roles)
    return _judge_two(checkpoint, roles)


def _judge_one(checkpoint: Checkpoint, roles: Roles) -> _Judgement:
    """Judge one matrix, under one name or two."""
    claim, name = checkpoint.claim, roles.matrix.name
    if claim.is_tied is False:
        reason = f"{claim.source}, and there is one matrix, {name}"
        side = "head" if roles.input else "embedding"
        missing = "" if roles.shared else f": the {side} is missing"
        return _Judgement("contradicts the claim", None, reason + missing)
    if roles.two_parameters:
        reason = "two Parameters lie on one storage, and an optimizer steps both"
        return _Judgement("broken", "tied", reason)
    return _Judgement("tied", "tied", f"{name} reads and predicts")


def _judge_two(checkpoint: Checkpoint, roles: Roles) -> _Judgement:
    """Judge two matrices, each with a token in a row."""
    assert roles.pair is not None
    reads, predicts = roles.pair
    claim, names = checkpoint.claim, f"{reads.name} and {predicts.name}"
    shapes = f"{reads.name} is {reads.shape} and {predicts.name} is {predicts.shape}"
    if not roles.fits:
        return _Judgement("broken", None, f"{shapes}: their widths differ")
    if roles.extra_rows and _has_one_vocabulary(checkpoint):
        return _Judgement("broken", None, f"{shapes}: both need a row for each token")
    if claim.is_tied is False:
        return _Judgement("untied as claimed", "untied", claim.source)
    if roles.equal and not roles.extra_rows:
        if checkpoint.in_memory and (reads.trainable or predicts.trainable):
            reason = f"{names} are equal, and the next training step parts them"
            return _Judgement("broken", "tied", reason)
        return _Judgement("tied twice", "tied", f"{names} are equal: tied")
    if claim.different_is_untied:
        return _Judgement("untied as claimed", "untied", claim.source)
    apart = roles.comparison or "cannot be compared"
    return _Judgement("broken", None, f"{names} {apart}, and {claim.source}")


def _has_one_vocabulary(checkpoint: Checkpoint) -> bool:
    """Whether the embedding must have the head's rows: in a GPT; some models read more tokens."""
    is_any_module = checkpoint.in_memory and not checkpoint.config
    return not is_any_module and checkpoint.config.get("model_type") in (None, *MODEL_TYPES)


def _choices(checkpoint: Checkpoint, roles: Roles) -> tuple[Keep, ...]:
    """Return which of two matrices may stay, where their numbers or the claim do not tell."""
    if roles.pair is None or roles.shared or roles.unreadable or checkpoint.usage.derived:
        return ()
    if not roles.fits:
        return ("input",)
    untied = checkpoint.claim.is_tied is False
    if roles.extra_rows:
        vocabulary = checkpoint.vocabulary
        if roles.equal and not untied and vocabulary is not None:
            return ()
        is_short = vocabulary is not None and roles.pair[1].shape[0] < vocabulary
        return ("input",) if is_short else ("input", "output")
    return () if roles.equal or untied else ("input", "output", "both")
