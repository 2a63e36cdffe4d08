"""Steps of learning equal those of torch.optim.SGD on transformers' GPT-2."""

import copy
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tests.inspect.conftest import TEXT, random_ids, random_model
from tests.models import save_model
from tiedgpt.cli.main import main
from tiedgpt.core.model import GPT
from tiedgpt.errors import NoRoomError, UserError
from tiedgpt.inspect import gradient_split, learn, learning, positions
from tiedgpt.tune import lora

IDS, OTHER = random_ids(13, vocab_size=61), random_ids(7, seed=1, vocab_size=61)


def transformers_gpt2(*, tied=True):
    torch.manual_seed(5)
    config = GPT2Config(
        vocab_size=61, n_positions=29, n_embd=21, n_layer=2, n_head=3, bos_token_id=1,
        eos_token_id=1, initializer_range=0.2, tie_word_embeddings=tied,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def loss_of(peer, ids, predict):
    logits = peer(ids[None]).logits[0, :-1]
    last = slice(-1, None) if predict == "last" else slice(None)
    return F.cross_entropy(logits[last], ids[1:][last])


def parts_of(peer, predict):
    """The gradients of the two matrices of an untied peer with the same values."""
    twin = copy.deepcopy(peer)
    twin.lm_head.weight = nn.Parameter(peer.lm_head.weight.detach().clone())
    matrices = [twin.transformer.wte.weight, twin.lm_head.weight]
    return torch.autograd.grad(loss_of(twin, IDS, predict), matrices)


def train_peer(peer, *, steps, lr, predict, train):
    """The losses before and after each step, and the sums of both parts of the change."""
    groups = {"all": peer.parameters(), "head": [peer.lm_head.weight]}
    groups["blocks"] = peer.transformer.h.parameters()
    trained = list(groups[train])
    optimizer = torch.optim.SGD(trained, lr=lr)
    sums = [torch.zeros(61, 21), torch.zeros(61, 21)]
    losses = []
    for step in range(steps + 1):
        with torch.no_grad():
            losses.append([float(loss_of(peer, IDS, which)) for which in ("all", predict)])
            losses[-1].append(float(loss_of(peer, OTHER, "all")))
        if step == steps:
            break
        weights = [peer.transformer.wte.weight, peer.lm_head.weight]
        for change, gradient, weight in zip(sums, parts_of(peer, predict), weights, strict=True):
            if any(weight is one for one in trained):
                change -= lr * gradient
        peer.zero_grad()
        loss_of(peer, IDS, predict).backward()
        optimizer.step()
    return np.array(losses), sums


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("untied", [True, False])
@pytest.mark.parametrize("predict", ["all", "last"])
@pytest.mark.parametrize("train", ["all", "head", "blocks"])
def test_steps_equal_sgd_on_transformers_gpt2(tied, untied, predict, train):
    options = {"steps": 3, "lr": 0.3, "predict": predict, "train": train}
    peer = transformers_gpt2(tied=tied)
    result = learn(
        GPT.from_pretrained(peer), None, IDS, other=OTHER, untied=untied, top=61, position=5,
        **options,
    )  # fmt: skip
    if tied and untied:
        peer.lm_head.weight = nn.Parameter(peer.lm_head.weight.detach().clone())
    before = copy.deepcopy(peer)
    losses, (read, predicted) = train_peer(peer, **options)
    near = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(result.loss, losses[:, 0], **near)
    np.testing.assert_allclose(result.learned_loss, losses[:, 1], **near)
    np.testing.assert_allclose(result.other_loss, losses[:, 2], **near)
    np.testing.assert_allclose(result.all_reading, read.norm(dim=1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(result.all_predicting, predicted.norm(dim=1), rtol=1e-4, atol=1e-6)
    rows, one_matrix = result.rows, tied and not untied
    cosine = (read * predicted).sum(1) / (read.norm(dim=1) * predicted.norm(dim=1))
    np.testing.assert_allclose(result.cosine[-1], cosine[rows], rtol=1e-3, atol=1e-4)
    assert (result.reads == result.predicts) == one_matrix
    np.testing.assert_array_equal(result.reading[-1], result.all_reading[rows])
    both = (peer.transformer.wte.weight, peer.lm_head.weight)
    if one_matrix:
        moved = both[0] - before.transformer.wte.weight
        expected = moved.norm(dim=1).detach()[rows]
        np.testing.assert_allclose(result.together[-1], expected, rtol=1e-4, atol=1e-5)
        assert result.twin_cosine is None and result.twin_distance is None
    else:
        cosine = F.cosine_similarity(*both).detach()[rows]
        np.testing.assert_allclose(result.twin_cosine[-1], cosine, rtol=1e-5)
        apart = (both[0] - both[1]).norm(dim=1).detach()[rows]
        np.testing.assert_allclose(result.twin_distance[-1], apart, rtol=1e-4, atol=1e-5)
        assert result.together is None
    likely = set()
    with torch.no_grad():
        logits = [model(IDS[None]).logits[0, 5] for model in (before, peer)]
    for at, row in zip((0, -1), logits, strict=True):
        np.testing.assert_allclose(result.logit[at], row[rows], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(result.prob[at], row.softmax(-1)[rows], rtol=1e-4, atol=1e-6)
        likely |= {*row.topk(10).indices.tolist()}
    assert set(result.likely.tolist()) == likely


def test_the_pull_is_how_often_a_token_came_less_its_expectation():
    model = random_model()
    ids = random_ids(9)
    result = learn(model, None, ids, top=97)
    with torch.no_grad():
        expected = model(ids[None])[0, :-1].softmax(-1).sum(0)
    counts = torch.bincount(ids[1:], minlength=97)
    np.testing.assert_allclose(
        result.pull[1], (counts - expected)[result.rows], rtol=1e-4, atol=1e-5
    )
    assert not result.pull[0].any() and not result.reading[0].any()


@pytest.mark.parametrize("model", [random_model(norm="post"), random_model(windows=(0, 5))])
def test_any_shape_learns_and_the_model_stays(model):
    before = copy.deepcopy(model.state_dict())
    result = learn(model.train(), None, random_ids(40), steps=2, top=97)
    split = gradient_split(model, None, random_ids(40))
    assert model.training and all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    once = learn(model, None, random_ids(40), lr=1.0)
    np.testing.assert_allclose(once.all_predicting, split.rows_predict, rtol=1e-5)
    assert result.loss[0] == pytest.approx(split.loss, rel=1e-6)


def test_half_precision_is_trained_in_fp32():
    model = random_model()
    half = copy.deepcopy(model).bfloat16()
    result = learn(half, None, IDS, lr=1e-3)
    assert result.loss.tolist() == learn(half.float(), None, IDS, lr=1e-3).loss.tolist()
    assert result.loss[1] < result.loss[0]


def test_no_step_shows_the_model_as_it_is(model, tokenizer):
    result = learn(model, tokenizer, TEXT, steps=0, max_seconds=0.0)
    expected = positions(model, tokenizer, TEXT)
    assert result.loss.tolist() == [pytest.approx(expected.loss, rel=1e-6)]
    assert set(result.rows.tolist()) == set(result.ids.tolist()) and not result.all_reading.any()
    assert result.position == expected.next - 1 and not result.diverged
    ids = random_ids(70)  # in two chunks
    best = np.exp(positions(model, None, ids).top_logprob[:, 0])
    for at in (0, 63, 64, 69):
        result = learn(model, None, ids, steps=0, position=at)
        assert result.likely_prob.max() == pytest.approx(best[at], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": [3]}, "nothing to predict"),
        ({"text": IDS, "lr": 0.0}, "lr must be positive"),
        ({"text": IDS, "lr": math.nan}, "lr must be positive"),
        ({"text": IDS, "lr": math.inf}, "lr must be positive"),
        ({"text": IDS, "steps": -1}, "steps must be at least 0"),
        ({"text": IDS, "predict": "first"}, "all, last"),
        ({"text": IDS, "train": "wpe"}, "all, head, blocks"),
        ({"text": IDS, "position": 13}, "position must be from 0 to 12"),
        ({"text": IDS, "max_seconds": 0.0}, "shorter text.*inspect learn"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        learn(random_model(), **options)


def test_a_model_that_has_no_room_is_refused(monkeypatch):
    model = random_model()
    size = 4 * (3 * sum(p.numel() for p in model.parameters()) + 4 * model.wte.weight.numel())
    monkeypatch.setattr(learning, "free_memory", lambda device: size)
    learn(model, None, IDS)
    monkeypatch.setattr(learning, "free_memory", lambda device: size - 1)
    with pytest.raises(NoRoomError, match="inspect learn"):
        learn(model, None, IDS)


def test_an_adapter_on_w_is_refused():
    model = random_model()
    lora(model, 2, ("wte",))
    with pytest.raises(UserError, match="merge"):
        learn(model, None, IDS)


@pytest.fixture
def run(model, tokenizer, tmp_path):
    save_model(tmp_path / "run" / "model", model, tokenizer)
    opening = json.dumps({"text": "the mat sat"})
    (tmp_path / "run" / "model" / "opening.json").write_text(opening)
    return tmp_path / "run"


def test_all_doors_give_the_same_numbers_and_the_runs_opening(run, capfd):
    pytest.importorskip("fastapi")
    from starlette.testclient import TestClient

    from tiedgpt.infer import Engine
    from tiedgpt.serve.app import create_app

    options = {"steps": 2, "lr": 0.2, "predict": "last", "train": "head", "untied": True, "top": 3}
    expected = json.loads(learn(run, None, TEXT, **options).to_json())
    assert expected["other"] == "the mat sat"
    assert expected["other_loss"][0] == pytest.approx(positions(run, None, "the mat sat").loss)
    flags = [f"--{name}={value}" for name, value in options.items() if name != "untied"]
    command = ["inspect", "learn", str(run), "--text", TEXT, *flags, "--untied", "-f", "json"]
    assert main(command) == 0
    assert json.loads(capfd.readouterr().out) == expected
    with Engine(str(run)) as engine:
        client = TestClient(create_app(engine, source=str(run)), base_url="http://localhost")
        answer = client.post("/inspect/learn", json={"text": TEXT, **options})
        assert answer.json() == expected
        null = client.post("/inspect/learn", json={"text": TEXT, "other": None, "lr": None})
        assert null.json()["loss"] == learn(run, None, TEXT).loss.tolist()
        for wrong in ({"steps": 101}, {"lr": 0}, {"lr": "x"}, {"train": "wpe"}, {"top": 101}):
            assert client.post("/inspect/learn", json={"text": TEXT} | wrong).status_code == 400
        too_short = client.post("/inspect/learn", json={"ids": [3]})
        assert too_short.status_code == 400 and "nothing to predict" in too_short.text
