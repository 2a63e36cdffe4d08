"""The model in a page's file, in Node: its numbers are the library's on the same weights."""

import atexit
import functools
import json
import os
import random
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tiedgpt
from tests.models import TEXT, opinionated, random_gpt
from tests.serve.page_run import HOSTILE
from tiedgpt import Tokenizer, inspect
from tiedgpt.data.templates import TEMPLATES, encode_pieces
from tiedgpt.errors import UserError
from tiedgpt.serve.page_model import pack_model, page_tensors, round_weights

NODE = shutil.which("node")
MODULES = Path(tiedgpt.__file__).parent / "serve" / "page" / "model"
needs_node = pytest.mark.skipif(NODE is None, reason="node is not there")
INFO = {"matrices": [{"name": "wte.weight", "does": "reads and predicts"}], "tied": True}
COUNTS = {"count": None, "counted_in": None, "matrices": [{}, {}]}
SAID = "the cat sat on the mat. the dog ate the hat"
PARTS = [
    "I'll", "we've", "don't", "'S", "’s", " ", "  ", "\n", "\n\n", "\t", " \n ", "\r\n",
    "the", " cat", "Straße", "naïve", "ﬁ", "ÀÉ", "123", " 4567", "½", "٣", "Ⅷ", "!", "...",
    " --", "😀", "👩‍👩‍👧‍👦", "🇩🇪", "❤️", "中文", "漢字かな", "한국어", "русский", "עברית",
    "العربية", "हिन्दी", "ไทย", "\u00a0", "\u0085", "\u2003", "\u3000", "\ufeff", "\u200b",
    "\u180e", "\u2028", "\x00", "\x1c", "\x7f", "\ufffd", "𝒳", " <|endoftext|>", "a_b", "$",
    "e\u0301", "\u00ad", "\\", '"q"', "x'", "''", "l'été", *HOSTILE,
]  # fmt: skip
"""Texts on which tokenizers differ: contractions, blanks, emoji, control characters."""


def strings(n=500):
    """The parts, then mixes of them: n in all."""
    draw = random.Random(0)
    mixes = ("".join(draw.choices(PARTS, k=draw.randint(2, 12))) for _ in range(n - len(PARTS)))
    return [*PARTS, *mixes]


