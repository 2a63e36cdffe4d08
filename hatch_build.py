"""Mark a wheel that holds machine code (`make package`) as one for Linux on this CPU."""

import platform
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TAG = f"py3-none-manylinux_2_29_{platform.machine()}"
"""The machine code takes `exp` and `log` from glibc 2.29, and nothing from Python."""


class MachineCode(BuildHookInterface):  # type: ignore[misc]
    """Give the wheel its tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Set the tag if there is machine code."""
        folder = Path(self.root, "src", "tiedgpt", "infer", "kernels", "machine_code")
        if version == "standard" and any(folder.glob("*.so")):
            build_data |= {"tag": TAG, "pure_python": False}
