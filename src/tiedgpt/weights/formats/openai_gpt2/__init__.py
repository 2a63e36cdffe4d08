"""OpenAI's GPT-2 release: a TensorFlow checkpoint (`tensorflow_bundle.py`) and hparams.json.

The variables have the names of openai/gpt-2, src/model.py: `model/h0/attn/c_attn/w`, with g for a
gain, b for a bias, and w for the kernel of a convolution, (1, in, out).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tiedgpt.files import read_json
from tiedgpt.weights.checkpoint import EMBEDDING, Checkpoint, Claim, Format, GPTCheckpoint
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.formats.openai_gpt2.tensorflow_bundle import is_index, read_bundle
from tiedgpt.weights.formats.transformers import config_fields
from tiedgpt.weights.tensors import StoredTensor, printable

HPARAMS = {"n_vocab": "vocab_size", "n_ctx": "n_positions", "n_embd": "n_embd",
           "n_head": "n_head", "n_layer": "n_layer"}  # fmt: skip
"""Keys of hparams.json -> ours."""
VARIABLE = r"model/(?:wte|wpe|ln_f/[gb]|h\d+/(?:ln_[12]/[gb]|(?:attn|mlp)/c_[a-z]+/[wb]))"
OPTIMIZER_STATE = re.compile(rf"(?:.*/)?({VARIABLE})/\w+")
"""A variable's name, followed by that of an optimizer's state for it."""
RELEASED_VOCABULARY, END_OF_TEXT = 50257, 50256


def open_bundle(index: OpenFile) -> Checkpoint:
    """Read the index of a TensorFlow checkpoint, and hparams.json; raises as `read_bundle`."""
    path, (tensors, files) = index.path, read_bundle(index)
    file = path.parent / "hparams.json"
    hparams = read_json(file, index.read) if file.is_file() else {}
    config = {HPARAMS[key]: value for key, value in hparams.items() if key in HPARAMS}
    claim = Claim(source="a TensorFlow checkpoint does not say whether the head is tied")
    return Checkpoint(path, "TensorFlow", tensors, config, files=files, claim=claim)


def to_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT; an optimizer's state and counters are left out, and a note says so."""
    variables, notes = drop_training_state(checkpoint.tensors)
    fields, foreign = config_fields(checkpoint.config)
    tensors = rename_variables(variables)
    assumed: dict[str, Any] = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
    if EMBEDDING in tensors and tensors[EMBEDDING].shape[:1] == (RELEASED_VOCABULARY,):
        assumed |= {"bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TEXT}
    fields["norm"] = "pre"
    return GPTCheckpoint("OpenAI GPT-2", fields, tensors, assumed, foreign, tuple(notes))


def drop_training_state(
    tensors: Mapping[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the language model's variables, and a note on the tensors that were left out."""
    variables, left_out = {}, []
    for name, tensor in tensors.items():
        match = OPTIMIZER_STATE.fullmatch(name)
        if tensor.shape == () or (match and match[1] in tensors):
            left_out.append(printable(name)[:80])
        else:
            variables[name] = tensor
    if not left_out:
        return variables, []
    return variables, [f"left out {len(left_out)} tensors of the training, such as {left_out[0]}"]


def rename_variables(variables: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the variables under our names, matrices as (out, in); unknown names are kept."""
    tensors = {}
    for name, tensor in variables.items():
        is_kernel = name.endswith("/w")
        if is_kernel and len(tensor.shape) == 3 and tensor.shape[0] == 1:
            tensor = replace(tensor, shape=tensor.shape[1:], strides=None)
        if re.fullmatch(VARIABLE, name):
            name = re.sub(r"^h(\d)", r"h.\1", name.removeprefix("model/")).replace("/", ".")
            scope, _, last = name.rpartition(".")
            name = f"{scope}.bias" if last == "b" else f"{scope or last}.weight"
        tensors[name] = tensor.transpose() if is_kernel else tensor
    return tensors


FORMAT = Format(
    name="openai_gpt2",
    title="OpenAI's GPT-2",
    about="the TensorFlow checkpoint, read without TensorFlow; checksums are verified",
    about_tokenizer="`encoder.json`, `vocab.bpe`",
    detect=is_index,
    open=open_bundle,
    to_gpt=to_gpt,
    suffixes=(".index",),
    is_model_file=is_index,
    hub_patterns=(("model.ckpt*",),),
    hub_configs=("hparams.json",),
    packages=("google_crc32c",),
)
