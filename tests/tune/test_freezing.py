"""Trained parameters are chosen by name and reported."""

import pytest
import torch

from tests.heads.conftest import make  # noqa: F401
from tiedgpt.errors import UserError
from tiedgpt.heads import SequenceClassifier
from tiedgpt.tie import untie
from tiedgpt.tune import freeze


def moving(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_the_last_matching_pattern_decides(tiny):
    freeze(tiny, "h.*,+h.*.attn,h.0")
    parts = {".".join(name.split(".")[:3]) for name in moving(tiny)}
    assert parts == {"wte.weight", "wpe.weight", "h.1.attn", "h.2.attn", "ln_f.weight", "ln_f.bias"}
    assert freeze(tiny, ["*", "+ln_f"]).moving == 64
    assert moving(tiny) == {"ln_f.weight", "ln_f.bias"}


def test_the_report_counts_each_group_and_says_that_w_reads_and_predicts(tiny):
    report = freeze(tiny, "wte,h.0.attn,h.*.ln_1.bias")
    rows = {group.name: (group.moving, group.frozen) for group in report.groups}
    attention = 32 * 96 + 96 + 32 * 32 + 32
    block = attention + 2 * 4 * 32 * 32 + 5 * 32 + 4 * 32
    assert rows == {
        "wte": (0, 97 * 32), "wpe": (24 * 32, 0), "h.0": (block - attention - 32, attention + 32),
        "h.1 to h.2": (2 * (block - 32), 2 * 32), "ln_f": (64, 0),
    }  # fmt: skip
    assert report.total == tiny.config.parameter_count()
    counted, *_, embedding = str(report).splitlines()
    assert counted == f"{report.moving:,} of {report.total:,} parameters are trained (82.34 %)"
    assert embedding == "W (wte) reads and predicts: it is frozen as input and as output"
    assert "change as inputs and as outputs" in str(freeze(tiny, "*,+wte"))


@pytest.mark.parametrize("patterns", ["*,+head", "+lm_head", "head", "body", "*"])
def test_the_head_alone_of_a_tied_model_is_refused_with_the_two_choices(tiny, patterns):
    with pytest.raises(UserError, match=r"Two choices: train wte, on both sides; or untie"):
        freeze(tiny, patterns)
    assert len(moving(tiny)) == len(list(tiny.parameters()))


def test_an_untied_head_is_trained_alone(tiny, ids):
    untie(tiny)
    report = freeze(tiny, "body")
    assert moving(tiny) == {"head.weight"} and report.moving == 97 * 32
    assert "W (wte) only reads, and is frozen" in str(report)
    with pytest.raises(UserError, match=r"leaves nothing to train: train some part of it again"):
        freeze(tiny, "head")
    before = tiny.wte.weight.clone()
    optimizer = torch.optim.AdamW([p for p in tiny.parameters() if p.requires_grad])
    tiny.loss(ids, ids).backward()
    optimizer.step()
    assert torch.equal(tiny.wte.weight, before)


def test_a_classifiers_body_is_frozen(make):  # noqa: F811
    head = make(SequenceClassifier)
    assert freeze(head, "body").groups[-1].name == "score"
    assert moving(head) == {"score.weight"}
    with pytest.raises(UserError, match="head: no parameter has such a name: body, wte, wpe, h"):
        freeze(head, "head")


def test_no_pattern_changes_nothing(tiny):
    assert freeze(tiny, "").moving == tiny.config.parameter_count()
