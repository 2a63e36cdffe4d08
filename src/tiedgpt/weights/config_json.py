"""config.json of transformers <-> GPTConfig.

Keys that change nothing here are carried along and saved again. Keys that change the computation
and that we do not have are refused by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.names import GPT2, MODEL_TYPES, PACKED, TIEDGPT, ModelType, model_type_of

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}
"""Keys that change the computation, with the values under which it is ours."""

ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""Other names under which transformers takes the same keys."""

FIELDS = tuple(GPTConfig.__dataclass_fields__)
TRANSFORMERS_DEFAULTS = {
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
"""What transformers assumes where a config.json of its own is silent."""


def model_type_from(config: Mapping[str, Any]) -> ModelType:
    """Return the model type that a config.json claims; another family's is a `UserError`."""
    name = config.get("model_type", GPT2.name)
    if not isinstance(name, str) or name not in MODEL_TYPES:
        raise UserError(
            f"this is a {name!r} model; tiedgpt runs the GPT family: {', '.join(MODEL_TYPES)}"
        )
    return MODEL_TYPES[name]


def config_fields(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a config.json into our fields and the keys that change nothing here."""
    model_type = model_type_from(config)
    for key, neutral in NEUTRAL.items():
        if key in config and config[key] not in neutral:
            raise UserError(
                f"the model's config has {key}={config[key]!r}, which changes the computation and "
                "is not built here"
            )
    config = dict(config)
    for alias, key in ALIASES.items():
        if alias in config and config.setdefault(key, config[alias]) != config.pop(alias):
            raise CorruptInputError(f"the model's config has two different {key} (as {alias})")
    if not isinstance(config.get("tie_word_embeddings", True), bool):
        raise CorruptInputError(
            f"tie_word_embeddings is {config['tie_word_embeddings']!r}, neither true nor false"
        )
    theirs = {model_type.config_names.get(ours, ours): ours for ours in _fields_of(model_type)}
    ours = {theirs[key]: value for key, value in config.items() if key in theirs}
    foreign = {key: value for key, value in config.items() if key not in theirs}
    if "activation_function" in ours:
        ours["activation_function"] = _activation(ours["activation_function"], model_type)
    if model_type.norm is not None:
        ours["norm"] = model_type.norm
    return ours, foreign


def _fields_of(model_type: ModelType) -> tuple[str, ...]:
    """Return the fields that its config.json can hold; transformers' classes ignore `bias`."""
    if model_type in (TIEDGPT, PACKED):
        return FIELDS
    return tuple(name for name in FIELDS if name not in ("norm", "attention_windows"))


def _activation(name: Any, model_type: ModelType) -> str:
    same_as_tanh = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new", "swish": "silu"}
    names = {theirs: ours for ours, theirs in model_type.activations.items()} | same_as_tanh
    if not isinstance(name, str) or name not in names:
        raise UserError(f"the activation {name!r} is not built here; there are {', '.join(names)}")
    return names[name]


def drop_foreign_ids(fields: dict[str, Any]) -> None:
    """Drop special ids outside the vocabulary (transformers' default 50256), with a warning."""
    dropped = []
    for name in ("bos_token_id", "eos_token_id"):
        value = fields.get(name)
        if isinstance(value, list):  # some configs list several ends; the first is the model's own
            fields[name] = value = value[0] if value else None
        if type(value) is int and not 0 <= value < fields["vocab_size"]:
            dropped.append(f"{name}={value}")
            fields[name] = None
    if dropped:
        warnings.warn(
            f"{' and '.join(dropped)} outside this model's vocabulary of {fields['vocab_size']} "
            "tokens: dropped",
            stacklevel=2,
        )


def config_json(
    config: GPTConfig, foreign: Mapping[str, Any], dtype: str, model_type: ModelType | None = None
) -> dict[str, Any]:
    """Return the config.json under which transformers builds the same model.

    What no class of transformers computes is described under our own `model_type`, as is what
    `model_type` names.
    """
    model_type = model_type or model_type_of(config)
    values = {
        name: value for name, value in asdict(config).items() if name in _fields_of(model_type)
    }
    if config.bias:
        del values["bias"]
    values["activation_function"] = model_type.activations[config.activation_function]
    named = {model_type.config_names.get(name, name): value for name, value in values.items()}
    fixed = {
        "model_type": model_type.name,
        "architectures": [model_type.architecture],
        "n_ctx": config.n_positions,
        "torch_dtype": dtype,
    }
    kept = {key: value for key, value in foreign.items() if key not in ("dtype", *fixed)}
    return fixed | named | kept
