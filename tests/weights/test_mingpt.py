"""minGPT loads as what it is: untied by design, with the heads that are given."""

import json

import pytest
import torch

from tests.weights.karpathy import ARGS, Karpathy
from tests.weights.test_nanogpt import same_logits
from tiedgpt import GPT
from tiedgpt.errors import UserError
from tiedgpt.weights.load import load

MINGPT = ARGS | {"bias": True}


def test_mingpt_has_two_matrices_and_no_heads_in_its_file(tmp_path):
    theirs = Karpathy(MINGPT, masks=True, tied=False, approximate="tanh")
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    with pytest.raises(UserError, match="n_head"):
        GPT.from_pretrained(tmp_path / "model.pt")
    loaded = load(tmp_path / "model.pt", n_head=4)
    assert loaded.layout == "torch, minGPT" and not loaded.notes
    assert torch.equal(loaded.model.head.weight, theirs.lm_head.weight)
    with pytest.raises(UserError, match="holds two matrices"):
        GPT.from_pretrained(tmp_path / "model.pt", n_head=4, resolve="tie")
    assert loaded.model.config.activation_function == "gelu_new"
    same_logits(loaded.model, theirs, MINGPT)


def test_mingpts_own_config_tells_the_heads(tmp_path):
    args = MINGPT | {"n_layer": 3, "n_head": 3, "n_embd": 48}
    theirs = Karpathy(args, masks=True, tied=False, approximate="tanh")
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    model = {"model_type": "gpt-nano", "n_layer": None, "n_head": None, "n_embd": None}
    logged = {"system": {"seed": 3407}, "model": model | {"attn_pdrop": 0.1}}
    (tmp_path / "config.json").write_text(json.dumps(logged))
    ours = GPT.from_pretrained(tmp_path)
    assert ours.config.n_head == 3
    same_logits(ours, theirs, args)
