"""What an audit has to tell: each fact about the matrices that were found, put into words."""

from __future__ import annotations

from tiedgpt.tie import explanations as words
from tiedgpt.tie.candidates import Roles
from tiedgpt.tie.comparison import Comparison, nonzero_rows, spread
from tiedgpt.tie.explanations import Finding
from tiedgpt.weights.stored import Inventory, StoredTensor

ONE_LAYOUT = ("safetensors", "torch")
"""Formats whose loaders take a head only as (V, D)."""
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


def is_one(reads: StoredTensor, predicts: StoredTensor) -> bool:
    """Whether the two lie on the same bytes."""
    return predicts is reads or reads.storage.overlaps(predicts.storage)


def have_two_owners(reads: StoredTensor, predicts: StoredTensor) -> bool:
    """Whether an optimizer would find two Parameters."""
    return reads.owner != predicts.owner and (reads.trainable or predicts.trainable)


def collect(
    inventory: Inventory,
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
    if reads is None or predicts is None:
        found += _of_one(inventory, reads, predicts)
    elif is_one(reads, predicts):
        found += _of_shared(inventory, roles, reads, predicts)
    elif layout is None or not layout.fits:
        found.append(words.unlike(reads, predicts))
    else:
        found += _of_two(inventory, reads, predicts, layout, comparison)
    found += _of_padding(inventory, reads, predicts, layout)
    found += [words.misspelt(key) for key in MISSPELT if key in inventory.config]
    live = inventory.format == "module"
    claim = words.agreement(
        inventory.claim, inventory.claim_source, verdict, sound=sound, live=live
    )
    return [*found, claim]


def _of_one(
    inventory: Inventory, reads: StoredTensor | None, predicts: StoredTensor | None
) -> list[Finding]:
    matrix = reads or predicts
    assert matrix is not None
    if inventory.claim is False:
        return [words.missing_head(matrix, inventory.claim_source)]
    return [words.one_matrix(matrix) if reads else words.only_head(matrix)]


def _of_shared(
    inventory: Inventory, roles: Roles, reads: StoredTensor, predicts: StoredTensor
) -> list[Finding]:
    names = [reads.name, *(tensor.name for tensor in roles.others)]
    found = [
        words.one_matrix(reads) if len(names) == 1 else words.same_storage(reads, predicts, names)
    ]
    if inventory.claim is False:
        found.append(words.shared_though_claimed_apart(reads, inventory.claim_source))
    if have_two_owners(reads, predicts):
        found.append(words.two_owners(reads, predicts))
    if Layout(reads, predicts).transposed and inventory.format in ONE_LAYOUT:
        found.append(words.transposed(predicts, wrong=True))
    return found


def _of_two(
    inventory: Inventory,
    reads: StoredTensor,
    predicts: StoredTensor,
    layout: Layout,
    comparison: Comparison | None,
) -> list[Finding]:
    live = inventory.format == "module"
    lies = ", transposed" if layout.transposed else ""
    found: list[Finding] = []
    if comparison is None:
        found.append(words.not_compared(reads, predicts))
    elif comparison.equal:
        found.append(words.equal_copies(reads, predicts, comparison, live=live, layout=lies))
    else:
        found.append(words.drifted(reads, predicts, comparison, layout=lies))
        found += _of_noise(reads, predicts, layout, comparison)
    if comparison is not None and comparison.not_finite_rows:
        found.append(words.not_finite(comparison.not_finite_rows))
    if layout.transposed:
        found.append(words.transposed(predicts, wrong=inventory.format in ONE_LAYOUT))
    if layout.extra:
        longer, rows = (predicts, reads.shape[0]) if layout.extra > 0 else (reads, layout.head_rows)
        across = layout.transposed and longer is predicts
        end = rows + abs(layout.extra)
        nonzero = (
            nonzero_rows(longer, rows, end, transposed=across) if longer.is_decodable else None
        )
        wrong = inventory.claim is not False
        found.append(words.padded(longer, rows, abs(layout.extra), nonzero, wrong=wrong))
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
        measured = spread(matrix, transposed=across)
        looks = measured.fresh if measured else None
        if measured and looks:
            found.append(words.fresh(matrix, looks, measured.mean, measured.std, cosine))
    return found


def _of_padding(
    inventory: Inventory,
    reads: StoredTensor | None,
    predicts: StoredTensor | None,
    layout: Layout | None,
) -> list[Finding]:
    """Hold the rows against the config's vocabulary."""
    vocabulary = inventory.config.get("vocab_size")
    matrix = reads or predicts
    if type(vocabulary) is not int or matrix is None or matrix.shape[0] <= vocabulary:
        return []
    if layout is not None and layout.extra < 0:
        return []  # said already
    return [words.padded(matrix, vocabulary, matrix.shape[0] - vocabulary, None, wrong=False)]
