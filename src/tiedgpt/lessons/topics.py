"""The lessons: one function for each topic.

The numbers come from `tiedgpt.inspect`, `tiedgpt.tie` and `tiedgpt.tune`. A lesson on a module that
is not a GPT omits the measurements that need one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.heads import FeatureExtractor, Head, MultipleChoice, SequenceClassifier
from tiedgpt.inspect import dot, gradient_split, random_head
from tiedgpt.inspect import positions as measure_positions
from tiedgpt.inspect.vocab_matrices import vocab_matrices
from tiedgpt.lessons.inputs import LessonInput, tiny_model
from tiedgpt.lessons.lesson import Lesson
from tiedgpt.tie import ledger, untie
from tiedgpt.tie import tie as share_matrix
from tiedgpt.tie.heads import copy_sharing
from tiedgpt.tune import freeze, lora
from tiedgpt.tune.adapters import BLOCKS
from tiedgpt.tune.freezing import TrainableParameters, count_trainable

LEARNING_RATE = 0.1
"""Learning rate of the one step of SGD."""
TABLE_ROWS = 8
"""Number of positions in the table."""
HEADS: dict[str, tuple[type[Head], dict[str, Any], tuple[int, ...]]] = {
    "SequenceClassifier, 3 labels": (SequenceClassifier, {"labels": ["a", "b", "c"]}, (1,)),
    "MultipleChoice, 2 endings": (MultipleChoice, {}, (1, 2)),
    "FeatureExtractor, a vector": (FeatureExtractor, {}, (1,)),
}
"""Heads to put on the body, their options, and the shape of their texts."""
RANK = 8
"""Rank of the adapters."""


def tie(inputs: LessonInput, lesson: Lesson) -> None:
    """Show that one matrix reads and predicts: by formula, by a changed row, by a step."""
    _compute_both_uses(inputs, lesson)
    _double_a_row(inputs, lesson)
    if inputs.tied:
        with lesson.optional("a head of its own with equal values"):
            _step_with_an_equal_head(inputs, lesson)
    elif inputs.audit.comparison is not None:
        lesson.say(
            f"The two matrices differ: {inputs.reads} and {inputs.predicts} "
            f"{inputs.audit.comparison}. tiedgpt.tie.tie(model) makes them one matrix."
        )
    _advise(inputs, lesson)


def _advise(inputs: LessonInput, lesson: Lesson) -> None:
    """Answer whether to tie, with the size of the matrix in this model."""
    total, matrix = ledger(inputs.module).total, inputs.weight.numel()
    tied_total = total if inputs.tied else total - matrix
    lesson.say(
        "Should you tie? Tie a small model: its own head would add {head_parameters:,} parameters "
        "to {tied_parameters:,}, or {head_share:.0%}. In a comparison on the same batches (three "
        "seeds, 600 steps), an untied GPT had a loss lower by 0.068 nats (0.042 to 0.094), with "
        "45 % more parameters. With as many parameters as the tied one, it did not differ: -0.007 "
        "nats (-0.020 to +0.006). The larger the model, the smaller this share. "
        "examples/tied_vs_untied.py repeats the comparison on your text.",
        head_parameters=matrix,
        tied_parameters=tied_total,
        head_share=matrix / tied_total,
    )


@torch.no_grad()
def _compute_both_uses(inputs: LessonInput, lesson: Lesson) -> None:
    """Compute both uses of W by hand and compare them with the model's own."""
    ids, (size, width), t = inputs.ids, inputs.weight.shape, len(inputs.ids)
    reader = inputs.module.get_submodule(inputs.reads.rpartition(".")[0])
    differences = {"read": reader(ids[None])[0] - inputs.weight[ids]}
    with lesson.optional("the check of h W^T"):
        by_hand = F.linear(inputs.state(), vocab_matrices(inputs.gpt)[-1].weight)
        differences["predict"] = by_hand - inputs.logits()
    largest = {use: float(difference.abs().max()) for use, difference in differences.items()}
    lesson.numbers |= {f"{use}_difference": x for use, x in largest.items()}
    lesson.numbers["verdict"] = inputs.audit.verdict
    formulas = {
        "read": (f"W_e[ids]    ({t}) -> ({t}, {width})", inputs.reads),
        "predict": (f"h_n W_e^T   ({t}, {width}) -> ({t}, {size})", inputs.predicts or ""),
    }
    lesson.table(
        ("use", f"by hand, for {t} tokens", "matrix", ">difference"),
        [(use, *formulas[use], f"{x:.1g}") for use, x in largest.items()],
    )
    lesson.say(
        "The difference is from the model's own output. `tiedgpt tie audit` compares names and "
        f"storage; its verdict: {inputs.audit.verdict} ({inputs.audit.claim_source})."
    )


