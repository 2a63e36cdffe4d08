import copy
import dataclasses
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.models import TINY
from tiedgpt import GPT, GPTConfig
from tiedgpt.errors import NoRoomError, UserError
from tiedgpt.heads import SequenceClassifier
from tiedgpt.tie import add_tokens, prune, replace_head, resize_vocab, tie, untie
from tiedgpt.tie.heads import Unembed, is_tied

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

MATRIX = 97 * 32
SPECIAL = {"bos_token_id": 1, "eos_token_id": 1}


def total(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def wrapped(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 97, bias=bias))


@pytest.fixture
def peer() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**TINY, **SPECIAL)).eval()


# untie and tie, ours


def test_an_untied_head_is_a_copy_with_the_same_logits_and_v_d_more_parameters(tiny, ids):
    before, matrix = tiny(ids), tiny.wte.weight
    report = untie(tiny)
    assert torch.equal(tiny(ids), before)
    assert tiny.wte.weight is matrix
    assert tiny.head.weight.data_ptr() != matrix.data_ptr()
    assert not tiny.config.tie_word_embeddings
    assert total(tiny) == tiny.config.parameter_count() == report.change.after
    assert report.change.after - report.change.before == MATRIX
    assert [row.names for row in report.change.added_rows] == [("head.weight",)]
    assert not report.tied and "NOT tied" in str(report) and "tie(model)" in str(report)


@pytest.mark.parametrize("keep", ["input", "output", "mean"])
def test_tying_keeps_the_chosen_values_and_reports_the_distance(tiny, ids, keep):
    untie(tiny)
    with torch.no_grad():
        tiny.head.weight[3] += 0.5
        tiny.head.weight[60, 7] -= 2.0
    a, b = tiny.wte.weight.detach().clone(), tiny.head.weight.detach().clone()
    matrix, predicted = tiny.wte.weight, tiny(ids)
    report = tie(tiny, keep)
    expected = {"input": a, "output": b, "mean": (a + b) / 2}[keep]
    torch.testing.assert_close(tiny.wte.weight.detach(), expected)
    assert tiny.wte.weight is matrix and tiny.head is None and tiny.config.tie_word_embeddings
    assert report.apart.differing_rows == 2 and report.apart.largest == pytest.approx(2.0)
    cosine = torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()
    assert report.apart.cosine == pytest.approx(cosine, rel=1e-5)
    assert [row.names for row in report.change.removed_rows] == [("head.weight",)]
    assert total(tiny) == tiny.config.parameter_count()
    assert "2 of 97 rows" in str(report)
    if keep == "output":
        assert torch.equal(tiny.logits(torch.eye(32)), torch.eye(32) @ b.T)
    assert tiny(ids).shape == predicted.shape


def test_a_layer_inside_a_larger_head_predicts_with_w_and_nothing_unties_it(tiny, ids):
    tiny.head = wrapped().eval()
    tiny.config = dataclasses.replace(tiny.config, tie_word_embeddings=False)
    bias = tiny.head[1].bias
    report = tie(tiny)
    assert report.outputs == ("head.1.weight",)
    assert isinstance(tiny.head[1], Unembed) and tiny.head[1].bias is bias
    expected = tiny.wte.unembed(tiny.body(ids)) + bias
    torch.testing.assert_close(tiny(ids), expected)
    assert total(tiny) == GPTConfig(**TINY).parameter_count() + 97
    assert [n for n, p in tiny.named_parameters() if p.shape == (97, 32)] == ["wte.weight"]
    twin = copy.deepcopy(tiny)
    assert twin.head[1].wte is twin.wte and is_tied(twin)
    with torch.device("meta"):
        fresh = GPT(GPTConfig(**TINY))
        fresh.head = wrapped()
        tie(fresh)
    fresh.to_empty(device="cpu")
    fresh.load_state_dict(tiny.state_dict(), assign=True)
    torch.testing.assert_close(fresh.eval()(ids), expected)
    assert "predicts with the rows of wte.weight" in str(fresh.head)
    with pytest.raises(UserError, match="tied already"):
        tie(fresh)


def test_a_layer_inside_a_larger_head_is_untied_to_a_copy(tiny, ids):
    replace_head(tiny, wrapped().eval())
    tie(tiny)
    before = tiny(ids)
    untie(tiny)
    assert type(tiny.head[1]) is nn.Linear and torch.equal(tiny(ids), before)
    assert tiny.head[1].weight is not tiny.wte.weight


