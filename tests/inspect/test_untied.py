"""A random head beside the model's own: as if it were put in, and the model stays as it was."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from tests.inspect.conftest import random_ids, random_model
from tiedgpt.inspect import positions, random_head
from tiedgpt.tie import ledger, replace_head


@pytest.mark.parametrize("tied", [True, False])
def test_a_random_head_equals_a_model_with_that_head(tied):
    model, ids = random_model(tied=tied), random_ids()
    before = copy.deepcopy(model.state_dict())
    found = random_head(model, None, ids, top=4, seed=3)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    head = nn.Linear(16, 97, bias=False)
    head.weight.data = torch.randn(97, 16, generator=torch.Generator().manual_seed(3)) * 0.02
    own = positions(model, None, ids, top=4)
    replace_head(model, head)
    other = positions(model, None, ids, top=4)
    assert found.loss == pytest.approx(own.loss, rel=1e-6)
    assert found.random_loss == pytest.approx(other.loss, rel=1e-6)
    assert found.uniform_loss == math.log(97)
    assert found.random_parameters == ledger(model).total
    assert found.parameters == found.random_parameters - (97 * 16 if tied else 0)
    assert found.top_ids.tolist() == own.top_ids[-1].tolist()
    assert found.random_top_ids.tolist() == other.top_ids[-1].tolist()
    np.testing.assert_allclose(found.random_top_logprob, other.top_logprob[-1], rtol=1e-5)
