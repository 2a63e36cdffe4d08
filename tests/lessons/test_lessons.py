"""The numbers of the lessons are measured on any model, and each fits a screen and a half."""

import json
import math
import re
import shutil
from importlib import import_module
from inspect import getdoc
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.cells import cell_len
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import tiedgpt
from tests.inspect.conftest import TEXT, random_ids, random_model
from tests.inspect.test_tables import tables
from tiedgpt import Tokenizer, explain, inspect
from tiedgpt.data import ShardWriter
from tiedgpt.errors import UserError
from tiedgpt.lessons import TOPICS
from tiedgpt.lessons.inputs import tiny_model
from tiedgpt.lessons.lesson import Lesson
from tiedgpt.tie import ledger


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT * 3, "naïve café — 文字"], 300)


def transformers_gpt2(*, tied=True, vocab_size=97) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocab_size, n_positions=80, n_embd=16, n_layer=2, n_head=2, eos_token_id=0,
        bos_token_id=0, initializer_range=0.3, tie_word_embeddings=tied,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


class OtherModel(nn.Module):
    """Neither ours nor transformers': it reads and predicts with one Parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tok_emb = nn.Embedding(97, 16)
        self.mix = nn.GRU(16, 16, batch_first=True)
        self.lm_head = nn.Linear(16, 97, bias=False)
        self.lm_head.weight = self.tok_emb.weight

    def forward(self, ids):
        return self.lm_head(self.mix(self.tok_emb(ids))[0])


RANDOM_IDS = random_ids(32)[None]
"""The ids that a lesson reads without a tokenizer."""
MODELS = {
    "ours": random_model,
    "ours, untied": lambda: random_model(tied=False),
    "transformers": transformers_gpt2,
    "transformers, untied": lambda: transformers_gpt2(tied=False),
    "another": OtherModel,
}


@pytest.mark.parametrize("topic", TOPICS)
def test_every_cited_line_of_a_lesson_exists(topic):
    core = Path(tiedgpt.__file__).parent
    for place in TOPICS[topic].places:
        file, _, names = place.partition(": ")
        assert (core / file).exists()
        for name in names.split(", "):
            found = import_module(f"tiedgpt.{file.removesuffix('.py').replace('/', '.')}")
            for part in name.split("."):
                found = getattr(found, part)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("topic", TOPICS)
def test_a_lesson_fits_a_screen_and_a_half_and_does_not_change_the_model(topic, model):
    model = MODELS[model]().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters, stream = list(model.parameters()), torch.get_rng_state()
    lesson = explain(topic, model)
    lines = str(lesson).splitlines()
    assert len(lines) <= 60 and max(map(cell_len, lines)) <= 79
    assert TOPICS[topic].question.split()[0] in lines[0]
    assert "Radford et al. 2018, eq. 2" in str(lesson)
    assert "no tokenizer" in str(lesson)
    assert json.loads(lesson.to_json())["numbers"]
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in parameters)
    assert all(part.training for part in model.modules())
    assert torch.equal(torch.get_rng_state(), stream)


def test_a_doubled_row_moves_its_own_logit_if_and_only_if_the_model_is_tied():
    for name, make in MODELS.items():
        lesson = explain("tie", make())
        words, numbers = " ".join(str(lesson).split()), lesson.numbers
        is_untied = "untied" in name
        assert ("this matrix only reads" in words) is is_untied
        before, after = numbers["logit_before"], numbers["logit_after"]
        assert after == pytest.approx(before if is_untied else 2 * before, rel=1e-5)
        assert numbers["others_moved"] == 0
        assert numbers["read_difference"] == 0
        assert name == "another" or numbers["predict_difference"] < 1e-5


def test_both_matrices_of_an_untied_model_are_named():
    ours, theirs = explain("tie", random_model(tied=False)), explain("head", MODELS[
        "transformers, untied"]())  # fmt: skip
    assert "wte.weight reads; head.weight predicts" in str(ours) and "differ in 97" in str(ours)
    assert "transformer.wte.weight reads; lm_head.weight predicts" in theirs.matrices


def test_a_replaced_head_of_a_transformers_model_is_detected():
    model = transformers_gpt2()
    model.lm_head = nn.Linear(16, 97, bias=False)
    lesson = explain("tie", model)
    assert lesson.numbers["verdict"] == "broken"
    assert lesson.numbers["logit_after"] == lesson.numbers["logit_before"]
    assert explain("parameters", model).numbers["tied"] == ledger(transformers_gpt2()).total


def test_the_gradient_has_a_part_from_each_use_of_the_matrix():
    model, ids = random_model(), RANDOM_IDS[0]
    weight, h = model.wte.weight, model.body(RANDOM_IDS)[0, :-1].detach()
    (both,) = torch.autograd.grad(model.loss(ids[None, :-1], ids[None, 1:]), weight)
    (predict,) = torch.autograd.grad(F.cross_entropy(h @ weight.T, ids[1:]), weight)
    read = both - predict
    expected = {
        "norm_read": float(read.norm()), "norm_predict": float(predict.norm()), "rows_predict": 97,
        "rows_read": len(ids[:-1].unique()),
        "cosine": float(F.cosine_similarity(read.flatten(), predict.flatten(), dim=0)),
    }  # fmt: skip
    numbers = explain("head", model).numbers
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    drift = 0.1 * float((read - predict).abs().max())
    assert explain("tie", model).numbers["drift"] == pytest.approx(drift, rel=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_training_the_head_changes_the_embedding_if_and_only_if_tied(tied):
    model = random_model(tied=tied)
    lesson = explain("tuning", model)
    ids = RANDOM_IDS
    head = model.wte.weight if tied else model.head.weight
    (gradient,) = torch.autograd.grad(model.loss(ids[:, :-1], ids[:, 1:]), [head])
    moves, seen = 0.1 * gradient.norm(dim=1), torch.isin(torch.arange(97), ids)
    squares = torch.linalg.svdvals(gradient) ** 2
    expected = {
        "largest_move": float(moves.max()), "seen_moved": float(moves[seen].mean()),
        "others_moved": float(moves[~seen].mean()), "n_moved": 97,
        "kept": float(squares[:8].sum() / squares.sum()),
    }  # fmt: skip
    numbers = {name: lesson.numbers[name] for name in expected}
    assert numbers == pytest.approx(expected, rel=1e-4)
    with torch.no_grad():
        head -= 0.1 * gradient
        after = float(model.loss(ids[:, :-1], ids[:, 1:]))
    *_, last = lesson.numbers["losses"].values()
    assert last == pytest.approx(after, rel=1e-5)
    assert ("both columns are equal" in " ".join(str(lesson).split()).lower()) is tied
    counts = lesson.numbers["moving"]
    assert counts["--freeze wte"] == counts["everything"] - 97 * 16
    assert counts["--lora 8 --lora-targets wte,..."] - counts["--lora 8"] == 8 * (97 + 16)
    assert counts["--freeze body,+wte" if tied else "--freeze body"] == 97 * 16


@pytest.mark.parametrize("tied", [True, False])
def test_tables_hold_the_numbers_of_the_model(tied):
    model, ids = random_model(tied=tied), RANDOM_IDS[0]

    def cells(topic, at=0):
        return tables(str(explain(topic, model)))[at]

    found = inspect.gradient_split(model, None, ids, arrays=True)
    reached = [f"{(rows > 0).sum()} of 97" for rows in (found.rows_read, found.rows_predict)]
    assert [column[1:] for column in cells("head")[1:]] == [
        [f"{found.norm_read:.3g}", f"{found.norm_predict:.3g}"], reached,
    ]  # fmt: skip
    head = (model.wte if tied else model.head).weight.detach()
    moves = 0.1 * np.linalg.norm(found.predict + (found.read if tied else 0), axis=1)
    seen, order = np.isin(np.arange(97), ids), moves.argsort()[::-1]
    order = [*order[seen[order]][:3], *order[~seen[order]][:3]]
    _, are_seen, read, predict, shares = (column[1:] for column in cells("tuning"))
    assert are_seen == ["yes"] * 3 + ["no"] * 3
    assert [float(x) for x in predict] == pytest.approx(moves[order], rel=0.06)
    assert read == (predict if tied else ["0"] * 6)
    lengths = head.norm(dim=1).numpy()[order]
    assert [float(x[:-1]) for x in shares] == pytest.approx(100 * moves[order] / lengths, rel=0.01)
    as_input, as_output = (column[1:] for column in cells("tuning", 1)[-2:])
    assert [word == "moves" for word in as_input] == [True, tied, False, False, True]
    assert [word == "moves" for word in as_output] == [True, True, not tied, False, tied]
    found = inspect.positions(model, None, ids, top=1)
    likeliest = np.exp(found.logprob), np.exp(found.top_logprob[:, 0])
    columns = cells("positions")
    assert columns[1][1:] == [f"id:{id}" for id in ids[:8]]
    assert [columns[2][1:], columns[4][1:]] == [
        [f"id:{id}" for id in row] for row in (ids[1:9], found.top_ids[:8, 0])
    ]
    assert [columns[3][1:], columns[5][1:]] == [[f"{x:.2g}" for x in row[:8]] for row in likeliest]
    n = sum(p.numel() for p in model.parameters()) - (0 if tied else 97 * 16)
    text = str(explain("parameters", model)).replace(",", "")
    rows = re.findall(r"^  (?:parameters|bytes).* (\d+) +(\d+) +\+(\d+)$", text, re.M)
    assert [[*map(int, row)] for row in rows] == [
        [size * n, size * (n + 97 * 16), size * 97 * 16] for size in (1, 4, 16)
    ]


def test_new_numbers_are_noise_and_a_trained_untied_head_works():
    calls = []
    numbers = explain("head", progress=lambda *call: calls.append(call)).numbers
    steps = {done: total for name, done, total in calls if "an untied tiny GPT" in name}
    in_full, trained_before = dict.fromkeys(range(121), 120), {120: 120}
    assert steps in (in_full, trained_before)  # a process trains each tiny model once
    losses = numbers["losses"]
    assert losses["a copy of W"] == losses["W itself"] < numbers["uniform"] - 2
    assert losses["new numbers from N(0, 0.02)"] == pytest.approx(numbers["uniform"], abs=0.3)
    assert max(numbers["tied_loss"], numbers["untied_loss"]) < numbers["tiny_uniform"] - 1
    tiny = tiny_model()
    assert numbers["untied_size"] - numbers["tied_size"] == tiny.model.wte.weight.numel()
    types = str, bytes, bytearray, list, dict, set, frozenset, int, float, tuple, memoryview
    docs = dict.fromkeys(getdoc(getattr(one, name)) for one in types for name in dir(one))
    ids = tiny.tokenizer.encode("\n\n".join(filter(None, docs)))[-2048:][: 31 * 65]
    rows = torch.tensor(ids).view(31, 65)  # the end is held out
    with torch.no_grad():
        logits = tiny.model(rows[:, :-1]).flatten(0, 1)
    loss = F.cross_entropy(logits, rows[:, 1:].flatten())
    assert float(loss) == pytest.approx(numbers["tied_loss"], rel=1e-5)


def test_a_typical_part_of_a_runs_validation_text_is_used(tmp_path):
    """The first tokens may be as this: of a kind that is nowhere else in the text."""
    model, tokenizer, _ = tiny_model()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    strange = torch.randint(512, (200,), generator=torch.Generator().manual_seed(0))
    typical = np.concatenate([strange, tokenizer.encode(str.__doc__ * 9)])
    for n, ids in enumerate([np.arange(3), np.full(40, 512), typical]):  # short, unknown, good
        (tmp_path / "data").mkdir(exist_ok=True)
        with ShardWriter(tmp_path / "data", "val", vocab_size=513) as shard:
            shard.write(ids)
        lesson = explain("head", tmp_path)
        assert ("validation text" in " ".join(str(lesson).split())) is (n == 2)
        shutil.rmtree(tmp_path / "data")
    losses, uniform = lesson.numbers["losses"], lesson.numbers["uniform"]
    assert losses["W itself"] < uniform - 1 and "not trained, not because" in str(lesson)


@pytest.mark.parametrize("make", [random_model, transformers_gpt2, OtherModel])
def test_untying_adds_v_times_d_and_tying_takes_it_away(make):
    numbers = explain("parameters", make()).numbers
    assert numbers["untied"] - numbers["tied"] == 97 * 16 and numbers["again"] == numbers["tied"]
    assert numbers["multiply_adds"][0] == numbers["multiply_adds"][1]
    assert (numbers["gpt2_tied"], numbers["gpt2_untied"]) == (124_439_808, 163_037_184)


def test_no_position_sees_ahead_and_the_loss_is_torchs():
    model, answers = transformers_gpt2(), RANDOM_IDS[0, 1:]
    loss = float(F.cross_entropy(model(RANDOM_IDS).logits.detach()[0, :-1], answers))
    numbers = explain("positions", model).numbers
    assert numbers["moved_before"] == 0 < numbers["moved_after"]
    assert (numbers["loss"], numbers["targets"]) == (pytest.approx(loss, rel=1e-5), 31)
    numbers, perplexity = explain("loss", model).numbers, math.exp(loss)
    expected = {"loss": loss, "by_hand": loss, "perplexity": perplexity, "uniform": math.log(97)}
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert (numbers["targets"], numbers["n_right"]) == (31, len(answers.unique()))
    assert numbers["gradient_apart"] < 1e-6 and numbers["rows_reached"] == 97


def test_dot_products_and_cosines_disagree_and_norms_move_freely():
    numbers = explain("norms").numbers
    assert 0 < numbers["differ"] < numbers["tokens"]
    assert numbers["probability_moved"] < 1e-5
    assert numbers["norm_after"] > 1.5 * numbers["norm_before"]
    assert numbers["rank_correlation"] < 0.9  # learned from this Python's documentation


def test_a_tokenizer_and_a_text_give_words(tokenizer):
    model = random_model(vocab_size=len(tokenizer))
    lesson = explain("positions", model, tokenizer=tokenizer, text="the cat é文字" * 6)
    assert "' cat'" in str(lesson) and not lesson.partial
    begin = "the cat é文字the cat é文字the cat é文"  # then part of a character
    assert lesson.text == f"'{begin}'" and begin in lesson.to_json()


def test_heads_on_the_body_have_their_outputs_and_parameters(tiny):
    lesson = explain("body", tiny)
    assert lesson.numbers["states"] == (1, 24, 32)
    table = re.findall(r"  (\(.*\)) +(\d+)$", str(lesson), re.M)
    assert table == [("(1, 24, 97)", "0"), ("(1, 3)", "96"), ("(1, 2)", "33"), ("(1, 32)", "0")]


def test_a_paragraph_breaks_no_option_and_no_name():
    lesson = Lesson("tie", "")
    lesson.say("x" * 71 + " --lora-targets {name}", name="a b")
    lesson.say("x" * 77 + " {name} {n:.1f}", n=2)
    assert lesson.blocks == ["x" * 71 + "\n--lora-targets a b", "x" * 77 + "\na b 2.0"]


def test_missing_parts_of_a_module_are_skipped_with_the_reason():
    lesson = explain("body", OtherModel())
    assert "left out" in str(lesson) and any("other heads" in why for why in lesson.partial)


def test_bad_requests_are_explained_in_a_sentence(tokenizer):
    with pytest.raises(UserError, match="no topic 'ties': choose one of tie, head, parameters"):
        explain("ties")
    with pytest.raises(UserError, match="text needs a tokenizer"):
        explain("tie", random_model(), text="the cat")
    with pytest.raises(UserError, match="must have 4 tokens"):
        explain("tie", random_model(vocab_size=300), tokenizer=tokenizer, text="")
    letters = Tokenizer.characters(["ab"])
    with pytest.raises(UserError, match="character 'x'"):
        explain("tie", random_model(), tokenizer=letters, text="abxab")
    (why,) = explain("tie", random_model(), tokenizer=letters).partial
    assert "cannot encode the text" in why
    with pytest.raises(UserError):
        explain("tie", nn.Linear(3, 3))


def test_the_tie_says_whether_to_tie_and_the_footer_names_its_symbols(tiny):
    """A head for 97 tokens of width 32 has 97 x 32 numbers."""
    lesson = explain("tie", tiny)
    assert lesson.numbers["head_parameters"] == 97 * 32
    assert lesson.numbers["tied_parameters"] == sum(p.numel() for p in tiny.parameters())
    assert "Should you tie?" in str(lesson) and "-0.007" in str(lesson)
    footer = " ".join(str(lesson).partition("\nequation")[2].split())
    for symbol in ("U:", "W_e:", "W_p:", "h_n:", "wte.weight", "rows are e"):
        assert symbol in footer


def test_norms_tell_why_one_matrix_can_do_both(tiny):
    tokenizer = Tokenizer.characters(["abcdefgh"])
    ids = tokenizer.encode("badface")
    numbers = explain("norms", tiny, tokenizer=tokenizer, text="badface").numbers
    weight = tiny.wte.weight.detach()
    rows = weight[ids]
    h = tiny.body(torch.tensor([ids]))[0].detach()
    assert numbers["repeats_rows"] == sum((rows @ weight.T).argmax(-1) == torch.tensor(ids))
    assert numbers["repeats_states"] == sum((h @ weight.T).argmax(-1) == torch.tensor(ids))
    cosine = (rows * h).sum(-1) / rows.norm(dim=-1) / h.norm(dim=-1)
    assert numbers["cosine_read"] == pytest.approx(float(cosine.mean()), rel=1e-4)
    logits = h[-1] @ weight.T
    before, best = logits.softmax(-1), int(logits.argmax())
    with tiny.wte.register_forward_hook(lambda *x: x[-1] * torch.tensor([[1]] * 6 + [[2]])):
        moved = (tiny(torch.tensor([ids]))[0, -1].softmax(-1) - before).abs().sum() / 2
    logits[best] *= 2
    assert numbers["read_moved"] == pytest.approx(float(moved.detach()), rel=1e-4)
    assert numbers["best_before"] == pytest.approx(float(before[best]), rel=1e-4)
    assert numbers["best_after"] == pytest.approx(float(logits.softmax(-1)[best]), rel=1e-4)
