from tiedgpt.weights.checkpoint import Format as Format
from tiedgpt.weights.checkpoint import TokenizerFile as TokenizerFile
from tiedgpt.weights.checkpoint import Writer as Writer
from tiedgpt.weights.load import CheckpointWarning as CheckpointWarning
from tiedgpt.weights.load import Loaded as Loaded
from tiedgpt.weights.registry import register as register
from tiedgpt.weights.source import Source as Source
from tiedgpt.weights.source import open_checkpoint as open_checkpoint
