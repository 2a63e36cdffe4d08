"""What scores a GPT's states besides its vocabulary: labels, tags, choices, spans, features.

The body knows none of this: every head calls `gpt.body(ids)`. Sequences of different lengths are
padded on the right, which no token before the padding can see, and come with `lengths`.

    from tiedgpt.heads import SequenceClassifier, pad

    model = SequenceClassifier.fresh("gpt2", labels=["bad", "good"])       # a new head, N(0, 0.02)
    ids, lengths = pad([tokenizer.encode(text) for text in texts])         # (B, T), (B,)
    model.loss(ids, lengths, labels).backward()
    model.labels[model(ids, lengths)[0].argmax()]                          # "good"
    model.save_pretrained("out")                                           # transformers loads it
    SequenceClassifier.from_pretrained("out")                              # and the reverse
"""

from tiedgpt.heads.choice import MultipleChoice
from tiedgpt.heads.features import FeatureExtractor
from tiedgpt.heads.head import Head
from tiedgpt.heads.labels import SequenceClassifier, TokenClassifier
from tiedgpt.heads.padding import pad
from tiedgpt.heads.spans import SpanFinder, best_spans

HEADS: tuple[type[Head], ...] = (
    SequenceClassifier,
    TokenClassifier,
    MultipleChoice,
    SpanFinder,
    FeatureExtractor,
)

__all__ = [
    "HEADS",
    "FeatureExtractor",
    "Head",
    "MultipleChoice",
    "SequenceClassifier",
    "SpanFinder",
    "TokenClassifier",
    "best_spans",
    "pad",
]
