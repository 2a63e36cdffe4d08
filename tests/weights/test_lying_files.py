"""Files that claim more than they hold, or say two things; and what must not be lost unsaid."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.weights.llmc_files import write_checkpoint
from tiedgpt import GPT
from tiedgpt.errors import CorruptInputError
from tiedgpt.weights.formats.onnx.writer import write as write_onnx
from tiedgpt.weights.load import load
from tiedgpt.weights.sources import open_checkpoint


@pytest.fixture
def as_torch(saved: Path, tmp_path: Path):
    """Write a directory of torch.save with the model's tensors, some of them changed."""

    def write(changes: dict, *, config: dict | None = None, zipped: bool = True) -> Path:
        state = load_file(saved / "model.safetensors")
        state |= {name: change(state) for name, change in changes.items()}
        told = json.loads((saved / "config.json").read_text()) | (config or {})
        directory = tmp_path / "torch"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(told))
        torch.save(state, directory / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        return directory

    return write


@pytest.mark.parametrize("given", [{}, {"resolve": "untie"}])
def test_two_names_of_one_storage_do_not_move_as_one_when_untied(as_torch, given):
    path = as_torch(
        {"lm_head.weight": lambda state: state["transformer.wte.weight"]},
        config={} if given else {"tie_word_embeddings": False},
    )
    model = GPT.from_pretrained(path, **given)
    with torch.no_grad():
        model.head.weight.zero_()
    assert model.wte.weight.any()


def test_rows_that_repeat_take_no_memory_on_their_word(as_torch):
    wide = {"transformer.wte.weight": lambda _: torch.ones(1, 32).expand(50_000_000, 32)}
    with pytest.raises(CorruptInputError, match=r"wte.weight of shape \(50000000, 32\)"):
        GPT.from_pretrained(as_torch(wide))


class _Grows:
    def __reduce__(self):
        return bytearray, (1 << 33,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_makes_bytes_of_any_number_is_refused(as_torch, zipped):
    with pytest.raises(CorruptInputError, match="bytearray"):
        GPT.from_pretrained(as_torch({"more": lambda _: _Grows()}, zipped=zipped))


def test_what_a_file_says_of_itself_holds_over_a_config_beside_it(tmp_path):
    write_checkpoint(tmp_path / "model.bin", 3, T=24, V=97, L=1, H=4, C=32, Vp=128)
    (tmp_path / "config.json").write_text('{"num_heads": 2, "vocab_size": 5}')
    assert GPT.from_pretrained(tmp_path / "model.bin").config.n_head == 4


def test_a_missing_or_extra_layer_is_named(rewrite):
    def without_layer_2(state):
        return {name: tensor for name, tensor in state.items() if ".h.2." not in name}

    with pytest.raises(CorruptInputError, match="n_layer=3, the weights have 2 layers"):
        GPT.from_pretrained(rewrite(tensors=without_layer_2))
    with pytest.raises(CorruptInputError, match="n_layer=1, the weights have 2 layers"):
        GPT.from_pretrained(rewrite(config={"n_layer": 1}))


def test_a_name_without_end_makes_no_message_without_end(rewrite):
    with pytest.raises(CorruptInputError) as caught:
        GPT.from_pretrained(rewrite(tensors=lambda state: state | {"x" * 100_000: torch.zeros(1)}))
    assert len(str(caught.value)) < 1000


def test_an_onnx_files_data_beside_it_count_as_its_files(tiny, tmp_path):
    write_onnx(tiny, tmp_path / "m.onnx", largest_file=1000)
    assert {file.name for file in open_checkpoint(tmp_path / "m.onnx").files} == {
        "m.onnx", "m.onnx_data",
    }  # fmt: skip


def test_what_wtes_type_rounds_is_told_and_kept_when_asked_for(rewrite):
    def halved(state):
        state["transformer.wte.weight"] = state["transformer.wte.weight"].half()

    path = rewrite(tensors=halved)
    loaded = load(path)
    assert loaded.model.wpe.weight.dtype == torch.float16
    assert any("were rounded to float16, wte.weight's type" in note for note in loaded.notes)
    exact = load_file(path / "model.safetensors")["transformer.wpe.weight"]
    kept = load(path, dtype=torch.float32)
    assert not kept.notes and torch.equal(kept.model.wpe.weight, exact)
