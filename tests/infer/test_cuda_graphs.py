"""The order in which a step is warmed up, captured and replayed, on a GPU that is made up."""

import pytest
import torch

from tiedgpt.infer.cuda_graphs import CudaCapture


class Gpu:
    """Notes what is done on which stream; a capture that fails stays on its own, as torch's."""

    def __init__(self, monkeypatch):
        self.log, self.now, gpu = [], "main", self

        class Stream:
            def __init__(self, device=None):
                self.name = "side" if device is not None else gpu.now

            def wait_stream(self, other):
                gpu.log.append(f"{self.name} waits for {other.name}")

        class On:
            def __init__(self, stream):
                self.to = stream.name

            def __enter__(self):
                self.back, gpu.now = gpu.now, self.to

            def __exit__(self, *error):
                gpu.now = self.back

        class Device:
            def __init__(self, device):
                gpu.log.append(f"on {device}")

            def __enter__(self): ...
            def __exit__(self, *error): ...

        class Graph:
            def replay(self):
                gpu.log.append(f"replay on {gpu.now}")

        class Capture:
            def __init__(self, graph, pool, stream, capture_error_mode):
                assert isinstance(graph, Graph)
                gpu.log.append(f"capture in {pool}, {capture_error_mode}")
                self.stream = On(stream)

            def __enter__(self):
                self.stream.__enter__()

            def __exit__(self, kind, *error):
                if kind is not None:
                    raise RuntimeError("operation failed due to a previous error during capture")
                self.stream.__exit__()

        for name, made_up in {
            "Stream": Stream, "stream": On, "device": Device, "CUDAGraph": Graph, "graph": Capture,
            "current_stream": Stream, "graph_pool_handle": lambda: "pool",
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, made_up)


def test_a_step_is_warmed_up_on_a_side_stream_then_captured_there_and_replayed(monkeypatch):
    gpu = Gpu(monkeypatch)
    capture = CudaCapture(torch.device("cuda", 1))
    replay = capture(lambda: gpu.log.append(f"step on {gpu.now}"))
    assert gpu.log == [
        "on cuda:1",
        "side waits for main",
        *["step on side"] * 3,
        "main waits for side",
        "capture in pool, thread_local",
        "step on side",
    ]
    replay()
    assert gpu.log[-1] == "replay on main"


def test_after_a_capture_that_fails_work_goes_on_where_it_was(monkeypatch):
    gpu, calls = Gpu(monkeypatch), []

    def step():
        calls.append(gpu.now)
        if len(calls) == 4:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="during capture"):
        CudaCapture(torch.device("cuda"))(step)
    assert calls == ["side"] * 4
    assert gpu.now == "main"
