"""The hub: a model goes up and comes down again, one format is fetched, or an error says why."""

import json
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest
import torch

from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.errors import UserError
from tiedgpt.infer import Engine
from tiedgpt.weights.hub import select_files
from tiedgpt.weights.source import Source, open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::tiedgpt.weights.load.CheckpointWarning")


@pytest.fixture
def run(tokenizer, tmp_path, monkeypatch) -> Path:
    """A run with checkpoints and a record, which stay here."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "my-1"
    torch.manual_seed(0)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = GPT(GPTConfig(vocab_size=len(tokenizer), n_positions=32, n_embd=32, n_layer=1,
                          n_head=2, **ids))  # fmt: skip
    model.save_pretrained(run / "model")
    tokenizer.save_pretrained(run / "model")
    (run / "checkpoints").mkdir()
    (run / "run.toml").write_text(f'[options]\ndata = ["{tmp_path}/private/diary.txt"]\n')
    (run / "model" / "notes.txt").write_text("mine")
    config = run / "model" / "config.json"
    origin = {"_name_or_path": str(tmp_path / "private")}
    config.write_text(json.dumps(json.loads(config.read_text()) | origin))
    again = GPT.from_pretrained(run)  # as `tune` saves a model that it began with
    again.save_pretrained(run / "model")
    return run


def test_a_run_is_pushed_private_and_downloaded_as_the_same_model(run, hub, capsys):
    assert main(["push", str(run), "someone/my-gpt"]) == 0
    assert f"{hub.url}/someone/my-gpt/commit/" in capsys.readouterr().out
    assert hub.private == {"someone/my-gpt": True}
    files = hub.files["someone/my-gpt"]
    assert files.keys() == {
        "README.md", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    again, model = GPT.from_pretrained("someone/my-gpt"), GPT.from_pretrained(run)
    assert all(map(torch.equal, again.state_dict().values(), model.state_dict().values()))
    assert Tokenizer.from_pretrained("someone/my-gpt").encode("the cat")
    assert main(["push", str(run), "someone/my-gpt", "--public"]) == 0  # it is there already


def test_uploaded_files_contain_no_local_path(run, hub, tmp_path):
    assert main(["push", str(run), "someone/my-gpt", "--gguf", "q4_0"]) == 0
    files = hub.files["someone/my-gpt"]
    assert {"my-gpt-q4_0.gguf", "my-gpt-q4_0.Modelfile", "model.safetensors"} <= files.keys()
    for name, data in files.items():
        assert str(tmp_path).encode() not in data and b"private" not in data, name
    assert files["my-gpt-q4_0.Modelfile"].startswith(b"FROM ./my-gpt-q4_0.gguf\n")
    assert sum("/commit/" in path for path in hub.asked) == 1


def test_a_dry_run_needs_no_network_and_no_token(run, hub, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    assert main(["push", str(run), "someone/my-gpt", "--dry-run", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["private"] and told["url"] is None
    assert told["files"]["model.safetensors"] > 1000
    assert not hub.asked and not hub.files


def test_a_missing_token_error_names_the_remedy(run, hub, monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert main(["push", str(run), "someone/my-gpt"]) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "you are not logged in to the hub" in err and "hf auth login" in err
    assert not hub.asked


def test_a_refused_token_is_reported_and_nothing_is_committed(run, hub, monkeypatch):
    model = GPT.from_pretrained(run)
    with pytest.raises(UserError, match=r"does not know the token.*hf auth login"):
        model.push_to_hub("someone/gpt", token="hf_wrong")
    with pytest.raises(UserError, match="does not let its user write there"):
        model.push_to_hub("other/gpt")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="nothing was committed"):
        model.push_to_hub("someone/gpt")
    assert not hub.files


def test_a_model_in_memory_is_pushed_with_its_tokenizer(run, hub, tokenizer):
    model = GPT.from_pretrained(run)
    url = model.push_to_hub("someone/gpt", tokenizer=tokenizer, private=False)
    assert url.startswith(f"{hub.url}/someone/gpt") and hub.private == {"someone/gpt": False}
    again = GPT.from_pretrained("someone/gpt")
    assert torch.equal(again.wte.weight, model.wte.weight)
    assert Tokenizer.from_pretrained("someone/gpt").encode("the") == tokenizer.encode("the")


@pytest.mark.parametrize("repo", ["gpt", "a/b/c", "../x", "a b/c"])
def test_invalid_repository_names_are_refused(run, repo, capsys):
    assert main(["push", str(run), repo, "--dry-run"]) == 1
    assert "owner/name" in capsys.readouterr().err


def test_files_of_other_formats_must_be_converted_first(run, tmp_path, capsys):
    assert main(["convert", str(run), str(tmp_path / "a.gguf")]) == 0
    assert main(["push", str(tmp_path / "a.gguf"), "someone/gpt", "--dry-run"]) == 1
    assert "tiedgpt convert MODEL out --to transformers" in capsys.readouterr().err


def test_a_tokenizer_is_downloaded_without_weights(run, hub):
    main(["push", str(run), "someone/my-gpt"])
    hub.asked.clear()
    assert Tokenizer.from_pretrained("someone/my-gpt").encode("the cat")
    assert any(path.endswith("/tokenizer.json") for path in hub.asked)
    assert not any(path.endswith(".safetensors") for path in hub.asked)


def test_model_tokenizer_and_template_of_a_name_are_asked_for_once(run, hub):
    main(["push", str(run), "someone/my-gpt"])
    hub.asked.clear()
    with Engine("someone/my-gpt", backend="torch") as engine:
        assert engine.tokenizer is not None and engine.template is None
    requests = [path for path in hub.asked if path.startswith("/api/models/")]
    assert requests and len(requests) == len(set(requests))


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
def test_only_one_format_of_a_repository_is_downloaded(files, fetched):
    assert select_files("someone/gpt", CONFIG + files) == [
        "config.json",
        "tokenizer.json",
        *fetched,
    ]


def test_one_of_several_quantizations_must_be_named():
    with pytest.raises(UserError, match=r"2 files of weights \(a\.Q4_0\.gguf, a\.Q8_0\.gguf\)"):
        select_files("someone/gpt", ["a.Q4_0.gguf", "a.Q8_0.gguf"])


@pytest.mark.parametrize("path", ["./model", "../model", ".cache/model", "a/b/c"])
def test_a_missing_path_is_never_looked_up_on_the_hub(path, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match=f"^{path} does not exist: check the name$"):
        assert Source(path).path


def test_a_revision_is_cached_and_loads_again_without_a_network(run, hub, tmp_path, monkeypatch):
    model, cache = GPT.from_pretrained(run), tmp_path / "cache"
    model.push_to_hub("someone/gpt")
    for url in (hub.url, "http://127.0.0.1:9"):
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        again = GPT.from_pretrained("someone/gpt", revision="v2", cache_dir=cache)
        assert torch.equal(again.wte.weight, model.wte.weight)
    assert "/api/models/someone/gpt/revision/v2" in hub.asked
    assert list(cache.rglob("refs/v2")) and list(cache.rglob("model.safetensors"))


def test_a_missing_repository_is_reported(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="no file or directory here: the hub cannot be reached"):
        GPT.from_pretrained("someone/gpt-that-nobody-has")


def test_shards_may_be_links_into_a_cache(saved, tiny, tmp_path):
    """Links as `huggingface-cli download --local-dir` made them, and links of users."""
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
