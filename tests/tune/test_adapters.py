"""Adapters on blocks and on both sides of W: their results, and the unchanged rest."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.heads.conftest import make  # noqa: F401
from tiedgpt import GPT, GPTConfig
from tiedgpt.errors import CheckFailedError, UserError
from tiedgpt.heads import FeatureExtractor, SequenceClassifier
from tiedgpt.infer import Engine
from tiedgpt.tie import add_tokens, audit, guard, ledger, replace_head, tie, untie
from tiedgpt.train import fast_training
from tiedgpt.train.step.optim.groups import parameter_groups
from tiedgpt.tune import lora, merge
from tiedgpt.tune.adapters import BLOCKS, LoRAEmbedding, adapted_layers

ALL = (*BLOCKS, "wte")


def drawn(model, std=0.2):
    """Give every parameter that moves a value that shows."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, std, generator=draw)
    return model


def trained(model, ids, steps=3):
    moving = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(moving, lr=0.01, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_with_fresh_adapters_is_the_model_bit_for_bit(tiny, ids, tied, dtype):
    if not tied:
        untie(tiny)
    tiny.to(dtype)
    before = tiny(ids)
    lora(tiny, targets=(*ALL, *(() if tied else ("head",))), tokens=(3, 96))
    assert torch.equal(tiny(ids), before)
    assert {p.dtype for p in tiny.parameters() if p.requires_grad} == {torch.float32}


def test_only_four_matrices_of_each_block_are_adapted(tiny):
    report = lora(tiny, rank=4)
    widths = {"attn.c_attn": (32, 96), "attn.c_proj": (32, 32), "mlp.c_fc": (32, 128)}
    a_block = sum(4 * (n_in + n_out) for n_in, n_out in [*widths.values(), (128, 32)])
    assert report.moving == 3 * a_block
    assert report.total == tiny.config.parameter_count() + 3 * a_block
    assert [group.name for group in report.groups] == ["wte", "wpe", "h.0 to h.2", "ln_f"]
    assert "W (wte) reads and predicts: it is frozen as input and as output" in str(report)
    assert "lora rank 4, scale 2)" in str(adapted_layers(tiny)["h.1.mlp.c_fc"])  # alpha is 2 rank
    assert not isinstance(tiny.wte, LoRAEmbedding)


def test_gpt2s_adapters_have_about_a_hundredth_of_its_parameters():
    def share(targets):
        with torch.device("meta"):
            model = GPT(GPTConfig.preset("gpt2"))
        return lora(model, targets=targets).moving / model.config.parameter_count()

    assert round(share(BLOCKS), 4) == 0.0095
    assert round(share(ALL), 4) == 0.0128


def test_one_pair_changes_a_row_as_input_and_as_output(tiny, ids):
    lora(tiny, rank=2, targets=["wte"], alpha=3.0)
    drawn(tiny)
    wte = tiny.wte
    matrix = wte.weight + 1.5 * wte.lora_B @ wte.lora_A
    torch.testing.assert_close(wte(ids), F.embedding(ids, matrix))
    h = torch.randn(5, 32)
    torch.testing.assert_close(wte.unembed(h), h @ matrix.T)


def test_rows_of_new_tokens_are_trained_fully_on_both_sides(tiny, ids):
    add_tokens(tiny, 2)
    old = tiny.wte.weight.clone()
    report = lora(tiny, targets=[], tokens=[98, 97])
    assert report.moving == 2 * 32 and "2 rows trained whole)" in str(tiny.wte)
    assert "its rows change as inputs and as outputs" in str(report)
    trained(tiny, torch.cat([ids, ids % 2 + 97], 1)[:, 16:40])
    assert merge(tiny) < 1e-5
    changed = (tiny.wte.weight != old).any(1)
    assert changed.nonzero().flatten().tolist() == [97, 98]


def test_rows_of_an_untied_model_are_trained_in_both_matrices(tiny, ids):
    untie(tiny)
    add_tokens(tiny, 1)
    lora(tiny, targets=["head"], tokens=[97])
    drawn(tiny)
    h = torch.randn(5, 32)
    expected = h @ tiny.head.matrix().T
    torch.testing.assert_close(tiny.head(h), expected)
    assert merge(tiny) < 1e-5
    torch.testing.assert_close(tiny.head(h), expected)


@pytest.mark.parametrize("targets", [BLOCKS, ["wte"], ["h.1*.c_proj", "h.0.attn.c_attn"]])
def test_frozen_parameters_stay_bit_for_bit(tiny, ids, targets):
    lora(tiny, targets=targets, tokens=[5])
    before = {name: p.detach().clone() for name, p in tiny.named_parameters()}
    trained(tiny, ids)
    for name, parameter in tiny.named_parameters():
        assert torch.equal(parameter, before[name]) is not parameter.requires_grad, name


def test_a_merged_model_is_plain_and_computes_the_same(tiny, ids, tmp_path):
    keys = tiny.state_dict().keys()
    parameters = dict(tiny.named_parameters())
    lora(tiny, targets=ALL, tokens=[3])
    trained(tiny, ids)
    logits = tiny(ids)
    assert merge(tiny) < 1e-5
    torch.testing.assert_close(tiny(ids), logits, rtol=1e-5, atol=1e-5)
    assert tiny.state_dict().keys() == keys
    assert all(parameters[name] is p for name, p in tiny.named_parameters())
    assert all(p.requires_grad for p in tiny.parameters())
    tiny.save_pretrained(tmp_path)
    assert torch.equal(GPT.from_pretrained(tmp_path)(ids), tiny(ids))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_a_merge_in_half_precision_stays_within_its_bound(dtype, bound):
    torch.manual_seed(2)
    model = GPT(GPTConfig(vocab_size=500, n_positions=64, n_embd=96, n_layer=12, n_head=4))
    model.to(dtype)
    lora(model, targets=ALL)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_B.normal_(0.0, 0.01)
    assert 0 < merge(model) < bound
    assert model.wte.weight.dtype == dtype


@pytest.mark.parametrize("wrong", [float("nan"), 1e30])
def test_a_merge_that_changes_logits_is_refused_and_undone(tiny, ids, wrong, monkeypatch):
    lora(tiny, targets=ALL)
    drawn(tiny)
    if wrong != wrong:
        with torch.no_grad():
            tiny.wte.lora_A[0, 0] = wrong
    else:
        monkeypatch.setattr("tiedgpt.tune.adapters.MAX_MERGE_CHANGE", {torch.float32: 1e-12})
    before, modules = copy.deepcopy(tiny.state_dict()), [type(m) for m in tiny.modules()]
    with pytest.raises(CheckFailedError, match="the model is unchanged"):
        merge(tiny)
    assert [type(m) for m in tiny.modules()] == modules
    for name, tensor in tiny.state_dict().items():
        assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num()), name


