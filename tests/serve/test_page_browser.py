"""The page in headless Chromium: numbers, requests, accessibility and errors."""

import json
import math

import numpy as np
import pytest

from tests.inspect.conftest import random_model
from tests.serve.browsing import TEXT, VIEWS, flat, fragment, go, numbers, opened, serving, settled
from tests.serve.conftest import Running
from tests.serve.page_run import HOSTILE, make_run
from tiedgpt import Tokenizer, inspect
from tiedgpt.infer import Engine

pytestmark = [pytest.mark.page, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "cats", n_positions=1024)


@pytest.fixture(scope="module")
def url(run):
    with serving(run) as url:
        yield url


CALLS = {
    "start": [("positions", {"text": TEXT}), ("dot", {"text": TEXT}), ("lens", {"text": TEXT})],
    "text": [("positions", {"text": TEXT, "top": 10})],
    "dot": [("dot", {"text": TEXT, "top": 10})],
    "matrix": [("random_head", {"text": TEXT}), ("gradient_split", {"text": TEXT})],
    "vocabulary": [("vocabulary", {}), ("neighbours", {"top": 10})],
    "layers": [("lens", {"text": TEXT, "top": 5})],
    "heads": [("attention", {"text": TEXT})],
    "compare": [("positions", {"text": TEXT, "top": 40})],
}
"""The inspections behind each view."""
LEAST = {"start": 5, "text": 20, "dot": 60, "matrix": 20, "vocabulary": 30}
LEAST |= {"layers": 2, "heads": 7, "compare": 20}
"""Smallest number of values that each view shows."""


@pytest.mark.parametrize("view", CALLS)
def test_the_numbers_of_a_view_equal_the_librarys(browser, url, run, view):
    known = []
    for name, options in CALLS[view]:
        if name == "neighbours":
            options = options | {"token": Tokenizer.from_pretrained(run).encode(TEXT)[-1]}
        result = getattr(inspect, name)(run, None, **options)
        known += flat(json.loads(result.to_json()))
        if view == "compare":
            middle = len(result.ids) // 2
            while not result.pieces[middle].startswith(" "):
                middle += 1
            half = inspect.positions(run, None, result.ids[middle:], top=40)
            n, more = half.next, half.surprisal_bits[:-1]
            known += [*flat(json.loads(half.to_json())), n, result.next]
            known += [float(np.mean(more - result.surprisal_bits[-n - 1 : -1]))]
        if name == "positions":
            edges = [0.5, 1.5, 10.5, 100.5, 1000.5, 1e9]
            known += [math.exp(result.loss), result.next]
            known += np.histogram(result.rank[:-1], edges)[0].tolist()
        if name == "gradient_split":
            known += [len(result.pieces)]
        if name == "dot":
            bias = result.bias_part + result.head_bias
            known += [*bias, *(result.h_norm * result.row_norm * result.cos), *range(1, 11)]
            products = result.rows * result.h
            known += [*products.flat, *products.clip(0).sum(1), *(-products).clip(0).sum(1)]
        if name == "attention":
            products = result.queries[0, -1] * result.keys[0]
            sums = products.sum(1)
            known += [*products.flat, *sums, *(sums / math.sqrt(products.shape[1]))]
    known = np.sort(np.array(known, float))
    with opened(browser, url) as page:
        go(page, url, view)
        shown = numbers(page)
        assert len(shown) >= LEAST[view]
        for number in shown:
            at = np.searchsorted(known, number)
            near = known[max(0, at - 1) : at + 1]
            assert np.abs(near - number).min() <= 2e-5 * abs(number) + 1e-9, number


def test_the_layers_grid_and_the_ledger_equal_the_librarys(browser, url, run):
    from tiedgpt import GPT
    from tiedgpt.tie import ledger

    found = inspect.lens(run, None, TEXT, top=5)
    with opened(browser, url) as page:
        go(page, url, "layers")
        rows = page.locator("[role=grid] tbody tr").all()
        assert len(rows) == len(found.layers)
        for state, row in enumerate(reversed(rows)):
            assert row.locator("th").text_content() == found.layers[state]
            cells = row.locator("td").all()
            assert len(cells) == len(found.ids)
            for at in (0, len(cells) - 1):
                percent = cells[at].locator("small").text_content()
                shown = float(percent.replace("%", "").strip()) / 100
                assert shown == pytest.approx(math.exp(found.top_logprob[state, at, 0]), rel=0.06)
        go(page, url, "model")
        total = ledger(GPT.from_pretrained(run)).total
        assert f"{total:,} parameters" in page.locator("main h2").first.text_content()
        assert (
            sum(n for n in numbers(page, "main .panel:first-child tbody tr td:nth-child(2)"))
            >= total
        )


def test_an_untied_model_shows_both_matrices(browser, run, tmp_path):
    from tiedgpt import GPT
    from tiedgpt.tie import untie

    model = GPT.from_pretrained(run)
    untie(model)
    model.save_pretrained(tmp_path)
    Tokenizer.from_pretrained(run).save_pretrained(tmp_path)
    with serving(tmp_path) as url, opened(browser, url) as page:
        go(page, url, "matrix")
        text = page.locator("main").inner_text()
        assert "Two matrices" in text and "transformer.wte.weight" in text
        assert "lm_head.weight" in text and page.locator(".drawing .matrix").count() == 3
        go(page, url, "vocabulary")
        assert page.get_by_role("radio", name="predicts").count() == 1
        go(page, url, "model")
        assert "head: predicts" in page.locator("main").inner_text()


