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

from tiedgpt.names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
