"""The network in plain torch, independent of files, text and training.

For example:

    from tiedgpt.core import GPT, GPTConfig

    model = GPT(GPTConfig.preset("gpt2", n_layer=2))
    logits = model(ids)  # (B, T) -> (B, T, V)
    h = model.body(ids)  # (B, T, D): the input of the head
    model.wte.unembed(h)  # the logits again: W predicts
    model.loss(ids[:, :-1], ids[:, 1:]).backward()  # W gets the gradients of both sides
"""

from tiedgpt.names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
