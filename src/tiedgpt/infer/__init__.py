"""Generate text: the engine, its options, and the texts that it returns.

For example:

    from tiedgpt.infer import Engine

    with Engine("runs/my-1") as engine:
        print(engine.generate("Once upon", max_new_tokens=20, temperature=0.8, seed=1).text)
        for token in engine.stream("Once upon"):
            print(token.text, end="")
"""

from tiedgpt.names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