def test_gradients_through_a_wrapped_tied_head_reach_w_from_both_its_uses(tiny, ids):
    twin = copy.deepcopy(tiny)
    tiny.head = nn.Sequential(nn.Identity(), nn.Linear(32, 97, bias=False))
    tie(tiny)
    for model in (tiny, twin):
        model.loss(ids, ids.roll(-1, 1)).backward()
    torch.testing.assert_close(tiny.wte.weight.grad, twin.wte.weight.grad, atol=1e-6, rtol=1e-4)


def test_the_layer_to_tie_can_be_named(tiny):
    tiny.head = nn.ModuleList([nn.Linear(32, 97), nn.Linear(32, 97)])
    assert tie(tiny, output_name="head.1").outputs == ("head.1.weight",)


@pytest.mark.parametrize(("keep", "trains"), [("input", False), ("output", True), ("mean", True)])
def test_requires_grad_follows_the_chosen_values(tiny, keep, trains):
    untie(tiny)
    tiny.wte.weight.requires_grad_(False)
    tie(tiny, keep)
    assert tiny.wte.weight.requires_grad is trains


# replace_head


def test_a_new_head_reports_its_parameters_and_how_to_tie_it(tiny):
    report = replace_head(tiny, wrapped())
    assert not report.tied and not tiny.config.tie_word_embeddings
    added_rows = [(row.names, row.shape) for row in report.change.added_rows]
    assert added_rows == [(("head.1.weight",), (97, 32)), (("head.1.bias",), (97,))]
    assert report.change.after == total(tiny)
    assert "Linear(in_features=32, out_features=97, bias=True)" in str(report)
    assert "tie(model) lets wte.weight take the place of head.1.weight" in str(report)
    tie(tiny)
    assert total(tiny) == report.change.before + 97


def test_replacing_a_head_twice_is_reported(tiny):
    optimizer = "an optimizer made before this"
    replace_head(tiny, nn.Linear(32, 97, bias=False))
    text = str(replace_head(tiny, nn.Linear(32, 97)))
    assert "head.weight (97, 32) is another parameter now" in text
    assert "head.bias (97) came in" in text and optimizer in text
    assert optimizer not in str(replace_head(tiny, tiny.head))
    assert optimizer in str(replace_head(tiny, None))
    assert optimizer not in str(replace_head(tiny, None))


def test_a_head_that_holds_w_itself_is_recognised_as_tied(tiny, ids):
    before = tiny(ids)
    for head in (nn.Linear(32, 97, bias=False), wrapped(bias=False).eval()):
        layer = head if isinstance(head, nn.Linear) else head[1]
        layer.weight = tiny.wte.weight
        report = replace_head(tiny, head)
        assert report.tied and tiny.config.tie_word_embeddings and not report.change.added_rows
        assert torch.equal(tiny(ids), before)
        assert [n for n in tiny.state_dict() if "head" in n] == []
    assert replace_head(tiny, None).tied and tiny.head is None


def test_a_second_name_outside_a_linear_layer_is_tied_with_a_warning(tiny):
    class OwnTable(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.table = weight

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return h @ self.table.T

    report = replace_head(tiny, OwnTable(tiny.wte.weight))
    assert report.tied and "head.table is wte.weight under a second name" in str(report)
    for operation in (untie, lambda model: resize_vocab(model, 99)):
        with pytest.raises(UserError, match=r"head\.table .*wte\.weight"):
            operation(tiny)


def test_a_head_without_a_matrix_v_by_d_is_said_not_to_be_tieable(tiny):
    report = replace_head(tiny, nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 97)))
    assert not report.tied and "to tie it: replace_head(model, None)" in str(report)
    assert replace_head(tiny, None).change.after == tiny.config.parameter_count()


def test_other_surgery_needs_our_model(peer):
    for operation in (untie, lambda m: resize_vocab(m, 9), lambda m: replace_head(m, None)):
        with pytest.raises(UserError, match=r"is no tiedgpt\.GPT"):
            operation(peer)


def test_surgery_on_a_wrapped_model_names_the_model_inside(tiny):
    for operation in (untie, tie):
        with pytest.raises(UserError, match=r"the GPT is model\.module inside DataParallel"):
            operation(nn.DataParallel(tiny))
    classifier = SequenceClassifier(tiny, ["a", "b"])
    with pytest.raises(UserError, match=r"the GPT is model\.gpt inside SequenceClassifier"):
        resize_vocab(classifier, 99)


