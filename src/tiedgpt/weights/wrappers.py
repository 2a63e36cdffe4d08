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
    bare = {n: WRAPPERS.sub("", n) for n in checkpoint.tensors if not COUNTERS.fullmatch(n)}
    bodies = {match[1] for name in bare.values() if (match := FIRST_NORM.fullmatch(name))}
    body = bodies.pop() if len(bodies) == 1 else None
    *outer, last = re.findall(r"\w+\.", body or "") or [""]
    parent = "".join(outer)
    beside = [name for name in bare.values() if body is None or not name.startswith(body)]
    if body is not None and all(n.startswith(tuple(parent + h for h in HEADS)) for n in beside):
        prefix = BODY_PREFIX if beside or last == BODY_PREFIX else ""
        bare = {
            name: prefix + short.removeprefix(body)
            if short.startswith(body)
            else short.removeprefix(parent)
            for name, short in bare.items()
        }
    tensors: dict[str, StoredTensor] = {}
    for name, short in bare.items():
        if short in tensors:
            raise CorruptInputError(
                f"{checkpoint.source} holds {printable(short)} twice, with and without a prefix"
            )
        tensor = checkpoint.tensors[name]
        tensors[short] = tensor if short == name else replace(tensor, name=short)
    return replace(checkpoint, tensors=tensors)


def find_nested_gpt(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the prefix of a GPT inside another model, and a tensor outside it, if there is one."""
    bodies = (match[1] for name in names if (match := FIRST_NORM.fullmatch(name)))
    body = next(bodies, "").removesuffix(BODY_PREFIX)
    outside = (name for name in names if not name.startswith(body))
    return (body, name) if body and (name := next(outside, "")) else None
