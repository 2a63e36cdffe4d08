"""Every composition of the core's list holds while training is fast, to the tolerance of bf16.

In float64 the core's own tests run them with the fast parts, too.
"""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.core.test_compositions import (
    CHANGES,
    COMPOSITIONS,
    A,
    Doubling,
    Louder,
    assert_equal,
    drawn_model,
    gradients,
    own,
    plain,
    small_chunks,
)
from tiedgpt.errors import UserError
from tiedgpt.train import fast_training
from tiedgpt.train.step.fast import attention
from tiedgpt.train.step.fast.linear import LeanLinear

assert small_chunks, "a fixture"
EXACT = 1e-9


@pytest.fixture
def model():
    return drawn_model()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 5)


def bf16():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("composition", COMPOSITIONS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("change", CHANGES)
def test_every_bf16_gradient_equals_the_plain_ones_up_to_rounding(model, change, composition):
    CHANGES[change](model)
    model.float()
    theirs = gradients(model, composition(model, plain(model)))
    with fast_training(model), bf16():
        ours = gradients(model, composition(model, own(model)))
    whole = torch.cat([theirs[name].flatten() for name in theirs])
    apart = torch.cat([(ours[name] - theirs[name]).flatten() for name in theirs])
    with bf16():
        rounded = gradients(model, composition(model, plain(model)))
    usual = torch.cat([(rounded[name] - theirs[name]).flatten() for name in theirs])
    assert apart.norm() <= 1.5 * usual.norm() + 1e-3 * whole.norm()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch looks while it traces
def test_compiled_blocks_match(model):
    theirs = gradients(model, plain(model)(*A))
    for block in model.h:
        block.compile(backend="aot_eager")
    with fast_training(model):
        assert_equal(gradients(model, model.loss(*A)), theirs, EXACT)


def test_the_model_is_plain_before_and_after(model):
    names, text = list(model.state_dict()), str(model)
    with fast_training(model):
        assert list(model.state_dict()) == names
    assert str(model) == text
    with pytest.raises(ZeroDivisionError), fast_training(model):
        _ = 1 / 0
    assert str(model) == text


def test_a_classification_head_trains_fast_too(model):
    from tiedgpt.heads import SequenceClassifier

    head = SequenceClassifier(model, labels=["a", "b"]).double().eval()
    lengths, labels = torch.tensor([16, 4, 9]), torch.tensor([0, 1, 1])
    theirs = gradients(head, head.loss(A[0], lengths, labels))
    with fast_training(head):
        assert_equal(gradients(head, head.loss(A[0], lengths, labels)), theirs, EXACT)


def test_fast_layers_are_not_used_without_gradients(model):
    with fast_training(model), torch.no_grad(), bf16():
        fast = model.float()(A[0])
    with torch.no_grad(), bf16():
        assert torch.equal(fast, model(A[0]))


def test_copies_made_inside_fast_training_are_plain(model):
    with fast_training(model):
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for inside in copies:
        assert str(inside) == str(model)
        torch.testing.assert_close(inside.loss(*A), model.loss(*A))


def test_a_class_assigned_inside_fast_training_stays(model):
    with fast_training(model):
        model.__class__ = Louder
    assert type(model) is Louder


def test_a_layer_parametrized_inside_fast_training_stays_parametrized(model):
    with fast_training(model):
        parametrize.register_parametrization(model.h[0].mlp.c_fc, "weight", Doubling())
    weight = model.h[0].mlp.c_fc.parametrizations.weight.original
    torch.testing.assert_close(model.h[0].mlp.c_fc.weight, 2 * weight - 0.1)
    assert isinstance(model.h[0].mlp.c_fc, nn.Linear)
    assert LeanLinear not in type(model.h[0].mlp.c_fc).__mro__


def test_any_other_module_is_refused():
    with pytest.raises(UserError, match="takes a GPT"), fast_training(nn.Linear(2, 2)):
        pass
