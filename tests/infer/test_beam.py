import math

import numpy as np
import pytest
import torch
import transformers

from tests.infer.conftest import beams
from tests.models import random_gpt
from tiedgpt import GPT, GPTConfig
from tiedgpt.infer.torch_session import TorchRunner

PROMPTS = ([5, 9, 60, 31], [1], [33] * 9)
SETTINGS = [
    {"num_beams": 2},
    {"num_beams": 4, "early_stopping": True},
    {"num_beams": 4, "length_penalty": 2.0},
    {"num_beams": 3, "length_penalty": -1.0},
    {"num_beams": 5, "length_penalty": 0.0, "early_stopping": "never"},
    {"num_beams": 5, "length_penalty": 1.5, "early_stopping": "never"},
    {"num_beams": 3, "length_penalty": -0.5, "early_stopping": "never"},
    {"num_beams": 3, "repetition_penalty": 1.4},
    {"num_beams": 3, "stop_ids": [11]},
    {"num_beams": 4, "stop_ids": list(range(2, 60, 3)), "length_penalty": 2.0},
]


@pytest.fixture(scope="module", params=[0, 2, 4])
def twins(request, tmp_path_factory):
    """A GPT that likes to end its texts, and the same in transformers."""
    shape = {"vocab_size": 61, "n_positions": 32, "n_layer": 2, "n_head": 2}
    model = random_gpt(request.param, **shape, eos_token_id=0)
    with torch.no_grad():
        model.wte.weight[0] *= 3
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    return model, transformers.GPT2LMHeadModel.from_pretrained(directory).eval()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_beams_match_transformers(twins, settings):
    model, theirs = twins
    same = {name: value for name, value in settings.items() if name != "stop_ids"}
    ends = [0, *settings.get("stop_ids", [])]
    for prompt in PROMPTS:
        with torch.no_grad():
            expected = theirs.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=12,
                do_sample=False,
                num_return_sequences=settings["num_beams"],
                pad_token_id=60,
                eos_token_id=ends,
                return_dict_in_generate=True,
                output_scores=True,
                **same,
            )
        found = beams(TorchRunner(model), prompt, max_new_tokens=12, **settings)
        for hypothesis, row, score in zip(
            found, expected.sequences, expected.sequences_scores, strict=True
        ):
            new = row[len(prompt) :].tolist()
            end = next((at for at, token in enumerate(new) if token in ends), len(new))
            new = new[: end + 1]
            assert hypothesis.ids == new
            assert hypothesis.score == pytest.approx(float(score), abs=1e-4)


def test_a_wider_beam_than_the_vocabulary_finds_every_continuation():
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=4, n_positions=8, n_embd=16, n_layer=1, n_head=2, eos_token_id=None
    )
    model = GPT(config).eval()
    found = beams(TorchRunner(model), [1], num_beams=20, max_new_tokens=2)
    assert sorted(hypothesis.ids for hypothesis in found) == [
        [a, b] for a in range(4) for b in range(4)
    ]
    assert sum(math.exp(2 * hypothesis.score) for hypothesis in found) == pytest.approx(1)


def test_excluded_tokens_are_never_in_a_beam(twins):
    def only_even(ids, n_prompt, scores):
        assert ids[:n_prompt] == [7, 9]
        return np.where(np.arange(len(scores)) % 2, -np.inf, scores)

    found = beams(
        TorchRunner(twins[0]), [7, 9], num_beams=4, max_new_tokens=6, processors=[only_even]
    )
    tokens = {token for hypothesis in found for token in hypothesis.ids}
    assert tokens <= set(range(0, 61, 2))
