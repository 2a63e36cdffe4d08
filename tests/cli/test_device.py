"""--device of the verbs that compute without training."""

import json
from types import SimpleNamespace

import pytest
import torch

from tests.heads.conftest import enlarge
from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.cli.doctor import examine
from tiedgpt.cli.main import main
from tiedgpt.heads import SequenceClassifier

GB = 10**9
TEXT = ["--text", "the cat sat"]
VERBS = {
    "generate": ["generate", "{model}", "--prompt", "the cat", "-t", "0", "-f", "json"],
    "eval": ["eval", "{model}", "{text}", "-f", "json"],
    "inspect with text": ["inspect", "positions", "{model}", *TEXT, "-f", "json"],
    "inspect without text": ["inspect", "vocabulary", "{model}", "-f", "json"],
    "classify": ["classify", "{head}", "the cat sat", "-f", "json"],
}
"""A command of each verb whose standard output is the result."""


@pytest.fixture(scope="module")
def files(directory, tmp_path_factory):
    """Return the paths of a model, of a head on a body, and of a text."""
    folder = tmp_path_factory.mktemp("files")
    tokenizer = Tokenizer.from_pretrained(directory)
    config = GPTConfig(
        vocab_size=len(tokenizer), n_positions=24, n_embd=32, n_layer=2, n_head=4,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    head = enlarge(SequenceClassifier(GPT(config), labels=["no", "yes"]))
    head.save_pretrained(folder / "head")
    tokenizer.save_pretrained(folder / "head")
    (folder / "text.txt").write_text("the cat sat on the mat. " * 5)
    paths = {"model": directory, "head": folder / "head", "text": folder / "text.txt"}
    return {name: str(path) for name, path in paths.items()}


@pytest.mark.parametrize("verb", VERBS)
def test_auto_and_the_cpu_give_the_same_result(verb, files, capsys):
    command, outputs = [word.format_map(files) for word in VERBS[verb]], []
    for device in ([], ["--device", "auto"], ["--device", "cpu"]):
        assert main([*command, *device]) == 0
        outputs.append(json.loads(capsys.readouterr().out))
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize(
    ("device", "problem"), [("cuda:63", "cannot be used here"), ("gpu", "must be auto, cpu, cuda")]
)
@pytest.mark.parametrize("verb", [*VERBS, "serve"])
def test_a_device_that_is_not_here_ends_each_verb_with_one_sentence(
    verb, device, problem, files, capsys
):
    command = VERBS.get(verb, ["serve", "{model}", "--port", "0"])
    assert main([*(word.format_map(files) for word in command), "--device", device]) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert f"--device {problem}" in err or f"--device {device} {problem}" in err


def test_a_gpu_and_int8_exclude_each_other_on_the_command_line(files, capsys):
    command = [word.format_map(files) for word in VERBS["generate"]]
    assert main([*command, "--device", "cuda", "--precision", "int8"]) == 1
    assert "--device and --precision exclude each other" in capsys.readouterr().err


def test_doctor_names_the_memory_of_a_gpu(monkeypatch):
    monkeypatch.setattr("tiedgpt.cli.doctor.find_device", lambda: torch.device("cpu"))
    numbers = {"mem_get_info": (50 * GB, 80 * GB), "memory_reserved": 7 * GB, "device_count": 1}
    numbers |= {"memory_allocated": 4 * GB, "get_device_name": "H100", "is_available": True}
    numbers["get_device_properties"] = SimpleNamespace(total_memory=80 * GB)
    for name, number in ({"is_bf16_supported": True} | numbers).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, number=number, **__: number)
    assert examine()["cuda:0"] == "H100: 80.0 GB, 53.0 GB free, bf16"
