"""What an audit tells its reader: each fact about the matrices in plain sentences.

    findings(checkpoint, roles, comparison, verdict)    a Finding for each fact

TEXTS holds every sentence of the audit: what is there, what follows from it, what to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.comparison import Comparison, initialization, nonzero_rows
from tiedgpt.weights.decision import TieDecision
from tiedgpt.weights.roles import Roles
from tiedgpt.weights.tensors import StoredTensor, printable

MISSPELT = {"tie_word_embedding", "tie_embeddings", "tied_word_embeddings", "tie_weights"}

TEXTS = {
    # one matrix
    "one matrix": "{matrix} reads and predicts\n"
    "There is one matrix of {matrix_size}, {matrix}. Reading a token looks up its row. Predicting "
    "a token takes the dot product of the last hidden state with the same row: logits = h W^T. Its "
    "{parameters:,} numbers are stored, counted and trained once.",
    "one matrix: the head": "the one matrix has the head's name, {matrix}\n"
    "There is one matrix of {matrix_size}, {matrix}. tiedgpt loads it as the embedding too; other "
    "readers may fill the embedding with random numbers. `tiedgpt tie fix` renames it for GPT-2 "
    "and GPT; otherwise rename it yourself.",
    "same storage": "{output} is {input}\n"
    "{all_names} are names of the same {bytes} bytes: one matrix of {input_size}. A count by "
    "names counts it {times} times.",
    "two parameters on one storage": "{output} and {input} are two Parameters on the same bytes\n"
    "Two Parameter objects hold one {input_size} matrix (load_state_dict(assign=True) does this). "
    "An optimizer steps the matrix twice, and the next copy or move makes two matrices. Share the "
    "object: tiedgpt.tie.tie(model).",
    "missing": "an untied head is claimed, and there is one matrix\n"
    "{claim_source}, but {matrix} ({matrix_size}) has no second matrix beside it. Either the claim "
    "is wrong and the one matrix does both (`tiedgpt tie fix` corrects the claim), or the head was "
    "lost when this was saved: go back to the file that still has it.",
    # no matrix that predicts, or none that is known
    "no head": "no head: this model does not predict tokens\n"
    "{matrix} ({matrix_size}) reads. By its architecture this is a bare body or a classifier, so "
    "there is no tie to judge.",
    "derived": "the head multiplies with something derived from W, or with something else\n"
    "{matrix} ({matrix_size}) reads. The head {why}: it does not multiply with W itself. Merge or "
    "remove that first, then audit again.",
    "not comparable": "{matrix} and the head were not compared\n"
    "{matrix} ({matrix_size}, {reads}) reads and {heads} predicts. One of them is quantized, "
    "packed, in parts, or without data: audit the file that it was made from.",
    # two matrices
    "shapes": "{output} does not fit {input}\n"
    "{input} is {input_size} and {output} is {output_size}. Their widths differ: the head belongs "
    "to another model, or predicts something other than tokens.",
    "equal copies": "{output} is a second copy of {input}\n"
    "{input} ({input_size}) and {output} ({output_size}) are two tensors, equal in all "
    "{rows_compared:,} rows that both have. {follows}",
    "drifted": "{output} differs from {input} in {differing_rows:,} of {rows_compared:,} rows\n"
    "{input} ({input_size}) reads; {output} ({output_size}) predicts. They differ first at token "
    "{first}. {gap}Their cosine is {angle}. {cause}",
    "fresh": "{name} looks freshly initialized\n"
    "The numbers of {name} ({name_size}) have mean {mean:.2g}, standard deviation {std:.3g}, and "
    "cosine {cosine:.3f} with the other matrix: they look like {initialization}, never trained. A "
    "loader that does not find this matrix and makes one up leaves exactly this.",
    "not finite": "{rows:,} rows hold numbers that are not finite\n"
    "In a tied matrix a row with an infinity or NaN spoils both reading and predicting.",
    # the layout of a matrix, the claim
    "transposed": "{name} is stored transposed\n"
    "{name} is {name_size}: its columns, not its rows, are tokens. {follows}",
    "padded": "{name} has {extra_rows:,} rows more than the {rows:,} {beyond}\n"
    "{name} is {name_size}. {follows}",
    "config": "config.json has {key!r}, which nothing reads\n"
    "The key is tie_word_embeddings; {key!r} is ignored, so it changes nothing.",
    "claim: holds": "{holds}\n{claim_source}. The matrices are sound: {verdict}.",
    "claim: as built": "nothing is claimed\n"
    "The module has no config: two matrices, as built. tiedgpt.tie.tie(model) makes them one.",
    "claim: transposed": "a matrix is stored transposed\n"
    "{claim_source}. `tiedgpt tie fix{keep}` writes a copy that loaders take.",
    "claim: contradicted": "the claim does not hold\n"
    "{claim_source}. The matrices contradict it: correct the claim, or untie.",
    "claim: broken": "the tie is broken\n"
    "{reason}. Some readers keep two matrices, some silently drop one. Choose what stays: {how}.",
}
"""A title and, on a second line, an explanation; kind: what stands before a colon in the key."""

COPY_DRIFTS = (
    "They agree now. The first training step moves each by its own gradient, and they drift apart. "
    "Share the one: tiedgpt.tie.tie(model)."
)
TURN_IT = (
    "Loaders of this format expect (V, D). They refuse it or, where V = D, misread it. `tiedgpt "
    "tie fix` turns it if config.json tells V and D."
)
STORED_SO = "This format stores the matrix of a product x W so; it is compared transposed."
TWO_SIZES = (
    "One matrix cannot have two sizes: loaders refuse this. `tiedgpt tie fix` keeps as many rows "
    "as config.json's vocab_size says, lists the rows that go, and asks where nothing says it."
)
TOKENS = "tokens that config.json tells of"
PADDING = "No text maps to these ids, yet they take part in the softmax unless they are cut off."
HOW_LIVE = 'tiedgpt.tie.tie(model, keep="input" | "output"), or set tie_word_embeddings=False'
HOW_FILE = "`tiedgpt tie fix MODEL DEST{keep}`"


@dataclass(frozen=True)
class Finding:
    """One fact: a short title, and an explanation in plain words."""

    kind: str
    title: str
    explain: str


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


def findings(checkpoint: Checkpoint, decision: TieDecision) -> Iterator[Finding]:
    """Yield all there is to tell: the matrices first, the claim last."""
    roles, verdict = decision.roles, decision.kind
    matrix, vocabulary = roles.matrix, checkpoint.vocabulary
    if roles.pair is None or roles.shared or checkpoint.usage.derived:
        yield _one_matrix(checkpoint, roles, verdict)
        if roles.two_parameters and not checkpoint.usage.derived:
            yield _tell("two parameters on one storage", roles)
    elif not roles.fits:
        yield _tell("shapes", roles)
    else:
        yield from _two_matrices(checkpoint, decision, *roles.pair)
    for name in roles.transposed:
        follows = TURN_IT if not checkpoint.any_layout else STORED_SO
        yield _tell("transposed", roles, name=checkpoint.tensors[name], follows=follows)
    if vocabulary is not None and matrix.shape[0] > vocabulary and roles.extra_rows >= 0:
        words = {"extra_rows": matrix.shape[0] - vocabulary, "rows": vocabulary, "beyond": TOKENS}
        yield _tell("padded", roles, name=matrix, follows=PADDING, **words)
    for key in sorted(MISSPELT & checkpoint.config.keys()):
        yield _tell("config", roles, key=key)
    if verdict == "no head":  # a claim about the head means nothing
        return
    claim = decision.claim
    text = "claim: contradicted" if verdict == "contradicts the claim" else "claim: broken"
    as_built = checkpoint.in_memory and claim.is_tied is None
    if decision.is_sound:
        text = "claim: as built" if as_built and roles.pair and not roles.shared else "claim: holds"
    elif roles.transposed and not checkpoint.any_layout:
        text = "claim: transposed"
    keep = f" --keep {' | '.join(decision.choices)}" if decision.choices else ""
    yield _tell(
        text,
        roles,
        keep=keep,
        claim_source=claim.source,
        verdict=verdict,
        holds="nothing is claimed" if claim.is_tied is None else "the claim holds",
        reason=decision.reason,
        how=HOW_LIVE if checkpoint.in_memory else HOW_FILE.format(keep=keep),
    )


def _tell(text: str, roles: Roles, **words: Any) -> Finding:
    """Fill in one of TEXTS: names and sizes of tensors, and `words`."""
    words |= {"matrix": roles.matrix, "input": roles.input, "output": roles.output}
    for word, value in list(words.items()):
        if isinstance(value, StoredTensor):
            words |= {word: value.name, f"{word}_size": size(value.shape)}
    title, explain = (printable(part.format(**words)) for part in TEXTS[text].split("\n"))
    return Finding(text.partition(":")[0], title, explain)


def _one_matrix(checkpoint: Checkpoint, roles: Roles, verdict: str) -> Finding:
    """Tell of the only matrix that is read here, or of two names of one matrix."""
    matrix = roles.matrix
    if checkpoint.usage.derived:
        return _tell("derived", roles, why=checkpoint.usage.derived)
    if roles.unreadable:
        return _not_compared(roles, *roles.unreadable[:4])
    if verdict == "no head":
        return _tell("no head", roles)
    if roles.pair is None and checkpoint.claim.is_tied is False:
        return _tell("missing", roles, claim_source=checkpoint.claim.source)
    if roles.pair is None:
        kind = "one matrix" if roles.input else "one matrix: the head"
        return _tell(kind, roles, parameters=matrix.count)
    names = [matrix.name, *(tensor.name for tensor in roles.aliases)]
    words = {"all_names": " and ".join(names), "times": len(names)}
    return _tell("same storage", roles, bytes=f"{matrix.n_bytes:,}", **words)


def _two_matrices(
    checkpoint: Checkpoint,
    decision: TieDecision,
    reads: StoredTensor,
    predicts: StoredTensor,
) -> Iterator[Finding]:
    """Tell of two matrices of one width."""
    roles, comparison = decision.roles, decision.comparison
    extra = abs(roles.extra_rows)
    if comparison is None:
        yield _not_compared(roles, predicts)
    elif comparison.equal:
        follows = f"Dropping one loses nothing: the copy takes {megabytes(predicts.n_bytes)}."
        if checkpoint.in_memory:
            follows = COPY_DRIFTS
        elif extra:
            follows = f"One of them has {extra:,} rows more than the other."
        rows_compared = comparison.rows_compared
        yield _tell("equal copies", roles, rows_compared=rows_compared, follows=follows)
    else:
        yield from _drift(roles, reads, predicts, comparison)
    if comparison is not None and comparison.not_finite_rows:
        yield _tell("not finite", roles, rows=comparison.not_finite_rows)
    if extra:
        shorter, longer = sorted((reads, predicts), key=lambda matrix: matrix.shape[0])
        rows, follows = shorter.shape[0], PADDING if decision.is_sound else TWO_SIZES
        if longer.is_decodable:
            nonzero = nonzero_rows(longer, rows, rows + extra)
            follows = f"{nonzero:,} of them hold numbers other than zero. {follows}"
        beyond = TOKENS if rows == checkpoint.vocabulary else f"rows of {shorter.name}"
        words = {"extra_rows": extra, "rows": rows, "beyond": beyond, "follows": follows}
        yield _tell("padded", roles, name=longer, **words)


def _drift(
    roles: Roles, reads: StoredTensor, predicts: StoredTensor, comparison: Comparison
) -> Iterator[Finding]:
    """Tell how far apart two matrices are, and which of them looks like an initialization."""
    cosine, gap = comparison.cosine, ""
    if comparison.largest == 0:
        gap = "Where they differ, one of the two numbers is infinite or none at all. "
    elif comparison.largest is not None:
        gap = f"The largest difference of two finite numbers is {comparison.largest:.3g}. "
    first = ", ".join(map(str, comparison.first_rows))
    angle = "unknown" if cosine is None else f"{cosine:.4f}"
    words = vars(comparison) | {"first": first, "gap": gap, "angle": angle}
    yield _tell("drifted", roles, cause=_likely_cause(comparison), **words)
    n_items = comparison.rows_compared * reads.shape[1]
    if cosine is None or abs(cosine) > 0.02 + 5 / n_items**0.5:  # they are related
        return
    for matrix in (predicts, reads):
        if fresh := initialization(matrix):
            mean, std, looks = fresh
            words = {"mean": mean, "std": std, "cosine": cosine, "initialization": looks}
            yield _tell("fresh", roles, name=matrix, **words)


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


def _not_compared(roles: Roles, *heads: StoredTensor) -> Finding:
    listed = ", ".join(f"{head.name} ({size(head.shape)}, {head.dtype})" for head in heads)
    return _tell("not comparable", roles, reads=roles.matrix.dtype, heads=listed)
