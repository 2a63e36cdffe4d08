"""Measure how well a model predicts: perplexity, bits per byte, multiple choice and cloze.

For example:

    from tiedgpt import Engine
    from tiedgpt.evaluate import score_text

    with Engine("runs/my-1") as engine:
        score = score_text(engine, open("text.txt").read())
    print(score.perplexity, score.bits_per_byte)
"""

from tiedgpt.names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
