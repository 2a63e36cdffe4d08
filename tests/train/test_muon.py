"""Muon: torch's equations, for stacks of matrices, in the dtype that the device multiplies fast."""

from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tiedgpt.train.step.optim.muon import Muon, newton_schulz

SHAPES = [(24, 8), (8, 24), (8, 8), (12, 8), (24, 8), (40, 8)]


def drawn(seed: int, shapes=SHAPES, dtype=torch.float64) -> list[torch.nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    draws = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes)
    return [torch.nn.Parameter(draw.to(dtype)) for draw in draws]


def after_steps(optimizer_of, parameters, n_steps=4):
    """Return the parameters after steps; the last one has no gradient in the first step."""
    optimizer = optimizer_of(parameters)
    for step in range(n_steps):
        gradients = drawn(100 + step, [p.shape for p in parameters], parameters[0].dtype)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient.detach()
        if step == 0:
            parameters[-1].grad = None
        optimizer.step()
    return [p.detach() for p in parameters], optimizer


def exact(x: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz on the singular values themselves."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("shape", [(8, 8), (8, 10), (8, 12), (8, 40), (64, 256)])
@pytest.mark.parametrize("spectrum", ["drawn", "falling", "of low rank"])
def test_newton_schulz_applies_its_polynomial_to_the_singular_values(shape, spectrum):
    (x,) = (p.detach() for p in drawn(3, [shape]))
    if spectrum != "drawn":
        u, s, v = torch.linalg.svd(x, full_matrices=False)
        k = torch.arange(len(s))
        s = 10.0 ** (-4 * k / len(s)) if spectrum == "falling" else torch.where(k < 3, 1.0, 0.0)
        x = u @ torch.diag(s.double()) @ v
    expected = exact(x)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 3e-3)):
        ours = newton_schulz(x[None].to(dtype))[0]
        assert ours.dtype == dtype
        assert (ours.double() - expected).norm() <= tolerance * expected.norm()
    in_bf16 = newton_schulz(x[None].bfloat16())[0].double()
    largest = torch.linalg.matrix_norm(in_bf16, 2)
    assert largest < 1.4  # the steps on A alone would be at 10 and more


def test_a_zero_gradient_moves_nothing():
    (p,) = drawn(1, [(8, 8)])
    before, p.grad = p.detach().clone(), torch.zeros(8, 8, dtype=torch.float64)
    Muon([p], lr=0.1, weight_decay=0.0).step()
    assert torch.equal(p, before)


def test_a_step_equals_torchs_up_to_bf16_rounding():
    options = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    ours, optimizer = after_steps(lambda p: Muon(p, **options), drawn(1))
    theirs, torchs = after_steps(
        lambda p: torch.optim.Muon(p, adjust_lr_fn="match_rms_adamw", **options), drawn(1)
    )
    for mine, its, before in zip(ours, theirs, drawn(1), strict=True):
        moved = (its - before.detach()).norm()
        assert (mine - its).norm() <= 0.02 * moved
    held = [[o.state[p] for g in o.param_groups for p in g["params"]] for o in (optimizer, torchs)]
    for mine, its in zip(*held, strict=True):
        assert mine.keys() == its.keys() == {"momentum_buffer"}
        torch.testing.assert_close(mine["momentum_buffer"], its["momentum_buffer"])


def test_a_stack_of_matrices_equals_the_single_ones():
    def one_each(parameters):
        optimizers = [Muon([parameter], lr=0.1) for parameter in parameters]
        return SimpleNamespace(step=lambda: [optimizer.step() for optimizer in optimizers])

    together, _ = after_steps(lambda p: Muon(p, lr=0.1), drawn(1))
    alone, _ = after_steps(one_each, drawn(1))
    for mine, its in zip(together, alone, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)


def test_three_stacked_matrices_are_updated_separately():
    (joined,) = drawn(5, [(24, 8)])
    parts = [torch.nn.Parameter(part.detach().clone()) for part in joined.chunk(3)]
    (gradient,) = drawn(6, [(24, 8)])
    joined.grad = gradient.detach()
    for part, its in zip(parts, gradient.detach().chunk(3), strict=True):
        part.grad = its
    optimizer = Muon([{"params": [joined], "n_matrices": 3}, {"params": parts}], lr=0.1)
    optimizer.step()
    torch.testing.assert_close(joined, torch.cat(parts), rtol=1e-12, atol=1e-12)
    assert optimizer.state[joined]["momentum_buffer"].shape == (24, 8)


class ProductDtypes(TorchFunctionMode):
    """Record the dtypes of batched products inside the block."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.bmm:
            self.dtypes.add(args[0].dtype)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"avx512_f": True, "avx512_bf16": True}, torch.bfloat16),
        ({"avx512_f": True, "amx_bf16": True}, torch.bfloat16),
        ({"neon": True, "bf16": True}, torch.bfloat16),
        ({"avx512_f": True, "avx512_bf16": False}, torch.float32),
        ({"avx2": True}, torch.float32),
    ],
)
def test_newton_schulz_runs_in_bf16_only_on_cpus_that_support_it(features, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    for parameters, dtype in ((drawn(1, dtype=torch.float32), expected), (drawn(1), torch.float64)):
        with ProductDtypes() as products:
            after_steps(lambda p: Muon(p), parameters, n_steps=1)
        assert products.dtypes == {dtype}
