"""A torch module as a Checkpoint: its parameters and their use.

    open_module(model)    for `find_roles`, `audit`, `ledger` and `tie`

Names that share a storage count as one. Two Parameters on one storage have different owners,
because an optimizer would step both.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.tie.heads import predicts_through_wte
from tiedgpt.weights.checkpoint import TIE_KEY, Checkpoint, Claim, Usage
from tiedgpt.weights.roles import MAY_PREDICT, PREDICTS, rank_name
from tiedgpt.weights.torch_file import stored_tensor

TABLES = (nn.Embedding, nn.EmbeddingBag)
PARTS_OF_A_LAYER = ("parametrizations", "_packed_params")
"""Modules inside a single layer that torch parametrized or quantized."""


def open_module(module: nn.Module) -> Checkpoint:
    """Return the parameters of any module under all their names; nothing is copied."""
    holder = unwrap(module)
    has_config = any(hasattr(child, "config") for child in module.modules())
    config, is_tied = _read_config(holder)
    says = "nothing in the module says whether the head is tied"
    if is_tied is not None:
        says = f"the module's config says {TIE_KEY}={is_tied}"
    tensors = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if isinstance(parameter, UninitializedParameter):
            raise UserError(f"{name} has no shape yet (a lazy module): run the model once first")
        tensors[name] = stored_tensor(name, parameter, owner=id(parameter))
    return Checkpoint(
        source=type(module).__name__,
        container="module",
        tensors=tensors,
        config=config if has_config else {},
        claim=Claim(is_tied, says, different_is_untied=not has_config),
        usage=_find_usage(module, holder, list(tensors)),
        in_memory=True,
    )


def _find_usage(module: nn.Module, holder: nn.Module, names: list[str]) -> Usage:
    """Return the names of lookup tables and of products, and whether anything predicts."""
    with_weight = [name for name in names if f".{name}".endswith(".weight")]
    weights = {name: module.get_submodule(name[: -len(".weight")]) for name in with_weight}
    children = list(module.modules())
    # A classifier of tiedgpt.heads does not let its GPT predict.
    classifiers = [child for child in children if getattr(child, "predicts_tokens", None) is False]
    bodies = [getattr(child, "gpt", None) for child in classifiers]
    gpts = [child for child in children if isinstance(child, GPT) and child not in bodies]
    tied = [gpt.wte for gpt in gpts if predicts_through_wte(gpt)]
    multiplying = [wte for wte in tied if hasattr(wte, "unembed")]
    head_name, head = _ask_for_head(module, holder) or _find_head_by_name(module) or ("", None)
    computation = ""
    if len(multiplying) < len(tied):
        computation = "is missing (in the place of wte is a module without unembed)"
    elif head is not None:
        computation = _describe_computation(head)
        has_matrix = any(parameter.ndim == 2 for parameter in head.parameters())
        if not (computation or has_matrix or isinstance(holder, GPT)):
            computation = f"({head_name}, {type(head).__name__}) holds no matrix that is W"
    can_be_asked = callable(getattr(holder, "get_output_embeddings", None))
    return Usage(
        reads=tuple(name for name, child in weights.items() if isinstance(child, TABLES)),
        predicts=tuple(
            name
            for name, child in weights.items()
            if isinstance(child, nn.Linear) or child in multiplying
        ),
        head_computation=computation,
        headless=head is None and bool(classifiers or can_be_asked),
    )


def unwrap(module: nn.Module) -> nn.Module:
    """Return the model inside DataParallel, torch.compile and the like."""
    for _ in range(8):
        inner = getattr(module, "module", None) or getattr(module, "_orig_mod", None)
        if hasattr(module, "config") or not isinstance(inner, nn.Module):
            break
        module = inner
    return module


def _ask_for_head(module: nn.Module, holder: nn.Module) -> tuple[str, nn.Module] | None:
    """Ask a model of transformers for its output embeddings."""
    try:
        head = holder.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return None
    names = (name for name, child in module.named_modules() if child is head)
    return (next(names, "head"), head) if isinstance(head, nn.Module) else None


def _find_head_by_name(module: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the first part with a head's name; where the name may be another's, a single layer."""
    for name, layer in module.named_modules():
        last = name.rpartition(".")[2]
        is_single = all(child in PARTS_OF_A_LAYER for child, _ in layer.named_children())
        possible = rank_name(name, "output") and last in MAY_PREDICT
        if last in PREDICTS or (possible and (is_single or _is_adapted(layer))):
            return name, layer
    return None


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") or hasattr(module, "base_layer")


def _describe_computation(head: nn.Module) -> str:
    """Return why a head does not multiply with a stored parameter; "" if it does."""
    for child in head.modules():  # quantized, parametrized, normalized, or with buffers
        has_buffers = any(True for _ in child.buffers(recurse=False))
        is_packed = not isinstance(getattr(child, "weight", None), (Tensor, nn.Module, type(None)))
        if is_packed or has_buffers or is_parametrized(child) or hasattr(child, "weight_g"):
            return f"({type(child).__name__}) computes its weight, or has more than a weight"
    adapted = (type(child).__name__ for child in head.modules() if _is_adapted(child))
    return next((f"({name}) adds an adapter to it" for name in adapted), "")


def _read_config(module: nn.Module) -> tuple[dict[str, Any], bool | None]:
    """Return the vocabulary size and type from a module's config, and its claim about the tie."""
    config = getattr(module, "config", None)
    for inner in ("text_config", "decoder"):
        if getattr(config, TIE_KEY, None) is None:
            config = getattr(config, inner, None) or config
    values = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    claim = values.get(TIE_KEY, getattr(config, TIE_KEY, None))
    described = {
        "vocab_size": values.get("vocab_size"),
        "model_type": getattr(config, "model_type", None),
    }
    return described, claim if isinstance(claim, bool) else None
