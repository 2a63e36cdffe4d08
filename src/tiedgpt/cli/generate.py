"""`tiedgpt generate [SOURCE]`: continues a text, shown as it grows."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

import tyro

from tiedgpt.cli.options import parse
from tiedgpt.cli.source import source_or_newest
from tiedgpt.errors import EXIT_OK, CorruptInputError


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Continue a text."""

    source: tyro.conf.Positional[str | None] = None
    """A run, a model directory, or a hub name; default: the newest run in runs/."""
    prompt: str = ""
    """The text to continue; - reads standard input; empty: begin a text."""
    max_new_tokens: int = 128
    """Tokens to generate at the most."""
    temperature: float = 0.8
    """0 takes the likeliest token each time; 1 draws from the model's own distribution."""
    top_k: int | None = None
    """Draw among the k likeliest tokens only."""
    top_p: float | None = None
    """Draw among the likeliest tokens that together reach this probability."""
    min_p: float | None = None
    """Drop tokens less likely than this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Above 1, tokens already in the text become less likely."""
    seed: int | None = None
    """The same seed draws the same text."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """End before this string; may be given several times."""
    context_end: Literal["stop", "slide"] = "stop"
    """When the context is full: stop, or slide on, dropping the start."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: the model's own."""
    tokenizer: str | None = None
    """Where the tokenizer is, if not with the model."""
    n_head: int | None = None
    """The number of heads, where the file does not say it (minGPT, bare weights)."""
    activation_function: str | None = None
    """gelu_new or gelu, where the file does not say it (some of nanoGPT's)."""
    resolve: Literal["untie", "keep-input", "keep-output", "tie"] | None = None
    """What to do where the file holds two different matrices."""
    format: Literal["human", "json"] = "human"
    """json: one object with ids, text, finish_reason and log-probabilities."""


def run(arguments: list[str]) -> int:
    """Generate; return the exit code."""
    given = parse(Arguments, "generate", arguments, "Continue a text.")
    source = source_or_newest(given.source)
    prompt = given.prompt
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptInputError(f"standard input is not UTF-8: {error}") from None

    from tiedgpt.infer import Engine
    from tiedgpt.text import Tokenizer

    supplied = {
        name: value
        for name in ("n_head", "activation_function")
        if (value := getattr(given, name)) is not None
    }
    engine = Engine(
        source,
        given.precision,
        tokenizer=None if given.tokenizer is None else Tokenizer.from_pretrained(given.tokenizer),
        resolve=given.resolve,
        **supplied,
    )
    for note in engine.notes:
        print(f"({note})", file=sys.stderr)
    stream = engine.stream(
        prompt,
        max_new_tokens=given.max_new_tokens,
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        seed=given.seed,
        stop=given.stop,
        context_end=given.context_end,
    )
    human = given.format == "human"
    show_prompt = human
    while True:
        try:
            piece = next(stream)
        except StopIteration as end:
            completion = end.value
            break
        if human:
            print(prompt + piece if show_prompt else piece, end="", flush=True)
            show_prompt = False
    if human:
        print(prompt if show_prompt else "")
    else:
        import json
        from dataclasses import asdict

        print(json.dumps({"prompt": prompt, **asdict(completion)}, ensure_ascii=False))
    if completion.finish_reason == "context":
        print("the context is full; --context-end slide goes on", file=sys.stderr)
    elif completion.dropped:
        print(
            f"the context slid: the first {completion.dropped} tokens were dropped", file=sys.stderr
        )
    return EXIT_OK
