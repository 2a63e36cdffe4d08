"""How one request reads and chooses: token after token, or by beams."""

from __future__ import annotations

from tiedgpt.infer.beam import beam_search
from tiedgpt.infer.scoring import SCORED_AT_ONCE
from tiedgpt.infer.sequence import Completion, FinishReason, SequenceState
from tiedgpt.infer.slots import Read, Slots, Steps, choose
from tiedgpt.text import Tokenizer


def decode(slots: Slots, sequence: SequenceState) -> Steps[Completion]:
    """Read the prompt, then choose and read one token after another until the text ends.

    Positions are learned: a window that slides is read anew from its first token on. A draft is
    read with the newest token, and its tokens are appended while they are what is chosen.
    """
    config, capacity = sequence.config, slots.capacity
    while sequence.finish_reason is None:
        if len(sequence.ids) - sequence.start > capacity:
            sequence.start = len(sequence.ids) - max(1, capacity // 2)
            slots.truncate(0, 0)
        n_held = slots.length(0)
        at = sequence.start + n_held
        unread, draft = sequence.ids[at:], list[int]()
        is_scored = config.prompt_logprobs is not False and not sequence.start
        is_scored = is_scored and at < sequence.n_prompt
        if is_scored:
            unread = unread[:SCORED_AT_ONCE]
        elif len(unread) == 1:
            draft = sequence.draft(slots.pool.price.of, capacity - n_held - 1)
        read = Read(0, unread + draft, bool(draft) or is_scored, len(draft))
        (logits,) = yield from slots.read([read])
        if is_scored:
            sequence.add_prompt_logprobs(at, logits)
        if at + len(unread) < len(sequence.ids):
            continue
        for row, drafted in zip(logits[-1 - len(draft) :], [*draft, None], strict=True):
            (chosen,) = yield from choose([sequence.choice(row)])
            is_full = len(sequence.ids) - sequence.start == capacity
            sequence.append(chosen, row, full=is_full and config.context_end == "stop")
            if sequence.finish_reason is not None or sequence.ids[-1] != drafted:
                break
            sequence.n_accepted += 1
        if draft and sequence.finish_reason is None:
            slots.truncate(0, len(sequence.ids) - 1 - sequence.start)
    return sequence.completion()


def search(slots: Slots, sequence: SequenceState, tokenizer: Tokenizer | None) -> Steps[Completion]:
    """Return the best text that beam search finds."""
    config, prompt = sequence.config, sequence.ids
    max_new_tokens = min(slots.capacity - len(prompt) + 1, config.max_new_tokens)
    found = yield from beam_search(
        slots, prompt, num_beams=config.num_beams, max_new_tokens=max_new_tokens,
        length_penalty=config.length_penalty, early_stopping=config.early_stopping,
        adjust=sequence.adjusted, n_tokens=sequence.n_tokens, ends=sequence.ends,
    )  # fmt: skip
    best = found[0]
    ended = best.ids[-1] in sequence.ends
    text = ""
    if tokenizer is not None:
        decoder = tokenizer.stream(after=prompt[-1])
        text = "".join(map(decoder.push, best.ids[: len(best.ids) - ended])) + decoder.finish()
    cut: FinishReason = "length" if max_new_tokens == config.max_new_tokens else "context"
    return Completion(best.ids, text, "stop" if ended else cut, best.logprobs)
