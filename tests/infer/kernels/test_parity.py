"""Kernels compute what torch computes from the same weights."""

import numpy as np
import pytest
import torch

from tests.infer.kernels.conftest import ARCHITECTURES, made, stood_for
from tiedgpt.infer.packed_session import PackedRunner, forward
from tiedgpt.weights.formats.packed.panels import PRECISIONS
from tiedgpt.weights.formats.packed.writer import pack_gpt

APART = {"fp32": 2e-6, "bf16": 1e-2, "int8": 3e-2, "int4": 3e-2}
"""Error of activations rounded to bf16 or 8 bits, as a share of the logits' size."""


@pytest.mark.parametrize("form", PRECISIONS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_matches_in_every_precision(name, form):
    model = made(**ARCHITECTURES[name])
    packed = pack_gpt(model, form)
    ids = torch.randint(97, (3, 24), generator=torch.Generator().manual_seed(3))
    expected = stood_for(model, packed)
    with torch.no_grad():
        logits = expected(ids).numpy()
    session = PackedRunner(packed, threads=2).session(n_slots=3, capacity=24)
    read = session.read([0, 1, 2], ids.tolist(), all_logits=[0, 1, 2])
    got = np.stack(read)
    apart = np.linalg.norm(got - logits, axis=-1) / np.linalg.norm(logits, axis=-1)
    first = f"logits differ at (row, position) {np.argwhere(apart >= APART[form])[:1].tolist()}"
    assert np.linalg.norm(got - logits) < APART[form] * np.linalg.norm(logits), first
    if form == "fp32":
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(read[0]), model(ids)[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("form", PRECISIONS)
def test_a_precision_is_compiled_once_for_all_models(form):
    compiled = []
    for name in ("GPT-2", "untied", "GPT-1"):
        packed = pack_gpt(made(**ARCHITECTURES[name]), form)
        PackedRunner(packed).session(n_slots=1, capacity=8).read([0], [[1]])
        compiled.append(len(forward.functions))
    assert len(set(compiled)) == 1
    assert compiled[0] <= len(PRECISIONS)
