"""From every format that is written to every other, and what happens when it cannot be."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.tie.checkpoints import break_disk, flip_a_bit
from tiedgpt import GPT, Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.errors import CheckFailedError, CorruptInputError, UserError
from tiedgpt.weights.convert import convert
from tiedgpt.weights.load import load
from tiedgpt.weights.registry import writers

pytestmark = pytest.mark.filterwarnings("ignore::tiedgpt.weights.load.CheckpointWarning")
SUFFIXES = {
    "transformers": "", "gguf": ".gguf", "onnx": ".onnx", "nanogpt": ".pt", "packed": "",
}  # fmt: skip
OPTIONS = {"nanogpt": {"approximate_gelu": True}, "packed": {"precision": "fp32"}}


@pytest.fixture
def tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of the shared model."""
    return Tokenizer.from_pretrained(directory)


def to(source: Path, path: Path, to: str, tokenizer: Tokenizer, **options):
    options = OPTIONS.get(to, {}) | options
    return convert(load(source), path, to, tokenizer=tokenizer, **options)


@pytest.mark.parametrize("second", writers())
@pytest.mark.parametrize("first", writers())
def test_a_model_goes_through_any_two_formats_bit_for_bit(
    directory, tokenizer, tmp_path, ids, first, second
):
    one = to(directory, tmp_path / f"one{SUFFIXES[first]}", first, tokenizer)
    two = to(one.path, tmp_path / f"two{SUFFIXES[second]}", second, tokenizer)
    assert one.exact and two.exact and one.copies == two.copies == 1
    model, again = GPT.from_pretrained(directory), GPT.from_pretrained(two.path)
    assert again.head is None
    assert torch.equal(again(ids), model(ids))


@pytest.mark.parametrize(
    ("name", "precision"),
    [(name, p) for name, writer in writers().items() for p in writer.precisions if p != "fp32"],
)
def test_coarser_precisions_stay_within_the_reported_tolerance(
    directory, tokenizer, tmp_path, name, precision
):
    path = tmp_path / f"coarse{SUFFIXES[name]}"
    written = to(directory, path, name, tokenizer, precision=precision)
    assert not written.exact
    assert 0 < written.difference < written.tolerance
    if name != "packed":  # which pads a width of 32 to 64
        assert written.n_bytes < 0.8 * (directory / "model.safetensors").stat().st_size


def test_a_second_copy_of_w_is_counted(directory, tokenizer, tmp_path):
    written = to(directory, tmp_path / "a.gguf", "gguf", tokenizer, duplicate_head=True)
    assert written.copies == 2 and written.exact
    assert GPT.from_pretrained(tmp_path / "a.gguf").head is None


def test_a_character_vocabulary_is_converted_too(tiny, ids, tmp_path):
    few = Tokenizer.characters(["abc3\n"])
    model = GPT(replace(tiny.config, vocab_size=len(few)))
    model.save_pretrained(tmp_path / "few")
    few.save_pretrained(tmp_path / "few")
    written = to(tmp_path / "few", tmp_path / "again", "transformers", few)
    assert written.with_tokenizer and written.exact
    assert Tokenizer.from_pretrained(tmp_path / "again").encode("cab") == few.encode("cab")


def test_another_gelu_needs_consent_and_is_reported(tiny, tokenizer, tmp_path):
    GPT(
        replace(tiny.config, vocab_size=len(tokenizer), activation_function="gelu", eos_token_id=0)
    ).save_pretrained(tmp_path / "exact")
    with pytest.raises(UserError, match="approximate_gelu"):
        to(tmp_path / "exact", tmp_path / "x.gguf", "gguf", tokenizer)
    path = tmp_path / "x.gguf"
    written = to(tmp_path / "exact", path, "gguf", tokenizer, approximate_gelu=True)
    assert written.exact and "computes gelu_new" in written.notes[0]


def test_architectures_without_a_transformers_class_are_reported(tiny, tmp_path):
    GPT(replace(tiny.config, attention_windows=(0, 4))).save_pretrained(tmp_path / "banded")
    written = to(tmp_path / "banded", tmp_path / "again", "transformers", None)
    assert written.exact and "refuses it" in written.notes[0]


