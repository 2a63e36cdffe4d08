"""Models, tokenizers, texts and counts in every form, and the errors for wrong ones."""

import json
import math
from dataclasses import MISSING

import numpy as np
import pytest
import torch
from torch import nn

from tests.inspect.conftest import TEXT, random_model
from tests.models import save_model
from tests.tie.checkpoints import their_gpt2
from tiedgpt import GPT, Tokenizer
from tiedgpt.data import ShardWriter
from tiedgpt.errors import UserError
from tiedgpt.inspect import (
    ablate,
    attention,
    direction,
    dot,
    gradient_split,
    learn,
    lens,
    neighbours,
    patch,
    positions,
    random_head,
    vocabulary,
)
from tiedgpt.inspect import rows as rows_of_w
from tiedgpt.inspect.inputs import piece
from tiedgpt.inspect.registry import INSPECTIONS

OF_TEXT = [
    inspection.function
    for inspection in INSPECTIONS.values()
    if inspection.reads_text
    and all(option.default is not MISSING for option in inspection.options.values())
]
"""The inspections that need a text alone."""


@pytest.fixture
def saved(model, tokenizer, tmp_path):
    """A run: its model, its tokenizer and its token shards."""
    save_model(tmp_path / "run" / "model", model, tokenizer)
    (tmp_path / "run" / "data").mkdir()
    with ShardWriter(tmp_path / "run" / "data", "train", vocab_size=len(tokenizer)) as writer:
        writer.write(tokenizer.encode_array(TEXT * 3))
    return tmp_path / "run"


@pytest.mark.parametrize("function", OF_TEXT)
def test_a_path_a_run_and_a_model_in_memory_agree(function, saved, model, tokenizer):
    wanted = function(model, tokenizer, TEXT).to_json()
    assert function(saved, None, TEXT).to_json() == wanted
    assert function(str(saved / "model"), None, tokenizer.encode(TEXT)).to_json() == wanted
    assert function(model, saved / "model", TEXT).to_json() == wanted
    model.train()
    assert function(model, tokenizer, np.array(tokenizer.encode(TEXT))).to_json() == wanted
    assert model.training and all(p.requires_grad and p.grad is None for p in model.parameters())


