"""A directory gives the ids, the text and the size that transformers' `AutoTokenizer` gives."""

import json
import warnings
from itertools import product
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from tests.text.conftest import rust_of, write_pair
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.text import Tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

TEXTS = [
    "the cat [NAME] sat", "the cat[NAME]sat", "[NAME]", "  [NAME]  the\n", "[name] x[NAME][NAME]y",
    "a<|endoftext|>b <|endoftext|> c", "Hello wörld 日本", "<pad>x<s>y</s> <mask>.", "",
    "don't [NAME]s",
]  # fmt: skip
CHINESE = [
    "[CLS]山水的一是[SEP]", "The cats, unhappy! don't", "café THE 日本x", "  the\n\ncat\t。x",
    "[MASK]a ab ##s [unused1] [mask]", "", "Tḧe [name] cat [NAME] s[X]",
    "de\u0301e \u3000 山[SEP]水", "a . b , do not n't ' s",
]  # fmt: skip
VOCABULARY = (
    "[PAD] [unused1] [UNK] [CLS] [SEP] [MASK] ! , . ' 的 一 是 山 水 the cat ##s un ##happy not do "
    "é e THE 日 ##本 caf ##e ##é a ##b n ##'"
).split()
FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
FLAG_SETS = [(), *((flag,) for flag in FLAGS), FLAGS, ("special", "lstrip"), ("lstrip", "rstrip")]


def write(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(fields), encoding="utf-8")