@torch.no_grad()
def _double_a_row(inputs: LessonInput, lesson: Lesson) -> None:
    """Double the row of a token that is not in the text, in the matrix that reads."""
    before, rows = inputs.logits(), inputs.weight.clone()
    id = int(before[-1].index_fill(0, inputs.ids, -torch.inf).argmax())
    rows[id] *= 2
    after = inputs.logits(changed={inputs.reads: rows})
    moved = (after - before).abs()
    follows = "No logit uses the row: this matrix only reads."
    if moved[:, id].max() > 0:
        follows = "The text does not read this row, so the row predicts: one matrix does both."
    moved[:, id] = 0
    lesson.say(
        "A test without names: the text does not contain the token {token}. Double the token's row "
        "in {reads}. Its logit after the last token changes from {logit_before:.3f} to "
        "{logit_after:.3f}; every other logit changes by {others_moved:.1g}. " + follows,
        token=inputs.word(id),
        reads=inputs.reads,
        logit_before=float(before[-1, id]),
        logit_after=float(after[-1, id]),
        others_moved=float(moved.max()),
    )


def _step_with_an_equal_head(inputs: LessonInput, lesson: Lesson) -> None:
    """Give a copy of the model a head with equal values, and train it for one step."""
    twin = copy_sharing(inputs.gpt)
    untie(twin)
    split = gradient_split(twin, None, inputs.ids, arrays=True)
    assert split.read is not None and split.predict is not None
    with torch.no_grad():
        apart = float((inputs.logits(twin) - inputs.logits(inputs.gpt)).abs().max())
    lesson.say(
        "Equal values are not a tie. A copy of this model got an untied head with the same values. "
        "Its logits differ by {copy_apart:.1g}, so comparing values cannot distinguish the two "
        "models. But after one step of SGD (learning rate {rate}), its two matrices differ by up "
        "to {drift:.2g}; the standard deviation of W is {deviation:.2g}. So compare storage.",
        copy_apart=apart,
        rate=LEARNING_RATE,
        drift=LEARNING_RATE * float(np.abs(split.read - split.predict).max()),
        deviation=float(inputs.weight.std()),
    )


def head(inputs: LessonInput, lesson: Lesson) -> None:
    """Show what training the head trains, and what other heads on this body are worth."""
    answer = (
        "The head has no matrix of its own: training only the head trains these numbers, and "
        "freezing the embedding freezes the head."
        if inputs.tied
        else "This model is untied: its head has its own matrix ({predicts}), and training one "
        "does not change the other."
    )
    lesson.say(
        "named_parameters() lists {n_names} parameters. {reads} is one of them, with {matrix:,} "
        "numbers. " + answer,
        n_names=len(list(inputs.module.named_parameters())),
        reads=inputs.reads,
        predicts=inputs.predicts,
        matrix=inputs.weight.numel(),
    )
    with lesson.optional("the two parts of the gradient"):
        split = gradient_split(inputs.gpt, None, inputs.ids)
        reached = {"read": int((split.rows_read > 0).sum())}
        reached["predict"] = int((split.rows_predict > 0).sum())
        rows = [("from reading", split.norm_read, reached["read"])]
        rows.append(("from predicting", split.norm_predict, reached["predict"]))
        lesson.table(
            ("gradient of the loss", ">norm", ">rows with a gradient"),
            [(name, f"{norm:.3g}", f"{n:,} of {len(split.pieces):,}") for name, norm, n in rows],
        )
        sums = "backward() adds both into one .grad" if inputs.tied else "they stay separate"
        lesson.say(
            f"Their cosine is {{cosine:z.2f}}; {sums}. Reading gives a gradient only to the rows "
            "of the text's tokens. Predicting gives one to every row, through the softmax.",
            cosine=split.cosine,
            norm_read=split.norm_read,
            norm_predict=split.norm_predict,
            rows_read=reached["read"],
            rows_predict=reached["predict"],
        )
    with lesson.optional("other heads on this body"):
        _compare_heads(inputs, lesson)


