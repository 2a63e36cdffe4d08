"""Files of every format, cut or changed anywhere: an error of ours, or sound; never a crash."""

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

from tests.tie.checkpoints import (
    CONFIG,
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
from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.errors import CorruptInputError, TiedGPTError
from tiedgpt.tie import audit
from tiedgpt.weights.formats.gguf.vocabulary import read_tokenizer
from tiedgpt.weights.formats.gguf.writer import write as write_our_gguf
from tiedgpt.weights.formats.nanogpt import read_data_pickle
from tiedgpt.weights.formats.onnx.writer import write as write_our_onnx
from tiedgpt.weights.formats.packed import open_packed
from tiedgpt.weights.formats.packed.writer import pack_gpt, save_packed
from tiedgpt.weights.sources import open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::tiedgpt.weights.load.CheckpointWarning")


def read_tensors(path: Path) -> None:
    for tensor in open_checkpoint(path).tensors.values():
        if tensor.is_decodable:
            tensor.rows(0, tensor.matrix_shape[0])


def read_gguf(path: Path) -> None:
    GPT.from_pretrained(path)
    tokenizer = read_tokenizer(path)
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
    "meta.pkl 0": Sample(("meta.pkl",), save_pickle(0), read_data_pickle),
    "meta.pkl 2": Sample(("meta.pkl",), save_pickle(2), read_data_pickle),
    "meta.pkl 4": Sample(("meta.pkl",), save_pickle(4), read_data_pickle),
}  # fmt: skip


@pytest.fixture(params=SAMPLES, scope="module")
def sample(request, tmp_path_factory):
    """(the sample, the directory in which it lies, the bytes of its files)."""
    sample, directory = SAMPLES[request.param], tmp_path_factory.mktemp("sample")
    torch.manual_seed(0)
    sample.write(directory / sample.files[0])
    sample.read(directory / sample.files[0])
    return sample, directory, {name: (directory / name).read_bytes() for name in sample.files}


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


# A GPT whose tensors, or whose config, are not those of a GPT.


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


@pytest.mark.parametrize("values", [{"n_layer": 3}, {"n_embd": 2 * D}])
def test_a_config_of_another_gpt_is_refused_and_audited(tmp_path, values, capsys):
    write_layout(tmp_path, "safetensors", gpt_state("equal"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | values))
    assert_refused_and_audited(tmp_path, next(iter(values)))
    assert main(["tie", "audit", str(tmp_path)]) == 6
    assert "does not load" in capsys.readouterr().out