def ids_and_texts(source: Path, texts: list[str]) -> tuple[list, list, int]:
    """Return what `tiedgpt` gives; its stream gives the decoded text, whatever is the prompt."""
    ours = Tokenizer.from_pretrained(source)
    ids = [ours.encode(text, allow_special=True) for text in texts]
    for row in ids:
        for start in (0, len(row) // 2):
            stream = ours.stream(row[start - 1] if start else None)
            pieces = [ours.decode(row[:start]), *map(stream.push, row[start:]), stream.finish()]
            assert "\ufffd" in pieces[0] or "".join(pieces) == ours.decode(row)
    decoded = [ours.decode(part) for row in ids for part in (row, row[1:])]
    return [*zip(ids, map(ours.encode, texts), strict=True)], decoded, len(ours)


def check(folder: Path, texts: list[str], read=transformers.AutoTokenizer) -> None:
    """Compare with transformers, also once the tokenizer is saved again."""
    peer = read.from_pretrained(folder)
    pairs = [
        tuple(
            peer(text, add_special_tokens=False, split_special_tokens=split)["input_ids"]
            for split in (False, True)
        )
        for text in texts
    ]
    decoded = [peer.decode(part) for ids, _ in pairs for part in (ids, ids[1:])]
    expected = pairs, decoded, len(peer)
    assert ids_and_texts(folder, texts) == expected
    Tokenizer.from_pretrained(folder).save_pretrained(folder / "again")
    assert ids_and_texts(folder / "again", texts) == expected
    again = transformers.AutoTokenizer.from_pretrained(folder / "again")
    ids = [again(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert (ids, [*map(again.decode, ids)]) == ([ids for ids, _ in pairs], decoded[::2])


def write_added(folder: Path, bpe: Tokenizer, token: dict, settings: dict) -> None:
    """Before version 4.34 of transformers: added_tokens.json and special_tokens_map.json."""
    write_pair(rust_of(bpe), folder)
    write(folder / "added_tokens.json", **{token["content"]: len(bpe)})
    if token["special"]:
        named = {key: value for key, value in token.items() if key != "special"}
        names = {"pad_token": named, "additional_special_tokens": [token["content"]]}
        write(folder / "special_tokens_map.json", **names, eos_token="<|endoftext|>")
    write(folder / "tokenizer_config.json", **settings)


def write_decoder(folder: Path, bpe: Tokenizer, token: dict, settings: dict) -> None:
    """Write added_tokens_decoder, as later versions."""
    write_pair(rust_of(bpe), folder)
    tokens = {len(bpe) - 1: {"content": "<|endoftext|>", "special": True}, len(bpe): token}
    write(folder / "tokenizer_config.json", added_tokens_decoder=tokens, **settings)


def write_json_file(folder: Path, bpe: Tokenizer, token: dict, settings: dict) -> None:
    """Write tokenizer.json, in which every word has a space before it."""
    rust = rust_of(bpe)
    rust.add_tokens([AddedToken(**token)])
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    rust.save(str(folder / "tokenizer.json"))
    write(folder / "tokenizer_config.json", **settings)


def write_both(folder: Path, bpe: Tokenizer, token: dict, settings: dict) -> None:
    write_json_file(folder, bpe, token, {})
    write_added(folder, bpe, token, settings)


@pytest.mark.parametrize("layout", [write_added, write_decoder, write_json_file, write_both])
@pytest.mark.parametrize("flags", FLAG_SETS, ids="+".join)
def test_added_tokens_and_settings_count_as_in_transformers(bpe, tmp_path, layout, flags):
    token = {"content": "[NAME]"} | {flag: flag in flags for flag in FLAGS}
    others = ["PreTrainedTokenizerFast"] if layout is write_json_file else []
    pairs = list(product((None, False, True), (None, "GPT2TokenizerFast", *others)))
    for prefix_space, class_name in pairs if flags in ((), FLAGS) else pairs[:: len(pairs) - 1]:
        folder = tmp_path / f"{prefix_space}{class_name}"
        folder.mkdir()
        settings = {"add_prefix_space": prefix_space, "tokenizer_class": class_name}
        settings = {key: value for key, value in settings.items() if value is not None}
        layout(folder, bpe, token, settings)
        write(folder / "config.json", model_type="gpt2")
        check(folder, TEXTS)


@pytest.mark.parametrize("layout", ["vocab.txt", "tokenizer.json", "added", "decoder"])
@pytest.mark.parametrize("file_name", ["config.json", "tokenizer_config.json"])
def test_wordpiece_counts_as_in_transformers(tmp_path, layout, file_name):
    """The class BertTokenizer, of most Chinese GPT-2s, with each of its settings."""
    names = ("do_lower_case", "tokenize_chinese_chars", "strip_accents")
    for n, values in enumerate(
        [(), (False,), (True, False), (False, True, True), (None, None, False)]
    ):
        folder = tmp_path / str(n)
        folder.mkdir()
        config = {"model_type": "gpt2"}
        options = dict(zip(names, values, strict=False))
        options = {key: value for key, value in options.items() if value is not None}
        (config if file_name == "config.json" else options)["tokenizer_class"] = "BertTokenizer"
        if layout == "decoder":
            token = {"content": "[NAME]", "normalized": True, "special": False}
            options["added_tokens_decoder"] = {len(VOCABULARY): token}
        if layout == "added":
            write(folder / "added_tokens.json", **{"[NAME]": 34, "[X]": 35})
            write(folder / "special_tokens_map.json", pad_token="[X]")
        if layout == "tokenizer.json":
            ids = {token: id for id, token in enumerate(VOCABULARY)}
            rust = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
            rust.normalizer = normalizers.BertNormalizer(lowercase=False)
            rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            rust.decoder = decoders.WordPiece()
            rust.save(str(folder / "tokenizer.json"))
        else:
            (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
        write(folder / "config.json", **config)
        write(folder / "tokenizer_config.json", **options)
        check(folder, CHINESE)


@pytest.fixture(scope="module", params=[True, False])
def chinese(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chinese")
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY), encoding="utf-8")
    write(folder / "config.json", model_type="gpt2", tokenizer_class="BertTokenizer")
    write(folder / "tokenizer_config.json", tokenize_chinese_chars=request.param)
    return folder


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("aé\u0301山水日本, .'\n[SEP]的##b")))
def test_any_text_of_wordpiece_has_transformers_ids_in_one_part_or_in_many(chinese, text):
    ours = Tokenizer.from_pretrained(chinese)
    peer = transformers.AutoTokenizer.from_pretrained(chinese)
    ids = peer(text, add_special_tokens=False)["input_ids"]
    assert ours.encode(text, allow_special=True) == ids
    ids = peer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiedgpt.text.bpe.CHUNK", 1)
        assert ours.encode(text) == ours.encode_array(text).tolist() == ids


def test_a_vocab_txt_without_its_unknown_token_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\nthe\n")
    with pytest.raises(CorruptInputError, match=r"vocab\.txt.*\[UNK\]"):
        Tokenizer.from_pretrained(tmp_path)


SPECIAL_TOKENS = ["<s>", "</s>", "<usr>", "<pad>", "<sys>", "<unk>", "<mask>"]


@pytest.mark.parametrize("model", ["BPE", "Unigram"])
@pytest.mark.parametrize(("is_named", "has_bytes"), [(True, False), (False, False), (True, True)])
def test_sentencepiece_in_a_tokenizer_json_counts_as_in_transformers(
    corpus, tmp_path, model, is_named, has_bytes
):
    """KoGPT2 has a BPE and its own special tokens; Japanese GPT-2s have a unigram."""
    tokens = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256 if has_bytes else 0))]
    options = {"vocab_size": 500 + len(tokens), "special_tokens": tokens, "show_progress": False}
    if model == "BPE":
        rust = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        trainer = trainers.BpeTrainer(**options)
    else:
        rust = tokenizers.Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(**options, unk_token="<unk>")
    rust.normalizer = normalizers.NFKC()
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    east = "안녕하세요 한국어 입니다 日本の山。 " * 50
    rust.train_from_iterator([corpus[:50_000], east], trainer)
    rust.save(str(tmp_path / "tokenizer.json"))
    if has_bytes:  # as Llama's: a character that is no token is its bytes
        stored = json.loads((tmp_path / "tokenizer.json").read_text())
        stored["added_tokens"] = stored["added_tokens"][: len(SPECIAL_TOKENS)]
        stored["model"]["byte_fallback"] = True
        rust = tokenizers.Tokenizer.from_str(json.dumps(stored))
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        rust.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
        rust.save(str(tmp_path / "tokenizer.json"))
    if is_named:
        names = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "<unk>"}
        write(
            tmp_path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **names
        )
        write(tmp_path / "config.json", model_type="gpt2")
    texts = [*TEXTS, "  안녕하세요 한국어 ☃ ☃☃", "☃", "<usr>日本の山。<sys> a<unk>b", "a\nb\n\n c"]
    check(tmp_path, texts, transformers.PreTrainedTokenizerFast)
    assert Tokenizer.from_pretrained(tmp_path).eos_token_id == (1 if is_named else None)


