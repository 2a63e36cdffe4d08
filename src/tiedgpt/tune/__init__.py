"""Train a part of a model: adapters on frozen matrices, or chosen parameters.

    print(freeze(model, "body,+h.11"))     # train the last block alone, and say so
    print(lora(model, rank=8))             # or adapters on all blocks
    merge(model)                           # and a plain GPT again

Each changes the model in place. `print` of the first two says what moves and what stays.
"""

from tiedgpt.tune.adapters import lora, merge
from tiedgpt.tune.freezing import freeze

__all__ = ["freeze", "lora", "merge"]
