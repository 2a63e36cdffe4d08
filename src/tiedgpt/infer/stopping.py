"""Stop strings in text that arrives in pieces, which may be cut anywhere."""

from __future__ import annotations

from collections.abc import Sequence


class StopWatch:
    """Passes text on until a stop string appears; holds back what might be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.stopped = False
        self._held = ""

    def push(self, piece: str) -> str:
        """Take a piece of text; return what may be shown now. After a stop nothing is shown."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self.stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return what was held back, no more text being to come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` with which `stop` begins."""
    return next(
        (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if stop.startswith(text[-n:])), 0
    )