def _compare_heads(inputs: LessonInput, lesson: Lesson) -> None:
    """Measure the loss with W, its copy and random numbers as the head; then tiny GPTs."""
    random, twin = random_head(inputs.gpt, None, inputs.ids), copy_sharing(inputs.gpt)
    current, other, new = "its own head", "the embedding, tied", "new numbers from N(0, 0.02)"
    if inputs.tied:
        current, other = "W itself", "a copy of W"
        untie(twin)
    else:
        share_matrix(twin)
    copy = measure_positions(twin, None, inputs.ids).loss
    losses = {current: random.loss, other: copy, new: random.random_loss}
    uniform = random.uniform_loss
    lesson.numbers |= {"losses": losses, "uniform": uniform}
    rows = [*losses.items(), ("equal probabilities: ln V", uniform)]
    lesson.table(
        ("head on this body", ">loss on the text, nats"), [(n, f"{x:.3f}") for n, x in rows]
    )
    why = (
        "New numbers predict nothing because they were not trained, not because they are untied. "
        if random.loss < min(random.random_loss, uniform)
        else "The model's own head is no better than new numbers or equal probabilities on this "
        "text: the model was not trained, or not on such text. "
    )
    if not inputs.trains:
        lesson.say(why + "With --train, a tied and an untied tiny GPT are trained and compared.")
        return
    lesson.say(why)
    _compare_tiny_models(inputs, lesson)


def _compare_tiny_models(inputs: LessonInput, lesson: Lesson) -> None:
    """Train a tied and an untied tiny GPT, and compare their losses."""
    tied, untied = (tiny_model(tied=tied, progress=inputs.progress) for tied in (True, False))
    larger = (
        " That the untied one is better here is no contradiction: it has {more:,} parameters "
        "more, and both saw as much text. Tying saves parameters; it does not promise the lower "
        "loss after as many steps. examples/tied_vs_untied.py compares models of equal size."
        if untied.loss < tied.loss
        else ""
    )
    sizes = [trained.model.config.parameter_count() for trained in (tied, untied)]
    lesson.say(
        "Two tiny GPTs were trained just now on Python's docstrings, for the same number of "
        "steps. Tied: {tied_size:,} parameters, held-out loss {tied_loss:.3f}. Untied: "
        "{untied_size:,} parameters, held-out loss {untied_loss:.3f}. Equal probabilities: ln V = "
        "{tiny_uniform:.3f}." + larger,
        tied_size=sizes[0],
        tied_loss=tied.loss,
        untied_size=sizes[1],
        more=sizes[1] - sizes[0],
        untied_loss=untied.loss,
        tiny_uniform=math.log(len(tied.tokenizer)),
    )


def parameters(inputs: LessonInput, lesson: Lesson) -> None:
    """Count, untie, count again, and tie again."""
    with lesson.optional("with a head of its own, and tied again"):
        twin, (v, d) = inputs.with_two_matrices(), inputs.weight.shape
        two = ledger(twin)
        share_matrix(twin)
        one = ledger(twin)
        columns = {
            "parameters": (one.total, two.total),
            "bytes of the weights": (one.bytes, two.bytes),
            "bytes to train with AdamW": (16 * one.total, 16 * two.total),
            "multiply-adds per token": (one.multiply_adds, two.multiply_adds),
        }
        lesson.numbers |= {"tied": one.total, "untied": two.total}
        lesson.numbers["multiply_adds"] = columns["multiply-adds per token"]
        lesson.table(
            ("", ">tied", ">untied", ">difference"),
            [(name, f"{a:,}", f"{b:,}", f"{b - a:+,}") for name, (a, b) in columns.items()],
        )
        lesson.say(
            "The difference is V D = {v:,} x {d:,} = {matrix:,}. tiedgpt.tie.tie(model) shares the "
            "matrix again: {again:,} parameters. Training in fp32 takes 16 bytes per parameter: "
            "weight, gradient and two moments. Sharing saves memory but no computation: reading is "
            "a lookup, and predicting takes V D multiply-adds in both cases.",
            v=v,
            d=d,
            matrix=v * d,
            again=one.total,
        )
    tied, untied = (
        GPTConfig.preset("gpt2", tie_word_embeddings=tied).parameter_count()
        for tied in (True, False)
    )
    lesson.say(
        "The same count for GPT-2: {gpt2_tied:,} tied, {gpt2_untied:,} untied. The difference is "
        "50,257 x 768 = {gpt2_matrix:,}.",
        gpt2_tied=tied,
        gpt2_untied=untied,
        gpt2_matrix=untied - tied,
    )


