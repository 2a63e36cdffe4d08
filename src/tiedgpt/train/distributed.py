"""Data parallelism: row assignment, reductions and rank-0 writes.

torchrun starts the processes. Each reads the whole batch of a step and computes its share of the
rows, so a step equals that of one process up to rounding. Rank 0 alone measures, evaluates and
writes. `Processes` is one process, or several with a replica each (DDP); in `ShardedProcesses`,
each process holds a part of every matrix (FSDP2). torchrun handles a process that dies or hangs: an
exchange fails when a connection breaks or after `EXCHANGE_TIMEOUT`, and torchrun restarts all.
"""

from __future__ import annotations

import contextlib
import gc
import os
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from typing_extensions import override

from tiedgpt.errors import DivergedError, TiedGPTError, UserError
from tiedgpt.runtime import exhaust
from tiedgpt.train.step.loss import Arrays, Loss, LossModule, Model, body_of, on_device

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E")
Parallel = Literal["ddp", "fsdp"]
EXCHANGE_TIMEOUT = timedelta(hours=1)
"""Maximum wait for the other processes; rank 0 may prepare data for this long."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows that a process computes at a time."""

    rows: tuple[Tensor, ...]
    shares: list[float]
    """Weight of each term of the rows' loss in the loss of the step."""
    last: bool
    """Whether it is the last one of the step."""


