import json
import re
import sys

import numpy as np
import pytest
import torch
from tokenizers import models

from tests.infer.conftest import beams
from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.errors import UserError
from tiedgpt.infer import Engine
from tiedgpt.infer.constraints import matcher_for
from tiedgpt.text.bpe import BYTE_ALPHABET, byte_level_tokenizer
from tiedgpt.text.gpt1 import lower_case_tokenizer
from tiedgpt.text.pieces import bert_tokenizer

TEXT = '{"name": "the cat", "age": 12, "tags": ["naïve", "café"]} the dog sat on 2026-01-31. '
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 3, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SUMS = r"""
start: term ("+" term)*
term: NUMBER | "(" start ")"
NUMBER: /[0-9]{1,3}/
"""


@pytest.fixture(scope="module", params=["bpe", "characters"])
def tokenizer(request):
    return (
        Tokenizer.train([TEXT * 3], 320)
        if request.param == "bpe"
        else Tokenizer.characters([TEXT, "abcdefghijklmnopqrstuvwxyz0123456789+-()\\"])
    )


def engine_for(tokenizer, **config):
    """An engine of a random GPT, with rows to spare that stand for no token."""
    torch.manual_seed(0)
    values = {"eos_token_id": tokenizer.eos_token_id, **config}
    model = GPT(
        GPTConfig(
            vocab_size=len(tokenizer) + 13, n_positions=256, n_embd=16, n_layer=1, n_head=2,
            **values,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        model.wte.weight.mul_(10)
    return Engine(model, tokenizer=tokenizer)


def constrained(engine, **constraint):
    return matcher_for(constraint, engine.tokenizer, engine.model.config)


def texts(tokenizer, n, **options):
    """n texts; None for each that has no end."""
    options = {"seed": 0, "max_new_tokens": 240, "n": n} | options
    completions = engine_for(tokenizer).generate([1, 2], **options)
    return [one.text if one.finish_reason == "stop" else None for one in completions]


@pytest.mark.parametrize(
    "regex",
    [
        r"(cat|dog){1,3}",
        r"\d{4}-\d{2}-\d{2}",
        r"[a-z]{2,5}( [a-z]{2,5}){0,2}\.",
        r"na(ï|i)ve|café",
        r"a(Z|b)c?|Zed",  # the characters at hand have no Z
        r"(the )?(cat|dog)?",
        r"[^a]b",
        r"^[\d/]{3}$",
        r"(?i:ab)\w? ?",
        r"",
    ],
)
def test_text_matches_its_regular_expression(tokenizer, regex):
    written = texts(tokenizer, 8, regex=regex)
    assert all(text is not None and re.fullmatch(regex, text) for text in written), written
    assert len(set(written)) > 1 or not regex


def test_text_is_valid_under_its_json_schema(tokenizer):
    for text in texts(tokenizer, 8, json_schema=PERSON):
        person = json.loads(text)
        assert list(person) == ["name", "age", "tags"]
        assert isinstance(person["name"], str)
        assert len(person["name"]) <= 8
        assert type(person["age"]) is int
        assert 3 <= person["age"] <= 120
        assert 1 <= len(person["tags"]) <= 3
        assert set(person["tags"]) <= {"a", "b"}


def test_a_schema_may_be_json_text(tokenizer):
    written = texts(tokenizer, 12, json_schema='{"type": "boolean"}', temperature=5.0)
    assert {*written} == {"true", "false"}


def test_text_follows_its_grammar(tokenizer):
    written = [text for text in texts(tokenizer, 12, grammar=SUMS, max_new_tokens=118) if text]
    assert len(written) > 5
    for text in written:
        assert re.fullmatch(r"[0-9+()]+", text)
        while "(" in text:
            text, n = re.subn(r"\(([0-9]{1,3}(\+[0-9]{1,3})*)\)", "1", text)
            assert n
        assert re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3})*", text)


def test_beams_meet_their_constraint(tokenizer):
    engine = engine_for(tokenizer)
    matcher = constrained(engine, regex="(cat|dog|the){2}[.,]?")
    written = beams(engine.runner, [1, 2], num_beams=4, max_new_tokens=20, processors=[matcher])
    written = {tokenizer.decode(hypothesis.ids[:-1]) for hypothesis in written}
    assert len(written) == 4
    assert all(re.fullmatch("(cat|dog|the){2}[.,]?", text) for text in written)


