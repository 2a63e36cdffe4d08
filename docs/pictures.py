"""Take the pictures that the documentation shows: the terminal and the page.

    python docs/pictures.py              # in the repository, after `make .venv/.installed-page`
    python docs/pictures.py RUN          # the page, of a run that exists

Without RUN, the terminal's picture is of `tiedgpt train --minutes 3`, as `make demo` calls it. The
page is taken in Chromium, light and dark.
"""

import os
import re
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path
from urllib.parse import urlencode

sys.path.insert(0, str(Path(__file__).parents[1]))

from PIL import Image
from playwright.sync_api import sync_playwright
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text
from tests.serve.browsing import CHROMIUM, OPTIONS, serving, settled

TEXT = "Return a new dictionary with the same"
HEIGHTS = {"dot": 760, "layers": 880, "heads": 1400, "learn": 1120}
"""The views, and the pixels from the top that are shown."""
IMAGES = Path(__file__).parent / "images"
STATE = {"learn": {"train": "head", "steps": 1}}
"""State of a view beside the text."""


def draw_terminal(folder: Path) -> Path:
    """Train in a folder, write docs/images/terminal.svg; return the run."""
    options = {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "0", "COLUMNS": "80"}
    command = ["tiedgpt", "train", "--minutes", "3"]
    trained = subprocess.run(
        command, cwd=folder, env=os.environ | options, text=True, check=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    console = Console(record=True, width=80, file=open(os.devnull, "w"))
    console.print(Text.from_ansi(f"$ {' '.join(command)}\n{trained.stdout.rstrip()}"))
    fonts = re.sub(r"@font-face {{.*?}}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    fonts = fonts.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
    console.save_svg(str(IMAGES / "terminal.svg"), title="tiedgpt train", code_format=fonts)
    return next((folder / "runs").iterdir())


def draw_page(run: Path) -> None:
    """Write docs/images/page-VIEW.png and page-VIEW-dark.png for each view."""
    with serving(str(run), name=run.name) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        for scheme, suffix in (("light", ""), ("dark", "-dark")):
            page = browser.new_page(color_scheme=scheme, viewport={"width": 1120, "height": 900})
            for view, height in HEIGHTS.items():
                page.set_viewport_size({"width": 1120, "height": height})
                page.goto("about:blank")
                page.goto(f"{url}/#{urlencode({'view': view, 'text': TEXT} | STATE.get(view, {}))}")
                for _ in range(3):  # one answer may be what the next question waits for
                    settled(page)
                    page.wait_for_timeout(500)
                picture = Image.open(BytesIO(page.screenshot())).convert("RGB").quantize(256)
                picture.save(IMAGES / f"page-{view}{suffix}.png", optimize=True)
        browser.close()


def main(path: str | None = None) -> None:
    """Write the pictures of a run, or of a new one."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(path).resolve() if path else draw_terminal(Path(folder))
        draw_page(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