def positions(inputs: LessonInput, lesson: Lesson) -> None:
    """Show a prediction at each position, that none sees ahead, and which one generation uses."""
    ids, word, n, matrix = inputs.ids, inputs.word, len(inputs.ids), inputs.weight.numel()
    with lesson.optional("the predictions"):
        at = n // 2
        result = measure_positions(inputs.gpt, None, ids, top=1, replace_at=at)
        best, moved = result.top_ids[:, 0], result.max_abs_change
        assert moved is not None
        probability, highest = np.exp(result.logprob), np.exp(result.top_logprob[:, 0])
        lesson.table(
            (">#", "token", "next token", ">probability", "likeliest", ">probability"),
            [
                (str(i), word(ids[i]), word(ids[i + 1]), f"{probability[i]:.2g}", word(best[i]),
                 f"{highest[i]:.2g}")
                for i in range(min(TABLE_ROWS, n - 1))
            ],
        )  # fmt: skip
        lesson.say(
            "One pass over {tokens} tokens gives logits ({tokens}, {size:,}): a prediction at each "
            "position. {targets} positions have a true next token, and training learns from all of "
            "them: the mean loss is {loss:.3f} nats. The last position has no next token. "
            "Generation needs only this position; its likeliest token is {following}.",
            tokens=n,
            size=len(inputs.weight),
            targets=result.next,
            loss=result.loss,
            following=word(best[-1]),
        )
        lesson.say(
            "This works because no position sees later tokens. When token {at} changes, the logits "
            "before it change by {moved_before:.1g}, and the logits from there on by up to "
            "{moved_after:.2g}. So each position makes the prediction that generation would make "
            "after the same tokens.",
            at=at,
            moved_before=float(moved[:at].max()),
            moved_after=float(moved[at:].max()),
        )
    lesson.say(
        "The head takes V D multiply-adds per position: {head_cost:,} for the whole text, "
        "{one_cost:,} for the one position that generation needs.",
        head_cost=n * matrix,
        one_cost=matrix,
    )


@torch.no_grad()
def norms(inputs: LessonInput, lesson: Lesson) -> None:
    """Take logits apart into norms and an angle, and move the norms without any effect."""
    lesson.say(
        "In short: each token has one row, and training fits that row to both jobs. On the output "
        "side a longer row makes its token's logit larger, for better or worse. On the input side "
        "a longer row makes the token count for more beside its position. A row's length alone "
        "does not tell how important a token is: only what is left after the mean row is "
        "subtracted changes a prediction. The numbers below show each of these on this model.",
        last=inputs.word(inputs.ids[-1]),
        matrix=inputs.weight.numel(),
    )
    with lesson.optional("the dot products"):
        if inputs.tied:
            _compare_with_reading(inputs, lesson)
        _take_logits_apart(inputs, lesson)
        _double_rows(inputs, lesson)
        if inputs.tied:
            _shift_rows(inputs, lesson)


def _compare_with_reading(inputs: LessonInput, lesson: Lesson) -> None:
    """Compare predictions from the rows that are read with those from the last states."""
    rows, h = inputs.weight[inputs.ids], inputs.state()
    repeats = [F.linear(x, inputs.weight).argmax(-1) == inputs.ids for x in (rows, h)]
    lesson.say(
        "Why can one matrix do both? Because the blocks lie between. Read straight back with W, a "
        "row would predict its own token at {repeats_rows} of {positions} positions: its product "
        "with itself is large. The blocks turn it into a state that points to what follows. The "
        "cosine of state and row read is {cosine_read:.2f} on average, and the states predict the "
        "token that was just read at {repeats_states} positions. So reading need not fit "
        "predicting: the blocks undo what predicting does not need.",
        repeats_rows=int(repeats[0].sum()),
        repeats_states=int(repeats[1].sum()),
        positions=len(rows),
        cosine_read=float(F.cosine_similarity(rows, h).mean()),
    )


