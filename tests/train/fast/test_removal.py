"""Each file of train/step/fast can be deleted with its line in `SUBSTITUTES`."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tiedgpt

FILES = {
    "attention": "BlockedAttention",
    "dropout": "HashedDropout",
    "gelu": "VectorMLP",
    "linear": "LeanLinear",
    "loss": "OnePassLoss",
}
TRAIN = """
import pathlib
import tiedgpt
from tiedgpt.train import TrainOptions, train
assert pathlib.Path(tiedgpt.__file__).parent.parent.samefile(".")
pathlib.Path("my.txt").write_text("The cat sat on the mat. " * 200)
options = TrainOptions(data=("my.txt",), size="nano", steps=2, context=16, tokenizer="char")
*_, ended = train(options, "run")
assert ended.finished and 1 < ended.score.nats < 4
"""


@pytest.mark.slow
@pytest.mark.parametrize("removed", FILES)
def test_training_works_without_a_file_of_fast(tmp_path, removed):
    copy = shutil.copytree(Path(tiedgpt.__file__).parent, tmp_path / "tiedgpt")
    (copy / "train" / "step" / "fast" / f"{removed}.py").unlink()
    table = copy / "train" / "step" / "fast" / "__init__.py"
    table.write_text(re.sub(rf"^.*\b{FILES[removed]}\b.*\n", "", table.read_text(), flags=re.M))
    subprocess.run([sys.executable, "-c", TRAIN], cwd=tmp_path, check=True, timeout=200)


@pytest.mark.slow
def test_training_works_without_the_folder(tmp_path):
    copy = shutil.copytree(Path(tiedgpt.__file__).parent, tmp_path / "tiedgpt")
    shutil.rmtree(copy / "train" / "step" / "fast")
    run = copy / "train" / "step" / "blocks.py"
    text = re.sub(r"^from tiedgpt.train.step.fast import .*\n", "", run.read_text(), flags=re.M)
    run.write_text(text.replace("SUBSTITUTES | ", ""))
    subprocess.run([sys.executable, "-c", TRAIN], cwd=tmp_path, check=True, timeout=200)
