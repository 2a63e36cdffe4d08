"""`tiedgpt chat [MODEL]`: talk in the terminal with a model that has a chat template."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tiedgpt import infer
from tiedgpt.cli.console import note
from tiedgpt.cli.options import parse
from tiedgpt.cli.source import EngineOptions, SourceOrNewest, source_or_newest
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.options import option

if TYPE_CHECKING:
    from tiedgpt.data.templates import Template

ABOUT = """Chat with a model that `tiedgpt tune` has tuned on messages.

Each line is a message; piped lines are answered one by one. /help lists the commands: /new
begins a new conversation, /exit or the end of input (Ctrl-D) leaves. Ctrl-C stops a reply.
When the conversation outgrows the model's context, its oldest turns are dropped. To a model
that was tuned on single exchanges, each message is sent alone (--keep-history)."""
COMMANDS = {
    "/help": "show these commands",
    "/new": "begin a new conversation",
    "/exit": "leave, as Ctrl-D does; Ctrl-C stops a reply",
}
Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Arguments(SourceOrNewest, EngineOptions):
    """Options of `chat`."""

    system: str | None = option(
        None, "The system message; default: the one with which all of the tuning data began."
    )
    max_new_tokens: int | None = option(
        None,
        "Maximum number of tokens in a reply; default: half of the model's context.",
        short="n",
        least=1,
    )
    temperature: float = option(
        0.7, "Sampling temperature; 0: greedy decoding.", short="t", least=0
    )
    seed: int = option(0, "Seed of the sampling.", least=0)
    keep_history: bool = option(
        False, "Send earlier turns also to a model that was tuned on single exchanges."
    )


@dataclass
class Conversation:
    """The turns so far, which leave room for a reply in the model's context."""

    engine: infer.Engine
    template: Template
    config: infer.GenerationConfig
    messages: list[Message]
    """The system message, if there is one, and then the turns."""
    keep_history: bool = True
    """Whether a message is sent with the turns before it."""

    def __post_init__(self) -> None:
        self.n_system = len(self.messages)

    def clear(self) -> None:
        """Forget all turns."""
        del self.messages[self.n_system :]

    def prompt(self, message: str) -> list[int]:
        """Add a message to the conversation; return the ids of the conversation.

        The oldest turns are dropped, with a note, until a quarter of the context is free, or as
        much as a reply may take. Raises `UserError` for a message that is too long by itself or
        cannot be encoded.
        """
        from tiedgpt.data.templates import encode_pieces

        if not self.keep_history:
            self.clear()
        context = self.engine.runner.config.n_positions
        room = min(context // 4, self.config.max_new_tokens)
        turns = [*self.messages, {"role": "user", "content": message}]
        n_dropped = 0
        while True:
            assert self.engine.tokenizer is not None  # a directory with a template has one
            ids, _ = encode_pieces(self.template.prompt(turns), self.engine.tokenizer)
            is_last = len(turns) == self.n_system + 1
            if len(ids) + room <= context or is_last:
                break
            del turns[self.n_system : self.n_system + 2]
            n_dropped += 1
        if len(ids) >= context:
            what, hint = "the message has", "send a shorter message"
            if self.n_system:
                what, hint = "the message and --system have", f"{hint} or --system"
            problem = f"{what} {len(ids):,} tokens and the context is {context:,}"
            raise UserError(problem, hint=hint)
        if n_dropped:
            turn = "turn was" if n_dropped == 1 else f"{n_dropped} turns were"
            note(f"the conversation is longer than the context: its oldest {turn} dropped")
        self.messages = turns
        return ids

    def reply(self, ids: list[int]) -> None:
        """Print a reply, and add it to the conversation."""
        free = self.engine.runner.config.n_positions - len(ids)
        config = replace(self.config, max_new_tokens=min(free, self.config.max_new_tokens))
        generation, text = self.engine.stream(ids, config), ""
        try:
            for token in generation:
                text += token.text
                print(token.text, end="", flush=True)
        except KeyboardInterrupt:
            generation.cancel()
        print()
        if generation.done and generation.result().finish_reason in ("length", "context"):
            note(f"the reply was cut off after {config.max_new_tokens:,} tokens")
        self.messages.append({"role": "assistant", "content": text})


def run(arguments: list[str]) -> None:
    """Chat until the user leaves."""
    options = parse(Arguments, "chat", arguments, ABOUT)
    config = infer.GenerationConfig(
        max_new_tokens=options.max_new_tokens or 1,
        temperature=options.temperature,
        seed=options.seed,
    )
    source = source_or_newest(options.source, task="lm")
    from tiedgpt.data import read_template

    told_by = options.tokenizer_source or source
    template = read_template(told_by.path, told_by.read)
    if template is None:
        raise UserError(
            f"{source} has no chat template",
            hint='tune it on lines of {"messages": [...]} (`tiedgpt tune`), or let it continue a '
            "text (`tiedgpt generate`)",
        )
    keep_history = options.keep_history or template.max_turns != 1
    if not keep_history:
        note(
            "this model was tuned on single exchanges: each message starts anew; --keep-history "
            "sends earlier turns, too"
        )
    system = []
    if options.system or (options.system is not None and template.default_system is not None):
        system = [{"role": "system", "content": options.system}]
    elif template.default_system is not None:
        note(f"system message: {template.default_system!r}; --system replaces it")
    with options.engine(source, slots=1) as engine:
        if options.max_new_tokens is None:
            half = max(1, engine.runner.config.n_positions // 2)
            config = replace(config, max_new_tokens=half)
        conversation = Conversation(engine, template, config, system, keep_history)
        if sys.stdin is not None and sys.stdin.isatty():
            note("each line is a message; /help lists the commands, /exit or Ctrl-D leaves")
        while (line := _read_line()) is not None:
            if line == "/new":
                conversation.clear()
            elif line == "/help":
                note(*(f"{command:<6} {about}" for command, about in COMMANDS.items()))
            elif re.fullmatch(r"/[a-z]+", line):
                note(f"there is no command {line}: /help lists them; more words make it a message")
            elif line:
                try:
                    ids = conversation.prompt(line)
                except UserError as problem:
                    note(str(problem))
                else:
                    conversation.reply(ids)


def _read_line() -> str | None:
    """Return the user's next line, or None at the end."""
    if sys.stdin is None:
        raise UserError("standard input is closed, and chat reads it", hint="pipe lines to it")
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    except UnicodeDecodeError as error:
        raise CorruptInputError(f"standard input is not UTF-8: {error}") from None
    return None if line == "/exit" else line
