import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from tiedgpt.data import documents, encode_corpus, plan_split
from tiedgpt.text import Tokenizer
from tiedgpt.train import Trainer
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.plan import Plan
from tiedgpt.train.storage import RunDirectory, make_record

TEXT = "".join(f"line {n}: the {n % 7} cats sat on {n % 5} mats.\n" for n in range(400))


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
def config(options, text_file):
    tokenizer = Tokenizer.characters([TEXT])
    values = vars(
        options.model_config(vocab_size=len(tokenizer), bos=None, eos=tokenizer.eos_token_id)
    )
    return type(options.model_config(vocab_size=5, bos=None, eos=None))(
        **{**values, "n_embd": 16, "n_head": 2}
    )


@pytest.fixture(scope="session")
def plan() -> Plan:
    return Plan(
        steps=6, batch_size=4, micro_batch=4, optimizer="muon", lr=1e-2, warmup=1,
        weight_decay=0.1, grad_clip=1.0, dtype="fp32", seed=3, eval_every=4,
        eval_batches=2, save_every=2,
    )  # fmt: skip


@pytest.fixture
def new_run(tmp_path, text_file):
    """Make a run directory with its data, under a name."""

    def make(name: str = "run") -> tuple[RunDirectory, Tokenizer]:
        run = RunDirectory(tmp_path / name)
        tokenizer = Tokenizer.characters([TEXT])
        encode_corpus(plan_split(documents([str(text_file)])), tokenizer, run.data)
        return run, tokenizer

    return make


@pytest.fixture(scope="session")
def ready_once(tmp_path_factory, text_file, options, config, plan) -> Path:
    """What `ready` copies."""
    run = RunDirectory(tmp_path_factory.mktemp("runs") / "ready")
    tokenizer = Tokenizer.characters([text_file.read_text()])
    tokenizer.save_pretrained(run.tokenizer)
    encode_corpus(plan_split(documents([str(text_file)])), tokenizer, run.data)
    config = dataclasses.replace(config, embd_pdrop=0.1, attn_pdrop=0.1, resid_pdrop=0.1)
    run.write_record(make_record(options, config, plan, {}))
    return run.path


@pytest.fixture
def ready(tmp_path, ready_once) -> Path:
    """A run that is planned and not begun, with dropout, six steps and three checkpoints."""
    return shutil.copytree(ready_once, tmp_path / "ready")


@pytest.fixture(scope="session")
def whole(ready_once) -> Path:
    """The same, trained without a stop, its operations listed beside it; only to be read."""
    from tests.train.trials import Command, Fault

    run = shutil.copytree(ready_once, ready_once.with_name("whole"))
    assert Command(run, fault=Fault(None)).wait() == 0
    return run


def train(*arguments, **options):
    """Return the events of a training, as they happen."""
    return Trainer(*arguments, **options).run()


CPU = torch.device("cpu")
