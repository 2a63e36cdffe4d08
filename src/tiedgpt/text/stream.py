"""Ids one at a time -> text one piece at a time, for output that is shown while it is generated.

A token may end inside a UTF-8 character. What is incomplete is kept back until the bytes that
complete it arrive, so the pieces, joined, are the text that decoding all the ids at once gives.
"""

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Turns ids into text as they come, never giving out part of a character.

    Made by `Tokenizer.stream()`. `bytes_of(id)` gives the bytes of one token; what it raises for
    an id outside the vocabulary passes through `push`, and the decoder stays as it was.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        """The text that is complete now that `id` has come; possibly none, never half a character.

        Raises UserError for an id outside the vocabulary.
        """
        return self._decoder.decode(self._bytes_of(id))

    def finish(self) -> str:
        """What was kept back, as U+FFFD since no character came of it; then all is as at first."""
        return self._decoder.decode(b"", final=True)
