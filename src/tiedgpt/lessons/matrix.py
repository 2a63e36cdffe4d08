"""Lessons on the one matrix: the tie, the head, and the number of parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiedgpt.core.config import GPTConfig
from tiedgpt.inspect import gradient_split
from tiedgpt.lessons.lesson import Lesson
from tiedgpt.lessons.subject import Subject, sharing, tiny_model
from tiedgpt.tie import ledger
from tiedgpt.tie import tie as tie_again

RATE = 0.1
"""Of the one step of SGD."""


def tie(subject: Subject, lesson: Lesson) -> None:
    """Show that one matrix reads and predicts: by formula, by a changed row, by a step."""
    _two_uses(subject, lesson)
    _changed_row(subject, lesson)
    if not subject.tied:
        if subject.audit.comparison is not None:
            lesson.say(
                f"The two are apart: {subject.reads} and {subject.predicts} "
                f"{subject.audit.comparison}. tiedgpt.tie.tie(model) makes them one."
            )
        return
    with lesson.optional("a head that is only equal"):
        twin = subject.untied()
        with torch.no_grad():
            apart = float((subject.logits(twin) - subject.logits()).abs().max())
        matrices = _matrices(twin, subject.weight)
        loss = subject.loss(subject.logits(twin))
        read, predict = torch.autograd.grad(loss, matrices)
        lesson.say(
            "Equal is not the same. A copy of this model got a head of its own with equal numbers: "
            "its logits differ by {copy_apart:.1g}, so no test of values tells the two models "
            "apart. One step of SGD (learning rate {rate}) does: its two matrices then differ by "
            "up to {drift:.2g}, where the numbers of W are {deviation:.2g} (standard deviation). "
            "So ask whose storage it is, as `tiedgpt tie audit` does.",
            copy_apart=apart,
            rate=RATE,
            drift=float((read - predict).abs().max()) * RATE,
            deviation=float(subject.weight.std()),
        )


@torch.no_grad()
def _two_uses(subject: Subject, lesson: Lesson) -> None:
    """Compute both uses of W by hand and compare them with the model's own."""
    logits, ids, size = subject.logits(), subject.ids, list(subject.weight.shape)
    reader = subject.module.get_submodule(subject.reads.rpartition(".")[0])
    read = float((reader(ids[None])[0] - subject.weight[ids]).abs().max())
    lesson.numbers |= {"read_difference": read, "verdict": subject.audit.verdict}
    t = len(ids)
    rows = [("reads", f"W_e[ids]    ({t}) -> ({t}, {size[1]})", subject.reads, f"{read:.1g}")]
    with lesson.optional("the check of h W^T"):
        by_hand = F.linear(subject.state(), subject.head_weight.float())
        predict = float((by_hand - logits).abs().max())
        lesson.numbers["predict_difference"] = predict
        shape = f"h_n W_e^T   ({t}, {size[1]}) -> ({t}, {size[0]})"
        rows.append(("predicts", shape, subject.predicts or "", f"{predict:.1g}"))
    lesson.table(("use", "by hand, for the text's tokens", "matrix", ">off by"), rows)
    lesson.say(
        f"The audit of names and storages says: {subject.audit.verdict} "
        f"({subject.audit.claim_source})."
    )


@torch.no_grad()
def _changed_row(subject: Subject, lesson: Lesson) -> None:
    """Double the row of a token that is not in the text, in the matrix that reads."""
    before = subject.logits()
    rest = before[-1].index_fill(0, subject.ids, -torch.inf)
    id = int(rest.argmax())
    rows = subject.weight.clone()
    rows[id] *= 2
    after = subject.logits(changed={subject.reads: rows})
    moved = (after - before).abs()
    own = float(moved[:, id].max())
    moved[:, id] = 0
    follows = (
        "The text never reads this row, so only predicting can have used it: one matrix."
        if own > 0
        else "The text never reads this row, and nothing else uses it: this matrix only reads."
    )
    lesson.say(
        "A test that needs no names: double the row of {token} in {reads}, a token that the text "
        "does not contain. After the last token its logit goes from {logit_before:.3f} to "
        "{logit_after:.3f}; no other logit moves by more than {others_moved:.1g}. " + follows,
        token=subject.word(id),
        reads=subject.reads,
        logit_before=float(before[-1, id]),
        logit_after=float(after[-1, id]),
        others_moved=float(moved.max()),
    )


def _matrices(module: nn.Module, like: Tensor) -> list[nn.Parameter]:
    """Return the parameters of W's shape: of a copy with a head of its own, two."""
    return [parameter for parameter in module.parameters() if parameter.shape == like.shape]


def head(subject: Subject, lesson: Lesson) -> None:
    """Show what training the head trains, and what other heads on this body are worth."""
    names = [name for name, _ in subject.module.named_parameters()]
    count = subject.weight.numel()
    if subject.tied:
        answer = (
            "{reads} among them, listed once: the head has no matrix of its own. Freeze everything "
            "but the head, and {matrix:,} numbers are still trained: they are the embedding, too. "
            "Freeze the embedding, and the head is frozen."
        )
    else:
        answer = (
            "{reads} among them with {matrix:,} numbers. This model is untied: its head has others "
            "({predicts}), and training one leaves the other as it is."
        )
    lesson.say(
        "named_parameters() lists {n_names} parameters, " + answer,
        n_names=len(names),
        reads=subject.reads,
        predicts=subject.predicts,
        matrix=count,
    )
    with lesson.optional("the gradient's two parts"):
        split = gradient_split(subject.gpt, None, subject.ids)
        reached = [int((rows > 0).sum()) for rows in (split.rows_read, split.rows_predict)]
        lengths = [split.norm_read, split.norm_predict]
        lesson.numbers |= {"rows_read": reached[0], "rows_predict": reached[1]}
        lesson.numbers |= {"norm_read": lengths[0], "norm_predict": lengths[1]}
        lesson.table(
            ("gradient of the loss", ">length", ">rows of W that it reaches"),
            [
                (f"from {use}", f"{length:.3g}", f"{n:,} of {len(split.pieces):,}")
                for use, length, n in zip(("reading", "predicting"), lengths, reached, strict=True)
            ],
        )
        joined = "backward() adds both into one .grad" if subject.tied else "they stay apart"
        lesson.say(
            f"Their cosine is {{cosine:.2f}}; {joined}. Reading reaches the rows of the text's "
            "tokens alone; the softmax reaches the row of every token.",
            cosine=split.cosine,
        )
    with lesson.optional("other heads on this body"):
        _other_heads(subject, lesson)