@functools.cache
def node(script):
    """Return a process of Node that answers lines by a script, and the file of its errors."""
    errors = tempfile.TemporaryFile("w+")
    command = [NODE, "--no-warnings", str(Path(__file__).with_name(script)), str(MODULES)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
    process = subprocess.Popen(command, text=True, **pipes)
    atexit.register(errors.close)
    atexit.register(process.communicate)  # comes first
    return process, errors


def ask(script, question):
    """Return the answer of a script in Node to a question; both are values of JSON."""
    process, errors = node(script)
    print(json.dumps(question), file=process.stdin, flush=True)
    answer = process.stdout.readline()
    errors.seek(0)
    said = errors.read()
    if said or not answer:
        node.cache_clear()  # the next question has a new process
    assert answer and not said, said
    return json.loads(answer)


class InNode:
    """A model as the page opens it, and the library's model with the same weights."""

    def __init__(self, folder, model, tokenizer=None, template=None, precision="int8", info=INFO):
        tensors = page_tensors(model, precision)
        self.model, self.path = round_weights(model, tensors), folder / "model"
        info = info | {"parameters": sum(p.numel() for p in model.parameters())}
        data = pack_model(tensors, model, tokenizer, template, info=info, counts=COUNTS)
        self.path.write_bytes(data)

    def ask(self, *questions):
        """The answers to (path, body), in order."""
        asked = [{"path": path, "body": body} for path, body in questions]
        return ask("model_in_node.mjs", {"bytes": str(self.path), "questions": asked})

    def logits(self, texts):
        """The logits (V,) after each text of ids: |h| |e| cos of every row."""
        for answer in self.ask(*(("/inspect/dot", {"ids": ids, "top": 1}) for ids in texts)):
            found = answer["data"]
            yield found["h_norm"] * np.multiply(found["all_norm"], found["all_cos"])


def small(tokenizer=None, **options):
    """Return a model with large weights, so that its predictions are confident."""
    shape = {"vocab_size": 261 if tokenizer is None else len(tokenizer), "n_layer": 2}
    return random_gpt(0, **{**shape, "n_positions": 48, **options})


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([TEXT], 300).with_special_tokens(HOSTILE)


SHAPES = {
    "gpt2": {},
    "untied": {"tie_word_embeddings": False},
    "gpt1": {"norm": "post"},
    "gpt3": {"attention_windows": (0, 4)},
    "nanogpt": {"bias": False, "activation_function": "gelu"},
    "relu": {"activation_function": "relu", "n_inner": 40},
    "silu": {"activation_function": "silu", "vocab_size": 3},
}


@needs_node
@pytest.mark.parametrize(
    ("shape", "precision"),
    [*((shape, "int8") for shape in SHAPES), ("gpt2", "fp32"), ("gpt2", "fp16")],
)
def test_logits_equal_the_librarys_on_the_same_weights(tmp_path, shape, precision):
    model = small(**SHAPES[shape])
    info = INFO | {"tied": model.head is None, "matrices": [INFO["matrices"][0]] * 2}
    page = InNode(tmp_path, model, precision=precision, info=info)
    draw = np.random.default_rng(0)
    size = model.config.vocab_size
    texts = [draw.integers(0, size, draw.integers(1, 49)).tolist() for _ in range(100)]
    for ids, logits in zip(texts, page.logits(texts), strict=True):
        with torch.no_grad():
            expected = page.model(torch.tensor([ids]))[0, -1].double().numpy()
        assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


def close(ours, theirs, place=""):
    """Whether an answer has all that the library's has, and the same numbers."""
    if isinstance(theirs, dict):
        for name, value in theirs.items():
            assert name in ours, f"{place}.{name}"
            close(ours[name], value, f"{place}.{name}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), place
        for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            close(one, other, f"{place}[{at}]")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=2e-5), place
    else:
        assert ours == theirs, place


@needs_node
@pytest.mark.parametrize("shape", ["gpt2", "untied", "gpt1"])
def test_inspections_equal_the_librarys(tmp_path, tokenizer, shape):
    model = small(tokenizer, **SHAPES[shape])
    from tiedgpt.inspect.vocab_matrices import vocab_matrices

    matrices = [{"name": matrix.name, "does": matrix.does} for matrix in vocab_matrices(model)]
    info = {"matrices": matrices, "tied": len(matrices) == 1}
    page = InNode(tmp_path, model, tokenizer, info=info)
    text = SAID + HOSTILE[0] + " é"
    questions = [
        ("positions", {"text": text, "top": 10}),
        ("positions", {"text": text, "top": 1, "replace_at": 3, "replace_with": 7}),
        ("positions", {"text": text, "top": 1, "replace_at": 3, "replace_with": "a"}),
        ("positions", {"ids": [5], "top": 2}),
        ("lens", {"text": text, "top": 5, "position": 2}),
        ("dot", {"text": text, "position": 4, "top": 10}),
        ("attention", {"text": text, "layer": 1}),
        ("attention", {"ids": [5], "layer": 0}),
        ("ablate", {"text": text}),
        ("ablate", {"text": text, "mode": "mean"}),
        ("neighbours", {"token": 70, "top": 10}),
        ("patch", {"text": SAID, "corrupted": SAID.replace("cat", "dog"), "answer": 7}),
        ("patch", {"text": SAID, "corrupted": SAID.replace("cat", "dog"), "answer": 7, "wrong": 9}),
    ]
    answers = page.ask(*((f"/inspect/{name}", body) for name, body in questions))
    for (name, body), answer in zip(questions, answers, strict=True):
        options = {"text": body.get("ids", body.get("text"))} if "token" not in body else {}
        options |= {key: value for key, value in body.items() if key not in ("ids", "text")}
        expected = json.loads(getattr(inspect, name)(page.model, tokenizer, **options).to_json())
        assert "error" not in answer, answer
        for part in ("attention", "mlp", "heads") if name == "patch" else ():
            del expected[part]  # a file replaces the states alone
        close(answer["data"], expected, name)


@needs_node
def test_a_later_token_changes_no_earlier_prediction_not_by_one_bit(tmp_path):
    page = InNode(tmp_path, small())
    (answer,) = page.ask(("/inspect/positions", {"ids": [*range(20)], "replace_at": 11}))
    changes = answer["data"]["max_abs_change"]
    assert changes[:11] == [0] * 11 and min(changes[11:]) > 0


@needs_node
def test_rows_and_a_random_head(tmp_path, tokenizer):
    page = InNode(tmp_path, small(tokenizer), tokenizer)
    rows, random_head = page.ask(
        ("/inspect/vocabulary", {}), ("/inspect/random_head", {"text": SAID, "seed": 1})
    )
    expected = inspect.vocabulary(page.model, tokenizer, own_rank_rows=0)
    (matrix,) = rows["data"]["matrices"]
    for name in ("norm", "centred_norm", "prior_logit"):
        theirs = getattr(expected.matrices[0], name).tolist()
        assert matrix[name] == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert rows["data"]["reachable"] == expected.reachable.tolist()
    assert rows["data"]["fragment"] == expected.fragment.tolist()
    found, theirs = random_head["data"], inspect.random_head(page.model, tokenizer, SAID)
    assert found["loss"] == pytest.approx(theirs.loss, rel=1e-4)
    assert found["random_parameters"] == theirs.random_parameters
    assert abs(found["random_loss"] - found["uniform_loss"]) < 0.2


@needs_node
@pytest.mark.parametrize("kind", ["bpe", "char", "gpt1"])
def test_ids_equal_the_tokenizers(tmp_path, tokenizer, kind, gpt1_tokenizer):
    texts = strings()
    characters = Tokenizer.characters(texts)
    tokenizer = {"bpe": tokenizer, "gpt1": gpt1_tokenizer, "char": characters}[kind]
    page = InNode(tmp_path, small(tokenizer), tokenizer)
    found = page.ask(*(("/tokenize", {"prompt": text}) for text in texts))
    ids = [answer["data"]["tokens"] for answer in found]
    assert ids == tokenizer.encode_batch(texts)
    decoded = page.ask(*(("/detokenize", {"tokens": some}) for some in ids))
    found = [answer["data"]["prompt"] for answer in decoded]
    assert found == [tokenizer.decode(some) for some in ids]


@pytest.fixture(scope="module")
def gpt1_tokenizer():
    import tokenizers
    from tokenizers import models

    from tiedgpt.text.gpt1 import lower_case_tokenizer

    letters = [chr(c) for c in range(33, 127) if not chr(c).isupper()]
    tokens = ["<unk>", *letters, *(f"{c}</w>" for c in letters), "th", "the</w>", "ca", "cat</w>"]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    merges = [("t", "h"), ("th", "e</w>"), ("c", "a"), ("ca", "t</w>")]
    options = {"unk_token": "<unk>", "end_of_word_suffix": "</w>"}
    rust = lower_case_tokenizer(models.BPE(vocabulary, merges, **options))
    assert isinstance(rust, tokenizers.Tokenizer)
    return Tokenizer(rust)


@needs_node
def test_greedy_texts_equal_the_librarys(tmp_path, tokenizer):
    page = InNode(tmp_path, opinionated(tokenizer, 128), tokenizer)
    body = {"prompt": "the cat", "max_tokens": 50, "temperature": 0, "logprobs": 2}
    long = body | {"prompt": "the " * 128}
    ours, refused = page.ask(("/v1/completions", body), ("/v1/completions", long))
    assert "fills the context" in refused["error"] or "at most 128" in refused["error"]
    with tiedgpt.infer.Engine(page.model, tokenizer=tokenizer) as engine:
        theirs = engine.generate("the cat", max_new_tokens=50, temperature=0, top_logprobs=2)
    events = [event["choices"][0] for event in ours["events"]]
    columns = [event["logprobs"] for event in events if event["logprobs"]]
    assert [column["token_ids"][0] for column in columns] == theirs.ids
    assert "".join(event["text"] for event in events) == theirs.text
    assert events[-1]["finish_reason"] == theirs.finish_reason
    logprobs = [column["token_logprobs"][0] for column in columns]
    assert logprobs == pytest.approx(theirs.logprobs, rel=1e-3, abs=1e-4)
    likeliest = [column["top_token_ids"][0][0] for column in columns]
    assert likeliest == [top[0][0] for top in theirs.top_logprobs]


@needs_node
@pytest.mark.parametrize("xtc", [{}, {"xtc_probability": 0.6, "xtc_threshold": 0.02}], ids=str)
def test_draws_follow_the_filtered_distribution(tmp_path, xtc):
    page = InNode(tmp_path, small())
    body = {"prompt": [1, 2, 3], "max_tokens": 1, "logprobs": 0}
    options = {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.05, **xtc}
    answers = page.ask(*(("/v1/completions", body | options | {"seed": n}) for n in range(600)))
    ids = [answer["events"][0]["choices"][0]["logprobs"]["token_ids"][0] for answer in answers]
    from tiedgpt.infer.generation_config import GenerationConfig
    from tiedgpt.infer.sampling import SamplingInput, filter_logits

    with torch.no_grad():
        logits = page.model(torch.tensor([[1, 2, 3]]))[0, -1].numpy()
    config, expected = GenerationConfig(**options), np.zeros(len(logits))
    for xtc_uniform, share in ((0.0, config.xtc_probability), (1.0, 1 - config.xtc_probability)):
        uniforms = {"xtc_uniform": xtc_uniform}
        row = SamplingInput(config, logits, [], 0, len(logits), uniforms=uniforms)
        drawable = filter_logits(row, logits)
        p = np.exp(logits[drawable] / config.temperature)
        expected[drawable] += share * p / p.sum()
    assert set(ids) <= set(np.flatnonzero(expected))
    assert np.abs(np.bincount(ids, minlength=len(logits)) / len(ids) - expected).max() < 0.08


@needs_node
@pytest.mark.parametrize("n_skipped", [0, 1], ids=["its own system message", "the default"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_has_the_templates_ids(tmp_path, tokenizer, name, n_skipped):
    template = replace(TEMPLATES[name], default_system="the cat sat")
    with_tokens = tokenizer.with_special_tokens(template.tokens)
    page = InNode(tmp_path, small(with_tokens, n_positions=400), with_tokens, template)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " the cat <|im_end|>"},
        {"role": "assistant", "content": "sat"},
        {"role": "user", "content": "on <|endoftext|> what?"},
    ][n_skipped:]
    expected, _ = encode_pieces(template.prompt(messages), with_tokens)
    body = {"max_tokens": 3, "temperature": 0}
    chat, plain = page.ask(
        (
            "/v1/chat/completions",
            body | {"messages": messages, "logprobs": True, "top_logprobs": 2},
        ),
        ("/v1/completions", body | {"prompt": expected, "logprobs": 1}),
    )
    first = chat["events"][0]["choices"][0]["logprobs"]["content"][0]
    assert first["token_id"] == plain["events"][0]["choices"][0]["logprobs"]["token_ids"][0]
    assert first["logprob"] == plain["events"][0]["choices"][0]["logprobs"]["token_logprobs"][0]
    assert len(first["top_logprobs"]) == 2


@needs_node
@pytest.mark.skipif("TIEDGPT_GPT2_BPE" not in os.environ, reason="TIEDGPT_GPT2_BPE is not set")
def test_gpt2s_own_vocabulary(tmp_path):
    tokenizer = Tokenizer.from_pretrained(os.environ["TIEDGPT_GPT2_BPE"])
    page, texts = InNode(tmp_path, small(tokenizer, n_positions=64), tokenizer), strings()
    body = {"prompt": "The cat", "max_tokens": 50, "temperature": 0, "logprobs": 1}
    tokens = (("/tokenize", {"prompt": text}) for text in texts)
    written, *found = page.ask(("/v1/completions", body), *tokens)
    assert [answer["data"]["tokens"] for answer in found] == tokenizer.encode_batch(texts)
    choices = [event["choices"][0]["logprobs"] for event in written["events"]]
    ids = [choice["token_ids"][0] for choice in choices if choice]
    with tiedgpt.infer.Engine(page.model, tokenizer=tokenizer) as engine:
        assert ids == engine.generate("The cat", max_new_tokens=50, temperature=0).ids


@needs_node
def test_unreadable_texts_are_refused(tmp_path, tokenizer):
    page = InNode(tmp_path, small(tokenizer), tokenizer)
    for body, said in [
        ({"ids": []}, "empty"),
        ({"ids": [0] * 49}, "at most 48 tokens"),
        ({"ids": [len(tokenizer)]}, f"{len(tokenizer)} is not an id"),
        ({"ids": [1, -1]}, "-1 is not an id"),
        ({"ids": [1.5]}, "1.5 is not an id"),
        ({"ids": [1, 2], "replace_at": 2}, "from 0 to 1"),
        ({"ids": [1, 2], "replace_at": 1, "replace_with": "a dog"}, "one token"),
    ]:
        (answer,) = page.ask(("/inspect/positions", body))
        assert said in answer["error"]
    (answer,) = page.ask(("/inspect/nothing", {"text": SAID}))
    assert "tiedgpt serve" in answer["error"]


def test_rows_are_rounded_to_within_half_a_step():
    model = small()
    tensors = page_tensors(model, "int8")
    assert tensors["wte.weight"].dtype == np.int8 and "head.weight" not in tensors
    scale = tensors["wte.weight.scale"]
    apart = (round_weights(model, tensors).wte.weight - model.wte.weight).abs().detach().numpy()
    assert (apart <= 0.51 * scale[:, None]).all()
    assert tensors["ln_f.weight"].dtype == np.float32


def test_a_model_that_is_not_plain_is_refused():
    model = small()
    with torch.no_grad():
        model.wte.weight[3, 1] = float("nan")
    with pytest.raises(UserError, match=r"wte\.weight.*nan"):
        page_tensors(model, "int8")
    model = small()
    model.head = torch.nn.Sequential(torch.nn.Linear(32, 261))
    with pytest.raises(UserError, match="head"):
        page_tensors(model, "int8")


def test_a_tokenizer_that_works_otherwise_is_refused(tokenizer):
    import tokenizers

    def pack(state, *added):
        rust = tokenizers.Tokenizer.from_str(json.dumps(state))
        rust.add_tokens([*added])
        model = small(Tokenizer(rust))
        pack_model(page_tensors(model, "int8"), model, Tokenizer(rust), None)

    state = json.loads(tokenizer.to_json())
    with pytest.raises(UserError, match="cat sat"):
        pack(state, "cat sat")
    state["model"]["unk_token"] = "a"
    pack(state)  # every byte has a token, so none is unknown
    state["model"]["vocab"]["zz"] = state["model"]["vocab"].pop("ÿ")
    with pytest.raises(UserError, match="unk_token"):
        pack(state)
