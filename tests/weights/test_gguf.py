"""GGUF: llama.cpp's library and ours read each other's files alike; llama.cpp computes the same."""

import json
import re
import struct
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import jinja2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import models, normalizers, pre_tokenizers

from tests.models import random_gpt
from tests.tie.checkpoints import GGUF_SIZES, gguf_tensors, write_gguf
from tests.weights.conftest import TEXTS
from tests.weights.raw_files import gguf_file, gguf_pair, gguf_tensor, gguf_text
from tiedgpt import GPT, Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.data.templates import CHATML, PLAIN, write_template
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.infer import Engine
from tiedgpt.text.bpe import BYTE_ALPHABET, byte_level_tokenizer
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.formats.gguf import to_ours, to_theirs
from tiedgpt.weights.formats.gguf.vocabulary import read_tokenizer
from tiedgpt.weights.formats.gguf.writer import write as write_our_gguf
from tiedgpt.weights.load import load
from tiedgpt.weights.source import open_checkpoint
from tiedgpt.weights.tensors import QUANTIZED

pytestmark = pytest.mark.filterwarnings("ignore::tiedgpt.weights.load.CheckpointWarning")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gguf


@pytest.mark.parametrize("kind", QUANTIZED)
def test_every_quantized_type_is_decoded_like_the_gguf_package(tmp_path, kind):
    ggml = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[ggml]
    raw = np.random.default_rng(1).integers(0, 256, (20, 2 * size), np.uint8)
    path = tmp_path / "a.gguf"
    info = gguf_tensor(sizes=(2 * block, 20), ggml_type=int(ggml))
    body = info + bytes(-(24 + len(info)) % 32) + raw.tobytes()
    path.write_bytes(gguf_file(n_tensors=1, body=body))
    ours = open_checkpoint(path).tensors["w"]
    assert (ours.shape, ours.dtype, ours.n_bytes) == ((20, 2 * block), kind, raw.nbytes)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, ggml)
    assert np.array_equal(ours.rows(0, 20), expected, equal_nan=True)
    assert np.array_equal(ours.rows(3, 5), expected[3:5], equal_nan=True)


def test_an_unknown_type_is_listed_and_not_read(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_file(n_tensors=1, body=gguf_tensor(ggml_type=77)))
    stored = open_checkpoint(path).tensors["w"]
    assert (stored.shape, stored.dtype, stored.is_decodable) == ((4, 32), "ggml type 77", False)


def test_a_long_text_is_skipped(tmp_path):
    body = gguf_pair(b"note", 8, gguf_text(bytes(70_000)))
    (tmp_path / "value").write_bytes(gguf_file(n_pairs=1, body=body))
    assert open_checkpoint(tmp_path / "value").config == {"note": ""}


def their_file(path: Path, model: GPT, kind: str = "F32", *, leave=(), more=None, **values) -> Path:
    """Write a model as their converter does, with their library; `kind` holds for matrices."""
    tensors = gguf_tensors(dict(model.named_parameters())) | (more or {})
    tensors = {name: array for name, array in tensors.items() if name not in leave}
    sizes = GGUF_SIZES | {"block_count": model.config.n_layer}
    return write_gguf(path, tensors, kind=kind, **sizes | values)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "MXFP4"])
def test_a_file_of_llama_cpp_is_read_like_the_gguf_package(kind, tiny, ids, tmp_path):
    path = their_file(tmp_path / "a.gguf", tiny, kind)
    model = GPT.from_pretrained(path, dtype=torch.float32)
    for tensor in gguf.GGUFReader(path).tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        ours = model.get_parameter(to_ours(tensor.name)).detach().numpy()
        assert np.array_equal(ours, expected.reshape(ours.shape)), tensor.name
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    assert GPT.from_pretrained(path).wte.weight.dtype is dtype
    assert model.head is None and model.config.layer_norm_epsilon == 1e-5
    if kind == "F32":
        assert torch.equal(model(ids), tiny(ids))


