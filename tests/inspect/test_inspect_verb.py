"""`tiedgpt inspect` as a user meets it: tables of 80 columns, JSON, figures, errors."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.inspect.conftest import TEXT, random_model
from tiedgpt import inspect
from tiedgpt.cli.main import main
from tiedgpt.inspect.registry import INSPECTIONS

HOSTILE = "naïve  café\n\t文字 $x_1$"
"""Blanks, a tab, half characters, what matplotlib takes for mathematics."""
pytestmark = pytest.mark.usefixtures("here")


OWN = {
    "vocabulary": ["--counts", "text.txt"],
    "neighbours": ["--token", "5"],
    "patch": ["--text", HOSTILE, "--corrupted", HOSTILE.replace("x_1", "x_2"), "--answer", "5"],
    "direction": ["--toward", HOSTILE.replace("\n", " "), "--away", TEXT],
}
"""Arguments of the names that read no text, or another one, too."""


@pytest.mark.parametrize("name", [each.verb for each in INSPECTIONS.values()])
def test_every_name_prints_a_table_json_and_a_figure(name, capfd):
    Path("text.txt").write_text(TEXT * 3)
    text = OWN.get(name, ["--text", HOSTILE])
    figure = f"{name}.svg"
    assert main(["inspect", name, "model", *text, "--plot", figure]) == 0
    out = capfd.readouterr().out
    assert max(map(cell_len, out.splitlines())) <= 80
    assert "written" in out and figure in out
    assert Path(figure).read_text().startswith("<?xml")
    if name != "ablate":
        assert re.search(r"'[^']+'|bytes:\\x", out), "tokens are quoted"
    assert main(["inspect", name, "model", *text, "--format", "json"]) == 0
    json.loads(capfd.readouterr().out, parse_constant=pytest.fail)


def test_a_replaced_token_is_reported_and_ids_need_no_tokenizer(tokenizer, capfd):
    (new,) = tokenizer.encode(" the")
    replacement = ["--replace-at", "3", "--replace-with", " the"]
    assert main(["inspect", "positions", "model", "--text", TEXT, *replacement]) == 0
    out = capfd.readouterr().out
    assert f"replaced by ' the' (id {new})" in out
    assert "logits moved by" in out and "stayed the same, bit for bit" in out
    assert main(["inspect", "positions", "model", "--ids", "3", "4"]) == 0
    assert "training learns from 1 prediction," in capfd.readouterr().out
    assert main(["inspect", "lens", "model", "--ids", "3", "4", "--after-attention"]) == 0
    assert "h.1.attn" in capfd.readouterr().out


def test_standard_input_is_read(capfd, monkeypatch):
    for data, code, said in ((b"the cat", 0, "loss"), (b"\xff\xfe", 3, "not UTF-8")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert main(["inspect", "positions", "model", "--text", "-"]) == code
        assert said in "".join(capfd.readouterr())


def test_an_untied_model_shows_both_matrices_by_name(tokenizer, capfd):
    random_model(tied=False, vocab_size=len(tokenizer)).save_pretrained("untied")
    assert main(["inspect", "vocabulary", "untied"]) == 0
    out = capfd.readouterr().out
    assert "wte.weight reads" in out and "head.weight predicts" in out
    assert "no counts" in out and "no tokenizer" in out
    assert main(["inspect", "gradient_split", "untied", "--ids", "1", "2", "3"]) == 0
    out = capfd.readouterr().out
    assert "wte.weight reads, head.weight predicts: two matrices" in out
    assert "each is its matrix's ordinary gradient" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["positions"], "give --text, or --ids"),
        (["positions", "--text", "a", "--ids", "3"], "give --text, or --ids"),
        (["positions", "--text", ""], "text is empty"),
        (["positions", "--text", "cat " * 200], "to 80 tokens"),
        (["positions", "--ids", "9999"], "id 9999 is outside"),
        (["positions", "--text", "a\udcff"], "lone surrogate"),
        (["vocabulary", "--top", "-3"], "--top must be an integer >= 1"),
        (["dot", "--text", "cat", "--position", "99"], "--position must be"),
        (["dot", "--text", "cat", "--plot", "x.gif"], "name it .png, .svg or .pdf"),
        (["vocabulary", "--counts", "nowhere"], "no file matches 'nowhere'"),
    ],
)
def test_errors_are_one_sentence_and_name_options_as_typed(arguments, said, capfd):
    name, *rest = arguments
    assert main(["inspect", name, "model", *rest]) == 1
    out, err = capfd.readouterr()
    assert said in err and not out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["vocabulary", "model", "--text", "cat"], "inspect vocabulary` has no option --text"),
        (["vocabulary", "model", "--replace-at", "3"], "vocabulary` has no option --replace-at"),
        (["dot", "model", "--html", "x.html"], "`tiedgpt inspect dot` has no option --html"),
        (["neighbours", "model"], "the following arguments are required: --token"),
        (["everything", "model"], "the name is first: positions, lens"),
    ],
)
def test_an_option_of_another_inspection_is_a_usage_error(arguments, said, capfd):
    assert main(["inspect", *arguments]) == 2
    assert said in capfd.readouterr().err


def test_a_figure_without_matplotlib_is_refused_before_the_model_is_read(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["inspect", "dot", "nowhere", "--text", "a", "--plot", "x.png"]) == 1
    assert "pip install 'tiedgpt[plot]'" in capfd.readouterr().err


def test_a_piped_text_has_no_byte_order_mark_and_ends_its_lines_at_newlines(capsys, monkeypatch):
    tokens = []
    for text in ("the cat\nsat", "\ufeffthe cat\r\nsat"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert main(["inspect", "positions", "model", "--text", "-", "--format", "json"]) == 0
        tokens.append(capsys.readouterr().out)
    assert tokens[0] == tokens[1]


def test_a_stored_opening_is_no_default_without_a_tokenizer(model, tmp_path, capfd):
    model.save_pretrained(tmp_path / "plain")
    (tmp_path / "plain/opening.json").write_text('{"text": "the cat sat"}')
    assert main(["inspect", "learn", str(tmp_path / "plain"), "--ids", "1", "2", "3"]) == 0
    assert inspect.learn(str(tmp_path / "plain"), None, [1, 2, 3]).ids.tolist() == [1, 2, 3]
