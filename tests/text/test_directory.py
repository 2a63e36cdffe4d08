import json
import os
from itertools import product
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tests.text.conftest import rust_of, write_pair
from tiedgpt.errors import CorruptInputError, NoRoomError, TiedGPTError, UserError
from tiedgpt.text import Tokenizer
from tiedgpt.text.pieces import bert_tokenizer

PAIRS = [
    ("vocab.json", "merges.txt"),
    ("encoder.json", "vocab.bpe"),
    ("encoder_bpe_40000.json", "vocab_40000.bpe"),
]
TEXT = "the naïve 日本 def f(x): 1234 👍\n"


@pytest.fixture
def saved(bpe, tmp_path) -> Path:
    bpe.save_pretrained(tmp_path)
    return tmp_path


WORDPIECE = models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]")
SENTENCEPIECE = models.BPE({"<unk>": 0, "a": 1, "▁": 2}, [], unk_token="<unk>", fuse_unk=True)


def with_metaspace(model: models.Model) -> tokenizers.Tokenizer:
    rust = tokenizers.Tokenizer(model)
    rust.normalizer = normalizers.NFKC()
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return rust


def with_end(rust: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    rust.add_special_tokens(["<|endoftext|>"])
    return rust


def edit(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps(content | changes), encoding="utf-8")


def one_line(error: pytest.ExceptionInfo[TiedGPTError], name: str) -> str:
    message = str(error.value)
    assert "\n" not in message and name in message and len(message) < 600
    return message


def test_saved_tokenizer_comes_back_the_same(bpe, saved):
    for source in (saved, saved / "tokenizer.json"):
        loaded = Tokenizer.from_pretrained(source)
        assert loaded.encode(TEXT) == bpe.encode(TEXT)
        assert (len(loaded), loaded.bos_token_id, loaded.eos_token_id) == (1000, 999, 999)
    assert {file.name for file in saved.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize("pair", PAIRS)
def test_vocabulary_with_merges_is_the_same_tokenizer(bpe, tmp_path, pair):
    write_pair(rust_of(bpe), tmp_path, pair)
    for source in (tmp_path, str(tmp_path), tmp_path / pair[0], tmp_path / pair[1]):
        loaded = Tokenizer.from_pretrained(source)
        assert loaded.encode(TEXT) == bpe.encode(TEXT)
        assert loaded.decode(loaded.encode(TEXT)) == TEXT
        assert (len(loaded), loaded.eos_token_id) == (1000, 999)


def test_tokenizer_json_wins_over_the_older_files(bpe, saved):
    write_pair(rust_of(Tokenizer.train([], 257)), saved, PAIRS[0])
    assert len(Tokenizer.from_pretrained(saved)) == 1000


@pytest.mark.parametrize("token", ["the", {"content": "the", "special": True}])
def test_config_says_which_token_ends_a_text(saved, token):
    edit(saved / "tokenizer_config.json", eos_token=token)
    loaded = Tokenizer.from_pretrained(saved)
    assert loaded.token_bytes(loaded.eos_token_id) == b"the"
    assert loaded.bos_token_id == 999
    loaded.save_pretrained(saved / "again")
    assert Tokenizer.from_pretrained(saved / "again").eos_token_id == loaded.eos_token_id


def test_without_a_config_end_of_text_ends_a_text_if_there_is_one(saved):
    (saved / "tokenizer_config.json").unlink()
    assert Tokenizer.from_pretrained(saved).eos_token_id == 999
    edit(saved / "tokenizer.json", added_tokens=[])
    loaded = Tokenizer.from_pretrained(saved)
    assert (len(loaded), loaded.bos_token_id, loaded.eos_token_id) == (999, None, None)
    loaded.save_pretrained(saved)
    assert Tokenizer.from_pretrained(saved).eos_token_id is None


def test_end_token_outside_the_vocabulary_is_refused(saved):
    edit(saved / "tokenizer_config.json", eos_token="</s>")
    with pytest.raises(CorruptInputError) as error:
        Tokenizer.from_pretrained(saved)
    assert "'</s>' as eos_token" in one_line(error, "tokenizer_config.json")


def test_foreign_settings_are_kept(saved):
    edit(saved / "tokenizer_config.json", model_max_length=1024, chat_template="{{ x }}")
    Tokenizer.from_pretrained(saved).save_pretrained(saved / "again")
    config = json.loads((saved / "again" / "tokenizer_config.json").read_text())
    assert (config["model_max_length"], config["chat_template"]) == (1024, "{{ x }}")


def test_end_of_text_is_every_special_token_as_in_gpt2s_own_config(bpe, saved):
    names = ("bos_token", "eos_token", "unk_token")
    config = json.loads((saved / "tokenizer_config.json").read_text())
    assert [config[name] for name in names] == ["<|endoftext|>"] * 3
    Tokenizer.from_pretrained(saved).save_pretrained(saved / "again")
    assert json.loads((saved / "again" / "tokenizer_config.json").read_text()) == config
    tokens = (saved / "tokenizer.json").read_bytes()
    assert (saved / "again" / "tokenizer.json").read_bytes() == tokens


def test_unknown_token_of_a_file_is_kept_and_of_characters_none_is_named(char, saved):
    edit(saved / "tokenizer_config.json", unk_token="the")
    Tokenizer.from_pretrained(saved).save_pretrained(saved / "again")
    assert json.loads((saved / "again" / "tokenizer_config.json").read_text())["unk_token"] == "the"
    char.save_pretrained(saved / "char")
    assert "unk_token" not in json.loads((saved / "char" / "tokenizer_config.json").read_text())


def test_truncation_and_padding_in_the_file_change_no_ids(bpe, saved):
    rust = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    rust.enable_truncation(3)
    rust.enable_padding(length=50)
    rust.save(str(saved / "tokenizer.json"))
    assert Tokenizer.from_pretrained(saved).encode(TEXT) == bpe.encode(TEXT)


def test_added_tokens_file_gives_the_tokens_after_the_vocabulary(bpe, tmp_path):
    write_pair(rust_of(bpe), tmp_path, PAIRS[0])
    edit(tmp_path / "added_tokens.json", **{"<|pad|>": 1000, "<|user|>": 1001})
    loaded = Tokenizer.from_pretrained(tmp_path)
    assert loaded.encode("<|user|><|pad|>", allow_special=True) == [1001, 1000]
    edit(tmp_path / "added_tokens.json", **{"<|pad|>": 1005})
    with pytest.raises(CorruptInputError, match=r"id 1005, but .* it is 1001;"):
        Tokenizer.from_pretrained(tmp_path)


def test_failed_save_leaves_the_old_files(saved, char, monkeypatch):
    before = {file.name: file.read_bytes() for file in saved.iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(NoRoomError, match="no room on the disk"):
        char.save_pretrained(saved)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before


@pytest.mark.parametrize(
    ("kind", "part", "other"),
    [
        ("bpe", "decoder", decoders.Metaspace()),
        ("bpe", "decoder", decoders.WordPiece()),
        ("bpe", "decoder", decoders.BPEDecoder()),
        ("bpe", "decoder", None),
        ("bpe", "model", models.WordLevel({"a": 0, "b": 1}, unk_token="a")),
        ("bpe", "model", models.BPE({"a": 0, "b</w>": 1}, [], end_of_word_suffix="</w>")),
        ("char", "pre_tokenizer", pre_tokenizers.Split(" ", behavior="isolated")),
        ("char", "pre_tokenizer", pre_tokenizers.Whitespace()),
        ("char", "normalizer", normalizers.Lowercase()),
        ("char", "decoder", decoders.WordPiece()),
        ("char", "model", models.WordLevel({"word": 0, "b": 1, "<unk>": 2}, unk_token="<unk>")),
    ],
)
def test_tokenizer_of_another_kind_is_refused(request, tmp_path, kind, part, other):
    rust = rust_of(request.getfixturevalue(kind))
    setattr(rust, part, other)
    rust.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError) as error:
        Tokenizer.from_pretrained(tmp_path)
    assert "is not supported: use" in one_line(error, str(tmp_path))


def test_vocabulary_of_neither_bytes_nor_words_is_refused(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    with pytest.raises(UserError) as error:
        Tokenizer.from_pretrained(tmp_path)
    assert "not byte-level" in one_line(error, "vocab.json")


def test_file_of_another_purpose_is_not_read_as_a_tokenizer(saved):
    (saved / "notes.txt").write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match="holds no tokenizer"):
        Tokenizer.from_pretrained(saved / "notes.txt")


def test_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError) as error:
        Tokenizer.from_pretrained(tmp_path)
    assert "vocab.json with merges.txt" in one_line(error, str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 10_000, b"7"])
