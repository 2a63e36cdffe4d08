"""Which of many tensors read a token and which predict one: by graph, by name, and by shape.

Of a checkpoint only names and shapes are known; an ONNX graph and a module in memory also tell what
looks rows up and what multiplies. Where that leaves a doubt, the candidates are listed and asked
about, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tiedgpt.errors import UserError
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.tensors import FLOATS, StoredTensor, printable

READS = frozenset(
    "wte tokens_embed embed_tokens tok_embeddings word_embeddings word_embedding token_embd "
    "token_embedding token_embeddings token_embedding_table tok_emb tok_embed tok_embedding "
    "embed_in shared".split()
)
"""Names that only an input embedding bears."""
MAY_READ = frozenset("embed embedding embeddings emb encoder tokens".split())
PREDICTS = frozenset(
    "lm_head embed_out unembed output_layer out_head output_projection logits_head lm_out".split()
)
"""Names that only an output head bears."""
MAY_PREDICT = frozenset("head output decoder out predictions logits wcls".split())
PACKED = frozenset(
    "weight qweight weight_packed weight_v weight_g original0 original1 weight_quantized".split()
)
"""Names of a weight, or of what it is computed from."""
WRAPPING = frozenset(
    "weight embedding kernel w W_E W_U modules_to_save original_module default base_layer "
    "parametrizations original original0 linear proj module _orig_mod weight_quantized "
    "_fsdp_wrapped_module _checkpoint_wrapped_module".split()
)
"""What may follow such a name: the tensor's own name, and what wrappers put between."""
POSITIONS = re.compile(
    r"(^|[._])(wpe|w?pos|positions?(_emb\w*)?|pos_emb\w*|positions_embed|embed_positions|"
    r"token_types?|token_type_embeddings)([._]|$)"
)

MAX_WIDTH = 1 << 22
"""No embedding is wider; rows of any width could fill the memory."""
ONE_LAYOUT = ("safetensors", "torch")
"""Formats whose loaders take an embedding and a head only as (V, D)."""


@dataclass(frozen=True)
class Roles:
    """The matrix that reads and the one that predicts; None where there is none of its own."""

    input: StoredTensor | None
    output: StoredTensor | None
    others: tuple[StoredTensor, ...] = ()
    """Further names of the same storage as the input."""
    hidden: tuple[StoredTensor, ...] = ()
    """Where no matrix predicts, tensors whose names say that they do: packed, flat, in parts."""


def find_roles(
    checkpoint: Checkpoint, *, input_name: str | None = None, output_name: str | None = None
) -> Roles:
    """Return the matrices that read and predict; `UserError` lists candidates where in doubt."""
    matrices = [
        t for t in checkpoint.tensors.values()
        if len(t.shape) == 2 and t.count and t.shape[1] <= MAX_WIDTH
    ]  # fmt: skip
    reads = _given(checkpoint, input_name, "input") or _input(checkpoint, matrices)
    predicts = _given(checkpoint, output_name, "output") or _output(checkpoint, matrices, reads)
    if reads is None and predicts is None:
        raise UserError(
            f"{checkpoint.source} has no matrix whose name suggests an embedding or a head; "
            f"its largest: {_listed(_largest(matrices))}; name them with --input and --output "
            "(input_name=, output_name=)"
        )
    if reads is not None and predicts is reads and checkpoint.format != "ONNX":
        predicts = None if output_name is None else predicts
    if reads is not None and checkpoint.format in ONE_LAYOUT and lies_turned(checkpoint, reads):
        predicts = None if predicts is reads else predicts
        reads = reads.turned()
    same = [t for t in matrices if reads and t.name != reads.name and t.is_view_of(reads)]
    hidden: list[StoredTensor] = []
    if reads is not None and output_name is None:
        if predicts is not None and _is_packed(predicts, reads):
            hidden = [predicts]
            predicts = None
        elif predicts is None:
            hidden = [t for t in checkpoint.tensors.values() if _may_hide_a_head(t, reads)]
    return Roles(reads, predicts, tuple(same), tuple(hidden))


def lies_turned(checkpoint: Checkpoint, matrix: StoredTensor) -> bool | None:
    """Whether an embedding lies as (D, V), by the config's V and D; None where they do not tell."""
    rows, columns = matrix.shape
    vocabulary, width = checkpoint.vocabulary, checkpoint.width
    if rows == columns:
        return None
    straight = rows == vocabulary or columns == width
    across = columns == vocabulary or rows == width
    return None if straight == across else across


