"""What an audit tells its reader: each fact about the matrices in plain sentences.

    findings(checkpoint, roles, comparison, verdict)    a Finding for each fact

TEXTS holds every sentence of the audit: what is there, what follows from it, what to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tiedgpt.tie.roles import ONE_LAYOUT, Roles
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.comparison import Comparison, nonzero_rows, statistics
from tiedgpt.weights.tensors import StoredTensor, printable

SOUND = ("tied", "tied twice", "untied as claimed", "no head")
"""Verdicts with which nothing is wrong."""
MISSPELT = ("tie_word_embedding", "tie_embeddings", "tied_word_embeddings", "tie_weights")

TEXTS = {
    # one matrix
    "one matrix": (
        "{matrix} reads and predicts",
        "There is one matrix of {matrix_size}, {matrix}, and no second one. Reading a token looks "
        "up its row. Predicting a token takes the dot product of the last hidden state with the "
        "same row: logits = h W^T. Its {parameters:,} numbers are stored, counted and trained "
        "once.",
    ),
    "only a head": (
        "the one matrix has the head's name, {matrix}",
        "There is one matrix of {matrix_size}, {matrix}, and none under an embedding's name. In a "
        "tied model it is the embedding too, and tiedgpt loads it so. Other readers look for the "
        "embedding's name and may fill it with random numbers. `tiedgpt tie fix` renames it if the "
        "other names tell the family (GPT-2 and GPT); otherwise rename it yourself.",
    ),
    "same storage": (
        "{output} is {input}",
        "{all_names} are names of the same {bytes} bytes: one matrix of {input_size}. Learning to "
        "predict a token also changes how the token is read. A count by names counts it twice; it "
        "is one.",
    ),
    "two parameters on one storage": (
        "{output} and {input} are two Parameters on the same bytes",
        "The bytes of the {input_size} matrix are shared, but two Parameter objects hold them "
        "(load_state_dict(assign=True) does this). An optimizer sees two parameters, each with "
        "half of the gradient and with moments of its own, and steps the matrix twice. A deep copy "
        "or a move to another device makes two matrices of them. Share the object: "
        "tiedgpt.tie.tie(model).",
    ),
    "shared against the claim": (
        "two matrices are claimed, and there is one",
        "{claim_source}, and both names hold the same {input_size} matrix: it is tied. A reader "
        "that believes the claim looks for a second matrix. Correct the claim, or untie.",
    ),
    "missing": (
        "an untied head is claimed, and there is one matrix",
        "{claim_source}, so two matrices of {matrix_size} are expected; only {matrix} is there. "
        "Either the claim is wrong and the one matrix does both, or the head was lost when this "
        "was saved. It must not be made up. `tiedgpt tie fix` corrects the claim; if the head was "
        "trained, go back to the file that still has it.",
    ),
    # no matrix that predicts
    "no head": (
        "no head: this model does not predict tokens",
        "{matrix} ({matrix_size}) reads. By its architecture this is a bare body or a classifier. "
        "It needs no head over the vocabulary, so there is no tie to judge.",
    ),
    "derived": (
        "the head multiplies with something derived from W, or with something else",
        "{matrix} ({matrix_size}) reads. The head {why}: it does not multiply with W itself, even "
        "if W is part of the result. Merge or remove that first, then audit again.",
    ),
    "unreadable": (
        "there is an untied head whose numbers are not read here",
        "{matrix} ({matrix_size}) reads. By its name, {heads} predicts; it is quantized, packed, "
        "or stored in parts. Whether it holds the embedding's numbers is not known here. Audit the "
        "file that it was made from.",
    ),
    # two matrices
    "shapes": (
        "{output} does not fit {input}",
        "{input} is {input_size} and {output} is {output_size}. Their widths differ, so one cannot "
        "be the other, straight or transposed. The head belongs to another model, or predicts "
        "something other than tokens.",
    ),
    "overlap": (
        "{output} and {input} are different views of one storage",
        "{input} ({input_size}) and {output} ({output_size}) lie in one allocation: interleaved, "
        "shifted, or one inside the other. They are two matrices: a token's two rows are not the "
        "same numbers.",
    ),
    "not compared": (
        "{input} and {output} were not compared",
        "{input} is {input_dtype} and {output} is {output_dtype}, of {input_size} and "
        "{output_size}. They are two matrices. How far apart they are is not known here, because "
        "at least one of them cannot be decoded (a quantized type, or no data). Audit the file "
        "that it was made from.",
    ),
    "equal copies": (
        "{output} is a second copy of {input}",
        "{input} ({input_size}) and {output} ({output_size}{transposed}) are two tensors and equal "
        "in all {rows_compared:,} rows that both have. {follows}",
    ),
    "drifted": (
        "{output} differs from {input} in {differing_rows:,} of {rows_compared:,} rows",
        "{input} ({input_size}) gives a token's vector when it is read; {output} "
        "({output_size}{transposed}) gives the vector that its logit is computed with. They are "
        "two matrices and differ in {differing_rows:,} of {rows_compared:,} rows, first at token "
        "{first}. {gap}Their cosine is {angle}. {cause}",
    ),
    "fresh": (
        "{name} looks freshly initialized",
        "The numbers of {name} ({name_size}) have mean {mean:.2g} and standard deviation "
        "{std:.3g}, rows of nearly one length, no heavy tails, and cosine {cosine:.3f} with the "
        "other matrix: they look like {initialization}, never trained. A loader that does not find "
        "this matrix and makes one up leaves exactly this.",
    ),
    "not finite": (
        "{rows:,} rows hold numbers that are not finite",
        "{rows:,} rows hold an infinity or NaN. In a tied matrix such a row spoils both reading "
        "and predicting: every logit of that token is NaN.",
    ),
    # the layout of a matrix, the config, the claim
    "transposed": (
        "{name} is stored transposed",
        "{name} is {name_size}: its columns, not its rows, are tokens. {follows}",
    ),
    "padded": (
        "{name} has {extra_rows:,} rows more than the {rows:,} {beyond}",
        "{name} is {name_size}: {extra_rows:,} rows beyond the {rows:,} {beyond}.{filled} "
        "{follows}",
    ),
    "config": (
        "config.json has {key!r}, which nothing reads",
        "The key is tie_word_embeddings; {key!r} is ignored, so it changes nothing.",
    ),
    "nothing is claimed": (
        "nothing is claimed, and all is sound",
        "{claim_source}. The matrices are sound: {verdict}.",
    ),
    "the claim holds": (
        "the claim holds",
        "{claim_source}. The matrices agree with it: {verdict}.",
    ),
    "the claim does not hold": (
        "the claim does not hold",
        "{claim_source}. The matrices contradict it.",
    ),
    "broken": (
        "the tie is broken",
        "{claim_source}{by_default}. Readers treat two matrices differently: some keep both, some "
        "silently drop one. Choose: keep the input's numbers, keep the output's, or declare them "
        "untied ({how}).",
    ),
}
"""Title and explanation of each finding."""

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
PADDING = (
    "Padding speeds up a product. No text maps to these ids, yet they take part in the softmax "
    "unless they are cut off."
)
SAME_ORIGIN = (
    "They probably began as one matrix and were trained apart: an adapter that copied the head, an "
    "optimizer with two parameters, or a conversion that lost the tie."
)
SOME_ROWS = (
    "Most rows are equal. Some tokens were changed on one side, as happens when tokens are added "
    "or retrained on a tied matrix whose two names have come apart."
)
HOW_LIVE = 'tiedgpt.tie.tie(model, keep="input" | "output"), or set tie_word_embeddings=False'
HOW_FILE = (
    "`tiedgpt tie fix --keep input | output | both`; on loading, "
    'resolve="keep-input" | "keep-output" | "untie"'
)


@dataclass(frozen=True)
class Finding:
    """One fact: a short title, an explanation in plain words, and the numbers behind it."""

    kind: str
    title: str
    explain: str
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; numbers that are not finite become null."""
        return plain(vars(self))


