"""Options of a verb, from a frozen dataclass whose attribute docstrings are the help text."""

from __future__ import annotations

from typing import TypeVar

import tyro

Options = TypeVar("Options")


def parse(
    options: type[Options],
    verb: str,
    arguments: list[str],
    description: str,
    *,
    base: Options | None = None,
) -> Options:
    """Return the options; usage errors and `--help` end the process with codes 2 and 0.

    What is not given is as in `base`.
    """
    return tyro.cli(
        options,
        prog=f"tiedgpt {verb}",
        args=arguments,
        description=description,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
        default=tyro.MISSING_NONPROP if base is None else base,
    )