def test_damaged_json_is_named(saved, name, content):
    (saved / name).write_bytes(content)
    with pytest.raises(CorruptInputError) as error:
        Tokenizer.from_pretrained(saved)
    one_line(error, name)


def test_truncated_tokenizer_is_refused_wherever_it_ends(saved):
    file = saved / "tokenizer.json"
    content = file.read_bytes()
    for end in range(0, len(content) - 1, 997):
        file.write_bytes(content[:end])
        with pytest.raises(CorruptInputError):
            Tokenizer.from_pretrained(saved)


@pytest.mark.parametrize("junk", [None, 7, -1, "x", [], {}, [1], {"type": "x"}, "delete"])
@pytest.mark.parametrize("kind", ["bpe", "char", "gpt1", "wordpiece", "sentencepiece"])
def test_any_damage_gives_our_error(request, tmp_path, kind, junk):
    small = {
        "bpe": lambda: Tokenizer.train(["abab"], 260),
        "char": lambda: Tokenizer.characters(["abc"]),
        "gpt1": lambda: request.getfixturevalue("gpt1"),
        "wordpiece": lambda: Tokenizer(with_end(bert_tokenizer(WORDPIECE))),
        "sentencepiece": lambda: Tokenizer(with_end(with_metaspace(SENTENCEPIECE))),
    }[kind]()
    small.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    places = [(content, key) for key in content]
    for part in {"model", "normalizer", "pre_tokenizer", "decoder"} - {
        part for part in content if content[part] is None
    }:
        places += [(content[part], key) for key in content[part]]
    places += [(content["added_tokens"][0], key) for key in content["added_tokens"][0]]
    places += [(content["model"]["vocab"], "a"), (content["added_tokens"], 0)]
    for parent, key in places:
        kept = parent[key]
        parent[key] = junk
        if junk == "delete":
            del parent[key]
        file.write_text(json.dumps(content), encoding="utf-8")
        try:
            tokenizer = Tokenizer.from_pretrained(tmp_path)
            tokenizer.encode_array("ab\n" * 3000)
            tokenizer.decode(tokenizer.encode("ab<|endoftext|>", allow_special=True))
            tokenizer.byte_lengths()
        except TiedGPTError as error:
            assert "\n" not in str(error)
        if isinstance(parent, list):
            parent[key:] = [kept]
        else:
            parent[key] = kept


