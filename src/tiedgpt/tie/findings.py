"""What an audit tells its reader: each fact about the matrices in plain sentences.

    findings(checkpoint, decision)    a Finding for each fact, the matrices first, the claim last

Nothing is decided here: a function for each fact words what `decide_tie` returned, or returns None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tiedgpt.weights.checkpoint import TIE_KEY, Checkpoint
from tiedgpt.weights.comparison import Comparison, initialization, nonzero_rows
from tiedgpt.weights.decision import TieDecision
from tiedgpt.weights.tensors import StoredTensor, printable

MISSPELT = {"tie_word_embedding", "tie_embeddings", "tied_word_embeddings", "tie_weights"}
PADDING = "No text maps to these ids, yet they take part in the softmax unless they are cut off."


@dataclass(frozen=True)
class Finding:
    """One fact: a short title, and an explanation in plain words."""

    kind: str
    title: str
    explain: str


def findings(checkpoint: Checkpoint, decision: TieDecision) -> Iterator[Finding]:
    """Yield all there is to tell: the matrices first, the claim last."""
    for tell in FACTS:
        finding = tell(checkpoint, decision)
        if finding is not None:
            title, explain = printable(finding.title), printable(finding.explain)
            yield Finding(finding.kind, title, explain)


def plain(value: Any) -> Any:
    """Return a value that JSON can hold; numbers that are not finite become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value


def size(shape: tuple[int, ...]) -> str:
    """Return a shape as people write it: 50,257 x 768."""
    return " x ".join(f"{n:,}" for n in shape) if shape else "one number"


def megabytes(n_bytes: int) -> str:
    """Return a number of bytes as people write it."""
    return f"{n_bytes / 1e6:,.1f} MB" if n_bytes >= 50_000 else f"{n_bytes:,} bytes"


def _described(matrix: StoredTensor) -> str:
    return f"{matrix.name} ({size(matrix.shape)})"


# One matrix, or none that predicts


def _derived(checkpoint: Checkpoint, decision: TieDecision) -> Finding | None:
    why = checkpoint.usage.derived
    if not why:
        return None
    return Finding(
        "derived",
        "the head multiplies with something derived from W, or with something else",
        f"{_described(decision.roles.matrix)} reads. The head {why}: it does not multiply with W "
        "itself. Merge or remove that first, then audit again.",
    )


def _not_comparable(checkpoint: Checkpoint, decision: TieDecision) -> Finding | None:
    roles = decision.roles
    heads = roles.unreadable[:4]
    if roles.output is not None and roles.fits and not roles.shared and not decision.comparison:
        heads = (roles.output,)
    if not heads or checkpoint.usage.derived:
        return None
    matrix = roles.matrix
    listed = ", ".join(f"{head.name} ({size(head.shape)}, {head.dtype})" for head in heads)
    return Finding(
        "not comparable",
        f"{matrix.name} and the head were not compared",
        f"{matrix.name} ({size(matrix.shape)}, {matrix.dtype}) reads and {listed} predicts. One of "
        "them is quantized, packed, in parts, or without data: audit the file that it was made "
        "from.",
    )


def _no_head(checkpoint: Checkpoint, decision: TieDecision) -> Finding | None:
    if decision.kind != "no head":
        return None
    return Finding(
        "no head",
        "no head: this model does not predict tokens",
        f"{_described(decision.roles.matrix)} reads. By its architecture this is a bare body or a "
        "classifier, so there is no tie to judge.",
    )


def _missing(checkpoint: Checkpoint, decision: TieDecision) -> Finding | None:
    if decision.kind != "contradicts the claim" or decision.roles.pair is not None:
        return None
    return Finding(
        "missing",
        "an untied head is claimed, and there is one matrix",
        f"{decision.claim.source}, but {_described(decision.roles.matrix)} has no second matrix "
        "beside it. Either the claim is wrong and the one matrix does both, or the head was lost "
        "when this was saved: go back to the file that still has it.",
    )


def _one_matrix(checkpoint: Checkpoint, decision: TieDecision) -> Finding | None:
    matrix = decision.roles.matrix
    if decision.kind != "tied" or decision.roles.pair is not None:
        return None
    if decision.roles.input is None:
        return Finding(
            "one matrix",
            f"the one matrix has the head's name, {matrix.name}",
            f"There is one matrix of {size(matrix.shape)}, {matrix.name}. tiedgpt loads it as the "
            "embedding too; other readers may fill the embedding with random numbers. `tiedgpt tie "
            "fix` renames it for GPT-2 and GPT; otherwise rename it yourself.",
        )
    return Finding(
        "one matrix",
        f"{matrix.name} reads and predicts",
        f"There is one matrix of {size(matrix.shape)}, {matrix.name}. Reading a token looks up its "
        "row. Predicting a token takes the dot product of the last hidden state with the same row: "
        f"logits = h W^T. Its {matrix.count:,} numbers are stored, counted and trained once.",
    )


