"""Other heads on a GPT's body: a label, the choice between continuations, or features.

Every head calls `gpt.body(ids)`; the body knows nothing of heads. Sequences of different lengths
are padded on the right, where causal attention does not see the padding, and come with `lengths`.

    from tiedgpt.heads import SequenceClassifier, pad

    model = SequenceClassifier.fresh("gpt2", labels=["bad", "good"])       # a new head, N(0, 0.02)
    ids, lengths = pad([tokenizer.encode_document(text) for text in texts])  # (B, T), (B,)
    model.loss(ids, lengths, labels).backward()
    model.labels[model(ids, lengths)[0].argmax()]                          # "good"
    model.save_pretrained("out")                                           # transformers loads it
    SequenceClassifier.from_pretrained("out")                              # and the reverse
    next(predict(model, tokenizer, [{"text": "a cat"}]))["predicted"]      # "good"
"""

from tiedgpt.heads.head import AnsweringHead, Head
from tiedgpt.heads.inputs import pad
from tiedgpt.heads.predictions import open_head, predict
from tiedgpt.heads.tasks import FeatureExtractor, MultipleChoice, SequenceClassifier

__all__ = [
    "AnsweringHead",
    "FeatureExtractor",
    "Head",
    "MultipleChoice",
    "SequenceClassifier",
    "open_head",
    "pad",
    "predict",
]


def __dir__() -> list[str]:
    return __all__
