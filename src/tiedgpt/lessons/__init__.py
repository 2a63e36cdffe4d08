"""Lessons on a live model: what `tiedgpt explain` shows, and `tiedgpt.explain` returns.

For example:

    import tiedgpt

    print(tiedgpt.lessons.TOPICS.keys())
    lesson = tiedgpt.explain("norms", "runs/my-1")  # or any GPT-2 in memory
    print(lesson)  # the text, with the numbers of this model
    print(lesson.numbers)  # every number by name
"""

from tiedgpt.lessons.lesson import TOPICS
from tiedgpt.lessons.overview import explain

__all__ = ["TOPICS", "explain"]


def __dir__() -> list[str]:
    return __all__
