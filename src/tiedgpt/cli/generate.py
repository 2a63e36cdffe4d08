"""`tiedgpt generate [MODEL]`: continues a text, shown as it grows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tiedgpt.cli.console import bar, note
from tiedgpt.cli.options import UsageError, hint_at_prompt, parse
from tiedgpt.cli.saved import resume
from tiedgpt.cli.source import (
    EngineOptions,
    SourceOrNewest,
    describe_source,
    read_text,
    source_or_newest,
)
from tiedgpt.errors import UserError
from tiedgpt.infer.options import GenerationConfig
from tiedgpt.options import option

if TYPE_CHECKING:
    from tiedgpt.infer import Completion, Engine

ABOUT = """Continue a text, shown as it grows.

  tiedgpt generate runs/my-1 --prompt "Once upon a time"
"""
RULE = "-" * 40
"""Between several texts."""
MOST_SLOTS = 8
"""Texts that are drawn at a time, where several are."""


@dataclass(frozen=True, kw_only=True)
class Arguments(SourceOrNewest, EngineOptions, GenerationConfig):
    """Continue a text."""

    prompt: str = option(
        "",
        "The text to continue; - reads standard input; empty: begin a new text.",
        "input and output",
        short="p",
    )
    prompts: Path | None = option(
        None,
        "Continue every line of this file, many at a time, and print a JSON object for each text. "
        'Of .jsonl, each line is {"prompt": ..., "options": {"seed": 1, ...}}.',
        "input and output",
    )
    prompt_field: str = option(
        "prompt", "The field of a line of .jsonl that holds the prompt.", "input and output"
    )
    save: Path | None = option(
        None,
        "With --prompts, save each result in this file; after an interruption, the same command "
        "resumes.",
        "input and output",
    )
    steer: Path | None = option(
        None,
        "Add the direction in this file, of `tiedgpt inspect direction --format json`, to the "
        "state after its layer. Computed by torch.",
        "steering",
    )
    strength: float | None = option(
        None, "Factor of the direction; below 0: away from it; default: 1.", "steering"
    )
    format: Literal["human", "json"] = option(
        "human",
        "json: one object with ids, text, finish_reason and logprobs; with --n, a list of them.",
        "input and output",
        short="f",
    )

    stop: tuple[str, ...] = option(
        (), "End before this string; may be given several times.", "the end", repeated=True
    )
    json_schema: str | None = option(
        None,
        "The text is JSON that this schema allows: a file, or the schema itself in braces.",
        "form",
        metavar="FILE",
    )
    grammar: Path | None = option(
        None, "The text follows the grammar in this file, written in Lark's syntax.", "form"
    )  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Leave the checks to `GenerationConfig`, whose errors are one line."""

    def config(self) -> GenerationConfig:
        """Return the options of generation, checked, files read."""
        schema = self.json_schema
        if schema is not None and not schema.lstrip().startswith("{"):
            schema = read_text(schema, "--json-schema")
        values = {each.name: getattr(self, each.name) for each in fields(GenerationConfig)}
        values["json_schema"] = schema
        if self.grammar is not None:
            values["grammar"] = read_text(self.grammar, "--grammar")
        return GenerationConfig(**values)

    @contextmanager
    def steering_engine(self, source: str, *, slots: int) -> Iterator[Engine]:
        """Open the model's engine, steered if that is asked for."""
        strength = 1.0 if self.strength is None else self.strength
        if self.steer is None:
            if self.strength is not None:
                raise UserError("--strength needs --steer", hint="name a direction's file")
            with self.engine(source, slots=slots) as engine:
                yield engine
            return
        if self.backend == "kernels":
            raise UserError("--steer is computed by torch", hint="leave out --backend kernels")
        from tiedgpt.inspect.steering import read_direction, steer

        layer, vector = read_direction(self.steer)
        with replace(self, backend="torch").engine(source, slots=slots) as engine:
            with steer(engine.model, layer, vector, strength=strength):
                yield engine


