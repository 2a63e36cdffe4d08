"""The text of a file's bytes: UTF-8, the encoding of a byte-order mark, a given one, or a guess.

`encoding` is "auto", or a name that Python knows.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

from tiedgpt.data.readers import BYTE_ORDER_MARKS, GIVE_ENCODING
from tiedgpt.errors import CorruptInputError, UserError

PEEK_BYTES = 65536
"""Bytes read from the beginning of a file to decide whether it is text."""
SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
"""One surrogate encoded like a character, which UTF-8 forbids."""
CANDIDATES = "cp1252 cp1251 cp1253 koi8_r shift_jis euc_jp gb18030 big5 euc_kr".split()
"""Candidates for the encoding of text that is not UTF-8."""


def require_encoding(encoding: str) -> None:
    """Raise `UserError` for an encoding that Python does not know."""
    try:
        "".encode("utf-8" if encoding == "auto" else encoding)
    except (LookupError, ValueError):
        raise UserError(
            f"--encoding {encoding}: Python knows no such encoding",
            hint="give one such as utf-8, utf-16 or cp1252",
        ) from None


def is_binary(data: bytes, encoding: str) -> bool:
    """Whether bytes are taken for a binary file: they hold NUL and no mark."""
    return encoding == "auto" and b"\0" in data and not data.startswith((*BYTE_ORDER_MARKS,))


def has_lines(head: bytes, encoding: str) -> bool:
    """Whether a text with these first bytes can be cut at newlines, unlike UTF-16."""
    one_byte = encoding == "auto" or "\n".encode(encoding) == b"\n"
    return one_byte and not head.startswith((*BYTE_ORDER_MARKS,)) and not is_binary(head, encoding)


def decode(data: bytes, name: str, encoding: str, *, is_named: bool) -> tuple[str | None, str]:
    """Return the text of the bytes of file `name`, and its encoding; None for a binary file.

    Raises `CorruptInputError` for a file that the user named (`is_named`) and that is not text.
    Only then is an encoding guessed.
    """
    if is_binary(data, encoding):
        if is_named:
            location = f"a NUL byte at {data.index(0):,}"
            raise CorruptInputError(
                f"{name} contains {location}, so it is taken for a binary file",
                hint="remove the byte if it is text, or give its --encoding (utf-8 or utf-16)",
            )
        return None, ""
    marked = (codec for mark, codec in BYTE_ORDER_MARKS.items() if data.startswith(mark))
    encodings = [next(marked, "utf-8-sig")]
    is_other = encoding.lower().replace("_", "-") not in ("auto", "utf-8", "utf8")
    if encoding != "auto":
        encodings.insert(0 if b"\0" in data and is_other else 1, encoding)
    text, used = _decode_as(encodings, data)
    if text is None and encoding == "auto" and is_named:
        _require_no_surrogate(data, name)
        text, used = _decode_as(_guess_encoding(data), data)
    if text is None and is_named:
        nor = f", nor in {encoding}" if is_other else ""
        hint = "give another --encoding" if is_other else f"name text files, or {GIVE_ENCODING}"
        raise CorruptInputError(f"{name} is not text in UTF-8{nor}", hint=hint)
    return text and text.replace("\r\n", "\n"), used


def _decode_as(encodings: Iterable[str], data: bytes) -> tuple[str | None, str]:
    """Return the text and the first of the encodings that decodes it, or None and ""."""
    for encoding in encodings:
        with contextlib.suppress(UnicodeError):
            return data.decode(encoding), encoding
    return None, ""


def _require_no_surrogate(data: bytes, name: str) -> None:
    """Raise `CorruptInputError` for bytes that are UTF-8 but for encoded surrogates."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if SURROGATE.match(data, error.start) is None:
            return
        with contextlib.suppress(UnicodeDecodeError):
            data.decode(errors="surrogatepass")
            raise CorruptInputError(
                f"{name} is not valid UTF-8: at byte {error.start:,} it has a surrogate, half of a "
                "character",
                hint="remove it, or write the file again as UTF-8",
            ) from None


def _guess_encoding(data: bytes) -> list[str]:
    """Return the likeliest encoding of text that is not UTF-8; [] for other bytes."""
    high = len(data) - len(data.translate(None, bytes(range(128, 256))))
    if high == 0 or data.startswith(b"\xef\xbb\xbf"):  # it is UTF-8, or claims to be
        return []
    if high <= len(data) / 4:
        return ["cp1252"]  # western: few of its letters are beyond ASCII
    from charset_normalizer import from_bytes

    best = from_bytes(data[: 4 * PEEK_BYTES], cp_isolation=CANDIDATES).best()
    return [] if best is None else [best.encoding]
