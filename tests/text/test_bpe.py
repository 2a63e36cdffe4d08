import itertools
import subprocess
import sys
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.conftest import rust_of
from tiedgpt.errors import UserError
from tiedgpt.text import Tokenizer
from tiedgpt.text import bpe as module
from tiedgpt.text.bpe import BYTE_ALPHABET, chunks, tiktoken_twin

BYTES = [bytes([byte]) for byte in range(256)]


def test_the_byte_alphabet_equals_gpt2s():
    theirs = pytest.importorskip("transformers.convert_slow_tokenizer").bytes_to_unicode()
    assert [theirs[byte] for byte in range(256)] == BYTE_ALPHABET


@pytest.mark.parametrize("texts", [[], [""], ["ab" * 50]])
def test_all_bytes_are_tokens_whatever_the_corpus(texts):
    tokenizer = Tokenizer.train(texts, vocab_size=300)
    assert sorted(tokenizer.token_bytes(id) for id in range(256)) == BYTES


def test_vocabulary_has_the_requested_size_if_the_corpus_suffices(bpe):
    assert len(bpe) == 1000
    assert len({bpe.token_bytes(id) for id in range(1000)}) == 1000


def test_small_corpus_gives_fewer_ids_and_end_of_text_is_still_last():
    tokenizer = Tokenizer.train(["abab abab"], vocab_size=5000)
    merged = [tokenizer.token_bytes(id) for id in range(256, len(tokenizer))]
    assert merged == [b"ab", b"abab", b"<|endoftext|>"]
    assert tokenizer.eos_token_id == len(tokenizer) - 1 == 258


def test_smallest_vocabulary_is_257():
    assert len(Tokenizer.train(["abab"], vocab_size=257)) == 257
    with pytest.raises(UserError, match=r"vocab_size must be at least 257.* got 256"):
        Tokenizer.train(["abab"], vocab_size=256)


def test_training_twice_gives_the_same_tokenizer(corpus, bpe, tmp_path):
    again = Tokenizer.train([corpus], vocab_size=1000)
    for name, tokenizer in (("once", bpe), ("again", again)):
        tokenizer.save_pretrained(tmp_path / name)
    once, again = ((tmp_path / n / "tokenizer.json").read_bytes() for n in ("once", "again"))
    assert once == again


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(st.sampled_from("aab c"), min_size=2)), size=st.integers(257, 280))
def test_every_trained_tokenizer_can_encode_fast(texts, size):
    rust = rust_of(Tokenizer.train(texts, size))
    twin = tiktoken_twin(rust)
    assert twin is not None
    for text in texts:
        assert twin.encode_ordinary(text) == rust.encode(text).ids


@pytest.fixture(scope="module")
def few_and_many():
    """A tokenizer that encoded little so far, and the same after a long text."""
    few, many = (Tokenizer.train(["ab abc, 'tis " * 50], 280) for _ in range(2))
    many.encode_array("and so on " * 30_000)
    return few, many


@given(texts=st.lists(st.text(max_size=20), max_size=5))
def test_short_texts_have_the_same_ids_after_many(few_and_many, texts):
    few, many = few_and_many
    assert [few.encode(text) for text in texts] == [many.encode(text) for text in texts]


@given(st.text(st.sampled_from("ab'1! \n\t\u2003\x1c\u00a0_日。，²\u0301"), max_size=40))
def test_text_is_cut_only_between_pieces(bpe, text):
    cutter = rust_of(bpe).pre_tokenizer
    ends = {end for _, (_, end) in cutter.pre_tokenize_str(text)}
    with mock.patch.object(module, "CHUNK", 0):
        assert set(itertools.accumulate(map(len, chunks(text)))) <= ends


LONG = ["a", "^", " ", "0", "\n", "é", "日本", " \n\t", "'", "ab "]


@pytest.mark.parametrize("letters", LONG)
@pytest.mark.parametrize("end", ["", "x"])
def test_monotonous_text_has_the_ids_of_tokenizers(bpe, letters, end):
    text = letters * (100_000 // len(letters)) + end
    assert bpe.encode(text) == rust_of(bpe).encode(text).ids


RUNS = st.lists(
    st.sampled_from(["'", "s", "ll", "ve", "abc", "12", "日本", "。", "²", "_", "é\u0301"])
)


@settings(max_examples=300, deadline=None)
@given(RUNS.map("".join))
def test_text_without_spaces_has_the_ids_of_tokenizers_wherever_it_is_cut(bpe, text):
    with mock.patch.multiple(module, CHUNK=2, LONGEST_RUN=3, LONG_TEXT=0):
        assert bpe.encode(text) == rust_of(bpe).encode(text).ids


MEMORY = """
import resource, sys
from tiedgpt import Tokenizer
tokenizer = Tokenizer.from_pretrained(sys.argv[1])
tokenizer.encode_array("the cat " * 1000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
n_ids = len(tokenizer.encode_array(sys.argv[2] * (2_000_000 // len(sys.argv[2].encode()))))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2_000, n_ids > 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts kilobytes as Linux does")
@pytest.mark.parametrize("unit", ["f(a,b){c[d]=e};", "春眠不觉晓处处闻啼鸟", "0123456789abcdef"])
def test_a_line_without_spaces_takes_few_bytes_of_memory_for_each_of_its_own(bpe, tmp_path, unit):
    """2 MB of code, of Chinese and of hexadecimal digits; `tokenizers` takes 150 to 300 a byte."""
    bpe.save_pretrained(tmp_path)
    command = [sys.executable, "-c", MEMORY, str(tmp_path), unit]
    share, is_encoded = subprocess.run(command, capture_output=True, check=True).stdout.split()
    assert float(share) < 40 and is_encoded == b"True"


def test_a_million_blanks_do_not_stop_the_encoder(bpe):
    text = "before" + " " * (1 << 20) + "after"  # tiktoken alone panics here
    ids = bpe.encode_array(text)
    assert bpe.decode(ids) == text
    assert ids.tolist() == rust_of(bpe).encode(text).ids


def test_gpt2_vocabulary_encodes_as_openais_tiktoken_does(gpt2_folder, corpus, monkeypatch):
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    theirs = tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=data_gym_to_mergeable_bpe_ranks(
            str(gpt2_folder / "vocab.bpe"), str(gpt2_folder / "encoder.json")
        ),
        special_tokens={"<|endoftext|>": 50256},
    )
    ours = Tokenizer.from_pretrained(gpt2_folder)
    assert len(ours) == theirs.n_vocab == 50257
    assert ours.eos_token_id == ours.bos_token_id == 50256
    text = (
        corpus + "\r\n naïve  日本語のテキスト 👍🏽 don't 1234½ ١٢٣ <|endoftext|> \x00\u200b\n\n "
    )
    expected = theirs.encode_ordinary(text)
    assert ours.encode(text) == expected
    assert tiktoken_twin(rust_of(ours)) is not None
    assert [i for p in text.split("\n") for i in ours.encode(p)] == [
        i for p in text.split("\n") for i in theirs.encode_ordinary(p)
    ]
    assert [ours.token_bytes(id) for id in range(50256)] == [
        theirs.decode_single_token_bytes(id) for id in range(50256)
    ]
