"""The words under each finding: what is there, with its shapes, what follows, what to do.

Plain data in, plain text out; whoever shows it decides how.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tiedgpt.weights.comparison import Comparison
from tiedgpt.weights.tensors import StoredTensor


@dataclass(frozen=True)
class Finding:
    """One thing that was found: a short title, numbers, and an explanation in plain words."""

    kind: str
    title: str
    explain: str
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; what is no finite number becomes null."""
        numbers = {key: plain(value) for key, value in self.numbers.items()}
        return {
            "kind": self.kind, "title": self.title, "explain": self.explain, "numbers": numbers,
        }  # fmt: skip


def plain(value: Any) -> Any:
    """Return a value that JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value


def size(shape: tuple[int, ...]) -> str:
    """Return a shape as people write it: 50,257 x 768."""
    return " x ".join(f"{n:,}" for n in shape) if shape else "one number"


def megabytes(n_bytes: int) -> str:
    """Return bytes as people write them."""
    return f"{n_bytes / 1e6:,.1f} MB" if n_bytes >= 50_000 else f"{n_bytes:,} bytes"


def one_matrix(matrix: StoredTensor, *, padded_to: str = "") -> Finding:
    """Nothing but the embedding reads and predicts."""
    return Finding(
        "one matrix",
        f"{matrix.name} reads and predicts",
        f"There is one matrix of {size(matrix.shape)}, {matrix.name}, and no second one. A token "
        "that is read is its row; a token that is predicted is scored by the dot product of the "
        f"last state with the same row: logits = h W^T. Its {matrix.count:,} numbers are stored, "
        f"counted and trained once.{padded_to}",
        {"shape": matrix.shape, "parameters": matrix.count},
    )


def only_head(head: StoredTensor) -> Finding:
    """The one matrix stands under the head's name."""
    return Finding(
        "one matrix",
        f"the one matrix stands under the head's name, {head.name}",
        f"There is one matrix of {size(head.shape)}, {head.name}, and none under an embedding's "
        "name. Tied, it is the embedding too, and tiedgpt loads it so; other readers look for the "
        "embedding's name and may fill it with random numbers. `tiedgpt tie fix` renames it where "
        "the other names tell the family (GPT-2 and GPT), and asks you to elsewhere.",
        {"shape": head.shape},
    )


def same_storage(reads: StoredTensor, predicts: StoredTensor, names: list[str]) -> Finding:
    """Two names, one storage."""
    return Finding(
        "same storage",
        f"{predicts.name} is {reads.name}",
        f"{' and '.join(names)} are names of the same {reads.n_bytes:,} bytes: one matrix of "
        f"{size(reads.shape)}. What is learned by predicting a token changes how it is read. "
        "Counting by name finds it twice; there is one.",
        {"shape": reads.shape, "names": names},
    )


def two_owners(reads: StoredTensor, predicts: StoredTensor) -> Finding:
    """One storage, two Parameters."""
    return Finding(
        "two parameters on one storage",
        f"{predicts.name} and {reads.name} are two Parameters on the same bytes",
        f"The bytes of the {size(reads.shape)} matrix are shared, but two Parameter objects hold "
        "them (load_state_dict(assign=True) does this). An optimizer sees two, each with half of "
        "the gradient and moments of its own, and steps the matrix twice; a deep copy or a move to "
        "another device makes two matrices. Share the object: tiedgpt.tie.tie(model).",
        {"shape": reads.shape},
    )


def equal_copies(
    reads: StoredTensor,
    predicts: StoredTensor,
    comparison: Comparison,
    *,
    live: bool,
    layout: str,
    extra: int,
) -> Finding:
    """The same numbers, stored twice."""
    follows = (
        "Today they agree; the first training step moves each by its own gradient and they part. "
        "Share the one: tiedgpt.tie.tie(model)."
        if live
        else f"Nothing is lost by dropping one: {megabytes(predicts.n_bytes)} are spent on a copy."
        if extra == 0
        else f"One of them has {abs(extra):,} rows more, which the other does not hold."
    )
    return Finding(
        "equal copies",
        f"{predicts.name} is a second copy of {reads.name}",
        f"{reads.name} ({size(reads.shape)}) and {predicts.name} ({size(predicts.shape)}{layout}) "
        f"are two tensors and equal in all {comparison.rows_compared:,} rows they have in common. "
        + follows,
        {"rows_compared": comparison.rows_compared, "wasted_bytes": predicts.n_bytes},
    )


