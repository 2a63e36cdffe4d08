"""The findings of an audit: each fact about the matrices in plain sentences.

`TEXTS` has a title and an explanation for each finding. `list_findings` selects the findings by
the tie decision and fills in names, shapes and numbers; it decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tiedgpt.files import format_bytes, format_count
from tiedgpt.weights.checkpoint import TIE_KEY
from tiedgpt.weights.comparison import Comparison, count_nonzero_rows, detect_initialization
from tiedgpt.weights.decision import TieDecision
from tiedgpt.weights.tensors import StoredTensor, printable

MISSPELT = {"tie_word_embedding", "tie_embeddings", "tied_word_embeddings", "tie_weights"}
PADDING = "No text maps to these ids, yet they take part in the softmax unless they are cut off."
TEXTS = {
    "derived": (
        "the head multiplies with something derived from W, or with something else",
        "{w} ({shape}) reads. The head {why}: it does not multiply with W itself. Merge or remove "
        "that first, then audit again.",
    ),
    "not comparable": (
        "{w} and the head were not compared",
        "{w} ({shape}, {dtype}) reads and {heads} predicts. One of them is quantized, packed, in "
        "parts, or without data: audit the file that it was made from.",
    ),
    "no head": (
        "no head: this model does not predict tokens",
        "{w} ({shape}) reads. By its architecture this is a bare body or a classifier, so there "
        "is no tie to judge.",
    ),
    "missing": (
        "an untied head is claimed, and there is one matrix",
        "{claim}, but {w} ({shape}) has no second matrix beside it. Either the claim is wrong and "
        "the one matrix does both, or the head was lost when this was saved: go back to the file "
        "that still has it.",
    ),
    "one matrix": (
        "{w} reads and predicts",
        "There is one matrix of {shape}, {w}. Reading a token looks up its row. Predicting a token "
        "takes the dot product of the last hidden state with the same row: logits = h W^T. Its "
        "{count:,} numbers are stored, counted and trained once.",
    ),
    "one matrix, under the head's name": (
        "the one matrix has the head's name, {w}",
        "There is one matrix of {shape}, {w}. tiedgpt loads it as the embedding too; other readers "
        "may fill the embedding with random numbers. `tiedgpt tie fix` renames it for GPT-2 and "
        "GPT; otherwise rename it yourself.",
    ),
    "same storage": (
        "{head} is {w}",
        "{names} are names of the same {n_bytes:,} bytes: one matrix of {shape}. A count by names "
        "counts it {n_names} times.",
    ),
    "two parameters on one storage": (
        "{head} and {w} are two Parameters on the same bytes",
        "Two Parameter objects hold one {shape} matrix (load_state_dict(assign=True) does this). "
        "An optimizer steps the matrix twice, and the next copy or move makes two matrices. Share "
        "the object: tiedgpt.tie.tie(model).",
    ),
    "shapes": (
        "{head} does not fit {w}",
        "{w} is {shape} and {head} is {head_shape}. Their widths differ: the head belongs to "
        "another model, or predicts something other than tokens.",
    ),
    "equal copies": (
        "{head} is a second copy of {w}",
        "{w} ({shape}) and {head} ({head_shape}) are two tensors, equal in all {rows:,} rows that "
        "both have. {advice}",
    ),
    "drifted": (
        "{head} differs from {w} in {differing:,} of {rows:,} rows",
        "{w} ({shape}) reads; {head} ({head_shape}) predicts. The first tokens where they differ: "
        "{first}. {gap}Their cosine is {cosine}. {cause}",
    ),
    "fresh": (
        "{looks} freshly initialized",
        "{numbers} The cosine of the two is {cosine}. A loader that does not find a matrix and "
        "makes one up leaves exactly this.",
    ),
    "not finite": (
        "{spoiled} with numbers that are not finite",
        "In a tied matrix a row with an infinity or NaN spoils both reading and predicting.",
    ),
    "padded": ("{longer} has {extra:,} rows more than the {known}", "{sizes} {advice}"),
    "transposed": (
        "{names} {verb} stored transposed",
        "{sizes}: columns, not rows, are tokens. {advice}",
    ),
    "config": (
        "config.json has {key!r}, which nothing reads",
        "The key is {tie_key}; {key!r} is ignored, so it changes nothing.",
    ),
    "claim": ("{title}", "{text}"),
    "claim, with a command": ("{title}", "{text}\n{command}"),
    "does not load": (
        "tiedgpt does not load this file",
        "{why}. Run it with the library that wrote it, or remove what a GPT does not have.",
    ),
}
"""Title and explanation by kind. A key may add a variant to its kind after a comma."""


@dataclass(frozen=True)
class Finding:
    """One fact: a short title, and an explanation in plain words."""

    kind: str
    title: str
    explain: str


def list_findings(decision: TieDecision, load_error: str | None) -> tuple[Finding, ...]:
    """Return the findings of an audit: the matrices first, then the claim, then a load error."""
    roles, w = decision.roles, decision.roles.matrix
    names = {"w": w.name, "shape": format_shape(w.shape), "dtype": w.dtype, "count": w.count}
    if roles.output is not None:
        names |= {"head": roles.output.name, "head_shape": format_shape(roles.output.shape)}
    rows = [*_describe_one(decision), *_describe_two(decision), *_describe_sizes(decision)]
    if decision.kind != "no head":
        rows.append(_describe_claim(decision))
    if load_error is not None:
        rows.append(("does not load", {"why": load_error}))
    findings = []
    for key, values in rows:
        texts = {n: printable(v) if isinstance(v, str) else v for n, v in (names | values).items()}
        title, text = (line.format(**texts) for line in TEXTS[key])
        findings.append(Finding(key.partition(",")[0], title, text))
    return tuple(findings)


def format_shape(shape: tuple[int, ...]) -> str:
    """Return a shape as people write it: 50,257 x 768."""
    return " x ".join(f"{n:,}" for n in shape) if shape else "one number"


Findings = Iterator[tuple[str, dict[str, Any]]]
"""Keys of `TEXTS` with the values that their texts need beside the names of the matrices."""


def _describe_one(decision: TieDecision) -> Findings:
    """Yield the findings about one matrix: its names, and whether it predicts."""
    checkpoint, roles, w = decision.checkpoint, decision.roles, decision.roles.matrix
    if why := checkpoint.usage.head_computation:
        yield "derived", {"why": why}
        return
    heads = roles.unreadable[:4]
    if roles.pair and roles.has_one_width and not (roles.is_shared or roles.comparison):
        heads = roles.pair[1:]
    if heads:
        listed = (f"{head.name} ({format_shape(head.shape)}, {head.dtype})" for head in heads)
        yield "not comparable", {"heads": ", ".join(listed)}
    if decision.kind == "no head":
        yield "no head", {}
    if decision.kind == "contradicts the claim" and roles.pair is None:
        yield "missing", {"claim": decision.checkpoint.claim.source}
    if decision.kind == "tied" and roles.pair is None:
        yield "one matrix" if roles.input else "one matrix, under the head's name", {}
    if roles.is_shared:
        names = [w.name, *(tensor.name for tensor in roles.aliases)]
        sizes = {"n_bytes": w.n_bytes, "n_names": len(names)}
        yield "same storage", {"names": " and ".join(names), **sizes}
        if roles.has_two_parameters:
            yield "two parameters on one storage", {}


def _describe_two(decision: TieDecision) -> Findings:
    """Yield the findings about two matrices: how far apart they are, and rows of only one."""
    checkpoint, roles = decision.checkpoint, decision.roles
    comparison = roles.comparison
    if roles.pair is None or checkpoint.usage.head_computation:
        return
    if not roles.has_one_width:
        yield "shapes", {}
    if comparison is not None and comparison.equal:
        size = format_bytes(roles.pair[1].n_bytes)
        advice = f"Dropping one loses nothing: the copy takes {size}."
        if checkpoint.in_memory:
            advice = (
                "They agree now. The first training step moves each by its own gradient, and they "
                "drift apart. Share the one: tiedgpt.tie.tie(model)."
            )
        elif decision.is_turned_copy:
            advice = "The program that stores it so needs both: nothing is to mend."
        elif roles.extra_rows:
            advice = f"One of them has {abs(roles.extra_rows):,} rows more than the other."
        yield "equal copies", {"rows": comparison.rows_compared, "advice": advice}
    elif comparison is not None:
        yield from _describe_difference(*roles.pair, comparison)
    if comparison is not None and comparison.not_finite_rows:
        yield "not finite", {"spoiled": format_count(comparison.not_finite_rows, "row")}
    if roles.extra_rows:
        shorter, longer = sorted(roles.pair, key=lambda matrix: matrix.shape[0])
        other, n_rows = f"rows of {shorter.name}", shorter.shape[0]
        if n_rows == checkpoint.vocabulary:
            other = "tokens that config.json states"
        sizes = f"{longer.name} is {format_shape(longer.shape)}."
        if longer.is_decodable:
            nonzero = count_nonzero_rows(longer, n_rows)
            sizes += f" {nonzero:,} of them hold numbers other than zero."
        advice = PADDING if decision.is_sound else "One vocabulary has one size: loaders refuse it."
        extra = {"longer": longer.name, "extra": abs(roles.extra_rows)}
        yield "padded", {**extra, "known": f"{n_rows:,} {other}", "sizes": sizes, "advice": advice}


def _describe_difference(
    reads: StoredTensor, head: StoredTensor, comparison: Comparison
) -> Findings:
    """Yield how two matrices differ, and which of them look like an initialization."""
    gap = ""
    if comparison.largest == 0:
        gap = "Where they differ, one of the two numbers is infinite or none at all. "
    elif comparison.largest is not None:
        gap = f"The largest difference of two finite numbers is {comparison.largest:.3g}. "
    yield (
        "drifted",
        {
            "differing": comparison.differing_rows,
            "rows": comparison.rows_compared,
            "first": ", ".join(map(str, comparison.first_rows)),
            "gap": gap,
            "cosine": "unknown" if comparison.cosine is None else f"{comparison.cosine:.4f}",
            "cause": _guess_cause(comparison),
        },
    )
    n_items = comparison.rows_compared * reads.shape[1]
    if comparison.cosine is None or abs(comparison.cosine) > 0.02 + 5 / n_items**0.5:
        return  # they are related
    looks = {matrix.name: detect_initialization(matrix) for matrix in (head, reads)}
    fresh = {name: values for name, values in looks.items() if values}
    if fresh:
        numbers = " ".join(
            f"The numbers of {name} have mean {mean:.2g} and standard deviation {std:.3g}: they "
            f"look like {initialization}, never trained."
            for name, (mean, std, initialization) in fresh.items()
        )
        looks_like = f"{' and '.join(fresh)} {'look' if len(fresh) > 1 else 'looks'}"
        cosine = f"{comparison.cosine:.3f}"
        yield "fresh", {"looks": looks_like, "numbers": numbers, "cosine": cosine}


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


def _describe_sizes(decision: TieDecision) -> Findings:
    """Yield transposed matrices, padding on both sides, and a misspelt key of config.json."""
    checkpoint, w = decision.checkpoint, decision.roles.matrix
    names = decision.roles.transposed
    if names:
        shapes = [f"{name} is {format_shape(checkpoint.tensors[name].shape)}" for name in names]
        advice = "Loaders of this format expect (V, D). They refuse it or, where V = D, misread it."
        if checkpoint.any_layout:
            advice = "This format stores the matrix of a product x W so; it is compared transposed."
        verb = "is" if len(names) == 1 else "are"
        listed = {"names": " and ".join(names), "verb": verb, "sizes": " and ".join(shapes)}
        yield "transposed", {**listed, "advice": advice}
    vocabulary = checkpoint.vocabulary or w.shape[0]
    extra = w.shape[0] - vocabulary
    if extra > 0 and decision.roles.extra_rows >= 0:
        other = f"{vocabulary:,} tokens that config.json states"
        sizes = f"{w.name} is {format_shape(w.shape)}."
        longer = {"longer": w.name, "extra": extra, "known": other}
        yield "padded", {**longer, "sizes": sizes, "advice": PADDING}
    for key in sorted(MISSPELT & checkpoint.config.keys())[:1]:
        yield "config", {"key": key, "tie_key": TIE_KEY}


def _describe_claim(decision: TieDecision) -> tuple[str, dict[str, Any]]:
    """Return whether the claim holds, and the call or command that makes it hold."""
    claim, is_module = decision.checkpoint.claim, decision.checkpoint.in_memory
    if decision.is_sound:
        title = "nothing is claimed" if claim.is_tied is None else "the claim holds"
        text = f"{claim.source}. The matrices are sound: {decision.kind}."
        if is_module and claim.is_tied is None and decision.kind == "untied as claimed":
            text = (
                "The module has no config: two matrices, as built. tiedgpt.tie.tie(model) makes "
                "them one."
            )
        return "claim", {"title": title, "text": text}
    is_contradiction = decision.kind == "contradicts the claim"
    title = "the claim does not hold" if is_contradiction else "the tie is broken"
    text = f"{decision.reason}."
    if is_module:
        text += f" tiedgpt.tie.tie(model) makes them one; or set {TIE_KEY}=False."
    if is_module or decision.roles.unreadable:
        return "claim", {"title": title, "text": text}
    options = " or ".join(f"--keep {choice}" for choice in decision.choices)
    text += f" Write a copy that loads, with {options}:" if options else " Write a copy that loads:"
    return "claim, with a command", {"title": title, "text": text, "command": decision.command}
