"""One prompt's ids and a strategy -> its completion, by the search that the strategy names."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from tiedgpt.errors import UserError
from tiedgpt.infer.beam import Adjust, beam_search
from tiedgpt.infer.best_of import best_of
from tiedgpt.infer.continuation import Completion, Continuation, FinishReason
from tiedgpt.infer.contrastive import contrastive_search
from tiedgpt.infer.guidance import GuidedRunner
from tiedgpt.infer.request import Request
from tiedgpt.infer.scheduler import Scheduler
from tiedgpt.infer.session import Runner
from tiedgpt.infer.strategy import Strategy
from tiedgpt.text import Tokenizer

Pieces = Generator[str, None, Completion]
"""Yields the text as it comes; returns the completion."""


def search(
    runner: Runner,
    prompt: list[int],
    strategy: Strategy,
    request: Request,
    *,
    tokenizer: Tokenizer | None = None,
    negative: Sequence[int] | None = None,
    copies: int = 0,
) -> Pieces:
    """Complete a prompt by itself; what cannot be done raises `UserError` before any is computed.

    `negative` are the ids of the negative prompt, if one was given; `copies` counts the equal
    prompts before it, whose draws are others. The constraint is in the request already.
    """
    if strategy.guided:
        negative = prompt[-1:] if negative is None else negative
        scale = strategy.guidance_scale
        runner = GuidedRunner(runner, n_prompt=len(prompt), negative=negative, scale=scale)
    n_positions = runner.config.n_positions
    # The last token of a text need not be read, but a candidate of contrastive search must be.
    room = n_positions - len(prompt) + (strategy.penalty_alpha is None)
    if room < 1 and request.context_end == "stop":
        raise UserError(
            f"the prompt has {len(prompt)} tokens and there is context for {n_positions}: "
            "shorten it"
        )
    begun = Continuation(  # raises where the request does not suit the model
        prompt, request, config=runner.config, tokenizer=tokenizer, copies=copies
    )
    if strategy.num_beams > 1:
        return _by_beams(runner, begun, strategy, tokenizer, min(room, request.max_new_tokens))
    if strategy.penalty_alpha is not None:
        return _contrastively(runner, begun, strategy.penalty_alpha, tokenizer, room)
    if strategy.best_of > 1:
        return _best(runner, begun, strategy.best_of, tokenizer, copies)
    return _drawn(runner, begun, tokenizer, copies)


def _by_beams(
    runner: Runner,
    begun: Continuation,
    strategy: Strategy,
    tokenizer: Tokenizer | None,
    max_new_tokens: int,
) -> Pieces:
    best = beam_search(
        runner,
        begun.ids,
        num_beams=strategy.num_beams,
        max_new_tokens=max_new_tokens,
        length_penalty=strategy.length_penalty,
        early_stopping=strategy.early_stopping,
        adjust=_adjust(begun),
        n_tokens=None if tokenizer is None else len(tokenizer),
    )[0]
    ended = best.ids[-1] == runner.config.eos_token_id
    text = ""
    if tokenizer is not None:
        decoder = tokenizer.stream(after=begun.ids[-1])
        text = "".join(map(decoder.push, best.ids[: len(best.ids) - ended])) + decoder.finish()
        yield text
    cut: FinishReason = "length" if max_new_tokens == begun.request.max_new_tokens else "context"
    return Completion(best.ids, text, "stop" if ended else cut, best.logprobs)


def _contrastively(
    runner: Runner, begun: Continuation, alpha: float, tokenizer: Tokenizer | None, room: int
) -> Pieces:
    found = contrastive_search(
        runner,
        list(begun.ids),
        top_k=begun.request.top_k or 1,
        penalty_alpha=alpha,
        max_new_tokens=min(room, begun.request.max_new_tokens),
        adjust=_adjust(begun),
        n_tokens=None if tokenizer is None else len(tokenizer),
    )
    for token, logits in found:
        if piece := begun.note(token, logits):
            yield piece
        if begun.finish_reason is not None:
            return begun.completion()
    if piece := begun.finish("context"):
        yield piece
    return begun.completion()


def _adjust(begun: Continuation) -> Adjust:
    """Return what penalties, biases and constraints make of scores."""
    return lambda ids, scores: begun.request.scores(scores, ids, begun.n_prompt)


def _best(
    runner: Runner, begun: Continuation, n: int, tokenizer: Tokenizer | None, copies: int
) -> Pieces:
    best = best_of(runner, begun.ids, begun.request, n=n, tokenizer=tokenizer, copies=copies)[0]
    yield best.text
    return best


def _drawn(runner: Runner, begun: Continuation, tokenizer: Tokenizer | None, copies: int) -> Pieces:
    request = begun.request
    capacity = min(runner.config.n_positions, begun.n_prompt + request.max_new_tokens - 1)
    scheduler = Scheduler(runner.session(slots=1, capacity=capacity), tokenizer=tokenizer)
    sequence = scheduler.add(begun.ids, request, copies=copies)
    while scheduler.busy:
        for _, piece in scheduler.step():
            if sequence.error is not None:
                raise sequence.error
            if piece:
                yield piece
    return sequence.completion()
