"""Decide whether the head is the embedding, in a checkpoint or a model in memory.

    decide_tie(checkpoint)      -> TieDecision
    decision.choose(resolve)    -> the one or two matrices of a GPT, by our names

Loading, `tie show`, `tie audit` and `tie fix` decide by this file alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Literal

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import EMBEDDING, HEAD, TIE_KEY, Checkpoint, Claim
from tiedgpt.weights.formats.transformers import MODEL_TYPES
from tiedgpt.weights.roles import Roles, find_roles
from tiedgpt.weights.tensors import StoredTensor

Kind = Literal[
    "tied", "tied, stored twice", "untied as claimed", "broken", "contradicts the claim", "no head"
]
SOUND: tuple[Kind, ...] = ("tied", "tied, stored twice", "untied as claimed", "no head")
"""Kinds with which nothing is wrong."""
Model = Literal["tied", "untied"]
Keep = Literal["input", "output", "both"]
RESOLUTION_OF: dict[Keep, str] = {"input": "keep-input", "output": "keep-output", "both": "untie"}
"""The `resolve` of `load` by the `keep` of `tie fix`."""
RESOLUTIONS = (*RESOLUTION_OF.values(), "tie")
Outcome = tuple[Kind, Model | None]
UNTIED: Outcome = ("untied as claimed", "untied")
BROKEN: Outcome = ("broken", None)
CONTRADICTION: Outcome = ("contradicts the claim", None)

TABLE: dict[str, tuple[Outcome, Outcome]] = {
    # matrices: (if a tie or nothing is claimed, if an untied head is claimed)
    "one": (("tied", "tied"), CONTRADICTION),
    "one in two Parameters": (("broken", "tied"), CONTRADICTION),
    "two": (BROKEN, UNTIED),
    "two equal": (("tied, stored twice", "tied"), UNTIED),
    "two equal in training": (("broken", "tied"), UNTIED),
    "misfit": (BROKEN, BROKEN),
    "computed head": (BROKEN, ("untied as claimed", None)),
    "no head": (("no head", "tied"), ("no head", None)),
}
"""Kind and loaded model by the matrices and the claim; with None a choice is needed.

The claim is the file's own, else that of the config.json next to it, else the convention of the
format: minGPT is untied by design. In GGUF, in a module without a config, and in a file of
an unknown program that stores the head as (D, V), as TransformerLens does, two different matrices
are an untied head although nothing claims it.
"""


@dataclass(frozen=True)
class TieDecision:
    """The kind of a checkpoint or a model, by its matrices and its claim."""

    kind: Kind
    model: Model | None
    """The model that is loaded without a choice; None if a choice is needed."""
    reason: str
    """Reason in words that follow the checkpoint's name and a colon."""
    choices: tuple[Keep, ...]
    """Matrices that may be kept of two; empty if there is nothing to choose."""
    roles: Roles
    checkpoint: Checkpoint
    """Checkpoint, with the caller's claim if the file makes no claim."""

    @property
    def is_turned_copy(self) -> bool:
        """Whether an unknown program stores the head as (D, V), which it cannot share."""
        return self.checkpoint.is_unknown and self.roles.is_turned

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return self.kind in SOUND

    @property
    def command(self) -> str:
        """The command that writes a corrected copy of a file, with the first of the choices."""
        path = Path(self.checkpoint.source)
        names = f"{quote(str(path))} {quote(f'{path.stem if path.suffix else path.name}-fixed')}"
        return f"tiedgpt tie fix {names}" + "".join(f" --keep {c}" for c in self.choices[:1])

    def choose(self, resolve: str | None = None) -> dict[str, StoredTensor]:
        """Return the one or two matrices of a GPT, by our names.

        `resolve` overrides the decision: "tie" uses the only matrix for reading and predicting,
        "untie" keeps two, "keep-input" and "keep-output" make one of two. Raises
        `CorruptInputError` if the file contradicts itself, `UserError` if `resolve` does not apply.
        """
        roles, source = self.roles, self.checkpoint.source
        if resolve is not None and resolve not in RESOLUTIONS:
            raise UserError(
                f"must be one of {', '.join(RESOLUTIONS)}, got {resolve!r}", option="resolve"
            )
        if resolve == "untie" and roles.pair is None:
            raise UserError(
                f'{source} holds one matrix, and "untie" needs two', hint="load it, then untie it"
            )
        if resolve == "tie" and roles.pair is not None and not roles.is_shared:
            raise UserError(
                f"{source} holds two matrices", hint='choose "keep-input" or "keep-output"'
            )
        is_choice = resolve in ("tie", "untie") or (resolve is not None and roles.pair is not None)
        if self.model is None and not is_choice:
            raise CorruptInputError(f"{source}: {self.reason}", hint=self._find_remedy())
        if (resolve or self.model) in ("untie", "untied") and roles.pair is not None:
            return dict(zip((EMBEDDING, HEAD), roles.pair, strict=True))
        if resolve == "keep-output" and roles.output is not None:
            return {EMBEDDING: roles.output}
        return {EMBEDDING: roles.matrix}

    def _find_remedy(self) -> str:
        """Return the choices that load a checkpoint, and the command or call that corrects it."""
        if self.roles.pair is None or self.roles.is_shared:
            return 'resolve="tie" (--resolve tie) lets the one matrix read and predict'
        command = f"`{self.command}` writes a copy that loads"
        if self.checkpoint.in_memory:
            command = "tiedgpt.tie.tie(model) makes them one"
        if not self.choices:
            return command
        options = " or ".join(f'resolve="{RESOLUTION_OF[choice]}"' for choice in self.choices)
        return f"choose {options} (--resolve); {command}"


