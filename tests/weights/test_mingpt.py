"""Both minGPTs load as what they are: untied by design, with the heads that are given."""

import json

import pytest
import torch

from tests.weights.karpathy import ARGS, FirstMinGPT, Karpathy
from tests.weights.test_nanogpt import same_logits
from tiedgpt import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import to_gpt
from tiedgpt.weights.load import load
from tiedgpt.weights.sources import open_checkpoint

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


def test_the_first_mingpt_loads(tmp_path):
    theirs = FirstMinGPT(MINGPT)
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    loaded = load(tmp_path / "model.pt", n_head=4)
    assert loaded.layout == "torch, minGPT"
    assert loaded.model.config.activation_function == "gelu"
    same_logits(loaded.model, theirs, MINGPT)
    joined = to_gpt(open_checkpoint(tmp_path / "model.pt")).tensors["h.1.attn.c_attn.weight"]
    whole = joined.tensor().numpy()
    assert (joined.rows(30, 70) == whole[30:70]).all()
    assert (joined.native(60, 66, 3, 5).view("<f4") == whole[60:66, 3:5]).all()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"blocks.0.attn.key.bias": None}, "attn.query, attn.key, attn.value"),
        ({"blocks.1.attn.value.weight": torch.ones(3, 3)}, "one shape and type"),
        ({"blocks.1.ln1.weight": None}, "h.1.ln_1.weight is missing"),
        ({"blocks.0.extra.weight": torch.ones(3)}, "h.0.extra.weight is not a GPT's"),
        ({"pos_emb": torch.ones(2, 16, 32)}, "wpe.weight is missing or no matrix"),
    ],
)
def test_damage_to_the_first_mingpt_is_named(tmp_path, change, expected):
    state = FirstMinGPT(MINGPT).state_dict() | change
    torch.save({name: t for name, t in state.items() if t is not None}, tmp_path / "model.pt")
    with pytest.raises(CorruptInputError, match=expected):
        GPT.from_pretrained(tmp_path / "model.pt", n_head=4)
