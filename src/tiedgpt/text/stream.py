"""Ids one at a time -> text one piece at a time, for output that is shown while it is generated.

A token may end inside a UTF-8 character, or, in GPT-1's vocabulary, with a word, after which a
blank comes only if a token comes. What is not yet certain is kept back until it is, so the pieces,
joined, are the text that decoding all the ids at once gives.
"""

import codecs
from collections.abc import Callable, Mapping


class StreamDecoder:
    """Turns ids into text as they come, never giving out part of a character.

    Made by `Tokenizer.stream()`. `bytes_of(id)` gives the bytes of one token; what it raises for
    an id outside the vocabulary passes through `push`, and the decoder stays as it was.
    `last_bytes` has the ids whose bytes are others at the end of a text. Where the text begins
    after a token that was decoded before, `after` is its id.
    """

    def __init__(
        self,
        bytes_of: Callable[[int], bytes],
        last_bytes: Mapping[int, bytes] | None = None,
        after: int | None = None,
    ) -> None:
        self._bytes_of = bytes_of
        self._last_bytes = last_bytes or {}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._if_more, self._if_last = b"", b""  # what is still to come from the newest token
        if after is not None and after in self._last_bytes:
            _, self._if_more, _ = self._parted(after)

    def push(self, id: int) -> str:
        """The text that is certain now that `id` has come; possibly none, never half a character.

        Raises UserError for an id outside the vocabulary.
        """
        certain, if_more, if_last = self._parted(id)
        certain = self._if_more + certain
        self._if_more, self._if_last = if_more, if_last
        return self._decoder.decode(certain)

    def finish(self) -> str:
        """What was kept back, U+FFFD for a character that came to nothing; then all is as at first.

        A blank that was to follow a word is no part of the text.
        """
        rest, self._if_more, self._if_last = self._if_last, b"", b""
        return self._decoder.decode(rest, final=True)

    def _parted(self, id: int) -> tuple[bytes, bytes, bytes]:
        """The bytes of `id`: the certain ones, then the rest if more follows, and if none does."""
        inner = self._bytes_of(id)
        last = self._last_bytes.get(id, inner)
        shorter = min(len(inner), len(last))
        same = next((n for n in range(shorter) if inner[n] != last[n]), shorter)
        return inner[:same], inner[same:], last[same:]
