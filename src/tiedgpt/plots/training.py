"""The curves of one or several trainings as panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tiedgpt.plots.panel import Line, Panel, share_x_axis, smoothed, usual_most

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
    """Return panels of loss, validation, rate and gradients over one axis; empty ones are left out.

    Of one training its losses stand in one panel; of several, validation comes first.
    """
    validation = validation_panel(trainings, x_label)
    train = smooth(_list_lines(trainings, "loss"))
    if len(trainings) > 1:
        result = [validation, _cut("training loss, nats, smoothed", x_label, train)]
        gradients = _list_lines(trainings, "grad_norm")
    else:
        curves = trainings[0].curves
        both = (
            replace(train[0], name="training, smoothed"),
            Line("validation", *curves.get("val_loss", ((), ())), color=1, marked=True),
        )
        result = [_cut("loss, nats", x_label, both)]
        result += [validation] if "val_bits_per_byte" in curves else []
        gradients = tuple(
            Line(name, *curves[key], color)
            for color, (key, name) in enumerate(GRADIENTS.items())
            if key in curves
        )
    keys = {key for training in trainings for key in training.curves if key.startswith("val_")}
    for key in sorted(keys - VALIDATION.keys()):
        title = f"validation {key.removeprefix('val_').replace('_', ' ')}"
        result.append(Panel(title, x_label, _list_lines(trainings, key, marked=True)))
    result.append(Panel("learning rate", x_label, _list_lines(trainings, "lr")))
    result.append(_cut("norm of the gradient, smoothed", x_label, smooth(gradients)))
    return share_x_axis(result)


def validation_panel(trainings: Sequence[Training], x_label: str) -> Panel:
    """Return the validation of several trainings, in bits per byte where all have it."""
    key = validation_key(trainings)
    return _cut(f"validation, {VALIDATION[key]}", x_label, _list_lines(trainings, key, marked=True))


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


def smooth(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Return the lines with their values smoothed."""
    return tuple(replace(line, ys=smoothed(line.ys)) for line in lines)


def _list_lines(
    trainings: Sequence[Training], key: str, *, marked: bool = False
) -> tuple[Line, ...]:
    return tuple(
        Line(training.name, *training.curves.get(key, ((), ())), color, marked)
        for color, training in enumerate(trainings)
    )


def _cut(title: str, x_label: str, lines: tuple[Line, ...]) -> Panel:
    return Panel(title, x_label, lines, most=usual_most(lines))
