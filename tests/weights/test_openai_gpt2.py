"""GPT-2 as OpenAI released it: transformers computes the same from the same numbers."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.weights.fixtures.make_tensorflow import DIRECTORY, HPARAMS, values
from tiedgpt import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.gpt import to_gpt
from tiedgpt.weights.load import load
from tiedgpt.weights.sources import open_checkpoint


def fill_peer(model, arrays, embeddings):
    """Fill a model of transformers with the arrays of OpenAI's names, as its converter does."""
    state = {f"transformer.{to}.weight": arrays[name] for name, to in embeddings.items()}
    last = {"g": "weight", "w": "weight", "b": "bias"}
    for name, array in arrays.items():
        if name not in embeddings:
            scope, suffix = name.removeprefix("model/").rsplit("/", 1)
            scope = scope.replace("/", ".")
            if scope.startswith("h"):
                scope = f"h.{scope[1:]}"
            state[f"transformer.{scope}.{last[suffix]}"] = array.squeeze()
    tensors = {name: torch.from_numpy(array) for name, array in state.items()}
    missing, unknown = model.load_state_dict(tensors, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


def assert_same_logits(ours: GPT, their_model, n_positions: int) -> None:
    tokens = ours.config.vocab_size
    ids = torch.randint(tokens, (2, n_positions), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected, logits = their_model(ids).logits, ours(ids)
    assert expected.std() > 0.1
    assert torch.allclose(logits, expected, atol=2e-5), (logits - expected).abs().max()


def test_gpt2s_release_computes_transformers_logits():
    loaded = load(DIRECTORY / "gpt2")
    model = loaded.model
    assert loaded.layout == "TensorFlow, OpenAI GPT-2"
    assert (model.head, model.config.norm, model.config.n_head) == (None, "pre", 3)
    assert (model.config.vocab_size, model.config.n_positions) == (61, 16)
    config = GPT2Config(
        vocab_size=61, n_positions=16, n_embd=12, n_head=3, n_layer=2,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    gpt2 = fill_peer(GPT2LMHeadModel(config), values(), {"model/wte": "wte", "model/wpe": "wpe"})
    assert_same_logits(model, gpt2, 16)


def test_the_index_alone_may_be_named():
    model = GPT.from_pretrained(DIRECTORY / "gpt2" / "model.ckpt.index")
    assert torch.equal(model.wte.weight, torch.from_numpy(values()["model/wte"]))


def test_optimizer_slots_and_counters_are_skipped_and_reported():
    loaded = load(DIRECTORY / "tuned", n_head=3)
    assert torch.equal(loaded.model.wpe.weight, torch.from_numpy(values()["model/wpe"]))
    assert loaded.notes == ("left out 59 tensors of the training, such as beta1_power",)


def test_without_hparams_n_head_is_required():
    with pytest.raises(UserError, match="give n_head"):
        GPT.from_pretrained(DIRECTORY / "tuned")


def test_the_end_of_text_is_known_only_for_the_releases_vocabulary():
    checkpoint = open_checkpoint(DIRECTORY / "gpt2" / "model.ckpt.index")
    assert "eos_token_id" not in to_gpt(checkpoint).assumed
    wte = checkpoint.tensors["model/wte"]
    full = type(wte)("model/wte", (50257, 12), "float32", 0, wte.storage, None)
    checkpoint = replace(checkpoint, tensors={"model/wte": full})
    assert to_gpt(checkpoint).assumed["eos_token_id"] == 50256


def test_other_tensorflow_checkpoints_are_refused():
    with pytest.raises(CorruptInputError, match="no GPT"):
        GPT.from_pretrained(DIRECTORY / "types")


@pytest.fixture
def gpt2_copy(tmp_path):
    return shutil.copytree(DIRECTORY / "gpt2", tmp_path / "gpt2")


@pytest.mark.parametrize(
    ("hparams", "why"),
    [
        ({**HPARAMS, "n_head": 5}, "n_head=5"),
        ({**HPARAMS, "n_head": "three"}, "n_head must be .* got 'three'"),
        ({**HPARAMS, "n_layer": 3}, "n_layer=3"),
    ],
)
def test_false_hparams_are_refused(hparams, why, gpt2_copy):
    (gpt2_copy / "hparams.json").write_text(json.dumps(hparams))
    with pytest.raises(CorruptInputError, match=why):
        GPT.from_pretrained(gpt2_copy)


def test_extra_tensors_are_kept_so_that_an_error_can_name_them(gpt2_copy):
    checkpoint = open_checkpoint(gpt2_copy / "model.ckpt.index")
    tensor = checkpoint.tensors["model/ln_f/g"]
    extra = {name: tensor for name in ("lm_head/w", "model/h0/gate/w", "model/nothing/Adam")}
    checkpoint = replace(checkpoint, tensors={**checkpoint.tensors, **extra})
    assert extra.keys() <= to_gpt(checkpoint).tensors.keys()
