"""The tasks by name: records that need no torch, and name the classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """Facts about a task that options, runs and model cards need without torch."""

    home: str
    """Module and class, as `my_module:MyTask`."""
    is_task: bool = True
    """Whether it is a value of --task; `tune` chooses the others by its data."""
    reads_text: bool = False
    """Whether the data are text, for which the size of a model can be chosen."""
    pipeline: str | None = None
    """Task of the published model on the Hugging Face hub."""
    verb: str = ""
    """Verb for the finished model."""
    use: str = ""
    """Effect of the verb."""
    loss_unit: str = "nats"
    """Unit of the loss."""
    epochs: float | None = 3
    """Default training duration, as Radford et al. 2018, section 4.1; None: minutes."""
    min_steps: int = 100
    """Minimum number of steps over few examples by default."""
    batch_size: int | None = 32
    """Default number of examples per step, as there; None: that of the size."""


HOME = "tiedgpt.train.tasks"
TASKS = {
    "lm": TaskRecord(
        home=f"{HOME}.language:LanguageModelling",
        reads_text=True,
        pipeline="text-generation",
        verb="generate",
        use="generates text",
        epochs=None,
        min_steps=1,
        batch_size=None,
    ),
    "replies": TaskRecord(
        home=f"{HOME}.replies:Replies",
        is_task=False,
        pipeline="text-generation",
        verb="generate",
        use="generates text",
    ),
    "classify": TaskRecord(
        home=f"{HOME}.labelled:Classify",
        pipeline="text-classification",
        verb="classify",
        use="labels texts",
    ),
    "choose": TaskRecord(
        home=f"{HOME}.labelled:Choose",
        pipeline="multiple-choice",
        verb="classify",
        use="chooses continuations",
    ),
    "regress": TaskRecord(
        home=f"{HOME}.regress:Regress",
        pipeline="text-classification",
        verb="classify",
        use="predicts numbers",
        loss_unit="squared error",
    ),
}
"""The tasks by name."""


def list_tasks() -> tuple[str, ...]:
    """Return the values of --task."""
    return tuple(name for name, record in TASKS.items() if record.is_task)


def find_record(options: dict[str, Any]) -> TaskRecord:
    """Return the record of the task in a run's options by name."""
    if home := options.get("objective"):
        return TaskRecord(home=home)
    return TASKS.get(options.get("task", "lm"), TASKS["lm"])
