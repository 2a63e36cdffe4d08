"""Inspect a GPT: predictions by position and by layer, attention, ablation, and the rows of W.

    from tiedgpt.inspect import lens, positions

    print(positions("runs/my-1", text="Once upon a time"))  # or a model, and its tokenizer
    result = lens(model, tokenizer, "Once upon a time")
    print(result.to_json())  # or result.figure(), or its fields, which are numpy arrays
    print(list(INSPECTIONS))  # all of them

`registry.INSPECTIONS` lists the functions. Each takes a `tiedgpt.GPT`, a path, a run directory, a
hub name or transformers' GPT-2 in memory. It returns a `Result`: numpy arrays in a dataclass, which
prints as a table, and has `.to_json()` and `.figure()`. Logits are held for 64 positions at most.
`steer` adds a direction while a model computes. The functions are imported when they are first
used.
"""

from tiedgpt.names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
