"""A step: sums of micro-batches, recomputed and compiled blocks, memory that is kept."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from tests.models import kept_for_backward
from tests.train.conftest import CPU, DROPOUT, PLAN, assert_same, gradients, true_gradients
from tiedgpt import GPT, GPTConfig
from tiedgpt.core.layers import Block
from tiedgpt.errors import DivergedError
from tiedgpt.train.distributed import Processes
from tiedgpt.train.events import Started
from tiedgpt.train.step import blocks
from tiedgpt.train.step.blocks import RecomputedBlock
from tiedgpt.train.step.loss import Loss
from tiedgpt.train.step.step import train_step
from tiedgpt.train.step.substitute import substitute

CONFIG = GPTConfig(vocab_size=90, n_positions=160, n_embd=32, n_layer=3, n_head=2)
SAME = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}


def masked(*rows):
    """Return a batch of six rows, some without targets."""
    ids = np.random.default_rng(0).integers(0, 97, (6, 8))
    targets = ids.copy()
    targets[list(rows)] = -100
    return ids, targets


@pytest.mark.parametrize("head", ["tied", "of its own, with a bias"])
@pytest.mark.parametrize("micro_batch", [6, 4, 2])
def test_micro_batches_with_few_and_no_targets_sum_to_the_whole_batch(tiny, head, micro_batch):
    if head != "tied":
        tiny.head = nn.Linear(32, 97)
    ids, targets = masked(2, 3)
    targets[0, :6] = -100
    summed = gradients(tiny, (ids, targets), micro_batch, grad_clip=1e9)
    expected = true_gradients(tiny, tiny.loss(torch.tensor(ids), torch.tensor(targets)))
    torch.testing.assert_close(summed, expected, atol=1e-6, rtol=1e-4)


def test_a_batch_without_targets_changes_nothing_and_is_reported(tiny):
    with pytest.raises(DivergedError, match="the batch has no targets"):
        train_step(tiny, [], masked(*range(6)), PLAN)


def test_each_process_computes_as_many_micro_batches_with_targets():
    shares = []
    for rank in range(2):
        processes = Processes(CPU)
        processes.rank, processes.size = rank, 2
        parts = processes.micro_batches(Loss(), masked(0, 1, 2), 1)
        assert len(parts) == 3 and [part.last for part in parts] == [False, False, True]
        assert all((part.rows[1] != -100).all() for part in parts), "no mean of nothing"
        shares += [part.shares[0] for part in parts]
    assert shares == pytest.approx([0, 0, 0, 2 / 3, 2 / 3, 2 / 3])


def recomputed_blocks(model):
    return substitute(model, {Block: RecomputedBlock})


def gradients_and_draw(model, dtype):
    """Gradients, and a number of the random stream after them."""
    ids, targets = torch.randint(90, (2, 2, 160), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    torch.manual_seed(2)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = model.loss(ids, targets)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters()), torch.rand(1)]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("changes", [SAME, {}, {"attention_windows": (0, 40)}, {"norm": "post"}])
def test_recomputed_blocks_have_the_same_gradients_bit_for_bit(dtype, changes):
    model = GPT(dataclasses.replace(CONFIG, **changes)).train()
    names, kept = list(model.state_dict()), gradients_and_draw(model, dtype)
    with recomputed_blocks(model):
        assert all(map(torch.equal, gradients_and_draw(model, dtype), kept))
        assert list(model.state_dict()) == names
        assert "RecomputedBlock" in repr(model)
    assert {type(block) for block in model.h} == {Block}


def test_recomputed_blocks_save_little_for_backward():
    model = GPT(dataclasses.replace(CONFIG, **SAME)).train()
    ids = torch.randint(90, (2, 160))
    before = kept_for_backward(model, lambda: model.body(ids))
    with recomputed_blocks(model):
        assert kept_for_backward(model, lambda: model.body(ids)) < before / 5


def test_a_model_with_recomputed_blocks_generates_and_copies():
    model = GPT(CONFIG).eval()
    ids = torch.randint(90, (1, 7))
    before = model(ids)
    with recomputed_blocks(model), torch.no_grad():
        assert torch.equal(model(ids), before)
        assert torch.equal(copy.deepcopy(model)(ids), before)


def test_a_run_with_recomputed_blocks_has_the_same_result(trial):
    off, blocks = (trial(name, DROPOUT, recompute=name) for name in ("off", "blocks"))
    assert off.train()[-1].finished and blocks.train()[-1].finished
    weights = [run.run.model / "model.safetensors" for run in (off, blocks)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_missing_compiler_is_named(monkeypatch, trial, options):
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = blocks.find_missing(CPU)
    assert reason == "no C++ compiler is here (no-such-compiler): install one or set CXX"
    assert trial().make_plan(options, compile="on").compile == "off"


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(2**31, [1 << 30]), (32 << 20, [1 << 30, 32 << 20]), (0, [1 << 30, 32 << 20])],
)
def test_freed_memory_is_kept_as_far_as_the_c_library_allows(most, sizes):
    asked = []

    def set_malloc(option, value):
        asked.append((option, value))
        return value <= most or option == blocks.M_TRIM_THRESHOLD

    blocks.keep_memory(set_malloc)
    mapped = [(blocks.M_MMAP_THRESHOLD, size) for size in sizes]
    assert asked == [*mapped, *[(blocks.M_TRIM_THRESHOLD, 2**31 - 1)] * (most > 0)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own code
def test_a_stopped_compiled_run_equals_an_uninterrupted_one(trial):
    whole, parts = (trial(name, DROPOUT, compile="on") for name in ("whole", "parts"))
    for events in (whole.train(), parts.train(stop_after=3), parts.train()):
        (started,) = (event for event in events if isinstance(event, Started))
        assert any(note.startswith("compiled the blocks in") for note in started.notes)
        assert not any("_orig_mod" in key for key in started.model.state_dict())
    assert_same(whole, parts)


def test_each_shape_is_compiled_once(monkeypatch):
    """torch compiles a function eight times at most and then runs it eagerly."""

    def twice(x):
        return 2 * x

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    forms = [blocks.compile_for_shape(twice, torch.Size((4, n, 8))) for n in (16, 32)]
    assert forms[0].__code__ != forms[1].__code__ and forms[0](3) == forms[1](3) == 6
    assert blocks.compile_for_shape(twice, torch.Size((4, 16, 8))) is forms[0]
