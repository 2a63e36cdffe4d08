"""Each file of train/fast can be deleted with its line in `SUBSTITUTES`."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tiedgpt

FILES = {
    "attention": "BlockedAttention",
    "linear": "LeanLinear",
    "loss": "OnePassLoss",
}
TRAIN = """
import numpy as np
import pathlib
import tiedgpt
from tiedgpt import GPT, GPTConfig
assert pathlib.Path(tiedgpt.__file__).parent.parent.samefile(".")
from tiedgpt.train.optim import optimizers, parameter_groups
from tiedgpt.train.plan import Plan
from tiedgpt.train.step import train_step
plan = Plan(steps=2, batch_size=2, micro_batch=2, optimizer="muon", lr=1e-3, warmup=0,
            weight_decay=0.1, grad_clip=1.0, dtype="fp32", seed=0, eval_every=1, eval_batches=1,
            save_every=1)
model = GPT(GPTConfig(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=1))
ids = np.arange(16).reshape(2, 8) % 9
rules = optimizers(parameter_groups(model, matrices="muon", weight_decay=0.1), lr=1e-3)
assert 1.5 < train_step(model, rules, (ids, ids), plan).loss < 3
"""


@pytest.mark.slow
@pytest.mark.parametrize("removed", FILES)
def test_training_works_without_a_file_of_fast(tmp_path, removed):
    copy = shutil.copytree(Path(tiedgpt.__file__).parent, tmp_path / "tiedgpt")
    (copy / "train" / "fast" / f"{removed}.py").unlink()
    table = copy / "train" / "fast" / "__init__.py"
    table.write_text(re.sub(rf"^.*\b{FILES[removed]}\b.*\n", "", table.read_text(), flags=re.M))
    subprocess.run([sys.executable, "-c", TRAIN], cwd=tmp_path, check=True, timeout=200)
