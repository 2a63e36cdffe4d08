"""What is written for llm.c is what its readers expect, byte for byte, and reads back as it was."""

import dataclasses
import errno

import numpy as np
import pytest
import torch

from tests.weights.llmc_files import ORDER, read_checkpoint, to_bfloat16
from tiedgpt import GPT, GPTConfig
from tiedgpt.errors import NoRoomError, UserError
from tiedgpt.tie import untie
from tiedgpt.weights.formats.llmc import write as write_llmc
from tiedgpt.weights.load import load


def test_float32_is_what_llmc_reads(tiny, tmp_path):
    write_llmc(tiny, tmp_path / "model.bin")
    sizes, arrays = read_checkpoint(tmp_path / "model.bin")
    assert sizes == {"T": 24, "V": 97, "L": 3, "H": 4, "C": 32, "Vp": 128}
    state = {name: parameter.detach().numpy() for name, parameter in tiny.named_parameters()}
    assert not arrays["wte"][97:].any()
    assert np.array_equal(arrays["wte"][:97], state["wte.weight"])
    for theirs, units, ours in ORDER[1:]:
        expected = state[ours] if not units.startswith("L") else np.stack(
            [state[f"h.{layer}.{ours}"] for layer in range(3)]
        )  # fmt: skip
        assert np.array_equal(arrays[theirs], expected), theirs


def test_bfloat16_is_rounded_to_the_nearest(tiny, tmp_path):
    write_llmc(tiny, tmp_path / "model.bin", precision="bf16")
    _, arrays = read_checkpoint(tmp_path / "model.bin")
    expected = to_bfloat16(tiny.wpe.weight.detach().numpy())[1]
    assert np.array_equal(arrays["wpe"], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_is_exact(tiny, tmp_path, dtype):
    tiny.to(dtype)
    write_llmc(tiny, tmp_path / "model.bin")
    again = load(tmp_path / "model.bin").model
    ours = dict(tiny.named_parameters())
    assert again.config == dataclasses.replace(tiny.config)
    assert [n for n, _ in again.named_parameters()] == list(ours)
    for name, parameter in again.named_parameters():
        assert parameter.dtype == dtype and torch.equal(parameter, ours[name])


def test_one_w_is_in_the_file(tiny, tmp_path):
    write_llmc(tiny, tmp_path / "model.bin")
    numbers = tiny.config.parameter_count() + (128 - 97) * 32
    assert (tmp_path / "model.bin").stat().st_size == 1024 + 4 * numbers


def test_a_vocabulary_of_whole_blocks_gets_no_padding(tmp_path):
    model = GPT(GPTConfig(vocab_size=256, n_positions=4, n_embd=8, n_layer=1, n_head=2))
    write_llmc(model, tmp_path / "model.bin")
    assert read_checkpoint(tmp_path / "model.bin")[0]["Vp"] == 256


def test_without_biases_zeros_are_written(tmp_path, ids):
    config = GPTConfig(vocab_size=97, n_positions=24, n_embd=32, n_layer=2, n_head=4, bias=False)
    model = GPT(config).eval()
    write_llmc(model, tmp_path / "model.bin")
    _, arrays = read_checkpoint(tmp_path / "model.bin")
    assert not any(arrays[name].any() for name, _, ours in ORDER if ours.endswith("bias"))
    again = GPT.from_pretrained(tmp_path / "model.bin")
    assert again.config.bias
    assert torch.allclose(again(ids), model(ids), atol=1e-6)


REFUSED = {
    "norm": {"norm": "post"},
    "activation_function": {"activation_function": "gelu"},
    "layer_norm_epsilon": {"layer_norm_epsilon": 1e-6},
    "n_inner": {"n_inner": 48},
    "attention_windows": {"attention_windows": (4, 2)},
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_llmc_does_not_compute_is_refused_by_name(field, tmp_path):
    sizes = {"vocab_size": 9, "n_positions": 4, "n_embd": 8, "n_layer": 2, "n_head": 2}
    model = GPT(GPTConfig(**sizes | REFUSED[field]))
    with pytest.raises(UserError, match=f"(^{field}=|activation ).* cannot be written: llm.c"):
        write_llmc(model, tmp_path / "model.bin")
    assert not list(tmp_path.iterdir())


def test_a_head_of_its_own_is_refused(tiny, tmp_path):
    untie(tiny)
    with pytest.raises(UserError, match="a head of its own"):
        write_llmc(tiny, tmp_path / "model.bin")


def test_adapters_are_not_written_as_zeros(tiny, tmp_path):
    tiny.h[0].mlp.c_fc = torch.nn.Sequential(tiny.h[0].mlp.c_fc)
    with pytest.raises(UserError, match=r"for llm\.c: h\.0\.mlp\.c_fc"):
        write_llmc(tiny, tmp_path / "model.bin")
    assert not list(tmp_path.iterdir())


def test_precisions_that_llmc_lacks_are_refused(tiny, tmp_path):
    with pytest.raises(UserError, match=r"precision must be one of fp32, bf16 for .* got 'fp16'"):
        write_llmc(tiny, tmp_path / "model.bin", precision="fp16")
    tiny.half()
    with pytest.raises(UserError, match=r"precision must be one of fp32, bf16 for .* got 'fp16'"):
        write_llmc(tiny, tmp_path / "model.bin")
    write_llmc(tiny, tmp_path / "model.bin", precision="fp32")
    again = GPT.from_pretrained(tmp_path / "model.bin")
    assert torch.equal(again.wte.weight, tiny.wte.weight.float())


def test_progress_ends_at_all_bytes(tiny, tmp_path):
    seen = []
    write_llmc(tiny, tmp_path / "model.bin", progress=lambda *now: seen.append(now))
    done, whole = seen[-1]
    assert done == whole == (tmp_path / "model.bin").stat().st_size - 1024
    assert [now for now, _ in seen] == sorted(now for now, _ in seen)


def test_a_failure_leaves_what_was_there(tiny, tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"before")

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(NoRoomError):
        write_llmc(tiny, path, progress=full)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"before"]
