"""Tasks of user files: DPO with adapters on a frozen GPT, and incomplete tasks."""

import dataclasses
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrize

from tests.train.conftest import PLAN, Trial, assert_resumes, gradients, true_gradients
from tiedgpt import GPT, GPTConfig
from tiedgpt.cli.main import main
from tiedgpt.train.events import Evaluated, Started
from tiedgpt.train.store.directory import RunDirectory
from tiedgpt.train.tasks.publisher import Publisher
from tiedgpt.train.tasks.rows import Data
from tiedgpt.train.tasks.task import Score, Task, load_task

CONFIG = GPTConfig(vocab_size=13, n_positions=12, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.1)
BETA = 0.5


class Adapter(nn.Module):
    """W + B A with trainable A and B."""

    def __init__(self, weight, rank=2):
        super().__init__()
        self.A = nn.Parameter(torch.randn(rank, weight.shape[1]) * 0.3)
        self.B = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, weight):
        return weight + self.B @ self.A


@dataclass(frozen=True)
class Margin(Score):
    right: float


def logprob(model, ids):
    """Return the logprob of each row's tokens after the first, (B,)."""
    logits = model(ids[:, :-1]).log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)


class Preferences(Task):
    """Prefer rows that count up to rows that do not (Rafailov et al. 2023, eq. 7)."""

    saves_frozen = False

    def build(self, config, data):
        model = base().requires_grad_(False)
        for block in model.h:
            for linear in (block.attn.c_attn, block.mlp.c_fc):
                parametrize.register_parametrization(linear, "weight", Adapter(linear.weight))
        return model

    def loss(self, model, batch):
        chosen, rejected, reference = batch
        assert reference.dtype == torch.float32
        margin = logprob(model, chosen) - logprob(model, rejected) - reference
        return -F.logsigmoid(BETA * margin).mean()

    def measure(self, model, data, batch):
        right = logprob(model, batch[0]) > logprob(model, batch[1])
        return float(self.loss(model, batch)) * len(right), float(right.sum()), len(right)

    def score(self, data, sums):
        loss, right, n = sums
        return Margin(loss / n, right / n)

    def publisher(self, config, data):
        return AdapterPublisher(config, data.tokenizer, "Preferences")


class AdapterPublisher(Publisher):
    """Write the adapters alone."""

    def publish(self, model, directory):
        directory.mkdir(exist_ok=True)
        state = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
        torch.save(state, directory / "adapter.pt")


def base():
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return GPT(CONFIG)


REFERENCE = base().eval()


@torch.no_grad()
def pairs(seed, number, n):
    drawn = np.random.default_rng((seed, number))
    starts = drawn.integers(0, 13, (n, 1))
    chosen = (starts + np.arange(8)) % 13
    rejected = drawn.integers(0, 13, (n, 8))
    known = [logprob(REFERENCE, torch.from_numpy(ids)) for ids in (chosen, rejected)]
    return chosen, rejected, (known[0] - known[1]).numpy()


PAIRS = Data(
    batches=lambda batch_size, seed: lambda step: pairs(seed, step, batch_size),
    held_out=lambda batch_size, n_batches: [pairs(10**6, 0, 64)],
    unit="pairs",
)


@pytest.fixture
def adapting(tmp_path):
    """Make runs of this objective under a name."""

    def make(name):
        (tmp_path / name).mkdir()
        plan = dataclasses.replace(PLAN, steps=30, lr=3e-2, eval_every=10, save_every=10)
        return Trial(RunDirectory(tmp_path / name), Preferences(), PAIRS, CONFIG, plan)

    return make


def test_an_objective_in_another_file_trains_saves_and_resumes(adapting):
    whole, events = assert_resumes(adapting, 13)
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    assert evaluated[0].score.nats < np.log(2) and events[-1].score.right > 0.9
    started = next(event for event in events if isinstance(event, Started))
    before = base().state_dict()
    for name, parameter in started.model.named_parameters():
        if "original" in name:  # of a parametrized matrix
            name = name.replace("parametrizations.weight.original", "weight")
        if name in before:
            assert torch.equal(parameter, before[name]), f"{name} is frozen"
    saved = load_file(whole.newest())
    assert len(saved) == 8 and all("parametrizations" in name for name in saved)
    assert len(torch.load(whole.run.model / "adapter.pt")) == 8
    line = whole.metrics()[-1]
    assert line["final"] and line["val_right"] == events[-1].score.right


def test_micro_batches_step_like_the_whole_batch(adapting):
    run = adapting("run")
    model, batch = run.build().eval(), PAIRS.batches(4, 3)(0)
    expected = true_gradients(model, run.task.loss(model, [*map(torch.from_numpy, batch)]))
    for size in (4, 3, 1):
        summed = gradients(model, batch, size, run.task, grad_clip=1e9)
        torch.testing.assert_close(summed, expected, atol=1e-6, rtol=1e-4)


