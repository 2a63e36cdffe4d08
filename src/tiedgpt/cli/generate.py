"""`tiedgpt generate [SOURCE]`: continues a text, shown as it grows."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import tyro

from tiedgpt.cli.options import parse
from tiedgpt.cli.search_flags import SearchFlags
from tiedgpt.cli.source import source_or_newest
from tiedgpt.errors import EXIT_OK, CorruptInputError, UserError

if TYPE_CHECKING:
    from tiedgpt.infer import Completion, Engine


OPTIONS = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words"),
    *("speculate", "seed", "stop", "context_end"),
)
"""The arguments that `Engine.generate` takes as they are."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Continue a text."""

    source: tyro.conf.Positional[str | None] = None
    """A run, a model's directory or file, or a hub name; default: the newest run in runs/."""
    prompt: str = ""
    """The text to continue; - reads standard input; empty: begin a text."""
    max_new_tokens: int = 128
    """Tokens to generate at the most."""
    temperature: float | None = None
    """0 takes the likeliest token each time; 1 draws from the model's own distribution; default:
    0.8, or 0 in a search that draws nothing."""
    top_k: int | None = None
    """Draw among the k likeliest tokens only."""
    top_p: float | None = None
    """Draw among the likeliest tokens that together reach this probability."""
    min_p: float | None = None
    """Drop tokens less likely than this share of the likeliest one's probability."""
    typical_p: float | None = None
    """Draw among the tokens about as surprising as expected that together reach this."""
    repetition_penalty: float = 1.0
    """Above 1, tokens already in the text become less likely."""
    presence_penalty: float = 0.0
    """Taken from the scores of tokens that were generated before."""
    frequency_penalty: float = 0.0
    """Taken from the scores of tokens as often as they were generated before."""
    bad_words: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Never write this word; may be given several times."""
    speculate: Literal["ngram"] | None = None
    """ngram: the same text, sooner where it repeats itself or its prompt."""
    seed: int | None = None
    """The same seed draws the same text."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """End before this string; may be given several times."""
    context_end: Literal["stop", "slide"] = "stop"
    """When the context is full: stop, or slide on, dropping the start."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8", "int4"] = "auto"
    """auto: the model's own; int8 and int4 on CPUs."""
    backend: Literal["auto", "torch", "kernels"] = "auto"
    """What computes: torch, or our own kernels for CPUs; auto: kernels for what is packed, int8,
    int4, and on a CPU for 5 million parameters or more."""
    threads: int | None = None
    """CPU threads that compute; default: the cores that this process may use, at most 16."""
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
    search: Annotated[SearchFlags, tyro.conf.arg(name="")] = field(default_factory=SearchFlags)


def run(arguments: list[str]) -> int:
    """Generate; return the exit code."""
    given = parse(Arguments, "generate", arguments, "Continue a text.")
    source = source_or_newest(given.source)
    prompt = _standard_input() if given.prompt == "-" else given.prompt

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
        backend=given.backend,
        tokenizer=None if given.tokenizer is None else Tokenizer.from_pretrained(given.tokenizer),
        resolve=given.resolve,
        threads=given.threads,
        **supplied,
    )
    for note in engine.notes:
        print(f"({note})", file=sys.stderr)
    options = {name: getattr(given, name) for name in OPTIONS} | given.search.keywords()
    if given.temperature is None:
        options["temperature"] = 0.8 if given.search.draws else 0
    human = given.format == "human"
    with _telling_of_compilation(engine):
        if given.search.shown_at_its_end:
            completion = engine.generate(prompt, **options)
            if human:
                print(prompt + completion.text)
        else:
            completion = _streamed(engine, prompt, options, show=human)
    if not human:
        import json
        from dataclasses import asdict

        print(json.dumps({"prompt": prompt, **asdict(completion)}, ensure_ascii=False))
    if given.search.has_form and completion.finish_reason != "stop":
        print(
            "cut off: it may not have its whole form; --max-new-tokens gives room", file=sys.stderr
        )
    if completion.finish_reason == "context":
        advice = "; --context-end slide goes on" if given.search.may_slide else ""
        print(f"the context is full{advice}", file=sys.stderr)
    elif completion.dropped:
        print(
            f"the context slid: the first {completion.dropped} tokens were dropped", file=sys.stderr
        )
    return EXIT_OK


def _standard_input() -> str:
    if sys.stdin is None:
        raise UserError("standard input is closed, and --prompt - reads it: give the text itself")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptInputError(f"standard input is not UTF-8: {error}") from None
    except OSError as error:
        raise UserError(f"standard input cannot be read: {error.strerror}") from None


@contextlib.contextmanager
def _telling_of_compilation(engine: Engine) -> Iterator[None]:
    """Say so on stderr where the user waits for kernels to be compiled, or they cannot be kept."""
    if engine.backend != "kernels":
        yield
        return
    from tiedgpt.infer.compiling import telling_of_compilation, where_kept

    kept = "they are kept" if where_kept() else "set NUMBA_CACHE_DIR to have them kept"
    text = f"(compiling kernels for this CPU, which takes some ten seconds; {kept})"
    with (
        warnings.catch_warnings(),
        telling_of_compilation(lambda: print(text, file=sys.stderr, flush=True)),
    ):
        warnings.showwarning = lambda message, *_, **__: print(f"({message})", file=sys.stderr)
        yield


def _streamed(engine: Engine, prompt: str, options: dict[str, Any], *, show: bool) -> Completion:
    """Generate; print the text as it comes, after its prompt, if it is to be shown."""
    stream = engine.stream(prompt, **options)
    unshown = prompt
    try:
        while True:
            piece = next(stream)
            if show:
                text, unshown = unshown + piece, ""
                print(text, end="", flush=True)
    except StopIteration as end:
        if show:
            print(unshown)
        return cast("Completion", end.value)
    except BaseException:
        if show and not unshown:
            print(flush=True)  # what is said of it begins a line
        raise
