import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.weights.fake_hub import hub as hub
from tiedgpt import GPT


@pytest.fixture
def saved(tiny: GPT, tmp_path: Path) -> Path:
    """A directory that we wrote."""
    tiny.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def rewrite(saved: Path):
    """Change a saved model: config keys, and tensors by a function of their dict."""

    def change(*, config: dict | None = None, tensors=None) -> Path:
        path = saved / "config.json"
        values = json.loads(path.read_text()) | (config or {})
        path.write_text(json.dumps({k: v for k, v in values.items() if v != "REMOVE"}))
        if tensors is not None:
            state = load_file(saved / "model.safetensors")
            state = tensors(state) or state
            save_file({k: v.contiguous() for k, v in state.items()}, saved / "model.safetensors")
        return saved

    return change


def with_head(scale: float = 1.0, rows: int = 97):
    """Add lm_head.weight: the embedding with its first `rows` rows scaled."""

    def add(state: dict[str, torch.Tensor]) -> None:
        head = state["transformer.wte.weight"].clone()
        head[:rows] *= scale
        state["lm_head.weight"] = head

    return add
