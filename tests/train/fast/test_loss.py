"""The one-pass loss equals the cross-entropy of all logits, and is used if possible."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch.nn.modules import module

from tests.core.test_compositions import CHANGES, A, drawn_model
from tests.core.test_loss import assert_equals_cross_entropy, loss_inputs
from tests.train.fast.conftest import run_as_thread
from tiedgpt import GPT
from tiedgpt.core import loss as core_loss
from tiedgpt.heads import MultipleChoice
from tiedgpt.train import fast_training
from tiedgpt.train.step.fast import loss as fast_loss
from tiedgpt.train.step.fast.loss import one_pass_cross_entropy
from tiedgpt.train.step.substitute import Substitute


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of at most 7 rows, so that even tiny inputs take several and leave a ragged one."""
    monkeypatch.setattr(core_loss, "CHUNK_BYTES", 7 * 8 * 53)
    monkeypatch.setattr(fast_loss, "CACHED_BYTES", 120)
    monkeypatch.setattr(fast_loss, "BLOCK", 40)


@settings(deadline=None, max_examples=40)
@given(loss_inputs())
def test_equals_cross_entropy_of_the_full_logits(inputs):
    assert_equals_cross_entropy(one_pass_cross_entropy, *inputs)


def fast_loss_and_gradients(h, weight, targets, is_narrow):
    with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
        loss = one_pass_cross_entropy(h, weight, targets)
    return loss.detach(), *torch.autograd.grad(loss, (h, weight))


@pytest.fixture(params=[False, True], ids=["fp32", "bf16"])
def narrow_inputs(request):
    """Whether products are in bf16; h, W and targets, some not counted."""
    g = torch.Generator().manual_seed(3)
    h = torch.randn(75, 32, generator=g).requires_grad_()
    weight = torch.randn(1024, 32, generator=g).requires_grad_()
    targets = torch.randint(1024, (75,), generator=g)
    targets[::9] = -100
    return request.param, h, weight, targets


@pytest.mark.parametrize("vocab_size", [16, 48, 1024])
def test_the_kernel_computes_the_loss_and_its_gradients(vocab_size, narrow_inputs, record_calls):
    runs = record_calls(fast_loss, "run")
    is_narrow, h, weight, targets = narrow_inputs
    weight = weight[:vocab_size].detach().requires_grad_()
    targets = torch.where(targets < 0, targets, targets % vocab_size)
    ours = fast_loss_and_gradients(h, weight, targets, is_narrow)
    assert runs
    exact = F.cross_entropy(h.double() @ weight.double().T, targets)
    expected = exact, *torch.autograd.grad(exact, (h, weight))
    for mine, right in zip(ours, expected, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - right).norm() <= (2e-2 if is_narrow else 1e-5) * right.norm()


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_reach_the_same_gradients(number, narrow_inputs, monkeypatch):
    is_narrow, h, weight, targets = narrow_inputs
    with torch.no_grad():
        h[[0, 5]] = number  # the first is not counted
    ours = fast_loss_and_gradients(h, weight, targets, is_narrow)
    monkeypatch.setattr(fast_loss, "suits_kernels", lambda logits: False)
    expected = fast_loss_and_gradients(h, weight, targets, is_narrow)
    assert ours[0].isnan()
    for mine, its in zip(ours, expected, strict=True):
        assert torch.equal(mine.isfinite(), its.isfinite())


def test_the_number_of_a_thread_changes_no_bit():
    results = []
    for thread in range(3):
        logits = np.linspace(-3, 3, 11 * 48, dtype=np.float32)
        shares, losses = np.ones(11, np.float32), np.zeros(11, np.float32)
        answers = np.arange(11)
        run_as_thread(thread, fast_loss.KERNEL, 48, 48, logits, answers, shares, ..., losses)
        results.append([*logits, *losses])
    assert results[0] == results[1] == results[2]


@pytest.fixture
def calls(record_calls):
    """The calls of `one_pass_cross_entropy`."""
    return record_calls(fast_loss, "one_pass_cross_entropy")


USED = (
    "as it is", "frozen_w", "only_w", "hooked", "parametrized", "untied", "head_with_an_alias",
    "checkpointed_blocks",
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_the_fast_loss_is_used_if_the_logits_are_h_times_a_matrix(change, calls):
    model = drawn_model()
    CHANGES[change](model)
    model.loss(*A)
    assert not calls
    with fast_training(model):
        model.loss(*A)
        assert [len(h) for h, *_ in calls] == ([48] if change in USED else [])
        with torch.no_grad():
            model.loss(*A)
        assert len(calls) <= 1


def test_a_head_on_the_body_uses_the_fast_loss(calls):
    head = MultipleChoice(drawn_model().float())
    ids, lengths = A[0][:2].view(1, 2, 16), torch.full((1, 2), 16)
    with fast_training(head):
        head.loss(ids, lengths, ids, torch.zeros(1, dtype=torch.long)).backward()
    assert [len(h) for h, *_ in calls] == [32]
    assert type(head.gpt) is GPT


GLOBAL_HOOKS = {
    "forward": lambda seen: module.register_module_forward_hook(
        lambda layer, inputs, output: seen.append(type(layer)) or output * 1.5
    ),
    "forward_pre": lambda seen: module.register_module_forward_pre_hook(
        lambda layer, inputs: seen.append(type(layer))
    ),
    "backward": lambda seen: module.register_module_full_backward_hook(
        lambda layer, grad_in, grad_out: seen.append(type(layer))
    ),
    "backward_pre": lambda seen: module.register_module_full_backward_pre_hook(
        lambda layer, grad_out: seen.append(type(layer))
    ),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # ids need none
@pytest.mark.parametrize("change", ["as it is", "untied"])
@pytest.mark.parametrize("hook", GLOBAL_HOOKS)
def test_global_hooks_see_every_module_of_the_plain_model(hook, change):
    model, seen, results = drawn_model(), [], []
    CHANGES[change](model)
    for training in (nullcontext(), fast_training(model)):
        seen.clear()
        handle = GLOBAL_HOOKS[hook](seen)
        try:
            with training:
                loss = model.loss(*A)
                gradients = torch.autograd.grad(loss, list(model.parameters()))
        finally:
            handle.remove()
        classes = [
            next(base for base in cls.__mro__ if not issubclass(base, Substitute)) for cls in seen
        ]
        results.append((classes, loss, gradients))
    (expected_classes, *expected), (classes, *ours) = results
    assert classes == expected_classes and classes
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
