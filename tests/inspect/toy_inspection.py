"""An inspection that a user adds: all of it is here."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from tiedgpt.inspect.registry import Inspection, parameter
from tiedgpt.inspect.results import Figure, Result, lines
from tiedgpt.plots.panel import Panel
from tiedgpt.plots.table import number_table

LETTERS = Inspection(
    name="letters",
    module=__name__,
    about="how often each letter occurs",
    options={"top": parameter(int, "Letters to list; default: 3", 1, 26)},
    max_tokens=8,
)


@dataclass(frozen=True, kw_only=True, repr=False)
class Letters(Result):
    letters: dict[str, int]

    def table(self, top: int = 10) -> str:
        return number_table(("letter", self.letters), ("times", self.letters.values()))

    def figure(self) -> Figure:
        return "letters", [Panel("letters", "rank", lines({"times": [*self.letters.values()]}))]


def letters(model: Any, tokenizer: Any = None, text: Any = "", *, top: int = 3) -> Letters:
    """Count the letters of a text, or of ids."""
    text = text if isinstance(text, str) else tokenizer.decode(text)
    return Letters(letters=dict(Counter(text.replace(" ", "")).most_common(top)))