# tie, any module


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("wrap", [False, True])
def test_a_transformers_model_with_a_new_head_shares_one_parameter_again(peer, ids, bias, wrap):
    count = total(peer)
    head = nn.Linear(32, 97, bias=bias)
    peer.lm_head = nn.Sequential(nn.Dropout(0.1), head).eval() if wrap else head
    peer.config.tie_word_embeddings = False
    report = tie(peer)
    assert head.weight is peer.transformer.wte.weight
    assert total(peer) == count + 97 * bias
    assert report.change.before == count + MATRIX + 97 * bias
    assert peer.config.tie_word_embeddings is True and "was False" in str(report)
    hidden = peer.transformer(ids).last_hidden_state
    torch.testing.assert_close(peer(ids).logits, head(hidden))
    with pytest.raises(UserError, match="tied already"):
        tie(peer)


def test_a_wrapper_module_is_tied_through_its_model(peer):
    peer.lm_head = nn.Linear(32, 97, bias=False)
    peer.config.tie_word_embeddings = False
    report = tie(nn.DataParallel(nn.DataParallel(peer)))
    assert peer.lm_head.weight is peer.transformer.wte.weight
    assert peer.config.tie_word_embeddings is True and "was False" in str(report)
    peer.lm_head = nn.Sequential(nn.Linear(32, 97))
    peer.other = nn.Linear(32, 97)
    report = tie(nn.DataParallel(peer))
    assert report.outputs == ("module.lm_head.0.weight",)


@pytest.mark.parametrize("wrap", [False, True])
def test_tie_restores_124_439_808_parameters_in_transformers_gpt2(wrap):
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
        head = nn.Linear(768, 50257, bias=False)
        model.lm_head = nn.Sequential(nn.Dropout(0.1), head) if wrap else head
    assert total(model) == 163_037_184
    report = tie(model)
    assert total(model) == report.change.after == 124_439_808
    assert "163,037,184 -> 124,439,808" in str(report) and report.apart is None


def test_two_parameters_over_one_memory_become_one(peer):
    peer.load_state_dict(peer.state_dict(), assign=True)
    n_seen_by_an_optimizer = len(list(peer.parameters()))
    assert peer.lm_head.weight is not peer.transformer.wte.weight
    assert tie(peer).apart.differing_rows == 0
    assert peer.lm_head.weight is peer.transformer.wte.weight
    assert len(list(peer.parameters())) == n_seen_by_an_optimizer - 1


def test_a_peft_copy_of_the_head_is_tied_again(peer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(
            peer, LoraConfig(target_modules=["c_attn"], modules_to_save=["lm_head"])
        )
    report = tie(adapted)
    assert report.outputs == ("base_model.model.lm_head.modules_to_save.default.weight",)


class Bare(nn.Module):
    """A model that says nothing of itself."""

    def __init__(self, tables: int = 1, heads: int = 1) -> None:
        super().__init__()
        self.positions = nn.Embedding(24, 32)
        self.tables = nn.ModuleList(nn.Embedding(97, 32) for _ in range(tables))
        self.heads = nn.ModuleList(nn.Linear(32, 97) for _ in range(heads))


def test_without_get_output_embeddings_shapes_decide():
    model = Bare()
    assert tie(model).input == "tables.0.weight"
    assert model.heads[0].weight is model.tables[0].weight


@pytest.mark.parametrize(
    ("model", "names", "says"),
    [
        (Bare(heads=2), {}, r"heads\.0\.weight .*heads\.1\.weight .*output_name="),
        (Bare(tables=2), {}, r"tables\.0\.weight .*tables\.1\.weight .*input_name="),
        (Bare(heads=0), {}, "nothing to tie"),
        (Bare(), {"output_name": "nose"}, r"no matrix 'nose'.*output_name="),
        (Bare(), {"input_name": "positions"}, r"could be the output|nothing to tie"),
        (Bare(), {"input_name": "positions", "output_name": "heads"}, "shape"),
        (nn.LayerNorm(3), {}, "nothing to tie"),
    ],
)
def test_ambiguous_candidates_are_listed(model, names, says):
    with pytest.raises(UserError, match=says):
        tie(model, **names)


def test_given_names_resolve_the_ambiguity():
    model = Bare(tables=2, heads=2)
    report = tie(model, input_name="tables.1", output_name="heads.0.weight")
    assert (report.input, report.outputs) == ("tables.1.weight", ("heads.0.weight",))
    assert model.heads[0].weight is model.tables[1].weight
    assert model.heads[1].weight is not model.tables[0].weight


def test_heads_of_another_size_are_distinguished_from_no_head(peer):
    peer.lm_head = nn.Linear(32, 99)
    with pytest.raises(UserError, match=r"lm_head\.weight \(99, 32\).*resize"):
        tie(peer)


# resize_vocab, add_tokens, prune


@settings(deadline=None, max_examples=20)
@given(n_new=st.integers(1, 60), untied=st.booleans(), seed=st.integers(0, 99))
def test_old_rows_keep_their_bits_and_old_logits_their_values(n_new, untied, seed):
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**TINY, tie_word_embeddings=not untied)).eval()
    ids = torch.randint(97, (2, 9))
    before = model(ids)
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = add_tokens(model, n_new, seed=seed)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter[: len(old[name])], old[name]), name
    torch.testing.assert_close(model(ids)[..., :97], before, atol=2e-6, rtol=1e-5)
    assert model(ids).shape[-1] == 97 + n_new == model.config.vocab_size
    assert report.change.after == total(model) == model.config.parameter_count()
    assert report.matrices == (("wte.weight", "head.weight") if untied else ("wte.weight",))
    assert report.new_tokens.largest <= 2 * report.new_tokens.share


