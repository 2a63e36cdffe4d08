import random

import pytest

from tiedgpt.study import comparison, training


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Studies of models that train in a blink."""
    shape = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    monkeypatch.setattr(comparison, "SHAPE", comparison.SHAPE | shape)
    monkeypatch.setattr(training, "PARTS", 3)


@pytest.fixture
def text(tmp_path):
    drawn, path = random.Random(0), tmp_path / "text.txt"
    words = [f"w{n:x}" for n in range(300)]
    path.write_text("\n".join(" ".join(drawn.choices(words, k=12)) for _ in range(800)))
    return path
