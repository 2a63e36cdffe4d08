"""A module in memory as a checkpoint of its parameters, with what each is used for.

Two names on one storage, and views of it, count as one; two Parameters on one storage are told
apart by their owner, since an optimizer would step both.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from tiedgpt.core.embedding import TiedEmbedding
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.tie.candidates import MAY_PREDICT, PREDICTS, is_position, role_word
from tiedgpt.tie.heads import unembeds
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.formats.torch_file import stored_tensor
from tiedgpt.weights.opening import CLAIM, claim_of

PRODUCTS = ("Linear", "Conv1D", "NonDynamicallyQuantizableLinear")


def module_checkpoint(module: nn.Module) -> Checkpoint:
    """Return the module's parameters by all their names."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise UserError(f"{name} has no shape yet (a lazy module): run the model once first")
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
    holder = _unwrapped(module)
    head_name, head = _head(module, holder)
    own = [p for p in tensors.values() if len(p.shape) == 2 and _within(p.name, head_name)]
    derived = _derives(head) if head is not None else ""
    if head is not None and not derived and not own and not isinstance(holder, GPT):
        derived = f"({head_name}, {type(head).__name__}) holds no matrix that is W"
    asks = getattr(holder, "get_output_embeddings", None)
    headless = callable(asks) and head is None
    config = _config(holder)
    claim = claim_of(config)
    claim = claim if isinstance(claim, bool) else None
    said = "nothing in the module says whether the head is tied"
    if claim is not None:
        said = f"the module's config says {CLAIM}={claim}"
    return Checkpoint(
        type(module).__name__, "module", tensors, config=config, claim=claim, claim_source=said,
        reads=tuple(reads), predicts=tuple(predicts), derived=derived, headless=headless,
    )  # fmt: skip


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the model in a holder (DataParallel and the like, torch.compile)."""
    for _ in range(8):
        inner = getattr(module, "module", None) or getattr(module, "_orig_mod", None)
        if hasattr(module, "config") or not isinstance(inner, nn.Module):
            break
        module = inner
    return module


def _head(module: nn.Module, holder: nn.Module) -> tuple[str, nn.Module | None]:
    """Return the module that predicts and its name: by asking the model, else by its name."""
    names = {id(part): name for name, part in module.named_modules()}
    asked = None
    asks = getattr(holder, "get_output_embeddings", None)
    if callable(asks):
        try:
            asked = asks()
        except (AttributeError, NotImplementedError):
            asked = None
        if isinstance(asked, nn.Module):
            return names.get(id(asked), "lm_head"), asked
    for name, part in module.named_modules():
        word = role_word(name, PREDICTS, MAY_PREDICT) if name else 0
        alone = all(child == "parametrizations" for child, _ in part.named_children())
        last = name.rpartition(".")[2]
        if last in PREDICTS or (word and last in MAY_PREDICT and (alone or _is_adapted(part))):
            return name, part
    return "", None


def _within(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def _is_adapted(part: nn.Module) -> bool:
    return "lora_A" in part._modules or "base_layer" in part._modules


def _derives(head: nn.Module) -> str:
    """Say why what a head multiplies with is no parameter of its own, or nothing."""
    for part in head.modules():
        kind = type(part).__name__
        if is_parametrized(part):
            return f"({kind}) is parametrized"
        if _is_adapted(part):
            return f"({kind}) adds an adapter to it"
        if any(True for _ in part.buffers(recurse=False)):
            return f"({kind}) has buffers: {', '.join(n for n, _ in part.named_buffers())}"
        weight = getattr(part, "weight", None)
        if callable(weight) and not isinstance(weight, (nn.Module, Tensor)):
            return f"({kind}) has packed, quantized weights"
        if isinstance(weight, Tensor) and {"weight_v", "weight_g"} <= part._parameters.keys():
            return f"({kind}) computes its weight from weight_g and weight_v"
    return ""


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
