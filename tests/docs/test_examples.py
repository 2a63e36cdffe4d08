"""Run the examples unchanged; their small model is trained for fewer steps."""

import json
import math
import os
import random
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.docs.conftest import ROOT
from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.cli.main import main

EXAMPLES = ROOT / "examples"
SCRIPTS = {
    "own_loop.py": (["diary.txt", "4", "2"], "NOT tied: wte.weight only reads"),
    "own_task.py": (["20"], "saved in runs/tagger/model"),
    "distil.py": (["4"], "distilled  "),
    "tied_vs_untied.py": (["2", "words.txt"], "figure: runs/tied-vs-untied/comparison.svg"),
    "lora.py": ([], "merged: logits moved by"),
    "batch_generation.py": ([], '"ended": "stop"'),
    "score_texts.py": ([], "Cairo: sun, 28 degrees. Ben ..."),
}
"""Arguments of each script, and a part of its output."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with the small model."""
    place = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(str(EXAMPLES))
        from small_model import small_model

        small_model(steps=30)
    return place


@pytest.fixture
def here(place, monkeypatch) -> Path:
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return place


def run_script(name: str, arguments: list[str], monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs(name, here, monkeypatch, capsys):
    draw = random.Random(0)
    lines = (" ".join(f"w{draw.randrange(300):x}" for _ in range(12)) for _ in range(400))
    (here / "words.txt").write_text("\n".join(lines))
    arguments, output = SCRIPTS[name]
    run_script(name, arguments, monkeypatch)
    assert output in capsys.readouterr().out


def test_tied_and_untied_models_begin_alike_and_have_comparable_sizes(here):
    script = runpy.run_path(str(EXAMPLES / "tied_vs_untied.py"))
    tokenizer = Tokenizer.train(["the cat sat on the mat"], 300)
    tied, untied, equal = script["configs"](tokenizer).values()
    assert untied.parameter_count() == tied.parameter_count() + len(tokenizer) * tied.n_embd
    assert equal.parameter_count() == pytest.approx(tied.parameter_count(), rel=0.005)
    models = []
    for config in (tied, untied):
        torch.manual_seed(3)
        models.append(script["CompareTie"]().build(config, None).eval())
    ids = torch.arange(24).view(2, 12)
    assert torch.equal(models[0](ids), models[1](ids)) and models[1].head is not None


def test_a_tagging_head_of_ones_own_loads_in_transformers(here):
    transformers = pytest.importorskip("transformers")
    script = runpy.run_path(str(EXAMPLES / "own_task.py"))
    words = [word for words in script["WORDS"].values() for word in words]
    tokenizer = Tokenizer.characters([*script["SENTENCES"], *words])
    config = GPTConfig(vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=1, n_head=2)
    head = script["Tagger"](GPT(config)).eval()
    head.save_pretrained("tagger")
    theirs = transformers.AutoModelForTokenClassification.from_pretrained("tagger").eval()
    ids = torch.from_numpy(script["make_batch"](tokenizer, (0,), 3)[0])
    torch.testing.assert_close(theirs(ids).logits, head(ids), atol=1e-5, rtol=1e-5)
    assert theirs.config.id2label == dict(enumerate(script["TAGS"]))
    assert torch.equal(script["Tagger"].from_pretrained("tagger")(ids), head(ids))


@pytest.mark.parametrize(
    ("policy", "reference", "loss"),
    [
        ([-3.0, -3.0], [-3.0, -3.0], math.log(2)),
        ([-1.0, -2.0], [-1.5, -1.0], math.log1p(math.exp(-0.15))),
        ([-9.0, -2.0], [-4.0, -4.0], math.log1p(math.exp(0.7))),
    ],
)
def test_the_loss_of_dpo_is_that_of_its_equation(policy, reference, loss):
    script = runpy.run_path(str(EXAMPLES / "dpo.py"))
    rows = torch.tensor([policy]), torch.tensor([reference])
    assert script["dpo_loss"](*rows, beta=0.1).item() == pytest.approx(loss, rel=1e-6)


def test_an_objective_of_a_users_file_trains_from_the_command_line(here, capsys):
    pair = {"prompt": "Ada", "chosen": " met Ben", "rejected": " and and"}
    lines = [json.dumps(pair | {"prompt": f"day {n}: Ada"}) + "\n" for n in range(30)]
    Path("pairs.jsonl").write_text("".join(lines))
    command = ["train", "pairs.jsonl", "--start", "runs/diary-1", "-o", "runs/dpo"]
    command += ["--steps", "6", "--lr", "1e-3", "-b", "4"]
    assert main([*command, "--objective", "dpo:Nothing"]) == 1
    assert "give MODULE:CLASS" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--objective", "dpo:Preferences"]) == 0
    last = json.loads(Path("runs/dpo/metrics.jsonl").read_text().splitlines()[-1])
    assert last["final"] and last["val_loss"] < math.log(2) and last["val_accuracy"] == 1
    assert main([*command, "--objective", "dpo:Preferences"]) == 0
    assert "is finished" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_the_client_of_openai_is_served(here, monkeypatch, capfd):
    pytest.importorskip("openai")
    path = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    run_script("openai_client.py", [], monkeypatch)
    assert "embedding:  64 numbers" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.name for path in sorted(EXAMPLES.glob("*.ipynb"))])
def test_a_notebook_runs(name, here, capfd):
    from notebooks import execute

    cells = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))["cells"]
    stored = json.dumps(cells)
    execute(cells, name)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    kinds = [[out["output_type"] for out in cell["outputs"]] for cell in code]
    then = [cell for cell in json.loads(stored) if cell["cell_type"] == "code"]
    assert kinds == [[out["output_type"] for out in cell["outputs"]] for cell in then], (
        "run `python examples/notebooks.py`"
    )


@pytest.mark.parametrize("name", [path.name for path in sorted(EXAMPLES.glob("*.py"))])
def test_help_of_a_script_is_its_docstring(name, here, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    except SystemExit as ended:
        assert not ended.code
    assert name.removesuffix(".py") in capsys.readouterr().out


def test_every_script_is_tested_and_counted():
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    helpers = {"small_model.py", "notebooks.py"}
    assert scripts == SCRIPTS.keys() | {"dpo.py", "openai_client.py", *helpers}
    numbers = ["four", "five", "six", "seven", "eight", "nine", "ten"]
    counts = [numbers[len(list(EXAMPLES.glob("*.ipynb"))) - 4], numbers[len(scripts - helpers) - 4]]
    for page in ("README.md", "docs/index.md", "CHANGELOG.md", "examples/README.md"):
        text = (ROOT / page).read_text()
        found = re.findall(r"(?i)(\w+) notebooks(?:,| and) (\w+) scripts", text)
        assert [[a.lower(), b] for a, b in found] == [counts], page


def test_notebooks_import_nothing_from_the_checkout():
    for path in EXAMPLES.glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        modules = set(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE))
        assert not modules & {script.stem for script in EXAMPLES.glob("*.py")}, path
        assert "pip install" in "".join(cells[0]["source"]), path


def test_notebooks_have_outputs_and_write_to_a_temporary_folder():
    for path in EXAMPLES.glob("*.ipynb"):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert "os.chdir(tempfile.mkdtemp())" in "".join(code[0]["source"]), path
        assert notebook["nbformat"] == 4 and any(cell["outputs"] for cell in code), path
