from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiedgpt.data import Document, plan_split
from tiedgpt.errors import UserError

words = st.text("ab \n", min_size=1, max_size=60)
corpora = st.lists(words, min_size=1, max_size=40).map(
    lambda texts: [Document(str(i), text) for i, text in enumerate(texts)]
)


def side(split, name):
    return [document for which, document in split if which == name]


def characters(documents):
    return sum(len(document.text) for document in documents)


@given(corpora.filter(lambda corpus: characters(corpus) >= 2))
def test_every_character_is_on_exactly_one_side(corpus):
    split = plan_split(corpus)
    if split.is_cut:
        assert "".join(d.text for _, d in split) == "".join(d.text for d in corpus)
    else:
        assert Counter(side(split, "train") + side(split, "val")) == Counter(corpus)
        assert not {d.text for d in side(split, "train")} & {d.text for d in side(split, "val")}
    assert characters(d for _, d in split) == split.characters


@given(corpora)
def test_validation_of_whole_documents_has_between_a_twentieth_and_a_fifth(corpus):
    corpus = [Document("long", "x" * 100), *corpus]
    split = plan_split(corpus)
    if not split.is_cut:
        share = characters(side(split, "val")) / characters(corpus)
        assert 0.05 <= share <= 0.20


@given(corpora.filter(lambda corpus: characters(corpus) >= 2), st.randoms())
def test_the_split_depends_on_content_not_on_order(corpus, random):
    shuffled = random.sample(corpus, len(corpus))
    assert plan_split(corpus).held_out == plan_split(shuffled).held_out


def test_many_documents_give_about_a_tenth():
    corpus = [Document(str(i), f"document {i:04d}") for i in range(1000)]
    split = plan_split(corpus)
    assert (len(side(split, "train")), len(side(split, "val"))) == (900, 100)


def test_a_lone_text_gives_its_last_tenth_from_a_line_break_on():
    lines = [f"line {i:02d}\n" for i in range(100)]
    split = plan_split([Document("book", "".join(lines))])
    (train,), (val,) = side(split, "train"), side(split, "val")
    assert train == Document("book", "".join(lines[:90]))
    assert val == Document("book (end)", "".join(lines[90:]))


def test_a_lone_text_without_line_breaks_is_cut_at_nine_tenths():
    split = plan_split([Document("book", "x" * 1000)])
    assert [len(document.text) for _, document in split] == [900, 100]


def test_a_document_that_would_be_more_than_a_fifth_is_not_held_out_whole():
    equal = [Document(str(i), f"{i}" * 1000) for i in range(3)]
    assert characters(side(plan_split(equal), "val")) == 300
    book_and_note = [Document("book", "b" * 9990), Document("note", "n" * 10)]
    assert characters(side(plan_split(book_and_note), "val")) == 1000


def test_a_named_validation_corpus_is_not_trained_on():
    corpus = [Document("a", "one"), Document("b", "two"), Document("c", "three")]
    split = plan_split(corpus, [Document("v", "two"), Document("w", "four")])
    assert [d.name for d in side(split, "train")] == ["a", "c"]
    assert [d.name for d in side(split, "val")] == ["v", "w"]
    assert split.characters == 3 + 5 + 3 + 4


def test_the_corpus_is_read_once_to_plan_and_once_to_encode():
    class Counting(list):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return super().__iter__()

    corpus = Counting(Document(str(i), f"{i}") for i in range(10))
    list(plan_split(corpus))
    assert corpus.passes == 2


def test_unsplittable_texts_are_refused():
    with pytest.raises(UserError, match="1 characters cannot be split"):
        plan_split([Document("a", "x")])
    with pytest.raises(UserError, match="every training document is also validation text"):
        plan_split([Document("a", "same")], [Document("b", "same")])
    with pytest.raises(UserError, match="validation text is empty"):
        plan_split([Document("a", "text")], [])
