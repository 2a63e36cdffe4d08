"""The page as one file, from a disk and offline, in Chromium and in Firefox."""

import json
import math
import shutil

import numpy as np
import pytest

from tests.inspect.conftest import random_model
from tests.serve.browsing import VIEWS
from tests.serve.firefox import FIREFOX, Firefox
from tests.serve.page_run import make_run
from tests.serve.test_page_browser import LEAST
from tiedgpt import GPT, Tokenizer, inspect
from tiedgpt.cli.main import main
from tiedgpt.data import TEMPLATES, write_template
from tiedgpt.infer import Engine
from tiedgpt.serve.export import export
from tiedgpt.serve.page_model import page_tensors, round_weights

pytestmark = [pytest.mark.page, pytest.mark.timeout(600)]

TEXT = "the cat sat on the mat. the dog ate the hat"
OTHER = "the dog sat on the hat"
LISTEN = """
    window.said = [];
    addEventListener("error", ({ message }) =>
        /ResizeObserver/.test(message) || said.push(message));
    addEventListener("unhandledrejection", (event) => said.push(String(event.reason)));
    addEventListener("securitypolicyviolation", (event) => said.push(event.violatedDirective));
"""
SETTLED = """async () => {
    const find = (selector) => document.querySelector(selector);
    const isBusy = () => !find("main .panel") || find(".spinner, [aria-busy=true]");
    const wait = (ms) => new Promise((go) => setTimeout(go, ms));
    await wait(300);
    const until = performance.now() + 30000;
    for (let quiet = 0; quiet < 3; quiet += 1) {
        if (performance.now() > until) throw new Error("the page does not settle");
        if (isBusy()) quiet = -1;
        await wait(60);
    }
    return find("main").innerText;
}"""


class Chromium:
    """A page of Chromium with the methods of `Firefox`."""

    def __init__(self, browser, width=1280):
        viewport = {"width": width, "height": 800}
        self.context = browser.new_context(viewport=viewport, offline=True)
        self.page, self.asked = self.context.new_page(), []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.add_init_script(LISTEN)

    def open(self, address):
        self.page.goto("about:blank")
        self.page.goto(address)

    def run(self, function):
        return self.page.evaluate(function)


@pytest.fixture(scope="module", params=["chromium", "firefox"])
def page(request, tmp_path_factory):
    """A browser of either kind, with `open` and `run`."""
    if request.param == "chromium":
        page = Chromium(request.getfixturevalue("browser"))
        yield page
        foreign = [url for url in page.asked if not url.startswith(("file:", "data:", "blob:"))]
        assert not foreign
    elif FIREFOX is None:
        pytest.skip("Firefox is not there: install it, or name one with FIREFOX=...")
    else:
        with Firefox(tmp_path_factory.mktemp("firefox")) as page:
            yield page


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "cats", n_positions=256)


