"""Rounding to 4 bits on a text: errors make up for one another, and nothing else changes."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tiedgpt import GPT, GPTConfig
from tiedgpt.cli.main import main
from tiedgpt.errors import UserError
from tiedgpt.weights.convert import convert
from tiedgpt.weights.formats.packed import layout, open_packed, place_of
from tiedgpt.weights.formats.packed.calibration import calibrate, round_matrix, sample_ids
from tiedgpt.weights.formats.packed.panels import Panels, from_bf16, pack, unpack
from tiedgpt.weights.formats.packed.writer import pack_gpt, save_packed
from tiedgpt.weights.load import load

TEXT = "the cat sat on the mat and the dog sat on the log, 2 + 2 = 4\n" * 40


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request) -> GPT:
    """A model of a width not divisible by 32, whose states prefer some directions."""
    torch.manual_seed(5)
    config = GPTConfig(vocab_size=97, n_positions=24, n_embd=72, n_layer=2, n_head=4)
    model = GPT(replace(config, tie_word_embeddings=request.param)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        for norm in (m for m in model.modules() if isinstance(m, nn.LayerNorm)):
            norm.weight *= torch.linspace(0.05, 3, 72)
    return model


@pytest.fixture
def text() -> torch.Tensor:
    """Return ids (N,); low ids are frequent."""
    uniform = torch.rand(2400, generator=torch.Generator().manual_seed(1))
    return (97 * uniform**3).long()


def plain(weight):
    return torch.from_numpy(unpack(pack(weight.detach().numpy(), "int4")))


def cost(rounded, weight, inputs):
    """The sum of squares by which outputs differ."""
    return float((inputs @ (rounded - weight).T.detach()).square().sum())


def faces(model, text):
    """Return the inputs of W's rows: final states h and the gradients g at the embedding."""
    ids, read = text.view(-1, 24), []
    hook = model.wte.register_forward_hook(lambda _, __, out: read.append(out) or out.retain_grad())
    (model.loss(ids[:, :-1], ids[:, 1:]) * ids[:, 1:].numel()).backward()
    hook.remove()
    with torch.no_grad():
        return model.body(ids).flatten(0, 1), read[0].grad.flatten(0, 1)


def test_calibration_reduces_the_error_on_both_sides_of_w(model, text):
    h, g = faces(model, text)
    rounded, _ = calibrate(model, text)
    weight, reads = model.wte.weight, rounded.wte.weight
    predicts, own = (
        (reads, weight) if model.head is None else (rounded.head.weight, model.head.weight)
    )
    assert cost(predicts, own, h) < 0.7 * cost(plain(own), own, h)
    assert cost(reads, weight, g) < 0.9 * cost(plain(weight), weight, g)
    if model.head is None:  # one face alone would cost the other one more
        for_h, for_g = (round_matrix(weight.detach(), x.T @ x)[0] for x in (h, g))
        assert cost(for_h, weight, h) < cost(reads, weight, h) < cost(for_g, weight, h)
        assert cost(for_g, weight, g) < cost(reads, weight, g) < cost(for_h, weight, g)


def test_calibration_brings_predictions_closer(model, text):
    ids = text.view(-1, 24)

    def divergence(other):
        with torch.no_grad():
            p, q = (each(ids).log_softmax(-1) for each in (model, other))
        return float((p.exp() * (p - q)).sum(-1).mean())

    rounded, _ = calibrate(model, text)
    simple = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in simple.parameters():
            if parameter.ndim == 2 and parameter is not simple.wpe.weight:
                parameter.copy_(plain(parameter))
    assert divergence(rounded) < 0.75 * divergence(simple)