def test_one_matcher_serves_texts_in_any_order(tokenizer):
    engine = engine_for(tokenizer)
    regex = "(cat|dog) [0-9]+"
    logits = np.zeros(engine.model.config.vocab_size, np.float32)
    texts = ["dog 1", "", "cat 22", "cat", "dog 12", "dog 1", "c", "cat 2"]
    shared = constrained(engine, regex=regex)
    for text in texts:
        ids = [1, 2, *tokenizer.encode(text)]
        alone = constrained(engine, regex=regex)(ids, 2, logits)
        np.testing.assert_array_equal(shared(ids, 2, logits), alone)
        assert np.isfinite(alone[tokenizer.eos_token_id]) == bool(re.fullmatch(regex, text))


def test_allowed_tokens_keep_the_models_scores(tokenizer):
    engine = engine_for(tokenizer)
    logits = np.random.default_rng(0).normal(size=engine.model.config.vocab_size)
    logits = logits.astype(np.float32)
    scores = constrained(engine, regex="[a-c]x")([1, 2], 2, logits)
    kept = np.flatnonzero(np.isfinite(scores)).tolist()
    assert {tokenizer.decode([token]) for token in kept} == {"a", "b", "c"}
    np.testing.assert_array_equal(scores[kept], logits[kept])


def test_after_a_dead_end_a_matcher_serves_the_next_text():
    tokenizer = Tokenizer.characters(["abc"])
    engine = engine_for(tokenizer)
    matcher = constrained(engine, grammar='start: "a" "Z" | "b" "c"')
    logits = np.zeros(engine.model.config.vocab_size, np.float32)
    with pytest.raises(UserError, match="no token of the vocabulary"):
        matcher(tokenizer.encode("a"), 0, logits)
    assert np.isfinite(matcher(tokenizer.encode("b"), 0, logits)).sum() == 1
    with pytest.raises(UserError, match="forbids it"):
        matcher(tokenizer.encode("cc"), 0, logits)


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "(cat"},
        {"regex": r"(a)\1"},
        {"regex": "(?=a)b"},
        {"json_schema": "{"},
        {"json_schema": "[1]"},
        {"json_schema": {"type": "horse"}},
        {"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}},
        {"grammar": 'start: "a" rest'},
        {"grammar": ""},
        {"grammar": b"start: A"},
        {"regex": re.compile("a+")},
        {"regex": "\ud800"},
        {"json_schema": {"const": b"bytes"}},
    ],
    ids=str,
)
def test_unsatisfiable_constraints_are_refused_at_once(tokenizer, constraint):
    with pytest.raises(UserError, match=next(iter(constraint))):
        engine_for(tokenizer).generate("a", **constraint)


def test_text_outside_the_character_vocabulary_is_refused():
    tokenizer = Tokenizer.characters(["abc"])
    with pytest.raises(UserError, match="regex cannot be met"):
        engine_for(tokenizer).generate("a", regex="abZ")
    with pytest.raises(UserError, match="no token of the vocabulary"):
        engine_for(tokenizer).generate("a", grammar='start: "a" ("Z" | "Y")')


def test_a_model_that_ends_no_text_is_refused():
    tokenizer = Tokenizer.characters(["abc"])
    with pytest.raises(UserError, match="ends the text"):
        engine_for(tokenizer, eos_token_id=None).generate("a", regex="a")


def test_without_the_library_the_extra_is_named(monkeypatch):
    engine = engine_for(Tokenizer.characters(["abc"]))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match=r"tiedgpt\[constrain\]"):
        engine.generate("a", regex="a")


def test_word_tokenizers_that_drop_blanks_are_refused():
    vocabulary = {"<unk>": 0, "a": 1, "a</w>": 2}
    gpt1 = models.BPE(vocabulary, [], unk_token="<unk>", end_of_word_suffix="</w>")
    wordpiece = models.WordPiece({"[UNK]": 0, "a": 1, "##a": 2}, unk_token="[UNK]")
    for rust in (lower_case_tokenizer(gpt1), bert_tokenizer(wordpiece)):
        tokenizer = Tokenizer(rust)
        with pytest.raises(UserError, match=tokenizer.kind):
            engine_for(tokenizer, eos_token_id=0).generate("a", regex="a")


def test_a_tokenizer_that_puts_a_blank_first_puts_none_into_forced_text():
    alphabet = {letter: id for id, letter in enumerate(BYTE_ALPHABET)}
    merged = models.BPE(alphabet | {"do": 256, "Ġdo": 257}, [("d", "o"), ("Ġ", "do")])
    rust = byte_level_tokenizer(merged, prefix_space=True)
    rust.add_special_tokens(["<|endoftext|>"])
    tokenizer = Tokenizer(rust)
    assert tokenizer.decode(tokenizer.encode("dog")) == " dog"
    assert {*texts(tokenizer, 6, regex="dog(gy)? do")} <= {"dog do", "doggy do"}
