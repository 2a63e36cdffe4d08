"""Find the matrix that reads a token and the matrix that predicts one, in any architecture.

    find_roles(checkpoint, gpt, input_name=..., output_name=...) -> Roles

The format of a GPT names both. In any other file, names and shapes tell them apart; an ONNX graph
and a module in memory also tell which matrices are looked up (`Usage.reads`) and which ones
multiply (`Usage.predicts`). In doubt, `UserError` lists the candidates; nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tiedgpt.errors import UserError
from tiedgpt.weights.checkpoint import EMBEDDING, HEAD, Checkpoint
from tiedgpt.weights.comparison import Comparison, compare
from tiedgpt.weights.tensors import FLOATS, StoredTensor, printable

READS = frozenset(
    "wte tokens_embed embed_tokens tok_embeddings word_embeddings word_embedding token_embd "
    "token_embedding token_embeddings token_embedding_table tok_emb tok_embed tok_embedding "
    "embed_in shared".split()
)
"""Names that only an input embedding has."""
MAY_READ = frozenset("embed embedding embeddings emb encoder tokens".split())
PREDICTS = frozenset(
    "lm_head embed_out unembed output_layer out_head output_projection logits_head lm_out "
    "generator_lm_head vocab_projector".split()
)
"""Names that only an output head has."""
MAY_PREDICT = frozenset("head output decoder out predictions logits wcls".split())
WRAPPING = frozenset(
    "weight embedding kernel w W_E W_U modules_to_save original_module default base_layer "
    "parametrizations original original0 linear proj module _orig_mod weight_quantized "
    "_fsdp_wrapped_module _checkpoint_wrapped_module".split()
)
"""Parts that may follow such a name: the tensor's own name, and the names of wrappers."""
POSITIONS = re.compile(
    r"(^|[._/])(wpe|w?pos|positions?(_emb\w*)?|pos_emb\w*|positions_embed|embed_positions|"
    r"token_types?|token_type_embeddings)([._]|$)"
)
"""Names of tables of positions and of token types."""
GPT_NAMES = re.compile(r"(wte|wpe|ln_f|head)\.(weight|bias)|h\.\d+\..+")
"""Our names of the parameters of a GPT without any other tensor."""
MAX_WIDTH = 1 << 22
"""No embedding is wider; reading rows of any width could fill the memory."""


@dataclass(frozen=True)
class Roles:
    """The matrix that reads and the matrix that predicts, each with a token in a row."""

    input: StoredTensor | None
    """Matrix (V, D) that reads; None if there is only a head."""
    output: StoredTensor | None
    """Matrix (V', D) that predicts; None if no second matrix can be read."""
    aliases: tuple[StoredTensor, ...] = ()
    """Other names of the input's storage."""
    unreadable: tuple[StoredTensor, ...] = ()
    """If no matrix predicts: tensors whose names say that they do (packed, flat, in parts)."""
    transposed: tuple[str, ...] = ()
    """Names of the matrices that are stored as (D, V)."""

    @property
    def matrix(self) -> StoredTensor:
        """The input, or the output if only that exists."""
        matrix = self.input or self.output
        assert matrix is not None
        return matrix

    @property
    def pair(self) -> tuple[StoredTensor, StoredTensor] | None:
        """The input and the output, if both are there, shared or not."""
        return (self.input, self.output) if self.input and self.output else None

    @property
    def is_shared(self) -> bool:
        """Whether both are there and are the same numbers in the same place."""
        return self.pair is not None and self.pair[0].is_view_of(self.pair[1])

    @property
    def has_two_parameters(self) -> bool:
        """Whether an optimizer would find two Parameters."""
        reads, predicts = self.pair or (self.matrix, self.matrix)
        return reads.owner != predicts.owner and (reads.trainable or predicts.trainable)

    @property
    def is_turned(self) -> bool:
        """Whether the output alone is stored as (D, V), as in products x W."""
        return self.output is not None and self.transposed == (self.output.name,)

    @property
    def has_one_width(self) -> bool:
        """Whether the input and the output have the same width D."""
        return self.pair is not None and self.pair[0].shape[1] == self.pair[1].shape[1]

    @property
    def extra_rows(self) -> int:
        """Rows that the output has more (or, if negative, fewer) than the input."""
        if self.pair is None or not self.has_one_width:
            return 0
        return self.pair[1].shape[0] - self.pair[0].shape[0]

    @cached_property
    def comparison(self) -> Comparison | None:
        """Difference of the two matrices, read once; None unless they have one width."""
        if self.pair is None or not self.has_one_width or self.is_shared:
            return None
        return compare(*self.pair)

    @property
    def is_equal(self) -> bool:
        """Whether both are there, apart, and equal in the rows that both have."""
        return self.comparison is not None and self.comparison.equal


