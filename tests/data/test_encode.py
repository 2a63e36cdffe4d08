import hashlib
import json

import numpy as np
import pytest

from tiedgpt.data import Counts, Document, Shards, encode_corpus, open_encoded, plan_split
from tiedgpt.data.encode import encode_documents
from tiedgpt.errors import CorruptInputError, NoRoomError, UserError

CORPUS = [Document("a", "hé"), Document("b", "word " * 4), Document("c", "other " * 3)]
VALIDATION = [Document("v", "héé"), Document("w", "x")]


SPLIT = plan_split(CORPUS, VALIDATION)


def test_documents_are_followed_by_the_end_of_text_and_both_sides_are_counted(tmp_path, tokenizer):
    encoded = encode_corpus(SPLIT, tokenizer, tmp_path / "data")
    train, val = (Shards.in_directory(tmp_path / "data", side) for side in ("train", "val"))
    assert val.read(0, len(val)).tolist() == [*"héé".encode(), 256, *b"x", 256]
    ends = np.flatnonzero(train.read(0, len(train)) == 256)
    assert ends.tolist() == [3, 3 + 21, 3 + 21 + 19]
    assert encoded.train == Counts(documents=3, characters=40, utf8_bytes=41, tokens=44)
    assert encoded.val == Counts(documents=2, characters=4, utf8_bytes=6, tokens=8)
    assert open_encoded(tmp_path / "data") == encoded


def test_a_tokenizer_without_an_end_of_text_joins_the_documents(tmp_path, tokenizer):
    tokenizer.eos_token_id = None
    val = encode_corpus(SPLIT, tokenizer, tmp_path / "data").open_shards("val")
    assert bytes(val.read(0, len(val)).tolist()).decode() == "hééx"


def test_progress_counts_characters_and_the_directory_appears_when_complete(tmp_path, tokenizer):
    steps = encode_documents(SPLIT, tokenizer, tmp_path / "data")
    calls = [(*progress, (tmp_path / "data").exists()) for progress in steps]
    assert calls == [(done, 44, False) for done in (2, 22, 40, 43, 44)]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        "manifest.json",
        "train_000000.bin",
        "val_000000.bin",
    ]


@pytest.mark.parametrize("error", [NoRoomError("full"), KeyboardInterrupt()])
def test_a_failed_attempt_leaves_nothing(tmp_path, tokenizer, error):
    steps = encode_documents(plan_split(CORPUS), tokenizer, tmp_path / "data")
    next(steps)
    with pytest.raises(type(error)):
        steps.throw(error)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_files_is_never_written_into(tmp_path, tokenizer):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="exists already"):
        encode_corpus(plan_split(CORPUS), tokenizer, tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_a_side_without_tokens_is_an_error(tmp_path, tokenizer):
    tokenizer.eos_token_id = None
    tokenizer.encode_array = lambda text: np.array([1] * (len(text) > 3), dtype=np.uint16)
    with pytest.raises(UserError, match="the val side of the split has no tokens"):
        encode_corpus(SPLIT, tokenizer, tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_missing_or_damaged_counts_are_refused(tmp_path):
    with pytest.raises(UserError, match="holds no encoded text"):
        open_encoded(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"train": {}}))
    with pytest.raises(CorruptInputError, match=r"manifest\.json is damaged"):
        open_encoded(tmp_path)


WHOLE = [Document(str(i), f"document {i * i} says\n" * (1 + i % 7)) for i in range(60)]
CUT = [
    Document("book", "".join(f"line {i}\n" for i in range(500))),
    Document("one line", "\u00fc" * 999),
]
FROZEN = {
    "whole": {
        "manifest.json": "24c01e62f9d8868fbecdcca58ca67bd9b91166a5c4d499b445275d64fa42650d",
        "train_000000.bin": "349f95ba9933a77053a28a2307fdd4edb9e1ba4c27687c516244bc26255eb634",
        "train_000001.bin": "2d7717bf8a6a4c6761e762287776f0a51a4a4bdc04ba494001a3714bde9b4c16",
        "val_000000.bin": "382d58cf4f882077d604c7b2cee832c41319c0c2efa12c679b24530235e41989",
    },
    "cut": {
        "manifest.json": "7523a19d283f874272f3f6b763c1b4d0f6b11b25bbbe00eb0082982d59b5bed7",
        "train_000000.bin": "0187d1a6dbbd31d96e3a686b303ef2a6964dfff8beae019581ce18750c441ffd",
        "train_000001.bin": "f155dc0e156be8228db9ba870c6d614f78b1f624a96948da65798dc72af26d54",
        "val_000000.bin": "16c6d62f0337ea3ef93e1019bb78fcc07221338998a3a3f432201e24254d796c",
    },
}


@pytest.mark.parametrize(("name", "corpus"), [("whole", WHOLE), ("cut", CUT)])
def test_split_and_shards_are_frozen(tmp_path, tokenizer, name, corpus):
    encode_corpus(plan_split(corpus), tokenizer, tmp_path / "data", tokens_per_shard=3000)
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (tmp_path / "data").iterdir()
    }
    assert digests == FROZEN[name]
