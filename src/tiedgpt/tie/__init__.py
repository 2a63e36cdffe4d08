"""The tie as a checked contract: count it, audit it, fix it, change it on purpose, guard it.

    from tiedgpt.tie import audit, guard, ledger, tie

    print(audit("model.safetensors").verdict)  # tied, untied, broken, ...: any file or module
    print(ledger(model))  # every parameter, counted once
    tie(model)  # share one matrix again
    with guard(model):  # warn, with the line of code that breaks the tie
        train(model)

`ledger` and `audit` take a module or any checkpoint; on safetensors, GGUF and ONNX files they work
without torch. So each name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from tiedgpt.names import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__)
