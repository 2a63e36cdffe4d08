"""Registry of the inspections: function, options and limits of each.

`INSPECTIONS` defines `tiedgpt.inspect`, the verb `tiedgpt inspect`, the server's /inspect/NAME and
the reference pages. A new inspection is a function that returns a `Result`, and a record here.
This module does not import torch, because help and the server's schemas need it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field
from importlib import import_module
from typing import Any, Literal

from tiedgpt.inspect.results import Result
from tiedgpt.inspect.run_files import counts_in, stored_opening
from tiedgpt.options import option
from tiedgpt.weights.source import Source

LARGEST = (1 << 31) - 1


def parameter(
    type: Any,
    help: str,
    least: int | None = None,
    most_served: int = LARGEST,
    *,
    is_required: bool = False,
    is_served: bool = True,
    is_of_table: bool = False,
    of_run: Callable[[Source, object], Any] | None = None,
) -> Field[Any]:
    """Return an argument of a function, which the command line and the server have too.

    Its type is int, float, bool, str, `int | str`, or a Literal of strings; the function has its
    default. The server refuses numbers above `most_served`, which bounds the work for one request,
    and takes no option that names a place on this machine (`is_served` False). The result's table
    takes an option that `is_of_table`, and the function does not. `of_run` returns the default for
    a run's or a model's directory; None: there is none.
    """
    default = MISSING if is_required else False if type is bool else None
    served = {"least": -LARGEST - 1 if least is None else least, "most": most_served}
    field: Field[Any] = option(
        default,
        help,
        least=least,
        served=served,
        is_served=is_served,
        is_of_table=is_of_table,
        of_run=of_run,
    )
    field.type = type
    return field


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """One inspection: `function(model, tokenizer, text, **options)` returns a `Result`."""

    name: str
    module: str
    """Holds the function, which has the inspection's name."""
    about: str
    options: Mapping[str, Field[Any]] = field(default_factory=dict)
    reads_text: bool = True
    """False: the function takes no text; it looks at the rows of W alone."""
    is_served: bool = True
    """False: the server does not offer it."""
    served_with: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that the server adds, to bound the work for one request."""
    max_tokens: int | None = None
    """Tokens that the server reads where the result or the work grows with layers or heads; None:
    the model's context."""

    @property
    def verb(self) -> str:
        """The name on the command line."""
        return self.name.replace("_", "-")

    @property
    def function(self) -> Callable[..., Result]:
        """The function; its module is imported now."""
        function: Callable[..., Result] = getattr(import_module(self.module), self.name)
        return function

    def defaults_of(self, source: Source, tokenizer: object) -> dict[str, Any]:
        """Return the defaults that a run, or a model's directory, has for the options."""
        functions = {name: one.metadata["of_run"] for name, one in self.options.items()}
        defaults = {name: of(source, tokenizer) for name, of in functions.items() if of}
        return {name: value for name, value in defaults.items() if value is not None}


_POSITION = parameter(int, "The position to show; default: the last")
_ROWS = parameter(int, "Rows to show; default: 10", 1, is_of_table=True)

