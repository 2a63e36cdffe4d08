"""Ids one at a time -> text one piece at a time, for output that is shown while it is generated.

A token may end inside a UTF-8 character, or, in GPT-1's vocabulary, with a word, which a blank
follows only if another token does. Bytes are held back until they are certain, so that the joined
pieces equal the decoded text.
"""

import codecs
import operator
from collections.abc import Callable, Mapping


class StreamDecoder:
    """Turns ids into text as they come, never into part of a character.

    Made by `Tokenizer.stream()`. `bytes_of(id)` gives the bytes of one token; `last_bytes` has the
    ids that stand for other bytes at the end of a text. Where the text continues an earlier one,
    `after` is the last id of that.
    """

    def __init__(
        self, bytes_of: Callable[[int], bytes], last_bytes: Mapping[int, bytes], after: int | None
    ) -> None:
        self._bytes_of, self._last_bytes = bytes_of, last_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._if_more, self._if_last = b"", b""  # the rest of the newest token
        if after is not None and operator.index(after) in last_bytes:
            _, self._if_more, _ = self._split(operator.index(after))

    def push(self, id: int) -> str:
        """The text that is certain after `id`; it may be empty.

        Raises UserError for an id outside the vocabulary; the decoder is then as before.
        """
        certain, if_more, if_last = self._split(operator.index(id))
        certain = self._if_more + certain
        self._if_more, self._if_last = if_more, if_last
        return self._decoder.decode(certain)

    def finish(self) -> str:
        """The text held back, with U+FFFD for an incomplete character; then start afresh."""
        rest, self._if_more, self._if_last = self._if_last, b"", b""
        return self._decoder.decode(rest, final=True)

    def _split(self, id: int) -> tuple[bytes, bytes, bytes]:
        """The certain bytes of `id`, and the rest if another id follows, and if none does."""
        inner = self._bytes_of(id)
        last = self._last_bytes.get(id, inner)
        shorter = min(len(inner), len(last))
        same = next((n for n in range(shorter) if inner[n] != last[n]), shorter)
        return inner[:same], inner[same:], last[same:]
