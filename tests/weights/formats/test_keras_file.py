"""Keras's files: HDF5, its shards and archives; hostile archives and indices are refused."""

import io
import json
import shutil
import time
import zipfile

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.weights.keras_saved import unpack
from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.weights.formats.keras_file import is_archive, open_keras, tokenizer_files
from tiedgpt.weights.opening import open_checkpoint


@pytest.fixture
def saved(tmp_path):
    return unpack(tmp_path)


def by_h5py(file):
    found = {}

    def keep(name, item):
        if isinstance(item, h5py.Dataset):
            found[name] = item[()]

    with h5py.File(file) as opened:
        opened.visititems(keep)
    return found


def ours(path):
    return {
        name: tensor.rows(0, tensor.matrix_shape[0]).reshape(tensor.shape)
        for name, tensor in open_keras(path).tensors.items()
    }


def assert_same(left, right):
    assert left.keys() == right.keys() and left
    for name, array in left.items():
        assert np.array_equal(array, right[name]), name


def test_numbers_are_h5pys(saved):
    path = saved / "preset" / "model.weights.h5"
    assert_same(ours(path), by_h5py(path))
    archive = saved / "model.keras"
    inner = io.BytesIO(zipfile.ZipFile(archive).read("model.weights.h5"))
    assert_same(ours(archive), {k: v for k, v in by_h5py(inner).items() if k[:10] != "optimizer/"})


def test_blocks_are_read_where_they_lie(saved):
    path = saved / "preset" / "model.weights.h5"
    name = "layers/reversible_embedding/vars/0"
    expected, tensor = by_h5py(path)[name], open_keras(saved / "preset" / path.name).tensors[name]
    assert np.array_equal(tensor.rows(3, 9), expected[3:9])
    assert np.array_equal(tensor.columns(2, 5), expected[:, 2:5].T)
    assert tensor.storage.stop - tensor.storage.start == tensor.n_bytes == 264 * 12 * 4


def test_shards_make_one_inventory(saved):
    whole = ours(saved / "preset" / "model.weights.h5")
    assert_same(ours(saved / "sharded" / "model.weights.json"), whole)
    checkpoint = open_checkpoint(saved / "sharded")
    assert [file.name for file in checkpoint.files] == [
        "model.weights.json", "model_00000.weights.h5", "model_00001.weights.h5",
    ]  # fmt: skip
    assert checkpoint.claim is True and checkpoint.config["class_name"] == "GPT2Backbone"


def test_an_archive_is_known_by_what_is_in_it(saved):
    shutil.copy(saved / "model.keras", saved / "model.bin")
    assert open_checkpoint(saved / "model.bin").format == "Keras HDF5"
    with zipfile.ZipFile(saved / "other.zip", "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    assert not is_archive(saved / "other.zip")


def test_what_an_optimizer_keeps_is_left_out(saved):
    path = saved / "preset" / "model.weights.h5"
    n_tensors = len(open_keras(path).tensors)
    with h5py.File(path, "a") as file:
        file["optimizer/vars/0"] = 7
        file["optimizer/vars/1"] = np.zeros((264, 12), np.float32)
    assert len(open_keras(path).tensors) == n_tensors


def rewritten(saved, change, **options):
    """Write the archive again, its members changed."""
    with zipfile.ZipFile(saved / "model.keras") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members = change(members) or members
    with zipfile.ZipFile(saved / "new.keras", "w", **options) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return saved / "new.keras"


def test_a_compressed_archive_is_refused(saved):
    path = rewritten(saved, lambda members: None, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match=r"'config\.json' in it is compressed"):
        open_keras(path)


ARCHIVES = {
    "no weights": (lambda m: m.pop("model.weights.h5") and None, "has no 'model.weights.json'"),
    "no config": (lambda m: m.pop("config.json") and None, "has no 'config.json'"),
    "no JSON": (lambda m: m.update({"config.json": b"{"}), "config.json is not JSON"),
    "a list": (lambda m: m.update({"config.json": b"[]"}), "holds a JSON list"),
    "deep JSON": (lambda m: m.update({"config.json": b"[" * 100_000}), "is not JSON"),
    "no HDF5": (lambda m: m.update({"model.weights.h5": b"x" * 100}), "does not begin as one"),
    "half of it": (
        lambda m: m.update({"model.weights.h5": m["model.weights.h5"][:60_000]}), "ends at byte",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHIVES)
def test_damaged_archives_are_refused(name, saved):
    change, why = ARCHIVES[name]
    with pytest.raises(CorruptInputError, match=why):
        open_keras(rewritten(saved, change))


INDICES = {
    "nothing": ({}, "no weight_map"),
    "a list": ({"weight_map": []}, "no weight_map"),
    "no names": ({"weight_map": {"/a/vars": []}}, "no file for /a/vars"),
    "numbers": ({"weight_map": {"/a/vars": [7]}}, "no file for /a/vars"),
    "elsewhere": ({"weight_map": {"/a/vars": "../preset/model.weights.h5"}}, "not beside it"),
    "absolute": ({"weight_map": {"/a/vars": "/etc/passwd"}}, "not beside it"),
    "missing": ({"weight_map": {"/a/vars": "model_00007.weights.h5"}}, "not beside it"),
    "itself": ({"weight_map": {"/a/vars": "model.weights.json"}}, "does not begin as one"),
}


@pytest.mark.parametrize("name", INDICES)
def test_hostile_indices_are_refused(name, saved):
    value, why = INDICES[name]
    (saved / "sharded" / "model.weights.json").write_text(json.dumps(value))
    with pytest.raises(CorruptInputError, match=why):
        open_checkpoint(saved / "sharded")


def test_a_link_to_another_directory_is_refused(saved):
    shard = saved / "sharded" / "model_00001.weights.h5"
    shard.rename(saved / "elsewhere")
    shard.symlink_to(saved / "elsewhere")
    with pytest.raises(CorruptInputError, match="a link out of its directory"):
        open_checkpoint(saved / "sharded")


def test_two_shards_with_one_tensor_are_refused(saved):
    shards = saved / "sharded"
    shutil.copy(shards / "model_00000.weights.h5", shards / "again.weights.h5")
    index = {"weight_map": {"/a": ["model_00000.weights.h5", "again.weights.h5"]}}
    (shards / "model.weights.json").write_text(json.dumps(index))
    with pytest.raises(CorruptInputError, match="two shards hold layers/"):
        open_keras(shards / "model.weights.json")


def test_a_file_cut_while_it_is_open_is_an_error(saved):
    path = saved / "preset" / "model.weights.h5"
    tensors = open_keras(path).tensors
    path.write_bytes(b"")
    with pytest.raises(CorruptInputError, match="cut off while it was read"):
        tensors["layers/reversible_embedding/vars/0"].rows(0, 1)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_changed_archives_give_our_error_or_a_sound_file(saved, data):
    changed = bytearray((saved / "model.keras").read_bytes())
    size = len(changed)
    for _ in range(data.draw(st.integers(0, 3))):
        place = st.one_of(st.integers(0, 4000), st.integers(size - 8000, size - 1))
        changed[data.draw(place)] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del changed[data.draw(st.integers(8, size)) :]
    (saved / "changed.keras").write_bytes(changed)
    began = time.monotonic()
    try:
        open_keras(saved / "changed.keras")
        tokenizer_files(saved / "changed.keras")
        ours(saved / "changed.keras")
    except TiedGPTError as error:
        assert "\n" not in str(error)
    assert time.monotonic() - began < 1
