"""Make one Parameter of the two matrices of any module, such as a transformers GPT-2.

The input is the module's input embedding, the output the parameter of the same shape (V, D) in
its output embedding, plain or wrapped; where the module does not tell, its caller must.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from tiedgpt.core.embedding import TiedEmbedding
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.tie.reports import REMAKE_OPTIMIZER, Change, TieReport
from tiedgpt.tie.storages import named
from tiedgpt.weights.comparison import Comparison, compare
from tiedgpt.weights.formats.torch_file import stored_tensor

Keep = Literal["input", "output", "mean"]


def require_keep(keep: str) -> None:
    """Raise `UserError` unless `keep` is one of the choices."""
    if keep not in get_args(Keep):
        raise UserError(f"keep={keep!r} is none of {', '.join(map(repr, get_args(Keep)))}")


def share(
    module: nn.Module, keep: Keep, *, input_name: str | None, output_name: str | None
) -> TieReport:
    """Put the input's Parameter in the place of the output's; see `surgery.tie`."""
    for name, part in module.named_modules():
        if isinstance(part, GPT):
            raise UserError(f"the GPT is {name!r} inside {type(module).__name__}: tie that one")
    slots = dict(module.named_parameters(remove_duplicate=False))
    reads = _input_name(module, slots, input_name)
    predicts = _output_names(module, slots, reads, output_name)
    matrix, other = slots[reads], slots[predicts[0]]
    before = named(module)
    apart = merge(matrix, other, keep, names=(reads, predicts[0]))
    for name in predicts:
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, matrix)
    return TieReport(
        input=reads,
        outputs=tuple(predicts),
        shape=tuple(matrix.shape),
        keep=keep,
        apart=apart,
        change=Change.since(before, module),
        notes=(*_claim_tied(module), *_left_over(module, predicts), REMAKE_OPTIMIZER),
    )


@torch.no_grad()
def merge(
    matrix: nn.Parameter, other: Tensor, keep: Keep, *, names: tuple[str, str]
) -> Comparison | None:
    """Leave in `matrix` the values to keep; return how far the two (V, D) were apart.

    On the meta device there is nothing to compare and None is returned. `requires_grad` goes with
    the values; a mean is trainable if either was.
    """
    for what, a, b in (
        ("shape", tuple(matrix.shape), tuple(other.shape)),
        ("dtype", matrix.dtype, other.dtype),
        ("device", matrix.device, other.device),
    ):
        if a != b:
            raise UserError(
                f"{names[0]} has {what} {a} and {names[1]} {b}: make them alike, then tie"
            )
    apart = compare(stored_tensor(names[0], matrix), stored_tensor(names[1], other))
    if keep == "output":
        matrix.copy_(other)
        matrix.requires_grad_(other.requires_grad)
    elif keep == "mean":
        matrix.lerp_(other, 0.5)
        matrix.requires_grad_(matrix.requires_grad or other.requires_grad)
    return apart


def _input_name(module: nn.Module, slots: dict[str, nn.Parameter], given: str | None) -> str:
    """Return the name of the matrix that reads."""
    if given is not None:
        return _asked_for("input", given, slots, list(slots))
    embedding = _from_method(module, "get_input_embeddings")
    if embedding is not None:
        names = [n for n in _names_of(module, embedding) if n in slots and slots[n].ndim == 2]
        return _only("input", names[:1], _matrices(slots))
    tables = [
        f"{name}.weight"
        for name, part in module.named_modules()
        if isinstance(part, (nn.Embedding, TiedEmbedding))
    ]
    if len(tables) > 1:  # positions have a table too; none but the tokens' is predicted with
        alike = [name for name in tables if _same_shape(slots, name, but=tables)]
        if not alike:
            listed = ", ".join(f"{name} {tuple(slots[name].shape)}" for name in tables)
            raise UserError(f"no other matrix has the shape of {listed}: there is nothing to tie")
        tables = alike
    return _only("input", tables, _matrices(slots))


def _output_names(
    module: nn.Module, slots: dict[str, nn.Parameter], reads: str, given: str | None
) -> list[str]:
    """Return every name of the one other matrix, the one that predicts."""
    head = _from_method(module, "get_output_embeddings")
    inside = list(slots) if head is None else _names_of(module, head)
    if given is not None:
        candidates = [_asked_for("output", given, slots, list(slots))]
    else:
        tables = [
            f"{name}.weight"
            for name, part in module.named_modules()
            if isinstance(part, nn.Embedding)
        ]
        alike = _same_shape(slots, reads, but=tables)
        candidates = [name for name in alike if name in inside]
    one = [name for name in inside if slots[name] is slots[reads] and name != reads]
    others = {id(slots[name]): name for name in candidates if slots[name] is not slots[reads]}
    if not others and (one or given is not None):
        raise UserError(f"tied already: {(one or candidates)[0]} is the same Parameter as {reads}")
    if not others and head is not None:
        sizes = [f"{n} {tuple(slots[n].shape)}" for n in inside if slots[n].ndim == 2]
        if sizes:
            raise UserError(
                f"{reads} is {tuple(slots[reads].shape)}, and the head holds "
                f"{', '.join(sizes)}: no matrix of that shape; resize one of them first"
            )
    chosen = _only("output", list(others.values()), _same_shape(slots, reads, but=[reads]))
    return [name for name, parameter in slots.items() if parameter is slots[chosen]]


def _only(role: str, names: list[str], candidates: list[str]) -> str:
    """Return the one name there is, or raise with what to choose from."""
    if len(names) == 1:
        return names[0]
    listed = names or candidates
    if not listed:
        raise UserError(
            "no input embedding and no matrix of any other name: there is nothing to tie"
            if role == "input"
            else "no second matrix of the embedding's shape: there is nothing to tie"
        )
    several = "several matrices" if names else "no matrix for certain"
    shown = ", ".join(listed[:8]) + (", ..." if len(listed) > 8 else "")
    raise UserError(
        f"{several} could be the {role} ({shown}): name the right one, {role}_name={listed[0]!r}"
    )


def _asked_for(role: str, given: str, slots: dict[str, nn.Parameter], candidates: list[str]) -> str:
    """Return the parameter that a name of a parameter or of a module stands for."""
    if given in slots:
        return given
    inside = [n for n in candidates if n.startswith(f"{given}.") and slots[n].ndim == 2]
    if f"{given}.weight" in inside:
        return f"{given}.weight"
    if not inside:
        names = ", ".join(_matrices(slots)[:8])
        raise UserError(f"{role}_name={given!r} names no matrix here; there are {names}")
    return _only(role, inside, inside)


def _from_method(module: nn.Module, method: str) -> nn.Module | None:
    """Ask a module of transformers; None where it does not say."""
    ask = getattr(_that_has(method, module), method, None)
    try:
        answer = ask() if callable(ask) else None
    except NotImplementedError:
        return None
    return answer if isinstance(answer, nn.Module) else None


def _that_has(attribute: str, module: nn.Module) -> nn.Module:
    """Return the module, or the one it holds as `.module` (DataParallel), that can be asked."""
    while not hasattr(module, attribute):
        held = getattr(module, "module", None)
        if not isinstance(held, nn.Module):
            break
        module = held
    return module


def _names_of(module: nn.Module, part: nn.Module) -> list[str]:
    """Return the names in `module` of all parameters of one of its parts."""
    for name, candidate in module.named_modules():
        if candidate is part:
            inside = part.named_parameters(name, remove_duplicate=False)
            return [inner for inner, _ in inside]
    return []


def _same_shape(slots: dict[str, nn.Parameter], reads: str, *, but: list[str]) -> list[str]:
    if reads not in slots:
        return []
    shape = slots[reads].shape
    return [name for name, p in slots.items() if p.shape == shape and name not in but]


def _matrices(slots: dict[str, nn.Parameter]) -> list[str]:
    return [name for name, parameter in slots.items() if parameter.ndim == 2]


def _claim_tied(module: nn.Module) -> list[str]:
    """Let the config say what is so now, where there is one that speaks of it."""
    config = getattr(_that_has("config", module), "config", None)
    if getattr(config, "tie_word_embeddings", True) is True:
        return []
    config.tie_word_embeddings = True  # type: ignore[union-attr]
    return ["config.tie_word_embeddings was False and is True now"]


def _left_over(module: nn.Module, predicts: list[str]) -> list[str]:
    """Say what is not of the tie and stays: a bias, and a wrapping that files have no place for."""
    owner = predicts[0].rpartition(".")[0]
    notes = []
    if isinstance(getattr(module.get_submodule(owner), "bias", None), nn.Parameter):
        notes.append(f"{owner}.bias stays: logits = h W^T + b")
    head = _from_method(module, "get_output_embeddings")
    if head is not None and module.get_submodule(owner) is not head:
        notes.append(
            f"save_pretrained refuses a tie under the name {predicts[0]}: put a plain Linear that "
            "holds the Parameter back as the head before saving"
        )
    return notes