def decide_tie(
    checkpoint: Checkpoint,
    gpt: Mapping[str, StoredTensor] | None,
    *,
    is_tied: bool | None = None,
    input_name: str | None = None,
    output_name: str | None = None,
) -> TieDecision:
    """Compare the claim with the matrices, by `TABLE`.

    `gpt` are the tensors by our names; None for another architecture. `is_tied` is the caller's
    claim about a checkpoint without one. The names are those of `find_roles`. Two matrices are read
    only if the decision depends on their numbers.
    """
    if gpt is None and not checkpoint.any_layout:
        is_unknown = checkpoint.config.get("model_type") in (None, *MODEL_TYPES)
        checkpoint = replace(checkpoint, is_unknown=is_unknown)
    if is_tied is not None:
        if checkpoint.claim.is_tied not in (None, is_tied):
            raise UserError(f"{TIE_KEY}={is_tied} contradicts the file: {checkpoint.claim.source}")
        checkpoint = replace(checkpoint, claim=Claim(is_tied, f"{TIE_KEY}={is_tied} is given"))
    roles = find_roles(checkpoint, gpt, input_name=input_name, output_name=output_name)
    if checkpoint.is_unknown and roles.is_turned and checkpoint.claim.is_tied is None:
        source = f"{roles.transposed[0]} is stored transposed, as a matrix of its own"
        checkpoint = replace(checkpoint, claim=Claim(None, source, different_is_untied=True))
    matrices, reason = _describe(checkpoint, roles)
    claim = checkpoint.claim
    is_untied = claim.is_tied is False or (matrices == "two" and claim.different_is_untied)
    kind, model = TABLE[matrices][is_untied]
    choices = () if kind in SOUND else _list_choices(checkpoint, roles)
    return TieDecision(kind, model, reason, choices, roles, checkpoint)


def _describe(checkpoint: Checkpoint, roles: Roles) -> tuple[str, str]:
    """Return the matrices as a key of `TABLE`, and the reason in words.

    A GPT's vocabulary has one size: two sizes do not fit, whatever is claimed. A matrix stored as
    (D, V) does not fit either if loaders expect (V, D).
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
    # In a GPT the embedding has the head's rows; some other models read more tokens.
    is_any_module = checkpoint.in_memory and not checkpoint.config
    is_gpt = not is_any_module and checkpoint.config.get("model_type") in (None, *MODEL_TYPES)
    if roles.extra_rows and is_gpt:
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