def test_only_quantized_types_need_the_package(tiny, tmp_path, monkeypatch):
    path = their_file(tmp_path / "a.gguf", tiny, "BF16")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert GPT.from_pretrained(path).config.n_head == 4


def test_only_quantized_tensors_are_reported(tiny, tmp_path):
    assert any("Q8_0" in note for note in load(their_file(tmp_path / "a", tiny, "Q8_0")).notes)
    assert load(their_file(tmp_path / "b", tiny)).notes == ()


Q8_1 = 9
REFUSED = [
    (UserError, "llama", {"architecture": "llama"}),
    (UserError, "gptneox", {"architecture": "gptneox"}),
    (UserError, "starcoder", {"architecture": "starcoder"}),
    (UserError, "head_count_kv=2", {"head_count_kv": 2}),
    (UserError, "key_length=16", {"key_length": 16}),
    (UserError, "causal=False", {"causal_attention": False}),
    (UserError, "give n_head", {"head_count": None}),
    (
        CorruptInputError, "parameter twice, under two names",
        {"more": {"wte.weight": np.ones((97, 32), np.float32)}},
    ),
    (UserError, r"token_embd\.weight is Q8_1, which is not read", {"w_kind": Q8_1}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "says", "values"), REFUSED)
def test_a_gpt_that_is_not_computed_here_is_refused_by_name(
    error, says, values, tiny, ids, tmp_path
):
    w_kind = values.get("w_kind")
    path = their_file(tmp_path / "a", tiny, **{n: v for n, v in values.items() if n != "w_kind"})
    info = gguf_tensor(b"token_embd.weight", (32, 97))[:-12]
    content = path.read_bytes()
    assert info in content
    if w_kind is not None:  # a type that the package gguf cannot decode
        start = content.index(info) + len(info)
        path.write_bytes(content[:start] + struct.pack("<I", w_kind) + content[start + 4 :])
    with pytest.raises(error, match=says):
        GPT.from_pretrained(path)
    if "n_head" in says:
        assert torch.equal(GPT.from_pretrained(path, n_head=4)(ids), tiny(ids))


def test_attention_as_gpt2s_may_be_stated(tiny, tmp_path):
    same = {"head_count_kv": 4, "key_length": 8, "causal_attention": True}
    assert GPT.from_pretrained(their_file(tmp_path / "same", tiny, **same))


SAMPLE = "The fox's 12 naïve dogs  \n\n jump 🚀\tüber <|endoftext|> it'll"


