"""A torch module as a Checkpoint: its parameters, and what the module does with each.

    module_checkpoint(model)    for `find_roles`, `audit`, `ledger` and `tie`

Names that share a storage count as one. Two Parameters on one storage have different owners,
because an optimizer would step both.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from tiedgpt.core.embedding import TiedEmbedding
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.tie.heads import predicts_through_wte
from tiedgpt.tie.roles import MAY_PREDICT, PREDICTS, is_position, name_rank
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.opening import CLAIM, claim_of
from tiedgpt.weights.torch_file import stored_tensor

EMBEDDINGS = (nn.Embedding, TiedEmbedding)


def module_checkpoint(module: nn.Module) -> Checkpoint:
    """Return the parameters of any module under all their names; nothing is copied."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise UserError(f"{name} has no shape yet (a lazy module): run the model once first")
    tensors = {
        name: stored_tensor(name, parameter, owner=id(parameter))
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    reads, predicts = [], []
    for name, part in module.named_modules(remove_duplicate=False):
        weight = f"{name}.weight".removeprefix(".")
        if weight in tensors and isinstance(part, EMBEDDINGS):
            reads.append(weight)
        if weight in tensors and isinstance(part, nn.Linear):
            predicts.append(weight)
    holder = unwrapped(module)
    head_name, head = output_module(module)
    derived = "" if head is None else _why_derived(head)
    has_matrix = any(
        len(t.shape) == 2 and name.startswith(f"{head_name}.") for name, t in tensors.items()
    )
    if head is not None and not derived and not has_matrix and not isinstance(holder, GPT):
        derived = f"({head_name}, {type(head).__name__}) holds no matrix that is W"
    config = _config(holder)
    claim = claim_of(config)
    claim = claim if isinstance(claim, bool) else None
    return Checkpoint(
        source=type(module).__name__,
        format="module",
        tensors=tensors,
        config=config,
        claim=claim,
        claim_source="nothing in the module says whether the head is tied"
        if claim is None
        else f"the module's config says {CLAIM}={claim}",
        reads=tuple(reads),
        predicts=tuple(predicts),
        derived=derived,
        headless=head is None and callable(getattr(holder, "get_output_embeddings", None)),
    )


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside DataParallel, torch.compile and the like."""
    for _ in range(8):
        inner = getattr(module, "module", None) or getattr(module, "_orig_mod", None)
        if hasattr(module, "config") or not isinstance(inner, nn.Module):
            break
        module = inner
    return module


def output_module(module: nn.Module) -> tuple[str, nn.Module | None]:
    """Return the module that predicts and its name: by asking the model, else by its name."""
    ask = getattr(unwrapped(module), "get_output_embeddings", None)
    if callable(ask):
        try:
            asked = ask()
        except (AttributeError, NotImplementedError):
            asked = None
        if isinstance(asked, nn.Module):
            names = {id(part): name for name, part in module.named_modules()}
            return names.get(id(asked), "lm_head"), asked
    for name, part in module.named_modules():
        last = name.rpartition(".")[2]
        single = all(child == "parametrizations" for child, _ in part.named_children())
        possible = name_rank(name, "output") and last in MAY_PREDICT
        if last in PREDICTS or (possible and (single or _is_adapted(part))):
            return name, part
    return "", None


def multiply_adds(module: nn.Module) -> dict[str, int]:
    """Return the multiply-adds per token of each parameter, by name.

    A lookup costs none; a matrix that multiplies costs one per element; norms and biases are not
    counted. The `wte` of a tied GPT is counted once, where it predicts.
    """
    predicting = {
        id(part.wte)
        for part in module.modules()
        if isinstance(part, GPT) and predicts_through_wte(part)
    }
    costs: dict[str, int] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        table = isinstance(part, (*EMBEDDINGS, nn.EmbeddingBag)) and id(part) not in predicting
        for local, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{prefix}.{local}".removeprefix(".")
            product = parameter.ndim >= 2 and not table and not is_position(name)
            costs[name] = parameter.numel() if product else 0
    return costs


def _is_adapted(part: nn.Module) -> bool:
    return "lora_A" in part._modules or "base_layer" in part._modules


def _why_derived(head: nn.Module) -> str:
    """Say why a head does not multiply with a parameter as it is; empty if it does."""
    for part in head.modules():
        kind = type(part).__name__
        if is_parametrized(part):
            return f"({kind}) is parametrized"
        if _is_adapted(part):
            return f"({kind}) adds an adapter to it"
        buffers = [name for name, _ in part.named_buffers(recurse=False)]
        if buffers:
            return f"({kind}) has buffers: {', '.join(buffers)}"
        weight = getattr(part, "weight", None)
        if callable(weight) and not isinstance(weight, (nn.Module, Tensor)):
            return f"({kind}) has packed, quantized weights"
        if {"weight_v", "weight_g"} <= part._parameters.keys():
            return f"({kind}) computes its weight from weight_g and weight_v"
    return ""


def _config(module: nn.Module) -> dict[str, Any]:
    """Return what a module's config says of the vocabulary and of the tie."""
    config = getattr(module, "config", None)
    for inner in ("text_config", "decoder"):
        if not hasattr(config, CLAIM) and hasattr(config, inner):
            config = getattr(config, inner)
    values = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    found = {key: values[key] for key in ("vocab_size", "model_type") if key in values}
    claim = values.get(CLAIM, getattr(config, CLAIM, None))
    return found if claim is None else found | {CLAIM: claim}
