"""What mending a checkpoint takes: which matrix is written under which name, and the true claim."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tiedgpt.errors import UserError
from tiedgpt.tie.auditing import Audit
from tiedgpt.tie.candidates import Roles, lies_turned
from tiedgpt.tie.explanations import size
from tiedgpt.tie.findings import Layout, is_one, is_turned
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.comparison import nonzero_rows
from tiedgpt.weights.opening import CLAIM
from tiedgpt.weights.tensor_copy import Copy
from tiedgpt.weights.tensors import StoredTensor


@dataclass(frozen=True)
class Plan:
    """What the mended copy holds for the matrices over the vocabulary."""

    matrices: Mapping[str, Copy]
    tied: bool
    rows: int | None
    """V in the mended copy, where config.json should say it."""
    actions: tuple[str, ...]


def plan_repair(checkpoint: Checkpoint, roles: Roles, audit: Audit, keep: str | None) -> Plan:
    """Decide what to write; `UserError` where nothing is to be mended or a choice is missing."""
    reads, predicts = roles.input, roles.output
    if roles.hidden:
        raise UserError(
            f"{checkpoint.source}: {roles.hidden[0].name} predicts and is not read here (quantized, "  # noqa: E501
            "or in parts): mend the checkpoint it was made from"
        )
    if audit.verdict == "no head":
        raise UserError(
            f"{checkpoint.source} does not predict tokens (no head): there is no tie to mend"
        )
    if reads is None or predicts is None or is_one(reads, predicts):
        return _of_one(checkpoint, roles, audit, keep)
    layout = Layout(reads, predicts, transposed=audit.transposed)
    if not layout.fits:
        if keep != "input":
            raise UserError(
                f"{predicts.name} {size(predicts.shape)} does not fit {reads.name} "
                f'{size(reads.shape)} and cannot be its tie: keep="input" drops it'
            )
        vectors, _ = _beside(checkpoint, predicts, layout.head_rows, reads.shape[0])
        plan = _tied(checkpoint, reads, predicts, Copy(reads), "input", audit)
        if vectors:
            raise UserError(f"{min(vectors)} belongs to {predicts.name}, which would be dropped")
        return plan
    _require_orientation(checkpoint, layout, reads)
    if (
        checkpoint.claim is False
        and keep in (None, "both")
        and audit.verdict == "untied as claimed"
    ):
        raise UserError(
            f"{checkpoint.source} is untied as claimed: nothing to mend; "
            'keep="input" or keep="output" makes one matrix of the two'
        )
    if keep == "both" or (checkpoint.claim is False and keep is None):
        return _untied(checkpoint, reads, predicts, layout)
    chosen = keep or _lossless(checkpoint, reads, predicts, layout, audit)
    if chosen is None:
        raise UserError(_ask(checkpoint, reads, predicts, audit))
    copy = Copy(reads) if chosen == "input" else Copy(predicts, transposed=layout.transposed)
    vocabulary = checkpoint.vocabulary
    if layout.extra and vocabulary is not None and vocabulary < copy.shape[0]:
        copy = Copy(copy.tensor, transposed=copy.transposed, rows=vocabulary)
    if chosen == "output" and vocabulary is not None and copy.shape[0] < vocabulary:
        raise UserError(
            f"{checkpoint.source}: {predicts.name} has {copy.shape[0]:,} rows for a vocabulary of "
            f"{vocabulary:,}: it scores something other than tokens, and tying to it would lose "
            'them; keep="input" drops it'
        )
    plan = _tied(checkpoint, reads, predicts, copy, chosen, audit)
    gone = _gone(reads, copy.shape[0]) + _gone(predicts, copy.shape[0], across=layout.transposed)
    vectors, cut = _beside(checkpoint, predicts, layout.head_rows, copy.shape[0])
    matrices = {**plan.matrices, **vectors}
    return replace(plan, matrices=matrices, actions=(*plan.actions, *gone, *cut))


def _gone(matrix: StoredTensor, kept: int, *, across: bool = False) -> list[str]:
    """Say which rows of a matrix are not in the copy."""
    rows = matrix.shape[1] if across else matrix.shape[0]
    if rows <= kept:
        return []
    filled = "not looked into"
    if matrix.is_decodable:
        filled = f"{nonzero_rows(matrix, kept, rows, transposed=across):,} of them not zero"
    return [f"the last {rows - kept:,} rows of {matrix.name}, {kept} to {rows - 1}, go ({filled})"]


def _beside(
    checkpoint: Checkpoint, head: StoredTensor, head_rows: int, rows: int
) -> tuple[dict[str, Copy], list[str]]:
    """Cut what has a number for each row of the head; `UserError` where that cannot be."""
    if head_rows == rows:
        return {}, []
    module = head.name.rpartition(".")[0]
    found: dict[str, Copy] = {}
    for name, tensor in checkpoint.tensors.items():
        beside = bool(module) and name.rpartition(".")[0] in (module, module.rpartition(".")[0])
        if not (beside or name.endswith("final_logits_bias")) or head_rows not in tensor.shape:
            continue
        if name == head.name or (len(tensor.shape) == 2 and tensor.is_view_of(head)):
            continue
        if len(tensor.shape) != 1 or head_rows < rows:
            raise UserError(
                f"{name} {size(tensor.shape)} belongs to the {head_rows:,} rows of {head.name}, "
                f"and {rows:,} are kept: cut or fill it yourself first"
            )
        found[name] = Copy(tensor, rows=rows)
    return found, [f"{name} is cut to {rows:,} numbers" for name in found]


def _require_orientation(checkpoint: Checkpoint, layout: Layout, reads: StoredTensor) -> None:
    """Ask where one of the two lies transposed and nothing tells which."""
    if layout.transposed and lies_turned(checkpoint, reads) is None:
        raise UserError(
            f"{checkpoint.source}: {reads.name} {size(reads.shape)} and the head lie across each "
            "other, and nothing tells which is (V, D): say vocab_size and n_embd (or hidden_size), "
            "two different numbers, in a config.json beside it"
        )


def _of_one(checkpoint: Checkpoint, roles: Roles, audit: Audit, keep: str | None) -> Plan:
    """Keep the one matrix, under the embedding's name, and make the claim true."""
    matrix = roles.input or roles.output
    assert matrix is not None
    if keep == "both":
        raise UserError(
            f"{checkpoint.source} holds one matrix, {matrix.name}: there is no head to keep beside "
            "it, and none is made up"
        )
    actions = []
    name = matrix.name
    if roles.input is None:
        name = _embedding_name(checkpoint, matrix.name)
        actions.append(f"the one matrix, {matrix.name}, is called {name}, where loaders look")
    if checkpoint.claim is False:
        actions.append(f"config.json says {CLAIM}: true, since there is one matrix")
    if roles.input is not None and is_turned(checkpoint, matrix):
        actions.append(f"{name} is put as {size(matrix.shape)}, a token in each row")
    if audit.verdict == "broken" and roles.output is not None:
        actions.append(f"{roles.output.name}, a second name of {name}, is dropped")
    if not actions:
        raise UserError(f"{checkpoint.source} is {audit.verdict}: nothing to mend")
    return Plan({name: Copy(matrix)}, True, None, tuple(actions))


