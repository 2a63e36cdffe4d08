"""Files of every format, cut or changed anywhere: an error of ours, or sound; never a crash."""

import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tie.checkpoints import matrix, write_gguf, write_onnx
from tests.weights.fixtures.make_tensorflow import DIRECTORY
from tests.weights.karpathy import ARGS, Karpathy
from tests.weights.llmc_files import write_checkpoint
from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.errors import TiedGPTError
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
    args = ARGS | {"n_embd": 4, "n_layer": 1, "vocab_size": 7, "block_size": 2}
    state = Karpathy(args).state_dict()
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
        lambda path: write_checkpoint(path, 5, **{"T": 6, "V": 5, "L": 2, "H": 2, "C": 4, "Vp": 8}),
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
    try:
        read_with(*sample, name, bytes(changed))
    except TiedGPTError:
        pass
