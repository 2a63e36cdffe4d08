"""A GPT's head: where in it a matrix (V, D) predicts, and how W predicts from inside it.

A head that is h W^T and nothing more needs no module: `model.head` is None. Within a larger head
(a dropout before it, a bias after it) `Unembed` calls the embedding's other face; it has no
matrix of its own, so that there, too, nothing can come untied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tiedgpt.core.embedding import TiedEmbedding
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.tie.storages import storage_key


class Unembed(nn.Module):
    """Score by the rows of an embedding's matrix from inside a head: h W^T, or h W^T + b.

    The embedding is not registered here: it keeps its one name in the model that owns it, and
    copying or pickling that model copies it once.
    """

    def __init__(self, wte: TiedEmbedding, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self._owner = (wte,)  # a tuple hides it from nn.Module's bookkeeping
        self.bias = bias

    @property
    def wte(self) -> TiedEmbedding:
        """The module that owns W."""
        return self._owner[0]

    @property
    def weight(self) -> Tensor:
        """W, (V, D), the embedding's own."""
        return self.wte.weight

    def forward(self, h: Tensor) -> Tensor:
        """Predict: h (..., D) -> logits (..., V)."""
        logits = self.wte.unembed(h)
        return logits if self.bias is None else logits + self.bias

    def extra_repr(self) -> str:
        """Say in `print(model)` whose matrix predicts."""
        bias = "" if self.bias is None else ", and a bias of its own"
        return f"{tuple(self.weight.shape)}, predicts with the rows of wte.weight{bias}"


def require_gpt(model: object) -> GPT:
    """Return the model if it is ours, unsharded; `UserError` says what to do with any other."""
    if not isinstance(model, GPT):
        raise UserError(
            f"{type(model).__name__} is no tiedgpt.GPT; on any other module only `tie` works"
        )
    if type(model.wte.weight) is not nn.Parameter:
        raise UserError(
            f"wte.weight is a {type(model.wte.weight).__name__}: change the model before it is "
            "sharded or wrapped"
        )
    return model


def is_tied(model: GPT) -> bool:
    """Whether W predicts: without a head, or from inside one."""
    return model.head is None or bool(unembeds(model)) or bool(aliases(model.head, model))


def unembeds(model: GPT) -> list[str]:
    """Return the names in the model, `head...`, of modules that predict with its `wte`."""
    return [
        name
        for name, module in _named(model.head)
        if isinstance(module, Unembed) and module.wte is model.wte
    ]


def aliases(head: nn.Module | None, model: GPT) -> list[str]:
    """Return the names of parameters of a head that are the model's W under a second name."""
    if head is None:
        return []
    key = storage_key(model.wte.weight)
    parameters = head.named_parameters("head", remove_duplicate=False)
    return [name for name, parameter in parameters if storage_key(parameter) == key]


def matrices(head: nn.Module | None, model: GPT) -> dict[str, nn.Linear]:
    """Return the linear layers D -> V in a head by their names in the model, `head...`."""
    return {
        name: module
        for name, module in _named(head)
        if isinstance(module, nn.Linear) and module.weight.shape == model.wte.weight.shape
    }


def put(model: GPT, name: str, module: nn.Module) -> None:
    """Replace the module of that name."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def tables(model: GPT) -> dict[str, nn.Parameter]:
    """Return the parameters that have one entry a token: W, and those of a head of its own.

    Raises `UserError` for a head in which anything else has V entries, parameter or buffer.
    """
    found = {"wte.weight": model.wte.weight}
    if model.head is None:
        return found
    if second := aliases(model.head, model):
        raise UserError(
            f"{second[0]} is wte.weight under a second name; resize before the head is replaced"
        )
    size = model.config.vocab_size
    for name, layer in matrices(model.head, model).items():
        if isinstance(layer.weight, nn.Parameter):  # a parametrization makes it of two others
            found[f"{name}.weight"] = layer.weight
    faces = [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, Unembed))]
    held = [*model.head.named_parameters("head"), *model.head.named_buffers("head")]
    for name, tensor in held:
        owner, _, last = name.rpartition(".")
        if name in found or size not in tensor.shape:
            continue
        is_bias = last == "bias" and owner in faces and tensor.shape == (size,)
        if not is_bias or not isinstance(tensor, nn.Parameter):
            raise UserError(
                f"{name} {tuple(tensor.shape)} has {size} entries in a head that is no plain "
                "product with a matrix (V, D): resize before the head is replaced"
            )
        found[name] = tensor
    return found


@torch.no_grad()
def n_scored(model: GPT, head: nn.Module) -> int:
    """Try a head on zeros as `GPT.logits` will call it, (1, D) and (1, 1, D); return its tokens.

    Raises `UserError` where it cannot read them, or gives something else than a score a token.
    """
    weight, n_tokens = model.wte.weight, 0
    for leading in ((1,), (1, 1)):
        h = torch.zeros(*leading, weight.shape[1], dtype=weight.dtype, device=weight.device)
        try:
            with inference(head):
                out = head(h)
        except Exception as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"{describe(head)} cannot read h {tuple(h.shape)} of {h.dtype} on {h.device}: {why}"
            ) from error
        if not isinstance(out, Tensor) or out.shape[:-1] != h.shape[:-1]:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise UserError(
                f"{describe(head)} turns h {tuple(h.shape)} into {got}; a head gives one "
                f"score a token, {(*leading, weight.shape[0])}"
            )
        n_tokens = out.shape[-1]
    return n_tokens


@contextmanager
def inference(module: nn.Module) -> Iterator[None]:
    """Switch dropout off for a while, module by module as it was."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def describe(module: nn.Module) -> str:
    """Return a module in a few words: `Sequential(Dropout, Linear 32 -> 97)`."""
    if isinstance(module, nn.Linear):
        bias = "" if module.bias is None else " with bias"
        return f"Linear {module.in_features} -> {module.out_features}{bias}"
    if isinstance(module, nn.Sequential):
        return f"Sequential({', '.join(describe(part) for part in module)})"
    return type(module).__name__


def _named(head: nn.Module | None) -> Iterator[tuple[str, nn.Module]]:
    return iter(()) if head is None else head.named_modules(prefix="head")
