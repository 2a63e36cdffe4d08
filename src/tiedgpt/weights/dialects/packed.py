"""Directories that are packed for our CPU kernels: the tensors bear our names, in our layout."""

from __future__ import annotations

from tiedgpt.weights.checkpoint import Checkpoint, GPTCheckpoint, LazyTensor
from tiedgpt.weights.config_json import config_fields

FORMAT = "packed"


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT whose weights the panels stand for."""
    fields, foreign = config_fields(checkpoint.config)
    tensors = {name: LazyTensor(tensor) for name, tensor in checkpoint.tensors.items()}
    coarse = {t.dtype for t in checkpoint.tensors.values()} - {"float32", "fp32 panels"}
    what = " and ".join(sorted(coarse))
    note = f"{what}, packed for CPU kernels, become float32 where torch loads them"
    notes = (note,) if coarse else ()
    return GPTCheckpoint("tiedgpt packed", fields, tensors, foreign=foreign, notes=notes)
