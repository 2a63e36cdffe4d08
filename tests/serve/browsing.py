"""Open the page in headless Chromium, wait for it, and read the numbers that it shows."""

import math
import os
from contextlib import contextmanager
from urllib.parse import urlencode

from tests.serve.conftest import Running
from tiedgpt.infer import Engine

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
OPTIONS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
VIEWS = (
    "start", "text", "compare", "layers", "heads", "matrix", "dot", "vocabulary", "model", "learn",
    "write", "guess",
)  # fmt: skip
TEXT = "the cat sat on the mat. the dog ate the hat"
WIDE = {"width": 1280, "height": 900}


@contextmanager
def serving(run, name="cats", **options):
    with (
        Engine(str(run), queue_size=8) as engine,
        Running(engine, name=name, source=run, **options) as running,
    ):
        yield running.url


@contextmanager
def opened(browser, address="", quiet=True, **context):
    """Yield a page; check that its console is empty and no other host was requested."""
    options = {"viewport": WIDE, "service_workers": "block"} | context
    with browser.new_context(**options) as context:
        page = context.new_page()
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("dialog", lambda dialog: (page.said.append("dialog"), dialog.dismiss()))
        page.on("request", lambda request: page.asked.append(request.url))
        page.add_init_script(
            "document.addEventListener('securitypolicyviolation', e => console.log(e.blockedURI))"
        )
        page.set_default_timeout(20_000)
        yield page
        foreign = [
            one for one in page.asked if not one.startswith((address or "file:", "data:", "blob:"))
        ]
        assert not foreign
        if quiet:
            assert not page.said


def fragment(view, **saved):
    return f"#{urlencode({'view': view, 'text': TEXT} | saved)}"


def settled(page):
    """Wait until the view is there and no call is under way."""
    page.wait_for_selector("main .panel, main .panel-head")
    page.wait_for_timeout(250)
    page.wait_for_selector(".spinner, [aria-busy=true]", state="detached")
    page.wait_for_timeout(100)


def go(page, url, view, **saved):
    page.goto(f"{url}/{fragment(view, **saved)}")
    settled(page)
    assert page.locator(f"#tab-{view}").get_attribute("aria-selected") == "true"
    assert page.locator(".status.error").count() == 0


def numbers(page, where="main"):
    """The numbers that a view shows, with all their digits."""
    values = page.locator(f"{where} data").evaluate_all("all => all.map(one => one.value)")
    return [float(value) for value in values]


def flat(value):
    """All numbers in a result, and the probabilities of those that are logarithms."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for entry in value for number in flat(entry)]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return [value, math.exp(value)] if value <= 0 else [value]
    return []