def _lossless(
    checkpoint: Checkpoint,
    reads: StoredTensor,
    predicts: StoredTensor,
    layout: Layout,
    audit: Audit,
) -> str | None:
    """Return whose numbers to keep where no number that means a token is lost, else None."""
    if audit.comparison is None or not audit.comparison.equal:
        return None
    if layout.extra <= 0:
        return "input"
    if checkpoint.vocabulary is not None:
        return "output" if checkpoint.vocabulary > reads.shape[0] else "input"
    if not _is_zero(predicts, reads.shape[0], layout):
        raise UserError(
            f"{checkpoint.source}: {predicts.name} has {layout.extra:,} rows more than {reads.name}"
            ', they are not zero, and no config.json tells vocab_size: keep="output" keeps them, '
            'keep="input" drops them'
        )
    return "input"


def _is_zero(head: StoredTensor, start: int, layout: Layout) -> bool:
    return head.is_decodable and not nonzero_rows(
        head, start, layout.head_rows, transposed=layout.transposed
    )


def _tied(
    checkpoint: Checkpoint,
    reads: StoredTensor,
    predicts: StoredTensor,
    copy: Copy,
    chosen: str,
    audit: Audit,
) -> Plan:
    equal = audit.comparison is not None and audit.comparison.equal
    actions = []
    if equal:
        actions.append(f"{predicts.name}, a copy of {reads.name}, is dropped")
    elif chosen == "input":
        actions.append(f"{predicts.name} is dropped; {reads.name} predicts as well")
    else:
        actions.append(f"{reads.name} has the numbers of {predicts.name}, which is dropped")
    if copy.transposed:
        actions.append(f"it is put from {size(copy.tensor.shape)} to {size(copy.shape)}")
    if copy.rows is not None:
        cut = (copy.tensor.shape[1] if copy.transposed else copy.tensor.shape[0]) - copy.rows
        actions.append(f"{cut:,} rows of padding are cut")
    if checkpoint.claim is not True:
        actions.append(f"config.json says {CLAIM}: true")
    if copy.tensor is reads and is_turned(checkpoint, reads):
        actions.append(f"{reads.name} is put as {size(reads.shape)}, a token in each row")
    vocabulary = checkpoint.vocabulary
    changed = audit.comparison is not None and copy.shape[0] != vocabulary
    if changed and vocabulary is not None and reads.shape != predicts.shape:
        actions.append(f"config.json says vocab_size: {copy.shape[0]}, not {vocabulary}")
        return Plan({reads.name: copy}, True, copy.shape[0], tuple(actions))
    return Plan({reads.name: copy}, True, None, tuple(actions))


