"""Lessons on what the matrix predicts: positions, norms, the loss, body and heads."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from tiedgpt.core.cache import KVCache
from tiedgpt.core.model import GPT
from tiedgpt.heads import Head, MultipleChoice, SequenceClassifier, SpanFinder, TokenClassifier
from tiedgpt.inspect import vocabulary
from tiedgpt.lessons.lesson import Lesson
from tiedgpt.lessons.subject import Subject, sharing
from tiedgpt.tie import ledger

SHOWN = 8
"""Positions in the table."""


@torch.no_grad()
def positions(subject: Subject, lesson: Lesson) -> None:
    """Show a prediction at each position, that none sees ahead, and which one generation uses."""
    logits, ids, word = subject.logits(), subject.ids, subject.word
    probs, n = logits.softmax(-1), len(ids)
    lesson.table(
        (">#", "token", "next token", ">its probability", "likeliest", ">probability"),
        [
            (str(i), word(ids[i]), word(ids[i + 1]), f"{probs[i, ids[i + 1]]:.4f}",
             word(probs[i].argmax()), f"{probs[i].max():.4f}")
            for i in range(min(SHOWN, n - 1))
        ],
    )  # fmt: skip
    lesson.say(
        "One pass over {tokens} tokens gives logits ({tokens}, {size:,}): a prediction at each "
        "position. {targets} of them have a true next token, so training learns {targets} times "
        "from one pass: the mean loss is {loss:.3f} nats. The last one has no target: it is the "
        "only one that generation needs, and its likeliest token is {following}.",
        tokens=n,
        size=logits.shape[1],
        targets=n - 1,
        loss=float(subject.loss(logits)),
        following=word(probs[-1].argmax()),
    )
    at = n // 2
    poked = ids.clone()
    poked[at] = (poked[at] + 1) % logits.shape[1]
    moved = (subject.logits(ids=poked) - logits).abs().amax(-1)
    lesson.say(
        "This is sound only because no position sees ahead. Change token {at}: the logits before "
        "it move by {moved_before:.1g}, those from it on by up to {moved_after:.2g}. So each "
        "prediction is what generation would have made from that prefix.",
        at=at,
        moved_before=float(moved[:at].max()),
        moved_after=float(moved[at:].max()),
    )
    width = subject.weight.shape[1]
    lesson.say(
        "The head costs V D multiply-adds a position: {head_cost:,} in training for this text, "
        "{one_cost:,} for the one position that generation needs.",
        head_cost=n * subject.weight.numel(),
        one_cost=logits.shape[1] * width,
    )
    if isinstance(subject.module, GPT):
        _one_by_one(subject.module, subject, lesson, logits[-1])


def _one_by_one(gpt: GPT, subject: Subject, lesson: Lesson, last: torch.Tensor) -> None:
    """Read the same text a token at a time, as generation does."""
    like, n = gpt.wte.weight, len(subject.ids)
    cache = KVCache.allocate(
        gpt.config, batch_size=1, capacity=n, dtype=like.dtype, device=like.device
    )
    for id in subject.ids:
        step = gpt(id.view(1, 1), cache)[0, -1].float()
    lesson.say(
        "Read one token at a time, with the keys and values of earlier ones kept in a cache of "
        "{cache_bytes:,} bytes, the model gives the same last logits: off by {cache_apart:.1g}.",
        cache_bytes=cache.keys.nbytes + cache.values.nbytes,
        cache_apart=float((step - last).abs().max()),
    )


@torch.no_grad()
def norms(subject: Subject, lesson: Lesson) -> None:
    """Take logits apart into lengths and an angle, and move the lengths without any effect."""
    h, rows, word = subject.state(), subject.head_weight.float(), subject.word
    logits, length, cosine = h @ rows.T, rows.norm(dim=1), F.cosine_similarity(h[-1:], rows)
    top = logits[-1].topk(5).indices
    ranks = 1 + (cosine > cosine[top, None]).sum(1)
    lesson.say(
        "The logit of token i is h . e_i = |h| |e_i| cos, with e_i its row of {predicts}. After "
        "the last token, {last}, |h| is {h_norm:.3g}:",
        predicts=subject.predicts,
        last=word(subject.ids[-1]),
        h_norm=float(h[-1].norm()),
    )
    lesson.table(
        ("token", ">logit", ">|e_i|", ">cos", ">rank by cos"),
        [
            (word(i), f"{logits[-1, i]:.3f}", f"{length[i]:.3f}", f"{cosine[i]:.3f}", f"{rank:,}")
            for i, rank in zip(top.tolist(), ranks.tolist(), strict=True)
        ],
    )
    by_cosine = (F.normalize(h) @ F.normalize(rows).T).argmax(-1)
    lesson.say(
        "The largest dot product need not have the largest cosine: at {differ} of {tokens} "
        "positions of the text another token has it. There the length of the row decides.",
        differ=int((by_cosine != logits.argmax(-1)).sum()),
        tokens=len(h),
    )
    with lesson.optional("a longer row on the input side"):
        _longer_rows(subject, lesson, logits[-1])
    with lesson.optional("moving the norms"):
        _moved_norms(subject, lesson)
    with lesson.optional("frequency"):
        _frequency(subject, lesson)


def _longer_rows(subject: Subject, lesson: Lesson, last: torch.Tensor) -> None:
    """Double a row where it predicts, then one where it is read, in a copy with two matrices."""
    token, id = subject.ids[-1], last.argmax()
    probs, longer = last.softmax(-1), last.clone()
    longer[id] *= 2
    rows = subject.weight.clone()
    rows[token] *= 2
    twin = subject.untied() if subject.tied else subject.module
    before, after = (subject.logits(twin, changed=new) for new in (None, {subject.reads: rows}))
    lesson.say(
        "What does a longer row do? Where it predicts, it scales one logit: with twice the row of "
        "{best}, its probability goes from {best_before:.3f} to {best_after:.3f}. Where it is "
        "read, it is one part of what the layers read: twice the row of {last} (in a copy "
        "with two matrices) moves {read_moved:.1%} of the next token's probability.",
        best=subject.word(id),
        best_before=float(probs[id]),
        best_after=float(longer.softmax(-1)[id]),
        last=subject.word(token),
        read_moved=float((before[-1].softmax(-1) - after[-1].softmax(-1)).abs().sum() / 2),
    )


def _moved_norms(subject: Subject, lesson: Lesson) -> None:
    """Subtract a vector from all rows and add it to all positions: another W, the same model."""
    names = dict(subject.module.named_parameters())
    places = [name for name in names if name.endswith(("wpe.weight", "positions_embed.weight"))]
    if not places or not subject.tied:
        return
    rows, place = names[subject.reads], names[places[0]]
    shift = 2 * rows[subject.ids[-1]]
    changed = {subject.reads: rows - shift, places[0]: place + shift}
    before, after = subject.logits(), subject.logits(changed=changed)
    old, new = rows.norm(dim=1), changed[subject.reads].norm(dim=1)
    lesson.say(
        "A norm does not say how important a token is. Subtract one vector from all rows of W (here"
        " twice the row of {last}) and add it to all positions: no embedded token moves, all "
        "logits move alike, and no probability changes by more than {probability_moved:.1g}. Yet "
        "the mean norm goes from {norm_before:.3g} to {norm_after:.3g}, and the rank correlation "
        "of old and new norms is {rank_correlation:.2f}. Both are the same model.",
        last=subject.word(subject.ids[-1]),
        probability_moved=float((after.softmax(-1) - before.softmax(-1)).abs().max()),
        norm_before=float(old.mean()),
        norm_after=float(new.mean()),
        rank_correlation=_rank_correlation(old, new),
    )


def _rank_correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """(n,) twice -> Spearman's rho."""
    ranks = torch.stack([a.argsort().argsort(), b.argsort().argsort()]).double()
    return float(torch.corrcoef(ranks)[0, 1])