@pytest.fixture(scope="module")
def file(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    assert main(["export", str(run), str(path), "--text", TEXT, "--precision", "int8"]) == 0
    return f"file://{path}"


@pytest.fixture(scope="module")
def rounded(run):
    model = GPT.from_pretrained(run)
    return round_weights(model, page_tensors(model, "int8"))


def numbers(page):
    values = page.run("async () => [...document.querySelectorAll('main data')].map((x) => x.value)")
    return np.array([float(value) for value in values])


def errors(page):
    return page.run(
        "async () => [...document.querySelectorAll('main .error')].map((x) => x.innerText)"
    )


def write(page, text):
    """Replace the text of the box, and wait."""
    page.run(f"""async () => {{
        const box = document.querySelector("textarea");
        const put = Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, "value").set;
        put.call(box, {json.dumps(text)});
        box.dispatchEvent(new Event("input", {{ bubbles: true }}));
        await new Promise((go) => setTimeout(go, 500)); }}""")
    page.run(SETTLED)


def test_all_views_work_offline(page, file):
    for view in VIEWS:
        page.open(f"{file}#view={view}")
        page.run(SETTLED)
        assert not errors(page), view
        assert len(numbers(page)) >= LEAST.get(view, 0), view
        assert not page.run("async () => window.said ?? []"), view


def test_other_texts_are_computed_like_the_library(page, file, run, rounded):
    tokenizer = Tokenizer.from_pretrained(run)
    page.open(f"{file}#view=text")
    page.run(SETTLED)
    for text in (OTHER, OTHER + " é 😀", "the"):
        write(page, text)
        found = inspect.positions(rounded, tokenizer, text)
        known = [found.entropy_bits[-1], *np.exp(found.top_logprob[-1])]
        known += [found.loss, found.bits_per_byte] if not math.isnan(found.loss) else []
        shown = numbers(page)
        for number in known:
            assert np.isclose(shown, number, rtol=1e-4).any(), number


def test_gradients_of_other_texts_are_computed_like_the_library(page, file, run, rounded):
    page.open(f"{file}#view=matrix")
    assert "as hard" in page.run(SETTLED)
    write(page, OTHER)
    split = inspect.gradient_split(rounded, Tokenizer.from_pretrained(run), OTHER)
    values = numbers(page)
    for number in (split.norm_read, split.norm_predict, split.cosine):
        assert np.isclose(values, number, rtol=1e-4).any(), number


HANDS = """
    const pause = (ms) => new Promise((go) => setTimeout(go, ms));
    const named = (selector, text) =>
        [...document.querySelectorAll(selector)].find((one) => one.innerText.includes(text));
    const wait = async (find) => {
        for (const until = performance.now() + 20000; !find(); await pause(50))
            if (performance.now() > until) throw new Error("nothing comes of it");
        return find();
    };
    const put = async (input, value) => {
        const { set } = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value");
        set.call(input, value);
        input.dispatchEvent(new Event("input", { bubbles: true }));
        await pause(100);
    };
    const slider = (name) => named("label.slider", name).querySelector("input");
"""


def test_the_page_generates_text(page, file, run, rounded):
    page.open(f"{file}#view=write")
    page.run(SETTLED)
    text = page.run(f"""async () => {{ {HANDS}
        await put(slider("temperature"), 0);
        await put(slider("tokens to write"), 20);
        named("main button", "Write").click();
        (await wait(() => named("main button", "Take it as the text"))).click();
        await wait(() => named("[aria-selected=true]", "Text"));
        await pause(300);
        return document.querySelector("textarea").value; }}""")
    with Engine(rounded, tokenizer=Tokenizer.from_pretrained(run)) as engine:
        expected = engine.generate(TEXT, max_new_tokens=20, temperature=0).text
    assert text == TEXT + expected


def test_the_page_chats(page, run, tmp_path):
    with_chat, path = tmp_path / "chat", tmp_path / "page.html"
    shutil.copytree(run / "model", with_chat)
    write_template(TEMPLATES["plain"], Tokenizer.from_pretrained(run), with_chat)
    assert main(["export", str(with_chat), str(path), "--text", TEXT]) == 0
    page.open(f"file://{path}#view=write")
    page.run(SETTLED)
    n_characters = page.run(f"""async () => {{ {HANDS}
        named("[role=radio]", "conversation").click();
        await put(await wait(() => document.querySelector("form .box input")), "the cat");
        named("main button", "Send").click();
        await wait(() => named("main button", "Begin anew"));
        return document.querySelector("li.assistant p").innerText.length; }}""")
    assert n_characters > 0 and not errors(page)


def test_an_abandoned_request_is_cancelled(browser, file):
    page = Chromium(browser)
    page.open(f"{file}#view=text")
    page.run(SETTLED)
    said = page.run("""async () => {
        const { stream, call } = await import("page/api.js");
        const controller = new AbortController();
        let [n, message] = [0, null];
        try {
            const body = { prompt: "the", max_tokens: 200, temperature: 1, logprobs: 1 };
            for await (const _ of stream("/v1/completions", body, controller.signal))
                if ((n += 1) === 3) controller.abort();
        } catch (error) { message = error.message; }
        const { count } = await call("/tokenize", { prompt: "the cat" });
        return [n, message, count]; }""")
    assert said[0] < 200 and said[1] == "stopped" and said[2] > 0


def test_a_saved_copy_opens_with_the_text_and_the_view(browser, file, rounded, run, tmp_path):
    page, path = Chromium(browser), tmp_path / "copy.html"
    page.open(f"{file}#view=text")
    page.run(SETTLED)
    write(page, OTHER)
    with page.page.expect_download() as download:
        page.page.get_by_role("button", name="Save a copy").click()
    download.value.save_as(path)
    page.open(f"file://{path}")
    page.run(SETTLED)
    assert page.run("async () => document.querySelector('textarea').value") == OTHER
    assert page.page.locator("#tab-text").get_attribute("aria-selected") == "true"
    loss = inspect.positions(rounded, Tokenizer.from_pretrained(run), OTHER).loss
    assert np.isclose(numbers(page), loss, rtol=1e-4).any() and not page.run("async () => said")


def test_a_file_without_a_tokenizer_shows_its_ids(page, tmp_path):
    path = tmp_path / "bare.html"
    path.write_text(export(random_model(), None, [1, 2, 3], name="bare"), encoding="utf-8")
    for view in VIEWS:
        page.open(f"file://{path}#view={view}")
        page.run(SETTLED)
        assert not errors(page), view
