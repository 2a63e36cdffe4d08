"""Text to ids and back: `Tokenizer` for whole texts, `StreamDecoder` for ids one by one."""

from tiedgpt.text.stream import StreamDecoder
from tiedgpt.text.tokenizer import Tokenizer

__all__ = ["StreamDecoder", "Tokenizer"]
