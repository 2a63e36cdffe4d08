"""`tiedgpt inspect NAME [MODEL]`: show a model's predictions by layer, position and row.

The names and their options are those of `tiedgpt.inspect.registry`.
"""

from __future__ import annotations

from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, make_dataclass
from inspect import signature
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from tiedgpt.cli.console import bar, fact, waiting
from tiedgpt.cli.options import HELP_WIDTH, UsageError, parse
from tiedgpt.cli.source import (
    DeviceOption,
    ModelOptions,
    SourceOrNewest,
    read_passage,
    source_or_newest,
    text_or_piped,
)
from tiedgpt.errors import UserError
from tiedgpt.inspect.registry import INSPECTIONS, Inspection
from tiedgpt.options import argument, option
from tiedgpt.plots.figure import require_figures, save_figure
from tiedgpt.runtime import device_for_inference

if TYPE_CHECKING:
    from tiedgpt.weights.source import Source

EXAMPLE = '--text "Once upon a time"'


def about() -> str:
    """Return the description of the verb, with a line for each name."""
    lines = (f"  {inspection.verb:<15} {inspection.about}" for inspection in INSPECTIONS.values())
    names = "\n".join(fill(line, HELP_WIDTH, subsequent_indent=" " * 18) for line in lines)
    return f"""Look inside a GPT.

{names}

  tiedgpt inspect NAME --help

lists the options of a name.

  tiedgpt export runs/my-1 page.html

writes all views to a page that needs no server."""


@dataclass(frozen=True, kw_only=True)
class ResultArguments(SourceOrNewest, ModelOptions, DeviceOption):
    """Options of every name."""

    format: Literal["human", "json"] = option(
        "human", "json: one object, columns as lists.", short="f"
    )
    plot: Path | None = option(
        None, "Also write a figure: .png, .svg or .pdf (pip install 'tiedgpt[plot]')."
    )


@dataclass(frozen=True, kw_only=True)
class TextArguments(ModelOptions):
    """Options of the names that read a text."""

    text: str | None = option(
        None, "The text to read; default: standard input if something is piped to it, as with -."
    )
    ids: tuple[int, ...] = option((), "Token ids instead of the text, such as --ids 464 3280 318.")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The name after the verb."""

    name: str = argument("What to show: a name of the list above.")


def run(arguments: list[str]) -> None:
    """Inspect."""
    name = arguments[0].replace("-", "_") if arguments else ""
    if name in INSPECTIONS:
        _inspect(INSPECTIONS[name], arguments[1:])
        return
    args = parse(Arguments, "inspect", arguments[:1], about())
    names = ", ".join(setting.verb for setting in INSPECTIONS.values())
    raise UsageError(
        f"`tiedgpt inspect` shows nothing that is called {args.name!r}",
        f"the name is first: {names}",
    )


def _inspect(inspection: Inspection, arguments: list[str]) -> None:
    """Print an inspection's table or JSON, and draw its figure."""
    verb, sentence = f"inspect {inspection.verb}", f"Show {inspection.about}."
    args = parse(arguments_of(inspection), verb, arguments, sentence)
    options = _options(inspection, args)
    of_table = {
        n: options.pop(n) for n in [*options] if inspection.options[n].metadata["is_of_table"]
    }
    if args.plot is not None:
        require_figures(args.plot)
    if inspection.reads_text:
        options["text"] = _text(args, inspection.verb)
    source = source_or_newest(args.source)
    has_layers = "progress" in signature(inspection.function).parameters
    layers = bar("layers") if has_layers else nullcontext()
    with waiting(f"computing {inspection.verb} of {source}"), layers as progress:
        if has_layers:
            options["progress"] = progress
        model, tokenizer = _model(args, source)
        options = inspection.defaults_of(source, tokenizer) | options
        result = inspection.function(model, tokenizer, **options)
    if args.plot is not None:
        title, panels = result.figure()
        columns = 1 if len(panels) < 3 else 2 if len(panels) < 6 else 4
        save_figure(panels, args.plot, title, columns=columns)
    if args.format == "json":
        print(result.to_json())
        return
    print(result.table(**of_table))
    if args.plot is not None:
        fact("written", str(args.plot))


def arguments_of(inspection: Inspection) -> type[Any]:
    """Return the options of one name as a dataclass."""
    fields: list[tuple[str, Any, Any]] = []
    for name, setting in inspection.options.items():
        hint: Any = str if setting.type == int | str else setting.type
        fields.append((name, hint if setting.default is not None else hint | None, copy(setting)))
    bases = (ResultArguments, TextArguments) if inspection.reads_text else (ResultArguments,)
    return make_dataclass("Arguments", fields, bases=bases, frozen=True, kw_only=True)


def _options(inspection: Inspection, args: Any) -> dict[str, Any]:
    """Return the inspection's own options that were given."""
    options = dict[str, Any]()
    for name, setting in inspection.options.items():
        value = getattr(args, name)
        if value is None or value is False:
            continue
        if setting.type == int | str and value.isdecimal():
            value = int(value)
        options[name] = value
    return options


def _text(args: Any, name: str) -> str | list[int]:
    """Return the text, or the ids; `UserError` unless it is one of them."""
    text = args.text if args.ids else text_or_piped(args.text, "--text")
    if (text is None) == (not args.ids):
        example = f"tiedgpt inspect {name} {EXAMPLE}"
        raise UserError("the model must read one text", hint=f"give --text, or --ids: {example}")
    return list(args.ids) if text is None else read_passage(text, "--text")


def _model(args: Any, source: Source) -> tuple[Any, Any]:
    """Return the model and its tokenizer as the functions of `inspect` take them."""
    from tiedgpt.core.model import GPT
    from tiedgpt.weights.source import tokenizer_for

    needs_tokenizer = getattr(args, "text", None) is not None
    tokenizer = tokenizer_for(source, args.tokenizer, needed=needs_tokenizer)
    model = GPT.from_pretrained(source, **args.loading)
    return model.to(device_for_inference(args.device, model.config.parameter_count())), tokenizer
