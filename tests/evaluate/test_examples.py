"""Multiple choice and cloze."""

import json
from dataclasses import replace

import pytest
import torch

from tests.models import TEXT, opinionated
from tiedgpt import GPT, Tokenizer
from tiedgpt.data import documents
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.evaluate.examples import (
    ChoiceExample,
    ExampleScore,
    ExamplesScore,
    read_examples,
    score_examples,
)
from tiedgpt.infer import Engine
from tiedgpt.infer.prompts import split_choices


def continuation(directory, engine, context, text):
    """The logprob of a text after a context, and whether it is greedy, by the plain model."""
    model = GPT.from_pretrained(directory).eval()
    ids, n = engine.tokenizer.encode(context + text), len(engine.tokenizer.encode(context))
    with torch.no_grad():
        table = model(torch.tensor([ids]))[0, n - 1 : -1].log_softmax(-1)
    targets = torch.tensor(ids[n:])
    return float(table.gather(1, targets[:, None]).sum()), bool((table.argmax(1) == targets).all())


def test_choices_are_scored_as_the_model_scores_them(directory, engine):
    example = ChoiceExample("the dog", (" ate the hat", " sat", " on the mat"), 1)
    (score,) = score_examples(engine, [example])
    expected = [continuation(directory, engine, "the dog", choice) for choice in example.choices]
    assert score.logprobs == pytest.approx([logprob for logprob, _ in expected], abs=1e-4)
    assert score.is_greedy == [greedy for _, greedy in expected]
    assert score.lengths == [12, 4, 11] and not score.is_cut
    assert score.chosen == max(range(3), key=[logprob for logprob, _ in expected].__getitem__)
    by_length = replace(score, logprobs=[-2.0, -3.0, -9.0], lengths=[1, 2, 3])  # -1.5 is highest
    assert (by_length.chosen, by_length.chosen_by_length) == (0, 1)


def test_examples_are_counted_by_the_likeliest_choice_and_by_length():
    rows = [([-2.0, -3.0, -9.0], [1, 2, 3], 1), ([-4.0, -1.0], [2, 0], 1), ([-1.0], [1], 0)]
    scores = [ExampleScore(*row[:2], [True], row[2], n == 0) for n, row in enumerate(rows)]
    told = ExamplesScore(scores[:2]).to_json()
    assert told == {
        "accuracy": 0.5, "examples": 2, "answer_nats": 2, "contexts_cut": 1,
        "accuracy_interval": pytest.approx((0.09453, 0.90547), abs=1e-5),  # Wilson's for 1 of 2
        "accuracy_by_length_interval": pytest.approx((0.34238, 1), abs=1e-5),  # and for 2 of 2
        "accuracy_by_length": 1, "chance": pytest.approx(5 / 12),
    }  # fmt: skip
    assert ExamplesScore(scores).n_right == 2 and not ExamplesScore(scores).is_cloze
    assert ExamplesScore(scores[2:]).is_cloze


def test_a_cloze_is_right_if_greedy_decoding_writes_it(engine):
    context = "the cat sat on the"
    written = engine.generate(context, max_new_tokens=2, temperature=0).text
    other = " mat. the" if written != " mat. the" else " hat"
    examples = [ChoiceExample(context, (text,)) for text in (written, other)]
    result = ExamplesScore(list(score_examples(engine, examples)))
    assert result.n_right == 1
    assert result.accuracy == 0.5
    assert "chance" not in result.to_json()


def test_a_long_context_is_cut_on_the_left(engine):
    fits, longer = [3] * 48, [3] * 49
    text = engine.tokenizer.decode(fits)
    assert len(engine.tokenizer.encode(text)) == 48
    examples = [ChoiceExample(engine.tokenizer.decode(ids), ("!",)) for ids in (fits, longer)]
    assert [score.is_cut for score in score_examples(engine, examples)] == [False, True]


CHINESE = "\u732b\u5728\u5df4\u9ece\u7684\u57ce\u91cc" * 9
"""Without blanks: its tokens are characters, parts and rows of them."""


@pytest.fixture(scope="module")
def chinese():
    tokenizer = Tokenizer.train([CHINESE, TEXT], 300)
    with Engine(opinionated(tokenizer), tokenizer=tokenizer) as engine:
        yield engine


