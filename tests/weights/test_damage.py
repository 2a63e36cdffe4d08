"""Files of every format that are damaged, hostile or contradict themselves.

A sound file of each format is cut and changed anywhere: the reader raises an error of ours or reads
a valid file. Files built byte by byte, tensors and configs of another GPT are refused by name.
"""

import contextlib
import json
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.tie.checkpoints import (
    N_HEAD,
    D,
    gpt_state,
    matrix,
    nanogpt_state,
    their_gpt2,
    write_gguf,
    write_layout,
    write_llmc,
    write_onnx,
)
from tests.weights.fixtures.make_tensorflow import DIRECTORY
from tests.weights.raw_files import (
    HOSTILE,
    TABLE_HEADER,
    UNSUPPORTED,
    checksum,
    table,
    table_block,
    table_entry,
    write_bundle,
)
from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.tie import audit
from tiedgpt.weights.containers import open_container
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.formats.gguf.vocabulary import read_tokenizer
from tiedgpt.weights.formats.gguf.writer import write as write_our_gguf
from tiedgpt.weights.formats.nanogpt import read_data_pickle
from tiedgpt.weights.formats.onnx.writer import write as write_our_onnx
from tiedgpt.weights.formats.packed import open_packed
from tiedgpt.weights.formats.packed.writer import pack_gpt, save_packed
from tiedgpt.weights.registry import formats
from tiedgpt.weights.source import open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::tiedgpt.weights.load.CheckpointWarning")


def read_tensors(path: Path) -> None:
    for tensor in open_checkpoint(path).tensors.values():
        if tensor.is_decodable:
            tensor.rows(0, tensor.matrix_shape[0])


def read_gguf(path: Path) -> None:
    GPT.from_pretrained(path)
    tokenizer = read_tokenizer(OpenFile(path))
    tokenizer.decode(tokenizer.encode("The fox's 12 dogs <|endoftext|>"))


def small(**fields) -> GPT:
    sizes = {"vocab_size": 5, "n_positions": 3, "n_embd": 4, "n_layer": 1, "n_head": 2}
    return GPT(GPTConfig(**sizes | fields))


def save_nanogpt(path: Path) -> None:
    sizes = {"vocab_size": 7, "n_embd": 4, "n_layer": 1, "n_head": 4}
    state = nanogpt_state(their_gpt2(**sizes, n_positions=2))
    args = sizes | {"block_size": 2, "bias": False, "dropout": 0.2}
    torch.save({"model": state, "model_args": args, "config": {"a": 1}}, path)


def save_gguf(path: Path) -> None:
    tokenizer = Tokenizer.train(["the quick brown fox, it's 12 dogs " * 20], 300)
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    write_our_gguf(small(**ids), path, tokenizer=tokenizer)


def copy_bundle(path: Path) -> None:
    shutil.copytree(DIRECTORY / "gpt2", path.parent, dirs_exist_ok=True)


def read_pickle(path: Path) -> None:
    read_data_pickle(OpenFile(path))


def save_pickle(protocol: int) -> Callable[[Path], object]:
    meta = {"vocab_size": 2, "stoi": {"a": 0, "é": 1}, "itos": {0: "a", 1: "é"}}
    return lambda path: path.write_bytes(pickle.dumps(meta, protocol))


@dataclass(frozen=True)
class Sample:
    """Files of a format: the named one first, then its companions."""

    files: tuple[str, ...]
    write: Callable[[Path], object]
    read: Callable[[Path], object] = read_tensors
    header: int = 1 << 20
    """Bytes of a file that may be changed: the first ones."""
    is_cut_noticed: bool = True