@pytest.mark.parametrize("name", ["spiece.model", "tokenizer.model"])
def test_a_model_of_sentencepiece_is_answered_with_the_command_that_converts_it(tmp_path, name):
    (tmp_path / name).write_bytes(b"\n\x0e\n\x05<unk>")
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(UserError, match=r"python -c .*from_pretrained\(.*save_pretrained\("):
            Tokenizer.from_pretrained(source)


@pytest.mark.parametrize(
    "names", [{}, {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}]
)
def test_a_byte_level_bpe_with_its_own_special_tokens_counts_as_in_transformers(
    corpus, tmp_path, names
):
    """The kind of ruGPT-3, AraGPT2 and the German GPT-2 of dbmdz."""
    rust = tokenizers.Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    options = {"vocab_size": 500, "special_tokens": SPECIAL_TOKENS, "show_progress": False}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(**options, initial_alphabet=alphabet)
    rust.train_from_iterator([corpus[:50_000]], trainer)
    write_pair(rust, tmp_path)
    write(tmp_path / "special_tokens_map.json", **names)
    write(tmp_path / "config.json", model_type="gpt2")
    ours = Tokenizer.from_pretrained(tmp_path)
    assert (len(ours), ours.bos_token_id) == (500, 0 if names else None)
    if names:
        peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        ids = [peer(text, add_special_tokens=False)["input_ids"] for text in TEXTS[:5] + TEXTS[6:]]
        assert [ours.encode(text, allow_special=True) for text in TEXTS[:5] + TEXTS[6:]] == ids


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"1000": 7}}, "no token"),
        ({"added_tokens_decoder": {"1000": {"content": 7}}}, "no token"),
        ({"added_tokens_decoder": {"1000": {"content": ""}}}, "no text"),
        ({"added_tokens_decoder": {"1007": {"content": "[X]"}}}, "id 1007"),
        ({"pad_token": ["x"]}, "no token"),
        ({"additional_special_tokens": [None]}, "no token"),
        ({"additional_special_tokens": 7}, "no list"),
    ],
)
def test_damaged_settings_are_named(bpe, tmp_path, content, message):
    write_pair(rust_of(bpe), tmp_path)
    write(tmp_path / "tokenizer_config.json", **content)
    with pytest.raises(CorruptInputError, match=rf"tokenizer_config\.json.*{message}"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("source", ["tokenizer.json", "added_tokens_decoder"])
@pytest.mark.parametrize("name", ["pad_token", "eos_token", "cls_token"])
def test_a_name_in_the_settings_makes_a_token_special(bpe, tmp_path, source, name):
    rust, token = rust_of(bpe), {"content": "<pad>", "special": False, "normalized": True}
    settings = {name: "<pad>"}
    rust.add_tokens([tokenizers.AddedToken(**token)])
    if source == "added_tokens_decoder":
        settings |= {"added_tokens_decoder": {str(rust.token_to_id("<pad>")): token}}
    rust.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **settings)
    check(tmp_path, ["a <pad> b", "<pad>", "<pad>x<|endoftext|>"])
    assert "<pad>" in Tokenizer.from_pretrained(tmp_path).special_tokens


