"""`tiedgpt tie show|audit|fix SOURCE`: the tie of a model or a file: count it, judge it, fix it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tiedgpt.cli.options import parse
from tiedgpt.cli.source import source_or_newest
from tiedgpt.errors import EXIT_OK, EXIT_USAGE

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tiedgpt.tie.audits import Audit
    from tiedgpt.tie.ledgers import Ledger, Row

LAYER = re.compile(r"(?<=\.)(\d+)(?=\.)")
USAGE = """\
usage: tiedgpt tie show [SOURCE]         every parameter once: who shares it, what it costs
       tiedgpt tie audit [SOURCE]        is the head the embedding, and is that what is claimed?
       tiedgpt tie fix SOURCE DEST       write a corrected copy; SOURCE is never touched

SOURCE is a run, a model directory, a hub name, or a file: safetensors, .pt/.bin, GGUF, ONNX.
`audit` exits with 0 if the tie is as claimed, 6 if it is broken or contradicts the claim.
"""


@dataclass(frozen=True, kw_only=True)
class Show:
    """Options of `tie show`."""

    source: tyro.conf.Positional[str | None] = None
    """A run, a model directory, a hub name or a file; default: the newest run in runs/."""
    format: Literal["human", "json"] = "human"
    """json: one object."""


@dataclass(frozen=True, kw_only=True)
class AuditOptions(Show):
    """Options of `tie audit`."""

    input: str | None = None
    """Name of the tensor that reads, if names do not tell."""
    output: str | None = None
    """Name of the tensor that predicts, if names do not tell."""


@dataclass(frozen=True, kw_only=True)
class Fix(AuditOptions):
    """Options of `tie fix`."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")] = tyro.MISSING
    """The checkpoint to fix; it is only read."""
    dest: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DEST")]
    """The new directory; it must not exist."""
    keep: Literal["input", "output", "both"] | None = None
    """If two matrices differ: whose values stay, or both; the model is untied then."""


def run(arguments: list[str]) -> int:
    """Run one of the three; return the exit code, which of `audit` is its verdict."""
    verb, *rest = arguments or ["--help"]
    if verb == "show":
        shown = parse(Show, "tie show", rest, "Every parameter once, by storage.")
        from tiedgpt.tie import ledger

        return _print(shown, ledger(source_or_newest(shown.source)), _print_ledger)
    if verb == "audit":
        given = parse(AuditOptions, "tie audit", rest, "Is the head the embedding?")
        from tiedgpt.tie import audit

        source = source_or_newest(given.source)
        judged = audit(source, input_name=given.input, output_name=given.output)
        return _print(given, judged, _print_audit) or judged.exit_code
    if verb == "fix":
        fixing = parse(Fix, "tie fix", rest, "Write a corrected copy.")
        from tiedgpt.tie import fix

        names = {"input_name": fixing.input, "output_name": fixing.output}
        done = fix(fixing.source, fixing.dest, keep=fixing.keep, **names)
        return _print(fixing, done, lambda done: print(done.explain))
    if verb in ("-h", "--help"):
        print(USAGE, end="")
        return EXIT_OK
    print(f"tiedgpt tie: no {verb!r}; there are show, audit, fix", file=sys.stderr)
    return EXIT_USAGE


def _print(options: Show, result: Any, human: Callable[[Any], None]) -> int:
    """Print a result as JSON or for people."""
    if options.format == "json":
        print(json.dumps(result.as_dict(), indent=2))
    else:
        human(result)
    return EXIT_OK


def _print_ledger(ledger: Ledger) -> None:
    table = _table(ledger, "parameter, and who shares it", "shape", "parameters", "MB", "products")
    for name, rows in _alike(ledger.rows):
        first = rows[0]
        table.add_row(
            name,
            " x ".join(map(str, first.shape)),
            f"{sum(row.parameters for row in rows):,}",
            f"{sum(row.bytes for row in rows) / 1e6:,.2f}",
            f"{sum(row.multiply_adds for row in rows):,}",
            style="bold" if first.shared else None,
        )
    table.add_section()
    totals = (f"{ledger.total:,}", f"{ledger.bytes / 1e6:,.2f}", f"{ledger.multiply_adds:,}")
    table.add_row("all", "", *totals, style="bold")
    lines = ["products: multiply-adds per token with this matrix; a lookup costs none"]
    lines.append(ledger.explain)
    if ledger.left_out:
        lines.append(f"Not parameters, left out: {shorten(', '.join(ledger.left_out), 80)}")
    _console().print(table, *lines, sep="\n")


def _alike(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Put the same parameter of all layers under one name: h.0-11.ln_1.weight."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        pattern = tuple(LAYER.sub("*", name) for name in row.names)
        groups.setdefault((pattern, row.shape), []).append(row)
    alike = [(zip(*(row.names for row in group), strict=True), group) for group in groups.values()]
    return [("\n= ".join(map(_span, names)), group) for names, group in alike]


def _span(names: Sequence[str]) -> str:
    """Return alike names as one, each number in them a span."""
    name = ""
    for parts in zip(*map(LAYER.split, names), strict=True):
        same = len(set(parts)) == 1
        name += parts[0] if same else f"{min(parts, key=int)}-{max(parts, key=int)}"
    return name


def _print_audit(audit: Audit) -> None:
    from rich.text import Text

    table = _table(audit, "matrix", "does", "shape", "type", "MB")
    for matrix in audit.matrices:
        table.add_row(
            "\n= ".join(matrix.names),
            " and ".join(matrix.roles),
            " x ".join(map(str, matrix.shape)),
            matrix.dtype,
            f"{matrix.n_bytes / 1e6:,.2f}",
        )
    claimed = {True: "tied", False: "untied", None: "nothing"}[audit.claim]
    verdict = Text(f"claimed: {claimed} ({audit.claim_source})   verdict: ")
    verdict.append(audit.verdict, "bold green" if audit.exit_code == EXIT_OK else "bold red")
    console = _console()
    console.print(table)
    console.print(verdict, soft_wrap=True)
    for finding in audit.findings:
        console.print(Text(f"\n{finding.title}", "bold"), soft_wrap=True)
        console.print(finding.explain)


def _table(result: Ledger | Audit, *columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"{result.source} ({result.format})"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        right = column in ("parameters", "MB", "products")
        names = column == columns[0]
        side: Literal["left", "right"] = "right" if right else "left"
        table.add_column(column, justify=side, no_wrap=not names, overflow="fold")
    return table


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)