SAMPLES = {
    "safetensors": Sample(
        ("model.safetensors", "config.json"), lambda path: small().save_pretrained(path.parent),
        GPT.from_pretrained, 1500,
    ),
    "torch": Sample(("a.pt",), lambda path: torch.save({"wte.weight": torch.ones(4, 2)}, path)),
    "nanoGPT": Sample(("ckpt.pt",), save_nanogpt, GPT.from_pretrained),
    "their GGUF": Sample(("a.gguf",), lambda path: write_gguf(path, {"w": matrix(rows=4)})),
    "GGUF": Sample(("a.gguf",), save_gguf, read_gguf, 12_000),
    "their ONNX": Sample(
        ("a.onnx", "data.bin"), lambda path: write_onnx(path, "other", external=True),
        is_cut_noticed=False,
    ),
    "ONNX": Sample(
        ("a.onnx",), lambda path: write_our_onnx(small(), path), GPT.from_pretrained
    ),
    "ONNX in two files": Sample(
        ("a.onnx", "a.onnx_data"), lambda path: write_our_onnx(small(), path, largest_file=10),
        GPT.from_pretrained,
    ),
    "llm.c": Sample(
        ("a.bin",),
        lambda path: write_llmc(path, 5, **{"T": 6, "V": 5, "L": 2, "H": 2, "C": 4, "Vp": 8}),
        header=40,
    ),
    "TensorFlow": Sample(("model.ckpt.index", "model.ckpt.data-00000-of-00001"), copy_bundle),
    "packed": Sample(
        ("packed.safetensors", "config.json"),
        lambda path: save_packed(pack_gpt(small(), "int8"), path.parent),
        lambda path: open_packed(path.parent), 2000,
    ),
    "meta.pkl 0": Sample(("meta.pkl",), save_pickle(0), read_pickle),
    "meta.pkl 2": Sample(("meta.pkl",), save_pickle(2), read_pickle),
    "meta.pkl 4": Sample(("meta.pkl",), save_pickle(4), read_pickle),
}  # fmt: skip


@pytest.fixture(params=SAMPLES, scope="module")
def sample(request, tmp_path_factory):
    """(the sample, the directory in which it lies, the bytes of its files)."""
    sample, directory = SAMPLES[request.param], tmp_path_factory.mktemp("sample")
    torch.manual_seed(0)
    sample.write(directory / sample.files[0])
    sample.read(directory / sample.files[0])
    return sample, directory, {name: (directory / name).read_bytes() for name in sample.files}


def test_every_format_with_a_reader_of_its_own_has_a_sample(tmp_path):
    sampled, refused = set(), []
    for number, sample in enumerate(SAMPLES.values()):
        path = tmp_path / str(number) / sample.files[0]
        path.parent.mkdir()
        sample.write(path)
        try:
            sampled.add(open_checkpoint(path).format.name)
        except (UserError, CorruptInputError) as error:  # a tokenizer
            refused.append(str(error))
    readers = {format.name for format in formats() if format.open is not open_container}
    assert readers <= sampled, ("add a sound file of these to SAMPLES", refused)


def read_with(sample, directory: Path, sound: dict[str, bytes], name: str, content: bytes) -> None:
    """Read a sample with one file replaced."""
    (directory / name).write_bytes(content)
    try:
        sample.read(directory / sample.files[0])
    except TiedGPTError as error:
        assert "\n" not in str(error)
        raise
    finally:
        (directory / name).write_bytes(sound[name])


def test_a_file_cut_anywhere_is_refused(sample):
    if not sample[0].is_cut_noticed:
        pytest.skip("its graph may end before the file does")
    for name, content_of_file in sample[2].items():
        for size in range(
            0, len(content_of_file) - len(content_of_file) // 30 - 1, 1 + len(content_of_file) // 40
        ):
            with pytest.raises(TiedGPTError):
                read_with(*sample, name, content_of_file[:size])


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_changed_bytes_give_our_error_or_a_valid_file(sample, data):
    name = data.draw(st.sampled_from(sample[0].files))
    changed = bytearray(sample[2][name])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(changed), sample[0].header) - 1))
        changed[at] = data.draw(st.integers(0, 255))
    if data.draw(st.integers(0, 3)) == 3:
        del changed[data.draw(st.integers(0, len(changed))) :]
    with contextlib.suppress(TiedGPTError):
        read_with(*sample, name, bytes(changed))


HUGE = struct.pack("<II", 2**31 - 1, 2**30)
"""A huge number of 4 bytes, and of 8."""


