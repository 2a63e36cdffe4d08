"""What an audit has to tell: each fact about the matrices that were found, put into words."""

from __future__ import annotations

from tiedgpt.tie import explanations as words
from tiedgpt.tie.candidates import ONE_LAYOUT, Roles
from tiedgpt.tie.explanations import Finding, size
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.comparison import Comparison, nonzero_rows, statistics
from tiedgpt.weights.tensors import StoredTensor

MISSPELT = ("tie_word_embedding", "tie_embeddings", "tied_word_embeddings", "tie_weights")


class Layout:
    """How a head of some shape lies to an embedding (V, D)."""

    def __init__(
        self, reads: StoredTensor, predicts: StoredTensor, *, transposed: bool | None = None
    ) -> None:
        rows, width = reads.shape
        if transposed is None:
            transposed = predicts.shape[1] != width and predicts.shape[0] == width
            if predicts.shape[0] == width != rows and predicts.shape[1] == rows:
                transposed = True
        self.transposed = transposed
        self.head_rows, head_width = predicts.shape[::-1] if transposed else predicts.shape
        self.fits = head_width == width
        self.extra = self.head_rows - rows if self.fits else 0
        """Rows that the head has more (or, negative, fewer) than the embedding."""


def is_turned(checkpoint: Checkpoint, matrix: StoredTensor) -> bool:
    """Whether a matrix lies transposed in the file, and is seen here as it should lie."""
    return checkpoint.tensors[matrix.name].shape != matrix.shape


def is_one(reads: StoredTensor, predicts: StoredTensor) -> bool:
    """Whether the two are all of the same bytes in the same order, straight or transposed."""
    return predicts is reads or reads.is_view_of(predicts)


def have_two_owners(reads: StoredTensor, predicts: StoredTensor) -> bool:
    """Whether an optimizer would find two Parameters."""
    return reads.owner != predicts.owner and (reads.trainable or predicts.trainable)


def collect(
    checkpoint: Checkpoint,
    roles: Roles,
    layout: Layout | None,
    comparison: Comparison | None,
    verdict: str,
    *,
    sound: bool,
) -> list[Finding]:
    """Return all that there is to tell, the matrices first and the claim last."""
    reads, predicts = roles.input, roles.output
    found: list[Finding] = []
    if reads is not None and checkpoint.derived:
        found.append(_derived(reads, checkpoint.derived))
    elif reads is not None and roles.hidden:
        found.append(_hidden_head(reads, roles.hidden))
    elif verdict == "no head":
        matrix = reads or predicts
        assert matrix is not None
        found.append(_headless(matrix))
    elif reads is None or predicts is None:
        found += _of_one(checkpoint, reads, predicts)
    elif is_one(reads, predicts):
        found += _of_shared(checkpoint, roles, reads, predicts)
    elif layout is None or not layout.fits:
        found.append(words.unlike(reads, predicts))
    else:
        found += _of_two(checkpoint, reads, predicts, layout, comparison)
    if reads is not None and is_turned(checkpoint, reads):
        found.append(words.transposed(checkpoint.tensors[reads.name], wrong=True))
    found += _of_padding(checkpoint, reads, predicts, layout)
    found += [words.misspelt(key) for key in MISSPELT if key in checkpoint.config]
    if verdict == "no head":
        return found  # a claim about the head says nothing here
    live = checkpoint.format == "module"
    claim = words.agreement(
        checkpoint.claim, checkpoint.claim_source, verdict, sound=sound, live=live
    )
    return [*found, claim]


def _of_one(
    checkpoint: Checkpoint, reads: StoredTensor | None, predicts: StoredTensor | None
) -> list[Finding]:
    matrix = reads or predicts
    assert matrix is not None
    if checkpoint.claim is False:
        return [words.missing_head(matrix, checkpoint.claim_source)]
    return [words.one_matrix(matrix) if reads else words.only_head(matrix)]


def _of_shared(
    checkpoint: Checkpoint, roles: Roles, reads: StoredTensor, predicts: StoredTensor
) -> list[Finding]:
    names = [reads.name, *(tensor.name for tensor in roles.others)]
    found = [
        words.one_matrix(reads) if len(names) == 1 else words.same_storage(reads, predicts, names)
    ]
    if checkpoint.claim is False:
        found.append(words.shared_though_claimed_apart(reads, checkpoint.claim_source))
    if have_two_owners(reads, predicts):
        found.append(words.two_owners(reads, predicts))
    if Layout(reads, predicts).transposed and checkpoint.format in ONE_LAYOUT:
        found.append(words.transposed(predicts, wrong=True))
    return found


