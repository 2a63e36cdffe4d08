"""`tiedgpt tie` as a user meets it: tables, JSON, exit codes."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiedgpt import GPT
from tiedgpt.cli.main import main


@pytest.fixture
def saved(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.save_pretrained("sound")
    tiny.head = torch.nn.Linear(32, 97, bias=False)
    tiny.config = type(tiny.config)(**{**vars(tiny.config), "tie_word_embeddings": False})
    tiny.save_pretrained("broken")
    config = json.loads((tmp_path / "broken" / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (tmp_path / "broken" / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_show_counts_every_parameter_once_and_groups_layers(saved, capfd):
    assert main(["tie", "show", "sound"]) == 0
    out = capfd.readouterr().out
    assert "42,048" in out and "reads and predicts" in out
    assert "transformer.h.0-2.ln_1.weight" in out
    assert main(["tie", "show", "sound", "--format", "json"]) == 0
    assert json.loads(capfd.readouterr().out)["total"] == 42_048


def test_audit_says_broken_with_exit_code_6_and_fix_mends_a_copy(saved, capfd):
    assert main(["tie", "audit", "sound"]) == 0
    assert main(["tie", "audit", "broken"]) == 6
    out = capfd.readouterr().out
    assert re.search(r"verdict +broken", out) and "97 of 97 rows" in out
    assert main(["tie", "audit", "broken", "--format", "json"]) == 6
    assert json.loads(capfd.readouterr().out)["verdict"] == "broken"
    assert main(["tie", "fix", "broken", "mended"]) == 1
    assert "--keep input or --keep output or --keep both" in capfd.readouterr().err
    assert main(["tie", "fix", "broken", "mended", "--keep", "input"]) == 0
    assert main(["tie", "audit", "mended"]) == 0


@pytest.mark.parametrize("head", ["own", "tied"])
def test_a_packed_directory_is_audited_and_fixed_to_a_model_directory(tiny, tmp_path, capfd, head):
    from tiedgpt.weights.formats.packed.writer import pack_gpt, save_packed

    if head == "own":
        tiny = GPT(replace(tiny.config, tie_word_embeddings=False))
    save_packed(pack_gpt(tiny, "int8"), tmp_path / "packed")
    assert main(["tie", "audit", str(tmp_path / "packed")]) == 0
    capfd.readouterr()
    command = ["tie", "fix", str(tmp_path / "packed"), str(tmp_path / "new")]
    assert main(command) == 1
    assert "nothing to mend" in capfd.readouterr().err and not (tmp_path / "new").exists()
    if head == "own":
        assert main([*command, "--keep", "input"]) == 0
        assert main(["tie", "audit", str(tmp_path / "new")]) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["tie", "dance"], 2, "show, audit, fix"),
        (["tie", "audit", "nowhere/at/all"], 1, "does not exist"),
        (["tie", "audit", "a" * 300], 1, "is no path"),
        (["tie", "audit", "noise.safetensors"], 3, "noise.safetensors"),
        (["tie", "fix", "sound", "sound"], 1, "sound"),
    ],
)
def test_bad_requests_get_one_line(saved, capfd, arguments, code, says):
    (saved / "noise.safetensors").write_bytes(bytes(range(200)))
    assert main(arguments) == code
    err = capfd.readouterr().err
    assert says in err and err.startswith("error: ") and err.count("\n") <= 2


def test_names_with_several_numbers_keep_all_their_rows(tmp_path, capfd):
    sizes = {f"down.{i}.block.{j}.weight": 4 + 4 * i for i in range(2) for j in range(3)}
    sizes["top.weight"] = 2
    save_file({name: torch.ones(n, n) for name, n in sizes.items()}, tmp_path / "all.safetensors")
    assert main(["tie", "show", str(tmp_path / "all.safetensors")]) == 0
    out = capfd.readouterr().out
    assert "left out" not in out and re.findall(r"(\S+weight) +(.+?)  ", out) == [
        ("down.0.block.0-2.weight", "3 x 4 x 4"),
        ("down.1.block.0-2.weight", "3 x 8 x 8"),
        ("top.weight", "2 x 2"),
    ]


def test_generate_says_that_two_equal_matrices_were_tied(saved, tiny, capfd):
    from tiedgpt import Tokenizer

    state = load_file("sound/model.safetensors")
    state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    save_file(state, "sound/model.safetensors")
    Tokenizer.characters(["ab"]).save_pretrained("sound")
    assert main(["generate", "sound", "--prompt", "ab", "--max-new-tokens", "2"]) == 0
    assert "are equal: tied" in capfd.readouterr().err