def _take_logits_apart(inputs: LessonInput, lesson: Lesson) -> None:
    """Show the likeliest tokens' rows, and how often the angle alone would choose another token."""
    h, matrix = inputs.state(), vocab_matrices(inputs.gpt)[-1]
    result = dot(inputs.gpt, None, inputs.ids, top=5)
    lesson.say(
        "The logit of token i is h . e_i = |h| |e_i| cos, where e_i is its row of {predicts}. "
        "After the last token, {last}, |h| is {h_norm:.3g}:",
        predicts=inputs.predicts,
        h_norm=result.h_norm,
    )
    columns = zip(
        result.ids, result.logit, result.row_norm, result.cos, result.rank_cos, strict=True
    )
    lesson.table(
        ("token", ">logit", ">|e_i|", ">cos", ">rank by cos"),
        [
            (inputs.word(i), f"{logit:.3f}", f"{norm:.3f}", f"{cos:.3f}", f"{rank:,}")
            for i, logit, norm, cos, rank in columns
        ],
    )
    by_angle = (h @ F.normalize(matrix.weight).T).argmax(-1)
    lesson.say(
        "The token with the largest logit need not have the largest cosine. At {differ} of "
        "{tokens} positions of the text, another token has a larger cosine, and the norms of the "
        "rows decide.",
        differ=int((by_angle != inputs.logits().argmax(-1)).sum()),
        tokens=len(h),
    )


def _double_rows(inputs: LessonInput, lesson: Lesson) -> None:
    """Double a row of the output head, then a row of the input embedding, in an untied copy."""
    twin, rows = inputs.with_two_matrices(), inputs.weight.clone()
    rows[inputs.ids[-1]] *= 2
    before = inputs.logits(twin)[-1]
    after = inputs.logits(twin, {inputs.reads: rows})[-1].softmax(-1)
    best, longer = before.argmax(), before.clone()
    longer[best] *= 2
    lesson.say(
        "On the output side, the norm of a row scales one logit: with twice the row of {best}, the "
        "token's probability changes from {best_before:.3f} to {best_after:.3f}. On the input "
        "side, the row is added to the position embedding and passes through all layers: with "
        "twice the row of {last} (in an untied copy), {read_moved:.1%} of the next token's "
        "probability moves to other tokens.",
        best=inputs.word(best),
        best_before=float(before.softmax(-1)[best]),
        best_after=float(longer.softmax(-1)[best]),
        read_moved=float((before.softmax(-1) - after).abs().sum() / 2),
    )


def _shift_rows(inputs: LessonInput, lesson: Lesson) -> None:
    """Subtract a vector from all rows and add it to all positions: another W, the same model."""
    gpt, rows = inputs.gpt, inputs.gpt.wte.weight
    shift = 2 * rows[inputs.ids[-1]]
    changed = {"wte.weight": rows - shift, "wpe.weight": gpt.wpe.weight + shift}
    before, after = (inputs.logits(gpt, x).softmax(-1) for x in (None, changed))
    old, new = rows.norm(dim=1), changed["wte.weight"].norm(dim=1)
    ranks = torch.stack([norm.argsort().argsort() for norm in (old, new)]).double()
    lesson.say(
        "The norm of a row does not tell how important a token is. Subtract one vector (here twice "
        "the row of {last}) from all rows of W, and add it to all position embeddings. Each sum of "
        "token and position stays the same, all logits of a position change by the same amount, "
        "and no probability changes by more than {probability_moved:.1g}. But the mean norm "
        "changes from {norm_before:.3g} to {norm_after:.3g}, and the rank correlation of old and "
        "new norms is {rank_correlation:.2f}.",
        probability_moved=float((after - before).abs().max()),
        norm_before=float(old.mean()),
        norm_after=float(new.mean()),
        rank_correlation=float(torch.corrcoef(ranks)[0, 1]),
    )


