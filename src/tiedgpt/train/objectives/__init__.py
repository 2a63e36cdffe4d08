"""The objectives: language modelling, replies to examples, labels and choices."""

from tiedgpt.errors import UserError
from tiedgpt.train.objective import Sources
from tiedgpt.train.objectives.choose import Choose
from tiedgpt.train.objectives.classify import Classify
from tiedgpt.train.objectives.labelled import Labelled, LabelSources
from tiedgpt.train.objectives.prepared import is_prepared, open_texts
from tiedgpt.train.objectives.replies import ReplySources, has_examples
from tiedgpt.train.options import TrainOptions

LABELLED: dict[str, type[Labelled]] = {"classify": Classify, "choose": Choose}
"""The objectives on labelled examples, by the name of their --task."""


def open_sources(options: TrainOptions) -> Sources:
    """Open what is to be trained on: examples, texts, or Python's documentation."""
    if options.task in LABELLED:
        return LabelSources(LABELLED[options.task], options.data, options.val)
    if options.recipe == "tune":
        if options.start is None:
            raise UserError("name the model to tune: --from MODEL")
        examples = not is_prepared(options.data) and has_examples(options)
        options.check_data(examples=examples)
        if examples:
            return ReplySources(options)
    return open_texts(options)