INSPECTIONS: dict[str, Inspection] = {
    inspection.name: inspection
    for inspection in (
        Inspection(
            name="positions",
            module="tiedgpt.inspect.predictions",
            about="the prediction at each of N positions, and the loss of the true token",
            options={
                "top": parameter(int, "Tokens to list for each position; default: 10", 1, 100),
                "replace_at": parameter(
                    int,
                    "Replace the token at this position, and show which predictions change",
                ),
                "replace_with": parameter(
                    int | str,
                    "The new token: its id, or its text; default: the next id",
                    0,
                ),
            },
        ),
        Inspection(
            name="lens",
            module="tiedgpt.inspect.layers",
            about="the prediction that the state after each layer would give",
            options={
                "top": parameter(int, "Tokens to list for each state; default: 5", 1, 50),
                "position": _POSITION,
                "after_attention": parameter(
                    bool, "Also show the states between attention and MLP"
                ),
            },
            max_tokens=256,
        ),
        Inspection(
            name="dot",
            module="tiedgpt.inspect.predictions",
            about="one prediction as the dot products that it is: h with every row of W",
            options={
                "top": parameter(int, "Tokens to list; default: 10", 1, 1000),
                "position": _POSITION,
            },
        ),
        Inspection(
            name="vocabulary",
            module="tiedgpt.inspect.rows",
            about="the rows of W: norms, frequency, directions, tokens that no text reaches",
            options={
                "top": _ROWS,
                "counts": parameter(
                    str,
                    "A run, a folder of token shards or a text in which to count tokens; default: "
                    "MODEL, if it is a run",
                    is_served=False,
                    of_run=counts_in,
                ),
            },
            reads_text=False,
        ),
        Inspection(
            name="neighbours",
            module="tiedgpt.inspect.similarity",
            about="the rows nearest to one token's row, by three measures",
            options={
                "token": parameter(
                    int | str, "The token: its id, or its text", 0, is_required=True
                ),
                "top": parameter(int, "Rows to list; default: 10", 1, 100),
            },
            reads_text=False,
        ),
        Inspection(
            name="gradient_split",
            module="tiedgpt.inspect.gradients",
            about="the gradient of W: the part from reading, and the part from predicting",
            options={"top": _ROWS},
        ),
        Inspection(
            name="learn",
            module="tiedgpt.inspect.learning",
            about="which rows of W a step of learning moves, and by which of its two jobs",
            options={
                "steps": parameter(int, "Steps of plain SGD on the text; default: 1", 0, 100),
                "lr": parameter(float, "Learning rate: the size of a step; default: 0.1"),
                "predict": parameter(
                    Literal["all", "last"],
                    "Learn from all predictions, or the last with a known answer; default: all",
                ),
                "train": parameter(
                    Literal["all", "head", "blocks"],
                    "Train all parameters, the matrix that predicts, or the blocks; default: all",
                ),
                "untied": parameter(bool, "First give a tied model a head with equal values"),
                "other": parameter(
                    str,
                    "A text that is not learned; default: the held-out opening of a run",
                    of_run=stored_opening,
                ),
                "position": parameter(
                    int, "The prediction to show; default: the last with a known answer"
                ),
                "top": parameter(int, "Rows to list beside the text's; default: 10", 0, 100),
            },
            served_with={"max_seconds": 20.0},
            max_tokens=256,
        ),
        Inspection(
            name="attention",
            module="tiedgpt.inspect.layers",
            about="a layer's attention weights, and three numbers for every head",
            options={"layer": parameter(int, "The layer; -1 is the last; default: 0")},
            max_tokens=256,
        ),
        Inspection(
            name="ablate",
            module="tiedgpt.inspect.layers",
            about="what each head, attention and MLP is worth in loss",
            options={
                "mode": parameter(
                    Literal["zero", "mean"],
                    "Replace a part's output by zero or by its mean over the text; default: zero",
                )
            },
            max_tokens=256,
        ),
        Inspection(
            name="patch",
            module="tiedgpt.inspect.patching",
            about="where an answer comes from: activations of a clean text in a corrupted one",
            options={
                "corrupted": parameter(
                    str, "A text of as many tokens, with another answer", is_required=True
                ),
                "answer": parameter(
                    int | str,
                    "The token that follows the clean text: its id, or its text",
                    0,
                    is_required=True,
                ),
                "wrong": parameter(int | str, "The token that follows the corrupted one", 0),
            },
            max_tokens=64,
        ),
        Inspection(
            name="direction",
            module="tiedgpt.inspect.steering",
            about="the mean state of some texts less that of others, to steer by",
            options={
                "toward": parameter(str, "Texts, a line each", is_required=True),
                "away": parameter(str, "Other texts, a line each", is_required=True),
                "layer": parameter(int, "After which layer; default: the middle one"),
                "top": parameter(int, "Tokens to list; default: 10", 1, 100),
            },
            reads_text=False,
            is_served=False,
        ),
        Inspection(
            name="random_head",
            module="tiedgpt.inspect.untied",
            about="the loss and the parameters of a random head in the place of W",
            options={
                "top": parameter(int, "Tokens to list; default: 5", 1, 50),
                "seed": parameter(int, "Decides the random matrix; default: 0", 0),
            },
        ),
    )
}
"""By name, in the order in which help and pages list them."""
