"""Text to ids and back: `Tokenizer` for whole texts, `StreamDecoder` for ids one by one.

For example:

    from tiedgpt.text import Tokenizer

    tokenizer = Tokenizer.train(texts, vocab_size=1024)  # or .from_pretrained("gpt2"), .characters
    ids = tokenizer.encode("Once upon a time")  # a list of ints
    print(tokenizer.decode(ids), [tokenizer.token_bytes(id) for id in ids])
    tokenizer.save_pretrained("tokenizer")  # transformers loads it
"""

from tiedgpt.text.tokenizer import StreamDecoder, Tokenizer

__all__ = ["StreamDecoder", "Tokenizer"]


def __dir__() -> list[str]:
    return __all__
