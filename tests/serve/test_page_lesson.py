"""The page's lessons, and reported problems: growing texts, keys, charts, chats."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from tests.serve.browsing import TEXT, VIEWS, fragment, go, numbers, opened, serving, settled
from tests.serve.page_run import make_run
from tiedgpt import GPT, Tokenizer, inspect
from tiedgpt.cli.main import main
from tiedgpt.data import TEMPLATES, ShardWriter
from tiedgpt.tie import untie

pytestmark = [pytest.mark.page, pytest.mark.timeout(600)]

HELD_OUT = "dog. the cat sat on the mat and the dog ate the hat that the cat saw on the mat"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with held-out text, and tokens that training never saw."""
    path = make_run(tmp_path_factory.mktemp("runs") / "cats", n_positions=256)
    tokenizer = Tokenizer.from_pretrained(path)
    for shard in (path / "data").glob("train_*.bin"):
        shard.unlink()
    with ShardWriter(path / "data", "train", vocab_size=len(tokenizer)) as writer:
        writer.write(np.repeat(np.arange(100), 300 // np.arange(1, 101)))  # as Zipf's law
    with ShardWriter(path / "data", "val", vocab_size=len(tokenizer)) as writer:
        writer.write(tokenizer.encode_array(HELD_OUT))
    return path


@pytest.fixture(scope="module")
def url(run, tmp_path_factory):
    other = tmp_path_factory.mktemp("untied")
    model = GPT.from_pretrained(run)
    untie(model)
    model.head.weight.data.mul_(0.5)
    model.save_pretrained(other)
    Tokenizer.from_pretrained(run).save_pretrained(other)
    with serving(run, template=TEMPLATES["plain"], beside=other) as url:
        yield url


def rank_by(cos, ids):
    return [1 + int((cos > cos[id]).sum()) for id in ids]


def words(page, where="main"):
    return " ".join(page.locator(where).inner_text().split())


# ---- texts that grow and shrink ----


@pytest.mark.parametrize("view", ["start", "text", "dot", "matrix", "layers", "heads", "compare"])
def test_a_pinned_text_may_be_longer_or_shorter(browser, url, view):
    with opened(browser, url) as page:
        go(page, url, view)
        for text in (f"{TEXT} and then some more of it", "the cat", TEXT):
            page.locator("header textarea").fill(text)
            page.wait_for_timeout(500)
            settled(page)
            assert not page.locator("main .stale").count(), (view, text)
            assert not page.locator("main .status.error").count(), (view, text)


def test_a_replaced_token_beyond_a_shorter_text_is_dropped(browser, url):
    with opened(browser, url) as page:
        go(page, url, "text")
        for text in (TEXT, "the cat"):
            page.locator("header textarea").fill(text)
            page.wait_for_timeout(500)
            settled(page)
            page.get_by_role("button", name="Change token").click()
            moved = page.get_by_label("How far the logits of each column moved")
            moved.wait_for()
            settled(page)
            moved.locator(".token").last.click()
            assert moved.locator("[tabindex='0']").count() == 1


DELAYED = """
    const ask = window.fetch;
    window.fetch = async (path, options) => {
        if (String(path).endsWith("attention")) await new Promise((go) => setTimeout(go, 1500));
        return ask(path, options);
    };
"""
BOTH = """() => ["header + div .strip", "main .panel"].map((place) =>
    [...document.querySelectorAll(place)].flatMap((one) => [...one.querySelectorAll(".tokens")])
        .slice(0, 1).map((tokens) => tokens.innerText).join(""))"""


def test_a_view_draws_the_answers_of_one_text_or_none(browser, url):
    with opened(browser, url) as page:
        page.add_init_script(DELAYED)
        go(page, url, "heads")
        page.get_by_label("Tokens, by the attention").wait_for()
        with page.expect_response(lambda answer: "dog ate" in str(answer.request.post_data)):
            page.locator("header textarea").fill("the dog ate")
        page.wait_for_timeout(100)
        page.locator("header textarea").fill("")
        panels = set()
        for _ in range(30):
            page.wait_for_timeout(100)
            strip, panel = page.evaluate(BOTH)
            if strip:
                assert panel in ("", strip)
                panels.add(panel)
        assert len(panels) == 2, "first none, then the text's"


def test_text_typed_just_before_a_reload_is_kept(browser, url):
    with opened(browser, url) as page:
        go(page, url, "text")
        for text in ("the dog", "the hat"):
            page.locator("header textarea").fill(text)
            page.reload()
            settled(page)
            assert page.locator("header textarea").input_value() == text
            assert words(page, ".hero .tokens").replace("␣", " ").replace("  ", " ") == text


def test_a_text_that_is_too_long_is_read_as_far_as_it_fits(browser, url, run):
    text = "the cat sat on the mat. " * 100
    ids = Tokenizer.from_pretrained(run).encode(text)[:256]
    with opened(browser, url) as page:
        go(page, url, "text", text=text)
        assert page.locator("main .hero .token").count() == 256
        assert inspect.positions(run, None, ids).loss in numbers(page)
        note = page.get_by_text("the page reads the first 256")
        assert note.count() == 1
        page.get_by_role("button", name="Leave out the rest").click()
        settled(page)
        assert not note.count() and page.locator("main .hero .token").count() == 256
        assert text.startswith(page.locator("header textarea").input_value())


# ---- charts and tables ----


def test_unseen_tokens_have_their_own_lane(browser, url, run):
    never = int(np.flatnonzero(inspect.vocabulary(run).count == 0)[0])
    with opened(browser, url) as page:
        go(page, url, "vocabulary")
        assert page.locator(".cloud svg text", has_text="never").count()
        cloud = page.locator(".cloud [role=slider]")
        cloud.focus()
        page.keyboard.press("Home")
        settled(page)
        assert ", 0 times" in cloud.get_attribute("aria-valuetext")
        assert cloud.get_attribute("aria-valuemax") == str(len(Tokenizer.from_pretrained(run)))
        page.get_by_label("Find a token").fill(str(never))
        assert page.locator(".search .chips button").count()


def test_ranks_by_cosine_follow_the_rows_that_are_shown(browser, url, run):
    n = len(Tokenizer.from_pretrained(run).encode(TEXT))
    every = (inspect.dot(run, None, TEXT, position=at) for at in range(n))
    found = next(
        one
        for one in every
        if rank_by(one.all_cos, one.ids) != rank_by(one.all_centred_cos, one.ids)
    )
    with opened(browser, url) as page:
        for centred, cos in ((False, found.all_cos), (True, found.all_centred_cos)):
            go(page, url, "dot", centred=str(centred).lower(), pin=found.position)
            cells = page.locator("tbody tr td:last-child data").all_text_contents()
            assert cells == [f"{rank:,}" for rank in rank_by(cos, found.ids)]


def test_values_outside_a_chart_are_listed(browser, run, tmp_path):
    path = make_run(tmp_path / "steep")
    lines = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(lines.replace('"loss": 5.9', '"loss": 90', 1))
    with serving(path) as url, opened(browser, url) as page:
        go(page, url, "model")
        assert "Above the chart: values up to 9" in words(page)


# ---- keys, files, tokenizers ----


def test_an_api_key_opens_all_views_and_lasts_for_the_tab(browser, run):
    with serving(run, key="a-key") as url, opened(browser, url, quiet=False) as page:
        page.goto(f"{url}/{fragment('vocabulary')}")
        page.get_by_label("API key").fill("a-key")
        page.keyboard.press("Enter")
        page.wait_for_selector(".cloud")
        settled(page)
        assert not page.locator(".error").count()
        page.reload()
        page.wait_for_selector(".cloud")
        settled(page)
        assert not page.locator(".error").count() and not page.locator(".key").count()


# ---- the lesson ----


def test_the_page_opens_with_the_matrix_on_validation_text_and_the_prediction(browser, run):
    with serving(run) as url, opened(browser, url) as page:
        page.goto(url)
        settled(page)
        text = page.locator("header textarea").input_value()
        assert text in HELD_OUT and not text.endswith(".") and text != HELD_OUT
        found = inspect.positions(run, None, text)
        assert "the same W predicts" in page.locator("main h2").first.inner_text()
        assert page.locator(".drawing .arrow").count() == 2
        shown = numbers(page, ".job .odds")
        np.testing.assert_allclose(shown, np.exp(found.top_logprob[-1, :5]), rtol=1e-5)
        order = page.locator("main h2").all_inner_texts()
        assert "One pass, played" in order[1]


def test_a_pass_shows_the_models_numbers_step_by_step_and_reads_the_winner_next(browser, url, run):
    dot, lens = inspect.dot(run, None, TEXT, top=5), inspect.lens(run, None, TEXT, top=1)
    n_tokens, blocks = len(lens.ids), len(lens.layers) - 1
    expected = {
        f"Layer {layer + 1} of {blocks}": [np.exp(lens.top_logprob[layer + 1, -1, 0])]
        for layer in range(blocks)
    }
    expected |= {"Read": [], "Add the position": [], "h": [], "Dot products": dot.logit}
    expected |= {"Softmax": dot.prob, "The winner": dot.prob[:1]}
    with opened(browser, url) as page:
        go(page, url, "start")
        step, name = page.get_by_role("button", name="Step", exact=True), page.locator(".pass h3")
        for _ in range(len(expected)):
            np.testing.assert_allclose(
                numbers(page, ".pass"), expected.pop(name.inner_text()), rtol=1e-5
            )
            step.click()
            page.wait_for_timeout(50)
        settled(page)
        tokens = page.get_by_label("Tokens: choose where the pass begins").locator(".token")
        assert name.inner_text() == "Read" and tokens.count() == n_tokens + 1
        assert f"is row {dot.ids[0]:,} of W" in words(page, ".pass")
        assert not expected


def test_a_pass_is_played_stepped_by_arrow_keys_and_leads_to_the_views(browser, url):
    with opened(browser, url, reduced_motion="reduce") as page:
        go(page, url, "start")
        name = page.locator(".pass h3")
        page.locator(".slider input").focus()
        page.keyboard.press("ArrowRight")
        assert name.inner_text() == "Add the position"
        page.get_by_role("radio", name="4×").click()
        page.get_by_role("button", name="Play").click()
        page.get_by_role("heading", name="The winner").wait_for()
        page.get_by_label("Tokens: choose where").locator(".next + .next").wait_for()
        page.get_by_role("button", name="Pause").click()
        page.get_by_role("button", name="From the beginning").click()
        page.get_by_role("button", name="More of this").click()
        settled(page)
        assert page.locator("#tab-matrix").get_attribute("aria-selected") == "true"


def test_a_guess_and_the_model_are_scored_in_bits(browser, url, run):
    predictions = inspect.positions(run, None, TEXT, top=10)
    at = 2
    answer = int(predictions.target[at])
    others = [id for id in predictions.top_ids[at].tolist() if id != answer][:4]
    p = np.exp(
        [
            predictions.logprob[at],
            *predictions.top_logprob[at][np.isin(predictions.top_ids[at], others)],
        ]
    )
    piece = Tokenizer.from_pretrained(run).decode([answer])
    with opened(browser, url) as page:
        go(page, url, "guess")
        assert not page.locator("header textarea").count()
        before = page.locator(".written bdi").count()
        assert before == at + 1
        choices = page.get_by_role("group", name="The next token").locator("button")
        assert choices.count() == 5
        page.get_by_role("radio", name="90 % sure").click()
        choices.filter(has_text=piece.strip()).first.click()
        you, model, blind, n = numbers(page, ".facts")
        assert you in (pytest.approx(-np.log2(0.9)), pytest.approx(-np.log2(0.025)))
        assert model == pytest.approx(-np.log2(p[0] / p.sum()), rel=1e-4)
        assert (blind, n) == (pytest.approx(np.log2(5)), 1)
        page.get_by_role("button", name="Next token").click()
        assert page.locator(".written bdi").count() == at + 2 and choices.count() == 5


def test_a_guess_begins_with_a_text_that_was_not_read(browser, tmp_path):
    run = make_run(tmp_path / "cats", n_positions=256)
    opening = "the hat sat on the cat"
    for stored in (None, opening):
        if stored is not None:
            (run / "model" / "opening.json").write_text(json.dumps({"text": stored}))
        with serving(run) as url, opened(browser, url) as page:
            go(page, url, "guess")
            words_before = page.locator(".written").inner_text().replace("␣", " ").strip("? \n")
            assert not TEXT.startswith(words_before)
            assert stored is None or opening.startswith(words_before)
            page.get_by_role("radio", name="the text of the page").click()
            settled(page)
            words_before = page.locator(".written").inner_text().replace("␣", " ").strip("? \n")
            assert TEXT.startswith(words_before)


def test_a_projector_shows_a_panel_at_a_time(browser, url):
    with opened(browser, url) as page:
        go(page, url, "matrix")
        page.get_by_role("button", name="Projector").click()
        assert not page.locator("header textarea").is_visible()
        tops = (
            "() => [...document.querySelectorAll('.panel')].map((x) => x.getBoundingClientRect())"
        )
        tops += ".filter(({ top, bottom }) => top < innerHeight - 1 && bottom > 60).length"
        for _ in page.locator("main .panel").all():
            page.keyboard.press("ArrowRight")
            page.wait_for_timeout(100)
            assert page.evaluate(tops) == 1
        page.keyboard.press("ArrowRight")
        page.locator(".product").wait_for()
        page.keyboard.press("Escape")
        page.locator("header textarea").wait_for()


def test_views_stand_in_groups_and_lead_to_the_next(browser, url):
    with opened(browser, url) as page:
        go(page, url, "start")
        assert page.locator(".groups button").count() == 5
        seen = []
        while (
            view := page.locator("[role=tab][aria-selected=true]").get_attribute("id")
        ) not in seen:
            seen.append(view)
            page.get_by_role("button", name="Next: ").click()
            page.wait_for_timeout(100)
        assert seen == [f"tab-{view}" for view in VIEWS]


def test_a_copied_link_opens_what_is_shown(browser, url):
    with opened(browser, url) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        go(page, url, "layers", pin=3)
        page.get_by_role("button", name="Copy link").click()
        page.get_by_text("The link is copied").wait_for()
        link = page.evaluate("() => navigator.clipboard.readText()")
        page.goto("about:blank")
        page.goto(link)
        settled(page)
        assert page.locator("#tab-layers").get_attribute("aria-selected") == "true"
        assert page.locator("header textarea").input_value() == TEXT
        assert "token 3" in words(page)


def test_the_numbers_of_w_are_shown_by_pointer_key_and_tap(browser, url, run):
    found = inspect.dot(run, None, TEXT)
    with opened(browser, url, has_touch=True) as page:
        go(page, url, "dot")
        strips = page.locator(".strips [role=slider]")
        assert strips.count() == 4
        n = len(found.h)
        for move in ("key", "hover", "tap"):
            if move == "key":
                strips.nth(1).focus()
                page.keyboard.press("Home")
                page.keyboard.press("ArrowRight")
                at = 1
            else:
                box = strips.nth(1).bounding_box()
                at = 5 if move == "hover" else 3
                spot = box["x"] + box["width"] * (at + 0.5) / n, box["y"] + box["height"] / 2
                (page.mouse.move if move == "hover" else page.touchscreen.tap)(*spot)
            page.wait_for_timeout(100)
            shown = numbers(page, ".strip-row")
            product = float(found.h[at] * found.rows[0, at])
            expected = [found.row_read[at], found.h[at], found.rows[0, at], product]
            np.testing.assert_allclose(shown, expected, rtol=1e-5)
        page.locator(".chips [role=radio]").nth(1).click()
        assert np.isclose(numbers(page, ".strips .readout")[-1], found.logit[1], rtol=1e-5)


def test_terms_are_explained_on_tap_and_key(browser, url):
    with opened(browser, url, has_touch=True, viewport={"width": 375, "height": 800}) as page:
        for view, term in (
            ("text", "surprisal"),
            ("text", "entropy"),
            ("text", "rank"),
            ("dot", "logit"),
            ("dot", "prior logit"),
            ("layers", "KL"),
        ):
            go(page, url, view, pin=2)
            if term == "KL":
                page.get_by_role("radio", name="KL").click()
            word = page.get_by_role("button", name=term, exact=True).first
            word.tap()
            said = page.locator("[popover]:popover-open")
            assert len(said.inner_text()) > 40
            page.keyboard.press("Escape")
            assert not said.count()
            word.focus()
            page.keyboard.press("Enter")
            assert said.count() == 1


def test_the_vocabulary_view_summarizes_itself_in_a_sentence(browser, url):
    with opened(browser, url) as page:
        go(page, url, "vocabulary")
        said = page.locator("main .verdict").first.inner_text()
        assert said.endswith(".") and ("rows are longer here" in said or "next to nothing" in said)
        assert "ρ" in words(page)
        assert page.locator(".cloud svg .word").count() > 2


def test_all_heads_stand_in_a_grid_that_chooses_one(browser, url, run):
    config = GPT.from_pretrained(run).config
    with opened(browser, url) as page:
        go(page, url, "heads")
        grid = page.get_by_role("grid", name="All heads")
        assert grid.locator("tbody tr").count() == config.n_layer
        assert grid.locator("tbody td").count() == config.n_layer * config.n_head
        grid.locator("tbody tr").last.locator("td button").last.click()
        settled(page)
        here = f"ead {config.n_head - 1} of layer {config.n_layer - 1}"
        assert f"H{here}" in words(page)
        page.get_by_role("radio", name="worth").click()
        settled(page)
        lost = inspect.ablate(run, None, TEXT)
        assert f"h{here} it changes" in words(page)
        shown = numbers(page, "main .panel:first-child .verdict")
        np.testing.assert_allclose(shown, [lost.loss, lost.heads[-1, -1]], rtol=1e-5, atol=1e-7)


def test_query_times_key_is_the_weight(browser, url, run):
    found = inspect.attention(run, None, TEXT, layer=0)
    with opened(browser, url) as page:
        go(page, url, "heads")
        page.get_by_label("The token whose key is shown").locator(".token").nth(2).click()
        score = found.queries[0, -1] @ found.keys[0, 2]
        shown = numbers(page, ".strips .readout")
        root = np.sqrt(found.queries.shape[-1])
        np.testing.assert_allclose(
            shown, [score, score / root, found.patterns[0, -1, 2]], rtol=1e-4
        )


def test_two_texts_are_compared_where_they_agree(browser, url, run):
    other = "the dog sat on the mat"
    with opened(browser, url) as page:
        go(page, url, "compare", text="the cat sat on the mat", other=other)
        a, b = (inspect.positions(run, None, text) for text in ("the cat sat on the mat", other))
        assert {a.loss, b.loss} <= set(numbers(page))
        same = sum(x == y for x, y in zip(a.ids[::-1], b.ids[::-1], strict=False))
        assert page.get_by_label("Tokens that both have").locator(".token").count() <= same


def test_a_word_is_replaced_for_a_comparison_on_request(browser, url, run):
    tokenizer = Tokenizer.from_pretrained(run)
    with opened(browser, url) as page:
        go(page, url, "compare")
        page.get_by_role("button", name="Replace a word").click()
        settled(page)
        other = page.locator("main textarea").input_value()
        ids, others = tokenizer.encode(TEXT), tokenizer.encode(other)
        assert len(ids) == len(others)
        assert sum(one != another for one, another in zip(ids, others, strict=True)) == 1
        assert page.get_by_role("button", name="Put each state").is_visible()


def test_bars_are_single_while_no_option_changes_the_distribution(browser, url):
    with opened(browser, url) as page:
        go(page, url, "write")
        assert page.locator(".odds li").count() and not page.locator(".odds .pair").count()
        page.get_by_label("temperature").fill("0.5")
        assert page.locator(".odds .pair").count() == page.locator(".odds li").count()


def test_a_state_of_the_text_carries_its_answer_into_the_second(browser, url, run, tmp_path):
    text, other = "the cat sat on the mat", "the dog sat on the mat"
    answer, wrong = (int(inspect.positions(run, None, one).top_ids[-1, 0]) for one in (text, other))
    options = {} if wrong == answer else {"wrong": wrong}
    found = inspect.patch(run, None, text, corrupted=other, answer=answer, **options)
    path = tmp_path / "page.html"
    assert main(["export", str(run), str(path), "--precision", "fp32"]) == 0
    for address in (f"{url}/", f"file://{path}"):
        with opened(browser, url if address.startswith(url) else None) as page:
            page.goto(address + fragment("compare", text=text, other=other))
            settled(page)
            page.get_by_role("button", name="Put each state").click()
            grid = page.get_by_role("grid", name="Share of the answer")
            grid.wait_for()
            rows = grid.locator("tbody tr")
            cells = [row.locator("td").all_inner_texts() for row in rows.all()][::-1]
            shares = [[float(x.replace("−", "-").rstrip(" %")) for x in row] for row in cells]
            np.testing.assert_allclose(shares, 100 * found.share(found.residual), atol=0.51)
            grid.locator("td button").last.click()
            ends = [found.corrupted, found.residual[0, -1], found.clean]
            np.testing.assert_allclose(numbers(page, ".lens + .readout"), ends, rtol=1e-4)
            page.goto(address + fragment("compare", text=text, other="the dog"))
            settled(page)
            assert "equally many tokens" in words(page)


def test_two_models_are_compared_token_by_token(browser, url, run):
    with opened(browser, url) as page:
        go(page, url, "compare")
        page.get_by_role("radio", name="another model").click()
        settled(page)
        assert page.get_by_label("Tokens that both have").locator(".token").count() == len(
            inspect.positions(run, None, TEXT).ids
        )
        assert "untied" in words(page) and "tied" in words(page)
        losses = {number for number in numbers(page, ".facts")}
        assert inspect.positions(run, None, TEXT).loss in losses and len(losses) > 3


def test_generation_continues_from_a_chosen_alternative(browser, url):
    with opened(browser, url) as page:
        go(page, url, "write")
        page.locator("#view").get_by_role("button", name="Write", exact=True).click()
        page.get_by_text("; seed").wait_for()
        written = page.get_by_role("toolbar").locator(".token")
        begin = written.first.inner_text()
        written.nth(1).click()
        settled(page)
        pick = page.locator("button.odd").nth(4)
        word = pick.locator("bdi").inner_text()
        pick.click()
        page.get_by_text("; seed").wait_for()
        settled(page)
        assert [written.nth(k).inner_text() for k in (0, 1)] == [begin, word]


def test_a_chat_shows_the_alternatives_of_each_token(browser, url):
    with opened(browser, url) as page:
        go(page, url, "write")
        page.get_by_role("radio", name="a conversation").click()
        page.get_by_label("Your words").fill("the dog")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Begin anew").wait_for()
        assert page.locator(".turns .user").inner_text() == "the dog"
        reply = page.locator(".turns .assistant .token")
        assert page.locator(".turns .assistant p").inner_text() and not reply.count()
        page.locator(".groups button").first.click()
        page.locator(".groups button").last.click()
        page.get_by_label("show tokens").check()
        reply.first.click()
        assert page.locator(".alternatives .odds li").count() == 5


@pytest.fixture(scope="module")
def chat_url(run, tmp_path_factory):
    """A model that was tuned on single exchanges, with a question and a system message of them."""
    model = tmp_path_factory.mktemp("chat")
    shutil.copytree(run / "model", model, dirs_exist_ok=True)
    (model / "opening.json").write_text('{"question": "the dog ate?"}')
    template = replace(TEMPLATES["plain"], max_turns=1, default_system="the cat")
    with serving(model, template=template) as url:
        yield url


def test_a_conversation_opens_first_with_a_question_of_the_tuning_data(browser, chat_url):
    with opened(browser, chat_url) as page:
        page.goto(chat_url)
        settled(page)
        assert page.locator("#tab-write").get_attribute("aria-selected") == "true"
        assert page.get_by_role("radio", name="a conversation").get_attribute("aria-checked")
        assert not page.locator("header textarea").count()
        assert page.get_by_label("Your words").input_value() == "the dog ate?"
        assert "the cat" in words(page)
        with page.expect_request("**/v1/chat/completions") as request:
            page.get_by_role("button", name="Send").click()
        messages = request.value.post_data_json["messages"]
        assert messages == [{"role": "user", "content": "the dog ate?"}]
        page.get_by_role("button", name="Begin anew").wait_for()
        page.locator(".groups button").first.click()
        settled(page)
        assert page.locator("#tab-start").get_attribute("aria-selected") == "true"
        assert page.locator("header textarea").input_value()
        page.locator(".groups button").last.click()
        assert page.locator(".turns .user").inner_text() == "the dog ate?"
        assert page.get_by_label("Your words").input_value() == ""
        page.reload()
        settled(page)
        assert page.get_by_label("Your words").input_value() == "the dog ate?"
        go(page, chat_url, "matrix")
        assert page.locator("header textarea").input_value() == TEXT


@pytest.mark.parametrize("width", [375, 1280])
def test_a_check_box_has_the_size_of_a_check_box(browser, chat_url, width):
    with opened(browser, chat_url, viewport={"width": width, "height": 800}) as page:
        page.goto(chat_url)
        page.get_by_label("Your words").fill("the dog")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Begin anew").wait_for()
        boxes = page.get_by_role("checkbox").all()
        assert len(boxes) == 2
        for box in boxes:
            size = box.bounding_box()
            assert 13 <= size["width"] == size["height"] <= 24


def test_there_is_no_chat_without_a_template(browser, run):
    with serving(run) as url, opened(browser, url) as page:
        page.goto(url)
        settled(page)
        assert page.locator("#tab-start").get_attribute("aria-selected") == "true"
        go(page, url, "write")
        assert not page.get_by_role("radio", name="a conversation").count()


def test_a_tour_stands_beside_the_view(browser, url):
    with opened(browser, url) as page:
        page.goto(url)
        page.get_by_role("button", name="Six questions").click()
        settled(page)
        assert page.locator(".tour").is_visible()
        page.get_by_role("button", name="Close").click()
        assert not page.locator(".tour").count()


def test_one_menu_copies_as_python_or_curl(browser, url):
    with opened(browser, url) as page:
        go(page, url, "dot")
        menu = page.locator(".copy").first
        assert not menu.get_by_role("button", name="curl").is_visible()
        menu.locator("summary").click()
        menu.get_by_role("button", name="Python").click()
        assert "from tiedgpt.inspect import dot" in menu.locator("pre").inner_text()
        menu.get_by_role("button", name="curl").click()
        assert "/inspect/dot" in menu.locator("pre").inner_text()