SCRIPT = """
import hashlib
from pathlib import Path

from tiedgpt import GPT
from tiedgpt.heads import pad
from tiedgpt.train.tasks.rows import Data, Rows, Sources
from tiedgpt.train.tasks.task import Score, Task


class Lines(Sources, Rows):
    def __init__(self, paths):
        self.lines = [line for path in paths for line in Path(path).read_text().splitlines()]

    def digest(self):
        return hashlib.sha256(repr(self.lines).encode()).hexdigest()

    def texts(self):
        return self.lines, self.lines

    def rows(self, tokenizer, directory):
        self.tokenizer_of_rows = tokenizer
        return self

    def at(self, context):
        ids = pad([self.tokenizer_of_rows.encode(line) for line in self.lines])[0].numpy()
        rows = ids[:, :-1], ids[:, 1:]
        return Data(
            batches=lambda n, seed: lambda step: tuple(array[:n] for array in rows),
            held_out=lambda n, n_batches: [rows],
            tokenizer=self.tokenizer_of_rows,
        )


class NotATask:
    def build(self): ...


class Partial(Task):
    def score(self, data, sums): ...


class Unreadable(Task):
    def build(self, config, data):
        return GPT(config)

    def measure(self, model, data, batch):
        return [float(model.loss(*batch)), 1]

    def score(self, data, sums):
        return Score(sums[0] / sums[1])


class Own(Unreadable):
    def read(self):
        return Lines(self.options.data)


class NeverFinite(Own):
    def loss(self, model, batch):
        return super().loss(model, batch) * float("nan")


class EndsInfinite(Own):
    calls = 1  # a resumed run has done a step

    def begin(self, model, data):
        self.calls = 0

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self.calls += 1
        if self.calls == 2:
            model.ln_f.weight.data.fill_(float("inf"))
        return loss
"""


@pytest.fixture
def train_own(tmp_path, monkeypatch, capfd):
    """Train a class of SCRIPT from the command line; return the exit code and stderr."""
    (tmp_path / "own_lines.py").write_text(SCRIPT)
    (tmp_path / "lines.txt").write_text("one two three\nfour five six\n" * 8)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def train(home, *options, duration=("--steps", "2")):
        command = ["train", "lines.txt", "--objective", home, "--size", "nano", *duration]
        return main([*command, *options]), capfd.readouterr().err

    return train


@pytest.fixture
def assert_refused(train_own, tmp_path):
    """Assert that an objective is refused with a message, before its run begins."""

    def refuse(home, says):
        code, err = train_own(home, "-o", "run")
        assert code == 1 and re.search(says, " ".join(err.split())) and "Traceback" not in err
        assert not (tmp_path / "run").exists()

    return refuse


@pytest.mark.parametrize(
    "home, says",
    [
        ("own_lins:Own", "own_lins"),
        ("own_lines:Owm", "Owm"),
        ("own_lines:NotATask", "subclass of Task"),
        ("own_lines:Partial", "build"),
        ("own_lines:Unreadable", r"read\(self\)"),
        ("raising:Own", "division by zero, in line 2 of .*raising.py"),
        ("unparsed:Own", "unparsed.py, line 1"),
    ],
)
def test_an_incomplete_objective_gets_an_error_that_names_what_is_missing(
    assert_refused, tmp_path, home, says
):
    (tmp_path / "raising.py").write_text("\n1 / 0\n")
    (tmp_path / "unparsed.py").write_text("class Own(\n")
    assert_refused(home, says)


def with_data(**changes):
    """Return a function that changes the data of the rows that `read` returns."""

    def change(sources):
        cut = sources.at
        sources.at = lambda context: dataclasses.replace(cut(context), **changes)
        return sources

    return change


@pytest.mark.parametrize(
    "method, change, says",
    [
        ("read", with_data(batches=lambda *_: lambda step: (torch.ones(1, 2),)), "not a Tensor"),
        ("read", with_data(held_out=lambda n, n_batches: []), "held-out batch"),
        ("build", lambda model: None, "None"),
        ("build", lambda model: nn.Linear(2, 2), "Linear"),
        ("loss", lambda loss: loss.expand(2), r"scalar .*\(2,\)"),
        ("loss", lambda loss: loss.detach(), "gradient"),
        ("n_targets", lambda counts: 5, "tuple of 1 integers.* int"),
        ("n_targets", lambda counts: (5, 5), "tuple of 1 integers.* tuple"),
        ("score", lambda score: None, "nats .* None"),
        ("score", lambda score: 3.0, "nats .* float"),
        ("score", lambda score: dataclasses.replace(score, nats=torch.ones(())), "nats .* Tensor"),
    ],
)
def test_a_method_with_another_result_is_named(assert_refused, monkeypatch, method, change, says):
    own = load_task("own_lines:Own")
    original = getattr(own, method)
    monkeypatch.setattr(own, method, lambda *inputs: change(original(*inputs)))
    assert_refused("own_lines:Own", rf"Own\.{method} must return .*{says}")


@pytest.mark.parametrize(
    "name, says", [("NeverFinite", "no step"), ("EndsInfinite", "ln_f.weight")]
)
def test_a_run_without_finite_losses_or_weights_publishes_no_model(train_own, tmp_path, name, says):
    for _ in range(2):  # resumed, too
        code, err = train_own(f"own_lines:{name}", "-o", "run")
        assert code == 5 and says in err and "Traceback" not in err
        assert not (tmp_path / "run/model").exists()
        assert [*(tmp_path / "run/checkpoints").glob("step-*")]


def test_a_loss_that_is_not_finite_is_diagnosed_in_a_run_by_minutes(train_own, tmp_path):
    code, err = train_own("own_lines:NeverFinite", "-o", "run", duration=("--minutes", "0.02"))
    assert code == 5 and "first not finite" in err and (tmp_path / "run/run.toml").exists()


def test_an_objective_with_only_what_is_required_trains_and_has_a_dry_run(train_own, tmp_path):
    code, err = train_own("own_lines:Own", "--dry-run")
    assert code == 0, err
    code, err = train_own("own_lines:Own", "-o", "run")
    assert code == 0 and "trained as Own" in err
    assert "trained as Own" in (tmp_path / "run/model/README.md").read_text()


def test_freezing_without_effect_is_an_error(train_own):
    code, err = train_own("own_lines:Own", "--freeze", "h.*")
    assert code == 1 and "--freeze" in err and "build" in err


def test_an_objective_and_a_task_exclude_each_other(train_own):
    code, err = train_own("own_lines:Own", "--task", "classify")
    assert code == 1 and "--objective" in err
