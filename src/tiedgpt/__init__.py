"""The GPT family, readable, verified and fast: one matrix that reads and predicts.

The public names are imported when they are first used, so that `import tiedgpt` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiedgpt.core.cache import KVCache
    from tiedgpt.core.config import GPTConfig
    from tiedgpt.core.model import GPT
    from tiedgpt.lessons import explain
    from tiedgpt.text import Tokenizer

__version__ = "0.1.0"

__all__ = ["GPT", "GPTConfig", "KVCache", "Tokenizer", "__version__", "explain"]

_HOMES = {
    "GPT": "tiedgpt.core.model",
    "GPTConfig": "tiedgpt.core.config",
    "KVCache": "tiedgpt.core.cache",
    "Tokenizer": "tiedgpt.text",
    "explain": "tiedgpt.lessons",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tiedgpt' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