def run(arguments: list[str]) -> None:
    """Generate."""
    args = parse(Arguments, "generate", arguments, ABOUT)
    config, human = args.config(), args.format == "human"
    source = source_or_newest(args.source, task="lm")
    if args.prompts is not None:
        return _complete_file(args, args.prompts, config, source)
    if args.save is not None:
        raise UserError("--save needs --prompts")
    if " " in source and not args.prompt and not Path(source).exists():
        raise UsageError(f"there is no model {source!r}", hint_at_prompt(source))
    prompt = read_text("-", "--prompt") if args.prompt == "-" else args.prompt
    if args.prompt == "-" and not prompt:
        note("standard input is empty: beginning a new text")
    slots = config.n_slots * min(config.n, MOST_SLOTS)
    with args.steering_engine(source, slots=slots) as engine:
        if config.num_beams > 1 or config.n > 1:
            result = engine.generate(prompt, config)
            completions = result if config.n > 1 else [result]
            if human:
                print(f"\n{RULE}\n".join(prompt + completion.text for completion in completions))
        else:
            completions = [_stream(engine, prompt, config, show=human)]
    if not human:
        answers = [{"prompt": prompt, **asdict(completion)} for completion in completions]
        for answer in answers:
            del answer["error"]  # it would have been raised
        print(json.dumps(answers if config.n > 1 else answers[0], ensure_ascii=False))
    _tell_of_ends(completions, config)


def _complete_file(args: Arguments, path: Path, config: GenerationConfig, source: str) -> None:
    """Continue every prompt of a file; print the results as `.jsonl`, in order."""
    from tiedgpt.infer.batches import PromptResult, complete, read_prompts

    if args.prompt:
        raise UserError("--prompt and --prompts exclude each other", hint="choose one")
    lines = read_prompts(path, config, args.prompt_field)
    slots = max(MOST_SLOTS, *(line.config.n_slots for line in lines))
    conditions = describe_source(args, source) | {
        "backend": args.backend,
        "prompts": hashlib.sha256(repr(lines).encode()).hexdigest(),
    }
    total, n_failed = sum(line.config.n for line in lines), 0
    with args.steering_engine(source, slots=slots) as engine:
        if args.steer is not None:
            direction = hashlib.sha256(args.steer.read_bytes()).hexdigest()
            conditions |= {"steer": direction, "strength": args.strength}
        saved, later = resume(
            args.save, conditions, PromptResult, lambda n: complete(engine, lines, skip=n)
        )
        if saved:
            note(f"{len(saved)} results are in {args.save}: resuming")
        with bar("generating") as progress:
            for n_done, result in enumerate(chain(saved, later), start=1):
                print(json.dumps(asdict(result), ensure_ascii=False), flush=True)
                n_failed += result.error is not None
                progress(n_done, total)
    if n_failed:
        raise UserError(
            f"{n_failed:,} of {total:,} texts failed", hint="see `error` in their lines"
        )


def _tell_of_ends(completions: list[Completion], config: GenerationConfig) -> None:
    """Say on stderr where a text did not end by itself."""
    reasons = {completion.finish_reason for completion in completions}
    if config.form and reasons != {"stop"}:
        note("cut off: the text may be incomplete; --max-new-tokens allows more tokens")
    if "timeout" in reasons:
        note("cut off by --timeout")
    if "context" in reasons:
        advice = "; --context-end slide continues" if config.num_beams == 1 else ""
        note(f"the context is full{advice}")
    elif dropped := max(completion.dropped for completion in completions):
        note(f"the context slid: the first {dropped} tokens were dropped")


def _stream(engine: Engine, prompt: str, config: GenerationConfig, *, show: bool) -> Completion:
    """Generate; print the text as it comes, after its prompt, if it is to be shown."""
    generation = engine.stream(prompt, config)
    unshown = prompt
    try:
        for token in generation:
            if show and token.text:
                text, unshown = unshown + token.text, ""
                print(text, end="", flush=True)
    except BaseException:
        if show and not unshown:
            print(flush=True)  # what is said of it begins a line
        raise
    if show:
        print(unshown)
    return generation.result()
