"""Prompts from a file, in any number: read and checked, then completed at the rate of a batch.

A line of a text file is a prompt. A line of `.jsonl` is an object, whose `options` go before those
of the whole file: {"prompt": "Once upon", "options": {"max_new_tokens": 20, "seed": 1}}. No torch
is imported here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tiedgpt.errors import UserError
from tiedgpt.files import JSON_LINES, parse_json_lines, reading, split_lines
from tiedgpt.infer.engine import Engine
from tiedgpt.infer.generation_config import GenerationConfig, Prompt, with_options
from tiedgpt.infer.worker import QUEUE_SIZE, Generation

MOST_PENDING = QUEUE_SIZE // 2
"""Maximum number of texts that run or wait for a slot."""
EXPECTED = '{"prompt": .., "options": {..}}'


@dataclass(frozen=True)
class PromptLine:
    """One prompt of a file."""

    line: int
    """From 1."""
    prompt: Prompt
    config: GenerationConfig


@dataclass(frozen=True)
class PromptResult:
    """One text for a prompt, or an error; a prompt with n above 1 has n results."""

    line: int
    prompt: Prompt
    text: str
    finish_reason: str
    """The `finish_reason` of the `Completion`, or "error"."""
    ids: list[int]
    logprobs: list[float]
    error: str | None = None


def read_prompts(path: Path, config: GenerationConfig, field: str = "prompt") -> list[PromptLine]:
    """Return the prompts of a file; `field` is the name of the prompt in `.jsonl`.

    Empty lines are passed over. Raises `UserError` for a file that cannot be read or has no prompt,
    `CorruptInputError` with the number of the line that is wrong.
    """
    if path.suffix.lower() in JSON_LINES:
        parse = partial(_read_record, field=field, config=config)
        lines = list(parse_json_lines(path, EXPECTED, parse))
    else:
        with reading(path, "file of prompts"):
            texts = enumerate(split_lines(path.read_bytes().decode("utf-8-sig")), start=1)
        lines = [PromptLine(n, text, config) for n, text in texts if text.strip()]
    if not lines:
        raise UserError(f"{path} holds no prompt")
    return lines


def _read_record(
    record: Mapping[str, Any], location: str, *, field: str, config: GenerationConfig
) -> PromptLine:
    """Return the prompt of a line of `.jsonl`; raise `UserError` or `TypeError`."""
    prompt: Any = record.get(field)
    options = record.get("options", {})
    is_ids = isinstance(prompt, list) and all(type(id) is int for id in prompt)
    if not (isinstance(prompt, str) or is_ids):
        raise UserError(f"no text and no ids in the field {field!r}")
    if not isinstance(options, dict):
        raise UserError(f"`options` must be an object, got {options!r}")
    options_at_top = config.__dataclass_fields__.keys() & record.keys() - {field}
    if options_at_top:
        raise UserError(f"{', '.join(sorted(options_at_top))} must be in `options`")
    if isinstance(bias := options.get("logit_bias"), dict):  # JSON's keys are texts
        ids = {int(id) if id.isdecimal() else id: value for id, value in bias.items()}
        options = options | {"logit_bias": ids}
    return PromptLine(int(location.rpartition(":")[2]), prompt, with_options(config, options))


def complete(
    engine: Engine, lines: Sequence[PromptLine], *, skip: int = 0
) -> Iterator[PromptResult]:
    """Yield the texts after each prompt, in order, but for the first `skip`.

    More prompts wait for the engine than it has slots, so that none is idle. A prompt that cannot
    be completed (one longer than the context) has an error, and the others go on. With a seed, a
    text depends on its prompt, its options and how often the prompt came before.
    """
    draws = Counter[str]()
    pending = deque[tuple[PromptLine, int, list[Generation] | UserError]]()
    done = 0
    for line in lines:
        n, key = line.config.n, repr(line.prompt)
        draws[key] += n
        n_seen, done = max(0, skip - done), done + n
        if n_seen >= n:
            continue
        while pending and sum(waiting.config.n for waiting, *_ in pending) + n > MOST_PENDING:
            yield from _results(*pending.popleft())
        one = with_options(line.config, {"n": 1})
        texts: list[Generation] | UserError
        try:
            numbers = range(draws[key] - n, draws[key])
            texts = [engine.submit(line.prompt, one, draw=draw) for draw in numbers]
        except UserError as error:
            texts = error
        pending.append((line, n_seen, texts))
    while pending:
        yield from _results(*pending.popleft())


def _results(
    line: PromptLine, n_seen: int, texts: list[Generation] | UserError
) -> Iterator[PromptResult]:
    """Wait for the texts of a prompt; yield all but the first `n_seen`."""
    number, prompt, n = line.line, line.prompt, line.config.n
    try:
        if isinstance(texts, UserError):
            raise texts
        completions = [generation.result() for generation in texts]
    except UserError as error:
        failed = PromptResult(number, prompt, "", "error", [], [], str(error))
        yield from [failed] * (n - n_seen)
        return
    for done in completions[n_seen:]:
        yield PromptResult(number, prompt, done.text, done.finish_reason, done.ids, done.logprobs)
