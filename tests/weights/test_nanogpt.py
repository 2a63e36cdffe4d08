"""nanoGPT's, minGPT's and llm.c's checkpoints: layout, tie and GELU, against transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2LMHeadModel

from tests.tie.checkpoints import CONV1D, HEAD, D, nanogpt_state, state_of, their_gpt2, write_llmc
from tests.weights.conftest import assert_same_logits
from tiedgpt import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.tie import audit
from tiedgpt.weights.formats.nanogpt import write as write_nanogpt
from tiedgpt.weights.load import load
from tiedgpt.weights.source import open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::tiedgpt.weights.load.CheckpointWarning")

ARGS = {
    "n_layer": 2, "n_head": 4, "n_embd": D, "block_size": 24, "bias": False, "vocab_size": 97,
    "dropout": 0.2,
}  # fmt: skip


def peer_of(activation: str = "gelu", **values) -> GPT2LMHeadModel:
    """A GPT-2 of transformers, which computes the same with zeros for biases."""
    return their_gpt2(**{"bias": False, "activation_function": activation} | values)


def save(path: Path, peer: GPT2LMHeadModel, args: dict = ARGS, *, prefix="", zipped=True, **state):
    """Save as nanoGPT's train.py does: after a step of AdamW, with a loss that is a tensor."""
    optimizer = torch.optim.AdamW(peer.parameters(), lr=0.0)
    loss = peer(torch.zeros(1, 4, dtype=torch.int64)).logits.square().mean()
    loss.backward()
    optimizer.step()
    tensors = nanogpt_state(peer, **{"bias": args.get("bias", False)} | state)
    checkpoint = {
        "model": {prefix + name: tensor for name, tensor in tensors.items()},
        "optimizer": optimizer.state_dict(), "model_args": args, "iter_num": 5,
        "best_val_loss": loss.detach(), "config": {"dataset": "shakespeare_char", "min_lr": 1e-4},
    }  # fmt: skip
    torch.save(checkpoint, path, _use_new_zipfile_serialization=zipped)
    return path


def test_arguments_and_model_args_cannot_contradict_and_a_forks_false_switch_is_ignored(tmp_path):
    path = save(tmp_path / "ckpt.pt", peer_of(), ARGS | {"use_rmsnorm": False})
    assert GPT.from_pretrained(path).config.n_layer == 2
    with pytest.raises(UserError, match="n_head=2 contradicts"):
        GPT.from_pretrained(path, n_head=2)
    save(path, peer_of(), ARGS | {"bias": True}, bias=False)
    with pytest.raises(CorruptInputError, match="bias is missing"):
        GPT.from_pretrained(path)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod."])
def test_a_checkpoint_loads_as_nanogpt_computes(tmp_path, bias, prefix):
    peer = peer_of(bias=bias)
    loaded = load(save(tmp_path / "ckpt.pt", peer, ARGS | {"bias": bias}, prefix=prefix))
    config = loaded.model.config
    assert loaded.layout == "torch, nanoGPT" and loaded.model.head is None
    assert (config.vocab_size, config.n_positions, config.n_embd) == (97, 24, 32)
    assert (config.n_layer, config.n_head, config.bias) == (2, 4, bias)
    assert (config.embd_pdrop, config.attn_pdrop, config.resid_pdrop) == (0.2, 0.2, 0.2)
    assert config.activation_function == "gelu" and config.tie_word_embeddings
    assert_same_logits(loaded.model, peer)


def test_the_legacy_format_and_bare_state_dicts_load_too(tmp_path):
    peer = peer_of()
    assert_same_logits(GPT.from_pretrained(save(tmp_path / "old.pt", peer, zipped=False)), peer)
    state = nanogpt_state(peer)
    torch.save(state, tmp_path / "bare.pt")
    del state[HEAD]
    save_file(state, tmp_path / "bare.safetensors")
    for name, container in (("bare.pt", "torch"), ("bare.safetensors", "safetensors")):
        with pytest.raises(UserError, match="n_head"):
            GPT.from_pretrained(tmp_path / name)
        loaded = load(tmp_path / name, n_head=4)
        assert loaded.layout == f"{container}, nanoGPT" and not loaded.model.config.bias
        assert_same_logits(loaded.model, peer)


def test_one_storage_is_tied_without_comparing_values(tmp_path):
    peer = peer_of()
    with torch.no_grad():
        peer.transformer.wte.weight[3] = torch.nan  # which differs from itself
    path = save(tmp_path / "ckpt.pt", peer)
    assert load(path).model.head is None
    report = audit(path)
    assert (report.verdict, report.comparison) == ("tied", None)


