"""GPT-1's numbered .npy files: read where they lie; hostile files are refused, and no pickle."""

import json
import shutil
import struct
import warnings

import numpy as np
import pytest

from tests.weights.gpt1_release import block_shapes, names, write_release
from tiedgpt.errors import CorruptInputError
from tiedgpt.weights.formats.openai_gpt1 import SHAPES as SHAPES_FILE
from tiedgpt.weights.sources import open_checkpoint

WIDTH, TOKENS, POSITIONS, LAYERS = 4, 11, 5, 2


def random(shapes):
    rng = np.random.default_rng(1)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def release_arrays():
    return random([(POSITIONS, WIDTH), (TOKENS, WIDTH), *LAYERS * block_shapes(WIDTH)])


@pytest.fixture
def release(tmp_path):
    return write_release(tmp_path / "model", release_arrays())


def numbers(tensor):
    return tensor.rows(0, tensor.matrix_shape[0]).reshape(tensor.shape)


def test_every_tensor_is_what_numpy_gives_joined_and_split(release):
    checkpoint = open_checkpoint(release / SHAPES_FILE)
    shapes = json.loads((release / "params_shapes.json").read_text())
    pieces = [np.load(release / f"params_{number}.npy") for number in range(10)]
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    theirs = np.split(np.concatenate(pieces), ends)[:-1]
    expected_names = ["model/wpe", "model/wte", *(n.removesuffix(":0") for n in names(2)[1:-2])]
    assert list(checkpoint.tensors) == expected_names
    for tensor, shape, array in zip(checkpoint.tensors.values(), shapes, theirs, strict=True):
        assert np.array_equal(numbers(tensor), array.reshape(shape)), tensor.name
    assert (checkpoint.container, checkpoint.config, len(checkpoint.files)) == ("numpy", {}, 11)


@pytest.mark.parametrize("n_pieces", [1, 3, 57])
def test_tensors_lie_across_files_wherever_these_are_cut(n_pieces, tmp_path):
    arrays = release_arrays()
    directory = write_release(tmp_path / "m", arrays, n_pieces=n_pieces)
    tensors = open_checkpoint(directory / SHAPES_FILE).tensors
    tokens = tensors["model/wte"]
    assert np.array_equal(tokens.rows(2, 9), arrays[1][2:9])
    assert np.array_equal(tokens.transpose().rows(1, 3), arrays[1][:, 1:3].T)
    for tensor, array in zip(tensors.values(), arrays, strict=True):
        assert np.array_equal(numbers(tensor), array)


def test_one_matrix_and_a_classifier_as_after_fine_tuning(tmp_path):
    arrays = random([(TOKENS + 3 + POSITIONS, WIDTH), *block_shapes(WIDTH), (WIDTH, 1), (1,)])
    directory = write_release(tmp_path / "m", arrays)
    (directory / "hparams.json").write_text(json.dumps({"n_ctx": POSITIONS}))
    checkpoint = open_checkpoint(directory / SHAPES_FILE)
    assert list(checkpoint.tensors) == [name.removesuffix(":0") for name in names(1)]
    assert checkpoint.config == {"n_positions": POSITIONS}


@pytest.mark.parametrize(("dtype", "name"), [("<f2", "float16"), ("<f8", "float64")])
def test_other_floats(dtype, name, tmp_path):
    arrays = [array.astype(dtype) for array in release_arrays()]
    directory = write_release(tmp_path / "m", arrays, dtype=dtype)
    tensors = open_checkpoint(directory / SHAPES_FILE).tensors
    assert {tensor.dtype for tensor in tensors.values()} == {name}
    assert np.array_equal(numbers(tensors["model/wte"]), arrays[1])


def test_headers_of_python_2_are_read(release):
    raw = np.load(release / "params_4.npy").tobytes()
    (release / "params_4.npy").write_bytes(npy(described(shape=f"({len(raw) // 4}L,)"), raw))
    with warnings.catch_warnings(action="error"):
        assert len(open_checkpoint(release / SHAPES_FILE).tensors) == 2 + 2 * 12


# Bad input.


class Bomb:
    def __reduce__(self):
        return exit, ()


def test_a_pickle_is_never_opened(release):
    np.save(release / "params_3.npy", np.array([Bomb()]), allow_pickle=True)
    with pytest.raises(CorruptInputError, match=r"params_3\.npy .* Python objects"):
        open_checkpoint(release / SHAPES_FILE)


