"""Which matrix reads a token and which one predicts it. Only this file decides it.

    find_roles(checkpoint) -> Roles

The checkpoint of a file gives names and shapes. An ONNX graph and a module in memory
(`modules.py`) also say which matrices are looked up (`checkpoint.reads`) and which ones multiply
(`checkpoint.predicts`). In doubt, `UserError` lists the candidates; nothing is guessed.
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
"""Names that only an input embedding has."""
MAY_READ = frozenset("embed embedding embeddings emb encoder tokens".split())
PREDICTS = frozenset(
    "lm_head embed_out unembed output_layer out_head output_projection logits_head lm_out".split()
)
"""Names that only an output head has."""
MAY_PREDICT = frozenset("head output decoder out predictions logits wcls".split())
PACKED = frozenset(
    "weight qweight weight_packed weight_v weight_g original0 original1 weight_quantized".split()
)
"""Names of a weight, and of the tensors that a packed or computed weight consists of."""
WRAPPING = frozenset(
    "weight embedding kernel w W_E W_U modules_to_save original_module default base_layer "
    "parametrizations original original0 linear proj module _orig_mod weight_quantized "
    "_fsdp_wrapped_module _checkpoint_wrapped_module".split()
)
"""What may follow such a name: the tensor's own name, and the names of wrappers."""
POSITIONS = re.compile(
    r"(^|[._])(wpe|w?pos|positions?(_emb\w*)?|pos_emb\w*|positions_embed|embed_positions|"
    r"token_types?|token_type_embeddings)([._]|$)"
)
MAX_WIDTH = 1 << 22
"""No embedding is wider; reading rows of any width could fill the memory."""
ONE_LAYOUT = ("safetensors", "torch")
"""Formats whose loaders take an embedding and a head only as (V, D)."""


@dataclass(frozen=True)
class Roles:
    """The matrix that reads, the matrix that predicts, and how their shapes fit."""

    input: StoredTensor | None
    """(V, D). None if there is only a head."""
    output: StoredTensor | None
    """None if there is no second matrix that can be read."""
    aliases: tuple[StoredTensor, ...] = ()
    """Other names of the input's storage."""
    unreadable: tuple[StoredTensor, ...] = ()
    """If no matrix predicts: tensors whose names say that they do (packed, flat, in parts)."""
    input_transposed: bool = False
    """Whether the file holds the input as (D, V)."""
    output_transposed: bool = False
    """Whether the output is (D, V)."""

    @property
    def matrix(self) -> StoredTensor:
        """The input, or the output where there is no input."""
        found = self.input if self.input is not None else self.output
        assert found is not None
        return found

    @property
    def pair(self) -> tuple[StoredTensor, StoredTensor] | None:
        """The input and the output, if both are there, shared or not."""
        return (self.input, self.output) if self.input and self.output else None

    @property
    def shared(self) -> bool:
        """Whether both are there and are the same numbers in the same place."""
        return self.pair is not None and (
            self.input is self.output or self.pair[0].is_view_of(self.pair[1])
        )

    @property
    def two_parameters(self) -> bool:
        """Whether an optimizer would find two Parameters."""
        if self.pair is None:
            return False
        reads, predicts = self.pair
        return reads.owner != predicts.owner and (reads.trainable or predicts.trainable)

    @property
    def head_shape(self) -> tuple[int, ...]:
        """The output's shape as (V', D)."""
        assert self.output is not None
        return self.output.shape[::-1] if self.output_transposed else self.output.shape

    @property
    def fits(self) -> bool:
        """Whether the input and the output have the same width D."""
        return self.input is not None and self.head_shape[1] == self.input.shape[1]

    @property
    def extra_rows(self) -> int:
        """Rows that the output has more (or, if negative, fewer) than the input."""
        return self.head_shape[0] - self.input.shape[0] if self.input and self.fits else 0