def role_word(name: str, sure: frozenset[str], maybe: frozenset[str]) -> int:
    """Return 2 where a name surely bears one of the words, 1 where it may, 0 where it does not."""
    parts = re.split(r"[./]", name)
    best = 0
    for at in range(len(parts) - 1, -1, -1):
        part = parts[at]
        if part in sure:
            return 2
        if part in maybe and not any(before.isdigit() for before in parts[:at]):
            best = 1  # within a numbered block, `output` and the like are no head
        elif part not in WRAPPING and not part.isdigit():
            break
    return best


def is_position(name: str) -> bool:
    """Whether a name is that of a table of positions or token types."""
    return POSITIONS.search(name) is not None


def _given(checkpoint: Checkpoint, name: str | None, role: str) -> StoredTensor | None:
    """Return the matrix that was asked for by name, with or without `.weight`."""
    if name is None:
        return None
    for full in (name, f"{name}.weight"):
        tensor = checkpoint.tensors.get(full)
        if tensor is not None:
            if len(tensor.shape) != 2 or not tensor.count or tensor.shape[1] > MAX_WIDTH:
                raise UserError(f"--{role} {full} has shape {tensor.shape}: it is no such matrix")
            return tensor
    matrices = [t for t in checkpoint.tensors.values() if len(t.shape) == 2]
    raise UserError(
        f"--{role} {name!r} is not among the {len(checkpoint.tensors)} tensors; its largest "
        f"matrices: {_listed(_largest(matrices))}"
    )


def _input(checkpoint: Checkpoint, matrices: list[StoredTensor]) -> StoredTensor | None:
    ranks = {t.name: role_word(t.name, READS, MAY_READ) for t in matrices}
    looked_up = [t for t in matrices if t.name in checkpoint.reads and not is_position(t.name)]
    for candidates in (
        [t for t in matrices if ranks[t.name] == 2],
        _fitting(looked_up, [t for t in matrices if t.name in checkpoint.predicts]),
        [t for t in matrices if ranks[t.name] == 1],
    ):
        if candidates:
            return _only(checkpoint, "input", _used(candidates))
    return None


def _fitting(reads: list[StoredTensor], predicts: list[StoredTensor]) -> list[StoredTensor]:
    """Keep the tables that fit a product's shape, where any does."""
    shapes = {t.shape for t in predicts} | {t.shape[::-1] for t in predicts}
    return [t for t in reads if t.shape in shapes] or reads


def _output(
    checkpoint: Checkpoint, matrices: list[StoredTensor], reads: StoredTensor | None
) -> StoredTensor | None:
    multiplied = [t for t in matrices if t.name in checkpoint.predicts]
    if checkpoint.format == "ONNX" and reads is not None:  # the graph knows better than names
        last = [t for t in multiplied if t is reads or _covers(t, reads)]
        if last:
            return last[-1]
    ranks = {t.name: role_word(t.name, PREDICTS, MAY_PREDICT) for t in matrices}
    named = [t for t in matrices if ranks[t.name] == 2]
    if not named:
        named = [t for t in matrices if ranks[t.name] == 1 and (reads is None or _like(t, reads))]
    if not named and reads is not None:
        named = [t for t in multiplied if t is not reads and _exact(t, reads)]
        named = [t for t in named if checkpoint.format == "module"]
    if reads is not None and len(named) > 1:
        named = (
            [t for t in named if _exact(t, reads)] or [t for t in named if _like(t, reads)] or named
        )
    if named:
        return _only(checkpoint, "output", _used(named))
    if reads is not None and not checkpoint.derived:
        _refuse_a_nameless_twin(checkpoint, matrices, reads)
        _refuse_another_product(checkpoint, reads)
    return None


def _refuse_another_product(checkpoint: Checkpoint, reads: StoredTensor) -> None:
    """Ask where a graph ends in a product with something else, and W multiplies nowhere."""
    if checkpoint.format != "ONNX" or not checkpoint.predicts:
        return
    if reads.name not in (checkpoint.products or ()):
        last = checkpoint.tensors[checkpoint.predicts[-1]]
        raise UserError(
            f"{checkpoint.source}: {reads.name} multiplies nowhere in the graph, whose last product "  # noqa: E501
            f"is with {_listed([last])} (quantized, one of several pieces, or no head): give the "
            "name of what predicts as --output (output_name=)"
        )


