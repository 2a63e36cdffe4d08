"""A model with opinions, saved as transformers reads it, and an engine on it."""

import pytest

from tests.infer.conftest import TEXT, opinionated
from tiedgpt import Tokenizer
from tiedgpt.infer import Engine


@pytest.fixture(scope="package")
def directory(tmp_path_factory):
    tokenizer = Tokenizer.train([TEXT], 300)
    path = tmp_path_factory.mktemp("model")
    opinionated(tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="package")
def engine(directory):
    with Engine(directory) as engine:
        yield engine
