"""What can be trained: language modelling, four kinds of labelled examples, and fine-tuning."""

from tiedgpt.train.objectives.kinds import Answer, Choose, Classify, Tag
from tiedgpt.train.objectives.labelled import Labelled

LABELLED: dict[str, type[Labelled]] = {
    "classify": Classify,
    "tag": Tag,
    "choose": Choose,
    "answer": Answer,
}
