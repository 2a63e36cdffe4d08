"""The study: what makes it a fair comparison, its numbers, its report, and going on."""

import json
import os
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from tiedgpt import GPT, GPTConfig
from tiedgpt.cli.main import main
from tiedgpt.data import Document
from tiedgpt.errors import UserError
from tiedgpt.evaluate.intervals import t_interval
from tiedgpt.study import comparison, tied_vs_untied, training
from tiedgpt.study.models import NAMES, TiedLSTM, build, equal_size
from tiedgpt.study.training import deciles
from tiedgpt.tie import audit, ledger

CONFIG = GPTConfig(vocab_size=500, n_positions=32, n_embd=48, n_layer=2, n_head=3)
LOSSES = {"tied": (3.0, 3.2, 3.1), "untied": (3.1, 3.2, 3.3)}


def numbers(directory):
    """What each training found, without its time."""
    found = {}
    for path in sorted(directory.glob("*/result.json")):
        found[path.parent.name] = json.loads(path.read_text()) | {"seconds": 0}
    return found


def study_of(losses):
    runs = {name: [{"loss": value} for value in values] for name, values in losses.items()}
    runs["untied-equal"] = runs["untied"]
    setting = training.Setting(config=CONFIG, steps=10)
    return comparison.Study(setting, (0, 1, 2), 1000, 100, [], [], runs)


def test_an_untied_gpt_begins_as_the_tied_one():
    tied, untied = build("tied", CONFIG, 3).eval(), build("untied", CONFIG, 3).eval()
    ids = torch.randint(500, (2, 9))
    assert torch.equal(tied(ids), untied(ids))
    assert audit(tied).verdict == "tied" and audit(untied).verdict == "untied as claimed"
    assert not torch.equal(tied(ids), build("tied", CONFIG, 4).eval()(ids))


def test_the_other_models_have_the_size_of_the_tied_gpt():
    sizes = {n: sum(p.numel() for p in build(n, CONFIG, 0).parameters()) for n in NAMES}
    assert sizes["untied"] == sizes["tied"] + 500 * 48
    assert sizes["untied-equal"] == pytest.approx(sizes["tied"], rel=0.005)
    assert sizes["lstm"] == pytest.approx(sizes["tied"], rel=0.03)
    assert equal_size(CONFIG).n_embd < 48


def test_the_lstm_is_tied_and_its_loss_is_its_logits_cross_entropy():
    model = build("lstm", CONFIG, 0)
    assert isinstance(model, TiedLSTM) and audit(model).verdict == "tied"
    assert ledger(model).total == sum(p.numel() for p in model.parameters())
    ids, targets = torch.randint(500, (2, 2, 9))
    expected = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model.loss(ids, targets), expected)
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 500
    moved = (model(ids) - model(changed)).abs().amax((0, 2))
    assert (moved[:5] == 0).all() and (moved[5:] > 0).all()


def test_deciles_hold_as_many_tokens_that_occur_each():
    counts = np.array([0, 5, 40, 7, 1, 9, 30, 2, 8, 6, 3, 0])
    group = deciles(counts)
    assert np.bincount(group[counts > 0]).tolist() == [1] * 10
    assert group[2] == 0 and group[6] == 1 and group[4] == 9 and group[0] == group[11] == 9


def test_intervals_are_students():
    low, high = t_interval([0.1, 0.0, 0.2])  # mean 0.1, deviation 0.1, t of 2 degrees 4.303
    assert low == pytest.approx(0.1 - 4.303 * 0.1 / 3**0.5)
    assert high == pytest.approx(0.1 + 4.303 * 0.1 / 3**0.5)
    assert t_interval([1.0, 3.0]) == pytest.approx((2 - 12.706, 2 + 12.706))
    low, high = t_interval([float(n % 2) for n in range(40)])  # t of 39 degrees: 2.0227
    assert high - 0.5 == pytest.approx(2.0227 * 0.50637 / 40**0.5, rel=1e-3)
    assert np.isnan(t_interval([1.0])).all()


def test_differences_are_paired_by_seed_and_the_conclusion_says_what_they_show():
    study = study_of(LOSSES)
    mean, (low, high) = study.difference("untied")
    assert mean == pytest.approx(0.1) and high - low == pytest.approx(2 * 0.24843, rel=1e-3)
    assert "no difference from the untied GPT is shown (+0.100 nats" in study.conclusion()
    worse = study_of({"tied": (3.0, 3.2, 3.1), "untied": (3.1, 3.31, 3.2)})
    assert "the untied GPT is worse (+0.103 nats" in worse.conclusion()
    better = study_of({"tied": (3.1, 3.31, 3.2), "untied": (3.0, 3.2, 3.1)})
    assert "the untied GPT is better (-0.103 nats" in better.conclusion()


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.ids, self.addresses = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href"):
                self.addresses.append(value)


