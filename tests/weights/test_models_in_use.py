"""The GPT-2s that people have, small and random: each loads, runs and is saved as in transformers.

A row has the settings of a model of the hub, as its config.json and the names in its file state
them. Sizes are small where the model is large.
"""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from tests.tie.checkpoints import their_gpt2
from tiedgpt import GPT, Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.errors import UserError
from tiedgpt.infer import Engine
from tiedgpt.tie import audit
from tiedgpt.weights.load import load

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoTokenizer, GPT2LMHeadModel

REMOVE = object()
TEXT = "the cat sat on the mat, and the dog ate 12 hats. Straße, naïve, 日本 \n\n  x"


def keep(state: dict) -> dict:
    return state


def with_masks(state: dict) -> dict:
    """Return the tensors of files before transformers 4.20: with masks and without the head."""
    masks = {}
    for name in [name for name in state if name.endswith("attn.c_attn.weight")]:
        attention = name.removesuffix("c_attn.weight")
        masks[f"{attention}bias"] = torch.ones(1, 1, 31, 31, dtype=torch.uint8).tril()
        masks[f"{attention}masked_bias"] = torch.tensor(-1e4)
    return {n: t for n, t in state.items() if n != "lm_head.weight"} | masks


def before_2019(state: dict) -> dict:
    """Return the tensors of DialoGPT's files: fp16, and the head under its first name."""
    head = state["lm_head.weight"]
    half = {n: t.half() for n, t in state.items() if n != "lm_head.weight"}
    return half | {"lm_head.decoder.weight": head.half()}


def body(state: dict) -> dict:
    """Return the tensors of gpt2's file, whose names have no prefix."""
    return {n.removeprefix("transformer."): t for n, t in with_masks(state).items()}


def half(state: dict) -> dict:
    return {name: tensor.half() for name, tensor in state.items()}


@dataclass(frozen=True)
class Row:
    """A model of the hub."""

    sizes: dict = field(default_factory=dict)
    """Settings of transformers' class that change the computation."""
    config: dict = field(default_factory=dict)
    """Other entries of config.json, as its authors left them."""
    tensors: Callable[[dict], dict] = keep
    """Function from the class's state dict to the tensors of the file."""
    file: str = "model.safetensors"
    verdict: str = "tied, stored twice"
    """Verdict of the audit; the class's own state dict holds the head too."""
    notes: tuple[str, ...] = ()
    """Words in the notes of loading."""
    pad_tokens: tuple[str, ...] = ()
    """Special tokens of its tokenizer, besides the end of text."""
    is_exact: bool = True
    """Whether its weights are saved again bit for bit."""
    tolerance: float = 2e-6
    """Allowed size of the logits' differences, relative to the logits."""


