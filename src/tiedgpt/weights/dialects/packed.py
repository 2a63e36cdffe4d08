"""Directories that are packed for our CPU kernels: the tensors bear our names, in our layout."""

from __future__ import annotations

from tiedgpt.weights.config_json import config_fields
from tiedgpt.weights.found import FileTensor, Found
from tiedgpt.weights.stored import Inventory

FORMAT = "packed"


def recognises(inventory: Inventory) -> bool:
    """Whether this is a packed directory."""
    return inventory.format == FORMAT


def found(inventory: Inventory) -> Found:
    """Return the GPT whose weights the panels stand for."""
    fields, foreign = config_fields(inventory.config)
    tensors = {name: FileTensor(tensor) for name, tensor in inventory.tensors.items()}
    coarse = {t.dtype for t in inventory.tensors.values()} - {"float32", "fp32 panels"}
    what = " and ".join(sorted(coarse))
    note = f"{what}, packed for CPU kernels, become float32 where torch loads them"
    notes = (note,) if coarse else ()
    return Found("tiedgpt packed", fields, tensors, foreign=foreign, notes=notes)