@torch.no_grad()
def _other_heads(subject: Subject, lesson: Lesson) -> None:
    """Measure the loss with W, its copy and random numbers as the head; then tiny GPTs."""
    h, size = subject.state(), subject.weight.shape
    draws = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 0.02
    own = "its own head" if not subject.tied else "W itself"
    matrices = {
        own: subject.head_weight,
        "the embedding, tied" if not subject.tied else "a copy of W": subject.weight.clone(),
        "new numbers from N(0, 0.02)": draws.to(h.device),
    }
    losses = {
        name: float(subject.loss(F.linear(h, matrix.float()))) for name, matrix in matrices.items()
    }
    uniform = float(torch.tensor(float(size[0])).log())
    lesson.numbers |= {"losses": losses, "uniform": uniform}
    lesson.table(
        ("head on this body", ">loss on the text, nats"),
        [*((name, f"{loss:.3f}") for name, loss in losses.items()),
         ("any head that knows nothing: ln V", f"{uniform:.3f}")],
    )  # fmt: skip
    tiny = {tied: tiny_model(tied=tied) for tied in (True, False)}
    lesson.say(
        "A head of new numbers gives noise, because nothing was trained with it, and not because "
        "it is untied. Two tiny GPTs were trained just now with the same data and steps: tied "
        "({tied_size:,} parameters) it has a loss of {tied_loss:.3f} on text not trained on, "
        "untied ({untied_size:,}) {untied_loss:.3f}; ln V is {tiny_uniform:.3f}.",
        tied_loss=tiny[True].loss,
        untied_loss=tiny[False].loss,
        tied_size=ledger(tiny[True].model).total,
        untied_size=ledger(tiny[False].model).total,
        tiny_uniform=float(torch.tensor(float(tiny[True].model.config.vocab_size)).log()),
    )


PARTS = {
    "the matrix over tokens": ("wte", "head", "embed_tokens", "tokens_embed"),
    "positions": ("wpe", "positions_embed"),
    "attention": ("attn", "attention"),
    "MLP": ("mlp",),
    "norms": ("ln_", "norm"),
}
"""Parts of a GPT, by what is in the names of their parameters."""


def parameters(subject: Subject, lesson: Lesson) -> None:
    """Count, untie, count again, and tie again."""
    whole, matrix = ledger(subject.module), subject.weight.numel()
    sizes = dict.fromkeys([*PARTS, "the rest"], 0)
    for row in whole.rows:
        named = (part for part, words in PARTS.items() if any(w in row.names[0] for w in words))
        part = "the matrix over tokens" if row.parameters == matrix else next(named, "the rest")
        sizes[part] += row.parameters
    lesson.table(
        ("part", ">parameters", ">share"),
        [(part, f"{n:,}", f"{n / whole.total:.1%}") for part, n in sizes.items() if n],
    )
    with lesson.optional("with a head of its own, and tied again"):
        both = [whole, ledger(subject.untied())] if subject.tied else [None, whole]
        twin = subject.untied() if subject.tied else sharing(subject.module)
        tie_again(twin)
        again = ledger(twin)
        one, two = both[0] or again, both[1] or whole
        columns = {
            "parameters": [counted.total for counted in (one, two)],
            "bytes of the weights": [counted.bytes for counted in (one, two)],
            "bytes to train with AdamW": [16 * counted.total for counted in (one, two)],
            "multiply-adds per token": [counted.multiply_adds for counted in (one, two)],
        }
        lesson.numbers |= {"tied": one.total, "untied": two.total, "again": again.total}
        lesson.numbers["multiply_adds"] = columns["multiply-adds per token"]
        lesson.table(
            ("", ">tied", ">a head of its own", ">difference"),
            [(name, f"{a:,}", f"{b:,}", f"{b - a:+,}") for name, (a, b) in columns.items()],
        )
        v, d = subject.weight.shape
        lesson.say(
            "The difference is V D = {v:,} x {d:,} = {matrix:,}. tiedgpt.tie.tie(model) shares the "
            "matrix again: {again:,} parameters. Training in fp32 takes 16 bytes a "
            "parameter: weight, gradient and two moments. Sharing saves memory and no arithmetic: "
            "reading is a lookup, and predicting multiplies with V D numbers either way.",
            v=v,
            d=d,
            matrix=matrix,
            again=again.total,
        )
    gpt2 = [
        GPTConfig.preset("gpt2", tie_word_embeddings=tied).parameter_count()
        for tied in (True, False)
    ]
    lesson.say(
        "GPT-2 by the same formula: {gpt2_tied:,} tied and {gpt2_untied:,} with a head of its own; "
        "50,257 x 768 = {gpt2_matrix:,} lie between.",
        gpt2_tied=gpt2[0],
        gpt2_untied=gpt2[1],
        gpt2_matrix=gpt2[1] - gpt2[0],
    )
