"""Any checkpoint opens alike; no code in a pickle runs; lying files are refused."""

import errno
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.tie.checkpoints import matrix, write_gguf, write_onnx
from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.tie import audit, ledger
from tiedgpt.weights.checkpoint import by_storage
from tiedgpt.weights.containers import SafetensorsFile
from tiedgpt.weights.sources import open_checkpoint


def test_every_format_is_recognised_by_its_content(tmp_path):
    w = torch.from_numpy(matrix())
    save_file({"wte.weight": w}, tmp_path / "a")
    torch.save({"wte.weight": w}, tmp_path / "b")
    torch.save({"wte.weight": w}, tmp_path / "c", _use_new_zipfile_serialization=False)
    write_gguf(tmp_path / "d", {"token_embd.weight": matrix()})
    write_onnx(tmp_path / "e", "one", names=("wte.weight", ""))
    formats = ["safetensors", "torch", "torch", "GGUF", "ONNX"]
    for name, container in zip("abcde", formats, strict=True):
        checkpoint = open_checkpoint(tmp_path / name)
        assert checkpoint.container == container
        tensor = next(
            t for n, t in checkpoint.tensors.items() if n in ("wte.weight", "token_embd.weight")
        )
        assert (tensor.shape, tensor.dtype, tensor.n_bytes) == ((97, 32), "float32", 97 * 32 * 4)
        assert np.array_equal(tensor.rows(90, 97), matrix()[90:])
        assert np.array_equal(tensor.transpose().rows(3, 9), matrix().T[3:9])


def test_views_in_a_torch_file_are_one_storage(tmp_path):
    w = torch.randn(10, 4)
    torch.save({"a": w, "b": w.T, "c": w[2:], "d": w.clone()}, tmp_path / "x.pt")
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    groups = by_storage(checkpoint.tensors.values())
    assert [[tensor.name for tensor in group] for group in groups] == [["a", "b", "c"], ["d"]]
    assert np.array_equal(checkpoint.tensors["b"].rows(0, 4), w.T.numpy())


def test_a_torch_file_cut_short_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"w": torch.zeros(2000, 1000)}, path)
    stored = open_checkpoint(path).tensors["w"]
    assert not stored.rows(0, 2).any()
    path.write_bytes(b"PK")  # in place, as a program that saves again does
    with pytest.raises(CorruptInputError, match=r"a\.pt was cut off"):
        stored.tensor()


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_pickle_never_runs(tmp_path, legacy):
    state = {"wte.weight": torch.ones(4, 2), "x": Canary(tmp_path / "dead")}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    (tmp_path / "b.bin").write_bytes(pickle.dumps(Canary(tmp_path / "dead")))
    for name in ("a.pt", "b.bin"):
        for look in (audit, ledger):
            with pytest.raises(CorruptInputError, match=name) as caught:
                look(tmp_path / name)
            assert "\n" not in str(caught.value)
    assert not (tmp_path / "dead").exists()


def test_other_objects_than_state_dicts_are_refused(tmp_path):
    for value in (torch.ones(3), [torch.ones(3)], {"a": 1}, {}, {"model": {"model": {}}}):
        torch.save(value, tmp_path / "a.pt")
        with pytest.raises(CorruptInputError, match=r"a\.pt holds"):
            open_checkpoint(tmp_path / "a.pt")
    torch.save({"w": torch.eye(3).to_sparse()}, tmp_path / "a.pt")
    with pytest.raises(UserError, match="not read here"):
        open_checkpoint(tmp_path / "a.pt")


def test_a_tensor_that_claims_more_than_its_storage_is_refused(tmp_path):
    huge = torch.ones(1).expand(2**40, 2**20)
    torch.save({"wte.weight": huge}, tmp_path / "a.pt")
    with pytest.raises(CorruptInputError, match=r"a\.pt contradicts itself: 'wte\.weight'"):
        open_checkpoint(tmp_path / "a.pt")


def test_a_storage_that_is_cut_short_in_its_zip_is_refused(tmp_path):
    state = {"a": torch.arange(8.0), "b": torch.ones(100), "c": torch.ones(100)[:50]}
    torch.save({**state, "tied": state["b"]}, tmp_path / "a.pt")
    assert [*open_checkpoint(tmp_path / "a.pt").tensors] == ["a", "b", "c", "tied"]
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as saved,
        zipfile.ZipFile(tmp_path / "b.pt", "w") as cut,
    ):
        for info in saved.infolist():
            content = saved.read(info)
            cut.writestr(info.filename, content[:-40] if len(content) == 400 else content)
    with pytest.raises(CorruptInputError, match="cut short"):
        open_checkpoint(tmp_path / "b.pt")


