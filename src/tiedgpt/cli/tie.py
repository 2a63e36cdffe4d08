"""`tiedgpt tie show|audit|fix MODEL`: the tie of a model or a file: count it, judge it, fix it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Literal

from tiedgpt.cli.console import BAD, GOOD, fact, show_text, table
from tiedgpt.cli.options import UsageError, parse
from tiedgpt.cli.source import source_or_newest
from tiedgpt.errors import EXIT_OK, UserError
from tiedgpt.options import argument, option

if TYPE_CHECKING:
    from tiedgpt.tie.audits import Audit
    from tiedgpt.tie.ledgers import Ledger, Row

LAYER = re.compile(r"(?<=\.)(\d+)(?=\.)")
ABOUT = """Is the output head the same matrix as the input embedding?

  tiedgpt tie show [MODEL]       every parameter once: its names, its cost
  tiedgpt tie audit [MODEL]      compare the file with what its config claims
  tiedgpt tie fix MODEL DEST     write a corrected copy; MODEL is not changed

The exit code of audit is 0 if the tie is as claimed and the file loads, else 6."""
NOT_FOR = {"show": ("dest", "keep", "input", "output"), "audit": ("dest", "keep"), "fix": ()}
"""Options that a verb does not take."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show, audit or fix the tie."""

    verb: Literal["show", "audit", "fix"] = argument("What to do.")
    source: str | None = argument(
        "A run, a model directory, a hub name, or a file: safetensors, .pt, .bin, GGUF, ONNX; "
        "default: the newest run in runs/.",
        default=None,
        metavar="MODEL",
    )
    dest: str | None = argument("fix: the new directory, which must not exist.", default=None)
    keep: Literal["input", "output", "both"] | None = option(
        None,
        "fix: if two matrices differ, keep the values of input or output; both: keep an untied "
        "model.",
    )
    input: str | None = option(
        None, "audit, fix: name of the tensor that reads, if it is not recognised.", metavar="NAME"
    )
    output: str | None = option(
        None,
        "audit, fix: name of the tensor that predicts, if it is not recognised.",
        metavar="NAME",
    )
    format: Literal["human", "json"] = option("human", "json: one object.", short="f")


def run(arguments: list[str]) -> int:
    """Show, audit or fix; return the exit code, which of an audit is its verdict."""
    args = parse(Arguments, "tie", arguments, ABOUT)
    from tiedgpt.tie import audit, fix, ledger

    for name in NOT_FOR[args.verb]:
        if getattr(args, name) is not None:
            typed = "DEST" if name == "dest" else f"--{name}"
            raise UserError(f"{typed} is not for `tiedgpt tie {args.verb}`")
    if args.verb == "fix" and (args.source is None or args.dest is None):
        raise UsageError("`tiedgpt tie fix` needs MODEL and DEST", "give both")
    source = source_or_newest(args.source)
    names = {"input_name": args.input, "output_name": args.output}
    result: Any
    if args.verb == "show":
        result = ledger(source)
    elif args.verb == "audit":
        result = audit(source, **names)
    else:
        result = fix(source, str(args.dest), keep=args.keep, **names)
    if args.format == "json":
        print(json.dumps(result.as_dict(), indent=2))
    elif args.verb == "show":
        _print_ledger(result)
    elif args.verb == "audit":
        _print_audit(result)
    else:
        show_text(result.explain)
    return result.exit_code if args.verb == "audit" else EXIT_OK


def _print_ledger(ledger: Ledger) -> None:
    from tiedgpt.tie.findings import format_shape

    rows: list[tuple[str, ...]] = []
    shared: list[int] = []
    for name, members in _group_layers(ledger.rows):
        shared += [len(rows)] if members[0].shared else []
        rows.append(
            (
                name,
                (f"{len(members)} x " if len(members) > 1 else "") + format_shape(members[0].shape),
                f"{sum(row.parameters for row in members):,}",
                f"{sum(row.bytes for row in members) / 1e6:,.2f}",
                f"{sum(row.multiply_adds for row in members):,}",
            )
        )
    totals = f"{ledger.total:,}", f"{ledger.bytes / 1e6:,.2f}", f"{ledger.multiply_adds:,}"
    rows.append(("all", "", *totals))
    table(
        ("parameter (= its other names)", "shape", ">parameters", ">MB", ">multiply-adds"),
        rows,
        bold=(*shared, len(rows) - 1),
        title=f"{ledger.source} ({ledger.format})",
    )
    show_text("\nmultiply-adds: per token; the embedding lookup takes none")
    show_text(ledger.explain)
    if ledger.left_out:
        show_text(f"Not parameters, left out: {shorten(', '.join(ledger.left_out), 80)}")


def _group_layers(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Put the same parameter of all layers under one name: h.0-11.ln_1.weight."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        pattern = tuple(LAYER.sub("*", name) for name in row.names)
        groups.setdefault((pattern, row.shape), []).append(row)
    members = [
        (zip(*(row.names for row in group), strict=True), group) for group in groups.values()
    ]
    return [("\n= ".join(map(_join_names, names)), group) for names, group in members]


def _join_names(names: Sequence[str]) -> str:
    """Return alike names as one, each number in them a span."""
    name = ""
    for parts in zip(*map(LAYER.split, names), strict=True):
        same = len(set(parts)) == 1
        name += parts[0] if same else f"{min(parts, key=int)}-{max(parts, key=int)}"
    return name


def _print_audit(audit: Audit) -> None:
    from tiedgpt.tie.findings import format_shape

    table(
        ("matrix", "does", "shape", "type", ">MB"),
        [
            (
                "\n= ".join(matrix.names),
                " and ".join(matrix.roles),
                format_shape(matrix.shape),
                matrix.dtype,
                f"{matrix.n_bytes / 1e6:,.2f}",
            )
            for matrix in audit.matrices
        ],
        title=f"{audit.source} ({audit.format})",
    )
    claimed = "nothing" if audit.claim is None else "tied" if audit.claim else "untied"
    show_text("")
    fact("claimed", f"{claimed} ({audit.claim_source})")
    fact("verdict", audit.verdict, style=GOOD if audit.exit_code == EXIT_OK else BAD)
    for finding in audit.findings:
        show_text(f"\n{finding.title}", style="bold")
        show_text(finding.explain)
