"""nanoGPT's and minGPT's checkpoints: layout, tie, biases and GELU."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close

from tests.weights.karpathy import (
    ARGS,
    Karpathy,
    save_nanogpt,
    some_ids,
)
from tiedgpt import GPT, GPTConfig
from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.tie import audit
from tiedgpt.weights.formats.nanogpt import write as write_nanogpt
from tiedgpt.weights.load import load
from tiedgpt.weights.sources import open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::tiedgpt.weights.load.CheckpointWarning")


def same_logits(ours: GPT, peer: torch.nn.Module, args: dict = ARGS) -> None:
    ids = some_ids(args)
    with torch.no_grad():
        assert_close(ours(ids), peer(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod."])
def test_a_checkpoint_loads_as_nanogpt_computes(tmp_path, bias, prefix):
    args = ARGS | {"bias": bias}
    peer = Karpathy(args)
    path = save_nanogpt(tmp_path / "ckpt.pt", peer, args, prefix=prefix)
    loaded = load(path)
    config = loaded.model.config
    assert loaded.layout == "torch, nanoGPT"
    assert (config.vocab_size, config.n_positions, config.n_embd) == (67, 16, 32)
    assert (config.n_layer, config.n_head, config.bias) == (2, 4, bias)
    assert (config.embd_pdrop, config.attn_pdrop, config.resid_pdrop) == (0.2, 0.2, 0.2)
    assert config.activation_function == "gelu" and config.tie_word_embeddings
    assert loaded.model.head is None
    same_logits(loaded.model, peer, args)


def test_the_legacy_format_and_a_bare_state_dict_load_too(tmp_path):
    peer = Karpathy(ARGS)
    path = save_nanogpt(tmp_path / "old.pt", peer, ARGS, legacy=True)
    same_logits(GPT.from_pretrained(path), peer)
    torch.save(peer.state_dict(), tmp_path / "bare.pt")
    with pytest.raises(UserError, match="n_head"):
        GPT.from_pretrained(tmp_path / "bare.pt")
    loaded = load(tmp_path / "bare.pt", n_head=4)
    assert loaded.layout == "torch, nanoGPT" and not loaded.model.config.bias
    same_logits(loaded.model, peer)


def test_one_storage_is_tied_without_comparing_values(tmp_path, monkeypatch):
    path = save_nanogpt(tmp_path / "ckpt.pt", Karpathy(ARGS), ARGS)
    monkeypatch.setattr("tiedgpt.weights.roles.compare", None)  # would be called
    assert load(path).model.head is None
    assert audit(path).verdict == "tied"


def test_a_padded_vocabulary_is_kept(tmp_path):
    """nanoGPT's 50,304 rows for 50,257 tokens take part in its softmax."""
    args = ARGS | {"vocab_size": 128}
    peer = Karpathy(args)
    model = GPT.from_pretrained(save_nanogpt(tmp_path / "ckpt.pt", peer, args))
    assert model.config.vocab_size == 128
    same_logits(model, peer, args)


def test_masks_are_dropped_and_determine_the_gelu(tmp_path):
    peer = Karpathy(ARGS, masks=True, approximate="tanh")
    loaded = load(save_nanogpt(tmp_path / "ckpt.pt", peer, ARGS))
    assert loaded.model.config.activation_function == "gelu_new"
    assert any("does not say which GELU" in note for note in loaded.notes)
    same_logits(loaded.model, peer)


def test_checkpoints_without_a_bias_argument_determine_the_gelu(tmp_path):
    args = {name: value for name, value in ARGS.items() if name != "bias"}
    peer = Karpathy(ARGS | {"bias": True}, masks=True, approximate="tanh")
    loaded = load(save_nanogpt(tmp_path / "ckpt.pt", peer, args))
    assert loaded.model.config.activation_function == "gelu_new" and loaded.model.config.bias
    assert not loaded.notes
    same_logits(loaded.model, peer)


def test_the_gelu_can_be_given(tmp_path):
    peer = Karpathy(ARGS, approximate="tanh")
    path = save_nanogpt(tmp_path / "ckpt.pt", peer, ARGS)
    assert any("activation_function='gelu_new'" in note for note in load(path).notes)
    model = GPT.from_pretrained(path, activation_function="gelu_new")
    same_logits(model, peer)