SMALL = {"vocab_size": 311, "n_positions": 31, "n_embd": 28, "n_layer": 3, "n_head": 2}
SMALL |= {"bos_token_id": 0, "eos_token_id": 0}
OLD = {
    "architectures": ["GPT2LMHeadModel"], "n_ctx": 31, "initializer_range": 0.02,
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
ROWS = {
    "gpt2": Row(config=OLD, tensors=body, verdict="tied"),
    "distilgpt2": Row(
        {"n_layer": 2}, OLD | {"_num_labels": 1, "id2label": {"0": "LABEL_0"}},
        with_masks, "pytorch_model.bin", "tied",
    ),
    "DialoGPT": Row({}, OLD | {"n_ctx": 1024}, before_2019, "pytorch_model.bin"),
    "sshleifer/tiny-gpt2": Row(
        {"n_embd": 2, "n_head": 2, "n_layer": 2}, OLD, with_masks, "pytorch_model.bin", "tied"
    ),
    "hf-internal-testing/tiny-random-gpt2": Row(
        {"vocab_size": 1000, "n_positions": 64, "n_embd": 32, "n_layer": 5, "n_head": 4,
         "n_inner": 37, "bos_token_id": 98,
         "eos_token_id": 98, "pad_token_id": 98},
        {"attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
         "intermediate_size": 37, "type_vocab_size": 16, "gradient_checkpointing": False},
    ),
    "Cerebras-GPT": Row(
        {"n_inner": 112, "activation_function": "gelu", "attn_pdrop": 0.0},
        {"scale_attn_weights": True, "use_cache": True}, with_masks, "pytorch_model.bin", "tied",
    ),
    "stanford-crfm": Row(
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
        OLD | {"gradient_checkpointing": False}, with_masks, "pytorch_model.bin", "tied",
        notes=("scale_attn_by_inverse_layer_idx",), is_exact=False,
    ),
    "unscaled attention": Row(
        {"scale_attn_weights": False}, notes=("scale_attn_weights",), is_exact=False
    ),
    "neither scale": Row(
        {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
        notes=("scale_attn_weights", "scale_attn_by_inverse_layer_idx"), is_exact=False,
    ),
    "the scale in fp16": Row(
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
        tensors=half, notes=("scale_attn_by_inverse_layer_idx",), is_exact=False, tolerance=2e-3,
    ),
    "uer/gpt2-chinese": Row(
        {"vocab_size": 21128, "n_embd": 12, "n_layer": 2, "bos_token_id": 50256},
        OLD | {"tokenizer_class": "BertTokenizer"}, with_masks, "pytorch_model.bin", "tied",
        notes=("50256",),
    ),
    "rinna/japanese-gpt2": Row(
        {"vocab_size": 317, "n_inner": 4 * 28, "bos_token_id": 1, "eos_token_id": 2},
        {"scale_attn_weights": True, "gradient_checkpointing": False}, with_masks,
        "pytorch_model.bin", "tied",
    ),
    "skt/kogpt2": Row(
        {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3},
        OLD | {"author": "Heewon Jeon", "created_date": "2021-04-28", "license": "CC-BY-NC-SA 4.0"},
        with_masks, "pytorch_model.bin", "tied", pad_tokens=("<pad>", "<unk>", "<mask>"),
    ),
    "ai-forever/rugpt3": Row(
        {"bos_token_id": 50256, "eos_token_id": 50256}, OLD | {"n_ctx": 2048}, with_masks,
        "pytorch_model.bin", "tied", notes=("50256",),
        pad_tokens=("<pad>", "<s>", "</s>", "<mask>"),
    ),
    "aubmindlab/aragpt2-base": Row(
        {"bos_token_id": 0, "eos_token_id": 0}, OLD, with_masks, "pytorch_model.bin", "tied",
        pad_tokens=("<|pad|>",),
    ),
    "dbmdz/german-gpt2": Row(
        {"bos_token_id": 0, "eos_token_id": 0}, {"gradient_checkpointing": False}, half,
        pad_tokens=("<|pad|>",),
    ),
    "nferruz/ProtGPT2": Row(
        {"n_layer": 4, "bos_token_id": 0, "eos_token_id": 0, "activation_function": "gelu_new"},
        {"_name_or_path": "/srv/models/protein", "model_max_length": 31}, with_masks,
        "pytorch_model.bin", "tied",
    ),
    "padded to 50,304": Row({"vocab_size": 50304, "n_embd": 12, "n_layer": 2}),
    "resized to 50,258": Row(
        {"vocab_size": 50258, "n_embd": 12, "n_layer": 2, "pad_token_id": 50257}
    ),
    "without n_ctx": Row({}, {"n_ctx": REMOVE}),
    "n_ctx unlike n_positions": Row({}, {"n_ctx": 17}),
    "tie_word_embeddings missing": Row({}, {"tie_word_embeddings": REMOVE}),
    "null everywhere": Row(
        {}, dict.fromkeys(
            ("n_inner", "pruned_heads", "quantization_config", "add_cross_attention",
             "scale_attn_by_inverse_layer_idx", "tie_word_embeddings", "is_encoder_decoder",
             "hidden_size"),
        ),
    ),
    "ends as a list": Row({"eos_token_id": [7, 11]}, notes=("11",)),
    "an end outside": Row({"eos_token_id": 50256, "bos_token_id": 50256}, notes=("50256",)),
    "gelu_pytorch_tanh": Row({"activation_function": "gelu_pytorch_tanh"}),
    "gelu_fast": Row({"activation_function": "gelu_fast"}),
    "gelu_accurate": Row({"activation_function": "gelu_accurate"}),
    "gelu_python_tanh": Row({"activation_function": "gelu_python_tanh"}),
    "gelu_python": Row({"activation_function": "gelu_python"}),
    "swish": Row({"activation_function": "swish"}),
    "relu": Row({"activation_function": "relu"}),
}  # fmt: skip
"""Settings by the model that has them."""


def write(directory: Path, row: Row) -> GPT2LMHeadModel:
    """Write a row's directory; return transformers' model of its numbers, in fp32."""
    peer = their_gpt2(**SMALL | row.sizes)
    directory.mkdir()
    values = peer.config.to_dict() | row.config
    values = {key: value for key, value in values.items() if value is not REMOVE}
    (directory / "config.json").write_text(json.dumps(values))
    tensors = {n: t.clone() for n, t in row.tensors(peer.state_dict()).items()}
    if row.file.endswith(".bin"):
        torch.save(tensors, directory / row.file)
    else:
        save_file(tensors, directory / row.file, {"format": "pt"})
    if any(tensor.dtype == torch.float16 for tensor in tensors.values()):
        peer = peer.half().float()
    return peer


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output = model(ids)
    return getattr(output, "logits", output)


def assert_close(ours: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert expected.std() > 0.05
    assert (ours - expected).norm() <= tolerance * expected.norm()


@pytest.fixture(params=ROWS)
def row(request) -> Row:
    return ROWS[request.param]


@pytest.mark.filterwarnings("ignore::tiedgpt.weights.load.CheckpointWarning")
def test_a_model_in_use_computes_the_same_as_in_transformers(row, tmp_path):
    peer = write(tmp_path / "m", row)
    report = audit(tmp_path / "m")
    assert (report.verdict, report.exit_code) == (row.verdict, 0)
    loaded = load(tmp_path / "m", dtype=torch.float32)
    for words in row.notes:
        assert any(words in note for note in loaded.notes), loaded.notes
    assert bool(loaded.notes) == bool(row.notes or row.verdict != "tied")

    ours, draw = loaded.model, torch.Generator().manual_seed(0)
    ids = torch.randint(peer.config.vocab_size, (2, ours.config.n_positions), generator=draw)
    assert_close(logits(ours, ids), logits(peer, ids), row.tolerance)
    generated = peer.generate(
        ids[:1, :5], max_new_tokens=13, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 5:].tolist()
    endless = GPT.from_pretrained(tmp_path / "m", dtype=torch.float32)
    endless.config = replace(ours.config, eos_token_id=None)
    for backend in ("torch", "kernels"):
        with Engine(endless, backend=backend, precision="fp32") as engine:
            completion = engine.generate(ids[0, :5].tolist(), max_new_tokens=13, temperature=0)
            assert completion.ids == generated, backend

    ours.save_pretrained(tmp_path / "again")
    again, info = GPT2LMHeadModel.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(info.values())
    assert_close(logits(again.eval(), ids), logits(peer, ids), row.tolerance)
    assert audit(tmp_path / "again").verdict == "tied"
    state = load_file(tmp_path / "again" / "model.safetensors")
    if row.is_exact:
        assert all(torch.equal(t, peer.state_dict()[n]) for n, t in state.items())


def write_tokenizer(directory: Path, row: Row) -> None:
    """Write GPT-2's kind of tokenizer with a row's special tokens, as `tokenizers` trains it."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    specials = ["<|endoftext|>", *row.pad_tokens]
    tokenizer.train_from_iterator([TEXT] * 9, 300, special_tokens=specials, show_progress=False)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 31}
    names |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), specials[0])
    (directory / "tokenizer_config.json").write_text(json.dumps(names))


NOT_BPE = ("uer/gpt2-chinese", "rinna/japanese-gpt2")
"""Rows with a tokenizer of another kind."""
REFUSED_NULLS = ("null everywhere",)
"""Rows whose config.json transformers' tokenizers refuse."""


@pytest.mark.filterwarnings("ignore::tiedgpt.weights.load.CheckpointWarning")
@pytest.mark.parametrize("name", [name for name in ROWS if name not in NOT_BPE + REFUSED_NULLS])
def test_its_tokenizer_and_its_gguf_are_the_same(name, tmp_path):
    row = ROWS[name]
    peer = write(tmp_path / "m", row)
    write_tokenizer(tmp_path / "m", row)
    texts = (TEXT, f"a {row.pad_tokens[0]} b" if row.pad_tokens else " a", "")
    peer_tokenizer, ours = (c.from_pretrained(tmp_path / "m") for c in (AutoTokenizer, Tokenizer))
    for text in texts:
        expected = peer_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, allow_special=True) == expected
        assert ours.decode(expected) == peer_tokenizer.decode(expected)
    options = ["--precision", "fp32", "--approximate-gelu"]
    command = ["convert", str(tmp_path / "m"), str(tmp_path / "m.gguf"), *options]
    if "relu" in name or "swish" in name:  # llama.cpp's gpt2 computes GELU
        assert main(command) == 1
        return
    assert main(command) == 0
    again = GPT.from_pretrained(tmp_path / "m.gguf")
    ids = torch.arange(3, 31)[None]
    assert_close(logits(again, ids), logits(peer, ids), max(row.tolerance, 3e-3))
    assert Tokenizer.from_pretrained(tmp_path / "m.gguf").encode(TEXT) == ours.encode(TEXT)


@pytest.mark.parametrize(
    "key",
    [
        "n_head", "n_layer", "n_embd", "n_positions", "vocab_size", "activation_function",
        "layer_norm_epsilon", "resid_pdrop", "scale_attn_weights", "num_attention_heads",
    ],
)  # fmt: skip
def test_a_null_that_transformers_has_no_value_for_is_refused(key, tmp_path):
    write(tmp_path / "m", Row(config={"n_head": REMOVE} | {key: None}))
    with pytest.raises(UserError, match=f"null for {key}") as refused:
        GPT.from_pretrained(tmp_path / "m")
    assert key in refused.value.hint


@pytest.mark.parametrize(
    ("entries", "verdict"),
    [
        ({"tie_word_embeddings": None}, "tied"),
        ({"tie_word_embeddings": None, "text_config": {"tie_word_embeddings": True}}, "tied"),
        ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}, "tied"),
        (
            {"tie_word_embeddings": None, "text_config": {"tie_word_embeddings": False}},
            "contradicts the claim",
        ),
        (
            {"tie_word_embeddings": REMOVE, "text_config": {"tie_word_embeddings": False}},
            "contradicts the claim",
        ),
    ],
)
def test_a_missing_null_or_nested_claim_is_read(entries, verdict, tmp_path):
    write(tmp_path / "m", Row(config=entries, tensors=with_masks))
    assert audit(tmp_path / "m").verdict == verdict
