"""The one small run that the tests of training share: `Trial`, and `trial` that makes it."""

import dataclasses
import functools
import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tiedgpt import GPT
from tiedgpt.core.config import GPTConfig
from tiedgpt.data import documents, encode_corpus, plan_split
from tiedgpt.evaluate.perplexity import running_totals
from tiedgpt.text import Tokenizer
from tiedgpt.train import Trainer
from tiedgpt.train.distributed import Processes
from tiedgpt.train.dry_run import make_plan
from tiedgpt.train.events import Event, Skipped, Stepped
from tiedgpt.train.plan.options import TrainOptions
from tiedgpt.train.plan.time import Clock
from tiedgpt.train.plan.values import Plan
from tiedgpt.train.step.loss import OWN_LOSS, Loss
from tiedgpt.train.step.step import train_step
from tiedgpt.train.store.checkpoint import list_checkpoints
from tiedgpt.train.store.directory import RunDirectory, make_record, read_plan
from tiedgpt.train.store.run import Run
from tiedgpt.train.tasks.language import LanguageModelling
from tiedgpt.train.tasks.preparation import Prepared
from tiedgpt.train.tasks.rows import Data, Rows
from tiedgpt.train.tasks.task import Task
from tiedgpt.train.tasks.texts import TextRows

TEXT = "".join(f"line {n}: the {n % 7} cats sat on {n % 5} mats.\n" for n in range(400))
CPU = torch.device("cpu")
CHARACTERS = Tokenizer.characters([TEXT])
CONFIG = GPTConfig(
    vocab_size=len(CHARACTERS), n_positions=16, n_embd=16, n_layer=2, n_head=2,
    embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, eos_token_id=CHARACTERS.eos_token_id,
)  # fmt: skip
DROPOUT = {"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1}
PLAN = Plan(
    steps=6, batch_size=4, micro_batch=4, optimizer="muon", lr=1e-2, warmup=1, weight_decay=0.1,
    grad_clip=1.0, dtype="fp32", seed=3, eval_every=4, eval_batches=2, save_every=2,
)  # fmt: skip


class GivenScores(LanguageModelling):
    """A language model whose evaluations of a part have these losses."""

    losses: Iterator[float]

    def score(self, data, sums):
        score, n_tokens = super().score(data, sums), sums[1]
        is_part = n_tokens == 2 * PLAN.micro_batch * CONFIG.n_positions
        return dataclasses.replace(score, nats=next(self.losses)) if is_part else score


class Cut(Rows):
    """Rows that are cut already."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def at(self, context: int) -> Data:
        return self.data


@dataclasses.dataclass
class Trial:
    """A run: its directory, task, data, config and plan, and its results."""

    run: RunDirectory
    task: Task
    data: Data
    config: GPTConfig
    plan: Plan
    clock: Callable[[], float] = time.perf_counter

    def build(self) -> Any:
        """Return the model with fresh weights."""
        return self.task.build(self.config, self.data)

    def score(self, model: Any, batch_size: int, n_batches: int | None = None) -> Any:
        """Return the score of a model on held-out batches, or all."""
        measure = functools.partial(self.task.measure, model, self.data)
        batches = self.data.held_out(batch_size, n_batches)
        *_, sums = running_totals(model, batches, measure, autocast=None)
        return self.task.score(self.data, sums)

    def prepared(self, options: TrainOptions) -> Prepared:
        """Return the task by other options, with these data."""
        return Prepared(type(self.task)(options), self.config, Cut(self.data))

    def change(self, **plan: Any) -> "Trial":
        """Return the same with other numbers in its plan."""
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, **plan))

    def train(
        self,
        stop_after: int | None = None,
        losses: Iterable[float] | None = None,
        track: Callable[[Mapping[str, Any]], object] = lambda line: None,
        **options: Any,
    ) -> list[Event]:
        """Train, up to a step, with these validation losses; return the events.

        `track` receives the lines of metrics.jsonl.
        """
        events, done, task = [], [0], self.task
        if losses is not None:
            task = GivenScores()
            task.losses = iter(losses)
        clock = Clock(self.clock, options.pop("deadline", None))
        trainer = Trainer(
            task, self.data, Run(self.run, self.config, self.plan),
            options.pop("processes", Processes(CPU)),
            **{"stop_requested": lambda: done[0] == stop_after, "clock": clock} | options,
        )  # fmt: skip
        for event in trainer.run():
            events.append(event)
            if line := getattr(event, "line", {}):
                track(line)
            if isinstance(event, Stepped | Skipped):
                done[0] = event.step
        return events

    def with_clock(self, step_seconds: float) -> "Trial":
        """Return the same with a clock by which each step takes so many seconds."""
        now, batches = [1000.0], self.data.batches

        def timed(batch_size, seed):
            batch_of = batches(batch_size, seed)

            def tick(step):
                now[0] += step_seconds
                return batch_of(step)

            return tick

        data = dataclasses.replace(self.data, batches=timed)
        return dataclasses.replace(self, data=data, clock=lambda: now[0])

    def metrics(self) -> list[dict]:
        """Return the lines of metrics.jsonl."""
        return metrics(self.run.path)

    def model(self) -> GPT:
        """Return the model that was published."""
        return GPT.from_pretrained(self.run.model)

    def newest(self, file: str = "model.safetensors") -> Path:
        """Return a file of the newest checkpoint."""
        return list_checkpoints(self.run.checkpoints)[-1] / file

    def make_plan(self, options: TrainOptions, **changes: Any) -> Plan:
        """Return the plan of options for this run."""
        return make_plan(self.prepared(dataclasses.replace(options, **changes)), Processes(CPU))

    def write_record(self, options: TrainOptions, **plan: Any) -> None:
        """Write run.toml."""
        made = dataclasses.replace(self.plan, **plan)
        self.run.write_record(make_record(options, self.config, made, {}))


def assert_same(one: Trial, other: Trial, files: Iterable[str] = ()) -> None:
    """Two runs that were stopped or not must leave the same lines and the same bytes."""
    assert one.metrics() == other.metrics()
    for file in ("model.safetensors", "optimizer.safetensors", "state.json", *files):
        assert one.newest(file).read_bytes() == other.newest(file).read_bytes(), file
    published = [each.run.model / "model.safetensors" for each in (one, other)]
    assert all(path.exists() for path in published) == any(path.exists() for path in published)
    if published[0].exists():
        assert published[0].read_bytes() == published[1].read_bytes()


def assert_resumes(
    make: Callable[[str], Trial], stop_after: int, files: Iterable[str] = (), *, reopens=False
) -> tuple[Trial, list[Event]]:
    """Assert that a run which stops and resumes equals an uninterrupted one; return the latter.

    With `reopens`, `make` opens the stopped run again before it resumes.
    """
    whole, parts = make("whole"), make("parts")
    events = whole.train()
    assert events[-1].finished
    first = parts.train(stop_after)
    assert not first[-1].finished and first[-1].step == stop_after
    torch.manual_seed(999)  # whatever happened to the random stream in between
    again = make("parts") if reopens else parts
    assert again.train()[0].step == stop_after
    assert_same(whole, parts)
    for file in files:
        assert (whole.run.model / file).read_bytes() == (parts.run.model / file).read_bytes()
    return whole, events


def gradients(model, batch, micro_batch, objective: Loss = OWN_LOSS, **plan: Any) -> list[Any]:
    """Return the loss and the gradients of a batch in micro-batches."""
    parts = dataclasses.replace(PLAN, micro_batch=micro_batch, **plan)
    result = train_step(model, [], batch, parts, objective=objective)
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return [result.loss, result.grad_norm, *(parameter.grad for parameter in trained)]


def true_gradients(model, loss: torch.Tensor) -> list[Any]:
    """Return the same, computed by autograd alone from the loss of the whole batch."""
    found = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    return [float(loss.detach()), float(torch.nn.utils.get_total_norm(found)), *found]


OF_THE_MACHINE = re.compile("^machine_|_per_second$")


def metrics(run: Path) -> list[dict]:
    """Return the lines of metrics.jsonl without what tells of the machine and the moment."""
    lines = RunDirectory(run).read_metrics()
    return [{key: line[key] for key in line if not OF_THE_MACHINE.search(key)} for line in lines]


def open_trial(path: Path, config: GPTConfig = CONFIG, plan: Plan = PLAN) -> Trial:
    """Return a language model on the shards that lie in a run's directory."""
    run = RunDirectory(path)
    data = TextRows(run.data, CHARACTERS, is_fresh=True).at(config.n_positions)
    return Trial(run, LanguageModelling(), data, config, plan)


def reopen_trial(path: Path) -> Trial:
    """Return the run whose run.toml lies in a directory."""
    return open_trial(path, *read_plan(RunDirectory(path).read_record()))


def write_lines(path: Path, lines: Iterable[Any]) -> str:
    """Write lines of .jsonl; return the path."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty folder, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "cats.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session")
def options(text_file) -> TrainOptions:
    return TrainOptions(
        data=(str(text_file),), size="tiny", steps=6, tokenizer="char", context=16, batch_size=4
    )


@pytest.fixture(scope="session")
def encoded(tmp_path_factory, text_file) -> Path:
    """The text in shards."""
    data = tmp_path_factory.mktemp("encoded") / "data"
    encode_corpus(plan_split(documents([str(text_file)])), CHARACTERS, data)
    return data


@pytest.fixture
def trial(tmp_path, encoded):
    """Make a run on the text under a name, with changes to its config and its plan."""

    def make(name: str = "run", config: dict | None = None, **plan: Any) -> Trial:
        shutil.copytree(encoded, tmp_path / name / "data")
        changed = dataclasses.replace(CONFIG, **config or {})
        return open_trial(tmp_path / name, changed, dataclasses.replace(PLAN, **plan))

    return make


@pytest.fixture(scope="session")
def ready_once(tmp_path_factory, encoded, options) -> Path:
    """The run directory that `ready` copies."""
    path = tmp_path_factory.mktemp("runs") / "ready"
    shutil.copytree(encoded, path / "data")
    CHARACTERS.save_pretrained(path / "tokenizer")
    open_trial(path, dataclasses.replace(CONFIG, **DROPOUT)).write_record(options)
    return path


@pytest.fixture
def ready(tmp_path, ready_once) -> Path:
    """A run that is planned and not begun, with dropout, six steps and three checkpoints."""
    return shutil.copytree(ready_once, tmp_path / "ready")


@pytest.fixture(scope="session")
def whole(ready_once) -> Path:
    """The same run, uninterrupted, with its list of operations; read-only."""
    from tests.train.trials import Command, Fault

    warm = shutil.copytree(ready_once, ready_once.with_name("warm"))
    assert Command(warm).wait() == 0  # compiles kernels, whose files would be in the list
    run = shutil.copytree(ready_once, ready_once.with_name("whole"))
    assert Command(run, fault=Fault(None)).wait() == 0
    return run
