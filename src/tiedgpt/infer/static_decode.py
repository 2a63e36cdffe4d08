"""One token more for many sequences, in steps of a few shapes: what CUDA graphs can repeat.

A step takes the first B rows of a cache and their first `span` positions, B and span rounded up to
sizes of which there are few. Ids and positions are numbers on the device; rows that are not read
write to a position that nobody looks at. Each (B, span) is captured once, when it is first needed.
Without a GPU the same step is called instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiedgpt.core.cache import KVCache
from tiedgpt.core.model import GPT
from tiedgpt.infer.cuda_graphs import (
    Capture,
    CudaCapture,
    Step,
    fingerprint,
    refusal,
    same,
    uncaptured,
)

MIN_SPAN = 128
"""Positions that are looked at in any case: fewer are no faster."""
FEW_ROWS = 8
"""Rows up to which those that are not read cost next to nothing."""

Array = NDArray[np.float32]


class StepWarning(UserWarning):
    """Steps are computed one kernel at a time, not as CUDA graphs, and why."""


def size_for(count: int, least: int, most: int) -> int:
    """Round up to a power of two or half as much again: least, 1.5 least, 2 least, ..., most."""
    power = least
    while power < count and 3 * power // 2 < count:
        power *= 2
    return min(power if power >= count else 3 * power // 2, most)


class StepCache(KVCache):
    """Rows of a cache as one step sees them: no shape follows how many positions are filled.

    `where` (B, 2) int64 holds for each row the position of its new token, which sees the keys up to
    there, and the place where its own key and value are written.
    """

    def __init__(self, cache: KVCache, where: Tensor, span: int) -> None:
        rows = slice(len(where))
        super().__init__(cache.keys[:, rows], cache.values[:, rows], [0] * len(where))
        self._positions, places = where.split(1, dim=1)
        self._places = places[:, None, :, None]
        self._span = span
        self._masks: dict[int | None, Tensor] = {}

    def positions(self, n_new: int) -> Tensor:
        """Return the positions (B, 1)."""
        return self._positions

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v (B, H, 1, D/H) in their places; return the first `span` of each row."""
        keys, values = self.keys[layer], self.values[layer]
        where = self._places.expand(k.shape)
        keys.scatter_(2, where, k.to(keys.dtype))
        values.scatter_(2, where, v.to(values.dtype))
        return keys[:, :, : self._span], values[:, :, : self._span]

    def visible(self, n_new: int, window: int | None) -> tuple[int, Tensor]:
        """Return what is added to scores (B, 1, 1, span): 0 where a key is seen, else -inf.

        Made once a step, not once a layer. A mask of numbers is what torch's memory-efficient
        attention takes, the one of its fused kernels on GPUs that takes a mask at all.
        """
        if window not in self._masks:
            query = self._positions[:, None, None]
            key = torch.arange(self._span, device=query.device)
            hidden = key > query if window is None else (key > query) | (key <= query - window)
            zeros = torch.zeros(hidden.shape, dtype=self.keys.dtype, device=query.device)
            self._masks[window] = zeros.masked_fill(hidden, -torch.inf)
        return 0, self._masks[window]

    def advance(self, n_new: int) -> None:
        """Do nothing: who owns the lengths counts."""


