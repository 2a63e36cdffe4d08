"""Products in fp32 equal torch's own, whichever library computes them."""

import pytest
import torch
import torch.nn.functional as F

from tiedgpt.train.step.fast import matmul
from tiedgpt.train.step.fast.matmul import is_onednn_faster


@pytest.fixture(autouse=True, params=["MKL", "oneDNN"])
def library(request, monkeypatch):
    monkeypatch.setattr(matmul, "is_onednn_faster", lambda: request.param == "oneDNN")


@pytest.mark.parametrize("n_rows", [1, 509, 64, 512])
@pytest.mark.parametrize("widths", [(24, 40), (128, 384), (96, 50)])
def test_products_and_their_gradients_equal_torchs(n_rows, widths):
    torch.manual_seed(0)
    n_in, n_out = widths
    x, w, b = torch.randn(n_rows, n_in), torch.randn(n_out, n_in), torch.randn(n_out)
    grad, out = torch.randn(n_rows, n_out), torch.empty(n_rows, 2 * n_out)[:, :n_out]
    torch.testing.assert_close(matmul.linear(x, w, b), F.linear(x, w, b), rtol=1e-5, atol=1e-4)
    matmul.linear(x, w, out=out)
    torch.testing.assert_close(out, x @ w.T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(matmul.linear(grad, w.T), grad @ w, rtol=1e-5, atol=1e-4)
    ours = matmul.weight_gradient(x, grad)
    torch.testing.assert_close(ours, grad.T @ x, rtol=1e-5, atol=1e-3)


def test_rows_of_a_wider_tensor_are_read_in_place():
    torch.manual_seed(0)
    wide, w = torch.randn(512, 300), torch.randn(40, 100)
    rows = wide[:, 100:200]
    torch.testing.assert_close(matmul.linear(rows, w), rows @ w.T, rtol=1e-5, atol=1e-4)


def test_results_are_deterministic():
    torch.manual_seed(0)
    x, w, grad = torch.randn(512, 128), torch.randn(96, 128), torch.randn(512, 96)
    assert torch.equal(matmul.linear(x, w), matmul.linear(x, w))
    assert torch.equal(matmul.weight_gradient(x, grad), matmul.weight_gradient(x, grad))


def test_onednn_computes_on_amds_cpus_with_whole_avx512_units(monkeypatch):
    for has_vp2intersect, capability in ((True, "AVX512"), (False, "AVX512"), (True, "AVX2")):
        features = {"avx512_vp2intersect": has_vp2intersect}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda features=features: features)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
        assert is_onednn_faster.__wrapped__() == (has_vp2intersect and capability == "AVX512")
