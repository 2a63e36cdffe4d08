"""Files of heads: scores agree with transformers in both directions."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.heads.conftest import OPTIONS, SHAPE, enlarge
from tiedgpt import GPT, GPTConfig
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.heads import FeatureExtractor, MultipleChoice, SequenceClassifier

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

transformers.logging.disable_progress_bar()

FAMILIES = {
    "pre": ("GPT2", transformers.GPT2Config),
    "post": ("OpenAIGPT", transformers.OpenAIGPTConfig),
}


def change_config(directory: Path, **keys) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def their_class(head_class, norm):
    return getattr(transformers, FAMILIES[norm][0] + head_class.architecture)


def assert_same_scores(ours, theirs):
    ids = torch.randint(1, 96, (3, 2, 11), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([[11, 7], [1, 4], [10, 11]])
    flat, flat_lengths = ids.flatten(0, 1), lengths.flatten()
    padded = torch.arange(11) >= lengths[..., None]
    ids[padded] = 96  # their pad_token_id
    mask = (~padded.flatten(0, 1)).long()
    with torch.no_grad():
        if isinstance(ours, SequenceClassifier):
            pair = ours(flat, flat_lengths), theirs(flat).logits
        elif isinstance(ours, MultipleChoice):
            answer = theirs(ids, mc_token_ids=lengths - 1)
            logits = ours.gpt(flat).view_as(answer.logits)
            torch.testing.assert_close(logits, answer.logits, atol=1e-4, rtol=1e-5)
            pair = ours(ids, lengths), answer.mc_logits
        else:
            states = theirs(flat, attention_mask=mask).last_hidden_state
            pair = ours(flat, flat_lengths), states[torch.arange(6), flat_lengths - 1]
    torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_class", OPTIONS)
@pytest.mark.parametrize(("norm", "bias"), [("pre", True), ("pre", False), ("post", True)])
def test_transformers_loads_every_tensor_of_our_head(make, head_class, norm, bias, tmp_path):
    """Also from a body without biases, for which zeros are written."""
    ours = make(head_class, norm=norm, bias=bias)
    ours.save_pretrained(tmp_path)
    cls = their_class(head_class, norm)
    theirs, info = cls.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[problem] for problem in info)
    assert theirs.config.architectures == [cls.__name__]
    assert_same_scores(ours, theirs.eval())
    ids = torch.randint(96, (1, 2, 9) if head_class is MultipleChoice else (2, 9))
    assert torch.equal(head_class.from_pretrained(tmp_path)(ids), ours(ids))
    theirs.save_pretrained(tmp_path / "theirs")
    names = load_file(tmp_path / "model.safetensors").keys()
    writes_head = (head_class, norm) == (MultipleChoice, "post")  # W as lm_head.weight
    if not writes_head:
        assert names == load_file(tmp_path / "theirs/model.safetensors").keys()


@pytest.mark.parametrize("head_class", OPTIONS)
@pytest.mark.parametrize("norm", FAMILIES)
def test_transformers_head_gives_its_scores(head_class, norm, tmp_path):
    torch.manual_seed(2)
    labels = {"id2label": {0: "no", 1: "yes", 2: "perhaps", 3: "never"}}
    shape = SHAPE | {"pad_token_id": 96, "bos_token_id": 96, "eos_token_id": 96}
    choice = head_class is MultipleChoice
    config = FAMILIES[norm][1](**shape, **({} if choice else labels), summary_first_dropout=0.3)
    theirs = enlarge(their_class(head_class, norm)(config))
    theirs.save_pretrained(tmp_path)
    ours = head_class.from_pretrained(tmp_path)
    assert not ours.training
    assert_same_scores(ours, theirs)
    if head_class is SequenceClassifier:
        assert ours.labels == ("no", "yes", "perhaps", "never")
    if choice:
        assert ours.multiple_choice_head.dropout.p == 0.3


@pytest.mark.parametrize("head_class", OPTIONS)
@pytest.mark.parametrize("norm", FAMILIES)
def test_a_saved_head_loads_back_bit_for_bit_with_its_labels(make, head_class, norm, tmp_path):
    model = make(head_class, norm=norm)
    model.save_pretrained(tmp_path)
    back = head_class.from_pretrained(tmp_path)
    assert back.gpt.config == model.gpt.config
    assert back.state_dict().keys() == model.state_dict().keys()
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, back.state_dict()[name]), name
    assert getattr(back, "labels", None) == getattr(model, "labels", None)
    back.save_pretrained(tmp_path / "again")
    for file in ("config.json", "model.safetensors", "README.md"):
        assert (tmp_path / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


def test_pooling_is_kept(make, tmp_path):
    make(FeatureExtractor, pooling="mean").save_pretrained(tmp_path)
    assert FeatureExtractor.from_pretrained(tmp_path).pooling == "mean"
    assert FeatureExtractor.from_pretrained(tmp_path, pooling="last").pooling == "last"


def test_architectures_without_a_transformers_class_have_our_class_name(tmp_path):
    config = GPTConfig(**SHAPE, attention_windows=(0, 4))
    model = enlarge(SequenceClassifier(GPT(config), labels=["a", "b"]))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tiedgpt"):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    back = SequenceClassifier.from_pretrained(tmp_path)
    assert back.gpt.config.attention_windows == (0, 4)
    assert torch.equal(back.score.weight, model.score.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_a_fresh_head_takes_the_body_of_any_gpt(make, tmp_path, tied):
    language = make(MultipleChoice, tied=tied).gpt
    language.save_pretrained(tmp_path / "language")
    torch.manual_seed(0)
    model = SequenceClassifier.fresh(tmp_path / "language", labels=["a", "b"])
    assert model.gpt.head is None and not model.training
    ids = torch.randint(97, (2, 9))
    assert torch.equal(model.gpt.body(ids), language.body(ids))
    model.save_pretrained(tmp_path / "classifier")
    again = FeatureExtractor.fresh(tmp_path / "classifier")
    assert torch.equal(again.gpt.body(ids), language.body(ids))
    two = MultipleChoice.fresh(tmp_path / "language")
    assert torch.equal(two.gpt(ids), language(ids))


def test_a_classifiers_claim_of_an_untied_head_is_ignored(make, tmp_path):
    make(SequenceClassifier).save_pretrained(tmp_path)
    change_config(tmp_path, tie_word_embeddings=False)
    assert SequenceClassifier.from_pretrained(tmp_path).gpt.head is None


def test_a_missing_head_is_never_initialised_at_random(make, tmp_path):
    make(MultipleChoice).gpt.save_pretrained(tmp_path / "language")
    for head_class in filter(lambda head_class: head_class.head_tensors, OPTIONS):
        says = rf"{head_class.head_tensors[0]}.*{head_class.__name__}\.fresh"
        with pytest.raises(UserError, match=says):
            head_class.from_pretrained(tmp_path / "language")
    change_config(tmp_path / "language", tie_word_embeddings=False)
    with pytest.raises(CorruptInputError, match=r"tie_word_embeddings: false.*resolve=.tie"):
        MultipleChoice.fresh(tmp_path / "language")
    make(MultipleChoice).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["multiple_choice_head.summary.bias"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CorruptInputError, match=r"summary\.weight': \(1, 32\)}"):
        MultipleChoice.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("head_class", "keys", "error", "says"),
    [
        (SequenceClassifier, {"problem_type": "ranking"}, UserError, "problem_type"),
        (SequenceClassifier, {"id2label": {"0": "a"}}, CorruptInputError, "each of the 3 rows"),
        (SequenceClassifier, {"id2label": "a"}, CorruptInputError, "each of the 3 rows"),
        (SequenceClassifier, {"id2label": {"0": 1, "1": 2, "2": 3}}, UserError, "labels must"),
        (MultipleChoice, {"summary_type": "mean"}, UserError, "summary_type='mean'"),
        (MultipleChoice, {"summary_activation": "tanh"}, UserError, "summary_activation"),
        (MultipleChoice, {"summary_first_dropout": 2}, CorruptInputError, "summary_first_dropout"),
        (FeatureExtractor, {"pooling": "max"}, UserError, "pooling must"),
    ],
)
def test_unsupported_configs_are_refused(make, tmp_path, head_class, keys, error, says):
    make(head_class).save_pretrained(tmp_path)
    change_config(tmp_path, **keys)
    with pytest.raises(error, match=says):
        head_class.from_pretrained(tmp_path)


def test_head_tensors_of_wrong_shapes_are_named(make, tmp_path):
    model = make(SequenceClassifier)
    for wrong in (torch.zeros(3), torch.zeros(3, 31), torch.zeros(0, 32), torch.zeros(2**40, 0)):
        model.save_pretrained(tmp_path)
        change_config(tmp_path, id2label=None)
        state = load_file(tmp_path / "model.safetensors") | {"score.weight": wrong}
        save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(CorruptInputError, match=r"score\.weight"):
            SequenceClassifier.from_pretrained(tmp_path)


@pytest.mark.parametrize("head_class", [SequenceClassifier, MultipleChoice])
def test_a_classifier_opened_as_a_language_model_names_classify(make, head_class, tmp_path):
    make(head_class).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="not a language model") as caught:
        GPT.from_pretrained(tmp_path)
    assert "tiedgpt classify" in caught.value.hint
