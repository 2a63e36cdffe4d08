"""The core's compositions with adapters on the blocks and on both sides of W."""

import pytest

from tests.core import test_compositions as core
from tests.core.test_compositions import *  # noqa: F403
from tests.tune.test_adapters import drawn
from tiedgpt.tune import lora
from tiedgpt.tune.adapters import BLOCKS


@pytest.fixture
def model():
    """The core's tests with adapters and a trained W."""
    base = core.drawn_model()
    lora(base, rank=3, targets=(*BLOCKS, "wte"), tokens=[50, 51, 52])
    return drawn(base).requires_grad_(True)


@pytest.mark.slow
def test_a_compiled_loss_and_forward_match(model):
    core.test_a_compiled_loss_and_forward_match(model)


@pytest.mark.slow
def test_a_forward_of_dynamic_length_compiles_fully_and_exports(model):
    core.test_a_forward_of_dynamic_length_compiles_fully_and_exports(model)


@pytest.mark.parametrize("windows", [None])
def test_packed_documents_give_the_results_of_separate_ones(model, windows):
    core.test_packed_documents_give_the_results_of_separate_ones(model, windows)


@pytest.mark.parametrize("composition", core.COMPOSITIONS, ids=lambda c: c.__name__)
def test_only_the_adapters_have_gradients(model, composition):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    theirs = core.gradients(model, composition(model, core.plain(model)))
    ours = core.gradients(model, composition(model, core.own(model)))
    assert {name.split(".")[-1] for name in ours} == {"lora_A", "lora_B", "lora_rows"}
    core.assert_equal(ours, theirs)