def drifted(
    reads: StoredTensor, predicts: StoredTensor, comparison: Comparison, *, layout: str
) -> Finding:
    """Two different matrices."""
    c = comparison
    cosine = "unknown" if c.cosine is None else f"{c.cosine:.4f}"
    largest = ""
    if c.largest is not None:
        largest = f" The largest difference of two finite numbers is {c.largest:.3g}."
        if c.largest == 0:
            largest = " Where they differ, one of the two numbers is infinite or none at all."
    first = ", ".join(map(str, c.first_rows))
    nature = (
        "All differences are what rounding to the coarser of their types gives."
        if c.within_rounding
        else _nature(c)
    )
    return Finding(
        "drifted",
        f"{predicts.name} differs from {reads.name} in {c.differing_rows:,} of "
        f"{c.rows_compared:,} rows",
        f"{reads.name} ({size(reads.shape)}) gives a token's vector when it is read; "
        f"{predicts.name} ({size(predicts.shape)}{layout}) gives the vector that its prediction is "
        f"scored with. They are two matrices and differ in {c.differing_rows:,} of "
        f"{c.rows_compared:,} rows, first at token {first}.{largest} Their "
        f"cosine is {cosine}. {nature}",
        {
            "differing_rows": c.differing_rows, "rows_compared": c.rows_compared,
            "first_rows": c.first_rows, "largest": c.largest, "cosine": c.cosine,
            "within_rounding": c.within_rounding,
        },
    )  # fmt: skip


def _nature(c: Comparison) -> str:
    if c.cosine is None:
        return "One of them is zero or holds numbers that are not finite."
    if c.differing_rows < c.rows_compared / 2:
        return (
            "Most rows are equal: some tokens were changed on one side, as happens when tokens "
            "are added or retrained on a tied matrix whose two names have come apart."
        )
    if c.cosine > 0.9:
        return (
            "They probably began as one matrix and were trained apart: an adapter that copied the "
            "head, an optimizer with two parameters, a conversion that lost the tie."
        )
    if c.cosine > 0.2:
        return (
            "They are related, but far apart: the head was probably trained as a matrix of its own."
        )
    return "They have nothing in common: the head was probably replaced or never loaded."


def transposed(predicts: StoredTensor, *, wrong: bool) -> Finding:
    """The head lies as (D, V)."""
    follows = (
        "Loaders of this format expect (V, D) and refuse it or, where V = D, misread it; "
        "`tiedgpt tie fix` puts it right where config.json tells V and D."
        if wrong
        else "That is how a product x W is stored here; the numbers are compared across."
    )
    return Finding(
        "transposed",
        f"{predicts.name} lies transposed",
        f"{predicts.name} is {size(predicts.shape)}: its columns, not its rows, are tokens. "
        + follows,
        {"shape": predicts.shape},
    )


def padded(
    longer: StoredTensor, rows: int, extra: int, nonzero: int | None, beyond: str, *, wrong: bool
) -> Finding:
    """One matrix has more rows than the other, or than there are tokens."""
    filled = "" if nonzero is None else f" {nonzero:,} of them hold numbers other than zero."
    follows = (
        " One matrix cannot have two sizes: loaders refuse this. `tiedgpt tie fix` keeps as many "
        "rows as config.json's vocab_size says, lists those that go, and asks where none is told."
        if wrong
        else " Padding speeds up a product; no text maps to these ids, yet they are in the softmax "
        "of whoever does not cut them off."
    )
    return Finding(
        "padded",
        f"{longer.name} has {extra:,} rows more than the {rows:,} {beyond}",
        f"{longer.name} is {size(longer.shape)}: {extra:,} rows beyond the {rows:,} {beyond}."
        f"{filled}{follows}",
        {"extra_rows": extra, "rows": rows, "nonzero_rows": nonzero},
    )


def unlike(reads: StoredTensor, predicts: StoredTensor) -> Finding:
    """The two cannot be one matrix."""
    return Finding(
        "shapes",
        f"{predicts.name} does not fit {reads.name}",
        f"{reads.name} is {size(reads.shape)} and {predicts.name} is {size(predicts.shape)}: they "
        "do not share a width, so one cannot be the other, straight or transposed. The head "
        "belongs to another model, or predicts something other than tokens.",
        {"reads": reads.shape, "predicts": predicts.shape},
    )