def _is_packed(tensor: StoredTensor, reads: StoredTensor) -> bool:
    """Whether a matrix cannot be the embedding's like, since its numbers are packed."""
    return tensor.dtype not in FLOATS and not _like(tensor, reads)


def _may_hide_a_head(tensor: StoredTensor, reads: StoredTensor) -> bool:
    """Whether a tensor's name says that it predicts, though it is no plain matrix of W's width."""
    parts = re.split(r"[./]", tensor.name)
    at = max((i for i, part in enumerate(parts) if part in PREDICTS), default=-1)
    if at < 0 and len(parts) > 1 and not any(part.isdigit() for part in parts):
        at = next((i for i in (len(parts) - 2, len(parts) - 1) if parts[i] in MAY_PREDICT), -1)
        if at >= 0 and not (at == len(parts) - 1 or parts[-1] in PACKED):
            return False
    if at < 0 or "bias" in parts[-1] or tensor.count < reads.shape[0] or tensor.name == reads.name:
        return False
    if tensor.storage.overlaps(reads.storage):
        return False
    if len(tensor.shape) == 1:
        return tensor.count not in reads.shape
    plain = len(tensor.shape) == 2 and tensor.dtype in FLOATS
    return not plain or reads.shape[0] in tensor.shape


def _refuse_a_nameless_twin(
    checkpoint: Checkpoint, matrices: list[StoredTensor], reads: StoredTensor
) -> None:
    """Ask about a matrix of the embedding's shape whose name tells nothing; it may predict."""
    twins = [
        t
        for t in matrices
        if _exact(t, reads)
        and not t.is_view_of(reads)
        and not is_position(t.name)
        and not _may_hide_a_head(t, reads)
        and not any(part.isdigit() for part in re.split(r"[./]", t.name))
        and role_word(t.name, READS, MAY_READ) < 2
    ]
    if twins:
        raise UserError(
            f"{checkpoint.source}: {_listed(twins)} has the shape of {reads.name} and a name that "
            "does not tell whether it predicts: give the name of what predicts as --output "
            f"(output_name=), {reads.name} if nothing else does"
        )


def _exact(tensor: StoredTensor, reads: StoredTensor) -> bool:
    return reads.shape in (tensor.shape, tensor.shape[::-1])


def _covers(tensor: StoredTensor, reads: StoredTensor) -> bool:
    """Whether a matrix is over the same width, of at least as many rows."""
    rows, width = reads.shape
    a, b = tensor.shape
    return (a == width and b >= rows) or (b == width and a >= rows)


def _like(tensor: StoredTensor, reads: StoredTensor) -> bool:
    """Whether a tensor is a matrix over the same width, of at least half as many rows."""
    rows, width = reads.shape
    count = {tensor.shape[1]: tensor.shape[0], tensor.shape[0]: tensor.shape[1]}.get(width, 0)
    return 2 * count >= rows


def _used(candidates: list[StoredTensor]) -> list[StoredTensor]:
    """Of a wrapped module, what the wrapper uses counts and not what it keeps aside."""
    used = [t for t in candidates if "original_module" not in t.name] or candidates
    whole = [t for t in used if not any(part.isdigit() for part in re.split(r"[./]", t.name))]
    used = whole or used  # a layer that predicts further tokens may hold tables of its own
    return [t for t in used if "shared" in t.name.split(".")] or used


def _only(checkpoint: Checkpoint, role: str, candidates: list[StoredTensor]) -> StoredTensor:
    apart: list[StoredTensor] = []
    for tensor in candidates:
        if not any(tensor.is_view_of(other) for other in apart):
            apart.append(tensor)
        if len(apart) > 9:
            break
    if len(apart) > 1:
        raise UserError(
            f"{checkpoint.source}: several matrices could be the {role}: {_listed(apart)}; "
            f"name one with --{role} ({role}_name=)"
        )
    return candidates[0]


def _largest(matrices: Iterable[StoredTensor]) -> list[StoredTensor]:
    return sorted(matrices, key=lambda tensor: -tensor.count)[:6]


def _listed(tensors: Iterable[StoredTensor]) -> str:
    listed = [f"{printable(tensor.name[:80])} {tensor.shape}" for tensor in tensors]
    return ", ".join(listed[:8]) + (", ..." if len(listed) > 8 else "") if listed else "none"