def test_a_directory_of_onnx_holds_config_and_tokenizer(directory, tokenizer, tmp_path):
    to(directory, tmp_path / "dir", "onnx", tokenizer)
    assert {"model.onnx", "config.json", "tokenizer.json"} <= {
        file.name for file in (tmp_path / "dir").iterdir()
    }
    assert GPT.from_pretrained(tmp_path / "dir").config == GPT.from_pretrained(directory).config


def test_tokenizer_config_has_the_models_context_length(directory, tokenizer, tmp_path):
    to(directory, tmp_path / "dir", "transformers", tokenizer)
    peer = AutoTokenizer.from_pretrained(tmp_path / "dir")
    assert peer.model_max_length == GPT.from_pretrained(directory).config.n_positions
    assert Tokenizer.from_pretrained(tmp_path / "dir").encode("abc") == tokenizer.encode("abc")


@pytest.mark.parametrize(
    ("name", "format", "says"),
    [("x.onnx", "onnx", "does not hold the model"), ("p", "packed", r"c_attn\.weights")],
)
def test_a_copy_that_differs_on_reopening_is_not_kept(
    saved, tmp_path, monkeypatch, name, format, says
):
    (tmp_path / "x.onnx").write_bytes(b"before")
    loaded = load(saved)
    break_disk(monkeypatch, flip_a_bit)
    with pytest.raises(CheckFailedError, match=says):
        convert(loaded, tmp_path / name, format, tokenizer=None, overwrite=True)
    assert (tmp_path / "x.onnx").read_bytes() == b"before"
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "x.onnx"}


def test_existing_and_impossible_places_are_refused(directory, tokenizer, tmp_path):
    (tmp_path / "x.onnx").write_bytes(b"mine")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "mine").touch()
    for name, format, says in (
        ("x.onnx", "onnx", "there already"),
        ("d", "transformers", "new or empty"),
        ("d", "gguf", "is no file that could be replaced"),
        ("a.safetensors", "transformers", "writes a directory"),
        ("a.gguf", "transformers", "writes a directory"),
        ("a.pt", "packed", "writes a directory"),
    ):
        with pytest.raises(UserError, match=says):
            to(directory, tmp_path / name, format, tokenizer)
    assert {path.name for path in tmp_path.iterdir()} == {"x.onnx", "d"}
    to(directory, tmp_path / "x.onnx", "onnx", tokenizer, overwrite=True)
    assert (tmp_path / "x.onnx").stat().st_size > 4


def test_the_command_prints_the_model_and_the_checks(directory, tmp_path, capsys):
    assert main(["convert", str(directory), str(tmp_path / "a.gguf"), "--to", "gguf"]) == 0
    out = capsys.readouterr().out
    assert "safetensors, transformers gpt2" in out and str(tmp_path / "a.Modelfile") in out
    assert "one matrix of" in out and "reads and predicts" in out
    assert "tokenizer bpe, " in out
    assert "W is stored once" in out
    assert "bit for bit" in out
    code = main(
        ["convert", str(tmp_path / "a.gguf"), str(tmp_path / "b"), "--to", "transformers",
         "--precision", "fp16", "--format", "json"]
    )  # fmt: skip
    facts = json.loads(capsys.readouterr().out)
    assert code == 0 and facts["layout"] == "GGUF, GGUF gpt2" and facts["tied"]
    assert not facts["exact"] and facts["difference"] < facts["tolerance"]
    assert Tokenizer.from_pretrained(tmp_path / "b").encode("the cat")


def test_missing_facts_of_a_file_are_command_line_options(directory, tmp_path, capsys):
    model = GPT.from_pretrained(directory)
    state = {f"transformer.{name}": p for name, p in model.named_parameters()}
    state["lm_head.weight"] = torch.randn_like(model.wte.weight)
    torch.save(state, tmp_path / "bare.pt")
    command = ["convert", str(tmp_path / "bare.pt"), str(tmp_path / "out"), "--to", "transformers"]
    assert main(command) == 3
    assert "keep-input" in capsys.readouterr().err
    assert main([*command, "--resolve", "keep-input"]) == 1
    assert "--n-head" in capsys.readouterr().err
    command += ["--resolve", "keep-input", "--n-head", "4", "--activation-function", "gelu_new"]
    assert main(command) == 0
    again = GPT.from_pretrained(tmp_path / "out")
    assert np.array_equal(again.wte.weight.detach(), model.wte.weight.detach())


