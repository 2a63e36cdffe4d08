"""OpenAI's GPT-2 release: a TensorFlow checkpoint (`tensorflow_bundle.py`) and hparams.json.

The variables have the names of openai/gpt-2, src/model.py: `model/h0/attn/c_attn/w`, with g for a
gain, b for a bias, and w for the kernel of a convolution, (1, in, out). GPT-1's variables
(`openai_gpt1.py`) have the same names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiedgpt.errors import CorruptInputError
from tiedgpt.files import read_json
from tiedgpt.weights import tensorflow_bundle
from tiedgpt.weights.checkpoint import EMBEDDING, Checkpoint, GPTCheckpoint, LazyTensor
from tiedgpt.weights.huggingface import config_fields
from tiedgpt.weights.tensors import StoredTensor, printable

HPARAMS_FILE = "hparams.json"
HPARAMS = {
    "n_vocab": "vocab_size",
    "n_ctx": "n_positions",
    "n_embd": "n_embd",
    "n_head": "n_head",
    "n_layer": "n_layer",
}
"""Keys of hparams.json -> ours."""
TOKENS, POSITIONS = "model/wte", "model/wpe"
ONE_MATRIX = "model/we"
"""GPT-1's tokens and positions in one matrix (`openai_gpt1.py`)."""
CLASSIFIER = ("model/clf/w", "model/clf/b")
VARIABLE = r"model/(?:wte|wpe|we|ln_f/[gb]|h\d+/(?:ln_[12]/[gb]|(?:attn|mlp)/c_[a-z]+/[wb]))"
OPTIMIZER_STATE = re.compile(rf"(?:.*/)?({VARIABLE})/\w+")
"""The name of a variable, followed by the name of an optimizer's state for it."""
FUNCTIONS = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
"""What both of OpenAI's programs compute; no file says it."""
RELEASED_VOCABULARY, END_OF_TEXT = 50257, 50256


def detect(path: Path, head: bytes) -> bool:
    """Whether a file is the index of a TensorFlow checkpoint."""
    return tensorflow_bundle.is_index(path)


def read(path: Path) -> Checkpoint:
    """Read the index of a TensorFlow checkpoint, and hparams.json; raises as `read_bundle`."""
    tensors, files = tensorflow_bundle.read_bundle(path)
    return Checkpoint(
        path, "TensorFlow", tensors, hparams_in(path.parent), files=files,
        claim_source="a TensorFlow checkpoint does not say whether the head is tied",
    )  # fmt: skip


def hparams_in(directory: Path) -> dict[str, Any]:
    """Return `{"hparams": ...}` if the directory has hparams.json."""
    file = directory / HPARAMS_FILE
    return {"hparams": read_json(file)} if file.is_file() else {}


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT; an optimizer's state and counters are left out, and a note says so."""
    if ONE_MATRIX in checkpoint.tensors:
        from tiedgpt.weights import openai_gpt1

        return openai_gpt1.as_gpt(checkpoint)
    variables, notes = without_training(checkpoint.tensors)
    fields, foreign, more = config_of(checkpoint)
    tensors = by_our_names(checkpoint, variables)
    assumed: dict[str, Any] = dict(FUNCTIONS)
    if EMBEDDING in tensors and tensors[EMBEDDING].shape[:1] == (RELEASED_VOCABULARY,):
        assumed |= {"bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TEXT}
    return GPTCheckpoint(
        "OpenAI GPT-2", {**fields, "norm": "pre"}, tensors, assumed, foreign, (*notes, *more)
    )


def without_training(
    tensors: Mapping[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the model's variables, and notes on the tensors that were left out."""
    kept: dict[str, StoredTensor] = {}
    state, classifier = [], []
    for name, tensor in tensors.items():
        match = OPTIMIZER_STATE.fullmatch(name)
        if tensor.shape == () or (match and match[1] in tensors):
            state.append(name)
        elif name in CLASSIFIER:
            classifier.append(name)
        else:
            kept[name] = tensor
    notes = []
    if state:
        example = printable(state[0])[:80]
        notes.append(f"left out {len(state)} tensors that only training needs, such as {example}")
    if classifier:
        notes.append(f"left out the classifier: {', '.join(classifier)}")
    return kept, notes


def config_of(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return our fields, foreign keys and notes from hparams.json and config.json."""
    config = checkpoint.config
    fields, foreign = config_fields(config) if "model_type" in config else ({}, {})
    foreign = {k: value for k, value in foreign.items() if k not in ("hparams", "encoder_size")}
    hparams = config.get("hparams")
    hparams = hparams if isinstance(hparams, Mapping) else {}
    fields |= {HPARAMS[key]: value for key, value in hparams.items() if key in HPARAMS}
    unused = printable(", ".join(sorted(hparams.keys() - HPARAMS.keys())))[:200]
    notes = [f"these keys of {HPARAMS_FILE} are not used: {unused}"] if unused else []
    return fields, foreign, notes


def by_our_names(
    checkpoint: Checkpoint, variables: Mapping[str, StoredTensor]
) -> dict[str, LazyTensor]:
    """Return the variables under our names, matrices as (out, in); unknown names are kept."""
    tensors = {_our_name(name): _in_our_layout(tensor) for name, tensor in variables.items()}
    if len(tensors) < len(variables):
        raise CorruptInputError(
            f"{checkpoint.source} has a tensor twice: under OpenAI's name and under ours"
        )
    return tensors


def _our_name(name: str) -> str:
    if not re.fullmatch(VARIABLE, name):
        return name
    scope, _, last = name.removeprefix("model/").rpartition("/")
    if not scope:
        return f"{last}.weight"
    scope = re.sub(r"^h(\d+)/", r"h.\1.", scope).replace("/", ".")
    return f"{scope}.{'bias' if last == 'b' else 'weight'}"


def _in_our_layout(tensor: StoredTensor) -> LazyTensor:
    is_kernel = tensor.name.endswith("/w")
    if is_kernel and len(tensor.shape) == 3 and tensor.shape[0] == 1:
        tensor = tensor.reshaped(tensor.shape[1:])
    return LazyTensor(tensor, transposed=is_kernel)
