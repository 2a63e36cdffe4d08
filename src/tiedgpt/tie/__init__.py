"""The tie as a checked contract: count it, audit it, fix it, change it on purpose, guard it.

`ledger` and `audit` take a module or any checkpoint; on safetensors, GGUF and ONNX files they work
without torch. So each name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiedgpt.tie.audits import audit as audit
    from tiedgpt.tie.fixes import fix as fix
    from tiedgpt.tie.guards import TieBrokenError as TieBrokenError
    from tiedgpt.tie.guards import TieWarning as TieWarning
    from tiedgpt.tie.guards import guard as guard
    from tiedgpt.tie.ledgers import ledger as ledger
    from tiedgpt.tie.surgery import replace_head as replace_head
    from tiedgpt.tie.surgery import tie as tie
    from tiedgpt.tie.surgery import untie as untie
    from tiedgpt.tie.vocabulary import add_tokens as add_tokens
    from tiedgpt.tie.vocabulary import prune as prune
    from tiedgpt.tie.vocabulary import resize_vocab as resize_vocab

_MODULES = {
    "audits": ("audit",),
    "fixes": ("fix",),
    "guards": ("TieBrokenError", "TieWarning", "guard"),
    "ledgers": ("ledger",),
    "surgery": ("replace_head", "tie", "untie"),
    "vocabulary": ("add_tokens", "prune", "resize_vocab"),
}
__all__ = [name for names in _MODULES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"tiedgpt.tie.{module}"), name)
    raise AttributeError(f"module 'tiedgpt.tie' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