def test_new_tokens_do_not_win_where_rows_drawn_at_random_would(tiny):
    """The rows of `tiny` are large, as a trained model's are: 0.2 instead of 0.02."""
    sample = torch.randint(97, (16, 24), generator=torch.Generator().manual_seed(1))
    random = copy.deepcopy(tiny)
    grown = nn.Parameter(torch.cat([tiny.wte.weight.detach(), torch.randn(4, 32)]))
    random.wte.weight = grown
    states = tiny.body(sample).flatten(0, 1)
    assert random.logits(states).softmax(-1)[:, 97:].sum(-1).max() > 0.9
    report = add_tokens(tiny, 4, sample=sample)
    taken = tiny.logits(states).softmax(-1)[:, 97:].sum(-1)
    assert taken.max() <= 2 * 4 / 101
    assert report.new_tokens.largest == pytest.approx(taken.max().item(), rel=1e-5)
    assert report.new_tokens.mean == pytest.approx(taken.mean().item(), rel=1e-5)
    assert (
        report.new_tokens.share == pytest.approx(4 / 101) and report.new_tokens.n_states == 16 * 24
    )
    assert "probability of the new tokens at 384 states" in str(report)


def test_new_rows_have_the_mean_and_the_shape_of_the_old_ones_spread():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=500, n_positions=8, n_embd=16, n_layer=1, n_head=2)).eval()
    stretch = torch.linspace(0.1, 1.0, 16)
    with torch.no_grad():
        model.wte.weight.copy_(torch.randn(500, 16) * stretch + 0.3)
        model.ln_f.weight.mul_(0.1)
    add_tokens(model, 20_000)
    old, new = model.wte.weight[:500].double(), model.wte.weight[500:].double()
    torch.testing.assert_close(new.mean(0), old.mean(0), atol=0.0005, rtol=0)
    torch.testing.assert_close(new.T.cov() / 0.01**2, old.T.cov(), atol=0.03, rtol=0.05)


def test_an_outlier_among_the_old_rows_does_not_let_new_rows_win(tiny):
    with torch.no_grad():
        tiny.wte.weight[5] *= 500
    report = add_tokens(tiny, 30)
    assert report.new_tokens.largest <= 2 * 30 / 127


