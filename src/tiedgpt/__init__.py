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

from tiedgpt.names import lazy_names

__version__ = "0.1.0"

__all__ = ["GPT", "Engine", "GPTConfig", "KVCache", "Tokenizer", "__version__", "explain"]

__getattr__, __dir__ = lazy_names(__name__)
