"""Train a part of a model: adapters on frozen matrices, or chosen parameters.

    from tiedgpt.tune import freeze, load_adapter, lora, merge, save_adapter

    print(freeze(model, "body,+h.11"))     # train the last block alone, and say so
    print(lora(model, rank=8))             # or adapters on all blocks
    save_adapter(model, "adapter")         # in PEFT's format, on disk
    merge(model)                           # a plain GPT again
    load_adapter(model, "adapter")         # PEFT's files, on the model they are for

Each changes the model in place. `print` of the first two shows the trained and frozen parameters.
For the PEFT package itself, load the saved directory with transformers.
"""

from tiedgpt.tune.adapters import lora, merge
from tiedgpt.tune.freezing import freeze
from tiedgpt.tune.peft_files import load_adapter, save_adapter

__all__ = ["freeze", "load_adapter", "lora", "merge", "save_adapter"]


def __dir__() -> list[str]:
    return __all__
