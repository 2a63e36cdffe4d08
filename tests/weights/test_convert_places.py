"""`tiedgpt convert`: places that cannot be written, what is left behind, and the model itself."""

import os
import signal
from pathlib import Path

import pytest
import torch

from tiedgpt import GPT
from tiedgpt.cli.main import main
from tiedgpt.errors import UserError
from tiedgpt.text import Tokenizer
from tiedgpt.weights import convert as converting
from tiedgpt.weights.convert import convert
from tiedgpt.weights.load import load


def test_a_model_stays_what_it_was_when_it_is_written_coarser(saved, tmp_path):
    loaded = load(saved)
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    convert(loaded, tmp_path / "half", "transformers", tokenizer=None, precision="bf16")
    assert GPT.from_pretrained(tmp_path / "half").wte.weight.dtype == torch.bfloat16
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype


@pytest.mark.parametrize("to, name", [("transformers", "d"), ("onnx", "m.onnx")])
def test_sixteen_bits_written_in_thirty_two_come_back_bit_for_bit(tiny, tmp_path, to, name):
    tiny.bfloat16().save_pretrained(tmp_path / "bf16")
    loaded = load(tmp_path / "bf16")
    written = convert(loaded, tmp_path / name, to, tokenizer=None, precision="fp32")
    assert written.exact


def test_a_tokenizer_of_more_tokens_than_rows_is_refused(saved, tmp_path):
    tokenizer = Tokenizer.train(["the cat sat on the mat"] * 9, vocab_size=260)
    with pytest.raises(UserError, match="do not belong together"):
        convert(load(saved), tmp_path / "d", "transformers", tokenizer=tokenizer)


def test_places_that_cannot_be_are_told_in_a_line(saved, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    places = ["new/..", "file/m.onnx", "q" * 300, "pipe"]
    for place in places:
        rest = ["convert", str(saved), str(tmp_path / place), "--to", "onnx", "--overwrite"]
        assert main(rest) == 1
        assert capsys.readouterr().err.startswith("error: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe", "saved"]
    assert (tmp_path / "pipe").is_fifo()


def test_termination_leaves_nothing_half_written(saved, tmp_path, monkeypatch, capsys):
    def stopped(*_):
        assert list(tmp_path.glob(".m.onnx.tmp-*"))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(converting, "_compare", stopped)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["convert", str(saved), str(tmp_path / "m.onnx"), "--to", "onnx"]) == 75
    assert signal.getsignal(signal.SIGTERM) is before
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_message_is_one_line_whatever_a_path_is_called(tmp_path: Path, capsys):
    assert main(["convert", str(tmp_path / "no\nsuch\x1b"), str(tmp_path / "m.gguf")]) in (1, 2)
    err = capsys.readouterr().err
    assert "\x1b" not in err and all(line[:6] in ("error:", "hint: ") for line in err.splitlines())


def test_what_a_killed_conversion_left_is_swept_and_a_running_ones_is_not(saved, tmp_path):
    gone, running = f".x.onnx.tmp-{2**22 - 1}-ab", f".x.onnx.tmp-{os.getpid()}-ab"
    for name in (gone, running, ".other.tmp-1-ab"):
        (tmp_path / name).mkdir()
    convert(load(saved), tmp_path / "x.onnx", "onnx", tokenizer=None)
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {running, ".other.tmp-1-ab", "saved", "x.onnx"}


@pytest.mark.parametrize(
    ("to", "name"),
    [("transformers", "a.safetensors"), ("transformers", "a.gguf"), ("packed", "a.pt")],
)
def test_a_directory_is_not_given_the_suffix_of_a_file(saved, tmp_path, to, name):
    with pytest.raises(UserError, match="writes a directory"):
        convert(load(saved), tmp_path / name, to, tokenizer=None)
    assert not (tmp_path / name).exists()
