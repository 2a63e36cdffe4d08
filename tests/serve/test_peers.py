"""lm-evaluation-harness and LangChain as clients."""

import pytest

from tests.conftest import TEXT, opinionated
from tests.evaluate.test_harness import tasks
from tests.serve.conftest import Running
from tiedgpt import Tokenizer
from tiedgpt.infer import Engine
from tiedgpt.serve.guards import Limits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server, its engine, and the directory of its model."""
    tokenizer, directory = Tokenizer.train([TEXT], 300), tmp_path_factory.mktemp("model")
    opinionated(tokenizer, n_positions=128).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    with Engine(directory) as engine, Running(engine, Limits()) as running:
        yield running, engine, directory


@pytest.mark.parametrize("tokenizer", ["huggingface", "remote"])
def test_the_harness_scores_over_http_what_it_scores_in_process(served, tokenizer):
    lm_eval = pytest.importorskip("lm_eval")
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("tenacity")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from tiedgpt.evaluate.harness import HarnessModel

    running, engine, directory = served
    theirs = LocalCompletionsAPI(
        base_url=f"{running.url}/v1/completions", model="tiny", tokenizer_backend=tokenizer,
        tokenizer=str(directory), max_length=128, batch_size=4,
    )  # fmt: skip

    def run(model):
        each = tasks(datasets)[:2]
        return lm_eval.simple_evaluate(model, tasks=each, bootstrap_iters=0)

    served_results, ours = run(theirs), run(HarnessModel(engine))
    for name in ("choices", "cloze"):
        assert served_results["results"][name]["acc,none"] == ours["results"][name]["acc,none"]
        pairs = zip(served_results["samples"][name], ours["samples"][name], strict=True)
        for mine, other in pairs:
            for (a,), (b,) in zip(mine["resps"], other["resps"], strict=True):
                assert a[0] == pytest.approx(b[0], abs=1e-4) and a[1] == b[1]


def test_langchains_wrapper_completes(served):
    langchain = pytest.importorskip("langchain_openai")
    running, engine, _ = served
    llm = langchain.OpenAI(
        base_url=f"{running.url}/v1", api_key="none", model="tiny", temperature=0, max_tokens=8
    )
    ours = engine.generate("the cat", max_new_tokens=8, temperature=0).text
    assert llm.invoke("the cat") == ours
    assert "".join(llm.stream("the cat")) == ours
