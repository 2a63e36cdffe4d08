"""lm-evaluation-harness through our adapter and through its own transformers model."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.models import random_gpt
from tiedgpt import GPT
from tiedgpt.cli.main import main

pytestmark = pytest.mark.slow  # lm_eval takes seconds to be imported
DOCUMENTS = 100
WORDS = "the cat sat on the mat and the dog ate the hat while a bird sang".split()


def text(number, length):
    return " ".join(
        WORDS[(number * 7 + at * (1 + number % 5)) % len(WORDS)] for at in range(length)
    )


def tasks(datasets):
    """Three types of task, on data made here."""
    import lm_eval.api.task

    def task(name, output_type, rows, **config):
        made = datasets.Dataset.from_list(rows)

        def load(**_):
            return datasets.DatasetDict({"test": made})

        fields = {"task": name, "custom_dataset": load, "test_split": "test"} | config
        fields["output_type"] = output_type
        return lm_eval.api.task.ConfigurableTask(config=fields)

    numbers = range(DOCUMENTS)
    choices = [
        {
            "q": text(n, 5 + n % 20),
            "c": [" " + text(n + 1 + k, 1 + (n + k) % 4) for k in range(4)],
            "a": n % 4,
        }
        for n in numbers
    ]
    cloze = [{"q": text(n, 3 + n % 11), "a": " " + WORDS[n % len(WORDS)]} for n in numbers]
    rolling = [{"t": text(n, 5 + n)} for n in numbers]
    return [
        task("choices", "multiple_choice", choices, doc_to_text="{{q}}", doc_to_choice="{{c}}",
             doc_to_target="{{a}}", target_delimiter="", metric_list=[{"metric": "acc"}]),
        task("cloze", "loglikelihood", cloze, doc_to_text="{{q}}", doc_to_target="{{a}}",
             target_delimiter="", metric_list=[{"metric": "acc"}, {"metric": "perplexity"}]),
        task("rolling", "loglikelihood_rolling", rolling, doc_to_text="", doc_to_target="{{t}}",
             metric_list=[{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]),
        task("written", "generate_until", cloze[:10], doc_to_text="{{q}}", doc_to_target="{{a}}",
             target_delimiter="", metric_list=[{"metric": "exact_match"}],
             generation_kwargs={"until": ["\n"], "max_gen_toks": 8}),
    ]  # fmt: skip


def test_both_models_of_the_harness_agree(directory, engine):
    lm_eval = pytest.importorskip("lm_eval")
    datasets = pytest.importorskip("datasets")
    from lm_eval.models.huggingface import HFLM

    from tiedgpt.evaluate.harness import HarnessModel

    def run(model):
        return lm_eval.simple_evaluate(model, tasks=tasks(datasets), bootstrap_iters=0)

    # their cache confuses windows that hold the same ids and score different numbers of them
    theirs = run(HFLM(pretrained=str(directory), device="cpu", batch_size=8, logits_cache=False))
    ours = run(HarnessModel(engine))
    assert set(ours["results"]) == {"choices", "cloze", "rolling", "written"}
    for name, values in theirs["results"].items():
        for metric, value in values.items():
            if isinstance(value, float):
                exact = metric.startswith(("acc", "exact"))
                expected = value if exact else pytest.approx(value, rel=1e-5)
                assert ours["results"][name][metric] == expected, (name, metric)
        pairs = zip(ours["samples"][name], theirs["samples"][name], strict=True)
        for mine, other in pairs:
            assert mine["doc"] == other["doc"]
            for (a,), (b,) in zip(mine["resps"], other["resps"], strict=True):
                if name == "written":
                    assert a == b
                elif name == "rolling":
                    assert a == pytest.approx(b, abs=1e-4)
                else:
                    assert a[0] == pytest.approx(b[0], abs=1e-4)
                    assert a[1] == b[1]


@pytest.mark.parametrize(("end", "expected"), [(5, 5), (None, 3)])
def test_texts_end_with_the_models_end_or_else_its_beginning(directory, engine, end, expected):
    pytest.importorskip("lm_eval")
    from tiedgpt.evaluate.harness import HarnessModel

    model = GPT.from_pretrained(directory)
    model.config = replace(model.config, bos_token_id=3, eos_token_id=end)
    ours = HarnessModel(model, tokenizer=engine.tokenizer)
    assert (ours.prefix_token_id, ours.eot_token_id) == (3, expected)


def test_more_tokens_than_the_context_holds_follow_its_last_token(engine, monkeypatch):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from tiedgpt.evaluate.harness import HarnessModel

    request = Instance("generate_until", {}, ("the cat", {"max_gen_toks": 60, "until": "x"}), 0)
    last = engine.tokenizer.encode("the cat")[-1:]
    expected = engine.generate(last, max_new_tokens=47, temperature=0, stop="x").text
    assert HarnessModel(engine).generate_until([request]) == [expected]
    model = random_gpt(vocab_size=len(engine.tokenizer), n_positions=300, eos_token_id=1)
    longer = HarnessModel(model, tokenizer=engine.tokenizer)
    given = []
    monkeypatch.setattr(longer.engine, "generate", lambda ids, *, max_new_tokens, **_: (
        given.append((len(ids), max_new_tokens)) or SimpleNamespace(text="")))  # fmt: skip
    longer.generate_until([Instance("generate_until", {}, ("the cat " * 60, {}), 0)])
    assert given == [(300 - 256, 256)]  # by default as many as transformers' models there


def test_an_unknown_task_is_named(directory, capfd):
    pytest.importorskip("lm_eval")
    assert main(["eval", str(directory), "--tasks", "no_such_task"]) == 1
    assert "--tasks no_such_task: " in capfd.readouterr().err
