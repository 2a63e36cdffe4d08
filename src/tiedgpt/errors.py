"""What can go wrong, in a few classes, each with the exit code the command line gives it.

Every message says what, why and what to do next, in one line. This file imports nothing of the
project, so that every layer may raise these.
"""

EXIT_OK = 0
EXIT_USAGE = 2  # given by the argument parser
EXIT_INTERRUPTED = 75  # a run was stopped and saved; running the same command again goes on


class TiedGPTError(Exception):
    """Base of all errors that the project raises on purpose."""

    exit_code = 1


class UserError(TiedGPTError, ValueError):
    """A request that cannot be met: a bad value, a missing file, an id outside the vocabulary."""

    exit_code = 1


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