def find_roles(
    checkpoint: Checkpoint, *, input_name: str | None = None, output_name: str | None = None
) -> Roles:
    """Return which matrices read and predict.

    `input_name` and `output_name` name a tensor or the module that holds it. Raises `UserError`
    with the candidates where there are none or several.
    """
    matrices = [tensor for tensor in checkpoint.tensors.values() if _is_matrix(tensor)]
    reads = _given(checkpoint, input_name, "input") or _find_input(checkpoint, matrices)
    predicts = _given(checkpoint, output_name, "output")
    predicts = predicts or _find_output(checkpoint, matrices, reads)
    if reads is None:
        if predicts is None:
            raise UserError(
                f"{checkpoint.source} has no matrix whose name suggests an embedding or a head, so "
                f"there is nothing to tie; its largest: {_listed(_likeliest(matrices, 'input'))}; "
                "name them with --input and --output (input_name=, output_name=)"
            )
        return Roles(None, predicts)
    if predicts is reads and checkpoint.format != "ONNX" and output_name is None:
        predicts = None
    turned = checkpoint.format in ONE_LAYOUT and bool(lies_transposed(checkpoint, reads))
    if turned:
        predicts = None if predicts is reads else predicts
        reads = reads.turned()
    unreadable: list[StoredTensor] = []
    if output_name is None:
        if predicts is None:
            unreadable = [t for t in checkpoint.tensors.values() if _may_hide_a_head(t, reads)]
        elif predicts.dtype not in FLOATS and not _is_similar(predicts, reads):
            unreadable, predicts = [predicts], None
    return Roles(
        reads,
        predicts,
        aliases=tuple(t for t in matrices if t.name != reads.name and t.is_view_of(reads)),
        unreadable=tuple(unreadable),
        input_transposed=turned,
        output_transposed=predicts is not None
        and predicts.shape[1] != reads.shape[1] == predicts.shape[0],
    )


def lies_transposed(checkpoint: Checkpoint, matrix: StoredTensor) -> bool | None:
    """Whether an embedding is (D, V) by the config's V and D; None if they do not tell."""
    rows, columns = matrix.shape
    vocabulary, width = checkpoint.vocabulary, checkpoint.width
    if rows == columns:
        return None
    straight = rows == vocabulary or columns == width
    across = columns == vocabulary or rows == width
    return None if straight == across else across


def name_rank(name: str, sure: frozenset[str], maybe: frozenset[str]) -> int:
    """Return 2 if a name certainly contains one of the words, 1 if it may, else 0."""
    parts = re.split(r"[./]", name)
    best = 0
    for at in range(len(parts) - 1, -1, -1):
        part = parts[at]
        if part in sure:
            return 2
        if part in maybe and not any(before.isdigit() for before in parts[:at]):
            best = 1  # inside a numbered block, `output` and the like are no head
        elif part not in WRAPPING and not part.isdigit():
            break
    return best


def is_position(name: str) -> bool:
    """Whether a name is that of a table of positions or token types."""
    return POSITIONS.search(name) is not None


def _is_matrix(tensor: StoredTensor) -> bool:
    return len(tensor.shape) == 2 and tensor.count > 0 and tensor.shape[1] <= MAX_WIDTH


def _given(checkpoint: Checkpoint, name: str | None, role: str) -> StoredTensor | None:
    """Return the matrix that the caller named: a tensor, or the only one inside a module."""
    if name is None:
        return None
    option = f"--{role} ({role}_name=)"
    tensors = checkpoint.tensors
    for full in (name, f"{name}.weight"):
        if full in tensors:
            if not _is_matrix(tensors[full]):
                raise UserError(
                    f"{option} must be a matrix (V, D): {full} has shape {tensors[full].shape}"
                )
            return tensors[full]
    inside = [t for t in tensors.values() if t.name.startswith(f"{name}.") and _is_matrix(t)]
    if inside:
        return _only(checkpoint, role, inside)
    matrices = [t for t in tensors.values() if len(t.shape) == 2]
    raise UserError(
        f"{option} {name!r} is not among the {len(tensors)} tensors; the likeliest matrices are "
        f"{_listed(_likeliest(matrices, role))}"
    )


def _find_input(checkpoint: Checkpoint, matrices: list[StoredTensor]) -> StoredTensor | None:
    """By a certain name, else by what is looked up, else by a possible name."""
    ranks = {t.name: name_rank(t.name, READS, MAY_READ) for t in matrices}
    looked_up = [t for t in matrices if t.name in checkpoint.reads and not is_position(t.name)]
    products = [t for t in matrices if t.name in checkpoint.predicts]
    fitting = [t for t in looked_up if any(_same_shape(t, product) for product in products)]
    for candidates in (
        [t for t in matrices if ranks[t.name] == 2],
        fitting or looked_up,
        [t for t in matrices if ranks[t.name] == 1],
    ):
        if candidates:
            return _only(checkpoint, "input", _in_use(candidates))
    return None