class StaticDecode:
    """A model, a cache of some rows and room for one position more than `capacity`, its steps.

    `refused` says why the model's steps are not repeated, or is None; with it nothing is read here.
    """

    def __init__(
        self, model: GPT, *, rows: int, capacity: int, capture: Capture | None = None
    ) -> None:
        weight, config = model.wte.weight, model.config
        shape = (config.n_layer, rows, config.n_head, capacity + 1, config.head_dim)
        keys = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.cache = KVCache(keys, torch.zeros_like(keys), [0] * rows)
        self.rows, self.capacity = rows, capacity
        self._model = model
        self._device = weight.device
        self._capture = capture
        self._given = self._on_host(torch.zeros((rows, 3), dtype=torch.int64))
        self._inputs = self._given.to(weight.device)
        self._forget()

    def fits(self, *, rows: int, capacity: int) -> bool:
        """Whether a session of these sizes can be held here, in the model's type and place."""
        weight, keys = self._model.wte.weight, self.cache.keys
        alike = (keys.dtype, keys.device) == (weight.dtype, weight.device)
        return alike and rows <= self.rows and capacity <= self.capacity

    def renew(self) -> None:
        """Forget what the rows hold; what is captured stays, where it is what the model does."""
        self.cache.lengths = [0] * self.rows
        with torch.inference_mode():  # in which they may have been made
            self.cache.keys.zero_()
            self.cache.values.zero_()
        if self.refused is not None:
            self._forget()

    def covers(self, rows: Sequence[int]) -> bool:
        """Whether rows lie so low that a step is not spent on rows that are not read."""
        size = size_for(max(rows) + 1, 1, self.rows)
        return size <= max(FEW_ROWS, 2 * size_for(len(rows), 1, self.rows))

    def read(
        self, rows: Sequence[int], ids: Sequence[int], *, states: bool
    ) -> tuple[Array, Array | None] | None:
        """Append an id to each of some rows: logits (n, V) and, where wanted, states (n, D).

        Called as a session computes: without gradients, all modules in eval mode. Returns None and
        appends nothing where the model is, or becomes, `refused`.
        """
        at = [self.cache.lengths[row] for row in rows]
        size = size_for(max(rows) + 1, 1, self.rows)
        given = self._given.numpy()
        given[:size] = 0, 0, self.capacity
        given[list(rows)] = np.stack([ids, at, at], axis=1)
        self._inputs[:size].copy_(self._given[:size], non_blocking=True)
        if not self._compute(size, size_for(max(at) + 1, MIN_SPAN, self.capacity)):
            return None
        for row in rows:
            self.cache.lengths[row] += 1
        wanted = self._outputs if states else self._outputs[:1]
        for output, held in wanted:
            held[:size].copy_(output[:size], non_blocking=True)
        self._wait()
        logits, *h = (held.numpy()[list(rows)] for _, held in wanted)
        return logits, h[0] if h else None

    def _compute(self, size: int, span: int) -> bool:
        """Do a step, captured first where it is new; return whether it was done.

        A graph at least finds its weights where they were. Whether all else is as it was is looked
        at while the GPU computes: if not, the step is done again, over what it wrote.
        """
        if [tensor.data_ptr() for tensor in self._tensors] != self._places:
            self._forget()
        for _ in range(2):
            step = self._steps.get((size, span)) or self._new_step(size, span)
            if step is None:
                return False
            step()
            if same(self._captured_from, fingerprint(self._model)):
                return True
            self._forget()
        self._refuse("its modules change whenever they compute")
        return False

    def _forget(self) -> None:
        """Let go of what is captured, all of it; the model as it then is is captured anew."""
        self._wait()
        self.refused: str | None = None
        self._steps: dict[tuple[int, int], Step] = {}
        self._outputs: list[tuple[Tensor, Tensor]] = []
        self._captured_from: list[object] = []
        self._tensors: list[Tensor] = []
        self._places: list[int] = []

    def _begin(self) -> None:
        """Look at the model, of which nothing is captured yet."""
        self._take = self._capture or (
            CudaCapture(self._device) if self._device.type == "cuda" else uncaptured
        )
        self._captured_from = fingerprint(self._model)
        reason = refusal(self._model)
        if reason is not None:
            self._refuse(reason)
            return
        self._tensors = [*self._model.parameters(), *self._model.buffers()]
        self._places = [tensor.data_ptr() for tensor in self._tensors]

    def _refuse(self, reason: str) -> None:
        self._steps, self._outputs, self.refused = {}, [], reason
        warnings.warn(
            f"tokens are computed one kernel at a time, not as a repeated step: {reason}",
            StepWarning,
            stacklevel=2,
        )

    def _new_step(self, size: int, span: int) -> Step | None:
        """Capture the step of a shape; None, and a warning, where torch cannot."""
        if not self._captured_from:
            self._begin()
        if self.refused is not None:
            return None
        try:
            if not self._outputs:
                h, logits = self._scores(size, span)
                self._outputs = [self._output(logits), self._output(h)]
            self._steps[size, span] = self._take(lambda: self._step(size, span))
        except RuntimeError as error:
            first = error.__context__ or error  # the end of a capture fails because its middle did
            self._refuse(f"torch does not capture it: {str(first).strip().splitlines()[0]}")
            return None
        return self._steps[size, span]

    def _step(self, size: int, span: int) -> None:
        """Compute the first rows and put what they say where it is fetched from."""
        h, logits = self._scores(size, span)
        for (output, _), tensor in zip(self._outputs, (logits, h), strict=True):
            output[:size].copy_(tensor)

    def _scores(self, size: int, span: int) -> tuple[Tensor, Tensor]:
        """Read an id (B, 1) in each of the first B rows: states (B, D) and logits (B, V)."""
        ids, where = self._inputs[:size].split((1, 2), dim=1)
        h = self._model.body(ids, StepCache(self.cache, where, span))[:, -1]
        return h, self._model.logits(h)

    def _output(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return room for a row of each sequence, (rows, n) float32, here and on the host."""
        output = like.new_zeros((self.rows, like.shape[1]), dtype=torch.float32)
        return output, self._on_host(torch.zeros_like(output, device="cpu"))

    def _on_host(self, tensor: Tensor) -> Tensor:
        """Return memory of the host that a GPU copies to and from by itself."""
        return tensor.pin_memory() if self._device.type == "cuda" else tensor

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
