"""A step that is always the same work -> one launch: CUDA graphs, and when they may be taken.

A graph repeats the kernels that were launched while it was captured, at the addresses that they
were given; whatever Python did meanwhile is not done again. So a model is captured only where its
Python cannot say anything new (`refusal`), and captured anew where it would (`fingerprint`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from tiedgpt.core.model import GPT

Step = Callable[[], None]
Capture = Callable[[Step], Step]
"""Takes a step, which may be called at will, and returns what does the same work on each call."""
KNOWN = ("torch", "tiedgpt")
"""Packages whose modules compute the same kernels each time."""
WARM_UP = 3
"""Calls before a capture, in which libraries choose kernels and take the memory they keep."""


def uncaptured(step: Step) -> Step:
    """Return the step itself: where there are no graphs, it is called."""
    return step


class CudaCapture:
    """Captures steps of one device, on a stream and in a memory pool of its own.

    The graphs share the pool: each leaves nothing there that is wanted after it, so that they may
    be replayed in any order, one at a time. They should be let go of together: torch gives up
    cuBLAS' workspace of the stream with the first (pytorch/pytorch#193402).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """Warm up, capture, and return the graph's replay; raises torch's `RuntimeError`s.

        Other threads may use the GPU meanwhile. Before torch 2.12 a capture that fails leaves its
        memory reserved (pytorch/pytorch#180395), so what is sure to fail should not be tried.
        """
        with torch.cuda.device(self._device):
            ours = torch.cuda.current_stream()
            self._stream.wait_stream(ours)
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UP):
                    step()
            ours.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with (
                torch.cuda.stream(ours),  # a capture that fails does not go back to it
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                step()
        return graph.replay


def refusal(model: GPT) -> str | None:
    """Say why a model's steps may differ in what a graph cannot know, or return None.

    Such are modules of other people, forward hooks, and tensors that are more than data: they are
    called, not repeated. Hooks on all of torch's modules at once are not looked for.
    """
    for name, module in model.named_modules():
        where = f"{name or 'the model'} ({type(module).__name__})"
        if type(module).__module__.split(".")[0] not in KNOWN:
            return f"{where} is a module of {type(module).__module__}"
        if any("forward" in key and held for key, held in vars(module).items()):
            return f"{where} has forward hooks or a forward of its own"
        if any(type(tensor) not in (nn.Parameter, Tensor) for tensor in _tensors(module)):
            return f"{where} has tensors of another kind"
    if torch.is_autocast_enabled(model.wte.weight.device.type):
        return "autocast is on"
    return None


def fingerprint(model: GPT) -> list[object]:
    """Return all that a model's Python goes by: modules, what they hold and what they are set to.

    To be compared with what is there later, by `same`. Changes of the weights in place are seen by
    a graph, and change nothing here; where a tensor's memory lies is not looked at.
    """
    seen: list[object] = [torch.is_autocast_enabled(model.wte.weight.device.type)]
    for module in model.modules():
        seen.append(module)
        for held in vars(module).values():
            seen.append(held)
            if isinstance(held, dict) and held:
                seen += held.values()
    return seen


def same(one: list[object], other: list[object]) -> bool:
    """Whether two fingerprints are of the very same things."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(recurse=False), module.buffers(recurse=False))
