"""A model as the page's own JavaScript reads it: weights, vocabulary and template as bytes.

The bytes are safetensors, compressed. Matrices are fp32, fp16, or int8 with a scale for each row
(`NAME.scale`); W is there once. The metadata are `config`, `tokenizer`, `template`, `counts` and
`info`, each as JSON. page/model/ says how they are read.
"""

from __future__ import annotations

import copy
import json
import zlib
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.numpy import save

from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.text.bpe import BYTE_ALPHABET, END_OF_TEXT, greedy_tokens, unlike_gpt2
from tiedgpt.text.gpt1 import lower_case_tokenizer
from tiedgpt.weights.checkpoint import Program
from tiedgpt.weights.parameters import parameters_for

if TYPE_CHECKING:
    from tiedgpt.data.templates import Template
    from tiedgpt.text import Tokenizer
    from tiedgpt.tie.ledgers import Ledger

PAGE = Program("a page", fields=(
    "n_inner", "activation_function", "norm", "layer_norm_epsilon", "bias", "attention_windows",
    "tie_word_embeddings",
))  # fmt: skip
"""Program of page/model/."""
WIDTHS = {"fp32": 4, "fp16": 2, "int8": 1}
"""Bytes of a number of a matrix, by precision."""
SMALL = 500_000
"""Parameters up to which fp32 is the default, and above which int8 is."""
LARGEST = 127
"""Largest int8 value; -128 is not used, so that both signs have the same scale."""
FAST = 1
"""zlib's level: weights are noise, and the level changes little but the time."""


def choose_precision(model: GPT, precision: str) -> str:
    """Return fp32, fp16 or int8; auto decides by the model's size."""
    if precision != "auto":
        return precision
    return "fp32" if model.config.parameter_count() <= SMALL else "int8"


def page_tensors(model: GPT, precision: str) -> dict[str, np.ndarray]:
    """Return the tensors that the page holds, by name.

    Matrices are in the precision, int8 ones beside their scales (rows,); vectors are fp32. Raises
    `UserError` for a model that is no plain GPT (an adapter, another head), and for weights that
    are not finite.
    """
    tensors: dict[str, np.ndarray] = {}
    for name, parameter in parameters_for(PAGE, model).items():
        weight = parameter.detach().float().cpu().numpy()
        if not np.isfinite(weight).all():
            raise UserError(f"{name} holds nan or inf: a page needs finite weights")
        if weight.ndim == 1 or precision == "fp32":
            tensors[name] = weight
        elif precision == "fp16":
            tensors[name] = weight.astype(np.float16)
        else:
            tensors[name], tensors[f"{name}.scale"] = quantize_rows(weight)
    return tensors


def page_ledger(counted: Ledger, tensors: dict[str, np.ndarray]) -> Ledger:
    """Return a model's ledger with the types and sizes of the page's tensors."""
    rows = []
    for row in counted.rows:
        (name,) = (name for name in row.names if name in tensors)
        stored = [tensors[key] for key in (name, f"{name}.scale") if key in tensors]
        n_bytes = sum(tensor.nbytes for tensor in stored)
        rows.append(replace(row, dtype=str(stored[0].dtype), bytes=n_bytes))
    return replace(counted, rows=tuple(rows), bytes=sum(row.bytes for row in rows))


def quantize_rows(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix (rows, columns) as int8, and the scale (rows,) of each row."""
    scale = np.abs(weight).max(axis=1) / np.float32(LARGEST)
    scale = np.where(scale > 0, scale, np.float32(1))
    return np.rint(weight / scale[:, None]).astype(np.int8), scale


def round_weights(model: GPT, tensors: dict[str, np.ndarray]) -> GPT:
    """Return a copy of the model in fp32 with the weights that the page computes with."""
    rounded = copy.deepcopy(model).float()
    with torch.no_grad():
        for name, parameter in parameters_for(PAGE, rounded).items():
            weight = tensors[name].astype(np.float32)
            if (scale := tensors.get(f"{name}.scale")) is not None:
                weight = weight * scale[:, None]
            parameter.copy_(torch.from_numpy(weight))
    return rounded


def pack_model(
    tensors: dict[str, np.ndarray],
    model: GPT,
    tokenizer: Tokenizer | None,
    template: Template | None,
    **metadata: Any,
) -> bytes:
    """Return the compressed bytes that page/model/worker.js opens."""
    metadata |= {
        "config": asdict(model.config),
        "tokenizer": None if tokenizer is None else tokenizer_data(tokenizer),
        "template": None if template is None else template_data(template, tokenizer),
    }
    texts = {name: json.dumps(value) for name, value in metadata.items()}
    return zlib.compress(save(tensors, texts), FAST)


def tokenizer_data(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the data of page/model/tokenizer.js; raise `UserError` for other tokenizers."""
    stored = json.loads(tokenizer.to_json())
    model, added = stored["model"], stored["added_tokens"]
    odd = ["add_bos_token"] if tokenizer.begin_ids else []
    if odd := odd + _list_unknown_parts(tokenizer.kind, stored):
        raise UserError(
            f"the page's tokenizer does not do what this one asks for: {', '.join(odd)}",
            hint="tiedgpt serve shows the same page with any tokenizer",
        )
    vocabulary: dict[str, int] = model["vocab"]
    tokens: list[str | None] = [None] * len(tokenizer)
    for token, id in vocabulary.items():
        tokens[id] = token
    pairs = (
        pair if isinstance(pair, list) else pair.split(" ") for pair in model.get("merges", ())
    )
    return {
        "kind": tokenizer.kind,
        "tokens": tokens,
        "merges": [vocabulary[part] for pair in pairs for part in pair],
        "special": {token["id"]: token["content"] for token in added},
        "unknown": vocabulary.get(model.get("unk_token") or ""),
        "end": tokenizer.eos_token_id,
    }


def _list_unknown_parts(kind: str, stored: dict[str, Any]) -> list[str]:
    """Return the settings of a `tokenizer.json` that the page's tokenizer does not have."""
    if kind not in ("bpe", "gpt1", "char"):
        return [kind]
    model = stored["model"]
    odd = [token["content"] for token in stored["added_tokens"] if not token["special"]]
    odd += greedy_tokens(stored)
    if kind == "bpe":
        has_all_bytes = model["vocab"].keys() >= set(BYTE_ALPHABET)
        odd += [key for key in unlike_gpt2(stored) if key != "unk_token" or not has_all_bytes]
    if kind == "gpt1":
        from tokenizers import models

        plain = json.loads(lower_case_tokenizer(models.BPE()).to_str())
        odd += [key for key in ("normalizer", "pre_tokenizer") if stored[key] != plain[key]]
        odd += [key for key in ("dropout", "fuse_unk", "ignore_merges") if model.get(key)]
    return odd


def template_data(template: Template, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return a chat template with the ids of its special tokens, and those that end a reply."""
    if tokenizer is None:
        raise UserError("a chat template needs the model's tokenizer")
    specials = {token: tokenizer.encode(token, allow_special=True)[0] for token in template.tokens}
    if tokenizer.eos_token_id is not None:
        specials[END_OF_TEXT] = tokenizer.eos_token_id
    roles = {name: asdict(role) for name, role in template.roles.items()}
    ends = template.end_ids(tokenizer)
    return {
        "begin": template.begin,
        "roles": roles,
        "specials": specials,
        "ends": ends,
        "default_system": template.default_system,
    }
