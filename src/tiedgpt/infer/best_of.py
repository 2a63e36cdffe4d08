"""Best of n: several samples of one prompt, of which the likeliest is kept.

Likeliest is the highest mean log P of a token under the model itself, so that a short text has no
advantage. The prompt is read once.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiedgpt.infer.continuation import Completion, Continuation
from tiedgpt.infer.joint import Lane, Read, Reading, Steps
from tiedgpt.infer.scheduler import Sequences
from tiedgpt.text import Tokenizer


def best_of(
    lane: Lane, begun: Continuation, *, tokenizer: Tokenizer | None = None, copies: int = 0
) -> Steps[list[Completion]]:
    """Draw a sample in every slot of the lane of what follows the prompt, and sort: the best first.

    Each is what a prompt given so many times would draw; `copies` counts the equal prompts before.
    """
    n = lane.slots
    drawn = Sequences(SharedPrompts(lane), tokenizer=tokenizer)
    samples = [drawn.add(begun.ids, begun.request, copies=copies * n + i) for i in range(n)]
    while drawn.busy:
        for sample, _ in (yield from drawn.steps()):
            if sample.error is not None:
                raise sample.error
    return sorted((sample.completion() for sample in samples), key=mean_logprob, reverse=True)


def mean_logprob(completion: Completion) -> float:
    """Return the mean log P of its tokens."""
    return sum(completion.logprobs) / len(completion.logprobs)


class SharedPrompts:
    """A lane in which empty slots that are to read the same ids read them once; see `Lane`.

    They share their scores, too, which are not to be changed in place.
    """

    def __init__(self, inner: Lane) -> None:
        self._inner = inner
        self.config, self.price = inner.config, inner.price
        self.slots, self.capacity = inner.slots, inner.capacity
        self.cut, self.copy = inner.cut, inner.copy

    @property
    def lengths(self) -> list[int]:
        """Positions that are filled, by slot."""
        return self._inner.lengths

    def read(self, reads: Sequence[Read]) -> Reading:
        """Append ids to slots; see `Lane.read`."""
        lengths = self.lengths
        first: dict[tuple[int, ...], Read] = {}  # which of the empty slots reads these ids
        readers = [
            read if lengths[read.slot] else first.setdefault(tuple(read.ids), read)
            for read in reads
        ]
        own = [read for read, reader in zip(reads, readers, strict=True) if read is reader]
        found = yield from self._inner.read(own)
        scores = {read.slot: its for read, its in zip(own, found, strict=True)}
        for read, reader in zip(reads, readers, strict=True):
            if read is not reader:
                self._inner.copy(reader.slot, read.slot)
        return [scores[reader.slot] for reader in readers]
