"""HDF5 without its library: what h5py writes is found where h5py finds it; the rest is refused."""

import struct
import time

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.weights.keras_saved import unpack
from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.weights.formats.hdf5_file import read_datasets


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return unpack(tmp_path_factory.mktemp("keras"))


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
def test_datasets_of_keras_lie_where_h5py_finds_them(saved, name):
    path = saved / name / "model.weights.h5"
    ours = {d.name: (d.shape, d.dtype, d.start) for d in read_datasets(path).values()}
    expected = theirs(path)
    if name == "bfloat16":  # two opaque bytes
        assert {dtype for _, dtype, _ in expected.values()} == {"|V2"}
        expected = {k: (shape, "bfloat16", start) for k, (shape, _, start) in expected.items()}
    assert ours == expected
    assert len(ours) == 36


def test_large_groups_and_long_headers(sound):
    ours = read_datasets(sound)
    expected = theirs(sound)
    assert ours.keys() == expected.keys()
    for name, (shape, dtype, start) in expected.items():
        if name != "types/text":
            assert (ours[name].shape, ours[name].dtype) == (shape, dtype)
            assert ours[name].start == start
    assert ours["types/text"].dtype == "HDF5 type 9"


def test_a_file_within_a_file(sound, tmp_path):
    inner = sound.read_bytes()
    (tmp_path / "outer").write_bytes(b"x" * 77 + inner + b"y" * 9)
    assert read_datasets(tmp_path / "outer", begin=77, size=len(inner)) == read_datasets(sound)


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
    "compressed": (other(compression="gzip"), UserError, "w, which is compressed"),
    "chunked": (other(chunks=(4, 4)), UserError, "w, which is chunked"),
    "shuffled": (other(chunks=(4, 4), shuffle=True), UserError, "w, which is compressed"),
    "a soft link": (soft_link, UserError, "the link 'b'"),
    "a link to another file": (external_link, UserError, "newer kind or with links"),
    "numbers in another file": (external_data, UserError, "lie in another file"),
    "a virtual dataset": (virtual, UserError, "newer kind|virtual"),
    "the newest HDF5": (newest, UserError, r"newer kind \(superblock version [23]\)"),
    "two names for a group": (hard_link, CorruptInputError, "reached twice"),
    "a circle": (circle, CorruptInputError, "reached twice"),
    "groups in groups in groups": (deep, CorruptInputError, "more than 32 deep"),
    "never written": (unwritten, CorruptInputError, "never written"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_keras_does_not_write_is_refused(name, tmp_path):
    write, error, why = REFUSED[name]
    write(tmp_path / "file.h5")
    with pytest.raises(error, match=why) as raised:
        read_datasets(tmp_path / "file.h5")
    assert str(tmp_path / "file.h5") in str(raised.value) and "\n" not in str(raised.value)


def test_two_datasets_on_the_same_bytes_are_refused(tmp_path):
    path = tmp_path / "file.h5"
    with h5py.File(path, "w") as file:
        file["a"], file["b"] = np.zeros(8, np.float32), np.ones(8, np.float32)
        a, b = (file[name].id.get_offset() for name in "ab")
    raw = path.read_bytes()
    path.write_bytes(raw.replace(struct.pack("<QQ", b, 32), struct.pack("<QQ", a, 32)))
    with pytest.raises(CorruptInputError, match="lies on the bytes of"):
        read_datasets(path)


def test_a_shape_larger_than_the_file_is_refused(tmp_path):
    path = tmp_path / "file.h5"
    with h5py.File(path, "w") as file:
        file["a"] = np.zeros((7, 11), np.float32)
    raw = path.read_bytes()
    for size in (8, 1 << 60):
        path.write_bytes(raw.replace(struct.pack("<QQ", 7, 11), struct.pack("<QQ", size, 11)))
        with pytest.raises(CorruptInputError, match=r"a of shape \(\d+, 11\) takes"):
            read_datasets(path)


def test_a_truncated_file_is_refused_wherever_it_ends(saved, tmp_path):
    raw = (saved / "preset" / "model.weights.h5").read_bytes()
    for end in [*range(0, 200), *range(200, len(raw), 4099), len(raw) - 1]:
        (tmp_path / "cut").write_bytes(raw[:end])
        with pytest.raises(CorruptInputError):
            read_datasets(tmp_path / "cut")


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
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
        for dataset in read_datasets(tmp_path / "changed").values():
            assert dataset.start + dataset.n_bytes <= len(changed)
    except TiedGPTError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
    assert time.monotonic() - began < 1
