"""Our own ONNX files, read back: initializers under our names, the config in the metadata.

What others export has no names that tell what a matrix is for, and is not read as a model.
"""

from __future__ import annotations

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.formats.onnx_file import CONSTANT, METADATA_KEY
from tiedgpt.weights.found import FileTensor, Found
from tiedgpt.weights.names import EMBEDDING, HEAD, is_transposed
from tiedgpt.weights.stored import Inventory, printable


def recognises(inventory: Inventory) -> bool:
    """Whether it is ONNX, by whomever."""
    return inventory.format == "ONNX"


def found(inventory: Inventory) -> Found:
    """Return the GPT in a file of ours; another's, or a later version's, is a `UserError`."""
    fields = inventory.config.get(METADATA_KEY)
    if not isinstance(fields, dict):
        raise UserError(
            f"{inventory.source} is ONNX that tiedgpt did not write: `tie` looks into it, and it "
            "is not loaded as a model; load the checkpoint that it was exported from"
        )
    known = GPTConfig.__dataclass_fields__
    if unknown := sorted(printable(name) for name in fields.keys() - known.keys()):
        raise UserError(
            f"{inventory.source} says {unknown[0][:80]}, which this version of tiedgpt does not "
            "know: it was written by a later one"
        )
    if not isinstance(tied := fields.get("tie_word_embeddings"), bool):
        raise CorruptInputError(f"{inventory.source} does not say whether its head is tied")
    _check_graph(inventory, EMBEDDING if tied else HEAD)
    tensors = {
        name: FileTensor(tensor, transposed=is_transposed(name))
        for name, tensor in inventory.tensors.items()
        if not name.startswith(CONSTANT)
    }
    return Found(layout="tiedgpt ONNX", fields=fields, tensors=tensors)


def _check_graph(inventory: Inventory, head: str) -> None:
    """The graph reads and predicts with what the metadata says."""
    if EMBEDDING not in inventory.reads or inventory.predicts != (head,):
        predicts = ", ".join(printable(name) for name in inventory.predicts) or "nothing"
        raise CorruptInputError(
            f"{inventory.source}: its metadata say that {EMBEDDING} reads and {head} predicts, its "
            f"graph predicts with {predicts[:200]}: it was changed after tiedgpt wrote it"
        )