def test_models_and_tokenizers_of_transformers_are_taken_from_memory(tokenizer, tmp_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer.save_pretrained(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    model = their_gpt2(vocab_size=len(tokenizer))
    found = positions(model, theirs, TEXT)
    assert positions(model, theirs.backend_tokenizer, TEXT).to_json() == found.to_json()
    assert "".join(found.pieces) == TEXT
    assert found.ids.tolist() == theirs(TEXT)["input_ids"]
    assert found.to_json() == positions(GPT.from_pretrained(model), tokenizer, TEXT).to_json()


@pytest.mark.parametrize("function", OF_TEXT)
def test_a_text_as_the_second_argument_is_read_or_named(function, saved, model):
    expected = function(saved, None, TEXT).to_json()
    assert function(saved, TEXT).to_json() == function(str(saved), TEXT).to_json() == expected
    with pytest.raises(UserError, match="text="):
        function(model, TEXT)
    with pytest.raises(UserError, match="the text is empty"):
        function(model, str(saved))


@pytest.mark.parametrize("function", OF_TEXT)
def test_invalid_texts_are_refused(function, model, tokenizer, saved, tmp_path):
    long, size = list(range(81)), len(tokenizer)
    cases = (
        ("", r"the text is empty"), ([], r"the text is empty"), ("cat " * 200, r"1|2 to 80 tokens"),
        (long, r"to 80 tokens.* got 81: give a shorter"), ([3, size], rf"id {size} is outside"),
        ([-1, 3], r"id -1 is outside"), ([0.5, 1.5], r"must be integers"),
        ([[1, 2]], r"shape \(T,\)"), ([[1], [2, 3]], r"shape \(T,\)"),
        (None, r"must be a str"), (5, r"shape \(T,\), got int"), ({"input_ids": [1]}, r"got dict"),
    )  # fmt: skip
    for text, said in cases:
        with pytest.raises(UserError, match=said):
            function(model, tokenizer, text)
    with pytest.raises(
        UserError, match="has no tokenizer: give one, or ids in the place of the text"
    ):
        function(model, None, TEXT)
    model.save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError, match="holds no tokenizer"):
        function(tmp_path / "bare", None, TEXT)
    assert function(tmp_path / "bare", None, [1, 2, 3]).to_json()
    with pytest.raises(UserError, match="tokenizer must be"):
        function(model, 3, TEXT)


def test_a_single_token_gives_the_results_of_one_prediction(model, tokenizer):
    found = positions(model, tokenizer, [7], top=1000)
    assert math.isnan(found.loss) and math.isnan(found.bits_per_byte) and found.next == 0
    assert json.loads(found.to_json())["loss"] is None
    assert found.top_ids.shape == (1, len(tokenizer))
    assert np.isnan(attention(model, None, [7]).entropy).all()
    assert lens(model, None, [7]).target_rank.tolist() == [[0]] * 3
    assert dot(model, None, [7]).position == 0
    for function in (gradient_split, ablate, random_head):
        with pytest.raises(UserError, match="2 to 80 tokens"):
            function(model, None, [7])


SAME_LENGTH = {"corrupted": [3, 2, 1]}


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        (positions, {"top": 0}, "top must be an integer >= 1"),
        (positions, {"replace_at": 5}, "replace_at must be from 0 to 2"),
        (positions, {"replace_at": 1, "replace_with": 9999}, "replace_with must be"),
        (positions, {"replace_with": 9}, "replace_with needs the position"),
        (lens, {"position": -4}, "position must be from 0 to 2, or -1 to -3"),
        (dot, {"position": 3}, "position must be"),
        (attention, {"layer": 2}, "layer must be from 0 to 1"),
        (ablate, {"mode": "none"}, "mode must be zero or mean"),
        (random_head, {"std": 0.0}, "std must be"),
        (random_head, {"std": math.inf}, "std must be"),
        (vocabulary, {"own_rank_rows": -1}, "own_rank_rows must be >= 0, got -1"),
        (neighbours, {"token": " cat sat"}, "one token, got 2"),
        (neighbours, {"token": ""}, "one token, got 0"),
        (neighbours, {"token": 999}, "from 0"),
        (neighbours, {"token": 1, "top": 0}, "top must be"),
        (neighbours, {"token": " cat", "tokenizer": None}, "has no tokenizer"),
        (patch, {"corrupted": [1, 2], "answer": 3}, "corrupted must have the 3 tokens .* got 2"),
        (patch, {"corrupted": "", "answer": 3}, "the text is empty"),
        (patch, SAME_LENGTH | {"answer": 9999}, "answer must be from 0 to"),
        (patch, SAME_LENGTH | {"answer": " a", "tokenizer": None}, "answer needs a tokenizer"),
        (patch, SAME_LENGTH | {"answer": "the 文字"}, r"answer must be one .* \d+ for 'the 文字'"),
        (patch, SAME_LENGTH | {"answer": 3, "wrong": -9999}, "wrong must be"),
        (direction, {"toward": "the cat", "away": "\n"}, "away must have at least one text"),
        (direction, {"toward": "the cat", "away": "the cat"}, "the same mean state"),
    ],
)
def test_wrong_options_are_named(function, options, said, model, tokenizer):
    text = {"text": [1, 2, 3]} if INSPECTIONS[function.__name__].reads_text else {}
    with pytest.raises(UserError, match=said):
        function(model, **{"tokenizer": tokenizer} | text | options)


def test_non_finite_weights_are_reported():
    model = random_model()
    model.wte.weight.data[5, 3] = float("nan")
    for function in (positions, lens, dot, learn):
        with pytest.raises(UserError, match="not finite"):
            function(model, None, [1, 2])
    for function in (vocabulary, neighbours):
        with pytest.raises(UserError, match="holds nan or inf in 1 row:"):
            function(model)


def test_a_head_without_a_matrix_is_refused_where_one_is_needed():
    model = random_model(tied=False)
    model.head = nn.Sequential(nn.Linear(16, 97), nn.Softmax(-1))  # of small numbers
    positions(model, None, [1, 2]), lens(model, None, [1, 2])
    for call in (lambda: dot(model, None, [1, 2]), lambda: vocabulary(model)):
        with pytest.raises(UserError, match="head is not linear"):
            call()
    model.head = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 97))
    with pytest.raises(UserError, match="merge adapters"):
        gradient_split(model, None, [1, 2])