def _find_output(
    checkpoint: Checkpoint, matrices: list[StoredTensor], reads: StoredTensor | None
) -> StoredTensor | None:
    """By the graph, else by a certain name, else by a possible name, else by the product."""
    products = [t for t in matrices if t.name in checkpoint.predicts]
    if checkpoint.format == "ONNX" and reads is not None:  # the graph knows better than names
        covering = [t for t in products if t is reads or _n_rows(t, reads) >= reads.shape[0]]
        if covering:
            return covering[-1]
    ranks = {t.name: name_rank(t.name, PREDICTS, MAY_PREDICT) for t in matrices}
    named = [t for t in matrices if ranks[t.name] == 2]
    if reads is None:
        named = named or [t for t in matrices if ranks[t.name] == 1]
        return _only(checkpoint, "output", _in_use(named)) if named else None
    named = named or [t for t in matrices if ranks[t.name] == 1 and _is_similar(t, reads)]
    if not named and checkpoint.format == "module":
        named = [t for t in products if t is not reads and _same_shape(t, reads)]
    if len(named) > 1:
        named = (
            [t for t in named if _same_shape(t, reads)]
            or [t for t in named if _is_similar(t, reads)]
            or named
        )
    if named:
        return _only(checkpoint, "output", _in_use(named))
    if not checkpoint.derived:
        _refuse_a_nameless_twin(checkpoint, matrices, reads)
        _refuse_another_product(checkpoint, reads)
    return None


def _refuse_another_product(checkpoint: Checkpoint, reads: StoredTensor) -> None:
    """Ask if a graph's last product is with another tensor and W multiplies nowhere."""
    if checkpoint.format != "ONNX" or not checkpoint.predicts:
        return
    if reads.name not in (checkpoint.products or ()):
        last = checkpoint.tensors[checkpoint.predicts[-1]]
        raise UserError(
            f"{checkpoint.source}: {reads.name} multiplies nowhere in the graph. Its last product "
            f"is with {_listed([last])} (quantized, one of several pieces, or no head): name the "
            "matrix that predicts with --output (output_name=)"
        )


def _refuse_a_nameless_twin(
    checkpoint: Checkpoint, matrices: list[StoredTensor], reads: StoredTensor
) -> None:
    """Ask about a matrix of the embedding's shape if its name does not tell what it does."""
    twins = [
        t
        for t in matrices
        if _same_shape(t, reads)
        and not t.is_view_of(reads)
        and not is_position(t.name)
        and not _may_hide_a_head(t, reads)
        and not _is_numbered(t)
        and name_rank(t.name, READS, MAY_READ) < 2
    ]
    if twins:
        raise UserError(
            f"{checkpoint.source}: {_listed(twins)} has the shape of {reads.name} and a name that "
            "does not tell whether it predicts: name the matrix that predicts with --output "
            f"(output_name=), {reads.name} if there is no other"
        )


def _may_hide_a_head(tensor: StoredTensor, reads: StoredTensor) -> bool:
    """Whether a tensor's name says that it predicts, although it is no plain matrix (V, D)."""
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


def _same_shape(tensor: StoredTensor, reads: StoredTensor) -> bool:
    return reads.shape in (tensor.shape, tensor.shape[::-1])


def _n_rows(tensor: StoredTensor, reads: StoredTensor) -> int:
    """Return the rows of a matrix over the embedding's width, straight or transposed; else 0."""
    rows, columns = tensor.shape
    return {columns: rows, rows: columns}.get(reads.shape[1], 0)


def _is_similar(tensor: StoredTensor, reads: StoredTensor) -> bool:
    """Whether a matrix has the embedding's width and at least half as many rows."""
    return 2 * _n_rows(tensor, reads) >= reads.shape[0]


def _is_numbered(tensor: StoredTensor) -> bool:
    return any(part.isdigit() for part in re.split(r"[./]", tensor.name))


def _in_use(candidates: list[StoredTensor]) -> list[StoredTensor]:
    """Prefer what a wrapper uses to what it keeps, whole models to layers, a shared table."""
    used = [t for t in candidates if "original_module" not in t.name] or candidates
    used = [t for t in used if not _is_numbered(t)] or used
    return [t for t in used if "shared" in t.name.split(".")] or used


def _only(checkpoint: Checkpoint, role: str, candidates: list[StoredTensor]) -> StoredTensor:
    """Return the one candidate; several names of one storage are one."""
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


def _likeliest(matrices: Iterable[StoredTensor], role: str) -> list[StoredTensor]:
    """Return a few matrices, by their names and then by their sizes."""
    words = (READS, MAY_READ) if role == "input" else (PREDICTS, MAY_PREDICT)
    return sorted(matrices, key=lambda t: (-name_rank(t.name, *words), -t.count))[:6]


def _listed(tensors: Iterable[StoredTensor]) -> str:
    listed = [f"{printable(tensor.name[:80])} {tensor.shape}" for tensor in tensors]
    return ", ".join(listed[:8]) + (", ..." if len(listed) > 8 else "") if listed else "none"
