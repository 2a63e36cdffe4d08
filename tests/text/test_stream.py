import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiedgpt.errors import UserError


@given(ids=st.lists(st.integers(0, 999)) | st.lists(st.integers(0, 255), max_size=12))
def test_streamed_text_equals_decoded_text(bpe, ids):
    # Ids below 256 are the bytes, so the second kind is UTF-8 broken in every way.
    stream = bpe.stream()
    pieces = [stream.push(id) for id in ids]
    assert "".join([*pieces, stream.finish()]) == bpe.decode(ids)


@given(text=st.text(st.sampled_from("aé日👍\u0301")))
def test_streamed_pieces_of_a_text_hold_whole_characters(bpe, text):
    stream = bpe.stream()
    pieces = [stream.push(id) for id in bpe.encode(text)]
    assert "\ufffd" not in "".join(pieces)
    assert stream.finish() == ""
    assert "".join(pieces) == text


def test_part_of_a_character_waits_for_the_rest(bpe):
    stream = bpe.stream()
    ids = [bpe.encode(c)[0] for c in "abc"]
    first, *rest = bpe.encode("👍")
    assert stream.push(ids[0]) == "a"
    assert stream.push(first) == ""
    assert "".join(map(stream.push, rest)) == "👍"
    assert stream.finish() == ""


def test_unfinished_character_comes_out_at_the_end_and_only_once(bpe):
    stream = bpe.stream()
    assert stream.push(bpe.encode("👍")[0]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""
    assert stream.push(bpe.encode("a")[0]) == "a"


def test_bad_id_leaves_the_stream_as_it_was(bpe):
    stream = bpe.stream()
    first, *rest = bpe.encode("👍")
    stream.push(first)
    with pytest.raises(UserError, match="id 1000 "):
        stream.push(1000)
    assert "".join(map(stream.push, rest)) == "👍"
