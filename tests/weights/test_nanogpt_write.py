"""What is written for nanoGPT loads strictly into its architecture, and reads back as it was."""

import pytest
import torch
from torch.testing import assert_close

from tests.weights.karpathy import ARGS, Karpathy, save_nanogpt, some_ids
from tiedgpt import GPT, GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.tie import audit
from tiedgpt.weights.formats.nanogpt import write as write_nanogpt
from tiedgpt.weights.load import load

pytestmark = pytest.mark.filterwarnings("ignore::tiedgpt.weights.load.CheckpointWarning")

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
    theirs = Karpathy(checkpoint["model_args"], approximate=approximate)
    theirs.load_state_dict(checkpoint["model"])
    return theirs.eval()


@pytest.mark.parametrize("bias", [False, True])
def test_nanogpt_computes_the_same(tmp_path, bias):
    model = model_of(bias=bias)
    write_nanogpt(model, tmp_path / "ckpt.pt")
    theirs = as_nanogpt_samples(tmp_path / "ckpt.pt")
    with torch.no_grad():
        assert_close(theirs(some_ids(ARGS)), model(some_ids(ARGS)), rtol=1e-4, atol=1e-4)


def test_from_nanogpt_and_back_is_exact(tmp_path):
    theirs = Karpathy(ARGS)
    model = GPT.from_pretrained(save_nanogpt(tmp_path / "ckpt.pt", theirs, ARGS))
    write_nanogpt(model, tmp_path / "again.pt")
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    assert again["model_args"] == ARGS
    assert again["model"].keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again["model"][name], tensor)


def test_one_storage_is_saved_for_both_faces(tmp_path):
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


def test_gpt2s_gelu_is_not_nanogpts_and_must_be_accepted(tmp_path):
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
