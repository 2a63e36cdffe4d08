"""A model shared out among processes (FSDP2): each holds a part of every matrix.

Gradients and the optimizer's state lie as the parameters do. What needs a whole matrix gathers it:
a block while it computes, Muon for its update, and the first process to evaluate and to save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tiedgpt.errors import UserError
from tiedgpt.train.objective import Objective
from tiedgpt.train.parallel import Part, Replicas
from tiedgpt.train.plan import Plan
from tiedgpt.train.task import Model, Task, body_of

T = TypeVar("T")


class Shards(Replicas):
    """Several processes that hold a part of each matrix and its optimizer's state (FSDP2)."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.holders = self.size

    def require_work(self, plan: Plan) -> None:
        """Refuse, too, what changes parameters in the middle of a run."""
        super().require_work(plan)
        if plan.untie_at is not None:
            raise UserError("--untie-at gives the model a matrix in mid-run: use --parallel ddp")

    def place(self, model: Model) -> Model:
        """Keep this process's parts: a block's matrices are whole only while it computes."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.let_go()
        mesh = init_device_mesh(self.device.type, (self.size,))
        objective = Objective(model)
        for block in body_of(model).h:
            fully_shard(block, mesh=mesh)
        self._objective = fully_shard(objective, mesh=mesh)  # W is whole for both its uses
        return model

    def objective(self, model: Model) -> nn.Module:
        """Return the `Objective` that was sharded last."""
        return self._objective

    def optimizers(self, rules: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """Have Muon, whose update is of a matrix as a whole, gather each."""
        muon = torch.optim.Muon
        return [WholeMuon.of(rule) if isinstance(rule, muon) else rule for rule in rules]

    def summing(self, part: Part) -> AbstractContextManager[Any]:
        """Exchange gradients in the last part only."""
        self._objective.set_requires_gradient_sync(part.last)
        return nullcontext()

    def clip(self, parameters: Iterable[Tensor], limit: float) -> Tensor:
        """Take the norm over all parts."""
        norm: Any = super().clip(parameters, limit)
        return norm.full_tensor()

    def with_whole(self, model: Model, task: Task, act: Callable[[Model], T]) -> T:
        """Give it a copy with all weights."""
        weights = self.gather(dict(model.named_parameters()))

        def act_on_copy() -> T:
            with torch.device("meta"):
                copy = task.build().train(model.training)
            copy.load_state_dict(weights, assign=True)
            return act(copy.to(self.device))

        return self.lead(act_on_copy)

    def gather(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Gather them one after the other, on the CPU."""
        whole = {}
        for name, tensor in tensors.items():
            full = _full(tensor.detach())
            if self.leads:
                whole[name] = full.cpu()
        return whole


class WholeMuon(torch.optim.Muon):
    """Muon for parameters of which each process holds a part; the update is that of one process.

    Each matrix is gathered for its update, with its gradient and its momentum, one at a time.
    """

    @classmethod
    def of(cls, rule: torch.optim.Muon) -> WholeMuon:
        """Return it over the same parameters with the same numbers."""
        return cls(rule.param_groups, **rule.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            numbers = {key: value for key, value in group.items() if key != "params"}
            for part in (p for p in group["params"] if p.grad is not None):
                matrix = nn.Parameter(_full(part))
                matrix.grad = _full(part.grad)
                rule = torch.optim.Muon([numbers | {"params": [matrix]}])
                rule.state[matrix] = {k: _full(v) for k, v in self.state[part].items()}
                rule.step()
                part.copy_(laid_out_like(matrix.detach(), part))
                self.state[part] = {
                    key: laid_out_like(value, part) for key, value in rule.state[matrix].items()
                }


def laid_out_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Bring a whole tensor to where a parameter lies; of one that lies in parts, this part."""
    placed = tensor.to(parameter.device)
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or tensor.shape != parameter.shape:
        return placed
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = DTensor.from_local(placed, mesh, [Replicate()], run_check=False)
    return everywhere.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]


def own_part(tensor: Tensor) -> Tensor:
    """Return what lies in this process of a tensor."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _full(tensor: Tensor) -> Tensor:
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()
