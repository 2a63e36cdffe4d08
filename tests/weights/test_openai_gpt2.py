"""GPT-2 as OpenAI released it, in TensorFlow's files: read bit for bit, computed alike."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.weights.conftest import assert_same_logits
from tests.weights.fixtures.make_tensorflow import BRAIN, DIRECTORY, TYPES, values
from tests.weights.raw_files import (
    TABLE_HEADER,
    bundle,
    checksum,
    table,
    table_block,
    table_entry,
    write_bundle,
)
from tiedgpt import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.load import load
from tiedgpt.weights.source import Source, open_checkpoint
from tiedgpt.weights.tensors import decode

INDEX = "model.ckpt.index"
DATA = "model.ckpt.data-00000-of-00001"


@pytest.fixture
def gpt2_copy(tmp_path):
    return shutil.copytree(DIRECTORY / "gpt2", tmp_path / "gpt2")


def numbers(tensor):
    rows, _ = tensor.matrix_shape
    return tensor.rows(0, rows).reshape(tensor.shape)


# Files of TensorFlow's own.


def test_every_tensor_is_what_was_saved():
    checkpoint = open_checkpoint(DIRECTORY / "gpt2" / INDEX)
    expected = values()
    assert checkpoint.container == "TensorFlow"
    assert checkpoint.config == {
        "vocab_size": 61, "n_positions": 16, "n_embd": 12, "n_head": 3, "n_layer": 2,
    }  # fmt: skip
    assert [file.name for file in checkpoint.files] == [INDEX, DATA]
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in checkpoint.tensors.items():
        assert (tensor.dtype, tensor.shape) == ("float32", expected[name].shape)
        assert np.array_equal(numbers(tensor), expected[name]), name


def test_a_checkpoint_in_two_files_with_optimizer_slots_is_read():
    checkpoint = open_checkpoint(DIRECTORY / "tuned" / INDEX)
    assert len({tensor.storage.place for tensor in checkpoint.tensors.values()}) == 2
    for name, value in values().items():
        assert np.array_equal(numbers(checkpoint.tensors[name]), value)
        assert checkpoint.tensors[f"{name}/Adam"].shape == value.shape
    step = checkpoint.tensors["global_step"]
    assert (step.shape, step.dtype, step.native(0, 1).item()) == ((), "int64", 1)


def test_every_type_is_listed_and_those_of_numbers_are_read():
    tensors = open_checkpoint(DIRECTORY / "types" / INDEX).tensors
    for name, value in TYPES.items():
        native = tensors[name].native(0, tensors[name].matrix_shape[0])
        assert tensors[name].shape == value.shape
        assert native.tobytes() == value.tobytes(), name
    brain = tensors["brain"]
    assert brain.dtype == "bfloat16"
    assert np.array_equal(decode(brain.native(0, 2), "bfloat16"), BRAIN)
    assert (tensors["text"].dtype, tensors["text"].is_decodable) == ("string", False)


def test_a_tensor_in_slices_is_refused_by_name():
    with pytest.raises(UserError, match=r"model/wte.* is stored in slices"):
        open_checkpoint(DIRECTORY / "sliced" / INDEX)


def test_a_changed_byte_in_the_data_is_found_when_its_tensor_is_read(gpt2_copy):
    content = bytearray((gpt2_copy / DATA).read_bytes())
    tensors = open_checkpoint(gpt2_copy / INDEX).tensors
    for name in ("model/h0/attn/c_attn/w", "model/wte", "model/ln_f/b"):
        at = tensors[name].storage.stop - 1
        damaged = content.copy()
        damaged[at] ^= 16
        (gpt2_copy / DATA).write_bytes(damaged)
        for other, tensor in open_checkpoint(gpt2_copy / INDEX).tensors.items():
            if other != name:
                numbers(tensor)
                continue
            for _ in range(2):  # it stays an error, also for rows that are sound
                with pytest.raises(CorruptInputError, match=f"{name} do not match their checksum"):
                    tensor.rows(0, 1)


def test_a_changed_byte_anywhere_in_the_index_is_an_error_or_changes_nothing(gpt2_copy):
    content = (gpt2_copy / INDEX).read_bytes()
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        (gpt2_copy / INDEX).write_bytes(damaged)
        try:
            tensors = open_checkpoint(gpt2_copy / INDEX).tensors
        except CorruptInputError as error:
            assert INDEX in str(error)
        else:  # the block of the (empty) meta index is not needed, nor is the footer's padding
            assert len(tensors) == 28


def test_a_missing_file_of_data_is_named(gpt2_copy):
    (gpt2_copy / DATA).unlink()
    with pytest.raises(CorruptInputError, match=r"data-00000-of-00001.*not beside it"):
        open_checkpoint(gpt2_copy / INDEX)
    (gpt2_copy / DATA).mkdir()
    with pytest.raises(CorruptInputError, match="data-00000-of-00001"):
        open_checkpoint(gpt2_copy / INDEX)


def test_a_table_of_several_blocks_is_read(tmp_path):
    data = np.arange(600, dtype="<f4")
    keys = [(b"k%03d" % at, data[6 * at : 6 * at + 6].tobytes()) for at in range(100)]
    entries = [
        (key, table_entry(offset=24 * at, crc=checksum(raw))) for at, (key, raw) in enumerate(keys)
    ]
    blocks = [[TABLE_HEADER, *entries[:40]], entries[40:41], entries[41:]]
    path = write_bundle(tmp_path, table(*(table_block(*b) for b in blocks)), data.tobytes())
    stored = open_checkpoint(path).tensors
    assert list(stored) == [key.decode() for key, _ in keys]
    assert np.array_equal(np.stack([numbers(t) for t in stored.values()]).ravel(), data)


def test_a_name_is_never_a_path(tmp_path):
    path = write_bundle(tmp_path, bundle((b"../../etc/passwd", table_entry())))
    tensor = open_checkpoint(path).tensors["../../etc/passwd"]
    assert tensor.storage.place == str(tmp_path / "m.data-00000-of-00001")


def test_an_unknown_type_is_listed_and_not_read(tmp_path):
    path = write_bundle(tmp_path, bundle((b"w", table_entry(dtype=77))))
    tensor = open_checkpoint(path).tensors["w"]
    assert (tensor.shape, tensor.is_decodable) == ((2, 3), False)
    assert tensor.dtype == "TensorFlow type 77"


# As a GPT


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
    assert_same_logits(model, gpt2)


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
    assert "eos_token_id" not in Source("gpt2", opened=checkpoint).gpt.assumed
    wte = checkpoint.tensors["model/wte"]
    full = type(wte)("model/wte", (50257, 12), "float32", 0, wte.storage, None)
    checkpoint = replace(checkpoint, tensors={"model/wte": full})
    assert Source("gpt2", opened=checkpoint).gpt.assumed["eos_token_id"] == 50256


def test_other_tensorflow_checkpoints_are_refused():
    with pytest.raises(CorruptInputError, match="no GPT"):
        GPT.from_pretrained(DIRECTORY / "types")


def test_extra_tensors_are_kept_so_that_an_error_can_name_them(gpt2_copy):
    checkpoint = open_checkpoint(gpt2_copy / "model.ckpt.index")
    tensor = checkpoint.tensors["model/ln_f/g"]
    extra = {name: tensor for name in ("lm_head/w", "model/h0/gate/w", "model/nothing/Adam")}
    checkpoint = replace(checkpoint, tensors={**checkpoint.tensors, **extra})
    assert extra.keys() <= Source("gpt2", opened=checkpoint).gpt.tensors.keys()
