"""Directories as OpenAI's GPT-1 release lays them out, made of numpy arrays."""

import json
from pathlib import Path

import numpy as np

ORDER = (
    "attn/c_attn/w", "attn/c_attn/b", "attn/c_proj/w", "attn/c_proj/b", "ln_1/g", "ln_1/b",
    "mlp/c_fc/w", "mlp/c_fc/b", "mlp/c_proj/w", "mlp/c_proj/b", "ln_2/g", "ln_2/b",
)  # fmt: skip
"""parameters_names.json of huggingface/pytorch-openai-transformer-lm, within a block."""


def names(n_layer: int) -> list[str]:
    """All names of that file for so many layers, the classifier's last."""
    blocks = [f"model/h{layer}/{name}:0" for layer in range(n_layer) for name in ORDER]
    return ["model/we:0", *blocks, "model/clf/w:0", "model/clf/b:0"]


def block_shapes(width: int) -> list[tuple[int, ...]]:
    """The shapes of a block's tensors, in that order."""
    return [
        (1, width, 3 * width), (3 * width,), (1, width, width), (width,), (width,), (width,),
        (1, width, 4 * width), (4 * width,), (1, 4 * width, width), (width,), (width,), (width,),
    ]  # fmt: skip


def write_release(
    directory: Path, arrays: list[np.ndarray], *, n_pieces: int = 10, dtype: str = "<f4"
) -> Path:
    """Write params_shapes.json and the numbers in pieces, as equal as they can be."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "params_shapes.json").write_text(json.dumps([a.shape for a in arrays]))
    flat = np.concatenate([a.ravel() for a in arrays]).astype(dtype)
    for number, piece in enumerate(np.array_split(flat, n_pieces)):
        np.save(directory / f"params_{number}.npy", piece)
    return directory