def find_roles(
    checkpoint: Checkpoint,
    gpt: Mapping[str, StoredTensor] | None = None,
    *,
    input_name: str | None,
    output_name: str | None,
) -> Roles:
    """Return the matrices that read and predict; a (D, V) matrix is transposed.

    `gpt` are the tensors by our names if the format found a GPT. `input_name` and `output_name`
    name a tensor or its module. Raises `UserError` with the candidates if there are none or
    several.
    """
    tensors = gpt or checkpoint.tensors
    reads, head = (tensors.get(name) if gpt else None for name in (EMBEDDING, HEAD))
    is_plain_gpt = (
        reads is not None
        and reads.shape[1] <= MAX_WIDTH
        and all(map(GPT_NAMES.fullmatch, tensors))
        and checkpoint.usage.products is None
    )
    if is_plain_gpt and input_name is output_name is None:
        tensors = {name: tensors[name] for name in (EMBEDDING, HEAD) if name in tensors}
    else:
        reads, head = _search(checkpoint, gpt, input_name, output_name)
    if reads is None:
        return Roles(None, head)
    unreadable, transposed = list[StoredTensor](), list[str]()
    others = [tensor for tensor in tensors.values() if tensor.name != reads.name]
    is_straight = reads.shape[0] == checkpoint.config.get("vocab_size")
    if not is_straight and not checkpoint.any_layout and is_transposed(checkpoint, reads):
        transposed.append(reads.name)
        reads = reads.transpose()
    if head is None:
        unreadable = [t for t in others if _may_hide_a_head(t, reads)]
    elif head.name == reads.name:
        head = None
    elif output_name is None and head.dtype not in FLOATS and not _is_similar(head, reads):
        unreadable, head = [head], None
    elif head.shape[1] != reads.shape[1] == head.shape[0]:
        transposed.append(head.name)
        head = head.transpose()
    aliases = tuple(t for t in others if t.is_view_of(reads))
    return Roles(reads, head, aliases, tuple(unreadable), tuple(transposed))


def is_transposed(checkpoint: Checkpoint, matrix: StoredTensor) -> bool | None:
    """Whether an embedding is (D, V) by the config's V and D; None if they do not tell.

    Where the config does not say D, a table of positions (N, D) does.
    """
    rows, columns = matrix.shape
    named = (t for t in checkpoint.tensors.values() if POSITIONS.search(t.name))
    tables = [t.shape[1] for t in named if len(t.shape) == 2]
    vocabulary, width = checkpoint.vocabulary, checkpoint.width or next(iter(tables), None)
    straight = rows == vocabulary or columns == width
    across = columns == vocabulary or rows == width
    return None if straight == across else across


def rank_name(name: str, role: str) -> int:
    """Return 2 if a name certainly is an "input"'s or "output"'s, 1 if it may be, else 0."""
    sure, maybe = (READS, MAY_READ) if role == "input" else (PREDICTS, MAY_PREDICT)
    parts = re.split(r"[./]", name)
    rank = 0
    for at, component in reversed(list(enumerate(parts))):
        if component in sure:
            return 2
        if component in maybe and not any(before.isdigit() for before in parts[:at]):
            rank = 1  # inside a numbered block, `output` and the like are no head
        elif component not in WRAPPING and not component.isdigit():
            break
    return rank


