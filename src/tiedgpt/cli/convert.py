"""`tiedgpt convert MODEL DEST --to FORMAT`: write a GPT in another format and check the file."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tiedgpt.cli.console import bar, fact, note
from tiedgpt.cli.options import parse
from tiedgpt.cli.source import ModelOptions, source_or_newest
from tiedgpt.errors import UserError
from tiedgpt.files import format_count, reading
from tiedgpt.options import argument, option
from tiedgpt.weights.registry import writer_named, writers

if TYPE_CHECKING:
    from tiedgpt.weights.source import Source

ABOUT = "Write a GPT in another format, open it again, and check that it is the same model."
SAMPLES = "samples"
HALVES = ("fp16", "bf16")
"""Precisions of the loaded model itself; all others are converted from fp32."""
CALIBRATION_CHARACTERS = 4 << 20
"""Characters read from the text of --calibrate, which needs some 32,000 tokens."""


def list_formats() -> tuple[str, ...]:
    """Return the choices of --to."""
    return ("auto", *writers())


def list_precisions() -> tuple[str, ...]:
    """Return the choices of --precision: those of all formats."""
    names = (name for writer in writers().values() for name in writer.precisions)
    return ("auto", *dict.fromkeys(names))


def list_gguf_precisions() -> tuple[str, ...]:
    """Return the precisions of GGUF files."""
    return writer_named("gguf").precisions


@dataclass(frozen=True, kw_only=True)
class Arguments(ModelOptions):
    """Write a GPT in another format."""

    source: str = argument(
        "A directory, a file in any supported format, or a hub name.", metavar="MODEL"
    )
    dest: str = argument(
        "The file to write; a directory for transformers and packed, and for ONNX if the name "
        "does not end in .onnx (with config and tokenizer)."
    )
    to: str = option(
        "auto",
        "The format, one of those in docs/formats.md: a Hugging Face directory (transformers), "
        "a directory packed for tiedgpt's CPU kernels (packed), or a file. auto: by DEST's "
        "suffix; without one, transformers.",
        choices=list_formats,
    )
    precision: str = option(
        "auto",
        "auto: the model's own if the format has it, otherwise fp32; int8 for packed.",
        choices=list_precisions,
    )
    w_precision: str | None = option(
        None,
        "GGUF: the precision of W; default: that of the other matrices, but q8_0 where that is "
        "4 or 5 bits.",
        choices=list_gguf_precisions,
    )
    calibrate: str | None = option(
        None,
        "For --to packed --precision int4: a UTF-8 text like the model's future input, some "
        "150 kB, or samples: text that the model generates. Weights are rounded for the "
        "smallest error on it. This takes minutes and about halves the loss of quality.",
    )
    adapter: str | None = option(
        None,
        "Directory of a LoRA adapter in PEFT's format, merged into the model first.",
        metavar="FOLDER",
    )
    duplicate_head: bool = option(
        False, "GGUF: write W twice, for readers that do not support a tied GPT-2."
    )
    approximate_gelu: bool = option(
        False,
        "nanoGPT computes the exact GELU; GGUF computes GPT-2's tanh form. Write a "
        "model with the other form anyway; its outputs will differ slightly.",
    )
    overwrite: bool = option(False, "Replace DEST if it is an existing file.")
    format: Literal["human", "json"] = option("human", "json: one object.", short="f")


def run(arguments: list[str]) -> None:
    """Convert."""
    args = parse(Arguments, "convert", arguments, ABOUT)
    # SIGTERM raises KeyboardInterrupt, so that a partly written file is removed.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _run(args)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(args: Arguments) -> None:
    import torch
    from rich.progress import DownloadColumn, TransferSpeedColumn

    from tiedgpt.weights.convert import convert, format_of, require_place
    from tiedgpt.weights.load import load
    from tiedgpt.weights.source import tokenizer_for

    path = Path(args.dest)
    to = format_of(path) if args.to == "auto" else args.to
    writer = writer_named(to)
    require_place(path, to, overwrite=args.overwrite)
    if args.calibrate is not None:
        if "calibration" not in writer.options or args.precision != "int4":
            raise UserError("--calibrate needs --to packed --precision int4")
    columns = DownloadColumn(), TransferSpeedColumn()
    precision = args.precision if args.precision != "auto" else writer.default or None
    opened = source_or_newest(args.source)
    with bar("reading", *columns) as progress:
        loaded = load(
            opened,
            dtype=None if precision in (None, *HALVES) else torch.float32,
            progress=progress,
            **args.loading,
        )
    if args.adapter is not None:
        from tiedgpt.tune import load_adapter, merge

        load_adapter(loaded.model, args.adapter)
        merge(loaded.model)
    tokenizer = tokenizer_for(opened, args.tokenizer)
    source = _source(loaded, tokenizer)
    if args.format == "human":
        _show_source(loaded, source)
    named = ("duplicate_head", "approximate_gelu", "w_precision")
    options: dict[str, Any] = {n: getattr(args, n) for n in named if getattr(args, n)}
    if "ollama_template" in writer.options:
        options |= ollama_options(opened, tokenizer)
    with bar("writing", *columns) as progress:
        if args.calibrate is not None:
            options["calibration"] = _calibration_ids(args.calibrate, loaded.model, tokenizer)
        report = convert(
            loaded,
            path,
            to,
            tokenizer=tokenizer,
            precision=precision,
            overwrite=args.overwrite,
            progress=progress,
            **options,
        )
    if args.format == "human":
        _show_result(report, to, tokenizer)
    else:
        facts = source | {"to": to} | asdict(report) | {"path": str(report.path)}
        facts["beside"] = [str(file) for file in _list_beside(report.path, to)]
        print(json.dumps(facts, indent=2))


def _list_beside(path: Path, to: str) -> Iterator[str]:
    """Yield the files that a format's writer adds beside the file, each with its use."""
    modelfile, weights = path.with_suffix(".Modelfile"), path.with_name(f"{path.name}_data")
    uses = {
        "gguf": (modelfile, f"for Ollama: `ollama create NAME -f {modelfile}`"),
        "onnx": (weights, "its weights"),
    }
    if to in uses and uses[to][0].exists():
        yield ", ".join(map(str, uses[to]))


