from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest


class ByteTokenizer:
    """One id a UTF-8 byte, and 256 for the end of text."""

    eos_token_id: int | None = 256
    special_tokens = ("<|endoftext|>",)
    begin_ids = ()

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    def __len__(self) -> int:
        return 257


@pytest.fixture
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], str]:
    """Write a file below the test's folder and return its path."""

    def write_file(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write_file
