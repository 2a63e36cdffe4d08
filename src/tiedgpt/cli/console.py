"""Output of the command line: errors, hints, notes, facts and tables.

Results go to stdout and everything else to stderr. A terminal gets lines that fit it; a pipe gets
each message in one line, and whole names in tables.
"""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing rich takes 40 ms, and much is generated without a word on stderr
    from rich.console import Console
    from rich.progress import ProgressColumn

LABEL_WIDTH = 10
"""Columns of the labels of facts; a longer label shifts its fact to the right."""
SHORTEST_NAME = 16
"""Tables shorten names no further."""
PATIENCE_SECONDS = 2.0
"""Seconds of waiting after which a note names the work."""
GOOD, BAD = "bold green", "bold red"


def console(*, stderr: bool = False, silent: bool = False) -> Console:
    """Return a console without markup."""
    from rich.console import Console

    class PatientConsole(Console):
        """A console that stays silent after its reader has closed the pipe."""

        def on_broken_pipe(self) -> None:
            """Stop all output."""
            self.quiet = True
            sys.stderr = sys.stdout = open(os.devnull, "w")

    return PatientConsole(
        stderr=stderr, quiet=silent, highlight=False, markup=False, emoji=False, soft_wrap=True
    )


def say(
    label: str, text: str, *, style: str = "bold", body: str = "", to: Console | None = None
) -> None:
    """Show a labelled text on stderr, or `to`; its lines hang below the first, words are whole."""
    from rich.text import Text

    to = to or console(stderr=True)
    label = f"{label} " if label else ""
    text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    text = text.encode("utf-8", "replace").decode()  # names of files may not be text
    lines = text.split("\n")
    if to.is_terminal:
        lines = [piece for line in lines for piece in wrap(line, to.width - len(label))]
    below = f"\n{' ' * len(label)}"
    to.print(Text.assemble((label, style), (below.join(lines), body)))


def wrap(line: str, width: int) -> list[str]:
    """Return a line as several of at most `width` columns; longer words stay whole."""
    parts = textwrap.wrap(line, max(width, 20), break_long_words=False, break_on_hyphens=False)
    return parts or [""]


def fact(label: str, text: str, *, style: str = "", to: Console | None = None) -> None:
    """Show one of a list of facts, such as `model     4,240,896 parameters`, on stdout or `to`."""
    say(label.ljust(LABEL_WIDTH - 1), text, body=style, to=to or console())


def show_text(text: str, *, style: str = "") -> None:
    """Print a text on stdout, wrapped at words in a terminal."""
    say("", text, body=style, to=console())


def note(*texts: str, to: Console | None = None) -> None:
    """Show notes on stderr, or `to`."""
    for text in texts:
        say("note:", text, style="bold cyan", to=to)


@contextlib.contextmanager
def note_compilation(what: str, to: Console | None = None) -> Iterator[None]:
    """Show a note once if kernels begin to be compiled inside the block, for `what`."""
    from tiedgpt.infer.kernels.compile_cache import on_compilation

    text = f"compiling kernels for {what} on this CPU takes some ten seconds, once: they are kept"
    with on_compilation(lambda: note(text, to=to)):
        yield


def error(message: str, hint: str | None = None) -> None:
    """Show an error on stderr, and a hint below it."""
    say("error:", message.replace("\n", "\\n"), style="bold red")
    if hint is not None:
        say("hint:", hint.replace("\n", "\\n"), style="bold green")


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    bold: Sequence[int] = (),
    title: str = "",
) -> None:
    """Print a table on stdout.

    A column `>name` is aligned to the right. In a terminal the names in the first column are
    shortened in the middle until the rows fit. `bold` are numbers of rows.
    """
    from rich.cells import cell_len
    from rich.text import Text

    from tiedgpt.plots.table import aligned  # numpy would make every --help slower

    to, cells = console(), [[column.lstrip(">") for column in columns], *map(list, rows)]
    if to.is_terminal:
        others = [max(cell_len(row[n]) for row in cells) for n in range(1, len(columns))]
        room = max(SHORTEST_NAME, to.width - sum(others) - 2 * len(others))
        for row in cells:
            row[0] = "\n".join(shorten_name(line, room) for line in row[0].split("\n"))
    head, separator, *lines = aligned(columns, cells[1:])
    to.print(Text(title, "italic"), end="\n" if title else "")
    to.print(Text(f"{head}\n{separator}"))
    for number, line in enumerate(lines):
        to.print(Text(line, "bold" if number in bold else ""))


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Note the work on stderr if it takes more than two seconds."""
    timer = threading.Timer(PATIENCE_SECONDS, note, [f"{what} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def bar(
    what: str, *columns: ProgressColumn, to: Console | None = None
) -> Iterator[Callable[[int, int | None], None]]:
    """Show a progress bar on stderr, or `to`, in a terminal; yields what moves it."""
    from rich.progress import BarColumn, Progress

    to = to or console(stderr=True)
    with Progress(
        what, BarColumn(), *columns, console=to, transient=True, disable=not to.is_terminal
    ) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def shorten_name(name: str, width: int) -> str:
    """Return the name in at most `width` columns, with `...` in place of its middle."""
    from rich.cells import cell_len

    if cell_len(name) <= width:
        return name
    tail = (width - 3) * 2 // 3  # the end of a name tells more
    return f"{name[: width - 3 - tail]}...{name[len(name) - tail :]}"
