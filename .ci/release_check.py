"""Check that a release is ready: versions agree, the CHANGELOG has its section, the wheel works.

    python .ci/release_check.py [--tag vX.Y.Z]      # after `make package`; some minutes
    python .ci/release_check.py --notes             # prints the section of the CHANGELOG

The wheel in dist/ is installed in an empty environment, where `.ci/smoke` runs with it. PyPI's
`twine check` renders the README. `make release-check` calls this.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = {
    "src/tiedgpt/__init__.py": r'__version__ = "(.+)"',
    "CITATION.cff": r"^version: (.+)",
    "CHANGELOG.md": r"^## (\d\S*)",
    "docs/quick-start.md": r"tiedgpt-(\d[\w.]*)-py3",
}
"""Pattern of the version in each file that names it; the newest is the first in CHANGELOG.md."""


def check_versions(version: str, tag: str | None) -> None:
    """Raise SystemExit for a file or a tag that names another version than pyproject.toml."""
    named = {
        name: re.findall(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        for name, pattern in VERSIONS.items()
    }
    named["CHANGELOG.md"] = named["CHANGELOG.md"][:1]
    if tag is not None:
        named["the tag"] = [tag.removeprefix("v")]
    wrong = [
        f"{name}: {versions}" for name, versions in named.items() if set(versions) != {version}
    ]
    if wrong:
        raise SystemExit(f"pyproject.toml has version {version}; {'; '.join(wrong)}")


def read_notes(version: str) -> str:
    """Return the section of a version in CHANGELOG.md."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(version)}.*?\n(.+?)(?=^## |\Z)", text, re.M | re.S)
    if section is None or not section[1].strip():
        raise SystemExit(f"CHANGELOG.md has no text under ## {version}")
    return section[1].strip()


def check_wheel(wheel: Path) -> None:
    """Install the wheel in an empty environment and run `.ci/smoke` there."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        programs = Path(folder, "Scripts" if os.name == "nt" else "bin")
        cpu = "https://download.pytorch.org/whl/cpu"
        index = ["--extra-index-url", cpu] if os.environ.get("TORCH") == "cpu" else []
        subprocess.run(
            [programs / "python", "-m", "pip", "install", "--quiet", *index, wheel], check=True
        )
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path}
        environment.pop("PYTHONPATH", None)  # it may name a checkout
        subprocess.run(["bash", ROOT / ".ci" / "smoke"], env=environment, check=True)


def main() -> None:
    """Run all checks, or print the notes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tag", help="tag of the release, which must name the version")
    parser.add_argument("--notes", action="store_true", help="print the release's notes alone")
    arguments = parser.parse_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    notes = read_notes(version)
    if arguments.notes:
        print(notes)
        return
    check_versions(version, arguments.tag)
    files = sorted((ROOT / "dist").glob(f"tiedgpt-{version}*"))
    wheels = [file for file in files if file.suffix == ".whl"]
    if not wheels or len(wheels) == len(files):
        raise SystemExit(f"dist/ lacks the wheel or the sdist of {version}: run `make package`")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)
    for wheel in wheels:
        check_wheel(wheel)
    print(f"{version} is ready")


if __name__ == "__main__":
    main()