@torch.no_grad()
def loss(inputs: LessonInput, lesson: Lesson) -> None:
    """Compute the loss and its gradient by hand, and compare them with autograd's."""
    logits, targets = inputs.logits().requires_grad_(), inputs.ids[1:]
    n, size = len(targets), logits.shape[1]
    with torch.enable_grad():
        value = inputs.loss(logits)
        (gradient,) = torch.autograd.grad(value, logits)
    probs = logits[:-1].softmax(-1)
    lesson.say(
        "The loss is the mean of -ln P(true next token) over {targets} positions: {by_hand:.4f} "
        "nats by hand, {loss:.4f} by cross_entropy. exp(loss) is the perplexity, {perplexity:,.1f}:"
        " a choice among that many equally likely tokens has the same loss. With equal "
        "probabilities for all tokens, the loss is ln V = ln {size:,} = {uniform:.3f} nats.",
        targets=n,
        by_hand=-float(probs.gather(1, targets[:, None]).log().mean()),
        loss=float(value),
        perplexity=math.exp(value),
        size=size,
        uniform=math.log(size),
    )
    by_hand = (probs - F.one_hot(targets, size)) / n
    lesson.say(
        "The gradient with respect to the logits is (P - onehot) / {targets}; autograd's differs "
        "by {gradient_apart:.1g}. A step raises the true token's logit in proportion to 1 - P, and "
        "lowers each other logit in proportion to its P.",
        gradient_apart=float((gradient[:-1] - by_hand).abs().max()),
    )
    with lesson.optional("the gradient of the rows"):
        rows = gradient_split(inputs.gpt, None, inputs.ids).rows_predict
        right = np.unique(targets.cpu().numpy())
        lesson.say(
            "logits = h W^T, so predicting gives W the gradient (P - onehot)^T h / {targets}. "
            "{rows_reached:,} of {size:,} rows get a gradient, not only the {n_right} rows of true "
            "next tokens; those have {right_share:.0%} of its squared norm.",
            rows_reached=int((rows > 0).sum()),
            n_right=len(right),
            right_share=float(np.square(rows[right]).sum() / np.square(rows).sum()),
        )


@torch.no_grad()
def body(inputs: LessonInput, lesson: Lesson) -> None:
    """Show the output of the body, and the outputs and sizes of different heads on it."""
    counted = ledger(inputs.module)
    n_own = 0 if inputs.tied or not inputs.predicts else inputs.weight.numel()
    with lesson.optional("the states, and other heads"):
        lesson.say(
            "The body is everything up to the last norm: ids {ids} -> states {states}, one vector "
            "per token. A head turns states into an answer; the head over the vocabulary gives "
            "logits {logits}. transformers calls the body GPT2Model, and both together "
            "GPT2LMHeadModel.",
            ids=(1, len(inputs.ids)),
            states=(1, *inputs.state().shape),
            logits=(1, *inputs.logits().shape),
        )
        _put_heads_on(inputs, lesson, n_own)
    lesson.say(
        "The model has {total:,} parameters. {own:,} of them belong only to the vocabulary head. "
        "The {matrix:,} of {reads} belong to the body, which reads with them. So a model without "
        "its tied head is not smaller, and a new head does not change the matrix.",
        total=counted.total,
        own=n_own,
        matrix=inputs.weight.numel(),
        reads=inputs.reads,
    )
    lesson.blocks.append(
        "In Python:\n"
        "     h = model.body(ids)                      # (B, T, D)\n"
        "     logits = model.logits(h)                 # (B, T, V)\n"
        "     from tiedgpt.heads import SequenceClassifier\n"
        '     SequenceClassifier(model, labels=["bad", "good"])(ids, lengths)   # (B, 2)'
    )


def _put_heads_on(inputs: LessonInput, lesson: Lesson, n_vocabulary_parameters: int) -> None:
    """Put each kind of head on the body."""
    bare = copy_sharing(inputs.gpt)
    bare.head = None
    rows = [("the vocabulary", str(lesson.numbers["logits"]), f"{n_vocabulary_parameters:,}")]
    for name, (head_class, options, shape) in HEADS.items():
        with torch.random.fork_rng(devices=[]):
            model = head_class(bare, **options).eval()
        out = model(inputs.ids.expand(*shape, -1))
        cost = sum(p.numel() for n, p in model.named_parameters() if not n.startswith("gpt."))
        lesson.numbers[head_class.__name__] = cost
        rows.append((name, str(tuple(out.shape)), f"{cost:,}"))
    lesson.table(("head", "its output for this text", ">parameters of its own"), rows)


def tuning(inputs: LessonInput, lesson: Lesson) -> None:
    """Show what moves on either side of W: with the head alone, with adapters, with W frozen."""
    follows = (
        "the same ones that read: the head of this model is its embedding."
        if inputs.tied
        else "and does not change those that read, {reads}."
    )
    lesson.say(
        "Training only the head trains {matrix:,} of {total:,} numbers, " + follows,
        matrix=inputs.weight.numel(),
        total=ledger(inputs.module).total,
        reads=inputs.reads,
    )
    with lesson.optional("a step of the head alone, and other ways to tune"):
        _step_the_head(inputs, lesson)
        _count_ways_to_tune(inputs, lesson)


