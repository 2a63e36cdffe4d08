from hypothesis import given
from hypothesis import strategies as st

from tiedgpt.infer.stopping import StopWatch

texts = st.text("abc", max_size=30)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


@given(texts, stops, st.randoms())
def test_pieces_add_up_to_the_text_before_the_first_stop(text, stops, random):
    watch, shown, at = StopWatch(stops), "", 0
    while at < len(text):
        size = random.randint(1, 3)
        shown += watch.push(text[at : at + size])
        at += size
    shown += watch.finish()
    # What ends first in the stream stops it; of those that end together, the one that starts first.
    ends = [text.find(stop) for stop in stops if stop in text]
    if not ends:
        assert shown == text and not watch.stopped
    else:
        assert watch.stopped
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)
        assert any(text[len(shown) :].startswith(stop) for stop in stops)


@given(texts, st.text("abc", min_size=1, max_size=4))
def test_one_stop_string_cuts_exactly_before_its_first_appearance(text, stop):
    watch = StopWatch([stop])
    shown = "".join(map(watch.push, text)) + watch.finish()
    assert shown == text.split(stop)[0]
