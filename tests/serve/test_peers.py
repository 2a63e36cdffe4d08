"""lm-evaluation-harness, LangChain and guidellm as clients."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.evaluate.test_harness import tasks
from tests.models import TEXT, opinionated
from tests.serve.conftest import Running
from tiedgpt import Tokenizer
from tiedgpt.data import TEMPLATES
from tiedgpt.data.templates import encode_pieces
from tiedgpt.infer import Engine
from tiedgpt.serve.guards import Limits

pytestmark = pytest.mark.slow
TEMPLATE = TEMPLATES["plain"]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server, its engine, and the directory of its model."""
    tokenizer, directory = Tokenizer.train([TEXT], 300), tmp_path_factory.mktemp("model")
    opinionated(tokenizer, n_positions=128).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    with Engine(directory) as engine, Running(engine, Limits(), template=TEMPLATE) as running:
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


def test_the_harness_chats_through_the_remote_tokenizer(served):
    lm_eval = pytest.importorskip("lm_eval")
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("tenacity")
    from lm_eval.models.openai_completions import LocalChatCompletion

    running, engine, _ = served
    peer = LocalChatCompletion(
        base_url=f"{running.url}/v1/chat/completions", model="tiny", tokenizer_backend="remote",
        max_length=128, batch_size=1,
    )  # fmt: skip
    results = lm_eval.simple_evaluate(
        peer, tasks=tasks(datasets)[3:], bootstrap_iters=0, apply_chat_template=True
    )
    samples = results["samples"]["written"]
    assert len(samples) == 10
    for sample in samples:
        message = {"role": "user", "content": sample["doc"]["q"]}
        ids, _ = encode_pieces(TEMPLATE.prompt([message]), engine.tokenizer)
        ours = engine.generate(
            ids, max_new_tokens=8, temperature=0, stop=["\n"],
            stop_ids=TEMPLATE.end_ids(engine.tokenizer),
        )  # fmt: skip
        assert sample["resps"] == [[ours.text]]


def test_langchain_chats(served):
    langchain = pytest.importorskip("langchain_openai")
    for route in (False, True):
        llm = langchain.ChatOpenAI(
            base_url=f"{served[0].url}/v1", api_key="none", model="tiny", temperature=0,
            max_tokens=8, use_responses_api=route,
        )  # fmt: skip
        first = llm.invoke("the cat")
        assert "".join(str(piece.text) for piece in llm.stream("the cat")) == first.text
        assert llm.invoke([("user", "the cat"), first, ("user", "sat")]).text


@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses"])
def test_all_requests_of_guidellm_succeed(served, tmp_path, route):
    pytest.importorskip("guidellm")
    running, _, directory = served
    lengths = "prompt_tokens=20,output_tokens=8"
    command = [
        Path(sys.executable).with_name("guidellm"), "run", "--disable-console",
        f"--backend=kind=openai_http,target={running.url},request_format=/v1/{route}",
        "--profile=kind=concurrent,streams=2", "--constraint=kind=max_requests,count=6",
        f"--tokenizer=kind=huggingface_auto,model={directory}",
        f"--data=kind=synthetic_text,{lengths}", f"--output=kind=json,path={tmp_path}/report.json",
    ]  # fmt: skip
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, env=environment)
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals == {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}
    requests = benchmark["requests"]["successful"]
    assert [request["output_tokens"] for request in requests] == [8] * 6
