import os
import pydoc_data.topics
from pathlib import Path

import pytest

from tiedgpt.text import Tokenizer


@pytest.fixture(scope="session")
def corpus() -> str:
    """A few hundred kilobytes of English that every Python has."""
    return "\n".join(pydoc_data.topics.topics.values())


@pytest.fixture(scope="session")
def bpe(corpus: str) -> Tokenizer:
    return Tokenizer.train([corpus], vocab_size=1000)


@pytest.fixture(scope="session")
def char(corpus: str) -> Tokenizer:
    return Tokenizer.characters([corpus, "naïve 日本 👍\r\n\t"])


@pytest.fixture(scope="session")
def gpt2_folder() -> Path:
    """OpenAI's encoder.json and vocab.bpe."""
    folder = os.environ.get("TIEDGPT_GPT2_BPE")
    if not folder:
        pytest.skip("TIEDGPT_GPT2_BPE names no folder with GPT-2's encoder.json and vocab.bpe")
    return Path(folder)
