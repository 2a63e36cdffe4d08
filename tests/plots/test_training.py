"""Which panels a training has."""

import pytest

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
    made = {panel.title: panel for panel in panels([Training("run", TEXT)], "steps")}
    losses = made.pop("loss, nats")
    assert [line.name for line in losses.lines] == ["training, smoothed", "validation"]
    assert losses.lines[1].ys == [3.5, 2.5]
    gradients = made.pop("norm of the gradient, smoothed")
    assert [line.name for line in gradients.lines] == [
        "all", "W, from reading", "W, from predicting",
    ]  # fmt: skip
    assert list(made) == ["validation, bits per byte", "learning rate"]


def test_a_head_shows_its_accuracy():
    titles = [panel.title for panel in panels([Training("head", LABELS)], "steps")]
    assert titles == ["loss, nats", "validation accuracy"]


def test_several_trainings_are_compared_by_their_common_metrics():
    both = [Training("a", TEXT), Training("b", LABELS)]
    assert validation_key(both) == "val_loss"
    assert validation_key(both[:1] * 2) == "val_bits_per_byte"
    panel = validation_panel(both, "steps")
    assert [(line.name, line.color) for line in panel.lines] == [("a", 0), ("b", 1)]
    assert panels(both, "steps")[0].title == "validation, loss, nats"


def test_a_first_validation_among_few_is_not_cut_off():
    curve = list(range(17, 187, 17)), [0.493, 0.43, *([0.4] * 8)]
    panel = validation_panel([Training("run", {"val_bits_per_byte": curve})], "steps")
    assert panel.limits() == (17, 170, 0.4, 0.493)


def test_all_panels_have_one_x_axis():
    for trainings in ([Training("a", TEXT)], [Training("a", TEXT), Training("b", LABELS)]):
        figures = panels(trainings, "steps")
        assert len(figures) >= 4 and {panel.limits()[:2] for panel in figures} == {(1.0, 4.0)}
    late = Training("late", {"loss": ([7.0], [1.0]), "val_loss": ([3.0, 5.0], [2.0, 2.0])})
    assert [panel.limits()[:2] for panel in panels([late], "steps")] == [(3.0, 7.0)]
    with_rate = Training("late", {**late.curves, "lr": ([7.0], [1.0])})
    assert [panel.limits()[:2] for panel in panels([with_rate], "steps")] == [(3.0, 7.0)] * 2


def test_a_training_without_a_step_has_no_panel():
    assert panels([Training("empty", {})], "steps") == []


@pytest.mark.parametrize(
    ("target", "place"), [(5.0, 10.0), (3.0, 15.0), (2.0, 20.0), (1.5, 30.0), (0.9, None)]
)
def test_the_first_point_at_a_loss_is_found(target, place):
    curve = [10.0, 20.0, 30.0, 40.0], [4.0, 2.0, 1.5, 1.0]
    assert reached(curve, target) == place
