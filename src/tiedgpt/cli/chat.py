"""`tiedgpt chat [MODEL]`: talk in the terminal with a model that has a chat template."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tiedgpt import infer
from tiedgpt.cli.console import note
from tiedgpt.cli.options import Positional, parse
from tiedgpt.cli.source import EngineOptions, source_or_newest
from tiedgpt.errors import UserError

ABOUT = """Chat with a model that `tiedgpt tune` has tuned on messages.

Each line is a message. /new begins a new conversation; /exit or the end of input quits. Ctrl-C
stops a reply."""


@dataclass(frozen=True, kw_only=True)
class Arguments(EngineOptions):
    """Options of `chat`."""

    source: Positional[str | None] = None
    """A run, a model's directory or a hub name; default: the newest run in runs/."""
    system: str | None = None
    """The system message, sent before the conversation."""
    temperature: float = 0.7
    """Sampling temperature; 0: greedy decoding."""
    seed: int = 0
    """Seed of the sampling."""


def run(arguments: list[str]) -> None:
    """Chat until the user leaves."""
    given = parse(Arguments, "chat", arguments, ABOUT)
    source = source_or_newest(given.source, task="lm")
    from tiedgpt.data import read_template
    from tiedgpt.data.templates import encode_pieces
    from tiedgpt.weights.hub import local_directory

    template = read_template(local_directory(given.tokenizer or source))
    if template is None:
        raise UserError(
            f"{source} has no chat template: tune it on messages (`tiedgpt tune`), or let it "
            "continue a text (`tiedgpt generate`)"
        )
    with given.engine(source, slots=1) as engine:
        assert engine.tokenizer is not None  # a directory with a template has one
        begin = [{"role": "system", "content": given.system}] if given.system else []
        messages, context = [*begin], engine.runner.config.n_positions
        config = infer.GenerationConfig(
            max_new_tokens=context, temperature=given.temperature, seed=given.seed
        )
        while (line := _line()) is not None:
            if line == "/new" or not line:
                messages = [*begin] if line else messages
                continue
            messages.append({"role": "user", "content": line})
            try:
                ids, _ = encode_pieces(template.prompt(messages), engine.tokenizer)
                if len(ids) >= context:
                    raise UserError(
                        f"the conversation has {len(ids):,} tokens and the context is "
                        f"{context:,}: begin a new one with /new, or send a shorter message"
                    )
            except UserError as problem:
                note(str(problem))
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": _reply(engine, ids, config)})


def _line() -> str | None:
    """Return what the user says; None at the end."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if line == "/exit" else line


def _reply(engine: infer.Engine, ids: list[int], config: infer.GenerationConfig) -> str:
    """Print a reply as it comes; return it."""
    generation, said = engine.stream(ids, config), ""
    try:
        for token in generation:
            said += token.text
            print(token.text, end="", flush=True)
    except KeyboardInterrupt:
        generation.cancel()
    print()
    if generation.done and generation.result().finish_reason == "context":
        note("the context is full, so the reply was cut off: /new begins a new conversation")
    return said
