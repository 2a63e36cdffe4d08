"""The recent losses, skipped steps and scores that decide whether a run goes on.

Every checkpoint holds the `RunState`, so a resumed run ends or fails at the same step as an
uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tiedgpt.errors import CorruptInputError, DivergedError
from tiedgpt.train.plan.values import Plan

MAX_SKIPPED_STEPS, SKIP_WINDOW_STEPS = 10, 200
"""Number of skipped steps among the last `SKIP_WINDOW_STEPS` that ends a run."""
RECENT_STEPS = 100
"""Number of losses and gradient norms in a `RunState`."""
SHOWN_STEPS = 5
"""Number of losses and gradient norms in an error message."""
WORSE_RATIO = 1.01
"""Ratio to the best validation loss above which a loss counts as worse."""
STALE_EVALUATIONS = 3
"""Number of evaluations without improvement that ends a run, if the newest loss is `WORSE_RATIO`
times the best."""


@dataclass
class RunState:
    """Recent losses, skipped steps and validation scores of a run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    first_loss: float | None = None
    skipped: list[int] = field(default_factory=list)
    """Skipped steps among the last `SKIP_WINDOW_STEPS`."""
    skipped_in_all: int = 0
    """Number of skipped steps of the run."""
    best_step: int | None = None
    """Step with the best validation loss; its checkpoint is kept."""
    best_loss: float = math.inf
    stale: int = 0
    """Number of evaluations since the best."""
    newest_loss: float = math.inf
    evaluation_due: bool = False
    """Whether a stop interrupted the evaluation after the last step."""

    def to_save(self) -> dict[str, Any]:
        """Return the fields that have a value, as plain data for a checkpoint."""
        return {k: v for k, v in asdict(self).items() if v not in (None, math.inf)}

    def add_step(self, loss: float, norm: float) -> None:
        """Add the loss and the gradient norm of a step."""
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self.losses = [*self.losses, loss][-RECENT_STEPS:]
        self.norms = [*self.norms, norm][-RECENT_STEPS:]

    def add_skip(self, step: int) -> None:
        """Add a skipped step."""
        self.skipped.append(step)
        self.skipped_in_all += 1

    def add_evaluation(self, step: int, loss: float) -> bool:
        """Add a validation loss; return whether it is the best so far."""
        self.newest_loss = loss
        if loss < self.best_loss:
            self.best_step, self.best_loss, self.stale = step, loss, 0
            return True
        self.stale += 1
        return False

    def reopen(self, step: int, loss: float) -> None:
        """Add the final validation loss of a finished run that is prolonged."""
        self.add_evaluation(step, loss)
        self.stale = 0

    def is_over(self, plan: Plan) -> bool:
        """Return whether validation ends the run: out of patience, or rising again."""
        if plan.keep == "last" or not plan.can_end_early:
            return False
        if plan.patience is not None:
            return self.stale >= plan.patience
        return self.stale >= STALE_EVALUATIONS and self.newest_loss > WORSE_RATIO * self.best_loss

    def require_sound(self, step: int) -> None:
        """Raise `DivergedError` after too many skipped steps or if the mean loss has grown."""
        self.skipped = [skipped for skipped in self.skipped if skipped > step - SKIP_WINDOW_STEPS]
        if len(self.skipped) >= MAX_SKIPPED_STEPS:
            raise DivergedError(
                f"{len(self.skipped)} of the last {SKIP_WINDOW_STEPS} steps had no finite loss or "
                "gradient"
            )
        if self.first_loss is not None and len(self.losses) == RECENT_STEPS:
            mean = math.fsum(self.losses) / RECENT_STEPS
            if mean > 2 * self.first_loss + 1:
                raise DivergedError(
                    f"the mean loss of the last {RECENT_STEPS} steps is {mean:.3f}, and the first "
                    f"was {self.first_loss:.3f}"
                )

    def explain(self, problem: str) -> DivergedError:
        """Return the error of a run that ends with a problem, with a remedy."""
        remedy = "train again with a lower --lr in another --out"
        if self.first_loss is None:  # the weights are those of the beginning
            remedy = "check the data, the weights of --start and the loss of --objective"
        return DivergedError(problem, hint=remedy)

    def __str__(self) -> str:
        if not self.norms:
            return "no step was done before"
        norms = ", ".join(f"{norm:.3g}" for norm in self.norms[-SHOWN_STEPS:])
        losses = ", ".join(f"{loss:.4g}" for loss in self.losses[-SHOWN_STEPS:])
        return f"losses before: {losses}; gradient norms before: {norms}"


def read_state(state: Mapping[str, Any]) -> tuple[RunState, Plan]:
    """Return the `RunState` and the plan in a checkpoint's state."""
    try:
        return RunState(**state["run"]), Plan(**state["plan"])
    except (KeyError, TypeError):
        raise CorruptInputError(
            "the checkpoint was written by another version of tiedgpt"
        ) from None
