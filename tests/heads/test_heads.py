import pytest
import torch
import torch.nn.functional as F

from tests.heads.conftest import OPTIONS
from tiedgpt.errors import UserError
from tiedgpt.heads import (
    FeatureExtractor,
    MultipleChoice,
    SequenceClassifier,
    SpanFinder,
    TokenClassifier,
    best_spans,
    pad,
)

SEQUENCES = [[5, 17, 80, 3, 9], [44], [1, 2, 3, 4, 5, 6, 7, 8], [90, 91]]


@pytest.mark.parametrize("kind", [SequenceClassifier, SpanFinder, FeatureExtractor])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("pad_id", [0, 96])
def test_a_padded_batch_gives_each_sequence_the_scores_it_has_alone(make, kind, norm, pad_id):
    model = make(kind, norm=norm)
    together = model(*pad(SEQUENCES, pad_id=pad_id))
    for row, sequence in zip(together, SEQUENCES, strict=True):
        (alone,) = model(torch.tensor([sequence]))
        if kind is SpanFinder:
            assert torch.isneginf(row[len(sequence) :]).all()
            row = row[: len(sequence)]
        torch.testing.assert_close(row, alone, atol=1e-5, rtol=1e-5)


def test_padding_changes_no_tokens_label_and_no_mean(make):
    tagger, mean = make(TokenClassifier), make(FeatureExtractor, pooling="mean")
    ids, lengths = pad(SEQUENCES)
    for row, vector, sequence in zip(tagger(ids), mean(ids, lengths), SEQUENCES, strict=True):
        alone = torch.tensor([sequence])
        torch.testing.assert_close(row[: len(sequence)], tagger(alone)[0], atol=1e-5, rtol=1e-5)
        expected = mean.gpt.body(alone)[0].mean(0)
        torch.testing.assert_close(vector, expected, atol=1e-5, rtol=1e-5)


def test_choices_of_different_number_and_length_score_as_each_alone(make):
    model = make(MultipleChoice)
    ids, lengths = pad([*SEQUENCES, [1], [7, 7, 7]])
    lengths[4] = 0  # the second question has two choices
    together = model(ids.view(2, 3, -1), lengths.view(2, 3))
    assert together.shape == (2, 3)
    assert torch.isneginf(together[1, 1])
    for at, sequence in ((0, SEQUENCES[0]), (1, SEQUENCES[1]), (3, SEQUENCES[3]), (5, [7, 7, 7])):
        alone = model(torch.tensor([[sequence]]))
        torch.testing.assert_close(together.view(-1)[at], alone[0, 0], atol=1e-5, rtol=1e-5)


def test_a_token_changes_scores_after_it_and_none_before(make):
    for kind in (TokenClassifier, SpanFinder):
        model = make(kind)
        ids = torch.tensor([SEQUENCES[2]])
        other = ids.clone()
        other[0, 4] = 60
        changed = (model(ids) != model(other)).any(-1)[0].tolist()
        assert changed == [False] * 4 + [True] * 4


def batch_for(kind):
    ids, lengths = pad(SEQUENCES)
    if kind is SequenceClassifier:
        return ids, lengths, torch.tensor([0, 2, 1, -100])
    if kind is TokenClassifier:
        labels = torch.full_like(ids, -100)
        for row, length in zip(labels, lengths.tolist(), strict=True):
            row[:length] = torch.arange(length) % 3
        return ids, labels
    if kind is SpanFinder:
        return ids, lengths, torch.tensor([[1, 3], [0, 0], [4, 7], [0, 1]])
    targets = torch.full_like(ids, -100)
    targets[0, :4], targets[3, :1] = ids[0, 1:5], ids[3, 1:2]
    shape = (2, 2, -1)
    return ids.view(shape), lengths.view(2, 2), targets.view(shape), torch.tensor([0, 1])


LEARNING = [kind for kind in OPTIONS if kind is not FeatureExtractor]


@pytest.mark.parametrize("kind", LEARNING)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_loss_moves_every_parameter_of_body_and_head(make, kind, norm):
    model = make(kind, norm=norm)
    loss = model.loss(*batch_for(kind))
    assert loss.shape == () and loss.isfinite()
    loss.backward()
    cancels = {"multiple_choice_head.summary.bias", "qa_outputs.bias"}  # out of every softmax
    for name, parameter in model.named_parameters():
        assert name in cancels or parameter.grad.any(), name