def test_a_study_reports_and_one_that_was_killed_goes_on(tmp_path, corpus, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    study = tied_vs_untied(corpus, whole, seeds=(0, 1), steps=6)
    found = numbers(whole)
    assert len(found) == 8 and not list(whole.glob("*/checkpoint.pt"))
    assert GPT.from_pretrained(whole / "untied-seed-1" / "model").head is not None
    for name in NAMES:
        one = found[f"{name}-seed-0"]
        share = np.array(study.target_shares)
        assert one["loss"] == pytest.approx(float(share @ one["by_decile"]), rel=1e-6)
        assert [point["step"] for point in one["curve"]][-1] == 6
    starts = [found[f"{name}-seed-0"]["curve"][0]["loss"] for name in ("tied", "untied")]
    assert starts[0] == starts[1]

    text = (whole / "report.md").read_text()
    assert study.conclusion() in text and "nan" not in text
    for figure in re.findall(r"\((figures/\w+\.svg)\)", text):
        assert (whole / figure).read_text().startswith("<?xml")
    page = Page()
    page.feed((whole / "report.html").read_text())
    assert page.tags.count("svg") == 4 and page.tags.count("table") == 3
    assert len(page.ids) == len(set(page.ids)), "figures share no id"
    assert all(address.startswith("#") for address in page.addresses)

    def killed(*_):
        raise KeyboardInterrupt

    steps, kill_at, step = [], 16, training.train_step

    def counted(*given):
        steps.append(1)
        if len(steps) == kill_at:
            killed()
        step(*given)

    monkeypatch.setattr(training, "train_step", counted)
    with pytest.raises(KeyboardInterrupt):
        tied_vs_untied(corpus, parts, seeds=(0, 1), steps=6)
    assert list(parts.glob("*/checkpoint.pt"))
    steps.clear()
    kill_at = -1
    tied_vs_untied(corpus, parts, seeds=(0, 1), steps=6)
    assert len(steps) == 3 + 5 * 6, "finished trainings are kept, and the third's first half"
    assert numbers(parts) == found
    steps.clear()
    tied_vs_untied(corpus, parts, seeds=(0, 1), steps=6)
    assert not steps and (parts / "report.md").read_text() == text
    with pytest.raises(UserError, match=r"another steps asked \(6, not 7\)"):
        tied_vs_untied(corpus, parts, seeds=(0, 1), steps=7)
    with pytest.raises(UserError, match="another sha256 of text"):
        tied_vs_untied([Document("other", "text")], parts, seeds=(0, 1), steps=6)


def test_the_pace_decides_the_steps_where_none_are_given(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(comparison, "_seconds_a_step", lambda *_: 0.5)
    monkeypatch.setattr(training, "PARTS", 1)
    said = []
    study = tied_vs_untied(corpus, tmp_path / "out", seeds=(0, 1), minutes=2.5, say=said.append)
    assert study.setting.steps == int(0.8 * 150 / (2 * 4 * 0.5)) == 30
    assert said == ["encoding the text", "measuring this machine"]


@pytest.mark.parametrize("seeds", [("1",), ("2", "2")])
def test_one_seed_is_refused(tmp_path, text, capfd, seeds):
    command = ["study", "tied-vs-untied", str(text), "--out", str(tmp_path / "out")]
    assert main([*command, "--seeds", *seeds]) == 1
    assert "an interval needs two or more" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [("", "every document is empty"), ("a b c d e f\n" * 9, "the text is too small for a study")],
)
def test_too_little_text_is_refused(tmp_path, capfd, content, why):
    (tmp_path / "few.txt").write_text(content)
    command = ["study", "tied-vs-untied", str(tmp_path / "few.txt"), "--steps", "2"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 1
    assert why in capfd.readouterr().err


def test_an_out_that_cannot_be_written_or_holds_something_else_is_refused(tmp_path, text, capfd):
    command = ["study", "tied-vs-untied", str(text), "--steps", "2", "--out"]
    assert main([*command, str(text)]) == 1
    assert "cannot write" in capfd.readouterr().err
    assert main([*command, str(tmp_path)]) == 1
    assert "is not empty and holds no study" in capfd.readouterr().err
    assert os.listdir(tmp_path) == ["text.txt"]


def test_the_command_prints_its_numbers_as_json(tmp_path, text, capfd):
    command = ["study", "tied-vs-untied", str(text), "--steps", "2", "--seeds", "0", "1"]
    assert main([*command, "--out", str(tmp_path / "out"), "--format", "json"]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert set(found["models"]) == set(NAMES) and "lstm-seed-1: 2 steps" in err
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    assert found["conclusion"] in capfd.readouterr().out