def test_a_head_may_forbid_tokens_by_minus_infinity():
    model = random_model(tied=False)
    model.head = nn.Linear(16, 97)
    model.head.bias.data[:3] = -math.inf
    found, states = positions(model, None, [5, 7, 9], replace_at=1), lens(model, None, [5, 7, 9])
    assert found.entropy_bits.min() > 0 and found.max_abs_change[0] == 0 < found.max_abs_change[1]
    assert states.kl_bits[0].min() > 0 and not states.kl_bits[-1].any()


def test_bits_per_byte_are_those_of_the_tokens_that_have_bytes(tokenizer):
    model, size = random_model(vocab_size=len(tokenizer) + 5), len(tokenizer)
    ids = [size + 1, *tokenizer.encode("the é"), size, size + 4]
    found = positions(model, tokenizer, ids, replace_at=-1)
    bits = found.surprisal_bits[:-1].sum()
    assert found.bits_per_byte == pytest.approx(bits / len("the é".encode()), rel=1e-5)
    assert found.replaced == (len(ids) - 1, size + 4, 0)
    assert positions(model, None, [3, 7], replace_at=1).replaced == (1, 7, 8)


def test_half_precision_and_frozen_models_are_read():
    model = random_model(dtype=torch.bfloat16)
    assert positions(model, None, [1, 2, 3]).logprob.dtype == np.float32
    assert vocabulary(model).matrices[0].norm.dtype == np.float32
    assert random_head(model, None, [1, 2]).random_loss > 0
    frozen = random_model().requires_grad_(False)
    assert gradient_split(frozen, None, [1, 2, 3]).norm_read > 0
    assert not any(p.requires_grad for p in frozen.parameters())


def test_pieces_show_parts_of_characters_and_ids_without_a_token(tokenizer):
    ids = tokenizer.encode("é文")
    pieces = [piece(tokenizer, id) for id in ids]
    assert any(p.startswith("bytes:\\x") for p in pieces)
    assert piece(tokenizer, 9999) == "id:9999" and piece(None, 5) == "id:5"


def test_json_is_columns_without_nan_and_with_all_digits(model, tokenizer):
    found = positions(model, tokenizer, TEXT, replace_at=2)
    plain = json.loads(found.to_json(), parse_constant=pytest.fail)
    assert plain["logprob"][-1] is None and plain["replaced"] == list(found.replaced)
    assert np.array_equal(np.array(plain["top_logprob"], np.float32), found.top_logprob)
    assert plain["words"][str(found.ids[0])] == found.pieces[0]
    states = json.loads(attention(model, tokenizer, TEXT).to_json())
    assert "states" not in states and len(states["patterns"]) == 2


def test_counts_come_from_a_run_from_shards_from_texts_or_as_numbers(
    saved, model, tokenizer, monkeypatch
):
    monkeypatch.setattr(rows_of_w, "AT_ONCE", 7)
    counts = np.bincount(tokenizer.encode(TEXT * 3), minlength=len(tokenizer))
    (saved / "text.txt").write_text(TEXT * 3)
    for found in (
        vocabulary(saved),
        vocabulary(model, counts=saved / "data"),
        vocabulary(model, tokenizer, counts=saved / "text.txt"),
        vocabulary(model, counts=counts.tolist()),
    ):
        np.testing.assert_array_equal(found.count, counts)
        np.testing.assert_array_equal(found.unseen, np.flatnonzero(counts == 0))
    assert found.counted_in == "the counts given"
    for wrong in (counts[1:], -counts, counts * math.nan, counts.astype(str), [None] * len(counts)):
        with pytest.raises(UserError, match="counts must be"):
            vocabulary(model, counts=wrong)
    with pytest.raises(UserError, match="needs a tokenizer"):
        vocabulary(model, counts=saved / "text.txt")
    with pytest.raises(UserError, match="do not belong together"):
        vocabulary(random_model(), counts=saved / "data")