def test_arguments_that_contradict_the_file_are_refused(tmp_path):
    path = save_nanogpt(tmp_path / "ckpt.pt", Karpathy(ARGS), ARGS)
    with pytest.raises(UserError, match="n_head=2 contradicts"):
        GPT.from_pretrained(path, n_head=2)


def test_a_forks_architecture_is_refused_by_name(tmp_path):
    args = ARGS | {"use_rmsnorm": True}
    path = save_nanogpt(tmp_path / "ckpt.pt", Karpathy(ARGS), args)
    with pytest.raises(UserError, match="use_rmsnorm=True"):
        GPT.from_pretrained(path)
    path = save_nanogpt(tmp_path / "ckpt.pt", Karpathy(ARGS), args | {"use_rmsnorm": False})
    assert GPT.from_pretrained(path).config.n_layer == 2


def test_other_containers_of_the_same_layout_load(tmp_path):
    peer = Karpathy(ARGS)
    state = {name: t for name, t in peer.state_dict().items() if name != "lm_head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    model = GPT.from_pretrained(tmp_path / "model.safetensors", n_head=4)
    same_logits(model, peer)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"wte.weight": torch.ones(67, 32)}, "wte.weight twice"),
        ({"transformer.h.0.attn.c_attn.weight": torch.ones(32, 96)}, r"\(32, 96\), not \(96, 32\)"),
        ({"transformer.h.0.ln_1.bias": torch.ones(32)}, "h.0.ln_1.bias is not a GPT's"),
    ],
)
def test_damage_to_a_checkpoint_is_named(tmp_path, change, expected):
    state = Karpathy(ARGS).state_dict() | change
    torch.save({"model": state, "model_args": ARGS}, tmp_path / "ckpt.pt")
    with pytest.raises(CorruptInputError, match=expected):
        GPT.from_pretrained(tmp_path / "ckpt.pt")


def test_false_model_args_are_refused(tmp_path):
    state = Karpathy(ARGS).state_dict()
    for lie in ({"n_head": 5}, {"n_head": "x"}, {"n_layer": 9}, {"dropout": 7}, {"bias": "no"},
                {"n_head": 2**70}, {"n_head": None}, {"bias": True}):  # fmt: skip
        torch.save({"model": state, "model_args": ARGS | lie}, tmp_path / "ckpt.pt")
        with pytest.raises(TiedGPTError, match=r"ckpt\.pt"):
            GPT.from_pretrained(tmp_path / "ckpt.pt")


def test_only_plain_values_of_the_checkpoint_are_kept(tmp_path):
    beside = {"a": 1, "b": "x", "c": [1], "d": torch.ones(2), "e": float("nan"), "f": "y" * 5000,
              "g": None, "h\n": 1, 5: 1, "i": 2**80, "j": 0.5, "k": {}}  # fmt: skip
    state = {"transformer.wte.weight": torch.ones(3, 2)}
    torch.save({"model": state, "config": beside, "model_args": 3}, tmp_path / "a.pt")
    checkpoint = open_checkpoint(tmp_path / "a.pt")
    assert checkpoint.config == {
        "config": {"a": 1, "b": "x", "g": None, "h\n": 1, "i": 2**80, "j": 0.5}
    }


def test_a_loaded_model_survives_truncation_of_its_file(tmp_path):
    peer = Karpathy(ARGS)
    path = save_nanogpt(tmp_path / "ckpt.pt", peer, ARGS)
    model = GPT.from_pretrained(path)
    path.write_bytes(b"")  # in place, as a program that saves again does
    same_logits(model, peer)


MINGPT = ARGS | {"bias": True}


def test_mingpt_has_two_matrices_and_no_heads_in_its_file(tmp_path):
    peer = Karpathy(MINGPT, masks=True, tied=False, approximate="tanh")
    torch.save(peer.state_dict(), tmp_path / "model.pt")
    with pytest.raises(UserError, match="n_head"):
        GPT.from_pretrained(tmp_path / "model.pt")
    loaded = load(tmp_path / "model.pt", n_head=4)
    assert loaded.layout == "torch, minGPT" and not loaded.notes
    assert torch.equal(loaded.model.head.weight, peer.lm_head.weight)
    with pytest.raises(UserError, match="holds two matrices"):
        GPT.from_pretrained(tmp_path / "model.pt", n_head=4, resolve="tie")
    assert loaded.model.config.activation_function == "gelu_new"
    same_logits(loaded.model, peer, MINGPT)


