"""`tiedgpt tie show|audit|fix SOURCE`: the tie of a model or a file: count it, judge it, fix it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from tiedgpt.cli.options import parse
from tiedgpt.cli.source import source_or_newest
from tiedgpt.errors import EXIT_OK, EXIT_USAGE

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tiedgpt.tie.audits import Audit
    from tiedgpt.tie.ledgers import Ledger, Row

LAYER = re.compile(r"\.(\d+)(?=\.)")
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
class Fix:
    """Options of `tie fix`."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """The checkpoint to fix; it is only read."""
    dest: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DEST")]
    """The new directory; it must not exist."""
    keep: Literal["input", "output", "both"] | None = None
    """If two matrices differ: whose values stay, or both; the model is untied then."""
    input: str | None = None
    """Name of the tensor that reads, if names do not tell."""
    output: str | None = None
    """Name of the tensor that predicts, if names do not tell."""
    format: Literal["human", "json"] = "human"
    """json: one object."""


def run(arguments: list[str]) -> int:
    """Run one of the three; return the exit code."""
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if verb in ("-h", "--help"):
        print(USAGE, end="")
        return EXIT_OK
    verbs = {"show": show, "audit": audit_, "fix": fix_}
    if verb not in verbs:
        print(f"tiedgpt tie: no {verb!r}; there are {', '.join(verbs)}", file=sys.stderr)
        return EXIT_USAGE
    return verbs[verb](rest)


def show(arguments: list[str]) -> int:
    """Show the ledger."""
    given = parse(Show, "tie show", arguments, "Every parameter once, by storage.")
    from tiedgpt.tie import ledger

    counted = ledger(source_or_newest(given.source))
    if given.format == "json":
        print(json.dumps(counted.as_dict(), indent=2))
    else:
        _print_ledger(counted)
    return EXIT_OK


def audit_(arguments: list[str]) -> int:
    """Show the audit; its verdict is the exit code."""
    given = parse(AuditOptions, "tie audit", arguments, "Is the head the embedding?")
    from tiedgpt.tie import audit

    source = source_or_newest(given.source)
    judged = audit(source, input_name=given.input, output_name=given.output)
    if given.format == "json":
        print(json.dumps(judged.as_dict(), indent=2))
    else:
        _print_audit(judged)
    return judged.exit_code


def fix_(arguments: list[str]) -> int:
    """Write a corrected copy and show what was done."""
    given = parse(Fix, "tie fix", arguments, "Write a corrected copy.")
    from tiedgpt.tie import fix

    names = {"input_name": given.input, "output_name": given.output}
    done = fix(given.source, given.dest, keep=given.keep, **names)
    print(json.dumps(done.as_dict(), indent=2) if given.format == "json" else done.explain)
    return EXIT_OK


def _print_ledger(ledger: Ledger) -> None:
    from rich.markup import escape

    table = _table(ledger)
    groups = _alike(ledger.rows)
    in_file = ledger.format != "module"  # nothing is trained or frozen in a file
    rows = [(_shape(rows[0]), *_numbers(rows, in_file)) for _, rows in groups]
    totals = ("", f"{ledger.total:,}", f"{ledger.bytes / 1e6:,.2f}", f"{ledger.multiply_adds:,}")
    table.add_column("parameter, and who shares it", overflow="fold")
    for at, column in enumerate(("shape", "parameters", "MB", "products")):
        widest = max(len(cells[at]) for cells in (*rows, totals))
        justify: Literal["left", "right"] = "right" if at else "left"
        table.add_column(column, justify=justify, no_wrap=True, min_width=widest)
    for (name, members), cells in zip(groups, rows, strict=True):
        table.add_row(escape(name), *cells, style="bold" if members[0].shared else None)
    table.add_section()
    table.add_row("all", *totals, style="bold")
    console = _console()
    console.print(table)
    console.print("products: multiply-adds per token with this matrix; a lookup costs none")
    console.print(escape(ledger.explain))
    if ledger.left_out:
        names = ", ".join(ledger.left_out[:3]) + (", ..." if len(ledger.left_out) > 3 else "")
        console.print(escape(f"Not parameters, left out: {names}"))


def _shape(row: Row) -> str:
    padding = f" ({row.padded_rows} pad)" if row.padded_rows > 0 else ""
    return " x ".join(map(str, row.shape)) + padding


def _numbers(rows: Sequence[Row], in_file: bool) -> tuple[str, str, str]:
    """Return parameters, megabytes and products of alike rows together."""
    frozen = "" if rows[0].trainable or in_file else " (frozen)"
    return (
        f"{sum(row.parameters for row in rows):,}{frozen}",
        f"{sum(row.bytes for row in rows) / 1e6:,.2f}",
        f"{sum(row.multiply_adds for row in rows):,}",
    )


def _alike(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Put the same parameter of all layers under one name: h.0-11.ln_1.weight."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        pattern = tuple(LAYER.sub(".*", name) for name in row.names)
        groups.setdefault((pattern, row.shape, row.trainable), []).append(row)
    return [("\n= ".join(_spans(members)), members) for members in groups.values()]


def _spans(rows: Sequence[Row]) -> list[str]:
    """Return the names of alike rows as one, each number in them a span."""
    spanned = []
    for names in zip(*(row.names for row in rows), strict=True):
        numbers = iter(zip(*(map(int, LAYER.findall(name)) for name in names), strict=True))
        spans = (f".{min(n)}-{max(n)}" if min(n) < max(n) else f".{n[0]}" for n in numbers)
        spanned.append(LAYER.sub(lambda _, spans=spans: next(spans), names[0]))  # type: ignore[misc]
    return spanned


def _print_audit(audit: Audit) -> None:
    from rich.markup import escape

    table = _table(audit)
    for column in ("matrix", "does", "shape", "type"):
        table.add_column(column, overflow="fold")
    table.add_column("MB", justify="right")
    for matrix in audit.matrices:
        table.add_row(
            escape("\n= ".join(matrix.names)),
            " and ".join(matrix.roles),
            " x ".join(map(str, matrix.shape)),
            matrix.dtype,
            f"{matrix.n_bytes / 1e6:,.2f}",
        )
    console = _console()
    console.print(table)
    claimed = {True: "tied", False: "untied", None: "nothing"}[audit.claim]
    colour = "green" if audit.exit_code == EXIT_OK else "red"
    console.print(
        f"claimed: {claimed} ({escape(audit.claim_source)})   "
        f"verdict: [bold {colour}]{audit.verdict}[/]",
        soft_wrap=True,
    )
    for finding in audit.findings:
        console.print(f"\n[bold]{escape(finding.title)}[/]", soft_wrap=True)
        console.print(escape(finding.explain))


def _table(result: Ledger | Audit) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    title = escape(f"{result.source} ({result.format})")
    return Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False
    )


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)