def test_a_precision_that_a_format_lacks_is_refused(directory, tokenizer, tmp_path):
    for name, writer in writers().items():
        path, precisions = tmp_path / f"out{SUFFIXES[name]}", ", ".join(writer.precisions)
        with pytest.raises(UserError, match=f"not written in 'int3' here; .* {precisions}$"):
            to(directory, path, name, tokenizer, precision="int3")
    for precision, name in [("int8", "packed"), ("q8_0", "gguf")]:
        with pytest.raises(UserError, match=f"bf16; {precision} is of --to {name}$"):
            to(directory, tmp_path / "out", "transformers", tokenizer, precision=precision)


def test_every_precision_of_a_format_is_an_option_value(directory, tmp_path):
    for precision in writers()["gguf"].precisions:
        dest = tmp_path / f"{precision}.gguf"
        assert main(["convert", str(directory), str(dest), "--precision", precision]) == 0
        assert dest.stat().st_size


def test_writing_a_coarser_copy_does_not_change_the_model(saved, tmp_path):
    loaded = load(saved)
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    convert(loaded, tmp_path / "half", "transformers", tokenizer=None, precision="bf16")
    assert GPT.from_pretrained(tmp_path / "half").wte.weight.dtype == torch.bfloat16
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype


@pytest.mark.parametrize("to, name", [("transformers", "d"), ("onnx", "m.onnx")])
def test_sixteen_bit_weights_in_float32_files_are_exact(tiny, tmp_path, to, name):
    tiny.bfloat16().save_pretrained(tmp_path / "bf16")
    loaded = load(tmp_path / "bf16")
    written = convert(loaded, tmp_path / name, to, tokenizer=None, precision="fp32")
    assert written.exact


def test_a_tokenizer_of_more_tokens_than_rows_is_refused(saved, tmp_path):
    tokenizer = Tokenizer.train(["the cat sat on the mat"] * 9, vocab_size=260)
    with pytest.raises(UserError, match="do not belong together"):
        convert(load(saved), tmp_path / "d", "transformers", tokenizer=tokenizer)


def test_a_chat_template_that_is_no_text_is_named(saved, tmp_path):
    (saved / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CorruptInputError, match=r"saved/chat_template\.jinja .*chat template"):
        convert(load(saved), tmp_path / "a.gguf", "gguf", tokenizer=None)


def test_impossible_output_paths_are_refused_in_one_line(saved, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    places = ["new/..", "file/m.onnx", "q" * 300, "pipe"]
    for path_name in places:
        rest = ["convert", str(saved), str(tmp_path / path_name), "--to", "onnx", "--overwrite"]
        assert main(rest) == 1
        assert capsys.readouterr().err.startswith("error: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe", "saved"]
    assert (tmp_path / "pipe").is_fifo()


def test_termination_leaves_nothing_half_written(saved, tmp_path, monkeypatch, capsys):
    def stopped(*_):
        assert list(tmp_path.glob(".m.onnx.tmp-*"))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(os, "replace", stopped)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["convert", str(saved), str(tmp_path / "m.onnx"), "--to", "onnx"]) == 75
    assert signal.getsignal(signal.SIGTERM) is before
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_message_is_one_line_for_any_path(tmp_path: Path, capsys):
    assert main(["convert", str(tmp_path / "no\nsuch\x1b"), str(tmp_path / "m.gguf")]) in (1, 2)
    err = capsys.readouterr().err
    assert "\x1b" not in err and all(line[:6] in ("error:", "hint: ") for line in err.splitlines())


def test_leftovers_of_killed_conversions_are_removed_and_running_ones_kept(saved, tmp_path):
    ended, running = f".x.onnx.tmp-{2**22 - 1}-ab", f".x.onnx.tmp-{os.getpid()}-ab"
    for name in (ended, running, ".other.tmp-1-ab"):
        (tmp_path / name).mkdir()
    convert(load(saved), tmp_path / "x.onnx", "onnx", tokenizer=None)
    names_left = {path.name for path in tmp_path.iterdir()}
    assert names_left == {running, ".other.tmp-1-ab", "saved", "x.onnx"}
