"""Remove the names of wrapping modules from the names of parameters.

Checkpoints of trainers name the modules around a model: `_orig_mod.` (torch.compile), `module.`
(DDP, DeepSpeed), `_module.` (Opacus), `_forward_module.` (Fabric), `model.` or `net.` (an attribute
of a LightningModule). Any such prefix is removed if it leaves the names of a GPT-2 or a GPT-1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.tensors import StoredTensor, printable

BODY_PREFIX = "transformer."
OTHER_HEADS = ("score.", "classifier.", "multiple_choice_head.", "qa_outputs.")
"""Prefixes of the tensors of classifiers on a GPT; `tiedgpt.heads` loads them."""
HEADS = ("lm_head.", *OTHER_HEADS)
"""Prefixes of the tensors beside a GPT's body."""
_PARTS = r"(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|_fpw_module)\."
WRAPPERS = re.compile(rf"^(?:module\.|{_PARTS})+|(?<=\.){_PARTS}")
"""Parts that torch.compile, activation checkpointing, FSDP and DDP insert in any architecture."""
COUNTERS = re.compile(r"(.+\.)?n_averaged")
"""Steps of `torch.optim.swa_utils.AveragedModel`, beside the averaged weights."""
ADAPTER = re.compile(r"lora_A|\.lora_")
"""Parts of parameter names that adapters insert."""
FIRST_NORM = re.compile(r"((?:\w+\.)*)h\.0\.ln_1\.weight")
"""A name that the body of every GPT has, after its prefix."""


def without_wrappers(checkpoint: Checkpoint) -> Checkpoint:
    """Rename the tensors as in the unwrapped module.

    Raises `UserError` for an adapter, or a model with an unmerged adapter.
    """
    adapter = next(filter(ADAPTER.search, checkpoint.tensors), None)
    if adapter is not None:
        raise UserError(
            f"{checkpoint.source} holds an adapter ({printable(adapter)[:80]})",
            hint="merge it into its model first, with `tiedgpt convert MODEL DEST --adapter "
            "DIRECTORY`",
        )
    tensors: dict[str, StoredTensor] = {}
    for name, bare in bare_names(checkpoint.tensors).items():
        if bare in tensors:
            raise CorruptInputError(
                f"{checkpoint.source} holds {printable(bare)} twice, with and without a prefix"
            )
        tensor = checkpoint.tensors[name]
        tensors[bare] = tensor if bare == name else replace(tensor, name=bare)
    return replace(checkpoint, tensors=tensors)


def bare_names(names: Iterable[str]) -> dict[str, str]:
    """Return each name as in the unwrapped module, by the name in the file."""
    bare = {name: WRAPPERS.sub("", name) for name in names if not COUNTERS.fullmatch(name)}
    bodies = {match[1] for name in bare.values() if (match := FIRST_NORM.fullmatch(name))}
    if len(bodies) != 1:
        return bare
    (body,) = bodies
    *outer, last = re.findall(r"\w+\.", body) or [""]
    parent = "".join(outer)
    heads = tuple(parent + head for head in HEADS)
    beside = [name for name in bare.values() if not name.startswith(body)]
    if not all(name.startswith(heads) for name in beside):
        return bare
    prefix = BODY_PREFIX if beside or last == BODY_PREFIX else ""
    return {
        name: prefix + short.removeprefix(body)
        if short.startswith(body)
        else short.removeprefix(parent)
        for name, short in bare.items()
    }


def find_nested_gpt(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the prefix of a GPT inside another model, and a tensor outside it, if there is one."""
    bodies = (match[1] for name in names if (match := FIRST_NORM.fullmatch(name)))
    body = next(bodies, "").removesuffix(BODY_PREFIX)
    outside = (name for name in names if not name.startswith(body))
    return (body, name) if body and (name := next(outside, "")) else None
