"""What an audit tells its reader: each fact about the matrices in plain sentences.

    findings(checkpoint, decision)    a Finding for each fact, the matrices first, the claim last

Nothing is decided here: what `decide_tie` returned is put in words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tiedgpt.files import format_bytes
from tiedgpt.weights.checkpoint import TIE_KEY, Checkpoint
from tiedgpt.weights.comparison import Comparison, count_nonzero_rows, recognize_initialization
from tiedgpt.weights.decision import TieDecision
from tiedgpt.weights.roles import Roles
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
    for tell in (_tell_one, _tell_two, _tell_rows_and_config, _tell_claim):
        for finding in tell(checkpoint, decision):
            title, explain = printable(finding.title), printable(finding.explain)
            yield Finding(finding.kind, title, explain)


def format_shape(shape: tuple[int, ...]) -> str:
    """Return a shape as people write it: 50,257 x 768."""
    return " x ".join(f"{n:,}" for n in shape) if shape else "one number"


def _with_shape(matrix: StoredTensor) -> str:
    return f"{matrix.name} ({format_shape(matrix.shape)})"


def _tell_one(checkpoint: Checkpoint, decision: TieDecision) -> Iterator[Finding]:
    """Tell of one matrix: its names, and whether it predicts."""
    roles, matrix = decision.roles, decision.roles.matrix
    shape, heads = format_shape(matrix.shape), roles.unreadable[:4]
    if why := checkpoint.usage.head_computation:
        yield Finding(
            "derived",
            "the head multiplies with something derived from W, or with something else",
            f"{matrix.name} ({shape}) reads. The head {why}: it does not multiply with W itself. "
            "Merge or remove that first, then audit again.",
        )
        return
    if (
        roles.output is not None
        and roles.has_one_width
        and not (roles.is_shared or roles.comparison)
    ):
        heads = (roles.output,)
    if heads:
        listed = ", ".join(
            f"{head.name} ({format_shape(head.shape)}, {head.dtype})" for head in heads
        )
        yield Finding(
            "not comparable",
            f"{matrix.name} and the head were not compared",
            f"{matrix.name} ({shape}, {matrix.dtype}) reads and {listed} predicts. One of them is "
            "quantized, packed, in parts, or without data: audit the file that it was made from.",
        )
    if decision.kind == "no head":
        yield Finding(
            "no head",
            "no head: this model does not predict tokens",
            f"{matrix.name} ({shape}) reads. By its architecture this is a bare body or a "
            "classifier, so there is no tie to judge.",
        )
    if decision.kind == "contradicts the claim" and roles.pair is None:
        yield Finding(
            "missing",
            "an untied head is claimed, and there is one matrix",
            f"{decision.claim.source}, but {matrix.name} ({shape}) has no second matrix beside it. "
            "Either the claim is wrong and the one matrix does both, or the head was lost when "
            "this was saved: go back to the file that still has it.",
        )
    if decision.kind == "tied" and roles.pair is None:
        yield _tell_tied(matrix, has_heads_name=roles.input is None)
    if roles.is_shared and roles.output is not None:
        yield from _tell_shared(roles, roles.output)


def _tell_tied(matrix: StoredTensor, *, has_heads_name: bool) -> Finding:
    """Tell of one matrix under one name that does both."""
    title = f"{matrix.name} reads and predicts"
    explain = (
        "Reading a token looks up its row. Predicting a token takes the dot product of the last "
        f"hidden state with the same row: logits = h W^T. Its {matrix.count:,} numbers are "
        "stored, counted and trained once."
    )
    if has_heads_name:
        title = f"the one matrix has the head's name, {matrix.name}"
        explain = (
            "tiedgpt loads it as the embedding too; other readers may fill the embedding with "
            "random numbers. `tiedgpt tie fix` renames it for GPT-2 and GPT; otherwise rename it "
            "yourself."
        )
    there_is = f"There is one matrix of {format_shape(matrix.shape)}, {matrix.name}."
    return Finding("one matrix", title, f"{there_is} {explain}")


def _tell_shared(roles: Roles, head: StoredTensor) -> Iterator[Finding]:
    """Tell of one matrix under several names."""
    matrix = roles.matrix
    shape, names = (
        format_shape(matrix.shape),
        [matrix.name, *(tensor.name for tensor in roles.aliases)],
    )
    yield Finding(
        "same storage",
        f"{head.name} is {matrix.name}",
        f"{' and '.join(names)} are names of the same {matrix.n_bytes:,} bytes: one matrix of "
        f"{shape}. A count by names counts it {len(names)} times.",
    )
    if roles.has_two_parameters:
        yield Finding(
            "two parameters on one storage",
            f"{head.name} and {matrix.name} are two Parameters on the same bytes",
            f"Two Parameter objects hold one {shape} matrix (load_state_dict(assign=True) does "
            "this). An optimizer steps the matrix twice, and the next copy or move makes two "
            "matrices. Share the object: tiedgpt.tie.tie(model).",
        )


def _tell_two(checkpoint: Checkpoint, decision: TieDecision) -> Iterator[Finding]:
    """Tell how far two matrices are apart, and of rows that only one of them has."""
    roles, comparison = decision.roles, decision.roles.comparison
    if roles.pair is None or checkpoint.usage.head_computation:
        return
    reads, head = roles.pair
    if not roles.has_one_width:
        yield Finding(
            "shapes",
            f"{head.name} does not fit {reads.name}",
            f"{reads.name} is {format_shape(reads.shape)} and {head.name} is "
            f"{format_shape(head.shape)}. Their widths differ: the head belongs to another model, "
            "or predicts something other than tokens.",
        )
    if comparison is not None and comparison.equal:
        follows = f"Dropping one loses nothing: the copy takes {format_bytes(head.n_bytes)}."
        if checkpoint.in_memory:
            follows = (
                "They agree now. The first training step moves each by its own gradient, and they "
                "drift apart. Share the one: tiedgpt.tie.tie(model)."
            )
        elif roles.extra_rows:
            follows = f"One of them has {abs(roles.extra_rows):,} rows more than the other."
        yield Finding(
            "equal copies",
            f"{head.name} is a second copy of {reads.name}",
            f"{_with_shape(reads)} and {_with_shape(head)} are two tensors, equal in all "
            f"{comparison.rows_compared:,} rows that both have. {follows}",
        )
    elif comparison is not None:
        yield from _tell_difference(reads, head, comparison)
    if comparison is not None and comparison.not_finite_rows:
        yield Finding(
            "not finite",
            f"{comparison.not_finite_rows:,} rows hold numbers that are not finite",
            "In a tied matrix a row with an infinity or NaN spoils both reading and predicting.",
        )
    if roles.extra_rows:
        yield _tell_extra_rows(checkpoint, decision, *sorted(roles.pair, key=lambda m: m.shape[0]))


def _tell_difference(
    reads: StoredTensor, head: StoredTensor, comparison: Comparison
) -> Iterator[Finding]:
    """Tell how two matrices differ, and of one that looks like an initialization."""
    gap = ""
    if comparison.largest == 0:
        gap = "Where they differ, one of the two numbers is infinite or none at all. "
    elif comparison.largest is not None:
        gap = f"The largest difference of two finite numbers is {comparison.largest:.3g}. "
    angle = "unknown" if comparison.cosine is None else f"{comparison.cosine:.4f}"
    first = ", ".join(map(str, comparison.first_rows))
    differing = f"{comparison.differing_rows:,} of {comparison.rows_compared:,} rows"
    yield Finding(
        "drifted",
        f"{head.name} differs from {reads.name} in {differing}",
        f"{_with_shape(reads)} reads; {_with_shape(head)} predicts. The first tokens where they "
        f"differ: {first}. {gap}Their cosine is {angle}. {_guess_cause(comparison)}",
    )
    n_items = comparison.rows_compared * reads.shape[1]
    if comparison.cosine is None or abs(comparison.cosine) > 0.02 + 5 / n_items**0.5:
        return  # they are related
    looks = {matrix.name: recognize_initialization(matrix) for matrix in (head, reads)}
    fresh = {name: values for name, values in looks.items() if values}
    if fresh:
        like = [
            f"The numbers of {name} have mean {mean:.2g} and standard deviation {std:.3g}: they "
            f"look like {initialization}, never trained."
            for name, (mean, std, initialization) in fresh.items()
        ]
        yield Finding(
            "fresh",
            f"{' and '.join(fresh)} {'look' if len(fresh) > 1 else 'looks'} freshly initialized",
            f"{' '.join(like)} The cosine of the two is {comparison.cosine:.3f}. A loader that "
            "does not find a matrix and makes one up leaves exactly this.",
        )


def _guess_cause(comparison: Comparison) -> str:
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


def _tell_extra_rows(
    checkpoint: Checkpoint, decision: TieDecision, shorter: StoredTensor, longer: StoredTensor
) -> Finding:
    """Tell of rows that only one of the two matrices has."""
    rows, extra = shorter.shape[0], abs(decision.roles.extra_rows)
    told = rows == checkpoint.vocabulary
    beyond = "tokens that config.json tells of" if told else f"rows of {shorter.name}"
    nonzero = ""
    if longer.is_decodable:
        n_nonzero = count_nonzero_rows(longer, rows, rows + extra)
        nonzero = f"{n_nonzero:,} of them hold numbers other than zero. "
    follows = PADDING if decision.is_sound else "One vocabulary has one size: loaders refuse this."
    return Finding(
        "padded",
        f"{longer.name} has {extra:,} rows more than the {rows:,} {beyond}",
        f"{longer.name} is {format_shape(longer.shape)}. {nonzero}{follows}",
    )


def _tell_rows_and_config(checkpoint: Checkpoint, decision: TieDecision) -> Iterator[Finding]:
    """Tell of matrices that lie transposed, of padding on both sides, and of a key misspelt."""
    matrix, names = decision.roles.matrix, decision.roles.transposed
    if names:
        sizes = [f"{name} is {format_shape(checkpoint.tensors[name].shape)}" for name in names]
        follows = (
            "Loaders of this format expect (V, D). They refuse it or, where V = D, misread it."
        )
        if checkpoint.any_layout:
            follows = (
                "This format stores the matrix of a product x W so; it is compared transposed."
            )
        yield Finding(
            "transposed",
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} stored transposed",
            f"{' and '.join(sizes)}: columns, not rows, are tokens. {follows}",
        )
    vocabulary = checkpoint.vocabulary or matrix.shape[0]
    if matrix.shape[0] > vocabulary and decision.roles.extra_rows >= 0:
        extra = f"{matrix.shape[0] - vocabulary:,} rows more than the {vocabulary:,} tokens"
        yield Finding(
            "padded",
            f"{matrix.name} has {extra} that config.json tells of",
            f"{matrix.name} is {format_shape(matrix.shape)}. {PADDING}",
        )
    for key in sorted(MISSPELT & checkpoint.config.keys())[:1]:
        yield Finding(
            "config",
            f"config.json has {key!r}, which nothing reads",
            f"The key is {TIE_KEY}; {key!r} is ignored, so it changes nothing.",
        )


def _tell_claim(checkpoint: Checkpoint, decision: TieDecision) -> Iterator[Finding]:
    """Tell whether the claim holds; a claim about the head means nothing where there is none."""
    claim, is_module = decision.claim, checkpoint.in_memory
    title = "nothing is claimed" if claim.is_tied is None else "the claim holds"
    explain = f"{claim.source}. The matrices are sound: {decision.kind}."
    if is_module and claim.is_tied is None and decision.kind == "untied as claimed":
        as_built = "The module has no config: two matrices, as built."
        explain = f"{as_built} tiedgpt.tie.tie(model) makes them one."
    if not decision.is_sound:
        is_contradiction = decision.kind == "contradicts the claim"
        title = "the claim does not hold" if is_contradiction else "the tie is broken"
        mends = f"{decision.command} writes a copy that loads."
        if is_module:
            mends = f"tiedgpt.tie.tie(model) makes them one; or set {TIE_KEY}=False."
        explain = f"{decision.reason}. {mends}"
    if decision.kind != "no head":
        yield Finding("claim", title, explain)
