"""One lesson: its text, at most 80 columns wide, and every number in it by name."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.cells import cell_len

from tiedgpt.errors import TiedGPTError

WIDTH = 79
EQUATION = "h_0 = U W_e + W_p,  h_l = block(h_{l-1}),  P(u) = softmax(h_n W_e^T)"
PAPER = "Radford et al. 2018, eq. 2"


@dataclass
class Lesson:
    """A question and its answer; `print` it."""

    topic: str
    question: str
    places: tuple[str, ...] = ()
    """Where the answer is in the code: "core/FILE: FUNCTION"."""
    commands: tuple[str, ...] = ()
    """What measures more."""
    model: str = ""
    """On which model the numbers were measured."""
    matrices: str = ""
    """Names of the matrices that read and predict."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """Everything that was measured."""
    blocks: list[str] = field(default_factory=list)
    """Paragraphs and tables, in lines of at most 79 columns."""
    partial: list[str] = field(default_factory=list)
    """What could not be measured, and why."""

    def say(self, text: str, **numbers: Any) -> None:
        """Add a paragraph, in which `{name}` stands for a number, or a word kept whole."""
        self.numbers |= numbers
        whole = {n: x.replace(" ", "\xa0") if isinstance(x, str) else x for n, x in numbers.items()}
        filled = textwrap.fill(text.format(**whole), WIDTH, break_on_hyphens=False)
        self.blocks.append(filled.replace("\xa0", " "))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Add a table; a column `>name` is aligned to the right."""
        lines = [[column.lstrip(">") for column in columns], *map(list, rows)]
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        made = []
        for line in lines:
            cells = []
            for column, cell, width in zip(columns, line, widths, strict=True):
                blanks = " " * (width - cell_len(cell))
                cells.append(blanks + cell if column.startswith(">") else cell + blanks)
            made.append(f"  {'  '.join(cells)}".rstrip())
        self.blocks.append("\n".join(made))

    def list(self, title: str, lines: Iterable[str]) -> None:
        """Add a paragraph with lines of code below it."""
        text = textwrap.fill(title, WIDTH, subsequent_indent=" " * (title.find(" ") + 1))
        self.blocks.append("\n".join([text, *(f"     {line}" for line in lines)]))

    @contextmanager
    def optional(self, what: str) -> Iterator[None]:
        """Leave a part out that this model does not allow, and say so."""
        try:
            yield
        except TiedGPTError as error:
            self.partial.append(f"{what}: {error}")

    @property
    def title(self) -> str:
        """The topic and its question."""
        return textwrap.fill(f"{self.topic}: {self.question}", WIDTH)

    @property
    def head(self) -> str:
        """What the lesson is measured on."""
        return _labelled([("model", self.model), ("matrix", self.matrices)])

    @property
    def foot(self) -> str:
        """What could not be measured, the equation, the code and further commands."""
        files: dict[str, list[str]] = {}
        for place in self.places:
            path, _, name = place.partition(": ")
            files.setdefault(path, []).append(name)
        code = [f"{path}: {', '.join(names)}" for path, names in files.items()]
        equation = f"{EQUATION}\n({PAPER})" if self.places else ""
        left_out = [("partial", why) for why in self.partial]
        code_and_more = [("code", "\n".join(code)), ("more", "\n".join(self.commands))]
        return _labelled([*left_out, ("equation", equation), *code_and_more])

    def to_json(self) -> str:
        """Return everything but the text as one JSON object; NaN as null."""
        values = asdict(self)
        del values["blocks"]
        values["numbers"] = {
            name: None if isinstance(n, float) and not math.isfinite(n) else n
            for name, n in self.numbers.items()
        }
        return json.dumps(values, ensure_ascii=False, allow_nan=False)

    def __str__(self) -> str:
        return "\n\n".join(filter(None, (self.title, self.head, *self.blocks, self.foot)))

    __repr__ = __str__


def _labelled(facts: Iterable[tuple[str, str]]) -> str:
    """Return facts in a column beside their labels, without those that are empty."""
    lines = []
    for label, text in facts:
        parts = [p for line in text.split("\n") for p in textwrap.wrap(line, WIDTH - 10)]
        for name, part in zip([label, *[""] * len(parts)], parts, strict=False):
            lines.append(f"{name:<9} {part}")
    return "\n".join(lines)
