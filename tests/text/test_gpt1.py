"""GPT-1's tokenizer gives the ids and the text that transformers' gives."""

import json
import shutil
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.conftest import rust_of
from tiedgpt.errors import UserError
from tiedgpt.text import Tokenizer
from tiedgpt.text import bpe as module
from tiedgpt.text.gpt1 import lower_case_tokenizer

TEXT = "Hello WÖRLD, don't  naïve\r\n\t日本 x☃y ... 1234½ ﬁn\u0301 ΑΣ İß\x00\u200b end"

any_text = st.text() | st.text(st.sampled_from("aB é\u0301.,'\n\x00日☃<unk>/w\u00a0\u2028"))
some_ids = st.lists(st.integers(0, 799))


@pytest.fixture(scope="module")
def theirs(gpt1_folder):
    transformers = pytest.importorskip("transformers")
    return transformers.OpenAIGPTTokenizerFast.from_pretrained(gpt1_folder)


def test_openais_file_names_hold_the_same_tokenizer(gpt1, gpt1_folder, tmp_path):
    names = {"vocab.json": "encoder_bpe_40000.json", "merges.txt": "vocab_40000.bpe"}
    for ours, openais in names.items():
        shutil.copy(gpt1_folder / ours, tmp_path / openais)
    for source in (tmp_path, tmp_path / "vocab_40000.bpe"):
        loaded = Tokenizer.from_pretrained(source)
        assert loaded.kind == gpt1.kind and loaded.encode(TEXT) == gpt1.encode(TEXT)


@given(text=any_text)
def test_ids_match_transformers(gpt1, theirs, text):
    assert gpt1.encode(text, allow_special=True) == theirs(text)["input_ids"]
    ordinary = theirs(text, split_special_tokens=True)["input_ids"]
    assert gpt1.encode(text) == gpt1.encode_array(text).tolist() == ordinary


@pytest.mark.parametrize(
    "text", [TEXT, "", " ", "<unk>", "a<unk>b <unk> ", "</w> a</w>b", "x" * 500]
)
def test_ids_and_text_of_known_cases_match_transformers(gpt1, theirs, text):
    ids = theirs(text)["input_ids"]
    assert gpt1.encode(text, allow_special=True) == ids
    assert gpt1.decode(ids) == theirs.decode(ids)
    assert len(gpt1) == len(theirs) == 800


@given(ids=some_ids)
def test_any_ids_decode_as_in_transformers_also_one_by_one(gpt1, theirs, ids):
    stream = gpt1.stream()
    pieces = [stream.push(id) for id in ids]
    assert "".join([*pieces, stream.finish()]) == gpt1.decode(ids) == theirs.decode(ids)


@given(ids=some_ids.filter(bool), more=some_ids)
def test_a_stream_continues_a_prompt_with_the_space_between(gpt1, ids, more):
    stream = gpt1.stream(after=ids[-1])
    pieces = [stream.push(id) for id in more]
    expected = gpt1.decode(ids + more) if more else gpt1.decode(ids)
    assert gpt1.decode(ids) + "".join([*pieces, stream.finish()]) == expected


def test_a_word_is_shown_at_once_and_its_blank_with_the_next(gpt1):
    ids = gpt1.encode("the end")
    stream = gpt1.stream()
    pieces = [stream.push(id) for id in ids]
    assert pieces[0] == "the" and pieces[1].startswith(" ")
    assert "".join(pieces) == "the end"
    assert stream.finish() == ""
    assert stream.push(ids[0]) == "the", "after the end, all is as at first"


def test_byte_lengths_count_the_decoded_text_and_a_blank_after_the_last_word(gpt1):
    ids = gpt1.encode("The Naïve\n\nEND. Ünd so weiter")
    lengths = gpt1.byte_lengths()
    assert lengths.shape == (800,)
    assert lengths[ids].sum() == len(gpt1.decode(ids).encode()) + 1
    assert lengths[0] == 0


@given(text=st.text(st.sampled_from("aB é\u0301.\n\x00日 \u00a0"), max_size=60))
def test_long_text_is_cut_where_it_changes_no_id(gpt1, text):
    with mock.patch.object(module, "CHUNK", 3):
        cut = gpt1.encode_array(text).tolist()
    assert cut == rust_of(gpt1).encode(text).ids


def test_an_added_token_in_text_is_found_across_any_cut(gpt1):
    for rust in (rust_of(gpt1), lower_case_tokenizer(rust_of(gpt1).model)):  # and without specials
        rust.add_tokens(["new york"])
        tokenizer = Tokenizer(rust)
        with mock.patch.object(module, "CHUNK", 3):
            assert tokenizer.encode("in new york") == rust.encode("in new york").ids
        assert 800 in tokenizer.encode("in new york")


def test_transformers_loads_a_saved_tokenizer_with_the_same_ids(gpt1, tmp_path):
    transformers = pytest.importorskip("transformers")
    gpt1.save_pretrained(tmp_path)
    again = Tokenizer.from_pretrained(tmp_path)
    ids = gpt1.encode(TEXT)
    assert (again.kind, len(again), again.encode(TEXT)) == ("gpt1", 800, ids)
    for config in (None, '{"model_type": "openai-gpt"}'):
        if config:
            (tmp_path / "config.json").write_text(config)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert theirs(TEXT)["input_ids"] == ids
        assert theirs.decode(ids) == gpt1.decode(ids)
        assert (len(theirs), theirs.unk_token_id) == (800, 0)


def test_a_tokenizer_saved_by_transformers_has_the_same_ids(gpt1, theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    assert not (tmp_path / "vocab.json").exists()
    again = Tokenizer.from_pretrained(tmp_path)
    assert (again.kind, len(again), again.encode(TEXT)) == ("gpt1", 800, gpt1.encode(TEXT))


def test_a_newline_of_openais_vocabulary_loses_nothing(gpt1_folder, tmp_path):
    vocabulary = json.loads((gpt1_folder / "vocab.json").read_text())
    vocabulary["\n</w>"] = len(vocabulary)  # no merge makes it, nor does any text give it
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_bytes((gpt1_folder / "merges.txt").read_bytes())
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 801
    assert tokenizer.decode([800, *tokenizer.encode("so")]) == "\n so"


def test_vocabulary_without_the_unknown_token_is_refused(gpt1, gpt1_folder, tmp_path):
    vocabulary = json.loads((gpt1_folder / "vocab.json").read_text())
    vocabulary["ф"] = vocabulary.pop("<unk>")
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_bytes((gpt1_folder / "merges.txt").read_bytes())
    with pytest.raises(UserError, match="a token for unknown characters"):
        Tokenizer.from_pretrained(tmp_path)
    gpt1.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["unk_token"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="a token for unknown characters"):
        Tokenizer.from_pretrained(tmp_path)
