"""Look inside a GPT: what it predicts at each position, layer by layer, and with which rows of W.

    positions       the prediction at each of N positions, and what the true token cost
    lens            the prediction that each layer's state would give
    dot             one prediction as the dot products that it is: h with every row of W
    vocabulary      the rows of W: norms, frequency, directions, tokens that no text reaches
    gradient_split  the gradient of W: the part from reading, and the part from predicting
    attention       a layer's attention weights, and the hidden states
    ablate          what each head, attention and MLP is worth in loss

Each takes a `tiedgpt.GPT`, a path, a run directory, a hub name or transformers' GPT-2 in memory.
It returns numpy arrays in a dataclass with `.to_json()`. Logits are held for 64 positions at most.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiedgpt.inspect.gradients import gradient_split as gradient_split
    from tiedgpt.inspect.layers import ablate as ablate
    from tiedgpt.inspect.layers import attention as attention
    from tiedgpt.inspect.layers import lens as lens
    from tiedgpt.inspect.predictions import dot as dot
    from tiedgpt.inspect.predictions import positions as positions
    from tiedgpt.inspect.rows import vocabulary as vocabulary

_MODULES = {
    "positions": "predictions",
    "lens": "layers",
    "dot": "predictions",
    "vocabulary": "rows",
    "gradient_split": "gradients",
    "attention": "layers",
    "ablate": "layers",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tiedgpt.inspect' has no attribute {name!r}")
    return getattr(import_module(f"tiedgpt.inspect.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
