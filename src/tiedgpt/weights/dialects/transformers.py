"""transformers' GPT-2 and OpenAI GPT, and our own directories, which have the same layout.

The matrices of the blocks lie as (in, out), under OpenAI's names after a prefix; config.json stands
beside them. A file alone says neither how many heads there are nor which model type it is.
"""

from __future__ import annotations

import re
from typing import Any

from tiedgpt.errors import CorruptInputError
from tiedgpt.weights.checkpoint import Checkpoint, GPTCheckpoint, LazyTensor
from tiedgpt.weights.config_json import TRANSFORMERS_DEFAULTS, config_fields, model_type_from
from tiedgpt.weights.names import EMBEDDING, HEAD, TIEDGPT, from_file, is_transposed
from tiedgpt.weights.tensors import StoredTensor, printable

BODY_BIAS = re.compile(r"(h\.\d+\..+|ln_f)\.bias")
"""A classifier's bias says nothing of the body's."""


def recognizes(checkpoint: Checkpoint) -> bool:
    """Whether it is a format in which transformers writes."""
    return checkpoint.format in ("safetensors", "torch")


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return what is there, mask buffers left out."""
    claims = checkpoint.config
    model_type = model_type_from(claims)
    tensors: dict[str, LazyTensor] = {}
    for their_name, stored in checkpoint.tensors.items():
        name = from_file(their_name, model_type)
        if name is None:
            continue
        if name in tensors:
            raise CorruptInputError(
                f"{checkpoint.source} holds {printable(name)} twice, with and without its prefix"
            )
        tensors[name] = LazyTensor(stored, transposed=is_transposed(name))
    if EMBEDDING not in tensors and HEAD not in tensors:
        raise CorruptInputError(
            f"{checkpoint.source} holds no GPT: there is no {EMBEDDING} among its tensors"
        )
    fields, foreign = config_fields(claims)
    tensors, fields, notes = _without_biases(tensors, fields)
    assumed = TRANSFORMERS_DEFAULTS if "model_type" in claims else {}
    layout = "tiedgpt" if model_type is TIEDGPT else f"transformers {model_type.name}"
    return GPTCheckpoint(layout, fields, tensors, assumed, foreign, notes)


def _without_biases(
    tensors: dict[str, LazyTensor], fields: dict[str, Any]
) -> tuple[dict[str, LazyTensor], dict[str, Any], tuple[str, ...]]:
    """Leave out the zeros that stand for biases where the config says that there are none."""
    biases = {name for name in tensors if BODY_BIAS.fullmatch(name)}
    if fields.get("bias") is not False or not biases:
        return tensors, fields, ()
    if any(_has_values(tensors[name].stored) for name in biases):
        note = "config.json says that there are no biases, but they are not zero: they are kept"
        return tensors, fields | {"bias": True}, (note,)
    return {name: t for name, t in tensors.items() if name not in biases}, fields, ()


def _has_values(stored: StoredTensor) -> bool:
    return stored.is_decodable and bool(stored.rows(0, stored.matrix_shape[0]).any())
