"""Write nanoGPT's `ckpt.pt`, which its `sample.py --init_from=resume` loads as it is.

A dict of torch.save: "model" (the state dict, wte and lm_head on one storage), "model_args",
"iter_num", "best_val_loss", "config". There is no "optimizer": nanoGPT's train.py cannot resume
from it, only sample, and evaluate or fine-tune what loads "model" itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.files import replacing, require_room
from tiedgpt.text.tokenizer import Tokenizer
from tiedgpt.weights.dialects.nanogpt import KEPT_BESIDE, PREFIX
from tiedgpt.weights.names import EMBEDDING, shapes
from tiedgpt.weights.writers.limits import require_computed, require_gelu

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FIXED = {"norm": "pre", "attention_windows": None, "layer_norm_epsilon": 1e-5}
"""What nanoGPT computes, besides its GELU, and a model must have."""
NO_LOSS = 1e9
"""nanoGPT's own best_val_loss before the first evaluation."""


def write_nanogpt(
    model: GPT,
    path: Path,
    *,
    tokenizer: Tokenizer | None = None,
    precision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    approximate_gelu: bool = False,
) -> None:
    """Write `path` for nanoGPT in "fp32", "bf16" or "fp16"; None is the model's own type.

    nanoGPT computes the exact GELU since June 2023 and did the tanh form before. A model of GPT-2's
    tanh form (`gelu_new`) is therefore refused unless `approximate_gelu` says that it may run a
    little differently there, as GPT-2 itself does in nanoGPT. Read back here, it is what it was:
    the activation, each dropout and the special ids are noted in "config", which nanoGPT ignores
    (its one dropout is `resid_pdrop`).

    Raises `UserError`, before anything is written, for what nanoGPT does not compute: a head of its
    own, GPT-1's norm, banded attention, other activations, another MLP width or epsilon. The
    tokenizer has no place in the file.
    """
    config = model.config
    require_computed("nanoGPT", model, FIXED)
    require_gelu("nanoGPT (since June 2023)", model, "gelu", approximate_gelu=approximate_gelu)
    if precision is not None and precision not in PRECISIONS:
        raise UserError(f"precision={precision!r} is none of {', '.join(PRECISIONS)}")
    dtype = model.wte.weight.dtype if precision is None else PRECISIONS[precision]
    n_bytes = config.parameter_count() * dtype.itemsize
    require_room(path.parent, n_bytes)
    checkpoint = {
        "model": _state(model, dtype),
        "model_args": _model_args(model),
        "iter_num": 0,
        "best_val_loss": NO_LOSS,
        "config": {name: getattr(config, name) for name in KEPT_BESIDE},
    }
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.save(checkpoint, _Counted(file, n_bytes, progress))  # type: ignore[arg-type]


class _Counted:
    """A file that tells how much was written; of the zip's own bytes beyond the tensors, none."""

    def __init__(
        self, file: BinaryIO, n_bytes: int, progress: Callable[[int, int], None] | None
    ) -> None:
        self.file, self.n_bytes, self.progress, self.done = file, n_bytes, progress, 0

    def write(self, data: bytes) -> int:
        self.done += self.file.write(data)
        if self.progress is not None:
            self.progress(min(self.done, self.n_bytes), self.n_bytes)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def _model_args(model: GPT) -> dict[str, Any]:
    config = model.config
    return {
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "block_size": config.n_positions,
        "bias": config.bias,
        "vocab_size": config.vocab_size,
        "dropout": config.resid_pdrop,
    }


def _state(model: GPT, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return nanoGPT's state dict in its order; lm_head is wte's tensor under a second name."""
    tensors = dict(model.named_parameters())
    state = {PREFIX + name: _own(tensors[name], dtype) for name in shapes(model.config)}
    state["lm_head.weight"] = state[PREFIX + EMBEDDING]
    return state


def _own(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values on a storage that holds nothing else, since storages are saved whole."""
    tensor = parameter.detach().to("cpu", dtype).contiguous()
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        tensor = tensor.clone()
    return tensor
