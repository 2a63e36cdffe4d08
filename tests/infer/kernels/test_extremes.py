"""Values at the limits of float32, and leftovers in slots and buffers."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.infer.kernels.conftest import made, stood_for
from tiedgpt.infer.packed_session import PackedRunner
from tiedgpt.weights.formats.packed.panels import PRECISIONS
from tiedgpt.weights.formats.packed.writer import pack_gpt

IDS = [5, 17, 3, 96, 0, 41, 8, 8, 60]


def logits(packed, ids=IDS):
    session = PackedRunner(packed, threads=2).session(n_slots=1, capacity=24)
    return session.read([0], [ids], all_logits=[0])[0]


@pytest.mark.parametrize("form", PRECISIONS)
@pytest.mark.parametrize("changes", [{}, {"norm": "post"}, {"n_embd": 69, "n_head": 3}])
def test_former_contents_of_a_cache_do_not_matter(form, changes):
    packed = pack_gpt(made(attention_windows=(0, 3), **changes), form)
    session = PackedRunner(packed, threads=2).session(n_slots=2, capacity=24)
    for array in session.cache:
        array.view(np.uint8)[...] = 0xFF
    got = session.read([0, 1], [IDS, IDS[:5]], all_logits=[0, 1])
    np.testing.assert_array_equal(got[0], logits(packed))
    np.testing.assert_array_equal(got[1], logits(packed)[:5])


@pytest.mark.parametrize("size", [1e3, 1e6, 1e8])
def test_attention_with_enormous_scores_takes_the_largest(size):
    model = made(n_layer=1, bias=False)
    with torch.no_grad():
        model.h[0].attn.c_attn.weight[: 2 * model.config.n_embd] *= size
    packed = pack_gpt(model, "fp32")
    with torch.no_grad():
        expected = stood_for(model, packed)(torch.tensor([IDS]))[0].numpy()
    np.testing.assert_allclose(logits(packed), expected, atol=1e-3)


@pytest.mark.parametrize("form", PRECISIONS)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_nan_activations_reach_the_scores_and_are_not_cached(form, norm):
    packed = pack_gpt(made(norm=norm), form)
    right = logits(packed)
    packed.arrays["wpe"][3, :32] = np.nan
    session = PackedRunner(packed, threads=2).session(n_slots=1, capacity=24)
    got = session.read([0], [IDS], all_logits=[0])[0]
    assert np.isnan(got[3:]).all()
    packed.arrays["wpe"][3, :32] = 0
    session.truncate(0, 0)
    got = session.read([0], [IDS], all_logits=[0])[0]
    np.testing.assert_array_equal(got[:3], right[:3])
    assert np.isfinite(got).all()


ASSUMED = """
import importlib, json, os, sys
from numba import config
from tiedgpt.infer.kernels import simd
for settings in json.load(sys.stdin):
    os.environ.update(settings)
    config.reload_config()
    importlib.reload(simd)
    print(simd.BYTE_CLASS, simd.HAS_DOT16)
    for name in settings: del os.environ[name]
"""


def test_the_assumed_cpu_features_are_those_numba_compiles_for():
    settings = [
        {"NUMBA_CPU_NAME": "generic"},
        {"NUMBA_CPU_NAME": "haswell"},
        {"NUMBA_CPU_FEATURES": "+avx2,-avx512vnni"},
    ]
    command, asked = [sys.executable, "-c", ASSUMED], json.dumps(settings)
    done = subprocess.run(command, input=asked, capture_output=True, check=True, text=True)
    assert done.stdout.splitlines() == ["plain False", "plain False", "avx2 False"]