def _same_storage(checkpoint: Checkpoint, decision: TieDecision) -> Finding | None:
    roles = decision.roles
    if not roles.shared or roles.output is None or checkpoint.usage.derived:
        return None
    names = [roles.matrix.name, *(tensor.name for tensor in roles.aliases)]
    return Finding(
        "same storage",
        f"{roles.output.name} is {roles.matrix.name}",
        f"{' and '.join(names)} are names of the same {roles.matrix.n_bytes:,} bytes: one matrix "
        f"of {size(roles.matrix.shape)}. A count by names counts it {len(names)} times.",
    )


def _two_parameters(checkpoint: Checkpoint, decision: TieDecision) -> Finding | None:
    roles = decision.roles
    if not roles.shared or not roles.two_parameters or checkpoint.usage.derived or not roles.output:
        return None
    return Finding(
        "two parameters on one storage",
        f"{roles.output.name} and {roles.matrix.name} are two Parameters on the same bytes",
        f"Two Parameter objects hold one {size(roles.matrix.shape)} matrix "
        "(load_state_dict(assign=True) does this). An optimizer steps the matrix twice, and the "
        "next copy or move makes two matrices. Share the object: tiedgpt.tie.tie(model).",
    )


# Two matrices


def _shapes(checkpoint: Checkpoint, decision: TieDecision) -> Finding | None:
    pair = decision.roles.pair
    if pair is None or decision.roles.fits or checkpoint.usage.derived:
        return None
    reads, head = pair
    return Finding(
        "shapes",
        f"{head.name} does not fit {reads.name}",
        f"{reads.name} is {size(reads.shape)} and {head.name} is {size(head.shape)}. Their widths "
        "differ: the head belongs to another model, or predicts something other than tokens.",
    )


def _equal_copies(checkpoint: Checkpoint, decision: TieDecision) -> Finding | None:
    roles, comparison = decision.roles, decision.comparison
    if roles.pair is None or comparison is None or not comparison.equal or checkpoint.usage.derived:
        return None
    reads, head = roles.pair
    follows = f"Dropping one loses nothing: the copy takes {megabytes(head.n_bytes)}."
    if checkpoint.in_memory:
        follows = (
            "They agree now. The first training step moves each by its own gradient, and they "
            "drift apart. Share the one: tiedgpt.tie.tie(model)."
        )
    elif roles.extra_rows:
        follows = f"One of them has {abs(roles.extra_rows):,} rows more than the other."
    return Finding(
        "equal copies",
        f"{head.name} is a second copy of {reads.name}",
        f"{_described(reads)} and {_described(head)} are two tensors, equal in all "
        f"{comparison.rows_compared:,} rows that both have. {follows}",
    )


def _drifted(checkpoint: Checkpoint, decision: TieDecision) -> Finding | None:
    roles, comparison = decision.roles, decision.comparison
    if roles.pair is None or comparison is None or comparison.equal or checkpoint.usage.derived:
        return None
    reads, head = roles.pair
    gap = ""
    if comparison.largest == 0:
        gap = "Where they differ, one of the two numbers is infinite or none at all. "
    elif comparison.largest is not None:
        gap = f"The largest difference of two finite numbers is {comparison.largest:.3g}. "
    angle = "unknown" if comparison.cosine is None else f"{comparison.cosine:.4f}"
    first = ", ".join(map(str, comparison.first_rows))
    differing = f"{comparison.differing_rows:,} of {comparison.rows_compared:,} rows"
    return Finding(
        "drifted",
        f"{head.name} differs from {reads.name} in {differing}",
        f"{_described(reads)} reads; {_described(head)} predicts. They differ first at token "
        f"{first}. {gap}Their cosine is {angle}. {_likely_cause(comparison)}",
    )


def _likely_cause(comparison: Comparison) -> str:
    if comparison.within_rounding:
        return "Rounding to the coarser of their types explains all differences."
    if comparison.cosine is None:
        return "One of them is zero or holds numbers that are not finite."
    if comparison.differing_rows < comparison.rows_compared / 2:
        return "Most rows are equal: tokens were added or retrained after the tie came apart."
    if comparison.cosine > 0.9:
        return (
            "They probably began as one matrix and were trained apart: an adapter that copied the "
            "head, an optimizer with two parameters, or a conversion that lost the tie."
        )
    if comparison.cosine > 0.2:
        return "They are related but far apart: the head was probably trained as its own matrix."
    return "They have nothing in common: the head was probably replaced or never loaded."


def _fresh(checkpoint: Checkpoint, decision: TieDecision) -> Finding | None:
    """Tell of a matrix that looks like an initialization beside one that it has no part in."""
    roles, comparison = decision.roles, decision.comparison
    if roles.pair is None or comparison is None or comparison.equal or comparison.cosine is None:
        return None
    n_items = comparison.rows_compared * roles.matrix.shape[1]
    if abs(comparison.cosine) > 0.02 + 5 / n_items**0.5:  # they are related
        return None
    looks = {matrix.name: initialization(matrix) for matrix in reversed(roles.pair)}
    fresh = {name: values for name, values in looks.items() if values}
    if not fresh:
        return None
    like = [
        f"The numbers of {name} have mean {mean:.2g} and standard deviation {std:.3g}: they look "
        f"like {initialization}, never trained."
        for name, (mean, std, initialization) in fresh.items()
    ]
    return Finding(
        "fresh",
        f"{' and '.join(fresh)} {'look' if len(fresh) > 1 else 'looks'} freshly initialized",
        f"{' '.join(like)} The cosine of the two is {comparison.cosine:.3f}. A loader that does "
        "not find a matrix and makes one up leaves exactly this.",
    )


