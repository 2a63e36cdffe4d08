"""Checkpoints of the GPT family: opened, loaded, saved and converted; one module per format.

For example:

    from tiedgpt.weights import open_checkpoint
    from tiedgpt.weights.load import load

    checkpoint = open_checkpoint("model.gguf")  # names, shapes and types; no weights are read
    loaded = load("model.gguf")  # the model, and notes on how the file was understood
    print(loaded.layout, loaded.dtype, *loaded.notes)
    loaded.model.save_pretrained("out")
"""

from typing import TYPE_CHECKING

from tiedgpt.names import lazy_names

if TYPE_CHECKING:
    from tiedgpt.weights.load import CheckpointWarning as CheckpointWarning
    from tiedgpt.weights.load import Loaded as Loaded
    from tiedgpt.weights.registry import Format as Format
    from tiedgpt.weights.registry import TokenizerFile as TokenizerFile
    from tiedgpt.weights.registry import Writer as Writer
    from tiedgpt.weights.registry import register as register
    from tiedgpt.weights.sources import open_checkpoint as open_checkpoint

__getattr__, __dir__ = lazy_names(__name__)
