"""The curves of one or several trainings as panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiedgpt.plots.panel import Line, Panel, smoothed, usual_most

Curve = tuple[Sequence[float], Sequence[float]]
"""Places on the axis, and values."""
VALIDATION = {"val_bits_per_byte": "bits per byte", "val_loss": "loss, nats"}
GRADIENTS = {
    "grad_norm": "all",
    "grad_norm_w_input": "W, from reading",
    "grad_norm_w_output": "W, from predicting",
}


@dataclass(frozen=True)
class Training:
    """A training's curves, by the keys of its metrics."""

    name: str
    curves: Mapping[str, Curve]


def panels(trainings: Sequence[Training], x_label: str) -> list[Panel]:
    """Return panels of loss, validation, rate and gradients; those without a point are left out.

    Of one training its losses stand in one panel; of several, validation comes first.
    """
    made = _losses(trainings, x_label)
    others = sorted(
        {
            key
            for training in trainings
            for key in training.curves
            if key.startswith("val_") and key not in VALIDATION
        }
    )
    for key in others:
        title = f"validation {key.removeprefix('val_').replace('_', ' ')}"
        made.append(Panel(title, x_label, _each(trainings, key, marked=True)))
    made.append(Panel("learning rate", x_label, _each(trainings, "lr")))
    made.append(_gradients(trainings, x_label))
    return [panel for panel in made if panel.limits() is not None]


def validation_panel(trainings: Sequence[Training], x_label: str) -> Panel:
    """Return the validation of several trainings, in bits per byte where all have it."""
    key = validation_key(trainings)
    return _cut(f"validation, {VALIDATION[key]}", x_label, _each(trainings, key, marked=True), 0.9)


def validation_key(trainings: Sequence[Training]) -> str:
    """Return the key by which all trainings can be compared."""
    per_byte = "val_bits_per_byte"
    return per_byte if all(per_byte in t.curves for t in trainings) else "val_loss"


def reached(curve: Curve, target: float) -> float | None:
    """Return where a falling curve first comes down to the target, between points linearly."""
    before: tuple[float, float] | None = None
    for x, y in zip(*curve, strict=True):
        if y <= target:
            if before is None or before[1] == y:
                return x
            return before[0] + (x - before[0]) * (before[1] - target) / (before[1] - y)
        before = (x, y)
    return None


def _losses(trainings: Sequence[Training], x_label: str) -> list[Panel]:
    if len(trainings) == 1:
        (training,) = trainings
        lines = (*_train(trainings), *_each(trainings, "val_loss", marked=True, color=1))
        named = ("training, smoothed", "validation")
        lines = tuple(
            Line(name, line.xs, line.ys, line.color, line.marked)
            for name, line in zip(named, lines, strict=False)
        )
        losses = _cut("loss, nats", x_label, lines)
        if "val_bits_per_byte" not in training.curves:
            return [losses]
        return [losses, validation_panel(trainings, x_label)]
    train = _cut("training loss, nats, smoothed", x_label, _train(trainings))
    return [validation_panel(trainings, x_label), train]


def _train(trainings: Sequence[Training]) -> tuple[Line, ...]:
    return tuple(
        Line(line.name, line.xs, smoothed(line.ys), line.color) for line in _each(trainings, "loss")
    )


def _each(
    trainings: Sequence[Training], key: str, *, marked: bool = False, color: int = 0
) -> tuple[Line, ...]:
    return tuple(
        Line(training.name, *training.curves.get(key, ((), ())), color + number, marked)
        for number, training in enumerate(trainings)
    )


def _gradients(trainings: Sequence[Training], x_label: str) -> Panel:
    if len(trainings) > 1:
        lines = [Line(t.name, t.xs, smoothed(t.ys), t.color) for t in _each(trainings, "grad_norm")]
        return Panel(
            "norm of the gradient, smoothed", x_label, tuple(lines), most=usual_most(lines)
        )
    curves = trainings[0].curves
    lines = [
        Line(name, curves[key][0], smoothed(curves[key][1]), color)
        for color, (key, name) in enumerate(GRADIENTS.items())
        if key in curves
    ]
    return Panel("norm of the gradient, smoothed", x_label, tuple(lines), most=usual_most(lines))


def _cut(title: str, x_label: str, lines: tuple[Line, ...], share: float = 0.97) -> Panel:
    return Panel(title, x_label, lines, most=usual_most(lines, share))
