"""`tiedgpt generate [MODEL]`: continues a text, shown as it grows."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tiedgpt.cli.console import bar, note
from tiedgpt.cli.options import UsageError, hint_at_prompt, parse
from tiedgpt.cli.source import (
    EngineOptions,
    SourceOrNewest,
    describe_source,
    read_passage,
    read_text,
    source_or_newest,
    text_or_piped,
)
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import format_count, read_json_lines, reading, writing
from tiedgpt.infer.generation_config import GenerationConfig
from tiedgpt.options import option

if TYPE_CHECKING:
    from tiedgpt.infer import Completion, Engine
    from tiedgpt.infer.batches import PromptResult
    from tiedgpt.weights.source import Source

ABOUT = """Continue a text, shown as it grows.

  tiedgpt generate runs/my-1 --prompt "Once upon a time"
"""
SEPARATOR = "-" * 40
"""Separator of several texts."""
MOST_SLOTS = 8
"""Maximum number of texts that are sampled at a time."""


@dataclass(frozen=True, kw_only=True)
class Arguments(SourceOrNewest, EngineOptions, GenerationConfig):
    """Continue a text."""

    prompt: str | None = option(
        None,
        "The text to continue; default: standard input if something is piped to it, otherwise a "
        "new text. - reads standard input.",
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
        values = {field.name: getattr(self, field.name) for field in fields(GenerationConfig)}
        values["json_schema"] = schema
        if self.grammar is not None:
            values["grammar"] = read_text(self.grammar, "--grammar")
        return GenerationConfig(**values)

    @contextmanager
    def steering_engine(self, source: Source, *, slots: int) -> Iterator[Engine]:
        """Open the model's engine, with --steer if it is given."""
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
    name = str(source)
    if " " in name and not args.prompt and not Path(name).exists():
        raise UsageError(f"there is no model {name!r}", hint_at_prompt(name))
    source_text = text_or_piped(args.prompt, "--prompt")
    prompt = read_passage(source_text or "", "--prompt")
    if source_text == "-" and not prompt:
        note("standard input is empty: beginning a new text")
    slots = config.num_beams * min(config.n, MOST_SLOTS)
    with args.steering_engine(source, slots=slots) as engine:
        if config.num_beams > 1 or config.n > 1:
            result = engine.generate(prompt, config)
            completions = result if config.n > 1 else [result]
            if human:
                print(
                    f"\n{SEPARATOR}\n".join(prompt + completion.text for completion in completions)
                )
        else:
            completions = [_stream(engine, prompt, config, show=human)]
    if not human:
        answers = [{"prompt": prompt, **asdict(completion)} for completion in completions]
        for answer in answers:
            del answer["error"]  # it would have been raised
        print(json.dumps(answers if config.n > 1 else answers[0], ensure_ascii=False))
    _note_ends(completions, config)


def _complete_file(args: Arguments, path: Path, config: GenerationConfig, source: Source) -> None:
    """Continue every prompt of a file; print the results as `.jsonl`, in order."""
    from tiedgpt.infer.batches import complete, read_prompts

    if args.prompt:
        raise UserError("--prompt and --prompts exclude each other")
    lines = read_prompts(path, config, args.prompt_field)
    slots = max(MOST_SLOTS, *(line.config.num_beams for line in lines))
    conditions = describe_source(args, str(source)) | {
        "backend": args.backend,
        "prompts": hashlib.sha256(repr(lines).encode()).hexdigest(),
    }
    total, n_failed = sum(line.config.n for line in lines), 0
    with args.steering_engine(source, slots=slots) as engine:
        if args.steer is not None:
            direction = hashlib.sha256(args.steer.read_bytes()).hexdigest()
            conditions |= {"steer": direction, "strength": args.strength}
        saved = [] if args.save is None else _read_results(args.save, conditions)
        if saved:
            note(f"{len(saved)} results are in {args.save}: resuming")
        results = complete(engine, lines, skip=len(saved))
        if args.save is not None:
            results = _save_results(args.save, conditions, results)
        with bar("generating") as progress:
            for n_done, result in enumerate(chain(saved, results), start=1):
                print(json.dumps(asdict(result), ensure_ascii=False), flush=True)
                n_failed += result.error is not None
                progress(n_done, total)
    if n_failed:
        raise UserError(
            f"{n_failed:,} of {total:,} texts failed", hint="see `error` in their lines"
        )


def _read_results(path: Path, conditions: dict[str, Any]) -> list[PromptResult]:
    """Return the results in a file of --save; remove a last line that was cut off."""
    from tiedgpt.infer.batches import PromptResult

    with reading(path, "file of results"):
        data = path.read_bytes() if path.exists() else b""
    complete_lines = data[: data.rfind(b"\n") + 1]
    lines = [x for _, x in read_json_lines(io.BytesIO(complete_lines), str(path), "a result")]
    hint = "name another file, or delete it"
    if not lines and not json.dumps(conditions).encode().startswith(data):
        raise CorruptInputError(f"{path} holds no results", hint=hint)
    first, *rest = lines or [conditions]
    try:
        results = [PromptResult(**line) for line in rest]
    except TypeError as error:
        problem = f"{path} holds no results of this edition ({error})"
        raise CorruptInputError(problem, hint=hint) from None
    if first != conditions:
        problem = f"{path} holds other results (model, data or options differ)"
        raise UserError(problem, hint=hint)
    if len(complete_lines) < len(data):
        with writing(path):
            os.truncate(path, len(complete_lines))
    return results


def _save_results(
    path: Path, conditions: dict[str, Any], results: Iterable[PromptResult]
) -> Iterator[PromptResult]:
    """Append each result to a file, whose first line is the conditions, and yield it."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    with file:
        lines = [] if file.tell() else [conditions]
        for result in results:
            with writing(path):
                for line in (*lines, asdict(result)):
                    print(json.dumps(line), file=file, flush=True)
            lines = []
            yield result


def _note_ends(completions: list[Completion], config: GenerationConfig) -> None:
    """Note on stderr the reasons of texts that were cut off."""
    reasons = {completion.finish_reason for completion in completions}
    if config.constraint and reasons != {"stop"}:
        note("cut off: the text may be incomplete; --max-new-tokens allows more tokens")
    if "timeout" in reasons:
        note("cut off by --timeout")
    if "context" in reasons:
        advice = "; --context-end slide continues" if config.num_beams == 1 else ""
        note(f"the context is full{advice}")
    elif dropped := max(completion.dropped for completion in completions):
        note(f"the context slid and dropped the first {format_count(dropped, 'token')}")


def _stream(engine: Engine, prompt: str, config: GenerationConfig, *, show: bool) -> Completion:
    """Generate; with `show`, print the prompt and each token."""
    generation = engine.stream(prompt, config)
    unshown = prompt
    try:
        for token in generation:
            if show and token.text:
                text, unshown = unshown + token.text, ""
                print(text, end="", flush=True)
    except BaseException:
        if show and not unshown:
            print(flush=True)  # an error message starts a new line
        raise
    if show:
        print(unshown)
    return generation.result()
