"""Text as it becomes certain: it does not depend on how tokens divide it."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tiedgpt import Tokenizer
from tiedgpt.infer.sequence import Detokenizer

texts = st.text("abcä", max_size=30)
stop_lists = st.lists(st.text("abcä", min_size=1, max_size=5), max_size=4)
LETTERS = Tokenizer.train(["xyz"], 257)
"""A token for each byte: characters have several."""
WORDS = Tokenizer.train(["abc ab bc ca aab bbc abcabc cab bac cba äa aä abä " * 20], 300)


class Pieces:
    """A tokenizer whose tokens are the pieces of one text."""

    def __init__(self, pieces):
        self.pieces = pieces

    def stream(self, *, after):
        return self

    def push(self, token):
        return self.pieces[token]

    def finish(self):
        return ""


def decode(tokenizer, ids, stops, **options):
    """Return the text and the part emitted before its end."""
    detokenizer, shown, n_tokens = Detokenizer(tokenizer, 0, stops, **options), [], 0
    for token in ids:
        n_tokens += 1
        detokenizer.push(token)
        shown += detokenizer.release()
        if detokenizer.has_stopped:
            break
    detokenizer.finish()
    shown += detokenizer.release(is_last=True)
    assert "".join(piece.text for piece in shown) == detokenizer.text
    assert [piece.at for piece in shown] == list(range(n_tokens))
    offset = 0
    for piece in shown:
        assert piece.offset == offset
        offset += len(piece.text)
    return detokenizer.text, detokenizer.has_stopped


@given(texts, stop_lists, st.lists(st.integers(1, 5), min_size=30, max_size=30))
@example("zabcz", ["abc", "b"], [2, 1, 1, 1] * 8)
@example("zabxz", ["abc", "b"], [2, 1, 1, 1] * 8)
@example("zab", ["abc", "b"], [3] * 30)
def test_a_text_ends_before_its_earliest_stop_string_however_it_is_divided(text, stops, sizes):
    ends = [text.find(stop) for stop in stops if stop in text]
    expected = text[: min(ends)] if ends else text, bool(ends)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    assert decode(Pieces(pieces), range(len(pieces)), stops) == expected
    assert decode(LETTERS, LETTERS.encode(text), stops) == expected
    assert decode(WORDS, WORDS.encode(text), stops) == expected


@given(texts, stop_lists, st.integers(0, 9))
@example("abcabc", ["bc"], 3)
@example("abcabc", ["ca"], 4)
def test_the_text_before_min_tokens_completes_no_stop_string(text, stops, least):
    """Each token is a character: a match ends the text if it ends after `least` of them."""
    matches = [
        (at, at + len(stop))
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at) and at + len(stop) > least
    ]
    for include, end in ((False, 0), (True, 1)):
        expected = text[: min(matches)[end]] if matches else text, bool(matches)
        options = {"include_stop": include, "min_tokens": least}
        assert decode(Pieces(list(text)), range(len(text)), stops, **options) == expected


@given(texts, stop_lists)
def test_text_that_no_stop_string_can_cut_is_not_held_back(text, stops):
    detokenizer = Detokenizer(Pieces(list(text)), 0, stops)
    for at in range(len(text)):
        detokenizer.push(at)
        if detokenizer.has_stopped:
            break
        seen = text[: at + 1]
        longest = max(
            (n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0
        )
        matches = [seen.find(stop) for stop in stops if stop in seen]
        assert detokenizer.text == seen[: min([len(seen) - longest, *matches])]


@pytest.mark.parametrize("text", ["ä", "zä"])
def test_half_a_character_is_emitted_at_the_end(text):
    *ids, _ = LETTERS.encode(text)
    assert decode(LETTERS, ids, ()) == (text[:-1] + "\ufffd", False)
