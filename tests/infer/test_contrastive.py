import numpy as np
import pytest
import torch

from tiedgpt import GPT, GPTConfig
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


@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 1.0])
def test_it_takes_what_the_equation_takes(tiny, top_k, alpha):
    for prompt in ([5, 9, 60, 31], [1], [33] * 9):
        found = contrastive_search(
            TorchRunner(tiny), prompt, top_k=top_k, penalty_alpha=alpha, max_new_tokens=14
        )
        expected = contrastive_by_the_equation(tiny, prompt, top_k=top_k, alpha=alpha, n=14)
        assert [*prompt, *(token for token, _ in found)] == expected


def test_its_logits_are_the_models(tiny):
    prompt = [5, 9, 60, 31]
    found = list(
        contrastive_search(TorchRunner(tiny), prompt, top_k=4, penalty_alpha=0.6, max_new_tokens=10)
    )
    ids = torch.tensor([[*prompt, *(token for token, _ in found)]])
    with torch.no_grad():
        logits = tiny(ids)[0].numpy()
    for at, (_, row) in enumerate(found, len(prompt) - 1):
        np.testing.assert_allclose(row, logits[at], atol=1e-4)


def test_candidates_may_be_fewer_where_tokens_are_ruled_out(tiny):
    def few(ids, scores):
        kept = np.isin(np.arange(97) % 31, [len(ids) % 31] if len(ids) % 3 else range(20))
        return np.where(kept, scores, np.float32(-np.inf))

    found = contrastive_search(
        TorchRunner(tiny), [1], top_k=6, penalty_alpha=0.6, max_new_tokens=18, adjust=few
    )
    expected = contrastive_by_the_equation(tiny, [1], top_k=6, alpha=0.6, n=18, adjust=few)
    assert [1, *(token for token, _ in found)] == expected


def test_it_ends_where_the_text_ends_and_never_takes_a_row_without_a_token():
    torch.manual_seed(1)
    config = GPTConfig(
        vocab_size=40, n_positions=64, n_embd=16, n_layer=1, n_head=2, eos_token_id=3
    )
    model = GPT(config).eval()
    found = list(
        contrastive_search(
            TorchRunner(model), [1, 2], top_k=8, penalty_alpha=0.5, max_new_tokens=62, n_tokens=9
        )
    )
    tokens = [token for token, _ in found]
    assert max(tokens) < 9
    assert 3 not in tokens[:-1]
    assert tokens[-1] == 3 or len(tokens) == 62


def test_long_prompts_are_read_in_parts_with_the_same_result(tiny, monkeypatch):
    prompt = list(range(12))

    def run():
        return list(
            contrastive_search(
                TorchRunner(tiny), prompt, top_k=4, penalty_alpha=0.6, max_new_tokens=10
            )
        )

    whole = [token for token, _ in run()]
    monkeypatch.setattr("tiedgpt.infer.contrastive.CHUNK", 5)
    assert [token for token, _ in run()] == whole