def test_a_head_trains_its_own_layers_and_adapters_on_its_body(make):  # noqa: F811
    head = make(SequenceClassifier)
    report = lora(head, targets=ALL)
    moving = {name for name, p in head.named_parameters() if p.requires_grad}
    assert {name for name in moving if "lora_" not in name} == set(head.head_tensors)
    assert "W (wte) only reads" in str(report)
    drawn(head)
    ids = torch.arange(12).view(2, 6)
    before = head.gpt.body(ids)
    assert merge(head) < 1e-5
    torch.testing.assert_close(head.gpt.body(ids), before, rtol=1e-4, atol=1e-4)
    assert lora(make(FeatureExtractor)).moving > 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"targets": ["head"]}, "reads tokens and predicts them.*Two choices.*untie"),
        ({"targets": ["lm_head"]}, "Two choices"),
        ({"targets": ["q_proj"]}, "target 'q_proj' is no linear layer of the model: attn.c_attn"),
        ({"targets": "wte"}, "targets must be a list"),
        ({"rank": 0}, r"rank \(--lora\) must be 1 to the width 32, got 0"),
        ({"rank": True}, "got True"),
        ({"alpha": 0.0}, "alpha must be a finite number > 0"),
        ({"alpha": float("nan")}, "alpha must be a finite number > 0"),
        ({"tokens": [97]}, "tokens must be ids from 0 to 96, got 97"),
        ({"tokens": [True]}, "tokens must be ids from 0 to 96, got True"),
        ({"tokens": [-1, 3]}, "tokens must be ids from 0 to 96"),
    ],
)
def test_unsupported_modules_are_refused_and_nothing_is_frozen(tiny, given, says):
    with pytest.raises(UserError, match=says):
        lora(tiny, **given)
    assert all(p.requires_grad for p in tiny.parameters()) and not adapted_layers(tiny)


