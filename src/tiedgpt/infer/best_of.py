"""Best of n: several samples of one prompt, of which the likeliest is kept.

Likeliest is the highest mean log P of a token under the model itself, so that a short text has no
advantage. The prompt is read once.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiedgpt.core.config import GPTConfig
from tiedgpt.infer.continuation import Completion
from tiedgpt.infer.request import Request
from tiedgpt.infer.scheduler import Scheduler
from tiedgpt.infer.session import Runner, Scores, Session
from tiedgpt.text import Tokenizer


def best_of(
    runner: Runner,
    prompt: list[int],
    request: Request,
    *,
    n: int,
    tokenizer: Tokenizer | None = None,
    copies: int = 0,
) -> list[Completion]:
    """Return n samples of what follows the prompt's ids, the best first.

    Each is what a prompt given n times would draw; `copies` counts the equal prompts before.
    """
    capacity = min(runner.config.n_positions, len(prompt) + request.max_new_tokens - 1)
    session = SharedPrompts(runner.session(slots=n, capacity=capacity))
    scheduler = Scheduler(session, tokenizer=tokenizer)
    samples = [scheduler.add(prompt, request, copies=copies * n + i) for i in range(n)]
    while scheduler.busy:
        for sample, _ in scheduler.step():
            if sample.error is not None:
                raise sample.error
    return sorted((sample.completion() for sample in samples), key=mean_logprob, reverse=True)


def mean_logprob(completion: Completion) -> float:
    """Return the mean log P of its tokens."""
    return sum(completion.logprobs) / len(completion.logprobs)


class SharedPrompts:
    """A session in which empty slots that are to read the same ids read them once; see `Session`.

    They share their scores, too, which are not to be changed in place.
    """

    def __init__(self, inner: Session) -> None:
        self._inner = inner
        self.slots, self.capacity = inner.slots, inner.capacity
        self.cut, self.copy = inner.cut, inner.copy

    @property
    def config(self) -> GPTConfig:
        """The model's."""
        return self._inner.config

    @property
    def lengths(self) -> list[int]:
        """Positions that are filled, by slot."""
        return self._inner.lengths

    def read(
        self,
        slots: Sequence[int],
        ids: Sequence[Sequence[int]],
        *,
        every: bool = False,
        states: bool = False,
    ) -> list[Scores]:
        """Append ids to slots and return scores; see `Session.read`."""
        lengths = self.lengths
        first: dict[tuple[int, ...], int] = {}  # which of the empty ones reads these ids
        reader = [
            i if lengths[slot] else first.setdefault(tuple(new), i)
            for i, (slot, new) in enumerate(zip(slots, ids, strict=True))
        ]
        own = [i for i, by in enumerate(reader) if i == by]
        read = self._inner.read(
            [slots[i] for i in own], [ids[i] for i in own], every=every, states=states
        )
        scores = dict(zip(own, read, strict=True))
        for i, by in enumerate(reader):
            if i != by:
                self._inner.copy(slots[by], slots[i])
        return [scores[by] for by in reader]