def test_calibration_keeps_the_layout_and_changes_only_matrices(model, text, tmp_path):
    before = copy.deepcopy(model.state_dict())
    packed, usual = pack_gpt(model, "int4", calibration=text.tolist()), pack_gpt(model, "int4")
    assert {n: (a.shape, a.dtype) for n, a in packed.arrays.items()} == layout(model.config, "int4")
    for name, array in packed.arrays.items():
        is_matrix = name.endswith((".weights", ".scales"))
        assert np.array_equal(array, usual.arrays[name]) is not is_matrix
    rounded, scales = calibrate(model, text)
    for name, scales_found in scales.items():
        key, index = place_of(name)
        array, bits = (
            packed.arrays[key][index],
            packed.arrays[key.replace("weights", "scales")][index],
        )
        weight = rounded.get_parameter(name)
        np.testing.assert_array_equal(unpack(Panels(array, bits, *weight.shape)), weight)
        held = from_bf16(bits).transpose(0, 2, 1).reshape(-1, bits.shape[1])
        np.testing.assert_array_equal(
            held[: len(scales_found), : scales_found.shape[1]], scales_found
        )
    save_packed(packed, tmp_path / "p")
    assert open_packed(tmp_path / "p").precision == "int4"
    for name, parameter in load(tmp_path / "p").model.named_parameters():
        assert torch.equal(parameter, rounded.get_parameter(name))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_zero_rows_and_unused_inputs_are_calibrated(text):
    weight = torch.randn(3, 70)
    weight[1] = 0
    for hessian in (torch.zeros(70, 70), torch.eye(70)):
        rounded, scales = round_matrix(weight, hessian)
        torch.testing.assert_close(rounded, plain(weight))
        assert scales.shape == (3, 3) and not rounded[1].any()


def test_a_model_samples_its_calibration_text(model):
    ids = sample_ids(model, 1000)
    assert ids.shape == (1008,) and torch.equal(ids, sample_ids(model, 1000))
    assert len(ids.unique()) > 40 and ids.max() < 97
    assert not torch.equal(ids[:24], ids[24:48])
    begun = sample_ids(GPT(replace(model.config, bos_token_id=3)), 50).view(-1, 24)[:, 0]
    assert begun.tolist() == [3, 3, 3]
    calibrate(model, ids)


def test_unsuitable_ids_are_refused(model, text):
    with pytest.raises(UserError, match="for precision int4, got int8"):
        pack_gpt(model, "int8", calibration=text)
    with pytest.raises(UserError, match="has 287 tokens and must have at least 288"):
        calibrate(model, text[:287])
    with pytest.raises(UserError, match="integers"):
        calibrate(model, text.float())
    with pytest.raises(UserError, match="integers"):
        calibrate(model, text.view(-1, 24))
    with pytest.raises(UserError, match="between 0 and 96"):
        calibrate(model, text + 60)
    with torch.no_grad():
        model.h[1].mlp.c_fc.weight[2, 3] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        pack_gpt(model, "int4", calibration=text)


@pytest.mark.parametrize("text", ["text.txt", "samples"])
def test_convert_calibrates_on_a_text_or_on_samples(directory, tmp_path, monkeypatch, capsys, text):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    options = ["--to", "packed", "--precision", "int4", "--format", "json"]
    assert main(["convert", str(directory), "p", *options, "--calibrate", text]) == 0
    assert json.loads(capsys.readouterr().out)["difference"] < 0.2
    convert(load(directory), Path("plain"), "packed", tokenizer=None, precision="int4")
    ours, plains = (open_packed(name).arrays for name in ("p", "plain"))
    assert not np.array_equal(ours["wte.weights"], plains["wte.weights"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--precision", "int8", "--calibrate", "text.txt"], "--to packed --precision int4"),
        (["--calibrate", "text.txt"], "--to packed --precision int4"),
        (["--precision", "int4", "--calibrate", "none.txt"], "none.txt: cannot be read"),
        (["--precision", "int4", "--calibrate", "short.txt"], "must have at least 128"),
        (
            ["--precision", "int4", "--calibrate", "empty.txt"],
            "has 0 tokens and must have at least",
        ),
        (["--precision", "int4", "--calibrate", "latin.txt"], "latin.txt is damaged or no text"),
        (["--precision", "int4", "--calibrate", "text.txt"], "needs the model's tokenizer"),
    ],
)
def test_convert_refuses_bad_calibration_options(
    directory, tmp_path, monkeypatch, capsys, options, says
):
    monkeypatch.chdir(tmp_path)
    if "tokenizer" in says:
        load(directory).model.save_pretrained("bare")
        directory = "bare"
    Path("text.txt").write_text(TEXT)
    Path("short.txt").write_text("the cat")
    Path("empty.txt").touch()
    Path("latin.txt").write_bytes("naïve".encode("latin-1"))
    assert main(["convert", str(directory), "p", "--to", "packed", *options]) != 0
    assert says in " ".join(capsys.readouterr().err.split())
    assert not Path("p").exists()
