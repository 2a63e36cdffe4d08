"""Which parameters of a module are one, at one moment and between two.

A *slot* is a place in a module that holds a parameter, by name: `lm_head.weight`. Slots that hold
the same Parameter are one; slots that hold two Parameters over the same memory are *aliased*: they
move together until something replaces one of them, and an optimizer steps them twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from tiedgpt.core.model import GPT
from tiedgpt.tie.heads import Unembed
from tiedgpt.tie.storages import storage_key

Kind = Literal["split", "aliased", "joined"]
APART, ALIASED, ONE = range(3)


@dataclass(frozen=True)
class Slot:
    """What a name stood for."""

    parameter: Tensor
    """Kept, so that neither its identity nor its memory is given to another meanwhile."""
    storage: Hashable
    shape: tuple[int, ...]
    device: torch.device


@dataclass(frozen=True)
class TieChange:
    """Slots that were one and are not, or the reverse."""

    kind: Kind
    """split: two matrices; aliased: two Parameters over one memory; joined: one Parameter again."""
    names: tuple[str, ...]
    """The slots, by their names before."""
    text: str
    """What happened, in words, with the shapes."""
    advice: str
    """What to do about it."""


def slots(module: nn.Module) -> dict[str, Slot]:
    """Return every slot of a module.

    Where a GPT of ours predicts with W there is no second parameter; the face that predicts counts
    as a slot, `head` (or the name of the `Unembed` in a head), so that its loss is noticed. What
    is lazy (a LazyLinear's) has no shape or memory to share, and is a slot once it has.
    """
    found = dict(module.named_parameters(remove_duplicate=False))
    faces: dict[str, nn.Parameter] = {}
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(part, GPT) and part.head is None:
            faces[f"{prefix}head"] = part.wte.weight
        elif isinstance(part, Unembed):
            faces[name] = part.wte.weight
    named = (found | faces).items()
    return {name: _slot(parameter) for name, parameter in named if not is_lazy(parameter)}


def is_lazy(parameter: Tensor) -> bool:
    """Whether torch knows no shape of the parameter until its module is first called."""
    return isinstance(parameter, UninitializedParameter)


def _slot(parameter: Tensor) -> Slot:
    return Slot(parameter, storage_key(parameter), tuple(parameter.shape), parameter.device)


class Watch:
    """One slot, looked up as user code would: attribute by attribute from the module."""

    def __init__(self, module: nn.Module, path: list[str], parameter: torch.Tensor) -> None:
        self.module, self.path = module, path
        self.parameter = parameter
        self.address = _address(parameter)
        self.found = self._find()  # the parameter; of a GPT's `head` None; an Unembed itself

    def _find(self) -> object:
        part: Any = self.module
        for name in self.path:
            part = getattr(part, name, _GONE)
        return part

    def unchanged(self) -> bool:
        """Whether the slot holds the same object over the same memory."""
        return self._find() is self.found and _address(self.parameter) == self.address


_GONE = object()


def _address(parameter: torch.Tensor) -> int:
    try:
        return parameter.data_ptr()
    except RuntimeError:  # sharded and wrapped tensors have none
        return 0


def groups(now: dict[str, Slot]) -> list[tuple[str, ...]]:
    """Return the names that stand for the same memory, two or more of them."""
    by_storage: dict[Hashable, list[str]] = {}
    for name, slot in now.items():
        by_storage.setdefault(slot.storage, []).append(name)
    return [tuple(names) for names in by_storage.values() if len(names) > 1]


def compare(before: dict[str, Slot], after: dict[str, Slot]) -> list[TieChange]:
    """Return what became of every group, and the groups that are new."""
    found: list[TieChange] = []
    for names in groups(before):
        was = ONE if len({id(before[name].parameter) for name in names}) == 1 else ALIASED
        successors = _successors(names, before, after)
        level = _level(successors.values(), after)
        if level < was:
            found.append(_parted(names, successors, before, after, aliased=level == ALIASED))
        elif level > was:
            found.append(_joined(names, after, was_aliased=True))
    for names in groups(after):
        origins = {name: _origin(name, before, after) for name in names}
        known = {name: origin for name, origin in origins.items() if origin in before}
        if len({before[origin].storage for origin in known.values()}) > 1:
            found.append(_joined(tuple(known), after, was_aliased=False))
    return found


def _origin(name: str, before: dict[str, Slot], after: dict[str, Slot]) -> str:
    """Return what stood in a slot's place before: `head.weight`, where `head` is new."""
    gone = (old for old in before if old not in after and old.startswith(f"{name}."))
    return name if name in before else next(gone, "")


def _successors(
    names: tuple[str, ...], before: dict[str, Slot], after: dict[str, Slot]
) -> dict[str, list[str]]:
    """Return what stands in the place of each name now.

    A module that was wrapped or replaced has other names: `lm_head.weight` may have become
    `lm_head.1.weight`, or `lm_head.modules_to_save.default.weight` beside the original. Those of
    the matrix's shape count.
    """
    shapes = {before[name].shape for name in names}
    shapes |= {after[name].shape for name in names if name in after}
    places: dict[str, list[str]] = {}
    for name in names:
        if name in after:
            places[name] = [name]
            continue
        parent = name if name.rpartition(".")[2] != "weight" else name.removesuffix(".weight")
        places[name] = [
            new
            for new, slot in after.items()
            if new not in before and new.startswith(f"{parent}.") and slot.shape in shapes
        ]
    return places


def _level(places: Iterable[list[str]], after: dict[str, Slot]) -> int:
    """Whether every place holds the same Parameters, the same memory, or neither."""
    sets = list(places)
    if len({frozenset(id(after[name].parameter) for name in names) for names in sets}) == 1:
        return ONE
    if len({frozenset(after[name].storage for name in names) for names in sets}) == 1:
        return ALIASED
    return APART


def _parted(
    names: tuple[str, ...],
    successors: dict[str, list[str]],
    before: dict[str, Slot],
    after: dict[str, Slot],
    *,
    aliased: bool,
) -> TieChange:
    """Describe slots that were one, and what to do."""
    first, others = names[0], names[1:]
    shape = before[first].shape
    rest = " and ".join(others)
    if aliased:
        return TieChange(
            "aliased",
            names,
            f"{rest} and {first} {shape} were one Parameter and are two over the same memory",
            "an optimizer made now would step it twice, and the next copy or move parts them "
            "(load_state_dict(assign=True) does this); tie(model) makes them one again",
        )
    now = [new for name in names for new in successors[name]]
    became = []
    for name in names:
        if name in after:
            if after[name].storage != before[name].storage:
                became.append(f"{name} is another matrix now, {after[name].shape}")
        elif successors[name]:
            what = " and ".join(f"{new} {after[new].shape}" for new in successors[name])
            became.append(f"in the place of {name} is {what}")
        else:
            became.append(f"{name} is gone")
    text = f"{rest} and {first} {shape} were one matrix and are not: {', '.join(became)}"
    return TieChange("split", names, text, _advice(names, now, before, after))


def _advice(
    names: tuple[str, ...], now: list[str], before: dict[str, Slot], after: dict[str, Slot]
) -> str:
    """Say what to do, from what is seen: names, shapes, devices."""
    again = "tie(model) makes them one again"
    if any("modules_to_save" in name for name in now):
        return (
            "the adapter trains a copy of its own: give PEFT ensure_weight_tying=True, or adapt "
            "both names"
        )
    if not all(any(new == n or new.startswith(_parent(n)) for new in now) for n in names):
        return f"nothing of that shape predicts now; if it should, put a head back and {again}"
    if len({after[new].shape for new in now}) > 1:
        return f"only one of them was resized: resize both, then {again}"
    if any(before[name].device.type == "meta" for name in names) and all(
        after[new].device.type != "meta" for new in now
    ):
        return f"to_empty gives every name memory of its own: {again} before weights are loaded"
    if "head" in {name.rpartition(".")[2] for name in names}:
        return (
            "if the head should share W, tie(model); if it is meant to have a matrix of its own, "
            "untie(model) or replace_head(model, module) does it and reports it"
        )
    return f"{again}; if two are meant, set config.tie_word_embeddings=False so that files say so"


def _parent(name: str) -> str:
    return name.removesuffix("weight")


def _joined(names: tuple[str, ...], after: dict[str, Slot], *, was_aliased: bool) -> TieChange:
    """Describe slots that have become one."""
    first, rest = names[0], " and ".join(names[1:])
    shape = after[first].shape
    if len({id(after[name].parameter) for name in names}) > 1:
        return TieChange(
            "aliased",
            names,
            f"{rest} and {first} {shape} were two matrices and are two Parameters over one memory",
            "an optimizer would step it twice: assign the Parameter itself, or use tie(model)",
        )
    before = "two Parameters over one memory" if was_aliased else "two matrices"
    return TieChange(
        "joined",
        names,
        f"{rest} and {first} {shape} were {before} and are one Parameter",
        "an optimizer made before this holds the one that is gone: make a new one; "
        "config.tie_word_embeddings should be True now",
    )