def test_a_huge_number_anywhere_gives_our_error_or_a_valid_file(sample):
    for name, content in sample[2].items():
        end = min(len(content), sample[0].header) - len(HUGE)
        for at in range(0, end, 1 + end // 60):
            changed = content[:at] + HUGE + content[at + len(HUGE) :]
            with contextlib.suppress(TiedGPTError):
                read_with(*sample, name, changed)


# Hostile files, opened beside files that they might name.


@pytest.fixture
def home(tmp_path) -> Path:
    """A directory with a few bytes beside a hostile file, and a link out of it."""
    directory = tmp_path / "in"
    directory.mkdir()
    (tmp_path / "secret").write_bytes(bytes(64))
    (directory / "link.bin").symlink_to(tmp_path / "secret")
    (directory / "data.bin").write_bytes(bytes(64))
    (directory / "x.data-00000-of-00001").write_bytes(bytes(24))
    return directory


@pytest.mark.parametrize(
    ("name", "damage"), [(name, damage) for name, rows in HOSTILE.items() for damage in rows]
)
def test_a_hostile_file_is_refused_with_what_is_wrong(home, name, damage):
    content, says = HOSTILE[name][damage]
    if callable(content):
        content(home / name)
    else:
        (home / name).write_bytes(content)
    with pytest.raises(CorruptInputError, match=says) as error:
        open_checkpoint(home / name)
    message = str(error.value)
    assert f"{home / name}" in message or "x.data-0" in message
    assert "\n" not in message and len(message) < 1000


@pytest.mark.parametrize("feature", UNSUPPORTED)
def test_a_feature_that_is_not_read_is_the_users_error(home, feature):
    name, content, says = UNSUPPORTED[feature]
    content(home / name) if callable(content) else (home / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        open_checkpoint(home / name)


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


@pytest.mark.parametrize(("weight_map", "says"), INDEXES)
def test_a_false_index_and_a_shard_out_of_its_directory_are_refused(tmp_path, weight_map, says):
    inside = tmp_path / "in"
    inside.mkdir()
    for path in (tmp_path / "a.safetensors", inside / "a.safetensors", inside / "b.safetensors"):
        save_file({"w": torch.ones(2)}, path)
    (inside / "x.index.json").write_text("{}")
    index = inside / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    for source in (inside, index):
        with pytest.raises(CorruptInputError, match=says):
            open_checkpoint(source)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_changed_bundle_with_valid_checksums_gives_our_error_or_a_valid_file(tmp_path, data):
    sound = table_entry(crc=checksum(bytes(24)))
    body = bytearray(table_block(TABLE_HEADER, (b"a", sound), (b"b", sound)))
    for _ in range(data.draw(st.integers(0, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del body[data.draw(st.integers(0, len(body))) :]
    with contextlib.suppress(TiedGPTError):
        read_tensors(write_bundle(tmp_path, table(bytes(body))))


# A GPT whose tensors are not those of a GPT.


def transpose(state: dict[str, torch.Tensor]) -> None:
    state["h.1.mlp.c_fc.weight"] = state["h.1.mlp.c_fc.weight"].T.contiguous()


def drop_layer(state: dict[str, torch.Tensor]) -> None:
    for name in [name for name in state if name.startswith("h.1.")]:
        del state[name]


LAYOUTS = ("safetensors", "torch", "nanoGPT", "minGPT", "tiedgpt", "GGUF")
NOT_A_GPT = {
    "a missing tensor": (
        lambda state: state.pop("h.1.ln_1.weight"), r"h\.1\.ln_1\.weight is missing"
    ),
    "no positions": (lambda state: state.pop("wpe.weight"), r"wpe\.weight is missing"),
    "a bias of the head": (
        lambda state: state.update({"head.bias": torch.zeros(97)}), r"\.bias is not a GPT's"
    ),
    "an unknown tensor": (
        lambda state: state.update({"h.0.x.weight": torch.zeros(2)}), r"x\.weight is not a GPT's"
    ),
    "positions of another width": (
        lambda state: state.update({"wpe.weight": torch.zeros(24, D + 1)}),
        r"wpe\.weight is \(24, 33\), not \(24, 32\)",
    ),
    "a vector of another length": (
        lambda state: state.update({"ln_f.bias": torch.ones(5)}), r"ln_f\.bias is \(5,\)"
    ),
    "a transposed matrix": (transpose, r"h\.1\.mlp\.c_fc\.weight is \(32, 128\), not \(128, 32\)"),
    "a missing layer": (drop_layer, "the weights have 1 layers|says n_layer=2"),
}  # fmt: skip
"""A change of the tensors, and the text of the error."""


def assert_refused_and_audited(path: Path, says: str, **fields) -> None:
    with pytest.raises(CorruptInputError, match=says) as refused:
        GPT.from_pretrained(path, **fields)
    report = audit(path)
    assert report.verdict in ("tied, stored twice", "untied as claimed")
    assert report.load_error == refused.value.problem() and report.exit_code == 6
    assert "does not load" in [finding.kind for finding in report.findings]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout)
        for name in NOT_A_GPT
        for layout in LAYOUTS
        if name != "a missing layer" or layout not in ("minGPT", "tiedgpt")  # shapes tell it
    ],
)
def test_a_gpt_with_other_tensors_is_refused_by_name_and_audited(tmp_path, name, layout):
    change, says = NOT_A_GPT[name]
    state = gpt_state("equal")
    change(state)
    fields = N_HEAD if layout in ("minGPT", "tiedgpt") else {}
    assert_refused_and_audited(write_layout(tmp_path, layout, state), says, **fields)


# A config that contradicts the weights or itself, in every format that has one.


def nanogpt_of(directory: Path, changes: dict) -> Path:
    path = write_layout(directory, "nanoGPT", gpt_state("one"), beside="none")
    saved = torch.load(path, weights_only=True)
    torch.save(saved | {"model_args": saved["model_args"] | changes}, path)
    return path


def json_of(file: str, write: Callable[[Path], Path]) -> Callable[[Path, dict], Path]:
    """Return a function that writes a directory and changes its config."""

    def change(directory: Path, changes: dict) -> Path:
        path = write(directory)
        values = json.loads((path / file).read_text()) | changes
        (path / file).write_text(json.dumps(values))
        return path

    return change


WITH_CONFIG = {
    "safetensors": json_of(
        "config.json", lambda home: write_layout(home, "safetensors", gpt_state("equal"))
    ),
    "packed": json_of(
        "config.json", lambda home: write_layout(home, "packed", gpt_state("one"), True, "none")
    ),
    "OpenAI's": json_of(
        "hparams.json", lambda home: shutil.copytree(DIRECTORY / "gpt2", home / "gpt2")
    ),
    "nanoGPT": nanogpt_of,
}
CORRUPT, USERS = CorruptInputError, UserError
FALSE_CONFIGS = [
    *(
        ("safetensors", values, CORRUPT, next(iter(values)))
        for values in (
            {"n_layer": 10**9}, {"n_layer": 3}, {"n_layer": 1}, {"n_embd": 2 * D}, {"n_head": 5},
            {"n_head": "4"}, {"layer_norm_epsilon": 10**400}, {"tie_word_embeddings": "false"},
            {"num_attention_heads": 2}, {"hidden_size": 7},
        )
    ),
    ("safetensors", {"n_inner": 10**12}, CORRUPT, "does not fit its config"),
    ("safetensors", {"activation_function": ["gelu"]}, USERS, r"activation \['gelu'\]"),
    ("safetensors", {"activation_function": "mish"}, USERS, "mish"),
    ("safetensors", {"model_type": {}}, USERS, "{} model"),
    ("safetensors", {"model_type": "llama"}, USERS, "llama"),
    ("safetensors", {"quantization_config": {"bits": 8}}, USERS, "quantization_config"),
    ("safetensors", {"pruned_heads": {"0": [1]}}, USERS, "pruned_heads"),
    *(
        ("safetensors", {name: value}, USERS, f"{name}={value}")
        for name, value in (
            ("add_cross_attention", True), ("scale_attn_by_inverse_layer_idx", 1),
            ("scale_attn_weights", 0.5), ("is_encoder_decoder", True),
        )
    ),
    *(
        ("packed", values, CORRUPT, r"config\.json")
        for values in (
            {"n_layer": 1}, {"n_embd": 96}, {"tie_word_embeddings": False}, {"n_head": 5},
            {"model_type": "gpt2"}, {"n_layer": "2"}, {"vocab_size": None},
        )
    ),
    ("OpenAI's", {"n_head": 5}, CORRUPT, "n_head=5"),
    ("OpenAI's", {"n_head": "three"}, CORRUPT, "n_head must be .* got 'three'"),
    ("OpenAI's", {"n_layer": 3}, CORRUPT, "n_layer=3"),
    *(
        ("nanoGPT", values, TiedGPTError, r"ckpt\.pt")
        for values in (
            {"n_head": 5}, {"n_head": "x"}, {"n_layer": 9}, {"dropout": 7}, {"bias": "no"},
            {"n_head": 2**70}, {"n_head": None}, {"bias": False},
        )
    ),
    ("nanoGPT", {"use_rmsnorm": True}, USERS, "use_rmsnorm=True"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "changes", "error", "says"), FALSE_CONFIGS)
def test_a_false_config_is_refused_before_allocation(tmp_path, layout, changes, error, says):
    path = WITH_CONFIG[layout](tmp_path, changes)
    with pytest.raises(error, match=says) as refused:
        open_packed(path) if layout == "packed" else GPT.from_pretrained(path)
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize("values", [{"n_layer": 3}, {"n_embd": 2 * D}])
def test_a_config_of_another_gpt_is_audited(tmp_path, values, capsys):
    path = WITH_CONFIG["safetensors"](tmp_path, values)
    assert_refused_and_audited(path, next(iter(values)))
    assert main(["tie", "audit", str(path)]) == 6
    assert "does not load" in capsys.readouterr().out