def _search(
    checkpoint: Checkpoint,
    gpt: Mapping[str, StoredTensor] | None,
    input_name: str | None,
    output_name: str | None,
) -> tuple[StoredTensor | None, StoredTensor | None]:
    """Return the input and the output by the caller's names, our names, usage or their names."""
    by_name = {
        name: tensor
        for name, tensor in (gpt or checkpoint.tensors).items()
        if len(tensor.shape) == 2 and tensor.count and tensor.shape[1] <= MAX_WIDTH
    }
    ours, matrices = by_name if gpt else {}, list(by_name.values())
    reads = _find_named(checkpoint, matrices, "input", input_name)
    reads = reads or ours.get(EMBEDDING) or _find_input(checkpoint, matrices)
    head = _find_named(checkpoint, matrices, "output", output_name)
    head = head or ours.get(HEAD) or _find_output(checkpoint, matrices, reads)
    if reads is None and head is None:
        why = "has no matrix with the name of an embedding or a head, so there is nothing to tie"
        raise _ask_for_names(checkpoint, "input", f"{why}; its largest", matrices)
    return reads, head


def _find_named(
    checkpoint: Checkpoint, matrices: list[StoredTensor], role: str, name: str | None
) -> StoredTensor | None:
    """Return the matrix that the caller named: a tensor, or the only one inside a module."""
    if name is None:
        return None
    exact = [t for t in matrices if t.name in (name, f"{name}.weight")]
    inside = [t for t in matrices if t.name.startswith(f"{name}.")]
    if exact or inside:
        return _choose_one(checkpoint, role, exact[:1] or inside)
    raise _ask_for_names(checkpoint, role, f"has no matrix {name!r}; the likeliest", matrices)


def _find_input(checkpoint: Checkpoint, matrices: list[StoredTensor]) -> StoredTensor | None:
    """Return the input by a certain name, else by a lookup, else by a possible name."""
    read = checkpoint.usage.reads
    looked_up = [t for t in matrices if t.name in read and not POSITIONS.search(t.name)]
    products = [sorted(t.shape) for t in matrices if t.name in checkpoint.usage.predicts]
    fitting = [t for t in looked_up if sorted(t.shape) in products]
    certain, possible = (_filter_by_rank(matrices, "input", rank) for rank in (2, 1))
    return _choose_one(checkpoint, "input", certain or fitting or looked_up or possible)


def _find_output(
    checkpoint: Checkpoint, matrices: list[StoredTensor], reads: StoredTensor | None
) -> StoredTensor | None:
    """Return the output by the first of four rules that has a candidate.

    Raises `UserError` in doubt.
    """
    certain, possible = (_filter_by_rank(matrices, "output", rank) for rank in (2, 1))
    if reads is None:
        head = _choose_one(checkpoint, "output", certain or possible)
        if head is not None:
            alike = [t for t in matrices if sorted(t.shape) == sorted(head.shape)]
            _require_no_doubt(checkpoint, "input", head, alike)
        return head
    usage = checkpoint.usage
    products = [t for t in matrices if t.name in usage.predicts]
    alike = [t for t in matrices if t is not reads and _count_rows(t, reads) == reads.shape[0]]
    rules = (
        # A graph knows better than names: its last product that covers the vocabulary.
        [t for t in products if usage.is_of_graph and _count_rows(t, reads) >= reads.shape[0]][-1:],
        # A name that only an output head has.
        certain,
        # A name that a head may have, of a matrix about as large as the embedding.
        [t for t in possible if _is_similar(t, reads)],
        # In memory: a linear layer of the embedding's shape, unless the embedding itself predicts.
        [t for t in alike if checkpoint.in_memory and t in products and reads not in products],
    )
    candidates = next(filter(None, rules), [])
    if not candidates and not usage.head_computation:
        sure = (t for t in alike if _may_hide_a_head(t, reads) or rank_name(t.name, "input") == 2)
        names = {t.name for t in sure}
        _require_no_doubt(checkpoint, "output", reads, [t for t in alike if t.name not in names])
    same = [t for t in candidates if _count_rows(t, reads) == reads.shape[0]]
    return _choose_one(checkpoint, "output", same or candidates)


