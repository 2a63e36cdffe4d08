"""The objectives by name: records that need no torch, and the classes that they name.

objective = open_objective(options)      # a class
sources = objective.open(options)        # its data, as they were read
objective, data = objective.make(sources, run, options, setup)
"""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiedgpt.errors import UserError

if TYPE_CHECKING:
    from tiedgpt.train.objective import Objective
    from tiedgpt.train.options import TrainOptions


@dataclass(frozen=True, kw_only=True)
class ObjectiveRecord:
    """Facts about an objective that options, runs and model cards need without torch."""

    home: str
    """Module and class, as `my_module:MyObjective`."""
    is_task: bool = True
    """Whether it is a value of --task; `tune` chooses the others by its data."""
    reads_text: bool = False
    """Whether the data are text, for which the size of a model can be chosen."""
    pipeline: str | None = None
    """Task of the published model on the Hugging Face hub."""
    epochs: float | None = 3
    """Default training duration, as Radford et al. 2018, section 4.1; None: minutes."""
    min_steps: int = 100
    """Minimum number of steps over few examples by default."""
    batch_size: int | None = 32
    """Default number of examples per step, as there; None: that of the size."""


HOME = "tiedgpt.train.objectives"
OBJECTIVES = {
    "lm": ObjectiveRecord(
        home=f"{HOME}.language:LanguageModelling", reads_text=True, pipeline="text-generation",
        epochs=None, min_steps=1, batch_size=None,
    ),
    "replies": ObjectiveRecord(
        home=f"{HOME}.replies:Replies", is_task=False, pipeline="text-generation"
    ),
    "classify": ObjectiveRecord(home=f"{HOME}.labelled:Classify", pipeline="text-classification"),
    "choose": ObjectiveRecord(home=f"{HOME}.labelled:Choose", pipeline="multiple-choice"),
}  # fmt: skip
"""The objectives by name."""


def list_tasks() -> tuple[str, ...]:
    """Return the values of --task."""
    return tuple(name for name, record in OBJECTIVES.items() if record.is_task)


def find_record(options: dict[str, Any]) -> ObjectiveRecord:
    """Return the record of the objective in a run's options by name."""
    if home := options.get("objective"):
        return ObjectiveRecord(home=home)
    return OBJECTIVES.get(options.get("task", "lm"), OBJECTIVES["lm"])


def open_objective(options: TrainOptions) -> type[Objective]:
    """Return the class of the objective of these options; for `tune`, the data decide."""
    if options.recipe == "tune" and options.objective is None:
        from tiedgpt.train.objectives.replies import has_examples

        if options.start is None:
            raise UserError("name the model to tune: --from MODEL")
        examples = has_examples(options)
        options.check_data(examples=examples)
        return load_objective(OBJECTIVES["replies" if examples else "lm"].home)
    return load_objective(options.objective_record.home)


def load_objective(home: str) -> Any:
    """Import the class MODULE:CLASS, of an installed module or of one in the working directory."""
    from tiedgpt.train.objective import Objective

    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    module, _, name = home.partition(":")
    try:
        objective = getattr(import_module(module), name)
    except Exception as error:  # the module may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        inside = [f for f in frames if "importlib" not in f.filename and f.filename != __file__]
        line = f", in line {inside[0].lineno} of {inside[0].filename}" if inside else ""
        remedy = "give MODULE:CLASS of a file in this directory, as --objective my_module:Mine"
        raise UserError(
            f"the objective {home!r} cannot be imported: {type(error).__name__}: {error}{line}",
            hint=None if line or isinstance(error, SyntaxError) else remedy,
        ) from error
    if not (isinstance(objective, type) and issubclass(objective, Objective)):
        raise UserError(
            f"{home} is not a subclass of Objective",
            hint="derive it from tiedgpt.train.objective.Objective",
        )
    if missing := ", ".join(sorted(objective.__abstractmethods__)):
        raise UserError(f"{home} must define {missing}")
    return objective
