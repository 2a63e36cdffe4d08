from tiedgpt.weights.load import CheckpointWarning as CheckpointWarning
from tiedgpt.weights.load import Loaded as Loaded
from tiedgpt.weights.registry import Format as Format
from tiedgpt.weights.registry import TokenizerFile as TokenizerFile
from tiedgpt.weights.registry import Writer as Writer
from tiedgpt.weights.registry import register as register
from tiedgpt.weights.sources import open_checkpoint as open_checkpoint
