"""A model goes up to the hub and comes down again, or nothing is sent."""

import json
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from tests.weights.fake_hub import hub  # noqa: F401
from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::tiedgpt.weights.load.CheckpointWarning")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["the cat sat on the mat. " * 20], 290)


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


def test_a_run_goes_up_private_and_comes_down_as_the_same_model(run, hub, capsys):  # noqa: F811
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


def test_no_file_that_is_sent_names_a_directory_of_this_machine(run, hub, tmp_path):  # noqa: F811
    assert main(["push", str(run), "someone/my-gpt", "--gguf", "q4_0"]) == 0
    files = hub.files["someone/my-gpt"]
    assert {"my-gpt-q4_0.gguf", "my-gpt-q4_0.Modelfile", "model.safetensors"} <= files.keys()
    for name, data in files.items():
        assert str(tmp_path).encode() not in data and b"private" not in data, name
    assert files["my-gpt-q4_0.Modelfile"].startswith(b"FROM ./my-gpt-q4_0.gguf\n")
    assert sum("/commit/" in path for path in hub.asked) == 1


def test_a_dry_run_asks_nobody_and_needs_no_token(run, hub, monkeypatch, capsys):  # noqa: F811
    monkeypatch.delenv("HF_TOKEN")
    assert main(["push", str(run), "someone/my-gpt", "--dry-run", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["private"] and told["url"] is None
    assert told["files"]["model.safetensors"] > 1000
    assert not hub.asked and not hub.files


def test_without_a_token_the_remedy_is_told(run, hub, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert main(["push", str(run), "someone/my-gpt"]) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "you are not logged in to the hub" in err and "hf auth login" in err
    assert not hub.asked


def test_a_token_that_the_hub_refuses_is_told_and_nothing_is_committed(run, hub, monkeypatch):  # noqa: F811
    model = GPT.from_pretrained(run)
    with pytest.raises(UserError, match=r"does not know the token.*hf auth login"):
        model.push_to_hub("someone/gpt", token="hf_wrong")
    with pytest.raises(UserError, match="does not let its user write there"):
        model.push_to_hub("other/gpt")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="nothing was committed"):
        model.push_to_hub("someone/gpt")
    assert not hub.files


def test_a_model_in_memory_goes_up_with_its_tokenizer(run, hub, tokenizer):  # noqa: F811
    model = GPT.from_pretrained(run)
    url = model.push_to_hub("someone/gpt", tokenizer=tokenizer, private=False)
    assert url.startswith(f"{hub.url}/someone/gpt") and hub.private == {"someone/gpt": False}
    again = GPT.from_pretrained("someone/gpt")
    assert torch.equal(again.wte.weight, model.wte.weight)
    assert Tokenizer.from_pretrained("someone/gpt").encode("the") == tokenizer.encode("the")


@pytest.mark.parametrize("repo", ["gpt", "a/b/c", "../x", "a b/c"])
def test_what_is_no_repository_is_refused(run, repo, capsys):
    assert main(["push", str(run), repo, "--dry-run"]) == 1
    assert "owner/name" in capsys.readouterr().err


def test_a_file_of_another_format_is_to_be_converted_first(run, tmp_path, capsys):
    assert main(["convert", str(run), str(tmp_path / "a.gguf")]) == 0
    assert main(["push", str(tmp_path / "a.gguf"), "someone/gpt", "--dry-run"]) == 1
    assert "tiedgpt convert MODEL out --to transformers" in capsys.readouterr().err
