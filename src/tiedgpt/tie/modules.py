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

from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.tie.heads import predicts_through_wte
from tiedgpt.tie.roles import MAY_PREDICT, POSITIONS, PREDICTS, name_rank
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.opening import CLAIM
from tiedgpt.weights.torch_file import stored_tensor


def module_checkpoint(module: nn.Module) -> Checkpoint:
    """Return the parameters of any module under all their names; nothing is copied."""
    tensors = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if isinstance(parameter, UninitializedParameter):
            raise UserError(f"{name} has no shape yet (a lazy module): run the model once first")
        tensors[name] = stored_tensor(name, parameter, owner=id(parameter))
    with_weight = [name for name in tensors if f".{name}".endswith(".weight")]
    weights = {name: module.get_submodule(name[: -len(".weight")]) for name in with_weight}
    holder = unwrapped(module)
    head_name, head = output_module(module)
    derived = "" if head is None else _why_derived(head)
    if head is not None and not derived and not isinstance(holder, GPT):
        if not any(parameter.ndim == 2 for parameter in head.parameters()):
            derived = f"({head_name}, {type(head).__name__}) holds no matrix that is W"
    vocabulary, claim = _config(holder)
    says = "nothing in the module says whether the head is tied"
    return Checkpoint(
        source=type(module).__name__,
        format="module",
        tensors=tensors,
        config={"vocab_size": vocabulary},
        claim=claim,
        claim_source=says if claim is None else f"the module's config says {CLAIM}={claim}",
        reads=tuple(name for name, part in weights.items() if isinstance(part, nn.Embedding)),
        predicts=tuple(name for name, part in weights.items() if isinstance(part, nn.Linear)),
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
    try:
        asked = ask() if callable(ask) else None
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
    gpts = [part for part in module.modules() if isinstance(part, GPT)]
    predicting = {id(gpt.wte) for gpt in gpts if predicts_through_wte(gpt)}
    costs: dict[str, int] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        part = module.get_submodule(name.rpartition(".")[0])
        table = isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and id(part) not in predicting
        product = parameter.ndim >= 2 and not table and not POSITIONS.search(name)
        costs[name] = parameter.numel() if product else 0
    return costs


def _is_adapted(part: nn.Module) -> bool:
    return hasattr(part, "lora_A") or hasattr(part, "base_layer")


def _why_derived(head: nn.Module) -> str:
    """Say why a head does not multiply with a parameter as it is; empty if it does."""
    for part in head.modules():
        weight = getattr(part, "weight", None)
        buffers = ", ".join(name for name, _ in part.named_buffers(recurse=False))
        own = {name for name, _ in part.named_parameters(recurse=False)}
        reason = ""
        if is_parametrized(part):
            reason = "is parametrized"
        elif _is_adapted(part):
            reason = "adds an adapter to it"
        elif buffers:
            reason = f"has buffers: {buffers}"
        elif callable(weight) and not isinstance(weight, (nn.Module, Tensor)):
            reason = "has packed, quantized weights"
        elif {"weight_v", "weight_g"} <= own:
            reason = "computes its weight from weight_g and weight_v"
        if reason:
            return f"({type(part).__name__}) {reason}"
    return ""


def _config(module: nn.Module) -> tuple[Any, bool | None]:
    """Return what a module's config says of the vocabulary and of the tie."""
    config = getattr(module, "config", None)
    for inner in ("text_config", "decoder"):
        config = config if hasattr(config, CLAIM) else getattr(config, inner, config)
    values = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    claim = values.get(CLAIM, getattr(config, CLAIM, None))
    return values.get("vocab_size"), claim if isinstance(claim, bool) else None
