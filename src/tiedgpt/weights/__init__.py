"""Checkpoints of the GPT family: opened, loaded, saved and converted; one module per format.

For example:

    from tiedgpt.weights import open_checkpoint
    from tiedgpt.weights.load import load

    checkpoint = open_checkpoint("model.gguf")  # names, shapes and types; no weights are read
    loaded = load("model.gguf")  # the model, and notes on how the file was understood
    print(loaded.layout, loaded.dtype, *loaded.notes)
    loaded.model.save_pretrained("out")
"""

from tiedgpt.names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
