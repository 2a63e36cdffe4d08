"""The GPT family, readable, verified and fast: one matrix that reads and predicts.

    import tiedgpt

    model = tiedgpt.GPT.from_pretrained("runs/my-1")  # or "gpt2", a GGUF file, nanoGPT's ckpt.pt
    print(model.wte.weight.shape, model.head)  # (V, D), and None: W reads and predicts
    print(tiedgpt.tie.audit(model).verdict)  # tied
    with tiedgpt.Engine("runs/my-1") as engine:
        print(engine.generate("Once upon", max_new_tokens=20).text)

The packages are `train`, `tune`, `infer`, `tie`, `inspect`, `evaluate`, `heads`, `data`, `weights`,
`text`, `plots`, `serve` and `lessons`; `help(tiedgpt.tie)` shows the names of one. Names are
imported when they are first used, so that `import tiedgpt` costs nothing.
"""

from typing import TYPE_CHECKING

from tiedgpt.names import lazy_names

if TYPE_CHECKING:
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

__version__ = "0.1.0"

__all__ = ["GPT", "Engine", "GPTConfig", "KVCache", "Tokenizer", "__version__", "explain"]

__getattr__, __dir__ = lazy_names(__name__)