def _frequency(subject: Subject, lesson: Lesson) -> None:
    """Show what the norm of the centred rows goes with, where counts are known."""
    if isinstance(subject.source, torch.nn.Module) and subject.counts is None:
        return
    source = subject.gpt if subject.counts is not None else subject.source
    found = vocabulary(source, subject.tokenizer, counts=subject.counts, own_rank_rows=0)
    if found.count is None:
        return
    rows = found.matrices[-1]
    low, high = rows.interval["centred_norm"]
    lesson.say(
        "Norms go with training: for the {n_seen:,} tokens that occur in the training data, the "
        "rank correlation of ln count with |e_i - mean row| is {spearman:.2f} (95 % interval "
        "{low:.2f} to {high:.2f}). The longest rows are {longest}, the shortest {shortest}.",
        n_seen=int((found.count > 0).sum()),
        spearman=rows.spearman["centred_norm"],
        low=low,
        high=high,
        longest=", ".join(subject.word(i) for i in rows.centred_norm.argsort()[:-4:-1]),
        shortest=", ".join(subject.word(i) for i in rows.centred_norm.argsort()[:3]),
    )


@torch.no_grad()
def loss(subject: Subject, lesson: Lesson) -> None:
    """Compute the loss and its gradient by hand, and compare them with autograd's."""
    logits = subject.logits().requires_grad_()
    n, size = len(subject.ids) - 1, logits.shape[1]
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(subject.loss(logits), logits)
    probs, answers = logits[:-1].softmax(-1), subject.ids[1:]
    value = float(subject.loss(logits))
    by_hand = -probs.gather(1, answers[:, None]).log().mean()
    lesson.say(
        "The loss is the mean of -ln P(true next token) over {targets} positions: {by_hand:.4f} "
        "nats by hand, {loss:.4f} by cross_entropy. exp(loss) is the perplexity, {perplexity:.4g}: "
        "as unsure as among so many equally likely tokens. Knowing nothing costs ln V = "
        "ln {size:,} = {uniform:.3f} nats.",
        targets=n,
        by_hand=float(by_hand),
        loss=value,
        perplexity=math.exp(value),
        size=size,
        uniform=math.log(size),
    )
    expected = (probs - F.one_hot(answers, size)) / n
    lesson.say(
        "Its gradient by the logits is (P - onehot) / {targets}; autograd's differs by "
        "{gradient_apart:.1g}. At a position the true token's logit is pulled up by 1 - P, and "
        "each other one is pushed down by its P: the parts sum to {gradient_sum:.1g}.",
        targets=n,
        gradient_apart=float((gradient[:-1] - expected).abs().max()),
        gradient_sum=float(gradient.sum(1).abs().max()),
    )
    with lesson.optional("what the rows get"):
        pulls = gradient[:-1].T @ subject.state()[:-1]
        reached, right = (pulls.norm(dim=1) > 0), torch.unique(answers)
        total = float(pulls.square().sum())
        lesson.say(
            "logits = h W^T, so W gets (P - onehot)^T h from predicting: {rows_reached:,} of "
            "{size:,} rows get a gradient, not only the {n_right} that are right somewhere; these "
            "have {right_share:.0%} of its squared length.",
            rows_reached=int(reached.sum()),
            size=size,
            n_right=len(right),
            right_share=float(pulls[right].square().sum()) / total,
        )
    if isinstance(subject.module, GPT):
        own = subject.module.loss(subject.ids[None, :-1], subject.ids[None, 1:])
        lesson.say(
            "model.loss gives {model_loss:.4f} and never holds all logits: {context:,} positions "
            "would take {logit_bytes:,} bytes in fp32.",
            model_loss=float(own),
            context=subject.module.config.n_positions,
            logit_bytes=4 * subject.module.config.n_positions * size,
        )