def _of_two(
    checkpoint: Checkpoint,
    reads: StoredTensor,
    predicts: StoredTensor,
    layout: Layout,
    comparison: Comparison | None,
) -> list[Finding]:
    live = checkpoint.format == "module"
    lies = ", transposed" if layout.transposed else ""
    found: list[Finding] = []
    if reads.storage.overlaps(predicts.storage):
        found.append(_overlapping(reads, predicts))
    if comparison is None:
        found.append(words.not_compared(reads, predicts))
    elif comparison.equal:
        found.append(
            words.equal_copies(
                reads, predicts, comparison, live=live, layout=lies, extra=layout.extra
            )
        )
    else:
        found.append(words.drifted(reads, predicts, comparison, layout=lies))
        found += _of_noise(reads, predicts, layout, comparison)
    if comparison is not None and comparison.not_finite_rows:
        found.append(words.not_finite(comparison.not_finite_rows))
    if layout.transposed:
        found.append(words.transposed(predicts, wrong=checkpoint.format in ONE_LAYOUT))
    if layout.extra:
        longer, rows = (predicts, reads.shape[0]) if layout.extra > 0 else (reads, layout.head_rows)
        across = layout.transposed and longer is predicts
        end = rows + abs(layout.extra)
        nonzero = (
            nonzero_rows(longer, rows, end, transposed=across) if longer.is_decodable else None
        )
        wrong = checkpoint.claim is not False
        shorter = reads if longer is predicts else predicts
        beyond = f"rows of {shorter.name}"
        if checkpoint.vocabulary == rows:
            beyond = "tokens that config.json tells of"
        found.append(words.padded(longer, rows, abs(layout.extra), nonzero, beyond, wrong=wrong))
    return found


def _of_noise(
    reads: StoredTensor, predicts: StoredTensor, layout: Layout, comparison: Comparison
) -> list[Finding]:
    """Say so where one of two unrelated matrices looks like an initialisation."""
    cosine = comparison.cosine
    n_items = comparison.rows_compared * reads.shape[1]
    if cosine is None or abs(cosine) > 0.02 + 5 / n_items**0.5:
        return []
    found = []
    for matrix, across in ((predicts, layout.transposed), (reads, False)):
        measured = statistics(matrix, transposed=across)
        looks = measured.initialization if measured else None
        if measured and looks:
            found.append(words.fresh(matrix, looks, measured.mean, measured.std, cosine))
    return found


def _of_padding(
    checkpoint: Checkpoint,
    reads: StoredTensor | None,
    predicts: StoredTensor | None,
    layout: Layout | None,
) -> list[Finding]:
    """Hold the rows against the config's vocabulary."""
    vocabulary = checkpoint.vocabulary
    matrix = reads or predicts
    if vocabulary is None or matrix is None or matrix.shape[0] <= vocabulary:
        return []
    if layout is not None and layout.extra < 0:
        return []  # said already
    extra = matrix.shape[0] - vocabulary
    told = "tokens that config.json tells of"
    return [words.padded(matrix, vocabulary, extra, None, told, wrong=False)]


def _overlapping(reads: StoredTensor, predicts: StoredTensor) -> Finding:
    """Two matrices with bytes in common."""
    return Finding(
        "overlap",
        f"{predicts.name} and {reads.name} are different views of one storage",
        f"{reads.name} ({size(reads.shape)}) and {predicts.name} ({size(predicts.shape)}) lie in "
        "one allocation, interleaved, shifted or one within the other. They are two matrices: "
        "token for token, they do not take their numbers from the same place.",
        {"reads": reads.shape, "predicts": predicts.shape},
    )


def _hidden_head(reads: StoredTensor, hidden: tuple[StoredTensor, ...]) -> Finding:
    """Something predicts that is no readable matrix."""
    listed = ", ".join(f"{t.name} ({size(t.shape)}, {t.dtype})" for t in hidden[:4])
    return Finding(
        "not comparable",
        "there is a head of its own, and its numbers are not read here",
        f"{reads.name} ({size(reads.shape)}) reads; by its name, {listed} predicts: quantized, "
        "packed, or stored in parts. Whether it holds the embedding's numbers is not known here. "
        "Compare the file it was made from.",
        {"reads": reads.dtype, "predicts": [t.name for t in hidden[:4]]},
    )


def _derived(reads: StoredTensor, why: str) -> Finding:
    """The head of a module in memory is not W."""
    return Finding(
        "derived",
        "the head computes with something derived from or other than W",
        f"{reads.name} ({size(reads.shape)}) reads, and the head {why}: what it multiplies with is "
        "not W itself, even where W is an ingredient. Merge or remove that first, then look again.",
        {"why": why},
    )


def _headless(matrix: StoredTensor) -> Finding:
    """Nothing predicts tokens."""
    return Finding(
        "no head",
        "no head: this model does not predict tokens",
        f"{matrix.name} ({size(matrix.shape)}) reads. By its architecture this is a bare body or a "
        "classifier: it needs no head over the vocabulary, so there is no tie to judge.",
        {"shape": matrix.shape},
    )
