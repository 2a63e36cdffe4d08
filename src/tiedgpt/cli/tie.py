"""`tiedgpt tie show|audit|fix SOURCE`: the tie of a model or a file: count it, judge it, fix it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Literal

from tiedgpt.cli.console import BAD, GOOD, fact, show_text, table
from tiedgpt.cli.options import Positional, no_verb, parse
from tiedgpt.cli.source import source_or_newest
from tiedgpt.errors import EXIT_OK

if TYPE_CHECKING:
    from tiedgpt.tie.audits import Audit
    from tiedgpt.tie.ledgers import Ledger, Row

LAYER = re.compile(r"(?<=\.)(\d+)(?=\.)")
USAGE = """\
usage: tiedgpt tie show [SOURCE]
                     every parameter once: who shares it, what it costs
       tiedgpt tie audit [SOURCE]
                     is the head the embedding, and is that what is claimed?
       tiedgpt tie fix SOURCE DEST
                     write a corrected copy; SOURCE is never touched

SOURCE is a run, a model directory, a hub name, or a file: safetensors,
.pt/.bin, GGUF, ONNX. `audit` exits with 0 if the tie is as claimed, 6 if it
is broken or contradicts the claim. `tiedgpt tie show --help` tells more.
"""
VERBS = ("show", "audit", "fix")


@dataclass(frozen=True, kw_only=True)
class Show:
    """Options of `tie show`."""

    source: Positional[str | None] = None
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

    source: Positional[str] = field()
    """The checkpoint to fix; it is only read."""
    dest: Positional[str]
    """The new directory; it must not exist."""
    keep: Literal["input", "output", "both"] | None = None
    """If two matrices differ: whose values stay, or both; the model is untied then."""


Arguments = Fix
"""The options of all three."""


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
        return _print(fixing, done, lambda done: show_text(done.explain))
    if verb in ("-h", "--help"):
        print(USAGE, end="")
        return EXIT_OK
    raise no_verb(verb, VERBS, "tiedgpt tie")


def _print(options: Show, result: Any, human: Callable[[Any], None]) -> int:
    """Print a result as JSON or for people."""
    if options.format == "json":
        print(json.dumps(result.as_dict(), indent=2))
    else:
        human(result)
    return EXIT_OK


def _print_ledger(ledger: Ledger) -> None:
    rows: list[tuple[str, ...]] = []
    shared: list[int] = []
    for name, alike in _alike(ledger.rows):
        shared += [len(rows)] if alike[0].shared else []
        rows.append(
            (
                name,
                _size(alike[0].shape),
                f"{sum(row.parameters for row in alike):,}",
                f"{sum(row.bytes for row in alike) / 1e6:,.2f}",
                f"{sum(row.multiply_adds for row in alike):,}",
            )
        )
    totals = f"{ledger.total:,}", f"{ledger.bytes / 1e6:,.2f}", f"{ledger.multiply_adds:,}"
    rows.append(("all", "", *totals))
    table(
        ("parameter = who shares it", "shape", ">parameters", ">MB", ">products"),
        rows,
        bold=(*shared, len(rows) - 1),
        title=f"{ledger.source} ({ledger.format})",
    )
    show_text("\nproducts: multiply-adds per token with this matrix; a lookup costs none")
    show_text(ledger.explain)
    if ledger.left_out:
        show_text(f"Not parameters, left out: {shorten(', '.join(ledger.left_out), 80)}")


def _size(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


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
    table(
        ("matrix", "does", "shape", "type", ">MB"),
        [
            (
                "\n= ".join(matrix.names),
                " and ".join(matrix.roles),
                _size(matrix.shape),
                matrix.dtype,
                f"{matrix.n_bytes / 1e6:,.2f}",
            )
            for matrix in audit.matrices
        ],
        title=f"{audit.source} ({audit.format})",
    )
    claimed = {True: "tied", False: "untied", None: "nothing"}[audit.claim]
    show_text("")
    fact("claimed", f"{claimed} ({audit.claim_source})")
    fact("verdict", audit.verdict, style=GOOD if audit.exit_code == EXIT_OK else BAD)
    for finding in audit.findings:
        show_text(f"\n{finding.title}", style="bold")
        show_text(finding.explain)
