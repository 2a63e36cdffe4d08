"""How the user can call this program again."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def program() -> str:
    """Return `tiedgpt` where the shell finds it, else the path or the module that was run."""
    called = Path(sys.argv[0])
    found = shutil.which("tiedgpt")
    if called.stem == "tiedgpt" and called.exists():
        if found is not None and Path(found).resolve() == called.resolve():
            return "tiedgpt"
        return min(str(called), os.path.relpath(called), key=len)
    return "tiedgpt" if found is not None else f"{Path(sys.executable).name} -m tiedgpt"