def test_the_seed_alone_decides_the_draw(tiny_config):
    models = [GPT(tiny_config) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    state = torch.get_rng_state()
    for model, seed in zip(models, (0, 0, 1), strict=True):
        add_tokens(model, 3, seed=seed)
        assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(models[0].wte.weight, models[1].wte.weight)
    assert not torch.equal(models[0].wte.weight, models[2].wte.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_and_requires_grad_are_kept(tiny, dtype):
    tiny.to(dtype).wte.weight.requires_grad_(False)
    add_tokens(tiny, 3)
    assert tiny.wte.weight.dtype == dtype and not tiny.wte.weight.requires_grad
    resize_vocab(tiny, 50)
    assert tiny.wte.weight.dtype == dtype and not tiny.wte.weight.requires_grad


def test_on_the_meta_device_only_shapes_change():
    with torch.device("meta"):
        model = GPT(GPTConfig.preset("gpt2"))
    report = resize_vocab(model, 50304)
    assert model.wte.weight.is_meta and report.new_tokens is None
    assert total(model) == 124_439_808 + 47 * 768 == model.config.parameter_count()


def test_shrinking_keeps_the_first_rows(tiny, ids):
    old, before = tiny.wte.weight.detach().clone(), tiny(ids % 40)[..., :40]
    report = resize_vocab(tiny, 40)
    assert torch.equal(tiny.wte.weight, old[:40]) and report.new_tokens is None
    torch.testing.assert_close(tiny(ids % 40), before)
    assert tiny.config.parameter_count() == total(tiny)


def test_an_untied_head_and_its_bias_are_resized(tiny, ids):
    tiny.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 97)).eval()
    before = tiny(ids)
    report = add_tokens(tiny, 3)
    assert report.matrices == ("wte.weight", "head.1.weight", "head.1.bias")
    torch.testing.assert_close(tiny(ids)[..., :97], before)
    assert tiny.head[1].out_features == 100
    torch.testing.assert_close(tiny.head[1].bias[97:], tiny.head[1].bias[:97].mean().expand(3))
    prune(tiny, range(97))
    torch.testing.assert_close(tiny(ids), before)
    tie(tiny)
    assert add_tokens(tiny, 2).matrices == ("wte.weight", "head.1.bias")


def test_pruning_keeps_rows_in_the_given_order_and_maps_special_ids(tiny):
    tiny.config = dataclasses.replace(tiny.config, eos_token_id=96)
    tiny.foreign_config["pad_token_id"] = 4
    old = tiny.wte.weight.detach().clone()
    prune(tiny, torch.tensor([50, 4, 96]))
    assert torch.equal(tiny.wte.weight, old[[50, 4, 96]])
    assert tiny.config.eos_token_id == 2 and tiny.foreign_config["pad_token_id"] == 1


class Masked(nn.Module):
    """A head whose size is in a buffer or in a plain tensor."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(32, 97)
        if buffer:
            self.register_buffer("mask", torch.zeros(97), persistent=False)
        else:
            self.mask = torch.zeros(97)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.lin(h) + self.mask


class Failing(Masked):
    """A head that fails where the new tokens are measured, after they are in place."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if len(h) > 1 and self.lin.weight.shape[0] != 97:
            raise KeyboardInterrupt
        return self.lin(h)


def test_an_interruption_while_adding_tokens_leaves_the_model_unchanged(tiny, ids):
    replace_head(tiny, Failing(buffer=False).eval())
    before, matrix = tiny(ids), tiny.wte.weight
    with pytest.raises(KeyboardInterrupt):
        add_tokens(tiny, 3)
    assert tiny.wte.weight is matrix and tiny.config.vocab_size == 97
    assert torch.equal(tiny(ids), before)


def test_rows_that_are_not_finite_can_be_pruned(tiny):
    spoil(torch.inf)(tiny)
    prune(tiny, range(40))
    assert add_tokens(tiny, 3).new_tokens.largest < 1


def test_a_sample_may_be_lists_of_ids_and_the_same_size_changes_nothing(tiny):
    matrix = tiny.wte.weight
    assert "as before" in str(resize_vocab(tiny, 97)) and tiny.wte.weight is matrix
    assert add_tokens(tiny, 3, sample=[[1, 2], [3, 4]]).new_tokens.n_states == 4


# refusals


def put_head(head):
    return lambda model: setattr(model, "head", head)


def spoil(value: float):
    def change(model):
        with torch.no_grad():
            model.wte.weight[40, 3] = model.wte.weight[41, 0] = value

    return change


def mask(*, buffer: bool):
    def change(model):
        replace_head(model, Masked(buffer=buffer).eval())
        model.foreign_config["pad_token_id"] = 3

    return change


def set_special_ids(model):
    model.config = dataclasses.replace(model.config, bos_token_id=3, eos_token_id=96)
    model.foreign_config["pad_token_id"] = 90


def leave(model):
    """Change nothing."""


