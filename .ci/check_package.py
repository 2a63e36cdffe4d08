"""Check wheels and an sdist: every file is there, the metadata is right, and no torch is needed.

    python .ci/check_package.py DIRECTORY

`make package` builds them and calls this.
"""

import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from email.parser import Parser
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
MACHINE_CODE = "tiedgpt/infer/kernels/machine_code/*.so"
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it fails
import tiedgpt
from tiedgpt.cli.main import VERBS, main
assert tiedgpt.__file__.startswith(sys.argv[1]), tiedgpt.__file__
assert main(["--version"]) == 0
for verb in VERBS:
    try:
        main([verb, "--help"])
    except SystemExit as end:
        assert end.code == 0, verb
assert tiedgpt.GPTConfig.preset("gpt2").parameter_count() == 124_439_808
"""


def tracked(folder: str) -> set[str]:
    """Return the files of the repository under a folder."""
    listed = subprocess.run(
        ["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(listed.stdout.split())


def check_wheel(path: Path) -> None:
    """Raise AssertionError for a wheel that lacks a file, or has one too many."""
    with zipfile.ZipFile(path) as wheel:
        code = {name for name in wheel.namelist() if fnmatch(name, MACHINE_CODE)}
        glibc = [int(n) for x in code for n in re.findall(rb"GLIBC_2\.(\d+)", wheel.read(x))]
        tag = re.search(r"manylinux_2_(\d+)_(x86_64|aarch64)", path.name)
        assert max(glibc, default=0) == int(tag[1] if tag else 0), f"{path.name} needs {glibc}"
        machines = {wheel.read(x)[18] for x in code}
        assert machines == ({ELF_MACHINES[tag[2]]} if tag else set()), f"{path.name}: {machines}"
        names = sorted(set(wheel.namelist()) - code)
        held = {f"src/{name}" for name in names if ".dist-info/" not in name}
        unlike = held ^ tracked("src/tiedgpt")
        assert not unlike, f"in the wheel or in the repository alone: {sorted(unlike)}"
        info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
        metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
        assert f"{info}/licenses/LICENSE" in names
        assert "tiedgpt = tiedgpt.cli.main:main" in wheel.read(f"{info}/entry_points.txt").decode()
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert metadata["Version"] == project["version"]
        assert set(metadata.get_all("Provides-Extra")) == project["optional-dependencies"].keys()
        with tempfile.TemporaryDirectory() as place:
            wheel.extractall(place)
            start = f"import sys; sys.path.insert(0, sys.argv[1])\n{WITHOUT_TORCH}"
            command = [sys.executable, "-I", "-c", start, place]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def check_sdist(path: Path) -> None:
    """Raise AssertionError for an sdist from which the project cannot be carried on."""
    with tarfile.open(path) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}
    folders = ("src", "tests", "docs", "examples", "bench")
    missing = set().union(*map(tracked, folders)) - held
    missing |= {"README.md", "LICENSE", "Makefile", "constraints.txt", "CHANGELOG.md"} - held
    assert not missing, f"not in the sdist: {sorted(missing)[:9]}"


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    wheels = sorted(directory.glob("*.whl"))
    assert any(wheel.name.endswith("-any.whl") for wheel in wheels), wheels
    (sdist,) = directory.glob("*.tar.gz")
    for wheel in wheels:
        check_wheel(wheel)
    check_sdist(sdist)
    for made in (*wheels, sdist):
        print(f"{made.name}: {made.stat().st_size / 1e3:,.0f} kB, complete")
