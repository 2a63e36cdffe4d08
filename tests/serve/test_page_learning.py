"""The backward pass of the page, in Node: gradients and steps are those of torch."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from tests.models import TEXT, random_gpt
from tests.serve.test_page_model import COUNTS, INFO, InNode, ask, close, needs_node
from tiedgpt import Tokenizer, inspect
from tiedgpt.inspect.vocab_matrices import vocab_matrices

pytestmark = needs_node
LONG_TEXT = "the cat sat on the mat. the dog ate the hat"
ROWS = ("reading", "predicting", "together", "cosine", "pull", "logit", "prob")
ROWS += ("twin_cosine", "twin_distance")
"""Statistics of the listed rows."""
SHAPES = {
    "gpt2": {},
    "untied": {"tie_word_embeddings": False},
    "gpt1": {"norm": "post"},
    "gpt3": {"attention_windows": (0, 4)},
    "nanogpt": {"bias": False, "activation_function": "gelu"},
    "relu, untied": {"activation_function": "relu", "n_inner": 37, "tie_word_embeddings": False},
    "silu": {"activation_function": "silu", "n_inner": 41},
}


def in_node(folder, model, precision="fp32", tokenizer=None):
    matrices = [{"name": one.name, "does": one.does} for one in vocab_matrices(model)]
    info = INFO | {"matrices": matrices, "tied": len(matrices) == 1}
    return InNode(folder, model, tokenizer, precision=precision, info=info)


def test_each_layers_gradients_equal_finite_differences():
    errors = ask("gradients_in_node.mjs", {"layers": True})
    assert len(errors) > 15
    for layer, error in errors.items():
        assert error < (2e-3 if layer == "gelu" else 1e-5), layer  # erf is within 1.5e-7


def assert_equal_gradients(page, ids, start):
    """Compare the loss and the gradient of every parameter with autograd's."""
    model = page.model
    logits = model(torch.tensor([ids[:-1]]))[0]
    loss = F.cross_entropy(logits[start:], torch.tensor(ids[1:])[start:])
    names, parameters = zip(*model.named_parameters(), strict=True)
    expected = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    question = {"bytes": str(page.path), "ids": ids, "from": start}
    result = ask("gradients_in_node.mjs", question)
    assert result["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    gradients = dict(result["all"])
    read, predict = (torch.tensor(result[job]) for job in ("read", "predict"))
    gradients |= {"wte.weight": read + predict if model.head is None else read}
    if model.head is not None:
        gradients["head.weight"] = predict
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        apart = torch.as_tensor(gradients[name]) - gradient.flatten()
        scale = max(float(gradient.norm()), 1e-4 * float(expected["wte.weight"].norm()))
        assert float(apart.norm()) <= 1e-4 * scale, name


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_equal_torchs_in_every_shape(tmp_path, shape):
    model = random_gpt(0, vocab_size=101, n_positions=29, n_layer=2, **SHAPES[shape])
    page = in_node(tmp_path, model)
    ids = torch.randint(101, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    for start in (0, len(ids) - 2):
        assert_equal_gradients(page, ids, start)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head_size", [8, 13, 32, 64])
@pytest.mark.parametrize("n_tokens", [1, 2, 31, 128])
def test_gradients_equal_torchs_at_every_size(tmp_path, tied, head_size, n_tokens):
    model = random_gpt(
        1, 0.1, vocab_size=67, n_positions=131, n_embd=2 * head_size, n_head=2, n_layer=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    ids = torch.randint(67, (n_tokens + 1,), generator=torch.Generator().manual_seed(2)).tolist()
    assert_equal_gradients(in_node(tmp_path, model), ids, 0)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([TEXT], 300)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("shape", ["gpt2", "untied", "gpt1"])
def test_ten_steps_equal_the_librarys(tmp_path, tokenizer, shape, precision):
    model = random_gpt(0, 0.1, vocab_size=len(tokenizer), n_positions=48, **SHAPES[shape])
    page = in_node(tmp_path, model, precision, tokenizer)
    other = "the dog sat"
    questions = [
        {"text": LONG_TEXT, "steps": 10, "lr": 0.02, "other": other},
        {"text": LONG_TEXT, "steps": 3, "lr": 0.05, "other": other},
        {
            "text": LONG_TEXT,
            "steps": 1,
            "predict": "last",
            "train": "head",
            "position": 3,
            "top": 0,
        },
        {"text": LONG_TEXT, "steps": 2, "train": "head", "untied": True, "top": 20},
        {"text": LONG_TEXT, "steps": 2, "train": "blocks"},
        {"ids": [5, 7], "steps": 0},
    ]
    answers = page.ask(*(("/inspect/learn", body) for body in questions))
    for body, answer in zip(questions, answers, strict=True):
        options = {name: value for name, value in body.items() if name not in ("text", "ids")}
        text = body.get("text", body.get("ids"))
        expected = json.loads(inspect.learn(page.model, tokenizer, text, **options).to_json())
        assert "error" not in answer, answer
        result = answer["data"]
        assert sorted(result["rows"]) == sorted(expected["rows"])  # equal changes may change places
        places = [result["rows"].index(row) for row in expected["rows"]]
        for name in ROWS:
            if result[name] is not None:
                result[name] = [[row[at] for at in places] for row in result[name]]
        result["rows"] = expected["rows"]
        for state, row in enumerate(expected["cosine"]):  # of parts that are all but 0: rounding
            for at, _ in enumerate(row):
                if min(expected["reading"][state][at], expected["predicting"][state][at]) < 1e-6:
                    row[at] = result["cosine"][state][at] = None
        close(result, expected, str(body))


def test_the_gradient_of_w_in_two_parts_equals_the_librarys(tmp_path, tokenizer):
    for tied in (True, False):
        model = random_gpt(0, vocab_size=len(tokenizer), n_positions=48, tie_word_embeddings=tied)
        page = in_node(tmp_path, model, "int8", tokenizer)
        (answer,) = page.ask(("/inspect/gradient_split", {"text": LONG_TEXT}))
        expected = json.loads(inspect.gradient_split(page.model, tokenizer, LONG_TEXT).to_json())
        del expected["residual"]  # a check of the library's
        close(answer["data"], expected, "gradient_split")


def test_learning_that_cannot_be_is_refused_and_leaves_the_model(tmp_path, tokenizer):
    model = random_gpt(0, vocab_size=len(tokenizer), n_positions=48)
    page = in_node(tmp_path, model, "int8", tokenizer)
    requests = [
        ({"ids": [5]}, "nothing to predict"),
        ({"ids": [0] * 49}, "up to 48 tokens"),
        ({"ids": [1, 2], "lr": 0}, "lr must be positive"),
        ({"ids": [1, 2], "position": 2}, "position must be from 0 to 1"),
    ]
    before, *answers, diverged, after = page.ask(
        ("/inspect/positions", {"text": LONG_TEXT}),
        *(("/inspect/learn", body) for body, _ in requests),
        ("/inspect/learn", {"text": LONG_TEXT, "lr": 1e30, "steps": 4}),
        ("/inspect/positions", {"text": LONG_TEXT}),
    )
    for (_, message), answer in zip(requests, answers, strict=True):
        assert message in answer["error"]
    result = diverged["data"]
    assert result["diverged"] and result["try_lr"] == 0.1
    assert len(result["loss"]) < 5 and all(map(math.isfinite, result["loss"]))
    assert before["data"] == after["data"]


def test_a_model_that_is_too_large_to_copy_is_refused(tmp_path):
    model = random_gpt(0)
    page = InNode(tmp_path, model)
    info = INFO | {"parameters": 60_000_000}
    from tiedgpt.serve.page_model import pack_model, page_tensors

    tensors = page_tensors(model, "fp32")
    page.path.write_bytes(pack_model(tensors, model, None, None, info=info, counts=COUNTS))
    (answer,) = page.ask(("/inspect/learn", {"ids": [1, 2, 3]}))
    assert "tiedgpt inspect learn" in answer["error"]
