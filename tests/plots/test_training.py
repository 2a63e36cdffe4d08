"""Which panels a training has."""

import pytest

from tiedgpt.plots.panel import Line, Panel
from tiedgpt.plots.training import Training, panels, reached, validation_key, validation_panel

STEPS = [1.0, 2.0, 3.0, 4.0]
TEXT = {
    "loss": (STEPS, [4.0, 3.0, 2.0, 1.0]),
    "lr": (STEPS, [1.0, 2.0, 1.0, 0.0]),
    "val_loss": ([2.0, 4.0], [3.5, 2.5]),
    "val_bits_per_byte": ([2.0, 4.0], [1.5, 1.1]),
    "grad_norm": (STEPS, [1.0, 1.0, 1.0, 1.0]),
    "grad_norm_w_input": ([1.0], [0.4]),
    "grad_norm_w_output": ([1.0], [0.9]),
}
LABELS = {"loss": TEXT["loss"], "val_loss": TEXT["val_loss"], "val_accuracy": ([4.0], [0.9])}


def test_one_training_shows_its_losses_together_and_the_gradients_of_w():
    axis = {"x_label": "steps", "x_limits": (1.0, 4.0)}
    assert panels([Training("run", TEXT)], "steps") == [
        Panel("loss, nats", most=4.0, **axis, lines=(
            Line("training, smoothed", STEPS, [4, 3, 2, 1]),
            Line("validation", [2, 4], [3.5, 2.5], 1, marked=True),
        )),
        Panel("validation, bits per byte", most=1.5, **axis, lines=(
            Line("run", [2, 4], [1.5, 1.1], marked=True),
        )),
        Panel("learning rate", **axis, lines=(Line("run", STEPS, [1, 2, 1, 0]),)),
        Panel("norm of the gradient, smoothed", most=1.0, **axis, lines=(
            Line("all", STEPS, [1] * 4), Line("W, from reading", [1], [0.4], 1),
            Line("W, from predicting", [1], [0.9], 2),
        )),
    ]  # fmt: skip


def test_several_trainings_are_compared_by_their_common_metrics():
    both = [Training("a", TEXT), Training("b", LABELS)]
    assert validation_key(both) == "val_loss"
    assert validation_key(both[:1] * 2) == "val_bits_per_byte"
    lines = tuple(Line(name, [2, 4], [3.5, 2.5], n, True) for n, name in enumerate("ab"))
    assert validation_panel(both, "s") == Panel("validation, loss, nats", "s", lines, most=3.5)
    made = {panel.title: [(one.name, one.color, one.marked) for one in panel.lines if one.ys]
            for panel in panels(both, "steps")}  # fmt: skip
    assert made == {
        "validation, loss, nats": [("a", 0, True), ("b", 1, True)],
        "training loss, nats, smoothed": [("a", 0, False), ("b", 1, False)],
        "validation accuracy": [("b", 1, True)],
        "learning rate": [("a", 0, False)],
        "norm of the gradient, smoothed": [("a", 0, False)],
    }
    assert [panel.title for panel in panels(both[1:], "")] == ["loss, nats", "validation accuracy"]


def test_all_panels_have_one_x_axis():
    late = Training("late", {"loss": ([7.0], [1.0]), "val_loss": ([3.0, 5.0], [2.0, 2.0])})
    assert [panel.limits()[:2] for panel in panels([late], "steps")] == [(3.0, 7.0)]
    with_rate = Training("late", {**late.curves, "lr": ([7.0], [1.0])})
    assert [panel.limits()[:2] for panel in panels([with_rate], "steps")] == [(3.0, 7.0)] * 2
    assert panels([Training("empty", {})], "steps") == []


@pytest.mark.parametrize(
    ("target", "place"), [(5.0, 10.0), (3.0, 17.0), (2.0, 24.0), (1.0, 40.0), (0.9, None)]
)
def test_the_first_point_at_a_loss_is_found(target, place):
    curve = [10.0, 24.0, 31.0, 40.0], [4.0, 2.0, 1.5, 1.0]
    assert reached(curve, target) == place
