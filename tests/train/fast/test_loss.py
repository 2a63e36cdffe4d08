"""The one-pass loss equals the cross-entropy of all logits, and is used if possible."""

import pytest
import torch
from hypothesis import given, settings

from tests.core.test_compositions import CHANGES, A, drawn_model
from tests.core.test_loss import assert_equals_cross_entropy, loss_inputs
from tiedgpt import GPT
from tiedgpt.core import loss as core_loss
from tiedgpt.train import fast_training
from tiedgpt.train.fast import loss as fast_loss
from tiedgpt.train.fast.loss import one_pass_cross_entropy


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


def calls(monkeypatch) -> list[int]:
    """Return a list that grows with every loss computed in one pass."""
    rows: list[int] = []
    compute = fast_loss.one_pass_cross_entropy

    def counted(h, weight, targets):
        rows.append(len(h))
        return compute(h, weight, targets)

    monkeypatch.setattr(fast_loss, "one_pass_cross_entropy", counted)
    return rows


USED = (
    "as it is", "frozen_w", "only_w", "hooked", "parametrized", "untied", "head_with_an_alias",
    "checkpointed_blocks",
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_the_fast_loss_is_used_if_the_logits_are_h_times_a_matrix(change, monkeypatch):
    rows, model = calls(monkeypatch), drawn_model()
    CHANGES[change](model)
    model.loss(*A)
    assert not rows
    with fast_training(model):
        model.loss(*A)
        assert rows == ([48] if change in USED else [])
        with torch.no_grad():
            model.loss(*A)
        assert len(rows) <= 1


def test_a_head_on_the_body_uses_the_fast_loss(monkeypatch):
    from tiedgpt.heads import MultipleChoice

    rows, head = calls(monkeypatch), MultipleChoice(drawn_model().float())
    ids, lengths = A[0][:2].view(1, 2, 16), torch.full((1, 2), 16)
    with fast_training(head):
        head.loss(ids, lengths, ids, torch.zeros(1, dtype=torch.long)).backward()
    assert rows == [32]
    assert type(head.gpt) is GPT
