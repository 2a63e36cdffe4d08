"""Error classes of the project, each with its exit code on the command line.

An error carries the problem (`message`), a remedy (`hint`) and the names in Python of the options
concerned (`option`). The command line writes `--top-k`, the server its field, Python `top_k`. This
file imports nothing of the project, so that every layer may raise these errors.
"""

from collections.abc import Callable

EXIT_OK = 0
EXIT_USAGE = 2  # given by the argument parser
EXIT_INTERRUPTED = 75  # a run was stopped and saved; running the same command again goes on


class TiedGPTError(Exception):
    """Base of all errors that the project raises on purpose.

    With `option`, its names are the beginning of the sentence, and `message` is the rest:
    `UserError("must be at least 1, got 0", option="top_k")`.
    """

    exit_code = 1

    def __init__(
        self, message: str = "", *, hint: str | None = None, option: str | tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint
        self.options = (option,) if isinstance(option, str) else option

    def problem(self, spell: Callable[[str], str] = str) -> str:
        """Return the problem without the hint; `spell` writes an option's name."""
        subject = " and ".join(spell(name) for name in self.options)
        return f"{subject} {self.message}" if subject else self.message

    def __str__(self) -> str:
        return self.problem() if self.hint is None else f"{self.problem()}: {self.hint}"


class UserError(TiedGPTError, ValueError):
    """A request that cannot be met: a bad value, a missing file, an id outside the vocabulary."""


class CorruptInputError(TiedGPTError, ValueError):
    """A file that is damaged, truncated, or not of the format it claims."""

    exit_code = 3


class NoRoomError(TiedGPTError, OSError):
    """Not enough memory or disk space; nothing was left half-written."""

    exit_code = 4


class DivergedError(TiedGPTError, ArithmeticError):
    """Training left the finite numbers; the last good state is kept."""

    exit_code = 5


class CheckFailedError(TiedGPTError):
    """A check that was asked for found a violation."""

    exit_code = 6