@pytest.mark.parametrize("kind", LEARNING)
def test_the_losses_gradient_is_the_slope_of_the_loss(make, kind):
    model = make(kind).double()
    batch = batch_for(kind)
    model.loss(*batch).backward()
    for name, parameter in model.named_parameters():
        at = int(parameter.grad.abs().argmax())
        flat = parameter.data.view(-1)
        before = float(parameter.detach().view(-1)[at])
        with torch.no_grad():
            flat[at] = before + 1e-5
            up = float(model.loss(*batch))
            flat[at] = before - 1e-5
            down = float(model.loss(*batch))
            flat[at] = before
        slope = (up - down) / 2e-5
        assert slope == pytest.approx(float(parameter.grad.view(-1)[at]), rel=1e-4, abs=1e-7), name


def test_the_double_heads_loss_is_half_the_language_loss_and_the_choice(make):
    model = make(MultipleChoice)
    ids, lengths, targets, answers = batch_for(MultipleChoice)
    logits = model.gpt(ids.flatten(0, 1))
    language = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    choice = F.cross_entropy(model(ids, lengths), answers)
    expected = choice + 0.5 * language
    torch.testing.assert_close(model.loss(ids, lengths, targets, answers), expected)
    untied = make(MultipleChoice, tied=False)
    language = F.cross_entropy(untied.gpt(ids.flatten(0, 1)).flatten(0, 1), targets.flatten())
    expected = F.cross_entropy(untied(ids, lengths), answers) + 0.5 * language
    torch.testing.assert_close(untied.loss(ids, lengths, targets, answers), expected)


def test_best_spans_are_the_best_of_all_pairs():
    scores = torch.randn(50, 9, 2, generator=torch.Generator().manual_seed(0))
    scores[:, 7:] = float("-inf")
    for row, (first, last) in zip(scores, best_spans(scores).tolist(), strict=True):
        pairs = {(i, j): float(row[i, 0] + row[j, 1]) for i in range(7) for j in range(i, 7)}
        assert (first, last) == max(pairs, key=pairs.__getitem__)


def test_what_cannot_be_is_refused_in_one_line(make, tiny):
    model = make(SequenceClassifier)
    ids, lengths = pad(SEQUENCES)
    with pytest.raises(UserError, match="lengths must be 1 to 8 here, got 0 to 8"):
        model(ids, lengths * torch.tensor([1, 0, 1, 1]))
    with pytest.raises(UserError, match="got 2 to 9"):
        model(ids, lengths + 1)
    with pytest.raises(UserError, match=r"4 sequences need \(4,\)"):
        model(ids, lengths[:2])
    with pytest.raises(UserError, match="at least one token"):
        pad([[1], []])
    for labels in ("pos", [], ["a", "a"], [1, 2]):
        with pytest.raises(UserError, match="labels must"):
            SequenceClassifier(tiny, labels=labels)
    with pytest.raises(UserError, match="has no loss: give two"):
        SequenceClassifier(tiny, labels=["only"]).loss(ids, lengths, lengths)
    with pytest.raises(UserError, match="must be 'last' or 'mean'"):
        FeatureExtractor(tiny, pooling="max")
    with pytest.raises(UserError, match="has no loss"):
        FeatureExtractor(tiny).loss(ids, lengths)
    with pytest.raises(UserError, match="no place for the model's head"):
        make(SequenceClassifier, tied=False)


def test_a_fresh_head_is_small_and_on_the_bodys_dtype(tiny):
    model = SequenceClassifier(tiny.bfloat16(), labels=[str(n) for n in range(500)])
    assert model.score.weight.dtype is torch.bfloat16
    assert float(model.score.weight.detach().float().std()) == pytest.approx(0.02, rel=0.05)
    assert model.score.bias is None
    assert not TokenClassifier(tiny, labels=["a", "b"]).classifier.bias.any()


def test_wrong_arguments_are_our_errors(make):
    model = make(SequenceClassifier)
    with pytest.raises(UserError, match=r"takes a GPT, got str; SequenceClassifier\.fresh"):
        SequenceClassifier("gpt2", ["a", "b"])
    with pytest.raises(UserError, match="labels must be a list of different names, got 3"):
        SequenceClassifier(model.gpt, 3)
    ids, lengths = pad(SEQUENCES)
    with pytest.raises(UserError, match=r"targets must be between 0 and 2, .* got 3"):
        model.loss(ids, lengths, torch.tensor([0, 1, 2, 3]))
