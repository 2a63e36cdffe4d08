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
from tiedgpt.data import Document, documents
from tiedgpt.errors import UserError
from tiedgpt.evaluate.intervals import t_interval
from tiedgpt.study import comparison, tied_vs_untied, training
from tiedgpt.study.models import NAMES, TiedLSTM, build, equal_size
from tiedgpt.study.training import deciles
from tiedgpt.tie import audit, ledger

CONFIG = GPTConfig(vocab_size=500, n_positions=32, n_embd=48, n_layer=2, n_head=3)
LOSSES = {"tied": (3.0, 3.2, 3.1), "untied": (3.1, 3.2, 3.3)}


def study_of(losses):
    runs = {name: [{"loss": value} for value in values] for name, values in losses.items()}
    runs["untied-equal"] = runs["untied"]
    setting = training.Setting(CONFIG, steps=10, tokenizer=None, train=range(1000), val=None)
    return comparison.Study(setting, (0, 1, 2), runs)


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
    mean, low, high = comparison.over_seeds(study.differences("untied", "loss"))
    assert mean == pytest.approx(0.1) and high - low == pytest.approx(2 * 0.24843, rel=1e-3)
    assert "no difference from the untied GPT is shown (+0.100 nats" in study.conclusion()
    worse = study_of({"tied": (3.0, 3.2, 3.1), "untied": (3.1, 3.31, 3.2)})
    assert "the untied GPT is worse (+0.103 nats" in worse.conclusion()
    better = study_of({"tied": (3.1, 3.31, 3.2), "untied": (3.0, 3.2, 3.1)})
    assert "the untied GPT is better (-0.103 nats" in better.conclusion()


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.addresses = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href")]


def test_a_study_reports_and_one_that_was_killed_goes_on(tmp_path, text, capfd, monkeypatch):
    out, corpus = tmp_path / "out", documents([str(text)])
    steps, kill_at, step = [], 16, training.train_step

    def counted(*given):
        steps.append(1)
        if len(steps) == kill_at:
            raise KeyboardInterrupt
        step(*given)

    monkeypatch.setattr(training, "train_step", counted)
    with pytest.raises(KeyboardInterrupt):
        tied_vs_untied(corpus, out, seeds=(0, 1), steps=6)
    assert len(steps) == 16 and not (out / "report.md").exists()
    steps.clear()
    kill_at = -1
    command = ["study", "tied-vs-untied", str(text), "--steps", "6", "--seeds", "0", "1"]
    assert main([*command, "--out", str(out), "--format", "json"]) == 0
    assert len(steps) == 6 * 6, "finished trainings are kept, the third begins anew"
    printed, err = capfd.readouterr()
    found = json.loads(printed)
    assert set(found["models"]) == set(NAMES) and "lstm-seed-1: 6 steps" in err
    runs = {name: model["runs"] for name, model in found["models"].items()}
    setting = comparison._prepare(corpus, tmp_path / "data", 6)
    for name in ("untied", "untied-equal"):  # finished in the first start; and cut in it
        again = training.train(name, setting, 0)[1]
        assert json.loads(json.dumps(again)) == runs[name][0]

    assert GPT.from_pretrained(out / "untied-seed-1" / "model").head is not None
    share = setting.targets / setting.targets.sum()
    for one, _ in runs.values():
        assert one["loss"] == pytest.approx(float(share @ one["by_decile"]), rel=1e-6)
        assert one["curve"]["step"][-1] == 6
    assert runs["tied"][0]["curve"]["loss"][0] == runs["untied"][0]["curve"]["loss"][0]

    report = (out / "report.md").read_text()
    assert found["conclusion"] in report and "nan" not in report
    figures = re.findall(r"\((figures/\w+\.svg)\)", report)
    assert all((out / figure).read_text().startswith("<?xml") for figure in figures)
    page = Page()
    page.feed((out / "report.html").read_text())
    assert page.tags.count("img") == len(figures) == 4 and page.tags.count("table") == 10
    assert all(address.startswith("data:image/svg+xml;base64,") for address in page.addresses)

    steps.clear()
    monkeypatch.setattr("tiedgpt.study.report.save_figure", lambda *given: None)
    assert main([*command, "--out", str(out)]) == 0
    assert not steps and (out / "report.md").read_text() == report
    shown = capfd.readouterr().out
    assert found["conclusion"] in shown
    assert max(map(len, shown.partition("\n\n")[0].splitlines())) <= 80
    with pytest.raises(UserError, match=r"another steps \(6, not 7\)"):
        tied_vs_untied(corpus, out, seeds=(0, 1), steps=7)
    with pytest.raises(UserError, match="another sha256 of text"):
        tied_vs_untied([Document("other", "text")], out, seeds=(0, 1), steps=6)


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
    assert not (tmp_path / "out").exists()


def test_an_out_that_cannot_be_written_or_holds_something_else_is_refused(tmp_path, text, capfd):
    command = ["study", "tied-vs-untied", str(text), "--steps", "2", "--out"]
    assert main([*command, str(text)]) == 1
    assert "cannot write" in capfd.readouterr().err
    assert main([*command, str(tmp_path)]) == 1
    assert "is not empty and holds no study" in capfd.readouterr().err
    assert os.listdir(tmp_path) == ["text.txt"]