def test_hostile_tokens_are_text(browser, url, run):
    tokenizer = Tokenizer.from_pretrained(run)
    hostile = range(len(tokenizer) - len(HOSTILE), len(tokenizer))
    ids = ",".join(map(str, [1, *hostile, 2, *hostile]))
    with opened(browser, url) as page:
        for view in VIEWS:
            go(page, url, view, ids=ids, text="<img src=x onerror=alert(0)>", pin=1)
            assert page.locator("main img, main script, main iframe, #app script").count() == 0
        go(page, url, "text", ids=ids, text="x", pin=1)
        assert HOSTILE[0].replace(" ", "␣") in page.locator("main").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
def test_the_page_passes_the_accessibility_rules(browser, url, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    wrong = []
    viewport = {"width": width, "height": 800}
    with opened(browser, url, viewport=viewport, color_scheme=scheme) as page:
        others = [("matrix", {"tour": 1}), ("dot", {"tour": 5}), ("learn", {"steps": 2, "tour": 2})]
        others.append(("learn", {"steps": 1, "untied": "true", "predict": "last"}))
        for view, saved in [*((view, {}) for view in VIEWS), *others]:
            go(page, url, view, **saved)
            found = axe.run(page).response["violations"]
            wrong += [
                f"{view}: {rule['id']}: {node['html'][:200]}"
                for rule in found
                for node in rule["nodes"][:3]
            ]
    assert not wrong, "\n".join(wrong)


def test_all_views_work_by_keyboard(browser, url):
    with opened(browser, url) as page:
        go(page, url, VIEWS[0])
        page.locator(f"#tab-{VIEWS[0]}").focus()
        for view in [*VIEWS[1:], VIEWS[0]]:
            page.keyboard.press("ArrowRight")
            settled(page)
            here = page.evaluate("document.activeElement.id")
            assert here == f"tab-{view}" and page.locator("main .panel").count()
            stops, names = set(), []
            for _ in range(400):
                page.keyboard.press("Tab")
                stop, name, ringed = page.evaluate(
                    """() => { const at = document.activeElement, style = getComputedStyle(at);
                    window.stops ??= new Map(); if (!stops.has(at)) stops.set(at, stops.size);
                    return [at.closest('main') ? stops.get(at) : null,
                      at.ariaLabel || at.innerText || at.labels?.[0]?.innerText || at.ariaValueText,
                      style.outlineStyle !== 'none' || at.matches('summary')]; }"""
                )
                if stop is None:
                    break
                assert stop not in stops, "Tab is caught"
                stops.add(stop)
                names.append(name)
                assert ringed, f"{view}: no ring on {name!r}"
            assert stops and all(names), f"{view}: {names}"
            page.evaluate("() => window.stops.clear()")
            page.locator(f"#tab-{view}").focus()


def test_grids_and_scatter_plots_respond_to_arrow_keys(browser, url):
    with opened(browser, url) as page:
        go(page, url, "layers")
        page.locator("[role=gridcell] button[tabindex='0']").focus()
        place = "(({ parentElement: row, cellIndex }) => [row.rowIndex, cellIndex])"
        place += "(document.activeElement.closest('td'))"
        row, column = page.evaluate(place)
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowLeft")
        assert page.evaluate(place) == [row + 1, column - 1]
        go(page, url, "vocabulary")
        cloud = page.locator("main [role=slider]")
        cloud.focus()
        told = cloud.get_attribute("aria-valuetext")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        settled(page)
        assert cloud.get_attribute("aria-valuetext") != told
        assert cloud.get_attribute("aria-valuenow") == "2"


def test_without_a_tokenizer_the_page_opens_with_ids_and_a_word_is_none(browser):
    with (
        Engine(random_model(), queue_size=8) as engine,
        Running(engine) as running,
        opened(browser, running.url, quiet=False) as page,
    ):
        page.goto(running.url)
        settled(page)
        assert not page.locator(".error").count()
        assert page.locator("header textarea").input_value().replace(" ", "").isdigit()
        assert page.locator("main .token").count() > 1
        page.goto(f"{running.url}/#view=text&text=1+2+3")
        settled(page)
        for word, said in (("abc", "needs a tokenizer"), ("7", "Before token 2, logits moved")):
            page.get_by_label("Replace").fill(word)
            page.get_by_role("button", name="Change token 2").click()
            page.get_by_text(said).wait_for()


@pytest.mark.parametrize("odd", ["head=-3&layer=-5", "pin=-9&tour=-1", "ids=-4,2.5,&pin=1e9"])
def test_a_damaged_address_still_shows_a_page(browser, url, odd):
    with opened(browser, url) as page:
        for view in ("text", "heads"):
            page.goto("about:blank")
            page.goto(f"{url}/#view={view}&text=the+cat+sat&{odd}")
            settled(page)
            assert not page.locator(".status.error").count()
            assert page.locator("main data").count()


def test_a_dead_server_leaves_the_old_numbers_and_a_reason(browser, run):
    with opened(browser, quiet=False) as page:
        with serving(run) as url:
            page.goto(f"{url}/{fragment('text')}")
            settled(page)
            before = numbers(page)
        page.asked.clear()
        page.locator("textarea").fill("the dog")
        page.wait_for_selector(".error")
        assert "server" in page.locator(".error").first.inner_text()
        assert page.locator(".stale").count() and numbers(page) == before
        page.asked.clear()


def test_an_empty_text_is_explained_in_a_sentence(browser, url):
    with opened(browser, url) as page:
        page.goto(f"{url}/{fragment('text', text='')}")
        page.wait_for_selector(".error")
        assert "empty" in page.locator(".error").first.inner_text()


def test_without_javascript_a_sentence_is_shown(browser, url):
    with opened(browser, url, java_script_enabled=False) as page:
        page.goto(url)
        assert "JavaScript" in page.locator("noscript").first.inner_text()