def write_index(directory: Path, weight_map: object) -> Path:
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    return path


INDEXES = [
    ({"w": "a.safetensors", "v": "b.safetensors"}, "two shards hold 'w'"),
    ({"w": "a.safetensors", "v": "a.safetensors"}, "promises 'v'"),
    ({}, "no weight_map"),
    ([], "no weight_map"),
    *(
        ({"w": shard}, "shard|not beside it")
        for shard in (
            "../a.safetensors", "/etc/passwd", "gone.safetensors", "", "x.index.json", "a\0b",
            "x" * 5000, "\ud800",
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("weight_map", "why"), INDEXES)
def test_false_indexes_and_shards_out_of_the_directory_are_refused(tmp_path, weight_map, why):
    inside = tmp_path / "in"
    inside.mkdir()
    for path in (tmp_path / "a.safetensors", inside / "a.safetensors", inside / "b.safetensors"):
        save_file({"w": torch.ones(2)}, path)
    (inside / "x.index.json").write_text("{}")
    write_index(inside, weight_map)
    for source in (inside, inside / "model.safetensors.index.json"):
        with pytest.raises(CorruptInputError, match=why):
            open_checkpoint(source)


def test_a_directory_of_several_files_is_ambiguous(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, {"token_embd.weight": matrix()})
    with pytest.raises(UserError, match=r"2 files of weights \(a\.gguf, b\.gguf\): name one"):
        open_checkpoint(tmp_path)
    (tmp_path / "b.gguf").unlink()
    assert open_checkpoint(tmp_path).container == "GGUF"


def test_empty_and_unknown_files_are_refused(tmp_path):
    unknown = "is of no known checkpoint format"
    for name, data, says in (
        ("a", b"", "is empty"), ("b", b"hello world", unknown), ("c", b"# A model\n", unknown),
        ("d", b"\x08\x01hello", unknown), ("e", b"{}", unknown), ("f", bytes(50), unknown),
        ("g.gguf", b"PE\0\0", "damaged"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CorruptInputError, match=f"{name} .*{says}"):
            open_checkpoint(tmp_path / name)
    zipped(tmp_path / "a.pt", {"hello.txt": "hello"})
    with pytest.raises(CorruptInputError, match=r"a\.pt is no plain file of tensors"):
        open_checkpoint(tmp_path / "a.pt")


def zipped(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in members.items():
            file.writestr(f"a/{name}", data)
    return path


def test_zip_bombs_are_refused(tmp_path):
    sound = pickle.dumps({}, protocol=2)
    path = zipped(tmp_path / "a.pt", {"data.pkl": sound}, zipfile.ZIP_DEFLATED)
    with pytest.raises(CorruptInputError, match="compressed"):
        open_checkpoint(path)
    path = zipped(tmp_path / "b.pt", {"data.pkl": sound, "byteorder": bytes((64 << 20) + 1)})
    with pytest.raises(CorruptInputError, match="not what torch"):
        open_checkpoint(path)


def test_expanded_and_complex_tensors_are_read_or_refused(tmp_path):
    w = torch.randn(32).expand(97, 32)
    torch.save({"wte.weight": w, "c": torch.zeros(3, 4, dtype=torch.complex128)}, tmp_path / "a.pt")
    checkpoint = open_checkpoint(tmp_path / "a.pt")
    assert np.array_equal(checkpoint.tensors["wte.weight"].rows(5, 7), w[5:7].numpy())
    assert audit(tmp_path / "a.pt").verdict == "tied"
    torch.save({"wte.weight": w.to(torch.complex128), "lm_head.weight": w}, tmp_path / "b.pt")
    assert "not comparable" in [finding.kind for finding in audit(tmp_path / "b.pt").findings]


def test_a_name_of_half_a_character_is_escaped(tmp_path):
    torch.save({"wte.\ud800": torch.zeros(2, 3)}, tmp_path / "a.pt")
    assert [*open_checkpoint(tmp_path / "a.pt").tensors] == ["wte.\\ud800"]


def test_a_hugging_face_directory_loads_without_other_formats_modules(tiny, tmp_path):
    tiny.save_pretrained(tmp_path)
    program = """
import sys
from tiedgpt.weights.load import load
load(sys.argv[1])
print(*sorted(name for name in sys.modules if name.startswith("tiedgpt.weights.")))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], check=True, capture_output=True, text=True
    )
    others = {"gguf", "onnx", "llmc", "packed", "torch_file", "nanogpt", "state_dict"}
    imported = {name.removeprefix("tiedgpt.weights.") for name in done.stdout.split()}
    imported = {name.removeprefix("formats.") for name in imported}
    assert {"containers", "transformers"} <= imported
    assert not imported & others


@pytest.fixture
def unreadable(monkeypatch):
    """Refuse to open files of these names, since root may read files of any mode."""

    def refuse(*names: str) -> None:
        original_open = Path.open

        def opened(self, *arguments, **options):
            if self.name in names:
                raise PermissionError(errno.EACCES, "Permission denied", str(self))
            return original_open(self, *arguments, **options)

        monkeypatch.setattr(Path, "open", opened)

    return refuse


def test_a_file_that_holds_no_weights_need_not_be_readable(tmp_path, unreadable):
    write_onnx(tmp_path / "a.onnx", "one")
    (tmp_path / "secret").write_text("mine")
    unreadable("secret")
    assert open_checkpoint(tmp_path).container == "ONNX"


def test_weights_that_may_not_be_read_are_named(tmp_path, unreadable):
    for name in ("a.pt", "a.index"):
        (tmp_path / name).write_text("mine")
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "a.safetensors")
    stored = open_checkpoint(tmp_path / "a.safetensors").tensors["a"]
    unreadable("a.pt", "a.index", "a.safetensors")
    for name in ("a.pt", "a.index"):
        with pytest.raises(UserError, match="Permission denied"):
            open_checkpoint(tmp_path / name)
    with pytest.raises(UserError, match=r"a\.safetensors: cannot be read"):
        stored.tensor()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("config.json", "holds no weights: name the directory"),
        ("text.bin", "begins neither as a zip file nor as a pickle"),
        ("module.pt", "never run: save the state_dict"),
    ],
)
def test_files_that_hold_no_state_dict_say_what_to_do(tmp_path, name, says):
    torch.save(torch.nn.Linear(2, 3), tmp_path / "module.pt")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "text.bin").write_text("Once upon a time")
    with pytest.raises(TiedGPTError, match=says):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize("source", [{"wte.weight": torch.zeros(2, 3)}, 3, None])
def test_only_a_path_or_a_name_can_be_opened(source):
    with pytest.raises(UserError, match="must be a path or a hub name, got"):
        open_checkpoint(source)


def file_of(path, header, data: bytes = b"", length: int | None = None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


ONE = json.dumps(entry([1], 0, 4)).encode()
HOSTILE = {
    "empty": (b"", b"", 0),
    "huge header": ({}, b"", 2**62),
    "header past the end": ({}, b"", 1000),
    "not json": (b"\x80{{{", b"", None),
    "a list": (b"[]", b"", None),
    "a hole": ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12), None),
    "an overlap": ({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, bytes(8), None),
    "bytes left over": ({"a": entry([1], 0, 4)}, bytes(12), None),
    "cut off": ({"a": entry([100], 0, 400)}, bytes(12), None),
    "shape and size differ": ({"a": entry([3], 0, 4)}, bytes(4), None),
    "product overflows": ({"a": entry([2**40, 2**40], 0, 4)}, bytes(4), None),
    "negative": ({"a": entry([-1], 0, 4)}, bytes(4), None),
    "a bool for a size": ({"a": entry([True], 0, 4)}, bytes(4), None),
    "a float for a size": ({"a": entry([1.0], 0, 4)}, bytes(4), None),
    "unknown type": ({"a": entry([1], 0, 4, "F13")}, bytes(4), None),
    "no type": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4), None),
    "an entry that is text": ({"a": "x"}, b"", None),
    "metadata that is text": ({"__metadata__": "x"}, b"", None),
    "a name that is no text": (b'{"\\ud800": %b}' % ONE, bytes(4), None),
    "too many tensors": (b"[" * 40_000_000, b"", None),
    "deep": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", None),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(name, tmp_path):
    header, data, length = HOSTILE[name]
    path = tmp_path / "x.safetensors"
    if name == "empty":
        path.write_bytes(b"")
    else:
        file_of(path, header, data, length)
    with pytest.raises(CorruptInputError, match=r"x\.safetensors"):
        SafetensorsFile.open(path)


def test_every_dtype_of_safetensors_is_known(tmp_path):
    for dtype, size in {"C64": 8, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1}.items():
        path = file_of(tmp_path / "a", {"a": entry([1], 0, size, dtype)}, bytes(size))
        assert SafetensorsFile.open(path).entries["a"].n_bytes == size