@torch.no_grad()
def _step_the_head(inputs: LessonInput, lesson: Lesson) -> None:
    """Take one step of SGD with the matrix that predicts, and follow its rows on both sides."""
    split, tied = gradient_split(inputs.gpt, None, inputs.ids, arrays=True), inputs.tied
    assert split.read is not None and split.predict is not None
    rows = vocab_matrices(inputs.gpt)[-1].weight
    step = LEARNING_RATE * torch.from_numpy(split.predict + split.read * tied).to(rows)
    far = step.norm(dim=1)
    seen = torch.isin(torch.arange(len(far), device=far.device), inputs.ids)
    largest = [far.where(side, -1).argsort(descending=True)[:3] for side in (seen, ~seen)]
    lesson.table(
        ("row of", "in the text", ">moves as input", ">as output", ">of its length"),
        [
            (inputs.word(i), "yes" if seen[i] else "no", f"{far[i] * tied:.2g}", f"{far[i]:.2g}",
             f"{far[i] / rows[i].norm():.2%}")
            for i in torch.cat(largest).tolist()
        ],
    )  # fmt: skip
    logits = {
        "before": inputs.logits(),
        "the new rows predict": F.linear(inputs.state(), rows - step),
    }
    if tied:
        changed = {"wte.weight": (rows - step).to(inputs.gpt.wte.weight.dtype)}
        logits["the new rows read and predict"] = inputs.logits(inputs.gpt, changed)
    lesson.numbers["losses"] = {name: float(inputs.loss(x)) for name, x in logits.items()}
    losses = "; ".join(f"{name}, {{losses[{name}]:.4f}}" for name in logits)
    both = " Both columns are equal: training the head always changes the input, too."
    squares = torch.linalg.eigvalsh((step.T @ step).double()).flip(0)
    lesson.say(
        "This was one step of SGD (learning rate {rate}) on the text. {n_moved:,} of {size:,} rows "
        "moved: the text's tokens by {seen_moved:.2g} on average, the others by "
        "{others_moved:.2g}." + both * tied + f" The loss: {losses}.",
        rate=LEARNING_RATE,
        n_moved=int((far > 0).sum()),
        size=len(far),
        seen_moved=float(far[seen].mean()),
        others_moved=float(far[~seen].mean()),
        largest_move=float(far.max()),
        kept=float(squares[:RANK].sum() / squares.sum()),
    )


def _count_ways_to_tune(inputs: LessonInput, lesson: Lesson) -> None:
    """Count what each way to tune trains, in a model without memory."""
    config, (size, width) = inputs.gpt.config, inputs.weight.shape
    rank, head_alone = min(RANK, width), "body,+wte" if inputs.tied else "body"
    ways: dict[str, Callable[[GPT], TrainableParameters]] = {
        "everything": count_trainable,
        f"--freeze {head_alone}": lambda model: freeze(model, head_alone),
        "--freeze wte": lambda model: freeze(model, "wte"),
        f"--lora {rank}": lambda model: lora(model, rank),
        f"--lora {rank} --lora-targets wte,...": lambda model: lora(model, rank, (*BLOCKS, "wte")),
    }
    rows, counts = [], lesson.numbers.setdefault("moving", {})
    for name, choose in ways.items():
        with torch.device("meta"):
            model = GPT(config)
            choice = choose(model)
        counts[name] = choice.moving
        sides = (model.wte, model.head or model.wte)
        is_moved = (any(p.requires_grad for p in side.parameters()) for side in sides)
        moves = ["moves" if moved else "stays" for moved in is_moved]
        rows.append((name, f"{choice.moving:,}", f"{choice.moving / choice.total:.2%}", *moves))
    lesson.table(("tiedgpt tune", ">trains", ">of all", "W as input", "output"), rows)
    lesson.say(
        "An adapter of W is one pair P Q, {size:,} x {rank} and {rank} x {width:,}: {pair:,} "
        "numbers instead of {matrix:,}. Row i changes by P_i Q, where it is read and where it "
        "predicts. All rows change within the same {rank} directions. The best {rank} directions "
        "hold {kept:.0%} of the step above.",
        size=size,
        rank=rank,
        width=width,
        pair=rank * (size + width),
    )
