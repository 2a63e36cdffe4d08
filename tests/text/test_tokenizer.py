import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from tiedgpt.errors import UserError
from tiedgpt.text import Tokenizer

TEXT = "naïve café, 日本 👍\r\n\tdef f(x): return x  \n\n1234 don't"


@pytest.fixture(params=["bpe", "char"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["bpe", "char", "gpt1"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


def test_text_imports_neither_torch_nor_transformers(tmp_path):
    script = f"""
import sys
from tiedgpt.text import Tokenizer
tokenizer = Tokenizer.train(["to be or not to be"], vocab_size=300)
tokenizer.encode_array("to be " * 2000)
tokenizer.save_pretrained({str(tmp_path)!r})
Tokenizer.from_pretrained({str(tmp_path)!r})
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@given(text=st.text())
def test_bpe_gives_any_text_back(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text


@pytest.mark.parametrize("text", ["", "x", "the end\n" * 2000])
def test_array_holds_the_same_ids_as_the_list(any_tokenizer, text):
    array = any_tokenizer.encode_array(text)
    assert array.dtype == np.uint16
    assert array.tolist() == any_tokenizer.encode(text)


def test_a_batch_holds_the_ids_of_each_text(tokenizer):
    texts = ["", "to be<|endoftext|>", "the end\n" * 2000]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    (ids,) = tokenizer.encode_batch(texts[1:2], allow_special=True)
    assert ids == tokenizer.encode(texts[1], allow_special=True)
    with pytest.raises(UserError, match=r"texts as list of str, got .one string.: write a list"):
        tokenizer.encode_batch("one string")


def test_array_is_uint32_only_if_the_vocabulary_needs_it():
    fits = Tokenizer.characters([chr(0x10000 + i) for i in range(65_535)])
    exceeds = Tokenizer.characters([chr(0x10000 + i) for i in range(65_536)])
    assert (len(fits), fits.encode_array("\U00010005").dtype) == (65_536, np.uint16)
    assert (len(exceeds), exceeds.encode_array("\U00010005").dtype) == (65_537, np.uint32)


def test_end_of_text_is_the_last_id_and_begins_and_ends_texts(tokenizer):
    last = len(tokenizer) - 1
    assert tokenizer.vocab_size == len(tokenizer)
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == last
    assert tokenizer.token_bytes(last) == b"<|endoftext|>"


@pytest.mark.parametrize("repeats", [1, 2000])
def test_special_token_in_a_text_is_ordinary_text_unless_asked_for(tokenizer, repeats):
    text = "to be<|endoftext|>or not " * repeats
    ordinary, special = tokenizer.encode(text), tokenizer.encode(text, allow_special=True)
    assert tokenizer.eos_token_id not in ordinary
    assert special.count(tokenizer.eos_token_id) == repeats
    assert tokenizer.decode(ordinary) == tokenizer.decode(special) == text
    assert tokenizer.encode_array(text).tolist() == ordinary


@given(
    parts=st.lists(st.sampled_from(["<s>", "<s>x", "[L]", "[R]", "word", " ", "\n", "s", "<"])),
)
def test_special_tokens_are_found_where_tokenizers_finds_them(with_specials, parts):
    ours, theirs = with_specials
    text = "".join(parts)
    expected = theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, allow_special=True) == expected


@pytest.fixture(scope="module")
def with_specials(bpe, tmp_path_factory) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    folder = tmp_path_factory.mktemp("specials")
    bpe.save_pretrained(folder)
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.add_special_tokens(
        [
            "<s>",
            "<s>x",
            AddedToken("[L]", lstrip=True),
            AddedToken("[R]", rstrip=True),
            AddedToken("word", single_word=True),
        ]
    )
    theirs.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_pretrained(folder), theirs


@pytest.mark.parametrize("allow_special", [False, True])
def test_lone_surrogate_is_refused_with_its_position(tokenizer, allow_special):
    with pytest.raises(UserError, match=r"position 2 is the lone surrogate U\+D800"):
        tokenizer.encode("ab\ud800", allow_special=allow_special)
    with pytest.raises(UserError, match="position 2 "):
        tokenizer.encode_array("ab\ud800")


@pytest.mark.parametrize("make", [Tokenizer.characters, lambda t: Tokenizer.train(t, 300)])
def test_a_lone_surrogate_and_a_single_string_are_refused_as_training_texts(make):
    with pytest.raises(UserError, match="position 1 of text 1 "):
        make(["good", "x\udfff"])
    with pytest.raises(UserError, match=r"texts as list of str, got .one string.: write a list"):
        make("one string")


def test_arrays_and_tensors_decode_as_lists_do(any_tokenizer):
    text, stream = "to be or not", any_tokenizer.stream()
    ids, array = any_tokenizer.encode(text), any_tokenizer.encode_array(text)
    for same in (np.array(ids), array, torch.tensor(ids), iter(ids)):
        assert any_tokenizer.decode(same) == text
    assert "".join(map(stream.push, torch.tensor(ids))) + stream.finish() == text
    after, plain = (any_tokenizer.stream(after=id) for id in (torch.tensor(ids[0]), ids[0]))
    assert after.push(torch.tensor(ids[1])) == plain.push(ids[1])
    assert any_tokenizer.decode(torch.tensor([], dtype=torch.long)) == ""


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_invalid_ids_are_refused_in_every_container(any_tokenizer, make):
    for id in (-1, len(any_tokenizer), 2**40):
        with pytest.raises(UserError, match=f"id {id} is outside the vocabulary"):
            any_tokenizer.decode(make([0, id]))
        with pytest.raises(UserError, match=f"id {id} is outside the vocabulary"):
            any_tokenizer.token_bytes(id)
    for ids in (make([0.5]), make([[0, 1]]), make([3])[0], 3, "3", [None], ["3"], np.array(3)):
        with pytest.raises(UserError, match="ids must be integers in one dimension"):
            any_tokenizer.decode(ids)


def test_byte_lengths_add_up_to_the_text(tokenizer):
    text = "naïve 日本 👍\r\n\t and so on"
    lengths = tokenizer.byte_lengths()
    assert lengths.shape == (len(tokenizer),)
    assert lengths[tokenizer.encode(text)].sum() == len(text.encode())
    assert lengths[tokenizer.eos_token_id] == 0
    assert lengths[:-1].tolist() == [
        len(tokenizer.token_bytes(id)) for id in range(len(lengths) - 1)
    ]


def test_kind_names_the_units_of_tokens(bpe, char):
    assert (bpe.kind, char.kind) == ("bpe", "char")
    assert re.fullmatch(r"Tokenizer\(kind='bpe', len=1000, eos_token_id=999\)", repr(bpe))


def test_worker_process_gets_the_same_tokenizer(any_tokenizer):
    copy = pickle.loads(pickle.dumps(any_tokenizer))
    text = "to be<|endoftext|>"
    assert copy.encode(text) == any_tokenizer.encode(text)
    assert (copy.eos_token_id, copy.kind) == (any_tokenizer.eos_token_id, any_tokenizer.kind)


@pytest.mark.parametrize("config", [None, '{"model_type": "gpt2", "vocab_size": 1000}'])
def test_transformers_loads_saved_tokenizers_with_the_same_ids(tokenizer, tmp_path, config):
    transformers = pytest.importorskip("transformers")
    tokenizer.save_pretrained(tmp_path)
    if config:
        (tmp_path / "config.json").write_text(config)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "naïve  日本 , don't 👍\r\n\t x ."
    ids = tokenizer.encode(text)
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text
    assert len(theirs) == len(tokenizer)
    assert theirs.eos_token_id == theirs.bos_token_id == tokenizer.eos_token_id
    assert tokenizer.kind == "char" or theirs.unk_token == "<|endoftext|>"
    assert theirs("x<|endoftext|>")["input_ids"] == tokenizer.encode(
        "x<|endoftext|>", allow_special=True
    )


@pytest.mark.parametrize("kind", ["bpe", "characters"])
def test_special_tokens_can_be_added_to_any_vocabulary(kind, tmp_path):
    made = {"bpe": Tokenizer.train(["ab ab"], 300), "characters": Tokenizer.characters(["ab"])}
    before = made[kind]
    after = before.with_special_tokens(["[x]", "<|endoftext|>", "[y]", "[x]"])
    assert len(after) == len(before) + 2
    assert after.encode("[x]a[y]", allow_special=True) == [
        len(before), *before.encode("a"), len(before) + 1
    ]  # fmt: skip
    assert after.decode([len(before) + 1]) == "[y]"
    assert after.eos_token_id == before.eos_token_id
    assert after.encode("ab") == before.encode("ab")
    assert after.with_special_tokens(["[y]"]) is after
    after.save_pretrained(tmp_path)
    again = Tokenizer.from_pretrained(tmp_path)
    assert again.encode("a[y]", allow_special=True) == after.encode("a[y]", allow_special=True)


def test_a_regular_expression_that_explodes_is_an_error_of_ours(exploding):
    tokenizer, text = exploding
    for encode in (tokenizer.encode, tokenizer.encode_array):
        with pytest.raises(UserError, match=r"101 characters: .*retry-limit.*tokenizer\.json"):
            encode(text)
    with pytest.raises(UserError, match="101 characters"):
        tokenizer.encode(text, allow_special=True)
    assert tokenizer.decode(tokenizer.encode("ab the")) == "ab the"