def not_compared(reads: StoredTensor, predicts: StoredTensor) -> Finding:
    """Their numbers cannot be had."""
    return Finding(
        "not comparable",
        f"{reads.name} and {predicts.name} were not compared",
        f"{reads.name} is {reads.dtype} and {predicts.name} is {predicts.dtype}, of "
        f"{size(reads.shape)} and {size(predicts.shape)}. They are two "
        "matrices; how far apart their numbers are is not known here, since at least one of them "
        "cannot be decoded (a quantized type, or no data). Compare the file it was made from.",
        {"reads": reads.dtype, "predicts": predicts.dtype},
    )


def fresh(matrix: StoredTensor, looks: str, mean: float, std: float, cosine: float) -> Finding:
    """A matrix looks like random numbers."""
    return Finding(
        "fresh",
        f"{matrix.name} looks freshly initialised",
        f"The numbers of {matrix.name} ({size(matrix.shape)}) have mean {mean:.2g} and standard "
        f"deviation {std:.3g}, rows of nearly one length, no heavy tails, and cosine {cosine:.3f} "
        f"with the other matrix: they look like {looks}, never trained. A loader that did not find "
        "this matrix and made one up leaves exactly this.",
        {"mean": mean, "std": std, "cosine": cosine},
    )


def not_finite(n_rows: int) -> Finding:
    """There are infinities or NaN."""
    return Finding(
        "not finite",
        f"{n_rows:,} rows hold numbers that are not finite",
        f"{n_rows:,} rows hold an infinity or NaN. A tied matrix that has one poisons both reading "
        "and predicting: every logit of that token is NaN.",
        {"rows": n_rows},
    )


def missing_head(matrix: StoredTensor, claim_source: str) -> Finding:
    """Untied by claim, and one matrix."""
    return Finding(
        "missing",
        "a head of its own is claimed, and there is one matrix",
        f"{claim_source}, so two matrices of {size(matrix.shape)} are expected; only {matrix.name} "
        "is there. Either the claim is wrong, and the one matrix does both, or the head was lost "
        "when this was saved; nobody may make it up. `tiedgpt tie fix` corrects the claim; if the "
        "head was trained, go back to the file that still has it.",
        {"shape": matrix.shape},
    )


def shared_though_claimed_apart(reads: StoredTensor, claim_source: str) -> Finding:
    """Untied by claim, and one storage."""
    return Finding(
        "claim",
        "two matrices are claimed, and there is one",
        f"{claim_source}, and both names hold the same {size(reads.shape)} matrix: it is tied. "
        "Whoever believes the claim will look for a second matrix. Correct the claim, or untie it.",
        {"shape": reads.shape},
    )


def agreement(
    claim: bool | None, claim_source: str, verdict: str, *, sound: bool, live: bool
) -> Finding:
    """What is claimed, and whether it is so."""
    if sound:
        text = f"{claim_source}; what is there agrees with it: {verdict}."
        if claim is None:
            text = f"{claim_source}; what is there is sound: {verdict}."
        title = "nothing is claimed, and all is sound" if claim is None else "the claim holds"
        return Finding("claim", title, text, {"claim": claim})
    if claim is False:
        return Finding(
            "claim",
            "the claim does not hold",
            f"{claim_source}, and what is there contradicts it.",
            {"claim": claim},
        )
    mend = (
        '(tiedgpt.tie.tie(model, keep="input" | "output"), or set tie_word_embeddings=False).'
        if live
        else "(`tiedgpt tie fix --keep input | output | both`; on loading, "
        'resolve="keep-input" | "keep-output" | "untie").'
    )
    said = claim_source if claim else f"{claim_source}, and a GPT is tied unless something says so"
    return Finding(
        "claim",
        "the tie is broken",
        f"{said}. Readers differ in what they do with two matrices: some keep both, some silently "
        "drop one. Choose: keep the input's numbers, keep the output's, or declare them untied "
        + mend,
        {"claim": claim},
    )


def misspelt(key: str) -> Finding:
    """A key of the config that no reader knows."""
    return Finding(
        "config",
        f"config.json has {key!r}, which nothing reads",
        f"The key is tie_word_embeddings; {key!r} is silently ignored, so it changes nothing.",
        {"key": key},
    )
