import re

import pytest
import tokenizers

from tiedgpt.errors import UserError
from tiedgpt.text import Tokenizer


def test_vocabulary_is_the_sorted_characters_then_end_of_text():
    tokenizer = Tokenizer.characters(["hello\n", "日"])
    assert [tokenizer.token_bytes(id).decode() for id in range(len(tokenizer))] == [
        *"\nehlo日",
        "<|endoftext|>",
    ]
    assert tokenizer.encode("hello\n日") == [2, 1, 3, 3, 4, 0, 5]


@pytest.mark.parametrize("unknown", ["z", "日", "\U0010ffff", "\x00"])
def test_character_outside_the_vocabulary_is_named_with_its_position(unknown):
    tokenizer = Tokenizer.characters(["abc"])
    said = re.escape(f"character {unknown!r} (U+{ord(unknown):04X}) at position 2 ")
    for encode in (tokenizer.encode, tokenizer.encode_array):
        with pytest.raises(UserError, match=said):
            encode("ab" + unknown + unknown)


def test_position_counts_from_the_start_also_after_a_special_token():
    tokenizer = Tokenizer.characters(["abc"])
    with pytest.raises(UserError, match="at position 15 "):
        tokenizer.encode("a<|endoftext|>bz", allow_special=True)


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_an_empty_vocabulary_is_refused(texts):
    with pytest.raises(UserError, match="at least one character"):
        Tokenizer.characters(texts)


@pytest.mark.parametrize(
    "text", ["\r\n\n\r", "\x00\x1c\u2028\x85", "<unk> <|endoftext|>", "e\u0301", "naïve  日本"]
)
def test_saved_vocabulary_gives_the_same_ids(tmp_path, text):
    tokenizer = Tokenizer.characters([text])
    tokenizer.save_pretrained(tmp_path)
    loaded = Tokenizer.from_pretrained(tmp_path)
    assert (loaded.kind, len(loaded)) == ("char", len(set(text)) + 1)
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs.encode_special_tokens = True
    assert theirs.encode(text).ids == tokenizer.encode(text)
    assert theirs.decode(theirs.encode(text).ids) == text
    with pytest.raises(Exception, match="Missing"):  # an unknown character is no known one
        theirs.encode("z")