def test_a_second_name_of_w_is_refused_since_an_adapter_would_not_reach_it(tiny):
    tiny.head = nn.Linear(32, 97, bias=False)
    tiny.head.weight = tiny.wte.weight
    for targets in (["wte"], ["head"]):
        with pytest.raises(UserError, match=r"head.weight is wte.weight under a second name"):
            lora(tiny, targets=targets)


def test_an_adapter_of_w_is_optimized_like_w(tiny):
    lora(tiny, targets=ALL)
    groups = parameter_groups(tiny, matrices="adamw", weight_decay=0.1)
    assert [*groups[0].parameters] == ["wte.lora_A", "wte.lora_B"]
    assert groups[0].name == "W, which reads and predicts" and len(groups) == 2


def test_adapters_attach_once_and_to_plain_layers(tiny):
    with pytest.raises(UserError, match="no adapters to merge"):
        merge(tiny)
    with fast_training(tiny), pytest.raises(UserError, match="c_attn is a LeanLinear"):
        lora(tiny)
    lora(tiny)
    with pytest.raises(UserError, match="has adapters already: merge"):
        lora(tiny)
    with pytest.raises(UserError, match="Linear is neither a tiedgpt"):
        lora(nn.Linear(2, 2))


def test_fast_training_does_not_change_adapted_layers(tiny, ids):
    lora(tiny, targets=ALL)
    drawn(tiny)
    loss = tiny.loss(ids[:, :-1], ids[:, 1:])
    with fast_training(tiny):
        torch.testing.assert_close(tiny.loss(ids[:, :-1], ids[:, 1:]), loss)


# The tie, copies and files


def test_the_tie_is_whole_under_adapters_and_their_merge(tiny):
    with guard(tiny, action="raise") as watch:
        lora(tiny, targets=ALL)
        merge(tiny)
    assert not watch.events
    lora(tiny, targets=ALL)
    found = ledger(tiny)
    assert found.reads_and_predicts == "wte.weight"
    assert found.trainable == sum(p.numel() for p in tiny.parameters() if p.requires_grad)
    assert found.total == sum(p.numel() for p in tiny.parameters())
    assert audit(tiny).verdict == "tied"


def test_surgery_on_an_adapted_matrix_is_refused(tiny):
    lora(tiny, targets=["wte"])
    for change in (untie, lambda model: add_tokens(model, 2), lambda m: replace_head(m, None)):
        with pytest.raises(UserError, match=r"wte has an adapter.*tiedgpt.tune.merge"):
            change(tiny)
    merge(tiny)
    untie(tiny)
    lora(tiny, targets=["head"])
    with pytest.raises(UserError, match="head has an adapter"):
        tie(tiny)


def test_copies_states_and_dtypes_keep_the_adapters(tiny, ids):
    lora(tiny, targets=ALL, tokens=[4])
    drawn(tiny)
    logits = tiny(ids)
    twin = copy.deepcopy(tiny)
    assert torch.equal(twin(ids), logits)
    assert twin.wte.lora_A is not tiny.wte.lora_A
    other = GPT(tiny.config).eval()
    lora(other, targets=ALL, tokens=[4])
    other.load_state_dict(tiny.state_dict())
    assert torch.equal(other(ids), logits)
    with pytest.raises(RuntimeError, match="lora_A"):
        GPT(tiny.config).load_state_dict(tiny.state_dict())
    wide = twin.to(torch.float64)
    torch.testing.assert_close(wide(ids).float(), logits, rtol=1e-4, atol=1e-4)
    assert twin.to(torch.bfloat16)(ids).dtype == torch.bfloat16


def test_an_adapted_model_is_not_written_as_a_plain_one(tiny, tmp_path):
    lora(tiny)
    with pytest.raises(UserError, match=r"belongs to an adapter: merge it first.*tiedgpt.tune"):
        tiny.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_engine_computes_adapters_in_torch_and_packs_only_merged_ones(tiny, ids):
    lora(tiny, targets=ALL)
    drawn(tiny)
    with Engine(tiny) as engine:
        got = engine.generate([ids[0, -8:].tolist()], max_new_tokens=1, temperature=0)[0]
    assert got.ids[-1] == tiny(ids[:1, -8:])[0, -1].argmax()
    with pytest.raises(UserError, match=r"tiedgpt\.tune\.merge"):
        Engine(tiny, precision="int8")
