"""Classifier-free guidance: away from how another prompt, the negative one, would go on.

Sanchez et al. 2023, "Stay on topic with Classifier-Free Guidance" (arXiv 2306.17806):

    log P'(x | prompt) = log P(x | negative) + scale (log P(x | prompt) - log P(x | negative))

A guided session is a session like any other, so that every way to decode works with it: each slot
has a twin that has read the negative prompt in the prompt's place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.infer.filters import Array
from tiedgpt.infer.session import Runner, Scores, Session


class GuidedRunner:
    """A runner for one prompt, of `n_prompt` tokens, guided away from the `negative` ids.

    scale 1 is no guidance; above 1 the prompt counts for more; at 0 only the negative one counts.
    Twice the slots are read. Raises UserError if the negative prompt leaves the context no room.
    """

    def __init__(
        self, runner: Runner, *, n_prompt: int, negative: Sequence[int], scale: float
    ) -> None:
        self.runner, self.scale = runner, scale
        self.n_prompt, self.negative = n_prompt, list(negative)
        n_positions = runner.config.n_positions
        self._longer = max(0, len(self.negative) - n_prompt)
        if not 0 < len(self.negative) <= n_positions:
            raise UserError(
                f"negative_prompt has {len(self.negative)} tokens: give 1 to {n_positions}, the "
                "model's context"
            )

    @property
    def config(self) -> GPTConfig:
        """The model's, its context shorter by as much as the negative prompt is longer."""
        config = self.runner.config
        return dataclasses.replace(config, n_positions=config.n_positions - self._longer)

    def session(self, *, slots: int, capacity: int) -> GuidedSession:
        """Return room for sequences that begin with the prompt; see `Runner.session`."""
        inner = self.runner.session(slots=2 * slots, capacity=capacity + self._longer)
        return GuidedSession(self, inner, slots, capacity)


class GuidedSession:
    """Slots that begin with the prompt, each with a twin at `slots` + slot; see `Session`."""

    def __init__(self, runner: GuidedRunner, inner: Session, slots: int, capacity: int) -> None:
        self._runner, self._inner = runner, inner
        self.slots, self.capacity = slots, capacity

    @property
    def config(self) -> GPTConfig:
        """The guided runner's."""
        return self._runner.config

    @property
    def lengths(self) -> list[int]:
        """Positions that are filled, by slot."""
        return self._inner.lengths[: self.slots]

    def read(
        self,
        slots: Sequence[int],
        ids: Sequence[Sequence[int]],
        *,
        every: bool = False,
        states: bool = False,
    ) -> list[Scores]:
        """Append ids to slots; logits from the prompt's last token on are guided log P'.

        Those of the prompt's earlier tokens, and all states, are the model's own.
        """
        n_prompt, negative = self._runner.n_prompt, self._runner.negative
        twins: dict[int, list[int]] = {}  # what each twin reads
        n_guided: dict[int, int] = {}  # for how many of the ids read there is guidance
        for slot, new in zip(slots, ids, strict=True):
            start = self.lengths[slot]
            if start + len(new) >= n_prompt:
                after = list(new[max(0, n_prompt - start) :])
                begins = start < n_prompt
                twins[slot] = [*negative, *after] if begins else after
                n_guided[slot] = len(after) + begins
        scores = self._inner.read(
            [*slots, *(self.slots + slot for slot in twins)],
            [*ids, *twins.values()],
            every=every,
            states=states,
        )
        twin_scores = dict(zip(twins, scores[len(slots) :], strict=True))
        return [
            self._guided(own, twin_scores[slot], n_guided[slot] if every else 1)
            if slot in twin_scores
            else own
            for slot, own in zip(slots, scores, strict=False)
        ]

    def _guided(self, own: Scores, twin: Scores, n: int) -> Scores:
        """Guide the last n rows of the logits."""
        logits = own.logits.copy()
        logits[-n:] = guided(own.logits[-n:], twin.logits[-n:], self._runner.scale)
        return Scores(logits, own.states)

    def cut(self, slot: int, length: int) -> None:
        """Forget all but the first positions of a slot, and what its twin has in their place."""
        self._inner.cut(slot, length)
        after = length - self._runner.n_prompt
        twin = len(self._runner.negative) + after if after >= 0 else 0
        self._inner.cut(self.slots + slot, twin)

    def copy(self, source: int, target: int) -> None:
        """Let a slot and its twin hold what others hold."""
        self._inner.copy(source, target)
        self._inner.copy(self.slots + source, self.slots + target)


def guided(logits: Array, negative: Array, scale: float) -> Array:
    """Logits (n, V) after the prompt and after the negative one -> log P' (n, V), up to a shift.

    That logits are log P up to a shift makes no difference to it.
    """
    return negative + scale * (logits - negative)
