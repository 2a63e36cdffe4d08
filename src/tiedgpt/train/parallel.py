"""One run on several processes: which rows are whose, what is summed, and who writes.

torchrun starts the processes; each has the whole batch of a step and computes its share of the
rows, so that the steps are those of one process, to rounding. Rank 0 leads: it alone measures,
evaluates and writes. `World` is one process, or several that have the model each (DDP); `Shards`
have a part of every matrix each (FSDP2).
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from tiedgpt.errors import DivergedError, TiedGPTError, UserError
from tiedgpt.train.muon import Muon
from tiedgpt.train.objective import Arrays, Loss, LossModule, Model, Objective, body_of, on_device
from tiedgpt.train.plan import Plan
from tiedgpt.train.watch import RESUMES, TIMEOUT, Watch, meet

T = TypeVar("T")
Parallel = Literal["ddp", "fsdp"]
UNLIMITED = timedelta(days=30)
"""Of an exchange: preparing data may take long, and the `Watch` ends what takes too long."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows that a process computes at a time."""

    rows: tuple[Tensor, ...]
    shares: list[float]
    """Of each term of their loss in what gradients are taken of."""
    last: bool
    """Whether the step's gradients are whole with it."""


class World:
    """The processes of a run: one, or several that have the whole model each (DDP)."""

    n_shards = 1
    """Processes that a matrix is shared out among."""

    def __init__(self, device: torch.device, *, parallel: bool = False) -> None:
        self.device = device
        self.rank, self.size, self.n_local = 0, 1, 1  # n_local share a machine's memory
        if parallel:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.n_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.watch: Watch | None = None
        self._loss_module: Any = None
        self._word = torch.zeros(1)  # kept: gloo's thread must not be the last to let go of it

    def enter(self, what: str, *, step: int | None = None, times: float = 1) -> None:
        """Tell the other processes what this one does now; see `Watch.enter`."""
        if self.watch is not None:
            self.watch.enter(what, step=step, times=times)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that evaluates and writes."""
        return self.rank == 0

    def place(self, model: Model) -> Model:
        """Bring a model to where it is trained, before optimizers are made of its parameters."""
        self.release()
        return model.to(self.device)

    def loss_module(self, model: Model) -> nn.Module:
        """Return the `LossModule` of a model that was placed here, as it is to be called.

        DDP's is made once: `release` of it where the model gets other parameters.
        """
        if self.size == 1:
            return LossModule(model)
        if self._loss_module is None:
            self._loss_module = torch.nn.parallel.DistributedDataParallel(LossModule(model))
        return self._loss_module

    def optimizers(self, rules: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """Return optimizers that can work on the parameters as they lie here."""
        return rules

    def reseed(self, seed: int, step: int) -> None:
        """Give processes beside the first a random stream of their own, for what is dropped.

        It goes by (seed, rank, step), so that a run that resumes drops what it would have.
        """
        if not self.is_main:
            torch.manual_seed(hash((seed, self.rank, step)))

    def micro_batches(self, objective: Loss, batch: Arrays, micro_batch: int) -> list[MicroBatch]:
        """Return this process's share of a batch, at most `micro_batch` rows at a time.

        Rows without a target are left out. All processes have equally many parts, as their
        exchanges need it: one that has too few computes a row again, and counts it as nothing.
        """
        n_rows = len(batch[0])
        start, end = (n_rows * rank // self.size for rank in (self.rank, self.rank + 1))
        whole, own = objective.n_targets(batch), []
        for at in range(start, end, micro_batch):
            rows = slice(at, min(at + micro_batch, end))
            counts = objective.n_targets(tuple(array[rows] for array in batch))
            if any(counts):
                shares = zip(counts, whole, strict=True)
                own.append((rows, [self.size * n / max(1, total) for n, total in shares]))
        if self.size > 1:
            singles = (slice(n, n + 1) for n in range(n_rows))
            counted = (
                row for row in singles if all(objective.n_targets(tuple(a[row] for a in batch)))
            )
            again = next(counted, slice(0, 1))
            n_parts = -(-self.share(n_rows) // micro_batch)
            own += [(again, [0.0] * len(whole))] * (n_parts - len(own))
        tensors = on_device(batch, self.device)
        return [
            MicroBatch(tuple(tensor[rows] for tensor in tensors), shares, number == len(own))
            for number, (rows, shares) in enumerate(own, start=1)
        ]

    def share(self, n: int) -> int:
        """Return how many of n rows a process has at the most."""
        return -(-n // self.size)

    def require_work(self, plan: Plan) -> None:
        """Raise `UserError` for a plan that these processes cannot share."""
        if plan.batch_size < self.size:
            raise UserError(
                f"a batch of {plan.batch_size} rows for {self.size} processes: start fewer, or "
                "train with a larger --batch-size"
            )

    def gradient_sync(self, part: MicroBatch) -> AbstractContextManager[Any]:
        """Have forward and backward inside add to the gradients, exchanged once a step."""
        return nullcontext() if self.size == 1 or part.last else self._loss_module.no_sync()

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def clip(self, parameters: Iterable[Tensor], limit: float) -> Tensor:
        """Scale the gradients to a norm of at most `limit`; return the norm, (), before that."""
        return _full(torch.nn.utils.clip_grad_norm_(parameters, limit))

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        return bool(self.sum(torch.tensor(int(flag))))

    def on_main(self, act: Callable[[], T]) -> T:
        """Return what `act` returned in the first process, which alone runs it.

        Where it raises, the others end, without a word and with the exit code of the error.
        """
        if self.size == 1:
            return act()
        sent: list[Any] = [None, None]
        try:
            if self.is_main:
                sent[0] = act()
        except Exception as error:
            sent[1] = getattr(error, "exit_code", 1)
            raise
        finally:
            dist.broadcast_object_list(sent, device=torch.device("cpu"))
        found, exit_code = sent
        if exit_code is not None:
            self.leave_to_main(exit_code)
        return found

    def leave_to_main(self, exit_code: int) -> None:
        """End this process when the first has said what is wrong; in the first, do nothing."""
        if not self.is_main:
            self.barrier()
            raise SystemExit(exit_code)

    def main_first(self, make: Callable[[], T]) -> T:
        """Make something in each process, in the others when the first is done with it."""
        made: list[T] = []
        self.on_main(lambda: made.append(make()))
        return made[0] if self.is_main else make()

    def with_full_model(self, model: Model, objective: Objective, act: Callable[[Model], T]) -> T:
        """Return what `act` returned of the model with all its weights, in the first process."""
        return self.on_main(lambda: act(model))

    def state(
        self, objective: Objective, model: Model, optimizers: Iterable[torch.optim.Optimizer]
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Return what a checkpoint holds: tensors by name, and the optimizers' by name/key."""
        moments = {
            f"{name}/{key}": value
            for name, parameter in model.named_parameters()
            for optimizer in optimizers
            if parameter in optimizer.state
            for key, value in sorted(optimizer.state[parameter].items())
        }
        saved = objective.state_to_save(model)
        return {name: tensor.detach() for name, tensor in saved.items()}, moments

    def barrier(self) -> None:
        """Wait for the first process: torchrun ends all processes when one has ended."""
        with contextlib.suppress(RuntimeError):  # it has ended already
            dist.broadcast(self._word, 0)

    def release(self) -> None:
        """Free what holds on to the connections: freed last, they would wait for their threads.

        Those may be waiting for Python, which that wait would block.
        """
        if self._loss_module is not None:
            self._loss_module = None
            gc.collect()


