"""Keras: its HDF5 files, shards and archives are read as h5py and KerasHub read them."""

import io
import json
import math
import shutil
import struct
import sys
import time
import zipfile

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.weights.fixtures.make_keras import SHAPE, TEXT
from tests.weights.keras_saved import unpack
from tiedgpt import GPT, Tokenizer
from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.tie import audit
from tiedgpt.weights import keras
from tiedgpt.weights.load import load
from tiedgpt.weights.opening import open_checkpoint
from tiedgpt.weights.tensors import by_storage

PLACES = ("preset", "preset/model.weights.h5", "sharded", "model.keras", "backbone.keras")
BLOCK = "layers/transformer_decoder_1/"


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
        for name, tensor in keras.read(path).tensors.items()
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
    expected, tensor = by_h5py(path)[name], keras.read(saved / "preset" / path.name).tensors[name]
    assert np.array_equal(tensor.rows(3, 9), expected[3:9])
    assert np.array_equal(tensor.turned().rows(2, 5), expected[:, 2:5].T)
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
    assert not keras.detect(saved / "other.zip", b"PK\3\4")


def test_what_an_optimizer_keeps_is_left_out(saved):
    path = saved / "preset" / "model.weights.h5"
    n_tensors = len(keras.read(path).tensors)
    with h5py.File(path, "a") as file:
        file["optimizer/vars/0"] = 7
        file["optimizer/vars/1"] = np.zeros((264, 12), np.float32)
    assert len(keras.read(path).tensors) == n_tensors


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
        keras.read(path)


