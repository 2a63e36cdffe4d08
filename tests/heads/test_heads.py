"""The values and gradients of heads on padded batches."""

import warnings

import pytest
import torch
import torch.nn.functional as F

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoModelForSequenceClassification

from tiedgpt.errors import UserError
from tiedgpt.heads import FeatureExtractor, MultipleChoice, SequenceClassifier, pad

SEQUENCES = [[5, 17, 80, 3, 9], [44], [1, 2, 3, 4, 5, 6, 7, 8], [90, 91]]


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("pad_id", [0, 96])
@pytest.mark.parametrize(
    ("head_class", "options"),
    [(SequenceClassifier, {}), (FeatureExtractor, {}), (FeatureExtractor, {"pooling": "mean"})],
)
def test_padding_changes_no_output(make, head_class, options, norm, pad_id):
    model = make(head_class, norm=norm, **options)
    ids, lengths = pad(SEQUENCES, **({"pad_id": pad_id} if pad_id else {}))
    assert ids[1].tolist() == [44] + 7 * [pad_id]
    together = model(ids, lengths)
    assert model(ids[:0], lengths[:0]).shape == together[:0].shape
    for row, sequence in zip(together, SEQUENCES, strict=True):
        torch.testing.assert_close(row, model(torch.tensor([sequence]))[0], atol=1e-5, rtol=1e-5)


def test_mean_pooling_is_the_mean_of_the_states(make):
    model = make(FeatureExtractor, pooling="mean")
    ids = torch.tensor([SEQUENCES[0]])
    torch.testing.assert_close(model(ids)[0], model.gpt.body(ids)[0].mean(0))


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


def batch_for(head_class):
    """Return a batch for the loss of a head."""
    ids, lengths = pad(SEQUENCES)
    if head_class is SequenceClassifier:
        return ids, lengths, torch.tensor([0, 2, 1, -100])
    targets = torch.full_like(ids, -100)
    targets[0, :4], targets[3, :1] = ids[0, 1:5], ids[3, 1:2]
    shape = (2, 2, -1)
    return ids.view(shape), lengths.view(2, 2), targets.view(shape), torch.tensor([0, 1])


def test_the_loss_of_a_classifier_is_the_mean_over_the_counted_labels(make):
    model = make(SequenceClassifier)
    ids, lengths, labels = batch_for(SequenceClassifier)
    logprobs = model(ids, lengths).log_softmax(-1)
    expected = -(logprobs[0, 0] + logprobs[1, 2] + logprobs[2, 1]) / 3
    torch.testing.assert_close(model.loss(ids, lengths, labels), expected)


@pytest.mark.parametrize("problem", [None, "regression", "multi_label_classification"])
@pytest.mark.parametrize("n_labels", [1, 3])
def test_the_loss_of_every_problem_is_that_of_transformers(make, problem, n_labels, tmp_path):
    names = [f"name {number}" for number in range(n_labels)]
    model = make(SequenceClassifier, labels=names, problem_type=problem)
    model.save_pretrained(tmp_path)
    peer = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    peer.config.pad_token_id = 96
    ids, lengths = pad(SEQUENCES, pad_id=96)
    labels = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    labels = labels[:, :n_labels]
    if problem is None and n_labels > 1:
        labels = torch.tensor([0, 2, 1, 2])
    expected = peer(ids, labels=labels).loss
    torch.testing.assert_close(model.loss(ids, lengths, labels), expected)
    if n_labels == 1:
        torch.testing.assert_close(model.loss(ids, lengths, labels[:, 0]), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_the_double_heads_loss_is_half_the_language_loss_and_the_choice(make, tied):
    model = make(MultipleChoice, tied=tied)
    ids, lengths, targets, answers = batch_for(MultipleChoice)
    logits = model.gpt(ids.flatten(0, 1))
    language = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected = F.cross_entropy(model(ids, lengths), answers) + 0.5 * language
    torch.testing.assert_close(model.loss(ids, lengths, targets, answers), expected)


def test_wrong_lengths_and_targets_are_refused(make):
    model = make(SequenceClassifier)
    ids, lengths = pad(SEQUENCES)
    for wrong, says in (
        (lengths * torch.tensor([1, 0, 1, 1]), "1 to 8 here, got 0 to 8"),
        (lengths + 1, "got 2 to 9"),
        (lengths[:2], r"4 sequences need \(4,\)"),
        (lengths.tolist(), "takes lengths as Tensor"),
    ):
        with pytest.raises(UserError, match=says):
            model(ids, wrong)
    with pytest.raises(UserError, match="at least one token"):
        pad([[1], []])
    with pytest.raises(UserError, match=r"targets must be between 0 and 2, .* got 3"):
        model.loss(ids, lengths, torch.tensor([0, 1, 2, 3]))


def test_wrong_arguments_of_heads_are_refused(make, tiny):
    for labels in ("pos", [], ["a", "a"], [1, 2], 3):
        with pytest.raises(UserError, match=r"labels must be .*got"):
            SequenceClassifier(tiny, labels=labels)
    one = SequenceClassifier(tiny, ["only"], problem_type="single_label_classification")
    with pytest.raises(UserError, match="give two"):
        one.loss(*batch_for(SequenceClassifier))
    with pytest.raises(UserError, match=r"problem_type must be .* got 'ranking'"):
        SequenceClassifier(tiny, ["a", "b"], problem_type="ranking")
    several = SequenceClassifier(tiny, ["a", "b"], problem_type="multi_label_classification")
    with pytest.raises(UserError, match=r"\(4, 2\), got \(4,\)"):
        several.loss(*batch_for(SequenceClassifier))
    with pytest.raises(UserError, match="'last' or 'mean'"):
        FeatureExtractor(tiny, pooling="max")
    with pytest.raises(UserError, match="has no loss"):
        FeatureExtractor(tiny).loss(*pad(SEQUENCES))
    with pytest.raises(UserError, match="head over the vocabulary"):
        make(SequenceClassifier, tied=False)
    with pytest.raises(UserError, match=r"got str; SequenceClassifier\.fresh"):
        SequenceClassifier("gpt2", ["a", "b"])


def test_a_fresh_head_is_small_and_has_the_bodys_dtype(tiny):
    model = SequenceClassifier(tiny.bfloat16(), labels=[str(n) for n in range(500)])
    assert model.score.weight.dtype is torch.bfloat16
    assert float(model.score.weight.detach().float().std()) == pytest.approx(0.02, rel=0.05)
    assert model.score.bias is None
    assert not MultipleChoice(tiny).multiple_choice_head.summary.bias.any()