def plain(value: Any) -> Any:
    """Return a value that JSON can hold."""
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


def findings(
    checkpoint: Checkpoint, roles: Roles, comparison: Comparison | None, verdict: str
) -> tuple[Finding, ...]:
    """Return all there is to tell: the matrices first, the claim last."""
    return tuple(_Report(checkpoint, roles, comparison, verdict).all())


@dataclass(frozen=True)
class _Report:
    checkpoint: Checkpoint
    roles: Roles
    comparison: Comparison | None
    verdict: str

    def tell(
        self, text: str, kind: str = "", words: Mapping[str, str] | None = None, **numbers: Any
    ) -> Finding:
        """Fill in one of TEXTS: with names and sizes, with `words`, and with `numbers`."""
        roles = self.roles
        known = {
            "claim_source": self.checkpoint.claim_source,
            "verdict": self.verdict,
            "transposed": ", transposed" if roles.output_transposed else "",
            **_names(matrix=roles.matrix, input=roles.input, output=roles.output),
            **(words or {}),
        }
        title, explain = (printable(part.format(**known | numbers)) for part in TEXTS[text])
        return Finding(kind or text, title, explain, numbers)

    def all(self) -> Iterator[Finding]:
        """Yield the findings in the order in which they are read."""
        checkpoint, roles = self.checkpoint, self.roles
        yield from self.of_the_matrices()
        if roles.input_transposed:
            yield self.transposed(checkpoint.tensors[roles.matrix.name], wrong=True)
        vocabulary, rows = checkpoint.vocabulary, roles.matrix.shape[0]
        told_already = roles.pair is not None and roles.extra_rows < 0
        if vocabulary is not None and rows > vocabulary and not told_already:
            yield self.padded(roles.matrix, vocabulary, rows - vocabulary, None, PADDING)
        for key in MISSPELT:
            if key in checkpoint.config:
                yield self.tell("config", key=key)
        if self.verdict != "no head":  # otherwise a claim about the head means nothing
            yield self.claim()

    def of_the_matrices(self) -> Iterator[Finding]:
        checkpoint, roles, matrix = self.checkpoint, self.roles, self.roles.matrix
        alone: dict[str, Any] = {"shape": matrix.shape, "parameters": matrix.count}
        untied = checkpoint.claim is False
        if roles.input is not None and checkpoint.derived:
            yield self.tell("derived", why=checkpoint.derived)
        elif roles.input is not None and roles.unreadable:
            heads = roles.unreadable[:4]
            words = {"heads": ", ".join(f"{t.name} ({size(t.shape)}, {t.dtype})" for t in heads)}
            names = [tensor.name for tensor in heads]
            yield self.tell(
                "unreadable", "not comparable", words, reads=matrix.dtype, predicts=names
            )
        elif self.verdict == "no head":
            yield self.tell("no head", shape=matrix.shape)
        elif roles.pair is None and untied:
            yield self.tell("missing", shape=matrix.shape)
        elif roles.pair is None or (roles.shared and not roles.aliases):
            yield self.tell("one matrix" if roles.input else "only a head", "one matrix", **alone)
        elif roles.shared:
            names = [matrix.name, *(tensor.name for tensor in roles.aliases)]
            words = {"all_names": " and ".join(names), "bytes": f"{matrix.n_bytes:,}"}
            yield self.tell("same storage", words=words, shape=matrix.shape, names=names)
        elif not roles.fits:
            reads, predicts = roles.pair
            yield self.tell("shapes", reads=reads.shape, predicts=predicts.shape)
        else:
            yield from self.of_two(*roles.pair)
        if roles.pair is not None and roles.shared and not checkpoint.derived:
            if untied:
                yield self.tell("shared against the claim", "claim", shape=matrix.shape)
            if roles.two_parameters:
                yield self.tell("two parameters on one storage", shape=matrix.shape)
            if roles.output_transposed and checkpoint.format in ONE_LAYOUT:
                yield self.transposed(roles.pair[1], wrong=True)

    def of_two(self, reads: StoredTensor, predicts: StoredTensor) -> Iterator[Finding]:
        """Tell of two matrices of one width."""
        roles, comparison = self.roles, self.comparison
        across = roles.output_transposed
        if reads.storage.overlaps(predicts.storage):
            yield self.tell("overlap", reads=reads.shape, predicts=predicts.shape)
        if comparison is None:
            yield self.tell(
                "not compared", "not comparable", reads=reads.dtype, predicts=predicts.dtype
            )
        elif comparison.equal:
            follows = f"Dropping one loses nothing: the copy takes {megabytes(predicts.n_bytes)}."
            if self.checkpoint.format == "module":
                follows = COPY_DRIFTS
            elif roles.extra_rows:
                follows = f"One of them has {abs(roles.extra_rows):,} rows more than the other."
            rows = comparison.rows_compared
            yield self.tell(
                "equal copies",
                words={"follows": follows},
                rows_compared=rows,
                wasted_bytes=predicts.n_bytes,
            )
        else:
            yield self.drifted(comparison)
            yield from self.fresh(comparison, predicts, across)
            yield from self.fresh(comparison, reads, False)
        if comparison is not None and comparison.not_finite_rows:
            yield self.tell("not finite", rows=comparison.not_finite_rows)
        if across:
            yield self.transposed(predicts, wrong=self.checkpoint.format in ONE_LAYOUT)
        if roles.extra_rows:
            longer, shorter = (predicts, reads) if roles.extra_rows > 0 else (reads, predicts)
            rows, end = sorted((reads.shape[0], roles.head_shape[0]))
            nonzero = None
            if longer.is_decodable:
                turned = across and longer is predicts
                nonzero = nonzero_rows(longer, rows, end, transposed=turned)
            follows = PADDING if self.checkpoint.claim is False else TWO_SIZES
            yield self.padded(longer, rows, end - rows, nonzero, follows, f"rows of {shorter.name}")

    def drifted(self, comparison: Comparison) -> Finding:
        c = comparison
        gap = ""
        if c.largest is not None:
            gap = f"The largest difference of two finite numbers is {c.largest:.3g}. "
            if c.largest == 0:
                gap = "Where they differ, one of the two numbers is infinite or none at all. "
        words = {
            "first": ", ".join(map(str, c.first_rows)),
            "gap": gap,
            "angle": "unknown" if c.cosine is None else f"{c.cosine:.4f}",
            "cause": _likely_cause(c),
        }
        numbers = {key: value for key, value in vars(c).items() if key != "not_finite_rows"}
        return self.tell("drifted", words=words, **numbers)

    def fresh(
        self, comparison: Comparison, matrix: StoredTensor, transposed: bool
    ) -> Iterator[Finding]:
        """Tell if one of two unrelated matrices looks like an initialization."""
        cosine = comparison.cosine
        n_items = comparison.rows_compared * self.roles.matrix.shape[1]
        if cosine is None or abs(cosine) > 0.02 + 5 / n_items**0.5:
            return
        measured = statistics(matrix, transposed=transposed)
        if measured is not None and measured.initialization is not None:
            words = {**_names(name=matrix), "initialization": measured.initialization}
            yield self.tell("fresh", "", words, mean=measured.mean, std=measured.std, cosine=cosine)

    def padded(
        self,
        longer: StoredTensor,
        rows: int,
        extra: int,
        nonzero: int | None,
        follows: str,
        beyond: str = "",
    ) -> Finding:
        """Tell of rows beyond those of the other matrix, or beyond the config's vocabulary."""
        if not beyond or rows == self.checkpoint.vocabulary:
            beyond = "tokens that config.json tells of"
        filled = "" if nonzero is None else f" {nonzero:,} of them hold numbers other than zero."
        words = {**_names(name=longer), "beyond": beyond, "filled": filled, "follows": follows}
        return self.tell("padded", "", words, extra_rows=extra, rows=rows, nonzero_rows=nonzero)

    def transposed(self, matrix: StoredTensor, *, wrong: bool) -> Finding:
        words = {**_names(name=matrix), "follows": TURN_IT if wrong else STORED_SO}
        return self.tell("transposed", words=words, shape=matrix.shape)

    def claim(self) -> Finding:
        claim = self.checkpoint.claim
        if self.verdict in SOUND:
            return self.tell(
                "nothing is claimed" if claim is None else "the claim holds", "claim", claim=claim
            )
        if claim is False:
            return self.tell("the claim does not hold", "claim", claim=claim)
        by_default = "" if claim else ", and a GPT is tied unless something says otherwise"
        how = HOW_LIVE if self.checkpoint.format == "module" else HOW_FILE
        return self.tell("broken", "claim", {"by_default": by_default, "how": how}, claim=claim)


def _names(**tensors: StoredTensor | None) -> dict[str, str]:
    words: dict[str, str] = {}
    for word, tensor in tensors.items():
        if tensor is not None:
            words |= {word: tensor.name, f"{word}_size": size(tensor.shape)}
            words[f"{word}_dtype"] = tensor.dtype
    return words


def _likely_cause(comparison: Comparison) -> str:
    if comparison.within_rounding:
        return "Rounding to the coarser of their types explains all differences."
    if comparison.cosine is None:
        return "One of them is zero or holds numbers that are not finite."
    if comparison.differing_rows < comparison.rows_compared / 2:
        return SOME_ROWS
    if comparison.cosine > 0.9:
        return SAME_ORIGIN
    if comparison.cosine > 0.2:
        return "They are related but far apart: the head was probably trained as its own matrix."
    return "They have nothing in common: the head was probably replaced or never loaded."