def _untied(
    checkpoint: Checkpoint, reads: StoredTensor, predicts: StoredTensor, layout: Layout
) -> Plan:
    if layout.extra:
        raise UserError(
            f"{reads.name} {size(reads.shape)} and {predicts.name} {size(predicts.shape)} have "
            'different rows: two matrices of one vocabulary cannot; keep="input" or keep="output"'
        )
    actions = []
    if layout.transposed:
        actions.append(f"{predicts.name} is put from {size(predicts.shape)} to {size(reads.shape)}")
    if checkpoint.claim is not False:
        actions.append(f"both matrices stay, and config.json says {CLAIM}: false")
    if is_turned(checkpoint, reads):
        actions.append(f"{reads.name} is put as {size(reads.shape)}, a token in each row")
    head = Copy(predicts, transposed=layout.transposed)
    return Plan({reads.name: Copy(reads), predicts.name: head}, False, None, tuple(actions))


def _ask(checkpoint: Checkpoint, reads: StoredTensor, predicts: StoredTensor, audit: Audit) -> str:
    c = audit.comparison
    apart = "could not be compared"
    if c is not None:
        apart = f"differ in {c.differing_rows:,} of {c.rows_compared:,} rows"
        if c.largest is not None:
            apart += f" (largest difference {c.largest:.3g}"
            apart += ")" if c.cosine is None else f", cosine {c.cosine:.4f})"
    return (
        f"{checkpoint.source}: {reads.name} and {predicts.name} {apart}: choose whose numbers stay, "  # noqa: E501
        'keep="input" or keep="output", or keep="both" to declare them untied'
    )


def _embedding_name(checkpoint: Checkpoint, head: str) -> str:
    """Return the name that the family's loaders look for, by the names of the other tensors."""
    names = [name for name in checkpoint.tensors if name != head]
    prefix = "transformer." if any(name.startswith("transformer.") for name in names) else ""
    if any(re.match(r"(transformer\.)?h\.\d+\.", name) for name in names):
        openai = any("positions_embed" in name for name in names)
        return prefix + ("tokens_embed.weight" if openai else "wte.weight")
    raise UserError(
        f"{checkpoint.source} holds only {head} and is of no family whose embedding's name is known "  # noqa: E501
        "here: rename it yourself"
    )