def _not_finite(checkpoint: Checkpoint, decision: TieDecision) -> Finding | None:
    rows = 0 if decision.comparison is None else decision.comparison.not_finite_rows
    if not rows:
        return None
    return Finding(
        "not finite",
        f"{rows:,} rows hold numbers that are not finite",
        "In a tied matrix a row with an infinity or NaN spoils both reading and predicting.",
    )


def _extra_rows(checkpoint: Checkpoint, decision: TieDecision) -> Finding | None:
    """Tell of rows that only one of the two matrices has."""
    roles = decision.roles
    if roles.pair is None or not roles.extra_rows or checkpoint.usage.derived:
        return None
    shorter, longer = sorted(roles.pair, key=lambda matrix: matrix.shape[0])
    rows, extra = shorter.shape[0], abs(roles.extra_rows)
    told = rows == checkpoint.vocabulary
    beyond = "tokens that config.json tells of" if told else f"rows of {shorter.name}"
    nonzero = ""
    if longer.is_decodable:
        n_nonzero = nonzero_rows(longer, rows, rows + extra)
        nonzero = f"{n_nonzero:,} of them hold numbers other than zero. "
    follows = PADDING if decision.is_sound else "One vocabulary has one size: loaders refuse this."
    return Finding(
        "padded",
        f"{longer.name} has {extra:,} rows more than the {rows:,} {beyond}",
        f"{longer.name} is {size(longer.shape)}. {nonzero}{follows}",
    )


# The layout of a matrix, its rows, the config and the claim


def _transposed(checkpoint: Checkpoint, decision: TieDecision) -> Finding | None:
    names = decision.roles.transposed
    if not names:
        return None
    sizes = [f"{name} is {size(checkpoint.tensors[name].shape)}" for name in names]
    follows = "Loaders of this format expect (V, D). They refuse it or, where V = D, misread it."
    if checkpoint.any_layout:
        follows = "This format stores the matrix of a product x W so; it is compared transposed."
    are = "is" if len(names) == 1 else "are"
    return Finding(
        "transposed",
        f"{' and '.join(names)} {are} stored transposed",
        f"{' and '.join(sizes)}: columns, not rows, are tokens. {follows}",
    )


def _padded_vocabulary(checkpoint: Checkpoint, decision: TieDecision) -> Finding | None:
    matrix, vocabulary = decision.roles.matrix, checkpoint.vocabulary
    if vocabulary is None or matrix.shape[0] <= vocabulary or decision.roles.extra_rows < 0:
        return None
    extra = f"{matrix.shape[0] - vocabulary:,} rows more than the {vocabulary:,} tokens"
    return Finding(
        "padded",
        f"{matrix.name} has {extra} that config.json tells of",
        f"{matrix.name} is {size(matrix.shape)}. {PADDING}",
    )


def _misspelt(checkpoint: Checkpoint, decision: TieDecision) -> Finding | None:
    keys = sorted(MISSPELT & checkpoint.config.keys())
    if not keys:
        return None
    return Finding(
        "config",
        f"config.json has {keys[0]!r}, which nothing reads",
        f"The key is {TIE_KEY}; {keys[0]!r} is ignored, so it changes nothing.",
    )


def _claim(checkpoint: Checkpoint, decision: TieDecision) -> Finding | None:
    claim, is_module = decision.claim, checkpoint.in_memory
    if decision.kind == "no head":  # a claim about the head means nothing
        return None
    if decision.is_sound:
        title = "nothing is claimed" if claim.is_tied is None else "the claim holds"
        if is_module and claim.is_tied is None and decision.kind == "untied as claimed":
            as_built = "The module has no config: two matrices, as built."
            return Finding("claim", title, f"{as_built} tiedgpt.tie.tie(model) makes them one.")
        sound = f"The matrices are sound: {decision.kind}."
        return Finding("claim", title, f"{claim.source}. {sound}")
    title = "the tie is broken"
    if decision.kind == "contradicts the claim":
        title = "the claim does not hold"
    mends = f"{decision.command} writes a copy that loads."
    if is_module:
        mends = f"tiedgpt.tie.tie(model) makes them one; or set {TIE_KEY}=False."
    return Finding("claim", title, f"{decision.reason}. {mends}")


FACTS = (
    _derived, _not_comparable, _no_head, _missing, _one_matrix, _same_storage, _two_parameters,
    _shapes, _equal_copies, _drifted, _fresh, _not_finite, _extra_rows, _transposed,
    _padded_vocabulary, _misspelt, _claim,
)  # fmt: skip
"""In the order in which they are told."""
