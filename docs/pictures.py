"""Take the pictures of the page that the documentation shows, in Chromium, light and dark.

    python docs/pictures.py RUN          # in the repository, after `make .venv/.installed-page`

RUN is one of `make demo`.
"""

import sys
from io import BytesIO
from pathlib import Path
from urllib.parse import urlencode

sys.path.insert(0, str(Path(__file__).parents[1]))

from PIL import Image
from playwright.sync_api import sync_playwright
from tests.serve.browsing import CHROMIUM, OPTIONS, serving, settled

TEXT = "Return a new dictionary with the same"
HEIGHTS = {"start": 1170, "dot": 760, "layers": 880, "heads": 1400}
"""The views, and the pixels from the top that are shown."""


def main(run: str) -> None:
    """Write docs/images/page-VIEW.png and page-VIEW-dark.png for each view."""
    images = Path(__file__).parent / "images"
    name = Path(run).resolve().name
    with serving(run, name=name) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        for scheme, suffix in (("light", ""), ("dark", "-dark")):
            page = browser.new_page(color_scheme=scheme, viewport={"width": 1120, "height": 900})
            for view, height in HEIGHTS.items():
                page.set_viewport_size({"width": 1120, "height": height})
                page.goto("about:blank")
                page.goto(f"{url}/#{urlencode({'view': view, 'text': TEXT})}")
                for _ in range(3):  # one answer may be what the next question waits for
                    settled(page)
                    page.wait_for_timeout(500)
                picture = Image.open(BytesIO(page.screenshot())).convert("RGB").quantize(256)
                picture.save(images / f"page-{view}{suffix}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
