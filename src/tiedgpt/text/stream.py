"""Ids one at a time -> text one piece at a time, for output that is shown while it is generated.

A token may end inside a UTF-8 character, or, in GPT-1's vocabulary, with a word, which a space
follows only if another token does. Bytes are held back until they are certain, so that the joined
pieces equal the decoded text.
"""

import codecs
import operator
from collections.abc import Callable, Collection


class StreamDecoder:
    """Turns ids into text as they come, never into part of a character.

    Made by `Tokenizer.stream()`. `bytes_of(id)` gives the bytes of one token; the last byte of the
    ids in `word_ends` is a space that stands only before another id. Where the text continues an
    earlier one, `after` is the last id of that.
    """

    def __init__(
        self, bytes_of: Callable[[int], bytes], word_ends: Collection[int], after: int | None
    ) -> None:
        self._bytes_of, self._word_ends = bytes_of, word_ends
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._blank = b""
        if after is not None and operator.index(after) in word_ends:
            self._blank = b" "

    def push(self, id: int) -> str:
        """Add an id; return the text that is now certain, possibly none.

        Raises UserError for an id outside the vocabulary; the decoder is then as before.
        """
        id = operator.index(id)
        text, ends_word = self._bytes_of(id), id in self._word_ends
        text = self._blank + (text[:-1] if ends_word else text)
        self._blank = b" " if ends_word else b""
        return self._decoder.decode(text)

    def finish(self) -> str:
        """Return the pending text, with U+FFFD for an incomplete character, and start again."""
        self._blank = b""
        return self._decoder.decode(b"", final=True)
