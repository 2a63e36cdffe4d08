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
from tiedgpt.weights.stored import Inventory, StoredTensor, by_storage

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


@dataclass(frozen=True)
class Roles:
    """The matrix that reads and the one that predicts; None where there is none of its own."""

    input: StoredTensor | None
    output: StoredTensor | None
    others: tuple[StoredTensor, ...] = ()
    """Further names of the same storage as the input."""


def find_roles(
    inventory: Inventory, *, input_name: str | None = None, output_name: str | None = None
) -> Roles:
    """Return the matrices that read and predict; `UserError` lists candidates where in doubt."""
    matrices = [t for t in inventory.tensors.values() if len(t.shape) == 2 and t.count]
    reads = _given(inventory, input_name, "input") or _input(inventory, matrices)
    predicts = _given(inventory, output_name, "output") or _output(inventory, matrices, reads)
    if reads is None and predicts is None:
        raise UserError(
            f"{inventory.source} has no matrix whose name suggests an embedding or a head; "
            f"its largest: {_listed(_largest(matrices))}; name them with --input and --output "
            "(input_name=, output_name=)"
        )
    if reads is not None and predicts is reads and inventory.format != "ONNX":
        predicts = None if output_name is None else predicts
    same = [t for t in matrices if reads and t is not reads and t.storage.overlaps(reads.storage)]
    return Roles(reads, predicts, tuple(same))


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


def _given(inventory: Inventory, name: str | None, role: str) -> StoredTensor | None:
    """Return the matrix that was asked for by name, with or without `.weight`."""
    if name is None:
        return None
    for full in (name, f"{name}.weight"):
        tensor = inventory.tensors.get(full)
        if tensor is not None:
            if len(tensor.shape) != 2:
                raise UserError(f"--{role} {full} has shape {tensor.shape}: it is no matrix")
            return tensor
    matrices = [t for t in inventory.tensors.values() if len(t.shape) == 2]
    raise UserError(
        f"--{role} {name!r} is not among the {len(inventory.tensors)} tensors; its largest "
        f"matrices: {_listed(_largest(matrices))}"
    )


def _input(inventory: Inventory, matrices: list[StoredTensor]) -> StoredTensor | None:
    ranks = {t.name: role_word(t.name, READS, MAY_READ) for t in matrices}
    looked_up = [t for t in matrices if t.name in inventory.reads and not is_position(t.name)]
    for candidates in (
        [t for t in matrices if ranks[t.name] == 2],
        _fitting(looked_up, [t for t in matrices if t.name in inventory.predicts]),
        [t for t in matrices if ranks[t.name] == 1],
    ):
        if candidates:
            return _only(inventory, "input", _used(candidates))
    return None


def _fitting(reads: list[StoredTensor], predicts: list[StoredTensor]) -> list[StoredTensor]:
    """Keep the tables that fit a product's shape, where any does."""
    shapes = {t.shape for t in predicts} | {t.shape[::-1] for t in predicts}
    return [t for t in reads if t.shape in shapes] or reads


def _output(
    inventory: Inventory, matrices: list[StoredTensor], reads: StoredTensor | None
) -> StoredTensor | None:
    multiplied = [t for t in matrices if t.name in inventory.predicts]
    if inventory.format == "ONNX" and reads is not None:  # the graph knows better than names
        last = [t for t in multiplied if t is reads or _exact(t, reads)]
        if last:
            return last[-1]
    ranks = {t.name: role_word(t.name, PREDICTS, MAY_PREDICT) for t in matrices}
    named = [t for t in matrices if ranks[t.name] == 2]
    if not named:
        named = [t for t in matrices if ranks[t.name] == 1 and (reads is None or _like(t, reads))]
    if not named and reads is not None:
        named = [t for t in multiplied if t is not reads and _exact(t, reads)]
        named = [t for t in named if inventory.format == "module"]
    if reads is not None and len(named) > 1:
        named = (
            [t for t in named if _exact(t, reads)] or [t for t in named if _like(t, reads)] or named
        )
    if named:
        return _only(inventory, "output", _used(named))
    if reads is not None:
        _refuse_a_nameless_twin(inventory, matrices, reads)
    return None


def _refuse_a_nameless_twin(
    inventory: Inventory, matrices: list[StoredTensor], reads: StoredTensor
) -> None:
    """Ask about a matrix of the embedding's shape whose name tells nothing; it may predict."""
    twins = [
        t
        for t in matrices
        if _exact(t, reads)
        and not t.storage.overlaps(reads.storage)
        and not is_position(t.name)
        and not any(part.isdigit() for part in re.split(r"[./]", t.name))
        and role_word(t.name, READS, MAY_READ) < 2
    ]
    if twins:
        raise UserError(
            f"{inventory.source}: {_listed(twins)} has the shape of {reads.name} and a name that "
            "does not tell whether it predicts: give the name of what predicts as --output "
            f"(output_name=), {reads.name} if nothing else does"
        )


def _exact(tensor: StoredTensor, reads: StoredTensor) -> bool:
    return reads.shape in (tensor.shape, tensor.shape[::-1])


def _like(tensor: StoredTensor, reads: StoredTensor) -> bool:
    """Whether a tensor is a matrix over the same width, of at least half as many rows."""
    rows, width = reads.shape
    count = {tensor.shape[1]: tensor.shape[0], tensor.shape[0]: tensor.shape[1]}.get(width, 0)
    return 2 * count >= rows


def _used(candidates: list[StoredTensor]) -> list[StoredTensor]:
    """Of a wrapped module, what the wrapper uses counts and not what it keeps aside."""
    used = [t for t in candidates if "original_module" not in t.name]
    return used or candidates


def _only(inventory: Inventory, role: str, candidates: list[StoredTensor]) -> StoredTensor:
    groups = by_storage(candidates)
    if len(groups) > 1:
        raise UserError(
            f"{inventory.source}: several matrices could be the {role}: "
            f"{_listed(group[0] for group in groups)}; name one with --{role} ({role}_name=)"
        )
    return candidates[0]


def _largest(matrices: Iterable[StoredTensor]) -> list[StoredTensor]:
    return sorted(matrices, key=lambda tensor: -tensor.count)[:6]


def _listed(tensors: Iterable[StoredTensor]) -> str:
    listed = [f"{tensor.name[:80]} {tensor.shape}" for tensor in tensors]
    return ", ".join(listed[:8]) + (", ..." if len(listed) > 8 else "") if listed else "none"
