"""The tie as a checked contract: count it, audit it, fix it, change it on purpose, guard it.

`ledger` and `audit` take a module or any checkpoint; on safetensors, GGUF and ONNX files they work
without torch. So each name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiedgpt.tie.audits import audit
    from tiedgpt.tie.fixes import fix
    from tiedgpt.tie.guards import TieBrokenError, TieWarning, guard
    from tiedgpt.tie.ledgers import ledger
    from tiedgpt.tie.surgery import replace_head, tie, untie
    from tiedgpt.tie.vocabulary import add_tokens, prune, resize_vocab

__all__ = [
    "TieBrokenError",
    "TieWarning",
    "add_tokens",
    "audit",
    "fix",
    "guard",
    "ledger",
    "prune",
    "replace_head",
    "resize_vocab",
    "tie",
    "untie",
]

_MODULES = {
    "audits": ("audit",),
    "fixes": ("fix",),
    "guards": ("TieBrokenError", "TieWarning", "guard"),
    "ledgers": ("ledger",),
    "surgery": ("replace_head", "tie", "untie"),
    "vocabulary": ("add_tokens", "prune", "resize_vocab"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"tiedgpt.tie.{module}"), name)
    raise AttributeError(f"module 'tiedgpt.tie' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
