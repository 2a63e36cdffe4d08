"""Functions that Numba compiles at their first call and caches on disk."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from numba import njit

_njit = partial(njit, nogil=True, error_model="numpy")


class Kernel:
    """A compiled function of (control, ...), which every thread of a pool calls for one step.

    It returns when the step is done, or at once if it already is.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        function.__qualname__ = f"{function.__name__}_{_digest():x}"  # names the cached file
        try:
            self.compiled: Any = _njit(cache=True)(function)
        except RuntimeError:  # neither this directory nor the user's cache can be written
            self.compiled = _njit(function)

    def __call__(self, *arguments: Any) -> None:
        """Take part in a step."""
        self.compiled(*arguments)

    @property
    def cache_path(self) -> str | None:
        """The directory of the cache; None without one."""
        path: str | None = self.compiled.stats.cache_path
        return path

    def compile(self, *arguments: Any) -> None:
        """Compile for these arguments, or load from disk; their step must be over.

        If the cache cannot be read or written (a full disk, a damaged file), the function is
        compiled for this process alone, with a `RuntimeWarning`.
        """
        try:
            self.compiled(*arguments)
        except Exception as error:
            where = self.cache_path
            if where is None:
                raise
            if not isinstance(error, OSError):
                with suppress(OSError):
                    self.compiled.recompile()  # of no signatures yet: this empties the cache
            self.compiled = _njit(self.function)
            self.compiled(*arguments)
            warnings.warn(
                f"kernels cannot be read from or kept in {where} ({error}): they were compiled "
                "for this process alone; if the next says so too, free room there or set "
                "NUMBA_CACHE_DIR",
                RuntimeWarning,
                stacklevel=1,
            )


@cache
def _digest() -> int:
    """Return a digest of all kernels' sources; Numba checks only the file of the function."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return zlib.crc32(b"".join(file.read_bytes() for file in files))
