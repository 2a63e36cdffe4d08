"""The four kinds of labelled work, a file each: what a line says, and what is right."""

from tiedgpt.train.exercises.answer import Answer
from tiedgpt.train.exercises.choose import Choose
from tiedgpt.train.exercises.classify import Classify
from tiedgpt.train.exercises.exercise import Exercise, Malformed, Prepared, Right
from tiedgpt.train.exercises.tag import Tag

EXERCISES: dict[str, type[Exercise]] = {
    "classify": Classify,
    "tag": Tag,
    "choose": Choose,
    "answer": Answer,
}

__all__ = ["EXERCISES", "Exercise", "Malformed", "Prepared", "Right"]
