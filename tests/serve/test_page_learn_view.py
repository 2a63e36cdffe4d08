"""The view of learning: its numbers, its sentences, the keyboard; from a server and in a file."""

import json

import numpy as np
import pytest

from tests.serve.browsing import TEXT, flat, go, numbers, opened, serving, settled
from tests.serve.page_run import make_run
from tiedgpt import GPT, Tokenizer, inspect
from tiedgpt.cli.main import main
from tiedgpt.tie import untie

pytestmark = [pytest.mark.page, pytest.mark.timeout(600)]
OTHER = "the dog sat on the mat"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "cats", n_positions=256)


@pytest.fixture(scope="module")
def url(run):
    with serving(run) as url:
        yield url


@pytest.fixture(scope="module")
def file(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    assert main(["export", str(run), str(path), "--text", TEXT, "--precision", "fp32"]) == 0
    return f"file://{path}"


CHOICES = [
    {},
    {"steps": 1},
    {"steps": 3, "train": "head", "untied": True},
    {"steps": 2, "predict": "last"},
    {"steps": 1, "train": "blocks"},
]


@pytest.mark.parametrize("origin", ["server", "file"])
@pytest.mark.parametrize("choices", CHOICES)
def test_the_numbers_of_the_view_equal_the_librarys(browser, url, file, run, origin, choices):
    saved = {name: str(value).lower() for name, value in choices.items()}
    options = {"steps": 0} | choices
    result = inspect.learn(run, None, TEXT, **options, other=OTHER, top=40)
    expected = np.sort(np.array(flat(json.loads(result.to_json())), float))
    address = url if origin == "server" else file
    with opened(browser, url if origin == "server" else "") as page:
        if origin == "server":
            go(page, url, "learn", other=OTHER, **saved)
        else:
            pairs = "&".join(f"{name}={value}" for name, value in saved.items())
            page.goto(f"{address}#view=learn&other={OTHER.replace(' ', '+')}&{pairs}")
            settled(page)
        values = numbers(page)
        assert len(values) >= 20
        for number in values:
            at = np.searchsorted(expected, number)
            near = expected[max(0, at - 1) : at + 1]
            assert np.abs(near - number).min() <= 1e-4 * abs(number) + 2e-6, number


SENTENCES = [
    ({"steps": 1}, "One matrix, two jobs"),
    ({"steps": 1}, "generation uses the last alone"),
    ({"steps": 1, "train": "head"}, "is also read differently now"),
    ({"steps": 1, "train": "head", "untied": "true"}, "that is read did not move"),
    ({"steps": 1, "untied": "true"}, "degrees"),
    ({"steps": 1, "train": "blocks"}, "No row of W moved"),
    ({"steps": 1, "predict": "last"}, "the last prediction alone"),
    ({}, "Nothing is learned yet"),
]


@pytest.mark.parametrize(("saved", "message"), SENTENCES)
def test_a_sentence_says_what_happened(browser, url, saved, message):
    with opened(browser, url) as page:
        go(page, url, "learn", **saved)
        assert message in page.locator("main .verdict").inner_text()


def test_steps_are_taken_by_keyboard_and_begin_again_with_another_text(browser, url):
    with opened(browser, url) as page:
        go(page, url, "learn")
        assert not page.locator("main table").count()
        button = page.get_by_role("button", name="Learn one step")
        button.focus()
        page.keyboard.press("Enter")
        settled(page)
        assert "after 1 step" in page.locator("main").inner_text()
        page.get_by_role("button", name="Ten steps").focus()
        page.keyboard.press("Enter")
        settled(page)
        assert "after 11 steps" in page.locator("main").inner_text()
        page.get_by_role("radio", name="one matrix").focus()
        page.keyboard.press("ArrowRight")
        settled(page)
        assert "Two matrices" in page.locator("main .verdict").inner_text()
        row = page.locator("main tbody button").nth(2)
        row.focus()
        page.keyboard.press("Enter")
        assert row.get_attribute("aria-pressed") == "true"
        assert row.inner_text().strip("␣") in page.locator("main h3").first.inner_text()
        page.get_by_label("step size").focus()
        page.keyboard.press("ArrowRight")
        settled(page)
        assert "0.2" in page.locator(".slider").inner_text()
        page.locator("header textarea").fill("the dog ate the hat")
        page.wait_for_timeout(600)
        settled(page)
        assert "Nothing is learned yet" in page.locator("main .verdict").inner_text()


def test_what_cannot_be_learned_is_explained(browser, url, file):
    with opened(browser, url) as page:
        go(page, url, "learn", text="a")
        assert "nothing to predict" in page.locator("main").inner_text()
        assert page.get_by_role("button", name="Learn one step").is_disabled()


def test_an_untied_model_has_two_matrices_and_no_choice_of_them(browser, run, tmp_path):
    model = GPT.from_pretrained(run)
    untie(model)
    model.save_pretrained(tmp_path)
    Tokenizer.from_pretrained(run).save_pretrained(tmp_path)
    with serving(tmp_path) as url, opened(browser, url) as page:
        go(page, url, "learn", steps=1)
        assert not page.get_by_role("radio", name="one matrix").count()
        assert "Two matrices" in page.locator("main .verdict").inner_text()