def test_every_letter_of_a_choice_is_scored_if_a_token_spans_the_context(chinese):
    encode, spell = chinese.tokenizer.encode, chinese.tokenizer.token_bytes
    n_spanning = 0
    for cut in range(1, 12):
        context = CHINESE[:cut]
        choices = (CHINESE[cut:14], CHINESE[cut : cut + 1], CHINESE[3:6])
        config = chinese.runner.config
        rows, n = split_choices(choices, context, config, chinese.tokenizer)
        n_spanning += rows[0][:n] != encode(context)
        (score,) = score_examples(chinese, [ChoiceExample(context, choices)])
        for choice, row, logprob in zip(choices, rows, score.logprobs, strict=True):
            assert row[:n] == rows[0][:n]
            assert b"".join(map(spell, row[n:])).endswith(choice.encode())
            whole = encode(context + choice)
            assert row in (whole, [config.eos_token_id, *whole])
            expected = sum(chinese.score(row).logprobs[n - 1 :])
            assert logprob == pytest.approx(expected, abs=1e-3)
    assert n_spanning >= 3


def test_choices_are_divided_as_in_the_harness_if_no_token_spans_both(chinese):
    encode = chinese.tokenizer.encode
    for context, choices in (("the cat", (" sat", "  on")), ("the cat  ", ("sat", "the"))):
        rows, n = split_choices(choices, context, chinese.runner.config, chinese.tokenizer)
        assert rows[0][:n] == encode(context.rstrip())
        assert rows == [encode(context + choice) for choice in choices]


def test_an_unscorable_example_is_refused_before_scoring(engine, tmp_path, monkeypatch):
    long = engine.tokenizer.decode([3] * 60)
    lines = [{"context": "the", "completion": text} for text in (" cat", long)]
    examples = read(write(tmp_path / "a.jsonl", lines))
    monkeypatch.setattr(engine, "score", None)
    with pytest.raises(UserError, match=r"a\.jsonl:2: a choice has \d+ tokens"):
        next(score_examples(engine, examples))


def test_an_empty_context_is_the_start_token(directory, engine):
    config = engine.runner.config
    (score,) = score_examples(engine, [ChoiceExample("", ("the cat",))])
    ids = [config.bos_token_id, *engine.tokenizer.encode("the cat")]
    assert score.logprobs[0] == pytest.approx(engine.score(ids).total, abs=1e-5)
    model = GPT.from_pretrained(directory)
    model.config = replace(config, bos_token_id=None, eos_token_id=None)
    with Engine(model, tokenizer=engine.tokenizer) as other:
        with pytest.raises(UserError, match="no token that texts begin with"):
            list(score_examples(other, [ChoiceExample("", ("the cat",))]))


def read(path, notes=()):
    corpus = documents([str(path)])
    examples = read_examples(corpus)
    assert corpus.remarks.notes() == [*notes]
    return examples


def write(path, lines):
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_files_of_each_kind_are_read(tmp_path):
    path, unread = tmp_path / "a.jsonl", ["1 field was not read: id (1 line)"]
    choice = {"id": 3, "question": "q", "choices": ["a", "b"], "answer": 1}
    assert read(write(path, [choice]), unread) == [ChoiceExample("q", ("a", "b"), 1)]
    cloze = {"prompt": "p", "completion": "c"}
    assert read(write(path, [cloze, cloze | {"id": 3}]), unread) == [ChoiceExample("p", ("c",))] * 2
    assert read(write(path, [{"text": "t"}])) == ["t"]
    path.write_text('\n{"text": "t"}\n\n')
    assert read(path) == ["t"]


CHOICES = {"context": "c", "choices": ["a", "b"], "answer": 0}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([CHOICES, {"text": "t"}], r"a\.jsonl:2: a text after a multiple choice"),
        ([CHOICES, CHOICES | {"answer": 2}], r"a\.jsonl:2: `answer` must be from 0 to 1, got 2"),
        ([{"context": "c", "choices": ["a", "b"]}], r"a\.jsonl:1: needs `answer`, the index of"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "as `context` and .* `completion`"),
        ([CHOICES | {"answer": True}], "`answer` must be"),
        ([CHOICES | {"choices": ["a"]}], "at least two"),
        ([CHOICES | {"choices": ["a", ""]}], "not empty"),
        ([{"context": 3, "completion": "x"}], "`context` must be a text, got 3"),
        ([{"context": "c", "completion": ""}], "`completion` must be a text"),
        ([{"context": "c"}], "needs `completion`, or `choices`"),
        ([{"answer": 1}], "no `text`"),
        ([[1]], "got a JSON list"),
        ([], "no example"),
    ],
)
def test_bad_lines_are_named(tmp_path, lines, said):
    with pytest.raises(CorruptInputError, match=said):
        read(write(tmp_path / "a.jsonl", lines))
