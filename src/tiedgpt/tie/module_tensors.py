"""A module in memory as an inventory of its parameters, with what each is used for.

Two names on one storage, and views of it, count as one; two Parameters on one storage are told
apart by their owner, since an optimizer would step both.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tiedgpt.core.embedding import TiedEmbedding
from tiedgpt.core.model import GPT
from tiedgpt.tie.candidates import is_position
from tiedgpt.tie.heads import unembeds
from tiedgpt.weights.opening import CLAIM, claim_of
from tiedgpt.weights.stored import Inventory
from tiedgpt.weights.torch_file import stored_tensor

PRODUCTS = ("Linear", "Conv1D", "NonDynamicallyQuantizableLinear")


def module_inventory(module: nn.Module) -> Inventory:
    """Return the module's parameters by all their names."""
    tensors = {
        name: stored_tensor(name, parameter, owner=id(parameter))
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    reads, predicts = [], []
    for name, part in module.named_modules(remove_duplicate=False):
        weight = f"{name}.weight" if name else "weight"
        if weight in tensors and isinstance(part, (nn.Embedding, TiedEmbedding)):
            reads.append(weight)
        if weight in tensors and isinstance(part, nn.Linear):
            predicts.append(weight)
    config = _config(module)
    claim = claim_of(config)
    claim = claim if isinstance(claim, bool) else None
    said = "nothing in the module says whether the head is tied"
    if claim is not None:
        said = f"the module's config says {CLAIM}={claim}"
    return Inventory(
        type(module).__name__, "module", tensors, config=config, claim=claim, claim_source=said,
        reads=tuple(reads), predicts=tuple(predicts),
    )  # fmt: skip


def multiply_adds(module: nn.Module) -> dict[str, int]:
    """Return, for each parameter's name, the multiply-adds a token that its module does with it.

    A lookup costs none; a matrix that multiplies costs one for each element; norms and biases are
    not counted. Our own `wte` is counted where it predicts.
    """
    costs: dict[str, int] = {}
    own_head = {id(part.wte) for part in module.modules() if _reads_only(part)}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for local, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{prefix}.{local}" if prefix else local
            looked_up = isinstance(part, (nn.Embedding, nn.EmbeddingBag)) or id(part) in own_head
            product = parameter.ndim >= 2 and not looked_up and not is_position(name)
            costs[name] = parameter.numel() if product else 0
    return costs


def _reads_only(part: nn.Module) -> bool:
    return isinstance(part, GPT) and part.head is not None and not unembeds(part)


def _config(module: nn.Module) -> dict[str, Any]:
    """Return what a module's config says of the vocabulary and of the tie."""
    config = getattr(module, "config", None)
    for inner in ("text_config", "decoder"):
        if not hasattr(config, CLAIM) and hasattr(config, inner):
            config = getattr(config, inner)
    values = config if isinstance(config, dict) else vars(config) if _has_vars(config) else {}
    found = {key: values[key] for key in ("vocab_size", "model_type") if key in values}
    claim = values.get(CLAIM, getattr(config, CLAIM, None))
    return found | ({} if claim is None else {CLAIM: claim})


def _has_vars(config: object) -> bool:
    return hasattr(config, "__dict__")