def their_vocabulary(path: Path, tokenizer: Tokenizer, **changes) -> Path:
    """Write the tokenizer with llama.cpp's library; a changed key of None is left out."""
    stored = json.loads(tokenizer.to_json())
    tokens = [""] * len(tokenizer)
    for token, id in stored["model"]["vocab"].items():
        tokens[id] = token
    types = [gguf.TokenType.NORMAL] * len(tokens)
    for added in stored["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL
    values = {
        "architecture": "gpt2",
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "gpt-2",
        "token_list": tokens,
        "token_types": types,
        "token_merges": [" ".join(merge) for merge in stored["model"]["merges"]],
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    for name, change in changes.items():
        values[name] = change(values[name]) if callable(change) else change
    return write_gguf(path, {}, name=None, array=None, **values)


def test_ids_equal_those_of_the_written_tokenizer(tokenizer, tmp_path):
    read = read_tokenizer(OpenFile(their_vocabulary(tmp_path / "a.gguf", tokenizer)))
    assert (len(read), read.bos_token_id, read.eos_token_id) == (
        len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id,
    )  # fmt: skip
    for allow in (False, True):
        ids = tokenizer.encode(SAMPLE, allow_special=allow)
        assert read.encode(SAMPLE, allow_special=allow) == ids
        assert read.decode(ids) == SAMPLE
    assert [read.token_bytes(id) for id in range(len(read))] == [
        tokenizer.token_bytes(id) for id in range(len(tokenizer))
    ]


def test_unused_rows_are_not_tokens_and_user_tokens_are_found_in_text(tokenizer, tmp_path):
    size = len(tokenizer)
    path = their_vocabulary(
        tmp_path / "a", tokenizer,
        token_list=lambda tokens: [*tokens, "[PAD1]", "<user>", "[PAD2]"],
        token_types=lambda types: [*types, 5, 4, 5],
    )  # fmt: skip
    read = read_tokenizer(OpenFile(path))
    assert len(read) == size + 2
    assert read.encode("a<user>b")[1] == size + 1
    with pytest.raises(UserError, match="outside the vocabulary"):
        read.decode([size])


def test_gpt2s_split_and_an_ordinary_end_token_are_taken_where_nothing_is_said(tokenizer, tmp_path):
    path = their_vocabulary(tmp_path / "a", tokenizer, tokenizer_pre=None, token_types=None)
    read = read_tokenizer(OpenFile(path))
    assert read.encode(SAMPLE) == tokenizer.encode(SAMPLE)
    assert read.encode("<|endoftext|>", allow_special=True) == [tokenizer.eos_token_id]


OTHER_VOCABULARIES = [
    (UserError, "holds no tokenizer", {"tokenizer_model": None}),
    (UserError, "model is 'no_vocab'", {"tokenizer_model": "no_vocab"}),
    (UserError, "model is 'llama'", {"tokenizer_model": "llama"}),
    (UserError, "split 'llama-bpe'", {"tokenizer_pre": "llama-bpe"}),
    (UserError, "split 'None'", {"tokenizer_pre": None, "architecture": "starcoder"}),
    (UserError, "lacks some of the 256 bytes", {"token_list": lambda t: [x + "x" for x in t]}),
    (CorruptInputError, "tokens is missing", {"token_list": None}),
    (CorruptInputError, "merges is missing", {"token_merges": None}),
    (CorruptInputError, "no type of its own", {"token_types": lambda types: types[:-1]}),
    (CorruptInputError, "occurs twice", {"token_list": lambda tokens: [*tokens[:-1], tokens[0]]}),
    (CorruptInputError, "empty", {"token_list": lambda tokens: [*tokens[:-1], ""]}),
    (CorruptInputError, "'alone' is not of two tokens", {"token_merges": lambda m: [*m, "alone"]}),
    (CorruptInputError, "'z z' is not of two tokens", {"token_merges": lambda m: [*m, "z z"]}),
    (CorruptInputError, "eos_token_id=9999", {"eos_token_id": 9999}),
    (
        CorruptInputError, "token_type is missing or no array",
        {"token_types": None, "int32": ("tokenizer.ggml.token_type", 1)},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("error", "says", "changes"), OTHER_VOCABULARIES)
def test_another_or_damaged_vocabulary_is_refused(error, says, changes, tokenizer, tmp_path):
    with pytest.raises(error, match=says):
        read_tokenizer(OpenFile(their_vocabulary(tmp_path / "a", tokenizer, **changes)))


# Written files
PROMPT = "the lazy fox, it's 12 dogs\n\n  über 🚀"
PRECISIONS = ("fp32", "fp16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


def gpt(tokenizer: Tokenizer, *, std=0.3, **fields) -> GPT:
    """A small model whose weights are so large that its greedy tokens vary."""
    shape = {"vocab_size": len(tokenizer), "n_positions": 256, "n_embd": 64, "n_layer": 2}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return random_gpt(0, std, **shape | ids | fields)


def tensors_of(path) -> dict[str, tuple[str, np.ndarray]]:
    """Every tensor as their library reads it: its type and its numbers, as a plain matrix."""
    return {
        t.name: (t.tensor_type.name, gguf.quants.dequantize(t.data, t.tensor_type))
        for t in gguf.GGUFReader(path).tensors
    }


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_gguf_package_reads_what_it_would_have_written(precision, tokenizer, tmp_path):
    model = gpt(tokenizer)
    write_our_gguf(model, tmp_path / "a.gguf", tokenizer=tokenizer, precision=precision)
    peer = tensors_of(tmp_path / "a.gguf")
    assert list(peer) == [to_theirs(name) for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        kind, numbers = peer[to_theirs(name)]
        vector = parameter.ndim == 1 or name == "wpe.weight"
        of_w = "q8_0" if name == "wte.weight" and precision[:2] in ("q4", "q5") else precision
        assert kind == ("F32" if vector else of_w.upper().replace("FP", "F"))
        ggml = gguf.GGMLQuantizationType[kind]
        array = parameter.detach().numpy()
        expected = gguf.quants.dequantize(gguf.quants.quantize(array, ggml), ggml)
        assert np.array_equal(numbers.reshape(array.shape), expected), name


def test_merges_equal_those_of_the_gguf_package(tokenizer, tmp_path):
    model = gpt(tokenizer, vocab_size=len(tokenizer) + 3, n_inner=96)
    write_our_gguf(model, tmp_path / "small.gguf", tokenizer=tokenizer, precision="q8_0")
    fields = gguf.GGUFReader(tmp_path / "small.gguf").fields
    pairs = {name: field.contents() for name, field in fields.items() if name[0] != "G"}
    tokens, types = (pairs.pop(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    merges = pairs.pop("tokenizer.ggml.merges")
    size = len(tokenizer)
    assert (len(tokens), len(types)) == (size + 3, size + 3)
    assert tokens[-4:] == ["<|endoftext|>", *(f"[PAD{size + i}]" for i in range(3))]
    normal, control, unused = (gguf.TokenType[n] for n in ("NORMAL", "CONTROL", "UNUSED"))
    assert types == [normal] * (size - 1) + [control] + [unused] * 3
    assert len(merges) == size - 257 and all(merge.count(" ") == 1 for merge in merges)
    keys = gguf.Keys
    arch = {"arch": "gpt2"}
    assert pairs.pop(keys.LLM.CONTEXT_LENGTH.format(**arch)) == 256
    assert pairs == {
        keys.General.ARCHITECTURE: "gpt2",
        keys.General.TYPE: gguf.GGUFType.MODEL,
        keys.General.NAME: "small",
        keys.General.FILE_TYPE: gguf.LlamaFileType.MOSTLY_Q8_0,
        keys.General.QUANTIZATION_VERSION: gguf.GGML_QUANT_VERSION,
        keys.LLM.EMBEDDING_LENGTH.format(**arch): 64,
        keys.LLM.BLOCK_COUNT.format(**arch): 2,
        keys.LLM.FEED_FORWARD_LENGTH.format(**arch): 96,
        keys.Attention.HEAD_COUNT.format(**arch): 4,
        keys.Attention.LAYERNORM_EPS.format(**arch): pytest.approx(1e-5),
        keys.Tokenizer.MODEL: "gpt2",
        keys.Tokenizer.PRE: "gpt-2",
        keys.Tokenizer.BOS_ID: tokenizer.bos_token_id,
        keys.Tokenizer.EOS_ID: tokenizer.eos_token_id,
        keys.Tokenizer.ADD_BOS: False,
        keys.Tokenizer.ADD_EOS: False,
        "tiedgpt.tie_word_embeddings": True,
    }


def test_a_tied_matrix_is_written_once_or_twice_on_request(tokenizer, tmp_path):
    model, sizes = gpt(tokenizer), {}
    for twice in (False, True):
        path = tmp_path / f"{twice}.gguf"
        write_our_gguf(model, path, tokenizer=tokenizer, duplicate_head=twice)
        peer = tensors_of(path)
        assert ("output.weight" in peer) is twice
        sizes[twice] = path.stat().st_size
        loaded = load(path)
        assert loaded.model.head is None
        assert any("equal" in note for note in loaded.notes) is twice
    copy = model.wte.weight.numel() * 4
    assert copy <= sizes[True] - sizes[False] < copy + 128


@pytest.mark.parametrize("precision", ["q8_0", "q4_1"])
def test_rows_not_divisible_by_32_stay_float16(precision, tokenizer, tmp_path):
    model = gpt(tokenizer, n_embd=40)
    write_our_gguf(model, tmp_path / "a.gguf", tokenizer=tokenizer, precision=precision)
    kinds = {name: kind for name, (kind, _) in tensors_of(tmp_path / "a.gguf").items()}
    assert kinds["token_embd.weight"] == kinds["blk.0.ffn_up.weight"] == "F16"
    assert kinds["blk.0.ffn_down.weight"] == precision.upper()  # rows of 160


@pytest.mark.parametrize("tied", [True, False])
def test_the_vocabulary_matrices_get_the_requested_precision(tied, tokenizer, tmp_path):
    model, path = gpt(tokenizer, tie_word_embeddings=tied), tmp_path / "a.gguf"
    for w_precision, kind in ((None, "Q8_0"), ("q4_0", "Q4_0"), ("fp16", "F16")):
        write_our_gguf(model, path, tokenizer=tokenizer, precision="q4_0", w_precision=w_precision)
        kinds = {name: of for name, (of, _) in tensors_of(path).items()}
        names = ["token_embd.weight"] + ["output.weight"] * (not tied)
        assert [kinds[name] for name in names] == [kind] * len(names)
        assert kinds["blk.1.attn_qkv.weight"] == "Q4_0"
    with pytest.raises(UserError, match="w_precision must be one of fp32"):
        write_our_gguf(model, path, tokenizer=tokenizer, w_precision="q4_k")


def chat_model(tokenizer, directory, template=CHATML):
    """A model that chats, as `tiedgpt tune` leaves it."""
    tokenizer = tokenizer.with_special_tokens(template.tokens)
    model = gpt(tokenizer, eos_token_id=tokenizer.eos_token_id, std=0.05)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    write_template(template, tokenizer, directory)
    return tokenizer


MESSAGES = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "a dog"}]


def go(template: str, messages) -> str:
    """Render the few template actions as Go's engine does."""
    before, body, after = re.fullmatch(
        r"(.*?)\{\{ range \.Messages \}\}(.*)\{\{ end \}\}\{\{ end \}\}(.*)", template
    ).groups()

    def literal(text, content=""):
        parts = re.findall(r'\{\{ (".*?(?<!\\)"|\.Content) \}\}', text)
        return "".join(content if part == ".Content" else json.loads(part) for part in parts)

    roles = re.findall(r'if eq \.Role "(\w+)" \}\}(.*?)(?=\{\{ else|$)', body)
    texts = [literal(dict(roles)[m["role"]], m["content"]) for m in messages]
    return literal(before) + "".join(texts) + literal(after)


SYSTEM = 'You are "kind".\n\nYou are a "clerk"'
CLERK = replace(CHATML, default_system=SYSTEM)


@pytest.mark.parametrize("template", [CHATML, PLAIN, CLERK], ids=["chatml", "plain", "kind"])
def test_the_file_and_its_modelfile_chat_as_the_model_was_tuned(template, tokenizer, tmp_path):
    tokenizer = chat_model(tokenizer, tmp_path / "chat", template)
    assert main(["convert", str(tmp_path / "chat"), str(tmp_path / "a.gguf")]) == 0
    prompt = "".join(piece.text for piece in template.prompt(MESSAGES))
    fields = gguf.GGUFReader(tmp_path / "a.gguf").fields
    pairs = {name: field.contents() for name, field in fields.items()}
    (im_end,) = tokenizer.encode("<|im_end|>", allow_special=True)[:1]
    assert pairs[gguf.Keys.Tokenizer.EOS_ID] == tokenizer.eos_token_id
    assert pairs.get(gguf.Keys.Tokenizer.EOT_ID) == (None if template is PLAIN else im_end)
    # A plain Jinja, without transformers' tags around what is trained.
    jinja = jinja2.Environment().from_string(pairs[gguf.Keys.Tokenizer.CHAT_TEMPLATE])
    options = {"add_generation_prompt": True, "eos_token": "<|endoftext|>"}
    assert jinja.render(messages=MESSAGES, **options) == prompt
    modelfile = (tmp_path / "a.Modelfile").read_text()
    system = f'SYSTEM """{SYSTEM}"""\n'
    assert (system in modelfile) == (template is CLERK)
    lines = modelfile.replace(system, "").splitlines()
    assert lines[:2] == ["FROM ./a.gguf", "PARAMETER num_ctx 256"]
    (text,) = re.findall(r'^TEMPLATE """(.*)"""$', "\n".join(lines), re.MULTILINE)
    sent = MESSAGES if template is not CLERK else [{"role": "system", "content": SYSTEM}, *MESSAGES]
    assert go(text, sent) == prompt  # Ollama adds the message of SYSTEM
    stops = ["<|endoftext|>", *([] if template is PLAIN else ["<|im_end|>"])]
    assert lines[3:] == [f'PARAMETER stop "{stop}"' for stop in stops]


@pytest.mark.parametrize("system", ['a """\nb', '"""\n', 'a"""  \nb'])
def test_a_system_message_that_would_end_early_in_a_modelfile_is_refused(
    system, tokenizer, tmp_path
):
    with pytest.raises(UserError, match="three quotes"):
        write_our_gguf(
            gpt(tokenizer), tmp_path / "a.gguf", tokenizer=tokenizer, ollama_system=system
        )
    assert not list(tmp_path.iterdir())


def test_the_modelfile_of_a_base_model_sends_the_plain_prompt(tokenizer, tmp_path):
    write_our_gguf(gpt(tokenizer), tmp_path / "a.gguf", tokenizer=tokenizer)
    assert 'TEMPLATE """{{ .Prompt }}"""' in (tmp_path / "a.Modelfile").read_text()


@pytest.mark.parametrize(
    ("precision", "largest"),
    [
        (name, factor * 65504)
        for name, factor in {"q8_0": 127, "q5_0": 16, "q4_0": 8, "q5_1": 1, "q4_1": 1}.items()
    ],
)
def test_weights_that_are_not_finite_or_too_large_for_their_scale_are_refused(
    precision, largest, tokenizer, tmp_path
):
    """A block stores its largest number over 127, 16 or 8, or its least number, as float16."""
    model = gpt(tokenizer)
    weight = model.h[1].mlp.c_fc.weight.detach()
    options = {"tokenizer": tokenizer, "precision": precision}
    for number in (np.nan, np.nextafter(np.float32(largest), np.float32(np.inf))):
        weight[3, 5] = float(number)
        with pytest.raises(UserError, match=r"blk\.1\.ffn_up\.weight"):
            write_our_gguf(model, tmp_path / "a.gguf", **options)
        assert not list(tmp_path.iterdir())
    weight[3, 5] = largest
    write_our_gguf(model, tmp_path / "a.gguf", **options)


def merged(tokenizer: Tokenizer, **changes) -> Tokenizer:
    """A tokenizer of the same tokens with something else about it."""
    stored = json.loads(tokenizer.to_json())["model"]
    pairs = [tuple(merge) for merge in stored["merges"]]
    values = {"vocab": stored["vocab"], "merges": pairs}
    rust = byte_level_tokenizer(models.BPE(**{**values, **changes.get("model", {})}))
    for name, value in changes.items():
        if name != "model":
            setattr(rust, name, value)
    rust.add_special_tokens(["<|endoftext|>"])
    return Tokenizer(rust)


NO_IDS = {"bos_token_id": None, "eos_token_id": None}


def bpe(*special: str, merged_pair: bool = True) -> Tokenizer:
    """A tokenizer of bytes, with a merge or without."""
    tokens, merges = ([*BYTE_ALPHABET, "he"], [("h", "e")]) if merged_pair else (BYTE_ALPHABET, [])
    rust = byte_level_tokenizer(
        models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges)
    )
    rust.add_special_tokens(list(special))
    return Tokenizer(rust)


def test_tokenizers_that_llama_cpp_lacks_are_refused_by_name(tokenizer, tmp_path):
    kept = {byte: id for id, byte in enumerate(BYTE_ALPHABET[:200])}
    digits = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    refused = {
        "none is given": (None, {}),
        "of kind 'char'": (Tokenizer.characters(TEXTS), {}),
        "another pre_tokenizer": (merged(tokenizer, pre_tokenizer=digits), {}),
        "another normalizer": (merged(tokenizer, normalizer=normalizers.NFC()), {}),
        "ignore_merges": (merged(tokenizer, model={"ignore_merges": True}), {}),
        "lacks 56 of the 256 bytes": (merged(tokenizer, model={"vocab": kept, "merges": []}), {}),
        "without merges": (bpe("<|endoftext|>", merged_pair=False), NO_IDS),
        "eos_token_id=319 is no token": (tokenizer, {"vocab_size": 320, "eos_token_id": 319}),
        "token 11": (bpe(), NO_IDS),
    }
    for why, (other, fields) in refused.items():
        with pytest.raises(UserError, match=why):
            write_our_gguf(gpt(tokenizer, **fields), tmp_path / "a.gguf", tokenizer=other)


def test_tokens_named_like_padding_are_not_duplicated(tokenizer, tmp_path):
    model = gpt(tokenizer, bos_token_id=None, eos_token_id=257)
    write_our_gguf(model, tmp_path / "a", tokenizer=bpe("<|endoftext|>", "[PAD300]"))
    tokens = gguf.GGUFReader(tmp_path / "a").fields["tokenizer.ggml.tokens"].contents()
    assert len(set(tokens)) == len(tokenizer)
    assert len(read_tokenizer(OpenFile(tmp_path / "a"))) == 259


def llama(path, **options):
    """The file in llama.cpp, with the cache in full precision and one thread."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
        return llama_cpp.Llama(
            str(path), n_ctx=256, n_threads=1, verbose=False, logits_all=True, type_k=0, type_v=0,
            flash_attn=False, **options,
        )  # fmt: skip


def greedy(peer, ids: list[int], n: int) -> list[int]:
    tokens = peer.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0)
    return [token for token, _ in zip(tokens, range(n), strict=False)]


def logits(peer, ids: list[int]) -> np.ndarray:
    peer.reset()
    peer.eval(ids)
    return np.array(peer.scores[: len(ids)])


def table_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU as ggml has it on CPUs: looked up by float16, in float16."""
    looked_up = F.gelu(x.half().float(), approximate="tanh").half().float()
    return torch.where(x.abs() >= 10, F.relu(x), looked_up)


SHAPES = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "padded": {"vocab_size": 320},
    "without biases": {"bias": False, "n_inner": 96, "layer_norm_epsilon": 1e-3},
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_llama_cpp_computes_and_generates_the_same_text(shape, tokenizer, tmp_path):
    model = gpt(tokenizer, **SHAPES[shape])
    path = tmp_path / "a.gguf"
    write_our_gguf(
        model, path, tokenizer=tokenizer, precision="fp32", duplicate_head=shape == "padded"
    )
    peer = llama(path)
    ids = tokenizer.encode(PROMPT)
    assert peer.tokenize(PROMPT.encode(), add_bos=False, special=False) == ids
    assert peer.detokenize(ids).decode() == PROMPT
    assert peer.token_eos() == tokenizer.eos_token_id
    completion = Engine(model, precision="fp32").generate(ids, max_new_tokens=32, temperature=0)
    assert len(completion.ids) == 32 and len(set(completion.ids)) > 8
    assert greedy(peer, ids, 32) == completion.ids
    computed = logits(peer, ids)
    with torch.no_grad():
        assert np.abs(model(torch.tensor([ids]))[0].numpy() - computed).max() < 0.02
        for block in model.h:
            block.mlp.activation = table_gelu
        ours = model(torch.tensor([ids]))[0].numpy()
    assert ours.std() > 1
    assert np.abs(ours - computed).max() < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_llama_cpp_predicts_20000_tokens_like_the_written_weights(precision, tokenizer, tmp_path):
    model = gpt(tokenizer, std=0.06)
    path = tmp_path / "a.gguf"
    write_our_gguf(model, path, tokenizer=tokenizer, precision=precision)
    ids = torch.randint(len(tokenizer), (80, 256), generator=torch.Generator().manual_seed(0))
    peer, loss = llama(path), 0.0
    for row in ids:
        logprobs = torch.from_numpy(logits(peer, row.tolist())).log_softmax(-1)
        loss -= float(logprobs[:-1].gather(1, row[1:, None]).sum()) / (80 * 255)
    with torch.no_grad():
        model = load(path, dtype=torch.float32).model
        ours = float(model.loss(ids[:, :-1], ids[:, 1:]))
    assert np.exp(loss - ours) == pytest.approx(1, abs=0.005)


@pytest.mark.slow
def test_llama_cpp_reads_the_chat_template(tokenizer, tmp_path):
    chat_model(tokenizer, tmp_path / "chat")
    options = ["--precision", "q4_0"]
    assert main(["convert", str(tmp_path / "chat"), str(tmp_path / "a.gguf"), *options]) == 0
    peer = llama(tmp_path / "a.gguf")
    assert "<|im_start|>" in peer.metadata["tokenizer.chat_template"]
    reply = peer.create_chat_completion(MESSAGES[:1], max_tokens=4, temperature=0)
    assert reply["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.slow
def test_llama_cpp_splits_text_like_the_tokenizer(tokenizer, tmp_path):
    model = gpt(tokenizer)
    write_our_gguf(model, tmp_path / "a.gguf", tokenizer=tokenizer)
    peer = llama(tmp_path / "a.gguf")
    for text in [
        *TEXTS,
        "",
        " ",
        "\n\n\n a  b   c \t\t d\r\n",
        "We'll they've I'm 'S 'T it''s",
        "x² ½ Ⅷ 漢字 かな кириллица  mixed123abc 4.5,6",
        "<|endoftext|> is text here",
    ]:
        ids = peer.tokenize(text.encode(), add_bos=False, special=False) if text else []
        assert ids == tokenizer.encode(text), text
    special = peer.tokenize(b"the<|endoftext|>", add_bos=False, special=True)
    assert special == tokenizer.encode("the<|endoftext|>", allow_special=True)


@pytest.mark.slow
def test_files_quantized_by_llama_cpp_load_like_in_the_gguf_package(tokenizer, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    model = gpt(tokenizer, n_embd=256, std=0.05)
    write_our_gguf(model, tmp_path / "a.gguf", tokenizer=tokenizer, precision="fp32")
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    places = (str(tmp_path / name).encode() for name in ("a.gguf", "q4.gguf"))
    assert llama_cpp.llama_model_quantize(*places, options) == 0
    loaded = load(tmp_path / "q4.gguf")
    assert any("Q4_K" in note for note in loaded.notes)
    for name, (_, numbers) in tensors_of(tmp_path / "q4.gguf").items():
        ours = loaded.model.get_parameter(to_ours(name)).detach().numpy()
        assert np.array_equal(ours, numbers.reshape(ours.shape)), name
    ids = tokenizer.encode(PROMPT)
    with torch.no_grad():
        ours = loaded.model(torch.tensor([ids]))[0].numpy()
    assert np.corrcoef(ours.ravel(), logits(llama(tmp_path / "q4.gguf"), ids).ravel())[0, 1] > 0.99