def test_frequency_written_into_the_rows_is_recovered():
    model, n = random_model(vocab_size=2000), 2000
    counts = np.exp(np.random.default_rng(0).normal(4, 2, n)).astype(int)
    model.ln_f.bias.data.copy_(torch.eye(16)[3])
    with torch.no_grad():
        model.wte.weight[:, 3] = torch.from_numpy(np.log(np.maximum(counts, 1))).float()
    rows = vocabulary(model, counts=counts).matrices[0]
    assert rows.spearman["prior_logit"] > 0.999 and rows.slope["prior_logit"] == pytest.approx(1)
    assert rows.r2_heldout > 0.99 and np.abs(rows.direction).argmax() == 3
    weight = model.wte.weight.detach().double().numpy()
    x, y = np.log(counts[counts > 0]), np.linalg.norm(weight, axis=1)[counts > 0]
    ranks = [(a[:, None] > a).sum(1) + (a[:, None] == a).sum(1) / 2 for a in (x, y)]
    rho = np.corrcoef(*ranks)[0, 1]
    assert rows.spearman["norm"] == pytest.approx(rho, rel=1e-4)
    half = 1.96 * math.sqrt((1 + rho**2 / 2) / (len(x) - 3))  # Bonett and Wright 2000
    ends = math.atanh(rho) - half, math.atanh(rho) + half
    assert np.arctanh(rows.interval["norm"]) == pytest.approx(ends, rel=1e-4)
    assert rows.slope["norm"] == pytest.approx(np.polyfit(x, y, 1)[0], rel=1e-4)
    centred = weight - weight.mean(0)
    left, scale, _ = np.linalg.svd(centred, full_matrices=False)
    assert rows.pca_share == pytest.approx(scale[:2] ** 2 / (scale**2).sum(), rel=1e-4)
    np.testing.assert_allclose(np.abs(rows.pca), np.abs(left * scale)[:, :2], atol=1e-2)


def test_the_direction_is_a_ridge_regression_of_ln_count_on_four_fifths_of_the_tokens():
    model, counts = random_model(), np.r_[0, 0, np.arange(1, 96)]
    rows = vocabulary(model, counts=counts).matrices[0]
    weight = model.wte.weight.detach().double().numpy()
    centred, y = weight - weight.mean(0), np.log(np.maximum(counts, 1))
    held_out = torch.rand(97, generator=torch.Generator().manual_seed(0)).numpy() < 0.2
    train, test = (counts > 0) & ~held_out, (counts > 0) & held_out
    x, middle, level = centred[train], centred[train].mean(0), y[train].mean()
    penalty = math.sqrt(1e-3 * np.square(x - middle).sum() / 16) * np.eye(16)
    sides = np.r_[x - middle, penalty], np.r_[y[train] - level, np.zeros(16)]
    direction = np.linalg.lstsq(*sides, rcond=None)[0]
    np.testing.assert_allclose(rows.direction, direction, rtol=1e-3, atol=1e-4)
    estimates = level + (centred - middle) @ direction
    np.testing.assert_allclose(rows.ln_count, estimates, rtol=1e-3, atol=1e-3)
    r2 = 1 - np.square(y - estimates)[test].mean() / y[test].var()
    assert rows.r2_heldout == pytest.approx(r2, abs=1e-3)
    few = [vocabulary(model, counts=[1] * n + [0] * (97 - n)).matrices[0] for n in (19, 20)]
    assert [rows.direction is not None for rows in few] == [False, True]


def test_a_row_inside_the_hull_never_wins_and_the_longest_does():
    model = random_model()
    with torch.no_grad():
        model.wte.weight[4] = model.wte.weight[5:9].mean(0)
    few = vocabulary(model, own_rank_rows=5).matrices[0]
    assert few.own_rank_ids.tolist() == [0, 24, 48, 72, 96]
    rows = vocabulary(model, own_rank_rows=None).matrices[0]
    assert few.own_rank.tolist() == rows.own_rank[few.own_rank_ids].tolist()
    assert rows.own_rank_ids.tolist() == list(range(97))
    assert rows.own_rank[4] > 1 and rows.own_rank[rows.norm.argmax()] == 1
    weight = model.wte.weight.detach()
    ranks = 1 + (weight @ weight.T > weight.square().sum(1, keepdim=True)).sum(1)
    assert np.abs(rows.own_rank - ranks.numpy()).max() <= 1  # its own logit is not above itself


def test_unreachable_tokens_are_found(model, tokenizer):
    found = vocabulary(model, tokenizer)
    for id in range(len(tokenizer)):
        data = tokenizer.token_bytes(id)
        text = data.decode(errors="replace")
        assert found.fragment[id] == (text.encode() != data)
        assert found.reachable[id] == (tokenizer.encode(text) == [id])
    assert not found.reachable[tokenizer.eos_token_id]
    padded = random_model(vocab_size=len(tokenizer) + 5)
    assert not vocabulary(padded, tokenizer).reachable[-5:].any()
    characters = Tokenizer.characters(["abc"])
    assert vocabulary(random_model(vocab_size=4), characters).reachable.tolist() == [1, 1, 1, 0]
