"""One prompt's ids and a strategy -> the search that the strategy names, for its completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.infer.beam import Adjust, beam_search
from tiedgpt.infer.best_of import best_of
from tiedgpt.infer.continuation import Completion, Continuation, FinishReason
from tiedgpt.infer.guidance import Guidance, GuidedLane
from tiedgpt.infer.joint import Lane, Search, Steps
from tiedgpt.infer.request import Request
from tiedgpt.infer.scheduler import Sequences
from tiedgpt.infer.strategy import Strategy
from tiedgpt.text import Tokenizer


def search_for(
    prompt: list[int],
    strategy: Strategy,
    request: Request,
    *,
    config: GPTConfig,
    tokenizer: Tokenizer | None = None,
    negative: Sequence[int] | None = None,
    copies: int = 0,
) -> Search[Completion]:
    """Return the search that completes a prompt; what cannot be done raises `UserError`.

    `negative` are the ids of the negative prompt, if one was given; `copies` counts the equal
    prompts before it, whose draws are others. The constraint is in the request already.
    """
    guidance = None
    n_positions = config.n_positions
    if strategy.guided:
        negative = prompt[-1:] if negative is None else negative
        guidance = Guidance(len(prompt), negative, strategy.guidance_scale)
        guidance.require_room(config)
        n_positions -= guidance.longer
    if len(prompt) > n_positions and request.context_end == "stop":
        raise UserError(
            f"the prompt has {len(prompt)} tokens and there is context for {n_positions}: "
            "shorten it"
        )
    begun = Continuation(  # raises where the request does not suit the model
        prompt, request, config=config, tokenizer=tokenizer, copies=copies
    )
    capacity = min(n_positions, len(prompt) + request.max_new_tokens - 1)
    slots = strategy.best_of
    begin: Callable[[Lane], Steps[Completion]] = partial(
        _drawn, begun=begun, tokenizer=tokenizer, copies=copies
    )
    if strategy.num_beams > 1:
        slots = strategy.num_beams
        begin = partial(_by_beams, begun=begun, strategy=strategy, tokenizer=tokenizer)
    elif strategy.best_of > 1:
        begin = partial(_best, begun=begun, tokenizer=tokenizer, copies=copies)
    if guidance is None:
        return Search(slots, capacity, begin)
    return Search(
        2 * slots, capacity + guidance.longer, lambda lane: begin(GuidedLane(lane, guidance))
    )


def _by_beams(
    lane: Lane, begun: Continuation, strategy: Strategy, tokenizer: Tokenizer | None
) -> Steps[Completion]:
    asked = begun.request.max_new_tokens
    max_new_tokens = min(lane.capacity - begun.n_prompt + 1, asked)
    found = yield from beam_search(
        lane,
        begun.ids,
        num_beams=strategy.num_beams,
        max_new_tokens=max_new_tokens,
        length_penalty=strategy.length_penalty,
        early_stopping=strategy.early_stopping,
        adjust=_adjust(begun),
        n_tokens=None if tokenizer is None else len(tokenizer),
    )
    best = found[0]
    ended = best.ids[-1] == lane.config.eos_token_id
    text = ""
    if tokenizer is not None:
        decoder = tokenizer.stream(after=begun.ids[-1])
        text = "".join(map(decoder.push, best.ids[: len(best.ids) - ended])) + decoder.finish()
    cut: FinishReason = "length" if max_new_tokens == asked else "context"
    return Completion(best.ids, text, "stop" if ended else cut, best.logprobs)


def _adjust(begun: Continuation) -> Adjust:
    """Return what penalties, biases and constraints make of scores."""
    return lambda ids, scores: begun.request.scores(scores, ids, begun.n_prompt)


def _best(
    lane: Lane, begun: Continuation, tokenizer: Tokenizer | None, copies: int
) -> Steps[Completion]:
    samples = yield from best_of(lane, begun, tokenizer=tokenizer, copies=copies)
    return samples[0]


def _drawn(
    lane: Lane, begun: Continuation, tokenizer: Tokenizer | None, copies: int
) -> Steps[Completion]:
    sequences = Sequences(lane, tokenizer=tokenizer)
    sequence = sequences.add(begun.ids, begun.request, copies=copies)
    while sequences.busy:
        for _, piece in (yield from sequences.steps()):
            if sequence.error is not None:
                raise sequence.error
            if piece:
                yield piece
    return sequence.completion()
