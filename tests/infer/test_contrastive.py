import numpy as np
import pytest
import torch

from tests.infer.conftest import alone
from tiedgpt import GPT, GPTConfig
from tiedgpt.infer import Request
from tiedgpt.infer.continuation import Continuation
from tiedgpt.infer.contrastive import contrastive_search
from tiedgpt.infer.torch_session import TorchRunner


def contrastive_by_the_equation(model, ids, *, top_k, alpha, n, adjust=None):
    """The rule of Su et al. 2022, each candidate read from the start, without a cache."""
    ids = list(ids)
    for _ in range(n):
        with torch.no_grad():
            h = model.body(torch.tensor([ids]))[0]
            logits = model.logits(h[-1:])[0]
            if adjust is not None:
                logits = torch.from_numpy(adjust(ids, logits.numpy()))
            p = logits.softmax(0)
            values = {}
            for v in p.topk(top_k).indices[: int((p > 0).sum())].tolist():
                h_v = model.body(torch.tensor([[*ids, v]]))[0, -1:]
                penalty = torch.cosine_similarity(h_v, h).max()
                values[v] = float((1 - alpha) * p[v] - alpha * penalty)
        ids.append(max(values, key=values.get))
        if ids[-1] == model.config.eos_token_id:
            break
    return ids


def found(model, prompt, *, top_k, alpha, n, **options):
    """What contrastive search makes of a prompt."""
    request = Request(temperature=0, max_new_tokens=n, **options)
    begun = Continuation(prompt, request, config=model.config)
    return alone(
        TorchRunner(model),
        lambda lane: contrastive_search(lane, begun, penalty_alpha=alpha),
        slots=top_k,
        capacity=min(len(prompt) + n, model.config.n_positions),
    )


@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 1.0])
def test_it_takes_what_the_equation_takes(tiny, top_k, alpha):
    for prompt in ([5, 9, 60, 31], [1], [33] * 9):
        completion = found(tiny, prompt, top_k=top_k, alpha=alpha, n=14)
        expected = contrastive_by_the_equation(tiny, prompt, top_k=top_k, alpha=alpha, n=14)
        assert prompt + completion.ids == expected


def test_its_log_p_are_the_models(tiny):
    prompt = [5, 9, 60, 31]
    completion = found(tiny, prompt, top_k=4, alpha=0.6, n=10)
    with torch.no_grad():
        log_p = tiny(torch.tensor([prompt + completion.ids]))[0].log_softmax(-1)
    expected = [float(log_p[at, token]) for at, token in enumerate(completion.ids, 3)]
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_candidates_may_be_fewer_where_tokens_are_ruled_out(tiny):
    def few(ids, scores):
        kept = np.isin(np.arange(97) % 31, [len(ids) % 31] if len(ids) % 3 else range(20))
        return np.where(kept, scores, np.float32(-np.inf))

    completion = found(
        tiny, [1], top_k=6, alpha=0.6, n=18, processors=[lambda ids, _, scores: few(ids, scores)]
    )
    expected = contrastive_by_the_equation(tiny, [1], top_k=6, alpha=0.6, n=18, adjust=few)
    assert [1, *completion.ids] == expected


def test_it_ends_where_the_text_ends():
    torch.manual_seed(1)
    config = GPTConfig(
        vocab_size=40, n_positions=64, n_embd=16, n_layer=1, n_head=2, eos_token_id=3
    )
    completion = found(GPT(config).eval(), [1, 2], top_k=30, alpha=0.9, n=61)
    assert completion.finish_reason == "stop"
    assert completion.ids.index(3) == len(completion.ids) - 1


def test_a_full_context_ends_it(tiny):
    completion = found(tiny, [33] * 9, top_k=3, alpha=0.6, n=40)
    assert (completion.finish_reason, len(completion.ids)) == ("context", 15)


def test_long_prompts_are_read_in_parts_with_the_same_result(tiny, monkeypatch):
    prompt = list(range(12))
    whole = found(tiny, prompt, top_k=4, alpha=0.6, n=10)
    monkeypatch.setattr("tiedgpt.infer.contrastive.CHUNK", 5)
    assert found(tiny, prompt, top_k=4, alpha=0.6, n=10).ids == whole.ids