def _require_no_doubt(
    checkpoint: Checkpoint, role: str, matrix: StoredTensor, alike: list[StoredTensor]
) -> None:
    """Raise `UserError` where a matrix of the known one's shape may have the other role."""
    usage = checkpoint.usage
    doubtful = [
        t
        for t in alike
        if not (_is_numbered(t) or POSITIONS.search(t.name) or t.is_view_of(matrix))
    ]
    if doubtful:
        does = "what it does" if role == "input" else "whether it predicts"
        why = f"has a matrix with the shape of {matrix.name}, and its name does not tell {does}"
        raise _ask_for_names(checkpoint, role, why, doubtful)
    if role == "output" and usage.products and usage.predicts and matrix.name not in usage.products:
        why = f"multiplies nowhere with {matrix.name}; its last product (quantized, or no head)"
        raise _ask_for_names(checkpoint, "output", why, [checkpoint.tensors[usage.predicts[-1]]])


def _may_hide_a_head(tensor: StoredTensor, reads: StoredTensor) -> bool:
    """Whether a tensor has a head's name without being a plain matrix (V, D)."""
    parts = ["", *re.split(r"[./]", tensor.name)]
    module, last = parts[-2:]
    is_weight = "weight" in last or "original" in last
    possible = last in MAY_PREDICT or (module in MAY_PREDICT and is_weight)
    if PREDICTS.isdisjoint(parts) and (not possible or _is_numbered(tensor)):
        return False
    if "bias" in last or tensor.count < reads.shape[0] or tensor.storage.overlaps(reads.storage):
        return False
    if len(tensor.shape) == 1:
        return tensor.count not in reads.shape
    is_plain = len(tensor.shape) == 2 and tensor.dtype in FLOATS
    return not is_plain or reads.shape[0] in tensor.shape


def _count_rows(tensor: StoredTensor, reads: StoredTensor) -> int:
    """Return the rows of a matrix over the embedding's width, straight or transposed; else 0."""
    rows, columns = tensor.shape
    return {columns: rows, rows: columns}.get(reads.shape[1], 0)


def _is_similar(tensor: StoredTensor, reads: StoredTensor) -> bool:
    """Whether a matrix has the embedding's width and at least half as many rows."""
    return 2 * _count_rows(tensor, reads) >= reads.shape[0]


def _is_numbered(tensor: StoredTensor) -> bool:
    return any(component.isdigit() for component in re.split(r"[./]", tensor.name))


def _filter_by_rank(matrices: list[StoredTensor], role: str, rank: int) -> list[StoredTensor]:
    named = (t for t in matrices if not (role == "input" and POSITIONS.search(t.name)))
    return [t for t in named if rank_name(t.name, role) == rank]


def _choose_one(
    checkpoint: Checkpoint, role: str, candidates: list[StoredTensor]
) -> StoredTensor | None:
    """Return the only candidate, or None; several names of one storage count as one."""

    def preference(tensor: StoredTensor) -> tuple[bool, ...]:
        kept_by_a_wrapper = "original_module" in tensor.name
        return kept_by_a_wrapper, _is_numbered(tensor), "shared" not in tensor.name.split(".")

    best = min(map(preference, candidates), default=None)
    preferred = [t for t in candidates if preference(t) == best]
    others = [t for t in preferred if not t.is_view_of(preferred[0])]
    if others:
        why = f"has several matrices that could be the {role}"
        raise _ask_for_names(checkpoint, role, why, [preferred[0], *others])
    return preferred[0] if preferred else None


def _ask_for_names(
    checkpoint: Checkpoint, role: str, why: str, candidates: list[StoredTensor]
) -> UserError:
    """Return an error that lists a few matrices, by their names and sizes, to choose from."""
    ordered = sorted(candidates, key=lambda t: (-rank_name(t.name, role), -t.count))[:8]
    listed = ", ".join(f"{printable(t.name[:80])} {t.shape}" for t in ordered) or "none"
    choice = "--input (input_name=) and --output (output_name=); one that reads and predicts, twice"
    return UserError(
        f"{checkpoint.source} {why}: {listed}", hint=f"name the matrices with {choice}"
    )
