"""Packages that only some checkpoint formats need: the extra `tiedgpt[formats]`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tiedgpt.errors import UserError


def require_package(name: str, purpose: str) -> Any:
    """Import a package of the extra `formats`; `UserError` where it is not installed.

    `purpose` says what needs it: "reading ONNX files".
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(
            f"{purpose} needs the package {name.partition('.')[0]} ({error})",
            hint="pip install 'tiedgpt[formats]'",
        ) from None
