"""The optimizers by name: records that need no torch, and the functions that they name.

A new optimizer is one file and one record in `OPTIMIZERS`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiedgpt.errors import UserError


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """An optimizer of the blocks' matrices, and the numbers that planning needs."""

    label: str
    """Name in the paper."""
    home: str
    """Module and function or class of (parameter groups, lr=), as `my_module:MyOptimizer`."""
    home_sharded: str = ""
    """The same for parameters that FSDP2 shards; default: `home`."""
    moments: int
    """Tensors of optimizer state of each parameter's shape."""
    width_exponent: float
    """The peak learning rate is proportional to 1 / width ** width_exponent."""
    lr_factor: float = 1.0
    """Default peak learning rate, as a multiple of AdamW's; Lion's is about 0.1."""
    adamw_factor: float = 1.0
    """Learning rate of the groups that AdamW updates, as a multiple of the matrices'."""
    splits_attention: bool = False
    """Whether Q, K and V are updated as three matrices (`n_matrices` of a parameter group)."""


HOME = "tiedgpt.train.step.optim"
OPTIMIZERS: dict[str, OptimizerSpec] = {
    # AdamW's updates of elements add up over the inputs: Yang et al. 2022, arXiv 2203.03466,
    # table 8. Muon's update has AdamW's size (Liu et al. 2025, arXiv 2502.16982) and a spectral
    # norm that grows with the root of the width (Yang et al. 2023, arXiv 2310.17813).
    "adamw": OptimizerSpec(
        label="AdamW", home=f"{HOME}.groups:build_adamw", moments=2, width_exponent=1.0
    ),
    "muon": OptimizerSpec(
        label="Muon",
        home=f"{HOME}.muon:Muon",
        home_sharded=f"{HOME}.muon:ShardedMuon",
        moments=1,
        width_exponent=0.5,
        splits_attention=True,
    ),
}
"""The optimizers by the value of --optimizer."""


def find_optimizer(name: str) -> OptimizerSpec:
    """Return the record of an optimizer; `UserError` for an unknown name."""
    if name not in OPTIMIZERS:
        raise UserError(f"no optimizer {name!r}: there are {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def scale_lr_to_width(lr: float, *, width: int, to: int, optimizer: str) -> float:
    """Return the peak learning rate at the width `to` that equals `lr` at `width`.

    An update should change a unit's output equally at every width. `optimizer` is that of the
    blocks' matrices; `lr` is AdamW's, or Muon's.
    """
    spec = find_optimizer(optimizer)
    return lr * spec.lr_factor * (width / to) ** spec.width_exponent