ARCHIVES = {
    "no weights": (lambda m: m.pop("model.weights.h5") and None, "'model.weights.json'"),
    "no config": (lambda m: m.pop("config.json") and None, "'config.json'"),
    "no JSON": (lambda m: m.update({"config.json": b"{"}), r"new\.keras is damaged"),
    "a list": (lambda m: m.update({"config.json": b"[7]"}), r"new\.keras is damaged"),
    "deep JSON": (lambda m: m.update({"config.json": b"[" * 100_000}), r"new\.keras is damaged"),
    "no HDF5": (lambda m: m.update({"model.weights.h5": b"x" * 100}), "no HDF5 file"),
    "half of it": (
        lambda m: m.update({"model.weights.h5": m["model.weights.h5"][:60_000]}), "truncated file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHIVES)
def test_damaged_archives_are_refused(name, saved):
    change, why = ARCHIVES[name]
    with pytest.raises(CorruptInputError, match=why):
        keras.read(rewritten(saved, change))


INDICES = {
    "nothing": ({}, r"model\.weights\.json is damaged"),
    "a list": ({"weight_map": []}, r"model\.weights\.json is damaged"),
    "no names": ({"weight_map": {"/a/vars": []}}, r"model\.weights\.json is damaged"),
    "numbers": ({"weight_map": {"/a/vars": [7]}}, r"model\.weights\.json is damaged"),
    "elsewhere": ({"weight_map": {"/a/vars": "../preset/model.weights.h5"}}, "not beside it"),
    "absolute": ({"weight_map": {"/a/vars": "/etc/passwd"}}, "not beside it"),
    "missing": ({"weight_map": {"/a/vars": "model_00007.weights.h5"}}, "not beside it"),
    "itself": ({"weight_map": {"/a/vars": "model.weights.json"}}, "no HDF5 file"),
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
        keras.read(shards / "model.weights.json")


def test_a_file_cut_while_it_is_open_is_an_error(saved):
    path = saved / "preset" / "model.weights.h5"
    tensors = keras.read(path).tensors
    path.write_bytes(b"")
    with pytest.raises(CorruptInputError, match="cut off while it was read"):
        tensors["layers/reversible_embedding/vars/0"].rows(0, 1)


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
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
        keras.read(saved / "changed.keras")
        keras.tokenizer(saved / "changed.keras")
        ours(saved / "changed.keras")
    except TiedGPTError as error:
        assert "\n" not in str(error)
    assert time.monotonic() - began < 1


# HDF5 itself; changed bytes are not random, because on a few files in ten thousand (a heap whose
# list of free blocks is a circle) the HDF5 library never returns


@pytest.fixture
def sound(tmp_path):
    """A file with enough members for trees of two levels and headers in two parts."""
    rng = np.random.default_rng(3)
    with h5py.File(tmp_path / "sound.h5", "w") as file:
        for at in range(700):
            file[f"many/{at}/vars/0"] = rng.standard_normal((at % 3, 2)).astype(np.float32)
        for name in ("float16", "float64", "int8", "uint32", "int64"):
            file[f"types/{name}"] = rng.standard_normal((3, 4)).astype(name)
        file["types/scalar"] = np.float32(0.25)
        file["types/text"] = "hello"
        for at in range(30):  # attributes push what follows into a second part of the header
            file["many/5/vars/0"].attrs[f"a{at}"] = "x" * 100
            file["types"].attrs[f"a{at}"] = "x" * 100
    return tmp_path / "sound.h5"


def theirs(path):
    found = {}

    def keep(name, item):
        if isinstance(item, h5py.Dataset):
            found[name] = item.shape, str(item.dtype), item.id.get_offset() if item.size else 0

    with h5py.File(path) as file:
        file.visititems(keep)
    return found


@pytest.mark.parametrize("name", ["preset", "bfloat16"])
def test_arrays_of_keras_are_where_h5py_finds_them(saved, name):
    path = saved / name / "model.weights.h5"
    tensors = keras.read(path).tensors
    found = {name: (t.shape, t.dtype, t.storage.start) for name, t in tensors.items()}
    expected = theirs(path)
    if name == "bfloat16":  # two opaque bytes
        assert {dtype for _, dtype, _ in expected.values()} == {"|V2"}
        expected = {k: (shape, "bfloat16", start) for k, (shape, _, start) in expected.items()}
    assert found == expected
    assert len(found) == 36


def test_large_groups_long_headers_and_other_types(sound):
    tensors = keras.read(sound).tensors
    expected = theirs(sound)
    assert tensors.keys() == expected.keys()
    for name, (shape, dtype, start) in expected.items():
        if name != "types/text":
            assert (tensors[name].shape, tensors[name].dtype) == (shape, dtype)
            assert tensors[name].storage.start == start
    assert not tensors["types/text"].is_decodable and not tensors["types/int8"].is_decodable


def other(**options):
    """Write `w` in another way than Keras does."""

    def write(path):
        with h5py.File(path, "w") as file:
            file.create_dataset("w", data=np.zeros((8, 8), np.float32), **options)

    return write


def soft_link(path):
    with h5py.File(path, "w") as file:
        file["a/w"] = np.zeros(3, np.float32)
        file["b"] = h5py.SoftLink("/a/w")


def external_link(path):
    with h5py.File(path, "w") as file:
        file["w"] = h5py.ExternalLink("/etc/passwd", "/w")


def external_data(path):
    (path.parent / "raw").write_bytes(bytes(12))
    with h5py.File(path, "w") as file:
        file.create_dataset("w", (3,), np.float32, external=[("raw", 0, 12)])


def virtual(path):
    with h5py.File(path.parent / "other.h5", "w") as file:
        file["w"] = np.zeros(3, np.float32)
    layout = h5py.VirtualLayout((3,), np.float32)
    layout[:] = h5py.VirtualSource(str(path.parent / "other.h5"), "w", (3,))
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("w", layout)


def newest(path):
    with h5py.File(path, "w", libver="latest") as file:
        file["w"] = np.zeros(3, np.float32)


def hard_link(path):
    with h5py.File(path, "w") as file:
        file["a/w"] = np.zeros(3, np.float32)
        file["b"] = file["a"]


def circle(path):
    with h5py.File(path, "w") as file:
        file["a/w"] = np.zeros(3, np.float32)
        file["a/up"] = file["/"]


def deep(path):
    with h5py.File(path, "w") as file:
        file["/".join("x" * 40)] = np.zeros(3, np.float32)


def unwritten(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("w", (1000, 1000), np.float32)


REFUSED = {
    "compressed": other(compression="gzip"),
    "chunked": other(chunks=(4, 4)),
    "shuffled": other(chunks=(4, 4), shuffle=True),
    "numbers in another file": external_data,
    "a virtual dataset": virtual,
    "never written": unwritten,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_keras_does_not_write_is_refused(name, tmp_path):
    REFUSED[name](tmp_path / "file.h5")
    with pytest.raises(UserError, match="w is compressed, chunked, in another file or") as raised:
        keras.read(tmp_path / "file.h5")
    assert str(tmp_path / "file.h5") in str(raised.value) and "\n" not in str(raised.value)


LINKED = {
    "a soft link": (soft_link, {"a/w"}),
    "a link to another file": (external_link, set()),
    "the newest HDF5": (newest, {"w"}),
    "two names for a group": (hard_link, {"a/w"}),
    "a circle": (circle, {"a/w"}),
    "groups in groups in groups": (deep, {"/".join("x" * 40)}),
}


@pytest.mark.parametrize("name", LINKED)
def test_every_array_is_listed_once_and_links_are_not_followed(name, tmp_path):
    write, names = LINKED[name]
    write(tmp_path / "file.h5")
    assert keras.read(tmp_path / "file.h5").tensors.keys() == names


def test_two_arrays_on_the_same_bytes_are_one_storage(tmp_path):
    path = tmp_path / "file.h5"
    with h5py.File(path, "w") as file:
        file["a"], file["b"] = np.zeros(8, np.float32), np.ones(8, np.float32)
        a, b = (file[name].id.get_offset() for name in "ab")
    raw = path.read_bytes()
    path.write_bytes(raw.replace(struct.pack("<QQ", b, 32), struct.pack("<QQ", a, 32)))
    assert len(by_storage(keras.read(path).tensors.values())) == 1


def test_a_shape_larger_than_the_file_is_refused(tmp_path):
    path = tmp_path / "file.h5"
    with h5py.File(path, "w") as file:
        file["a"] = np.zeros((7, 11), np.float32)
    raw = path.read_bytes()
    for size in (8, 1 << 60):
        path.write_bytes(raw.replace(struct.pack("<QQ", 7, 11), struct.pack("<QQ", size, 11)))
        with pytest.raises(CorruptInputError, match=r"file\.h5 is damaged"):
            keras.read(path)


def test_a_truncated_file_is_refused_wherever_it_ends(saved, tmp_path):
    raw = (saved / "preset" / "model.weights.h5").read_bytes()
    for end in [*range(0, 200), *range(200, len(raw), 4099), len(raw) - 1]:
        (tmp_path / "cut.weights.h5").write_bytes(raw[:end])
        with pytest.raises(CorruptInputError):
            keras.read(tmp_path / "cut.weights.h5")


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(st.data())
def test_changed_bytes_give_our_error_or_a_sound_file(saved, tmp_path, data):
    changed = bytearray((saved / "preset" / "model.weights.h5").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, 4096), st.integers(0, len(changed) - 8)))
        value = data.draw(
            st.sampled_from([0, 1, 2, 8, 16, 96, 255, 2**16, 2**32, 2**63, 2**64 - 1])
        )
        width = data.draw(st.sampled_from([1, 2, 4, 8]))
        changed[at : at + width] = (value % 256**width).to_bytes(width, "little")
    (tmp_path / "changed").write_bytes(changed)
    began = time.monotonic()
    try:
        for tensor in keras.read(tmp_path / "changed").tensors.values():
            assert tensor.storage.stop <= len(changed)
    except TiedGPTError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
    assert time.monotonic() - began < 1


def test_a_missing_h5py_is_named(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UserError, match=r"needs the package h5py .*'tiedgpt\[formats\]'"):
        keras.read(saved / "preset" / "model.weights.h5")


# The GPT-2 of KerasHub


@pytest.fixture
def expected(saved):
    return np.load(saved / "expected.npz")


@pytest.mark.parametrize("place", PLACES)
def test_logits_and_states_are_keras_hubs(place, saved, expected):
    loaded = load(saved / place)
    model, config = loaded.model, loaded.model.config
    assert loaded.layout == "Keras HDF5, KerasHub GPT-2"
    assert (config.n_head, config.n_layer, config.inner_dim) == (3, 2, 40)
    assert config.tie_word_embeddings and config.activation_function == "gelu_new"
    ids = torch.from_numpy(expected["ids"])
    with torch.no_grad():
        assert_close(model(ids), torch.from_numpy(expected["logits"]), rtol=1e-5, atol=1e-5)
        hidden = torch.from_numpy(expected["hidden"])
        assert_close(hidden @ model.wte.weight.T, model(ids), rtol=1e-5, atol=1e-5)


def test_every_number_is_where_it_belongs(saved, expected):
    state = GPT.from_pretrained(saved / "preset").state_dict()
    for layer in range(2):
        theirs = f"transformer_layer_{layer}/self_attention"
        for kind, ours in (("kernel", "weight"), ("bias", "bias")):
            parts = [expected[f"{theirs}/{part}/{kind}"] for part in ("query", "key", "value")]
            whole = np.concatenate([part.reshape(-1, 12) for part in parts], axis=-1)
            c_attn = state[f"h.{layer}.attn.c_attn.{ours}"].numpy()
            assert np.array_equal(c_attn.T.reshape(-1, 36), whole)
        output = expected[f"{theirs}/attention_output/kernel"].reshape(12, 12)
        assert np.array_equal(state[f"h.{layer}.attn.c_proj.weight"].numpy(), output.T)
    assert np.array_equal(state["wte.weight"].numpy(), expected["token_embedding/embeddings"])


def test_bfloat16_is_read_bit_by_bit(saved):
    model = GPT.from_pretrained(saved / "bfloat16")
    exact = GPT.from_pretrained(saved / "preset").state_dict()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, exact[name].bfloat16()), name


@pytest.mark.parametrize("place", ["preset", "preset/model.weights.h5", "model.keras"])
def test_the_tokenizer_that_comes_with_it(place, saved, expected):
    tokenizer = Tokenizer.from_pretrained(saved / place)
    assert tokenizer.encode(TEXT, allow_special=True) == expected["text_ids"].tolist()


def test_no_archive_of_a_bare_backbone_has_a_tokenizer(saved):
    with pytest.raises(UserError, match="holds no tokenizer"):
        Tokenizer.from_pretrained(saved / "backbone.keras")


@pytest.mark.parametrize("place", ["preset", "sharded", "model.keras"])
def test_the_audit_opens_it(place, saved):
    found = audit(saved / place)
    assert found.verdict == "tied" and found.claim is True
    assert [matrix.shape for matrix in found.matrices] == [(264, 12)]


def test_a_file_alone_says_how_many_heads_there_are(saved):
    (saved / "preset" / "config.json").unlink()
    (saved / "preset" / "task.json").unlink()
    assert GPT.from_pretrained(saved / "preset").config.n_head == SHAPE["num_heads"]
    with pytest.raises(UserError, match="n_head=4 contradicts"):
        GPT.from_pretrained(saved / "preset", n_head=4)


def test_the_names_of_keras_2(saved, expected):
    path = saved / "preset" / "model.weights.h5"
    with h5py.File(path, "a") as file:
        file.move("layers", "_layer_checkpoint_dependencies")
    model = GPT.from_pretrained(path)
    with torch.no_grad():
        logits = model(torch.from_numpy(expected["ids"]))
    assert_close(logits, torch.from_numpy(expected["logits"]), rtol=1e-5, atol=1e-5)


# Bad input.


def replaced(name, change):
    def edit(file):
        array = file[name][()]
        del file[name]
        if (new := change(array)) is not None:
            file[name] = new

    return edit


QUERY = BLOCK + "_self_attention_layer/query_dense/vars/"
VARIABLES = {
    "no query": (replaced(QUERY + "0", lambda a: None), r"h\.1\.attn\.c_attn\.weight is missing"),
    "a query of two axes": (
        replaced(QUERY + "0", lambda a: a.reshape(12, 12)), r"query_dense/vars/0 is \(12, 12\)",
    ),
    "other heads": (replaced(QUERY + "0", lambda a: a.reshape(12, 4, 3)), "3 and 4 heads"),
    "other heads in a layer's bias": (
        replaced(QUERY + "1", lambda a: a.reshape(6, 2)), "3 and 6 heads",
    ),
    "a wider query": (
        replaced(QUERY + "0", lambda a: np.zeros((12, 3, 5), a.dtype)), "needs attn.query",
    ),
    "another type": (replaced(QUERY + "0", lambda a: a.astype("f8")), "needs attn.query"),
    "no output": (
        replaced(BLOCK + "_self_attention_layer/output_dense/vars/0", lambda a: None),
        r"h\.1\.attn\.c_proj\.weight is missing",
    ),
    "a wrong shape": (
        replaced(BLOCK + "_feedforward_output_dense/vars/0", lambda a: a.T.copy()),
        r"h\.1\.mlp\.c_proj\.weight is",
    ),
    "a bias of two axes": (
        replaced("layers/layer_normalization/vars/1", lambda a: a[None]),
        r"ln_f\.bias is",
    ),
    "a layer of another kind": (
        lambda file: file.__setitem__("layers/dense/vars/0", np.zeros(3, np.float32)),
        "layers/dense/vars/0 is not a GPT's",
    ),
    "a matrix for a head": (
        lambda file: file.__setitem__(
            "layers/reversible_embedding/vars/1", np.zeros((12, 264), np.float32)
        ),
        "layers/reversible_embedding/vars/1 is not a GPT's",
    ),
    "a layer left out": (
        lambda file: file.move("layers/transformer_decoder_1", "layers/transformer_decoder_2"),
        "missing",
    ),
    "two of them": (
        lambda file: file.copy("layers/position_embedding", "b/layers/position_embedding"),
        "twice, in two models",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_that_do_not_fit_are_refused(name, saved):
    edit, why = VARIABLES[name]
    with h5py.File(saved / "preset" / "model.weights.h5", "a") as file:
        edit(file)
    with pytest.raises(CorruptInputError, match=why):
        GPT.from_pretrained(saved / "preset")


def test_whole_numbers_are_no_weights(saved):
    with h5py.File(saved / "preset" / "model.weights.h5", "a") as file:
        for part in ("query", "key", "value"):
            replaced(f"{BLOCK}_self_attention_layer/{part}_dense/vars/0", np.int8)(file)
    with pytest.raises(UserError, match="int8"):
        GPT.from_pretrained(saved / "preset")


CONFIGS = {
    "another model": ({"class_name": "GemmaBackbone"}, UserError, "holds a GemmaBackbone of Keras"),
    "a task of another": (
        {"class_name": "GPT2CausalLM", "config": {"backbone": {"class_name": "OPTBackbone"}}},
        UserError, "holds a OPTBackbone",
    ),
    "no object": ({"keras": 5}, CorruptInputError, "is damaged or no config.json of KerasHub"),
    "a class that is none": ({"class_name": ["x"]}, UserError, "of Keras; only"),
    "no sizes": ({"config": None}, CorruptInputError, r"no config\.json of KerasHub"),
    "a dropout of more than all": (
        {"config": {"dropout": 7}}, CorruptInputError, "must be a probability",
    ),
    "a dropout of nothing": (
        {"config": {"dropout": math.nan}}, CorruptInputError, "must be a probability",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_do_not_fit_are_refused(name, saved):
    change, error, why = CONFIGS[name]
    path = saved / "preset" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error, match=why):
        GPT.from_pretrained(saved / "preset")


def test_other_models_of_keras_are_refused(tmp_path):
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = np.zeros((3, 4), np.float32)
    with pytest.raises(UserError, match="other than KerasHub's GPT2Backbone"):
        GPT.from_pretrained(tmp_path)
