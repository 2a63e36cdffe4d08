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
from tiedgpt.weights.checkpoint import TIE_KEY, Checkpoint, Claim, Usage
from tiedgpt.weights.roles import MAY_PREDICT, PREDICTS, name_rank
from tiedgpt.weights.torch_file import stored_tensor

TABLES = (nn.Embedding, nn.EmbeddingBag)


def module_checkpoint(module: nn.Module) -> Checkpoint:
    """Return the parameters of any module under all their names; nothing is copied."""
    tensors = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if isinstance(parameter, UninitializedParameter):
            raise UserError(f"{name} has no shape yet (a lazy module): run the model once first")
        tensors[name] = stored_tensor(name, parameter, owner=id(parameter))
    with_weight = [name for name in tensors if f".{name}".endswith(".weight")]
    weights = {name: module.get_submodule(name[: -len(".weight")]) for name in with_weight}
    parts, holder = list(module.modules()), unwrapped(module)
    # A classifier of tiedgpt.heads does not let its GPT predict.
    classifiers = [part for part in parts if getattr(part, "predicts_tokens", None) is False]
    bodies = [getattr(part, "gpt", None) for part in classifiers]
    gpts = [part for part in parts if isinstance(part, GPT) and part not in bodies]
    tied = [gpt.wte for gpt in gpts if predicts_through_wte(gpt)]
    multiplying = [wte for wte in tied if hasattr(wte, "unembed")]
    head_name, head = _output_module(module, holder)
    derived = "" if head is None else _why_derived(head)
    if head is not None and not derived and not isinstance(holder, GPT):
        if not any(parameter.ndim == 2 for parameter in head.parameters()):
            derived = f"({head_name}, {type(head).__name__}) holds no matrix that is W"
    if len(multiplying) < len(tied):
        derived = "is missing (in the place of wte is a module without unembed)"
    has_config = any(hasattr(part, "config") for part in parts)
    config, is_tied = _config(holder)
    says = "nothing in the module says whether the head is tied"
    if is_tied is not None:
        says = f"the module's config says {TIE_KEY}={is_tied}"
    usage = Usage(
        reads=tuple(name for name, part in weights.items() if isinstance(part, TABLES)),
        predicts=tuple(
            name
            for name, part in weights.items()
            if isinstance(part, nn.Linear) or part in multiplying
        ),
        derived=derived,
        headless=head is None
        and bool(classifiers or callable(getattr(holder, "get_output_embeddings", None))),
    )
    return Checkpoint(
        source=type(module).__name__,
        container="module",
        tensors=tensors,
        config=config if has_config else {},
        claim=Claim(is_tied, says, different_is_untied=not has_config),
        usage=usage,
        in_memory=True,
    )


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside DataParallel, torch.compile and the like."""
    for _ in range(8):
        inner = getattr(module, "module", None) or getattr(module, "_orig_mod", None)
        if hasattr(module, "config") or not isinstance(inner, nn.Module):
            break
        module = inner
    return module


def _output_module(module: nn.Module, holder: nn.Module) -> tuple[str, nn.Module | None]:
    """Return the module that predicts and its name: by asking the model, else by its name."""
    ask = getattr(holder, "get_output_embeddings", None)
    try:
        asked = ask() if callable(ask) else None
    except (AttributeError, NotImplementedError):
        asked = None
    if isinstance(asked, nn.Module):
        return next((name for name, part in module.named_modules() if part is asked), "head"), asked
    for name, part in module.named_modules():
        last = name.rpartition(".")[2]
        single = all(child == "parametrizations" for child, _ in part.named_children())
        possible = name_rank(name, "output") and last in MAY_PREDICT
        if last in PREDICTS or (possible and (single or _is_adapted(part))):
            return name, part
    return "", None


def _is_adapted(part: nn.Module) -> bool:
    return hasattr(part, "lora_A") or hasattr(part, "base_layer")


def _why_derived(head: nn.Module) -> str:
    """Say why a head does not multiply with a parameter as it is; empty if it does."""
    for part in head.modules():
        has_buffers = any(True for _ in part.buffers(recurse=False))
        is_packed = not isinstance(getattr(part, "weight", None), (Tensor, nn.Module, type(None)))
        if is_packed or has_buffers or is_parametrized(part) or hasattr(part, "weight_g"):
            return f"({type(part).__name__}) computes its weight, or has more than a weight"
        if _is_adapted(part):
            return f"({type(part).__name__}) adds an adapter to it"
    return ""


def _config(module: nn.Module) -> tuple[dict[str, Any], bool | None]:
    """Return what a module's config says of the vocabulary and of its type, and of the tie."""
    config = getattr(module, "config", None)
    for inner in ("text_config", "decoder"):
        config = config if hasattr(config, TIE_KEY) else getattr(config, inner, config)
    values = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    claim = values.get(TIE_KEY, getattr(config, TIE_KEY, None))
    kept = {
        "vocab_size": values.get("vocab_size"),
        "model_type": getattr(config, "model_type", None),
    }
    return kept, claim if isinstance(claim, bool) else None