def ollama_options(source: Source, tokenizer: Any) -> dict[str, Any]:
    """Return the options of GGUF's writer for Ollama, if `tiedgpt tune` wrote a template."""
    from tiedgpt.data.templates import read_template

    try:
        template = read_template(source.path, source.read)
    except UserError:  # of another program: Ollama reads it from the file, where it knows it
        return {}
    if template is None or tokenizer is None:
        return {}
    system = {} if template.default_system is None else {"ollama_system": template.default_system}
    return {"ollama_template": template.ollama(tokenizer), **system}


def _calibration_ids(text: str, model: Any, tokenizer: Any) -> Any:
    """Return the ids (N,) of the text that --calibrate names."""
    from tiedgpt.weights.formats.packed.calibration import sample_ids

    path = Path(text)
    if text == SAMPLES and not path.exists():
        return sample_ids(model)
    if tokenizer is None:
        raise UserError(
            "--calibrate needs the model's tokenizer to read a text",
            hint=f"give --tokenizer, or --calibrate {SAMPLES}",
        )
    with reading(path, "text in UTF-8"), path.open(encoding="utf-8") as file:
        return tokenizer.encode(file.read(CALIBRATION_CHARACTERS))


def _source(loaded: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the facts about the source."""
    return {
        "source": str(loaded.path),
        "layout": loaded.layout,
        "type": loaded.dtype,
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "tied": loaded.model.head is None,
        "tokenizer": None if tokenizer is None else {"kind": tokenizer.kind, "len": len(tokenizer)},
        "notes": list(loaded.notes),
    }


def _show_source(loaded: Any, source: dict[str, Any]) -> None:
    from tiedgpt.weights.formats.transformers.writer import peculiarities

    config, tokenizer = loaded.model.config, source["tokenizer"]
    matrix = f"{config.vocab_size:,} x {config.n_embd:,}"
    fact("source", f"{source['source']}: {source['layout']}")
    fact(
        "model",
        f"{source['parameters']:,} parameters, {loaded.n_bytes / 1e6:,.1f} MB, "
        f"{source['type']}; {format_count(config.n_layer, 'block')} of width {config.n_embd}, "
        f"{format_count(config.n_head, 'head')}, {config.n_positions:,} positions"
        f"{peculiarities(config)}",
    )
    untied = f"untied: two matrices of {matrix}, one reads, one predicts"
    fact("tie", f"one matrix of {matrix} reads and predicts" if source["tied"] else untied)
    none = "none with the model; --tokenizer names one"
    fact("tokenizer", f"{tokenizer['kind']}, {tokenizer['len']:,} tokens" if tokenizer else none)
    note(*source["notes"])


def _show_result(report: Any, to: str, tokenizer: Any) -> None:
    stored = "once" if report.copies == 1 else f"{report.copies} times"
    checked = (
        "all weights are equal, bit for bit"
        if report.exact
        else f"relative RMS difference of the logits {report.difference:.1e} "
        f"(tolerance {report.tolerance:g})"
    )
    fact(
        "written",
        f"{report.path}: {to}, {report.n_bytes / 1e6:,.1f} MB; W is stored {stored} "
        f"({report.matrix_bytes / 1e6:,.1f} MB)",
    )
    for file in _list_beside(report.path, to):
        fact("and", file)
    fact("checked", f"opened again: {checked}")
    note(*report.notes)
    if tokenizer is not None and not report.with_tokenizer:
        note(f"{to} cannot hold a tokenizer: keep it beside the file")