def test_a_padded_vocabulary_is_kept(tmp_path):
    """nanoGPT's 50,304 rows for 50,257 tokens take part in its softmax."""
    peer = peer_of(vocab_size=128)
    model = GPT.from_pretrained(save(tmp_path / "ckpt.pt", peer, ARGS | {"vocab_size": 128}))
    assert model.config.vocab_size == 128
    assert_same_logits(model, peer)


def test_masks_and_a_missing_bias_argument_determine_the_gelu_and_it_can_be_given(tmp_path):
    tanh, path = peer_of("gelu_new"), tmp_path / "ckpt.pt"
    masked = load(save(path, tanh, masks=True))
    assert any("does not say which GELU" in note for note in masked.notes)
    assert_same_logits(masked.model, tanh)
    assert any("activation_function='gelu_new'" in note for note in load(save(path, tanh)).notes)
    assert_same_logits(GPT.from_pretrained(path, activation_function="gelu_new"), tanh)
    peer = peer_of("gelu_new", bias=True)
    args = {name: value for name, value in ARGS.items() if name != "bias"}
    loaded = load(save(path, peer, args, bias=True, masks=True))
    assert loaded.model.config.activation_function == "gelu_new" and loaded.model.config.bias
    assert not loaded.notes
    assert_same_logits(loaded.model, peer)


@pytest.mark.parametrize(
    ("name", "says"),
    [("wte.weight", "wte.weight twice"), ("transformer.h.0.ln_1.bias", "is not a GPT's")],
)
def test_a_second_embedding_and_a_bias_that_model_args_deny_are_refused(tmp_path, name, says):
    state = nanogpt_state(peer_of()) | {name: torch.ones(97, 32)}
    torch.save({"model": state, "model_args": ARGS}, tmp_path / "ckpt.pt")
    with pytest.raises(CorruptInputError, match=says):
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
    peer = peer_of()
    path = save(tmp_path / "ckpt.pt", peer)
    model = GPT.from_pretrained(path)
    path.write_bytes(b"")  # in place, as a program that saves again does
    assert_same_logits(model, peer)


def test_mingpt_has_two_matrices_and_no_heads_in_its_file(tmp_path):
    peer, path = peer_of("gelu_new", bias=True, tie_word_embeddings=False), tmp_path / "model.pt"
    torch.save(nanogpt_state(peer, bias=True, masks=True), path)
    with pytest.raises(UserError, match="n_head"):
        GPT.from_pretrained(path)
    loaded = load(path, n_head=4)
    assert loaded.layout == "torch, minGPT" and not loaded.notes
    assert torch.equal(loaded.model.head.weight, peer.lm_head.weight)
    with pytest.raises(UserError, match="holds two matrices"):
        GPT.from_pretrained(path, n_head=4, resolve="tie")
    assert loaded.model.config.activation_function == "gelu_new"
    assert_same_logits(loaded.model, peer)
    save(path, peer, ARGS | {"bias": True}, masks=True)
    assert open_checkpoint(path).format.name == "nanogpt"  # its arguments tell the two apart


MINGPT_HEADS = {
    "openai-gpt": 12, "gpt2": 12, "gpt2-medium": 16, "gpt2-large": 20, "gpt2-xl": 25,
    "gopher-44m": 16, "gpt-mini": 6, "gpt-micro": 4, "gpt-nano": 3,
}  # fmt: skip
"""minGPT's `model_type`s and their numbers of heads (`mingpt/model.py`)."""


@pytest.mark.parametrize(("model_type", "n_head"), MINGPT_HEADS.items())
def test_mingpts_config_gives_the_heads(model_type, n_head, tmp_path):
    sizes = {"n_layer": 2, "n_head": n_head, "n_embd": 3 * n_head, "tie_word_embeddings": False}
    peer = peer_of("gelu_new", bias=True, **sizes)
    torch.save(nanogpt_state(peer, bias=True, masks=True), tmp_path / "model.pt")
    model = {"model_type": model_type, "n_layer": None, "n_head": None, "n_embd": None}
    logged = {"system": {"seed": 3407}, "model": model | {"attn_pdrop": 0.1}}
    (tmp_path / "config.json").write_text(json.dumps(logged))
    assert_same_logits(GPT.from_pretrained(tmp_path), peer)


# Written by us