def npy(header: bytes, body: bytes = b"", version: bytes = b"\1\0", length=None) -> bytes:
    size = struct.pack("<I" if version == b"\2\0" else "<H", length or len(header))
    return b"\x93NUMPY" + version + size + header + body


def described(descr="'<f4'", order="False", shape="(6,)") -> bytes:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}  \n".encode()


PIECES = {
    "an empty file": b"",
    "another file": b"PK\3\4" + bytes(40),
    "only the magic": b"\x93NUMPY",
    "a version of the future": npy(described(), version=b"\3\0"),
    "a header that does not end": npy(described(), length=60_000),
    "a header of gigabytes": npy(described(), version=b"\2\0", length=2**31),
    "code in the header": npy(b"__import__('os').abort()"),
    "records": npy(described(descr="[('a', '<f4')]")),
    "a header that nests": npy(described(shape="-" * 9000 + "1")),
    "a header that nests less": npy(described(shape="-" * 800 + "1")),
    "whole numbers": npy(described(descr="'<i4'"), bytes(24)),
    "big-endian": npy(described(descr="'>f4'"), bytes(24)),
    "a matrix": npy(described(shape="(2, 3)"), bytes(24)),
    "more than the file": npy(described(shape="(10000000000,)"), bytes(24)),
    "fewer than the file": npy(described(shape="(5,)"), bytes(24)),
    "a digit too many": npy(described(shape="(" + "9" * 30 + ",)")),
    "another type than the first": npy(described(descr="'<f2'"), bytes(12)),
}


@pytest.mark.parametrize("name", PIECES)
def test_hostile_pieces_are_refused(name, release):
    (release / "params_4.npy").write_bytes(PIECES[name])
    with pytest.raises(CorruptInputError, match=r"params_\d\.npy") as error:
        open_checkpoint(release / SHAPES_FILE)
    assert "\n" not in str(error.value)


SHAPES = {
    "no JSON": "[[5, 4]",
    "an object": "{}",
    "nothing": "[]",
    "a number": "[7]",
    "a negative size": "[[5, 4], [-11, 4]]",
    "a size of nothing": "[[0, 4]]",
    "a truth": "[[true, 4]]",
    "a fraction": "[[5.5, 4]]",
    "no axis": "[[]]",
    "too many axes": "[[1, 1, 1, 1, 1, 1, 1, 1, 1]]",
    "a huge size": "[[100000000000000000000000, 4]]",
    "deep": "[" * 100_000,
    "half a layer": "[[5, 4], [11, 4], [1, 4, 12], [12]]",
    "five more": json.dumps([[5, 4], [11, 4], *[[4]] * 5]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_hostile_shapes_are_refused(name, release):
    (release / "params_shapes.json").write_text(SHAPES[name])
    with pytest.raises(CorruptInputError, match=str(release)):
        open_checkpoint(release / SHAPES_FILE)


def test_a_missing_file_or_numbers_too_many_are_refused(release):
    for damage in (
        lambda: (release / "params_9.npy").unlink(),
        lambda: np.save(release / "params_9.npy", np.zeros(999, np.float32)),
        lambda: (release / "params_5.npy").rename(release / "params_05.npy"),
    ):
        damage()
        with pytest.raises(CorruptInputError, match="must hold 552 numbers of one type"):
            open_checkpoint(release / SHAPES_FILE)
    (release / "params_0.npy").unlink()
    with pytest.raises(CorruptInputError, match=r"params_0\.npy"):
        open_checkpoint(release / SHAPES_FILE)


def test_a_link_out_of_the_directory_is_refused(release, tmp_path):
    shutil.move(release / "params_2.npy", tmp_path / "elsewhere")
    (release / "params_2.npy").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptInputError, match=r"params_2\.npy', a link out of its directory"):
        open_checkpoint(release / SHAPES_FILE)


def test_a_file_cut_while_it_is_open_is_an_error(release):
    tensors = open_checkpoint(release / SHAPES_FILE).tensors
    (release / "params_0.npy").write_bytes(b"")
    with pytest.raises(CorruptInputError, match="cut off while it was read"):
        tensors["model/wpe"].rows(0, 1)
