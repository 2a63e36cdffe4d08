"""The tie as a checked contract: count it, audit it, mend it, change it on purpose, guard it.

`ledger` and `audit` take a model in memory or any checkpoint; on safetensors, GGUF and ONNX files
they work without torch. The names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiedgpt.tie.accounts import ledger
    from tiedgpt.tie.auditing import audit
    from tiedgpt.tie.guarding import TieBrokenError, TieWarning, guard
    from tiedgpt.tie.repair import fix
    from tiedgpt.tie.surgery import add_tokens, prune, replace_head, resize_vocab, tie, untie

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

_HOMES = {
    "TieBrokenError": "tiedgpt.tie.guarding",
    "TieWarning": "tiedgpt.tie.guarding",
    "add_tokens": "tiedgpt.tie.surgery",
    "audit": "tiedgpt.tie.auditing",
    "fix": "tiedgpt.tie.repair",
    "guard": "tiedgpt.tie.guarding",
    "ledger": "tiedgpt.tie.accounts",
    "prune": "tiedgpt.tie.surgery",
    "replace_head": "tiedgpt.tie.surgery",
    "resize_vocab": "tiedgpt.tie.surgery",
    "tie": "tiedgpt.tie.surgery",
    "untie": "tiedgpt.tie.surgery",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tiedgpt.tie' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