def as_nanogpt_samples(path: Path, activation: str = "gelu") -> GPT2LMHeadModel:
    """Load as nanoGPT's sample.py does: the dict's arguments, then the state dict, strictly."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    args, state = checkpoint["model_args"], checkpoint["model"]
    assert args.keys() == ARGS.keys()
    assert "dataset" not in checkpoint["config"] and checkpoint["iter_num"] == 0
    peer = peer_of(activation)
    assert state.keys() == nanogpt_state(peer, bias=args["bias"]).keys()
    turned = {n: t.T if CONV1D.fullmatch(n) else t for n, t in state.items()}
    peer.load_state_dict(turned, strict=False)
    return peer


@pytest.mark.parametrize("bias", [False, True])
def test_nanogpt_reads_what_is_written_from_its_own_file_as_it_was(tmp_path, bias):
    args = ARGS | {"bias": bias}
    peer = peer_of(bias=bias)
    model = GPT.from_pretrained(save(tmp_path / "ckpt.pt", peer, args))
    write_nanogpt(model, tmp_path / "again.pt")
    assert_same_logits(model, as_nanogpt_samples(tmp_path / "again.pt"))
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    assert again["model_args"] == args
    for name, tensor in nanogpt_state(peer, bias=bias).items():
        assert torch.equal(again["model"][name], tensor)


def test_one_storage_is_saved_for_both_names_and_none_is_saved_whole(tmp_path):
    model, path = GPT.from_pretrained(peer_of()), tmp_path / "ckpt.pt"
    large = torch.randn(1_000_000)
    model.wte.weight = torch.nn.Parameter(large[: 97 * 32].view(97, 32))
    write_nanogpt(model, path)
    state = torch.load(path, weights_only=True)["model"]
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    assert audit(path).verdict == "tied"
    numbers = model.config.parameter_count() * 4
    assert numbers < path.stat().st_size < numbers + 97 * 32 * 4 + 20_000
    assert torch.equal(GPT.from_pretrained(path).wte.weight, model.wte.weight)


def test_writing_gpt2s_gelu_as_nanogpts_needs_consent(tmp_path, ids):
    model, path = GPT.from_pretrained(peer_of("gelu_new")), tmp_path / "ckpt.pt"
    with pytest.raises(UserError, match="approximate_gelu"):
        write_nanogpt(model, path)
    assert not path.exists()
    write_nanogpt(model, path, approximate_gelu=True)
    loaded = load(path)
    assert loaded.model.config == model.config  # here it stays what it is
    assert "nanoGPT since June 2023 computes gelu" in loaded.notes[-1]
    before = as_nanogpt_samples(path, "gelu_new")
    assert_same_logits(model, before)
    with torch.no_grad():
        difference = before(ids).logits - as_nanogpt_samples(path)(ids).logits
    assert 1e-5 < float(difference.abs().max()) < 0.1


# llm.c

SMALL = {"T": 6, "V": 5, "L": 2, "H": 2, "C": 4, "Vp": 8}


@pytest.mark.parametrize("version", [1, 3, 5])
def test_tensors_lie_at_the_formats_offsets(tmp_path, version):
    path = tmp_path / "model.bin"
    sizes = SMALL | ({"Vp": 5} if version == 1 else {})
    numbers = write_llmc(path, version, **sizes)
    checkpoint = open_checkpoint(path)
    assert checkpoint.container == "llm.c"
    assert checkpoint.config["vocab_size"] == 5 and checkpoint.config["num_heads"] == 2
    assert len(checkpoint.tensors) == 2 + 2 * 12 + 2
    for name, tensor in checkpoint.tensors.items():
        expected = numbers[name][:5] if name == "wte.weight" else numbers[name]
        assert tensor.shape == expected.shape
        rows = tensor.rows(0, tensor.matrix_shape[0]).reshape(tensor.shape)
        assert np.array_equal(rows, expected), name


SIZES = {"T": 24, "V": 97, "L": 2, "H": 4, "C": 32, "Vp": 128}


@pytest.mark.parametrize("version", [1, 3])
def test_llmc_computes_transformers_logits(tmp_path, version):
    model = their_gpt2()
    sizes = SIZES | ({"Vp": 97} if version == 1 else {})
    write_llmc(tmp_path / "model.bin", version, state_of(model), **sizes)
    loaded = load(tmp_path / "model.bin")
    config = loaded.model.config
    assert loaded.layout == "llm.c, llm.c"
    assert config.vocab_size == 97 and config.n_head == 4 and config.tie_word_embeddings
    assert config.activation_function == "gelu_new"
    assert_same_logits(loaded.model, model)


def test_arguments_and_heads_that_contradict_the_format_are_refused(tmp_path):
    path = tmp_path / "model.bin"
    write_llmc(path, 3, **SIZES)
    for name, value in {"n_head": 2, "activation_function": "gelu", "bias": False}.items():
        with pytest.raises(UserError, match=f"{name}={value!r} contradicts"):
            GPT.from_pretrained(path, **{name: value})
    write_llmc(path, 3, **(SIZES | {"H": 5}))
    with pytest.raises(CorruptInputError, match="n_head=5"):
        GPT.from_pretrained(path)
