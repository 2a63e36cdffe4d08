"""Measure how well a model predicts: perplexity, bits per byte, multiple choice and cloze.

For example:

    from tiedgpt import Engine
    from tiedgpt.evaluate import score_text

    with Engine("runs/my-1") as engine:
        score = score_text(engine, open("text.txt").read())
    print(score.perplexity, score.bits_per_byte)
"""

from typing import TYPE_CHECKING

from tiedgpt.names import lazy_names

if TYPE_CHECKING:
    from tiedgpt.evaluate.examples import read_examples as read_examples
    from tiedgpt.evaluate.examples import score_examples as score_examples
    from tiedgpt.evaluate.texts import TextScore as TextScore
    from tiedgpt.evaluate.texts import score_text as score_text

__getattr__, __dir__ = lazy_names(__name__)