@pytest.mark.parametrize(
    ("id", "said"), [(1, "1000 tokens have 999 different ids"), (4 * 10**9, "ids up to 4000000000")]
)
def test_a_shared_id_and_an_absurd_one_are_refused_without_taking_memory(saved, id, said):
    content = json.loads((saved / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["vocab"]["a"] = id
    edit(saved / "tokenizer.json", model=content["model"])
    with pytest.raises(CorruptInputError, match=said):
        Tokenizer.from_pretrained(saved)


@pytest.mark.parametrize(("kind", "pair"), [*product(["bpe"], PAIRS), ("gpt1", PAIRS[0])])
def test_truncated_merges_are_refused_wherever_they_end(request, tmp_path, kind, pair):
    file = write_pair(rust_of(request.getfixturevalue(kind)), tmp_path, pair) / pair[1]
    content, n = file.read_bytes(), file.stat().st_size
    for end in [0, 5, 14, n // 2, n - 7, n - 5, n - 3, n - 2]:
        file.write_bytes(content[:end])
        with pytest.raises(CorruptInputError) as error:
            Tokenizer.from_pretrained(tmp_path)
        one_line(error, pair[1])


@pytest.mark.parametrize(
    ("line", "said"), [("a ☃", "☃"), ("q z", "qz"), ("alone", ""), ("a b c", ""), (" a", "")]
)
def test_bad_merge_is_refused(bpe, tmp_path, line, said):
    file = write_pair(rust_of(bpe), tmp_path, PAIRS[0]) / "merges.txt"
    lines = file.read_text(encoding="utf-8").split("\n")
    file.write_text("\n".join([*lines[:2], line, *lines[2:]]), encoding="utf-8")
    with pytest.raises(CorruptInputError) as error:
        Tokenizer.from_pretrained(tmp_path)
    assert said in one_line(error, "merges of vocab.json")


@pytest.mark.parametrize("id", [-1, "3", 1.0, None, True, 1 << 40, 5])
def test_bad_id_in_a_vocabulary_is_named(bpe, tmp_path, id):
    file = write_pair(rust_of(bpe), tmp_path, PAIRS[0]) / "vocab.json"
    edit(file, a=id)
    with pytest.raises(CorruptInputError) as error:
        Tokenizer.from_pretrained(tmp_path)
    one_line(error, "vocab.json")