HEADS: dict[str, tuple[type[Head], dict[str, Any]]] = {
    "SequenceClassifier, 3 labels": (SequenceClassifier, {"labels": ["a", "b", "c"]}),
    "TokenClassifier, 5 tags": (TokenClassifier, {"labels": ["a", "b", "c", "d", "e"]}),
    "MultipleChoice, 2 endings": (MultipleChoice, {}),
    "SpanFinder: start and end": (SpanFinder, {}),
}
"""Heads to put on the body, and their options."""


@torch.no_grad()
def body(subject: Subject, lesson: Lesson) -> None:
    """Show what the body returns, and what different heads on it return and cost."""
    with lesson.optional("the states"):
        lesson.say(
            "The body is everything up to the last norm: ids {ids} -> states {states}, one vector "
            "a token. A head turns states into an answer; the one over the vocabulary gives "
            "logits {logits}. transformers calls the body GPT2Model, and the two together "
            "GPT2LMHeadModel.",
            ids=(1, len(subject.ids)),
            states=(1, *subject.state().shape),
            logits=(1, *subject.logits().shape),
        )
    total, matrix = ledger(subject.module).total, subject.weight.numel()
    own = 0 if subject.tied or not subject.predicts else subject.head_weight.numel()
    with lesson.optional("other heads"):
        _heads(subject, lesson, own)
    lesson.say(
        "Of the {total:,} parameters, {own:,} belong to the head over the vocabulary alone. The "
        "{matrix:,} of {reads} belong to the body, which reads with them. So a model without its "
        "tied head is no smaller, and a new head comes beside the matrix and leaves it as it is.",
        total=total,
        own=own,
        matrix=matrix,
        reads=subject.reads,
    )
    lesson.list(
        "In Python:",
        [
            "h = model.body(ids)                      # (B, T, D)",
            "logits = model.logits(h)                 # (B, T, V)",
            "from tiedgpt.heads import SequenceClassifier",
            'SequenceClassifier(model, labels=["bad", "good"])(ids, lengths)   # (B, 2)',
        ],
    )


def _heads(subject: Subject, lesson: Lesson, own: int) -> None:
    """Put each kind of head on the body."""
    ids, bare = subject.ids[None], sharing(subject.gpt)
    bare.head = None
    rows = [("the vocabulary", str((1, *subject.logits().shape)), f"{own:,}")]
    for name, (kind, options) in HEADS.items():
        with torch.random.fork_rng(devices=[]):
            made = kind(bare, **options).eval()
        out = made(ids.expand(2, -1)[None] if kind is MultipleChoice else ids)
        cost = sum(p.numel() for n, p in made.named_parameters() if not n.startswith("gpt."))
        lesson.numbers[kind.__name__] = cost
        rows.append((name, str(tuple(out.shape)), f"{cost:,}"))
    lesson.table(("head", "its output for this text", ">parameters of its own"), rows)