class Shards(World):
    """Several processes that hold a part of each matrix and its optimizer's state (FSDP2)."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, parallel=True)
        self.n_shards = self.size

    def place(self, model: Model) -> Model:
        """Keep this process's parts: a block's matrices are whole only while it computes."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.release()
        mesh = init_device_mesh(self.device.type, (self.size,))
        objective = LossModule(model)
        for block in body_of(model).h:
            fully_shard(block, mesh=mesh)
        self._loss_module = fully_shard(objective, mesh=mesh)  # W is whole for both its uses
        return model

    def loss_module(self, model: Model) -> nn.Module:
        """Return the `LossModule` that was sharded last."""
        return self._loss_module

    def optimizers(self, rules: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """Have Muon, whose update is of a matrix as a whole, gather each."""
        return [
            WholeMuon(rule.param_groups, **rule.defaults) if isinstance(rule, Muon) else rule
            for rule in rules
        ]

    def gradient_sync(self, part: MicroBatch) -> AbstractContextManager[Any]:
        """Exchange gradients in every part: whole ones that wait would take a model's memory."""
        return nullcontext()

    def with_full_model(self, model: Model, objective: Objective, act: Callable[[Model], T]) -> T:
        """Give it a copy with all weights."""
        weights = self.full_state_dict(model.state_dict())

        def act_on_copy() -> T:
            with torch.device("meta"):
                copy = objective.build().train(model.training)
            copy.load_state_dict(weights, assign=True)
            return act(copy.to(self.device))

        return self.on_main(act_on_copy)

    def full_state_dict(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Gather them on the CPU of the first process, one after the other."""
        gathered = ((name, _full(tensor.detach())) for name, tensor in tensors.items())
        return {name: tensor.cpu() for name, tensor in gathered if self.is_main}


class WholeMuon(Muon):
    """Muon for parameters of which each process holds a part; the update is that of one process.

    Each matrix is gathered for its update, with its gradient and its momentum, one at a time.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for part in (p for p in group["params"] if p.grad is not None):
                matrix = nn.Parameter(_full(part))
                matrix.grad = _full(part.grad)
                rule = Muon([group | {"params": [matrix]}])
                rule.state[matrix] = {k: _full(v) for k, v in self.state[part].items()}
                rule.step()
                part.copy_(distribute_like(matrix.detach(), part))
                held = rule.state[matrix].items()
                self.state[part] = {key: distribute_like(value, part) for key, value in held}


def distribute_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Bring a whole tensor to where a parameter lies; of one that lies in parts, this part."""
    placed = tensor.to(parameter.device)
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or tensor.shape != parameter.shape:
        return placed
    from torch.distributed.tensor import distribute_tensor

    placements = parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(placed, mesh, placements, src_data_rank=None)


def local_shard(tensor: Tensor) -> Tensor:
    """Return what lies in this process of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def is_launched() -> bool:
    """Whether torchrun has started this process beside others."""
    return dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def require_launch(parallel: Parallel | None) -> None:
    """Raise `UserError` for what cannot be run in parallel as this process was started."""
    if parallel is not None and not dist.is_torchelastic_launched():
        raise UserError(
            f"--parallel {parallel} is for several processes: torchrun --nproc-per-node N -m "
            "tiedgpt train ..."
        )
    gpus, here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if is_launched() and 0 < gpus < here:
        raise UserError(
            f"{here} processes and {gpus} GPUs: each needs one",
            hint=f"give --nproc-per-node {gpus}, or CUDA_VISIBLE_DEVICES= to train on the CPU",
        )


@contextlib.contextmanager
def join_world(
    parallel: Parallel | None, device: torch.device, timeout: float = TIMEOUT
) -> Iterator[World]:
    """Meet the other processes that torchrun has started, if it has, and leave with them.

    Where the run fails in all of them, the first says so and the others end without a word. A
    process that hangs for `timeout` seconds, or ends, ends the job (`watch.py`).
    """
    if not is_launched():
        yield World(device)
        return
    on_gpu = device.type == "cuda"
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    name = meet(store, rank, size, timeout)
    watch = Watch(name, store.host, store.port, rank, size, timeout)
    own = PrefixStore(name, store)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=UNLIMITED)
    world = Shards(device) if parallel == "fsdp" else World(device, parallel=True)
    world.watch = watch
    try:
        with _report_once(world, watch):
            yield world
        world.enter("ending", times=math.inf)
        world.barrier()
        world.release()
        dist.destroy_process_group()
        watch.stop()
    except BaseException as error:
        watch.stop(str(error) if isinstance(error, Exception) else "")
        found: BaseException | None = error
        while found is not None:
            traceback.clear_frames(found.__traceback__)
            found = found.__context__
        world.release()
        raise


@contextlib.contextmanager
def _report_once(world: World, watch: Watch) -> Iterator[None]:
    """Where a run fails in all processes, let the first say so and the others end with it."""
    try:
        yield
    except DivergedError as error:  # which all have found
        world.leave_to_main(error.exit_code)
        raise
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        lost = watch.find_lost()
        if not (world.is_main or lost) or not watch.is_first_to_tell():
            raise SystemExit(TiedGPTError.exit_code) from None
        raise TiedGPTError(lost or "another process of this run has ended", hint=RESUMES) from None