class Processes:
    """The processes of a run: one, or several with the whole model each (DDP)."""

    n_shards = 1
    """Number of processes that a matrix is split among."""

    def __init__(self, device: torch.device, *, parallel: bool = False) -> None:
        self.device = device
        self.rank, self.size, self.n_local = 0, 1, 1  # n_local share a machine's memory
        if parallel:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.n_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.is_main = self.rank == 0  # evaluates and writes
        self._loss_module: Any = None
        self._word = torch.zeros(
            1, device="cpu"
        )  # an attribute: gloo's thread must not be its last owner

    def describe(self) -> dict[str, Any]:
        """Return the table of run.toml; {} for one process."""
        parallel: Parallel = "fsdp" if self.n_shards > 1 else "ddp"
        return {"number": self.size, "parallel": parallel} if self.size > 1 else {}

    def place(self, model: Model) -> Model:
        """Move a model to its device; optimizers must be built afterwards."""
        self.release()
        return model.to(self.device)

    def loss_module(self, model: Model) -> nn.Module:
        """Return the `LossModule` of a placed model.

        DDP wraps it once; call `release` before the model gets other parameters.
        """
        if self.size == 1:
            return LossModule(model)
        if self._loss_module is None:
            self._loss_module = torch.nn.parallel.DistributedDataParallel(LossModule(model))
        return self._loss_module

    def micro_batches(self, objective: Loss, batch: Arrays, micro_batch: int) -> list[MicroBatch]:
        """Return this process's share of a batch, at most `micro_batch` rows at a time.

        Rows without a target are left out. All processes return the same number of micro-batches,
        because each one exchanges gradients: a process with too few adds rows of weight 0.
        """
        n_rows = len(batch[0])
        start, end = (n_rows * rank // self.size for rank in (self.rank, self.rank + 1))
        totals, parts = objective.n_targets(batch), []
        for at in range(start, end, micro_batch):
            rows = slice(at, min(at + micro_batch, end))
            counts = objective.n_targets(tuple(array[rows] for array in batch))
            if any(counts):
                shares = zip(counts, totals, strict=True)
                parts.append((rows, [self.size * n / max(1, total) for n, total in shares]))
        if self.size > 1:
            singles = (slice(n, n + 1) for n in range(n_rows))
            counted = (
                row for row in singles if all(objective.n_targets(tuple(a[row] for a in batch)))
            )
            again = next(counted, slice(0, 1))
            max_rows = -(-n_rows // self.size)  # of one process
            n_parts = -(-max_rows // micro_batch)
            parts += [(again, [0.0] * len(totals))] * (n_parts - len(parts))
        tensors = on_device(batch, self.device)
        return [
            MicroBatch(tuple(tensor[rows] for tensor in tensors), shares, number == len(parts))
            for number, (rows, shares) in enumerate(parts, start=1)
        ]

    def gradient_sync(self, part: MicroBatch) -> AbstractContextManager[Any]:
        """Accumulate gradients and all-reduce once per step (`no_sync`)."""
        return nullcontext() if self.size == 1 or part.last else self._loss_module.no_sync()

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def clip(self, parameters: Iterable[Tensor], limit: float) -> Tensor:
        """Scale the gradients to a norm of at most `limit`; return the norm, (), before that."""
        return full_tensor(torch.nn.utils.clip_grad_norm_(parameters, limit))

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        return bool(self.sum(torch.tensor(int(flag), device="cpu")))

    def broadcast(self, value: T) -> T:
        """Return rank 0's value in all processes."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, device=torch.device("cpu"))
        return values[0]

    def on_main(self, act: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call `act` with these arguments on rank 0 alone; return its result in all processes.

        If it raises, the other processes exit silently with the error's exit code.
        """
        if self.size == 1:
            return act(*args, **options)

        def steps() -> Generator[None, None, T]:
            yield from ()
            return act(*args, **options)

        return exhaust(self.steps_on_main(steps))

    def steps_on_main(
        self, act: Callable[P, Generator[E, None, T]], *args: P.args, **options: P.kwargs
    ) -> Generator[E, None, T]:
        """Do `on_main` of a generator, whose items rank 0 alone yields."""
        if self.size == 1:
            return (yield from act(*args, **options))
        sent: list[Any] = [None, None]
        try:
            if self.is_main:
                sent[0] = yield from act(*args, **options)
        except Exception as error:
            sent[1] = getattr(error, "exit_code", 1)
            raise
        finally:
            dist.broadcast_object_list(sent, device=torch.device("cpu"))
        result, exit_code = sent
        if exit_code is not None:
            self.leave_to_main(exit_code)
        return result

    def leave_to_main(self, exit_code: int) -> None:
        """Exit this process after rank 0 has reported the error; on rank 0, do nothing."""
        if not self.is_main:
            self.barrier()
            raise SystemExit(exit_code)

    def main_first(self, act: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Return `act` with these arguments; other processes call it after rank 0 has finished."""
        if self.size == 1:
            return act(*args, **options)
        results: list[T] = []
        self.on_main(lambda: results.append(act(*args, **options)))
        return results[0] if self.is_main else act(*args, **options)

    def steps_main_first(
        self, act: Callable[P, Iterator[E]], *args: P.args, **options: P.kwargs
    ) -> Iterator[E]:
        """Yield the items of `act` on rank 0; other processes exhaust it after rank 0 has."""

        def do() -> Generator[E, None, None]:
            yield from act(*args, **options)

        yield from self.steps_on_main(do)
        if not self.is_main:
            yield from act(*args, **options)

    def full_model(self, model: Model, build: Callable[[], Model]) -> Model:
        """Return the model with all weights on rank 0; `build` makes one of its shape."""
        return model

    def barrier(self) -> None:
        """Wait for rank 0, because torchrun ends all processes when one has ended."""
        with contextlib.suppress(RuntimeError):  # rank 0 has ended already
            dist.broadcast(self._word, 0)

    def release(self) -> None:
        """Free DDP's module, which keeps connections open.

        At interpreter exit, freeing it would wait for gloo's threads, which wait for Python.
        """
        if self._loss_module is not None:
            self._loss_module = None
            gc.collect()


class ShardedProcesses(Processes):
    """Several processes with a part of each matrix and of its optimizer state (FSDP2)."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, parallel=True)
        self.n_shards = self.size

    @override
    def place(self, model: Model) -> Model:
        """Shard the model; a block's matrices are gathered only while it computes."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.release()
        mesh = init_device_mesh(self.device.type, (self.size,))
        objective = LossModule(model)
        for block in body_of(model).h:
            fully_shard(block, mesh=mesh)
        self._loss_module = fully_shard(objective, mesh=mesh)  # W is gathered for both its uses
        return model

    @override
    def loss_module(self, model: Model) -> nn.Module:
        """Return the `LossModule` that was sharded last."""
        return self._loss_module

    @override
    def gradient_sync(self, part: MicroBatch) -> AbstractContextManager[Any]:
        """Reduce gradients in every micro-batch; unsharded ones would take a model's memory."""
        return nullcontext()

    @override
    def full_model(self, model: Model, build: Callable[[], Model]) -> Model:
        """Return an unsharded copy of the model on rank 0."""
        tensors = model.state_dict().items()
        gathered = ((name, full_tensor(tensor.detach())) for name, tensor in tensors)  # one by one
        weights = {name: tensor.cpu() for name, tensor in gathered if self.is_main}

        if not self.is_main:
            return model
        with torch.device("meta"):
            copy = build().train(model.training)
        copy.load_state_dict(weights, assign=True)
        return copy.to(self.device)


def distribute_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a whole tensor on the parameter's device, sharded as the parameter is."""
    placed = tensor.to(parameter.device)
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or tensor.shape != parameter.shape:
        return placed
    from torch.distributed.tensor import distribute_tensor

    placements = parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(placed, mesh, placements, src_data_rank=None)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def is_launched() -> bool:
    """Whether torchrun has started several processes."""
    return dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def require_launch(parallel: Parallel | None) -> None:
    """Raise `UserError` if this process was not started for the requested parallelism."""
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
def join_processes(parallel: Parallel | None, device: torch.device) -> Iterator[Processes]:
    """Join the processes that torchrun has started, if any, and leave them at the end.

    Where the run fails in all of them, rank 0 reports the error and the others exit silently.
    """
    if not is_launched():
        yield Processes(device)
        return
    backend = "gloo"
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    with _report_lost_connection():
        _init_process_group(backend)
        processes = (
            ShardedProcesses(device) if parallel == "fsdp" else Processes(device, parallel=True)
        )
        try:
            yield processes
            processes.barrier()
            processes.release()
            dist.destroy_process_group()
        except BaseException as error:
            if isinstance(error, DivergedError):  # raised in all processes
                processes.barrier()
            cause: BaseException | None = error
            while cause is not None:  # its frames own tensors that gloo still uses
                traceback.clear_frames(cause.__traceback__)
                cause = cause.__context__
            processes.release()
            if isinstance(error, DivergedError) and not processes.is_main:
                raise SystemExit(error.exit_code) from None
            raise


def _init_process_group(backend: str) -> None:
    """Join the processes of torchrun under keys of this restart.

    On one machine torchrun's default (static) rendezvous keeps its store over restarts, with the
    addresses of the lost processes under the same keys. Over machines, a restart makes a new one.
    """
    store, rank, number = next(rendezvous("env://", timeout=EXCHANGE_TIMEOUT))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        store = dist.PrefixStore(f"restart-{restart}", store)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=number, timeout=EXCHANGE_TIMEOUT
    )


@contextlib.contextmanager
def _report_lost_connection() -> Iterator[None]:
    """Report a lost connection on rank 0 alone, in place of torch's error."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            raise
        if os.environ["RANK"] != "0":
            raise SystemExit(TiedGPTError.exit_code) from None
        raise TiedGPTError(
            "the connection to another process of this run broke",
            hint="the same command goes on from the newest checkpoint, as torchrun "
            "--max-restarts does",
        ) from None