def test_mingpts_config_gives_the_heads(tmp_path):
    args = MINGPT | {"n_layer": 3, "n_head": 3, "n_embd": 48}
    peer = Karpathy(args, masks=True, tied=False, approximate="tanh")
    torch.save(peer.state_dict(), tmp_path / "model.pt")
    model = {"model_type": "gpt-nano", "n_layer": None, "n_head": None, "n_embd": None}
    logged = {"system": {"seed": 3407}, "model": model | {"attn_pdrop": 0.1}}
    (tmp_path / "config.json").write_text(json.dumps(logged))
    ours = GPT.from_pretrained(tmp_path)
    assert ours.config.n_head == 3
    same_logits(ours, peer, args)


SIZES = {"vocab_size": 67, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}


def model_of(**fields) -> GPT:
    torch.manual_seed(3)
    model = GPT(GPTConfig(**SIZES | {"activation_function": "gelu"} | fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "ln_" in name and "weight" in name else 0.0, 0.2)
    return model


def as_nanogpt_samples(path, approximate="none") -> Karpathy:
    """Load as nanoGPT's sample.py does: the dict's arguments, then the state dict, strictly."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    assert checkpoint["model_args"].keys() == ARGS.keys()
    assert "dataset" not in checkpoint["config"] and checkpoint["iter_num"] == 0
    peer = Karpathy(checkpoint["model_args"], approximate=approximate)
    peer.load_state_dict(checkpoint["model"])
    return peer.eval()


@pytest.mark.parametrize("bias", [False, True])
def test_nanogpt_computes_the_same(tmp_path, bias):
    model = model_of(bias=bias)
    write_nanogpt(model, tmp_path / "ckpt.pt")
    peer = as_nanogpt_samples(tmp_path / "ckpt.pt")
    with torch.no_grad():
        assert_close(peer(some_ids(ARGS)), model(some_ids(ARGS)), rtol=1e-4, atol=1e-4)


def test_conversion_from_and_to_nanogpt_is_exact(tmp_path):
    peer = Karpathy(ARGS)
    model = GPT.from_pretrained(save_nanogpt(tmp_path / "ckpt.pt", peer, ARGS))
    write_nanogpt(model, tmp_path / "again.pt")
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    assert again["model_args"] == ARGS
    assert again["model"].keys() == peer.state_dict().keys()
    for name, tensor in peer.state_dict().items():
        assert torch.equal(again["model"][name], tensor)


def test_one_storage_is_saved_for_both_names(tmp_path):
    model = model_of()
    write_nanogpt(model, tmp_path / "ckpt.pt")
    state = torch.load(tmp_path / "ckpt.pt", weights_only=True)["model"]
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    assert audit(tmp_path / "ckpt.pt").verdict == "tied"
    numbers = model.config.parameter_count() * 4
    assert numbers < (tmp_path / "ckpt.pt").stat().st_size < numbers + 67 * 32 * 4 + 20_000


def test_a_parameter_on_a_larger_storage_is_saved_alone(tmp_path):
    model = model_of()
    large = torch.randn(1_000_000)
    model.wte.weight = torch.nn.Parameter(large[: 67 * 32].view(67, 32))
    write_nanogpt(model, tmp_path / "ckpt.pt")
    assert (tmp_path / "ckpt.pt").stat().st_size < 1_000_000
    assert torch.equal(GPT.from_pretrained(tmp_path / "ckpt.pt").wte.weight, model.wte.weight)


def test_writing_gpt2s_gelu_as_nanogpts_needs_consent(tmp_path):
    model = model_of(activation_function="gelu_new")
    path = tmp_path / "ckpt.pt"
    with pytest.raises(UserError, match="approximate_gelu"):
        write_nanogpt(model, path)
    assert not path.exists()
    write_nanogpt(model, path, approximate_gelu=True)
    loaded = load(path)
    assert loaded.model.config == model.config  # here it stays what it is
    assert "nanoGPT since June 2023 computes gelu" in loaded.notes[-1]
    with torch.no_grad():
        before = as_nanogpt_samples(path, approximate="tanh")(some_ids(ARGS))
        assert_close(before, model(some_ids(ARGS)), rtol=1e-4, atol=1e-4)
        since = as_nanogpt_samples(path)(some_ids(ARGS))
    assert 1e-5 < float((before - since).abs().max()) < 0.1