INTEGER, LOST = "an integer", "eos_token_id=96 and pad_token_id=90 would be lost"
SAMPLES = ([[1, 2], [3]], [[1.5]], [1, 2], [[100]], [[-1]], [[]], "text", [[10**30]])
RESIZES = [(resize_vocab, {"n": 110}), (resize_vocab, {"n": 50}), (prune, {"keep_ids": [3]})]
HEADS = [
    (nn.Linear(32, 100), r"logits \(1, 1, 97\): got \(1, 1, 100\); resize"),
    (nn.Linear(31, 97), r"must turn h \(1, 1, 32\)"),
    (nn.Linear(32, 97, dtype=torch.float64), r"must turn h \(1, 1, 32\)"),
    (nn.Flatten(0), r"logits \(1, 1, 97\): got \(32,\)"),
    (nn.LSTM(32, 97), "got tuple"),
    ("lm_head", r"must be a torch\.nn\.Module of its own"),
]
"""Heads that cannot score the vocabulary."""
REFUSED = [
    (leave, tie, {}, "tied already"),
    (leave, tie, {"keep": "both"}, "one of 'input'.*got 'both'"),
    (
        put_head(nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 97))),
        tie, {}, r"no linear layer.*\(97, 32\)",
    ),
    (
        put_head(nn.ModuleList([nn.Linear(32, 97), nn.Linear(32, 97)])),
        tie, {}, r"head\.0\.weight.*head\.1\.weight.*output_name=",
    ),
    (put_head(nn.Linear(32, 97, bias=False, dtype=torch.float64)), tie, {}, "dtype"),
    (
        put_head(nn.ModuleList([nn.Linear(32, 97)])),
        tie, {"output_name": "head.7"}, r"no matrix 'head\.7'.*head\.0",
    ),
    (untie, untie, {}, "untied already"),
    (leave, lambda model: replace_head(model, model), {}, "of its own"),
    (leave, lambda model: replace_head(model, model.wte), {}, "of its own"),
    (
        put_head(nn.Sequential(nn.Linear(32, 97), nn.LayerNorm(97))),
        add_tokens, {"n_new": 3}, r"head\.1\.weight \(97,\)",
    ),
    (
        put_head(nn.utils.parametrizations.weight_norm(nn.Linear(32, 97, bias=False))),
        add_tokens, {"n_new": 3}, r"head\.parametrizations\.weight\.original0",
    ),
    (spoil(torch.nan), add_tokens, {"n_new": 3}, "wte.weight is .*row 40, one of 2"),
    (spoil(torch.inf), add_tokens, {"n_new": 3}, "wte.weight is .*row 40, one of 2"),
    (set_special_ids, resize_vocab, {"n": 40}, LOST),
    (set_special_ids, prune, {"keep_ids": [1, 2, 3]}, LOST),
    (leave, prune, {"keep_ids": []}, r"each once; got \[\]"),
    (leave, prune, {"keep_ids": [1, 97]}, r"got \[97\]"),
    (leave, prune, {"keep_ids": [0, -1]}, r"got \[-1\]"),
    (leave, prune, {"keep_ids": [5, 6, 5]}, r"got \[5\]"),
    (leave, prune, {"keep_ids": [0.5]}, "integers"),
    (leave, add_tokens, {"n_new": 10**13}, "no memory for"),
    *((leave, add_tokens, {"n_new": 3, "sample": sample}, r"\bids\b") for sample in SAMPLES),
    *((leave, resize_vocab, {"n": n}, INTEGER) for n in (0, -3, 2.5, True, 10**30)),
    *((leave, add_tokens, {"n_new": n}, INTEGER) for n in (0, -3, 2.5, True)),
    *((leave, resize_vocab, {"n": 99, "seed": seed}, INTEGER) for seed in (2**70, 0.5)),
    *((leave, replace_head, {"module": head}, says) for head, says in HEADS),
    *((mask(buffer=True), *resize, r"head\.mask \(97,\)") for resize in RESIZES),
    *((mask(buffer=False), *resize, "must turn h") for resize in RESIZES),
]  # fmt: skip
"""A change of the model, an operation, its arguments, and the error's text."""


@pytest.mark.parametrize(("change", "operation", "arguments", "says"), REFUSED)
def test_a_refused_operation_changes_nothing(tiny, change, operation, arguments, says):
    change(tiny)
    config, foreign, described = tiny.config, dict(tiny.foreign_config), str(tiny)
    modules, parameters = dict(tiny.named_modules()), dict(tiny.named_parameters())
    values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with pytest.raises((UserError, NoRoomError), match=says):
        operation(tiny, **arguments)
    assert tiny.config is config and tiny.foreign_config == foreign and str(tiny) == described
    assert dict(tiny.named_modules()) == modules
    now = dict(tiny.named_parameters())
    assert now.keys() == parameters.keys() and all(now[n] is p for n, p in parameters.items())
    torch.testing.assert_close(now, values, rtol=0, atol=0, equal_nan=True)
    assert getattr(arguments.get("module"), "training", True)
