"""Our own ONNX files, read back: initializers under our names, the config in the metadata.

What others export has no names that tell what a matrix is for, and is not read as a model.
"""

from __future__ import annotations

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import EMBEDDING, HEAD, Checkpoint, GPTCheckpoint, LazyTensor
from tiedgpt.weights.formats.onnx_file import CONSTANT, METADATA_KEY
from tiedgpt.weights.huggingface import is_transposed
from tiedgpt.weights.tensors import printable


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT in a file of ours; another's, or a later version's, is a `UserError`."""
    fields = checkpoint.config.get(METADATA_KEY)
    if not isinstance(fields, dict):
        raise UserError(
            f"{checkpoint.source} is ONNX that tiedgpt did not write: `tie` looks into it, and it "
            "is not loaded as a model; load the checkpoint that it was exported from"
        )
    known = GPTConfig.__dataclass_fields__
    if unknown := sorted(printable(name) for name in fields.keys() - known.keys()):
        raise UserError(
            f"{checkpoint.source} says {unknown[0][:80]}, which this version of tiedgpt does not "
            "know: it was written by a later one"
        )
    if not isinstance(tied := fields.get("tie_word_embeddings"), bool):
        raise CorruptInputError(f"{checkpoint.source} does not say whether its head is tied")
    _check_graph(checkpoint, EMBEDDING if tied else HEAD)
    tensors = {
        name: LazyTensor(tensor, transposed=is_transposed(name))
        for name, tensor in checkpoint.tensors.items()
        if not name.startswith(CONSTANT)
    }
    return GPTCheckpoint(layout="tiedgpt ONNX", fields=fields, tensors=tensors)


def _check_graph(checkpoint: Checkpoint, head: str) -> None:
    """The graph reads and predicts with what the metadata says."""
    if EMBEDDING not in checkpoint.reads or checkpoint.predicts != (head,):
        predicts = ", ".join(printable(name) for name in checkpoint.predicts) or "nothing"
        raise CorruptInputError(
            f"{checkpoint.source}: its metadata say that {EMBEDDING} reads and {head} predicts, its "  # noqa: E501
            f"graph predicts with {predicts[:200]}: it was changed after tiedgpt wrote it"
        )