def wordpiece(folder: Path, **named: object) -> Tokenizer:
    """Write a vocabulary that holds "<|endoftext|>" as an ordinary token."""
    words = [*VOCABULARY, "<", "|", ">", "end", "##of", "##text", "##|", "##>", "<|endoftext|>"]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    write(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer", **named)
    return Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"eos_token": "[SEP]"},
        {"eos_token": {"__type": "AddedToken", "content": "[SEP]", "normalized": True}},
        {"bos_token": "[CLS]", "eos_token": "[SEP]"},
        {"sep_token": {"__type": "AddedToken", "content": "THE", "normalized": True}},
    ],
)
def test_a_saved_wordpiece_has_the_same_ids_and_ends(tmp_path, named):
    tokenizer = wordpiece(tmp_path, **named)
    tokenizer.save_pretrained(tmp_path / "again")
    again = Tokenizer.from_pretrained(tmp_path / "again")
    assert again.bos_token_id == tokenizer.bos_token_id
    assert again.eos_token_id == tokenizer.eos_token_id
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the cat<|endoftext|>the", "[SEP] the [CLS]", "THE the"):
        expected = peer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text, allow_special=True) == expected
        assert again.encode(text, allow_special=True) == expected
        assert again.encode(text) == tokenizer.encode(text)


def test_a_tokenizer_that_begins_texts_says_with_which_token(bpe, tmp_path):
    write_pair(rust_of(bpe), tmp_path)
    for begins, ends in product((True, False), repeat=2):
        write(tmp_path / "tokenizer_config.json", add_bos_token=begins, add_eos_token=ends)
        write(tmp_path / "config.json", model_type="gpt2")
        peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        Tokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
        for source in (tmp_path, tmp_path / "again"):
            ours = Tokenizer.from_pretrained(source)
            assert ours.begin_ids == ([999] if begins else [])
            whole = [*ours.begin_ids, *ours.encode("the cat"), *([999] if ends else [])]
            assert whole == peer("the cat")["input_ids"]


END, processors = ("<|endoftext|>", 999), tokenizers.processors


@pytest.mark.parametrize(
    "processor",
    [
        processors.RobertaProcessing(END, END),
        processors.Sequence([processors.ByteLevel(), processors.BertProcessing(END, END)]),
        processors.TemplateProcessing(single=f"{END[0]} $A", special_tokens=[END]),
        processors.TemplateProcessing(single=f"$A {END[0]}", special_tokens=[END]),
    ],
)
def test_the_token_that_a_post_processor_puts_before_a_text_begins_texts(bpe, processor):
    rust = rust_of(bpe)
    rust.post_processor = processor
    whole, ours = rust.encode("the cat").ids, Tokenizer(rust)
    assert whole[: whole.index(ours.encode("the cat")[0])] == ours.begin_ids
