from tiedgpt import core as core
from tiedgpt import data as data
from tiedgpt import evaluate as evaluate
from tiedgpt import heads as heads
from tiedgpt import infer as infer
from tiedgpt import inspect as inspect
from tiedgpt import lessons as lessons
from tiedgpt import plots as plots
from tiedgpt import serve as serve
from tiedgpt import text as text
from tiedgpt import tie as tie
from tiedgpt import train as train
from tiedgpt import tune as tune
from tiedgpt import weights as weights
from tiedgpt.core.cache import KVCache as KVCache
from tiedgpt.core.config import GPTConfig as GPTConfig
from tiedgpt.core.model import GPT as GPT
from tiedgpt.infer.engine import Engine as Engine
from tiedgpt.lessons import explain as explain
from tiedgpt.text import Tokenizer as Tokenizer

__version__: str
