"""An engine on a saved model."""

import pytest

from tiedgpt.infer import Engine


@pytest.fixture(scope="package")
def engine(directory):
    with Engine(directory) as engine:
        yield engine
