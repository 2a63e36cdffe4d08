"""Look inside a GPT: what it predicts at each position, layer by layer, and with which rows of W.

    positions       the prediction at each of N positions, and what the true token cost
    lens            the prediction that each layer's state would give
    dot             one prediction as the dot products that it is: h with every row of W
    vocabulary      the rows of W: norms, frequency, directions, tokens that no text reaches
    neighbours      the rows nearest to one token's row, by three measures
    gradient_split  the gradient of W: the part from reading, and the part from predicting
    attention       a layer's attention weights, and the hidden states
    ablate          what each head, attention and MLP is worth in loss
    random_head     what a random head in the place of W would cost, in loss and parameters

Each takes a `tiedgpt.GPT`, a path, a run directory, a hub name or transformers' GPT-2 in memory.
It returns numpy arrays in a dataclass with `.to_json()`. Logits are held for 64 positions at most.
"""

from tiedgpt.inspect.gradients import gradient_split
from tiedgpt.inspect.layers import ablate, attention, lens
from tiedgpt.inspect.predictions import dot, positions
from tiedgpt.inspect.rows import vocabulary
from tiedgpt.inspect.similarity import neighbours
from tiedgpt.inspect.untied import random_head

__all__ = [
    "ablate",
    "attention",
    "dot",
    "gradient_split",
    "lens",
    "neighbours",
    "positions",
    "random_head",
    "vocabulary",
]
