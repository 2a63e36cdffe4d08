"""A hub name: which files are fetched, from where, and what is said when nothing can be had."""

from types import SimpleNamespace

import huggingface_hub
import pytest

from tiedgpt import GPT
from tiedgpt.errors import UserError
from tiedgpt.weights.sources import local_directory, open_checkpoint, select_files

CONFIG = ["config.json", "README.md", "tokenizer.json"]


@pytest.mark.parametrize(
    ("files", "fetched"),
    [
        (["model.safetensors", "pytorch_model.bin", "tf_model.h5"], ["model.safetensors"]),
        (["pytorch_model.bin", "training_args.bin", "rust_model.ot"], ["pytorch_model.bin"]),
        (
            ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"],
            ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"],
        ),
        (["gpt2.Q8_0.gguf"], ["gpt2.Q8_0.gguf"]),
        (["onnx/model.onnx", "onnx/model.onnx_data"], ["onnx/model.onnx", "onnx/model.onnx_data"]),
        (["ckpt.pt", "optimizer.pt"], ["ckpt.pt"]),
        (["checkpoint-500/model.safetensors", "model.safetensors"], ["model.safetensors"]),
    ],
)
def test_of_a_repository_one_format_is_fetched(files, fetched):
    assert select_files("someone/gpt", CONFIG + files) == ["config.json", *fetched]


def test_of_several_quantizations_one_must_be_named():
    with pytest.raises(UserError, match=r"2 files of weights \(a\.Q4_0\.gguf, a\.Q8_0\.gguf\)"):
        select_files("someone/gpt", ["a.Q4_0.gguf", "a.Q8_0.gguf"])


@pytest.mark.parametrize("path", ["./model", "../model", ".cache/model", "a/b/c"])
def test_a_path_that_is_not_there_is_never_asked_of_the_hub(path):
    with pytest.raises(UserError, match=f"^{path} does not exist: check the name$"):
        local_directory(path)


@pytest.fixture
def hub(monkeypatch, saved):
    """A hub that has one repository, and the keyword arguments with which it was asked."""
    asked = []

    def snapshot_download(name, **options):
        asked.append(options)
        return str(saved)

    def model_info(self, name, revision=None):
        names = [file.name for file in saved.iterdir()]
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    return asked


def test_revision_and_cache_dir_go_to_the_hub(hub, tiny, ids, tmp_path):
    model = GPT.from_pretrained("someone/gpt", revision="v2", cache_dir=tmp_path / "cache")
    assert (model(ids) == tiny(ids)).all()
    assert hub[0]["revision"] == "v2" and hub[0]["cache_dir"] == tmp_path / "cache"
    assert "model.safetensors" in hub[0]["allow_patterns"]


def test_without_a_network_the_cache_is_asked(hub, monkeypatch):
    def unreachable(self, name, revision=None):
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    GPT.from_pretrained("someone/gpt")
    assert {"*.safetensors", "*.gguf", "*.onnx", "config.json"} <= set(hub[0]["allow_patterns"])


def test_what_is_nowhere_is_told(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="no file or directory here: the hub cannot be reached"):
        GPT.from_pretrained("someone/gpt-that-nobody-has")


def test_shards_may_be_links_into_a_cache(saved, tiny, tmp_path):
    """As `huggingface-cli download --local-dir` made them, and as people link large files."""
    import json

    snapshot, blobs = tmp_path / "snapshot", tmp_path / "elsewhere"
    snapshot.mkdir()
    (saved / "model.safetensors").rename(saved / "blob")
    saved.rename(blobs)
    names = open_checkpoint(blobs / "blob").tensors
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-00001-of-00001.safetensors").symlink_to(blobs / "blob")
    (snapshot / "config.json").symlink_to(blobs / "config.json")
    assert (GPT.from_pretrained(snapshot).wte.weight == tiny.wte.weight).all()
