"""Classifier-free guidance: away from how another prompt, the negative one, would go on.

Sanchez et al. 2023, "Stay on topic with Classifier-Free Guidance" (arXiv 2306.17806):

    log P'(x | prompt) = log P(x | negative) + scale (log P(x | prompt) - log P(x | negative))

Guided slots are used like any others, so that sampling and beam search work in them: each slot has
a twin that has read the negative prompt in the prompt's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.infer.session import Logits
from tiedgpt.infer.slots import Read, Slots, Steps


@dataclass(frozen=True)
class Guidance:
    """Where a prompt of `n_prompt` tokens is led: away from the `negative` ids.

    scale 1 is no guidance; above 1 the prompt counts for more; at 0 only the negative one counts.
    """

    n_prompt: int
    negative: Sequence[int]
    scale: float

    @property
    def longer(self) -> int:
        """Positions that the negative prompt takes beyond the prompt's."""
        return max(0, len(self.negative) - self.n_prompt)

    def require_room(self, config: GPTConfig) -> None:
        """Raise `UserError` for a negative prompt that is empty or longer than the context."""
        if not 0 < len(self.negative) <= config.n_positions:
            raise UserError(
                f"has {len(self.negative)} tokens",
                option="negative_prompt",
                hint=f"give 1 to {config.n_positions}, the model's context",
            )


class GuidedSlots(Slots):
    """Half of some slots, which begin with the prompt, each with a twin in the other half.

    A slot is shorter by as much as the negative prompt is longer than the prompt; see `Slots`.
    """

    def __init__(self, inner: Slots, guidance: Guidance) -> None:
        super().__init__(inner.pool, inner.numbers)
        self.capacity -= guidance.longer
        self._guidance = guidance

    def __len__(self) -> int:
        """The number of slots."""
        return len(self.numbers) // 2

    def read(self, reads: Sequence[Read]) -> Steps[list[Logits]]:
        """Append ids to slots; logits from the prompt's last token on are guided log P'.

        Those of the prompt's earlier tokens are the model's own.
        """
        n_prompt, negative = self._guidance.n_prompt, self._guidance.negative
        twins: dict[int, Read] = {}  # what each slot's twin reads
        n_guided: dict[int, int] = {}  # for how many of the ids read there is guidance
        for read in reads:
            slot, start = read.slot, self.length(read.slot)
            if start + len(read.ids) >= n_prompt:
                after = list(read.ids[max(0, n_prompt - start) :])
                begins = start < n_prompt
                ids = [*negative, *after] if begins else after
                twins[slot] = Read(len(self) + slot, ids, read.every, read.drafted)
                n_guided[slot] = len(after) + begins if read.every else 1
        logits = yield from super().read([*reads, *twins.values()])
        twin_logits = dict(zip(twins, logits[len(reads) :], strict=True))
        return [
            self._guided(own, twin_logits[read.slot], n_guided[read.slot])
            if read.slot in twins
            else own
            for read, own in zip(reads, logits, strict=False)
        ]

    def _guided(self, own: Logits, twin: Logits, n: int) -> Logits:
        """Guide the last n rows: logits (n, V) are log P up to a shift, which changes nothing."""
        logits = own.copy()
        logits[-n:] = twin[-n:] + self._guidance.scale * (own[-n:] - twin[-n:])
        return logits

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first positions of a slot, and what its twin has in their place."""
        super().truncate(slot, length)
        after = length - self._guidance.n_prompt
        twin = len(self._guidance.negative) + after if after >= 0 else 0
        super().truncate(len(self) + slot, twin)

    def copy(self, source: int, target: int) -> None:
        """Let a slot and its twin hold what others hold."""
        super().copy(source, target)
        super().copy(len(self) + source, len(self) + target)
