"""Hugging Face checkpoints: GPT-2 and OpenAI GPT of transformers, and our own directories.

The tensors bear OpenAI's names after a prefix, the matrices of the blocks lie as (in, out), and
config.json stands next to them. Only config.json states the number of heads. Our own
directories (`model_type` "tiedgpt") have the same layout; they hold models that no class of
transformers computes. `writer.py` writes such directories.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tiedgpt.core.config import ACTIVATIONS, GPTConfig
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import (
    HEAD,
    NOT_COMPUTED,
    SIZES,
    Checkpoint,
    Claim,
    Format,
    GPTCheckpoint,
    Program,
    Writer,
    claim_in,
)
from tiedgpt.weights.containers import SUFFIXES, detect, open_container
from tiedgpt.weights.registry import defer
from tiedgpt.weights.tensors import StoredTensor, printable
from tiedgpt.weights.wrappers import BODY_PREFIX, without_wrappers

if TYPE_CHECKING:
    from torch import nn

DEFAULT_N_HEAD = 12
"""Number of heads that transformers takes for a config without one."""
DEFAULTS = {name: field.default for name, field in GPTConfig.__dataclass_fields__.items()}
FIELDS = tuple(DEFAULTS)
WRITTEN = tuple(
    name for name in FIELDS if name in {
        *SIZES, "n_inner", "activation_function", "layer_norm_epsilon", "bias",
        "tie_word_embeddings", *NOT_COMPUTED,
    }
)  # fmt: skip
"""Our fields that GPT-2's config.json can hold, in their order."""
LM_HEAD = "lm_head.weight"
OLD_LM_HEAD = "lm_head.decoder.weight"
"""Name before 2019, in the files of DialoGPT's authors."""
MASK_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
"""Causal masks in files of old versions; they are not parameters."""
CONV1D = re.compile(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight")
"""Our names of the matrices that transformers stores as (in, out)."""
BODY_BIAS = re.compile(r"(h\.\d+\..+|ln_f)\.bias")
"""Biases of the body; a classifier's bias says nothing about them."""


@dataclass(frozen=True)
class ModelType:
    """One `model_type` of transformers: its class, its names, and its config's own names."""

    name: str
    architecture: str
    activations: dict[str, str]
    """Names of activations by ours."""
    norm: str | None
    """Which norm the class has; None where the config says it."""
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    """Different names of tensors by ours, without the prefix."""
    config_names: Mapping[str, str] = field(default_factory=dict)
    """Different names of config keys by ours."""
    fields: tuple[str, ...] = WRITTEN
    """Our fields that its config.json can hold; in its class, others have GPT-2's values."""


GPT2 = ModelType(
    "gpt2", "GPT2LMHeadModel", {name: name for name in ("gelu_new", "gelu", "relu", "silu")}, "pre"
)
GPT1 = ModelType(
    "openai-gpt",
    "OpenAIGPTLMHeadModel",
    {"gelu_new": "gelu", "relu": "relu", "silu": "silu"},  # its "gelu" is the tanh form
    "post",
    tensor_names={"wte.weight": "tokens_embed.weight", "wpe.weight": "positions_embed.weight"},
    config_names={"activation_function": "afn"},
)
TIEDGPT = ModelType(
    "tiedgpt", "TiedGPTLMHeadModel", {name: name for name in ACTIVATIONS}, None, fields=FIELDS
)
"""Ours. transformers refuses the name, so that it never computes something else."""
PACKED = replace(TIEDGPT, name="tiedgpt-packed", architecture="TiedGPTPackedLMHeadModel")
"""Ours, packed for CPU kernels."""
MODEL_TYPES = {model_type.name: model_type for model_type in (GPT2, GPT1, TIEDGPT, PACKED)}

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "pruned_heads": ({},),
    "quantization_config": (),
}
"""Keys of config.json that change the computation, with the neutral values."""
NULLABLE = (
    "n_inner", "bias", "attention_windows", "tie_word_embeddings", "bos_token_id", "eos_token_id",
    "model_type", *(key for key in NEUTRAL if key != "scale_attn_weights"),
)  # fmt: skip
"""Keys whose null is as an absent key in transformers, too."""
SCALES = {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True}
"""Keys of GPT-2's attention scale, with the values that loading folds into the weights."""
QUERIES = re.compile(r"h\.(\d{1,6})\.attn\.c_attn\.(weight|bias)")
"""Our names of the tensors that make queries, in their first D columns, keys and values."""
ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""Other names under which transformers takes the same keys."""
SAME_ACTIVATIONS = {
    **dict.fromkeys(
        ("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"), "gelu_new"
    ),
    "gelu_python": "gelu",
    "swish": "silu",
}
"""Other names and computations of the same functions in transformers."""


def model_type_of(config: GPTConfig) -> ModelType:
    """Return the class of transformers for a config, or our own if none exists."""
    if any(getattr(config, n) != DEFAULTS[n] for n in FIELDS if n not in (*GPT2.fields, "norm")):
        return TIEDGPT
    if config.norm == "pre":
        return GPT2
    fits = config.activation_function in GPT1.activations
    return GPT1 if fits and config.inner_dim == 4 * config.n_embd else TIEDGPT


def to_file(name: str, model_type: ModelType) -> str:
    """Return the name in a file of transformers of a parameter of ours."""
    return LM_HEAD if name == HEAD else BODY_PREFIX + model_type.tensor_names.get(name, name)


def detect_checkpoint(checkpoint: Checkpoint) -> bool:
    """Whether config.json names a model type, and the file itself says nothing else (nanoGPT's)."""
    name = checkpoint.config.get("model_type", PACKED.name)
    return isinstance(name, str) and name != PACKED.name and "model_args" not in checkpoint.config


def open_module(module: nn.Module) -> Checkpoint:
    """Return a model of transformers in memory as a checkpoint; nothing is copied yet.

    It may lie inside modules that add no parameters. Raises `UserError` for any other module.
    """
    from tiedgpt.weights.torch_file import stored_tensor

    models = (child for child in module.modules() if callable(_to_dict(child)))
    model = next(models, module)
    to_dict = _to_dict(model)
    if to_dict is None or len(list(model.parameters())) < len(list(module.parameters())):
        raise UserError(
            f"{type(module).__name__} is no model of transformers",
            hint=f"give a path, a hub name, or a {GPT2.architecture} or {GPT1.architecture}",
        )
    tensors = {
        name: stored_tensor(name, parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    config, name = to_dict(), f"the {type(module).__name__} in memory"
    claim = claim_in(config, "its config") or Claim()
    checkpoint = Checkpoint(name, "module", tensors, config=config, claim=claim, format=FORMAT)
    return without_wrappers(replace(checkpoint, in_memory=True))


def _to_dict(module: nn.Module) -> Callable[[], dict[str, Any]] | None:
    """Return the method of a model of transformers that describes its config, or None."""
    return getattr(getattr(module, "config", None), "to_dict", None)


def to_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT, without mask buffers, and with a plain attention."""
    config, notes = dict(checkpoint.config), list[str]()
    scales = attention_scales(config)
    fields, foreign = config_fields({k: v for k, v in config.items() if k not in scales})
    foreign |= {key: config[key] for key in scales}
    model_type = MODEL_TYPES[config.get("model_type") or GPT2.name]
    tensors = our_tensors(checkpoint, model_type)
    if scales:
        tensors = _scale_queries(tensors, scales, fields.get("n_head", DEFAULT_N_HEAD))
        notes.append(
            f"{' and '.join(scales)} of config.json scaled the attention; the queries' weights "
            "now hold the scale, so that it is saved as a plain GPT-2 of the same function"
        )
    tensors |= {n: t.transpose() for n, t in tensors.items() if CONV1D.fullmatch(n)}
    if fields.get("bias") is False:  # then they are zeros that transformers' classes need
        biases = [tensors[name] for name in tensors if BODY_BIAS.fullmatch(name)]
        if any(t.is_decodable and t.rows(0, t.matrix_shape[0]).any() for t in biases):
            fields["bias"] = True
            notes.append("config.json claims no biases, some are not zero: they are kept")
        else:
            tensors = {n: tensor for n, tensor in tensors.items() if not BODY_BIAS.fullmatch(n)}
    assumed = {"n_head": DEFAULT_N_HEAD} if config.get("model_type") else {}
    layout = "tiedgpt" if model_type is TIEDGPT else f"transformers {model_type.name}"
    return GPTCheckpoint(layout, fields, tensors, assumed, foreign, tuple(notes))


def attention_scales(config: Mapping[str, Any]) -> list[str]:
    """Return the keys by which a GPT-2's attention has another scale than 1 / sqrt(D / H)."""
    if config.get("model_type", GPT2.name) != GPT2.name:
        return []
    return [key for key, value in SCALES.items() if config.get(key) is value]


def _scale_queries(
    tensors: Mapping[str, StoredTensor], scales: list[str], n_head: object
) -> dict[str, StoredTensor]:
    """Return the tensors with the attention's scale in the queries' weights and biases.

    The scale is a plain attention's 1 / sqrt(D / H), divided by the number of the layer from 1 on
    (Mistral's GPT-2s, `scale_attn_by_inverse_layer_idx`), or none (`scale_attn_weights` false).
    """
    scaled = dict(tensors)
    for name, tensor in tensors.items():
        if match := QUERIES.fullmatch(name):
            width, factor = tensor.matrix_shape[1] // 3, 1.0
            if "scale_attn_weights" in scales and isinstance(n_head, int) and n_head > 0:
                factor = (width / n_head) ** 0.5
            if "scale_attn_by_inverse_layer_idx" in scales:
                factor /= int(match[1]) + 1
            scaled[name] = tensor.scale_columns(width, factor)
    return scaled


def our_tensors(checkpoint: Checkpoint, model_type: ModelType = GPT2) -> dict[str, StoredTensor]:
    """Return tensors by our names, without the prefix of transformers and nanoGPT, and masks.

    Raises `CorruptInputError` where a tensor has two names.
    """
    names = {stored: ours for ours, stored in model_type.tensor_names.items()}
    names |= {LM_HEAD: HEAD, OLD_LM_HEAD: HEAD}
    ours: dict[str, StoredTensor] = {}
    for name, tensor in checkpoint.tensors.items():
        name = name.removeprefix(BODY_PREFIX)
        name = names.get(name, name)
        if name in ours:
            raise CorruptInputError(
                f"{checkpoint.source} holds {printable(name)} twice, with and without its prefix"
            )
        if not MASK_BUFFERS.fullmatch(name):
            ours[name] = tensor
    return ours


def config_fields(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a config.json into our fields and the keys that change nothing here.

    The latter are kept and saved again. Raises `UserError` for another family's model, or a key
    that changes the computation and that no GPT here has, or is null where
    transformers has no value for a null.
    """
    name = config.get("model_type")
    name = GPT2.name if name is None else name
    if not isinstance(name, str) or name not in MODEL_TYPES:
        raise UserError(
            f"this is a {name!r} model; tiedgpt runs the GPT family: {', '.join(MODEL_TYPES)}"
        )
    model_type = MODEL_TYPES[name]
    names = {model_type.config_names.get(ours, ours): ours for ours in model_type.fields}
    config = {k: value for k, value in config.items() if value is not None or k not in NULLABLE}
    for alias, key in ALIASES.items():
        if config.get(alias, "") is None and config.get(key) is not None:
            del config[alias]
    for key in (*names, *ALIASES, *NEUTRAL):
        if config.get(key, "") is None:
            raise UserError(
                f"the model's config has null for {key}", hint=f"give {key} its value there"
            )
    for key, neutral in NEUTRAL.items():
        if key in config and config[key] not in neutral:
            raise UserError(
                f"the model's config has {key}={config[key]!r}, which changes the computation and "
                "is not built here",
                hint="run it with transformers",
            )
    for alias, key in ALIASES.items():
        if alias in config and config.setdefault(key, config[alias]) != config.pop(alias):
            raise CorruptInputError(f"the model's config has two different {key} (as {alias})")
    fields = {ours: config.pop(stored) for stored, ours in names.items() if stored in config}
    if "activation_function" in fields:
        table = {stored: ours for ours, stored in model_type.activations.items()} | SAME_ACTIVATIONS
        name = fields["activation_function"]
        if not isinstance(name, str) or name not in table:
            raise UserError(
                f"the activation {name!r} is not built here", hint=f"there are {', '.join(table)}"
            )
        fields["activation_function"] = table[name]
    if model_type.norm is not None:
        fields["norm"] = model_type.norm
    return fields, config


def config_json(
    config: GPTConfig, foreign: Mapping[str, Any], dtype: str, model_type: ModelType | None = None
) -> dict[str, Any]:
    """Return the config.json under which transformers builds the same model.

    A model that no class of transformers computes is described under our own `model_type`.
    """
    model_type = model_type or model_type_of(config)
    fields = {name: getattr(config, name) for name in model_type.fields}
    if config.bias:
        del fields["bias"]  # transformers' classes ignore it
    fields["activation_function"] = model_type.activations[config.activation_function]
    described = {
        "model_type": model_type.name,
        "architectures": [model_type.architecture],
        "n_ctx": config.n_positions,
        "torch_dtype": dtype,
    }
    # The weights hold the attention's scale; _name_or_path is often a path of a machine.
    dropped = ("dtype", "_name_or_path", *SCALES, *described)
    others = {key: value for key, value in foreign.items() if key not in dropped}
    described |= {model_type.config_names.get(name, name): value for name, value in fields.items()}
    return described | others


FORMAT = Format(
    name="transformers",
    title="transformers",
    about="GPT-2 and OpenAI GPT (GPT-1): safetensors, sharded, `.bin`, `.ckpt`; a model in "
    "memory; tiedgpt's directories",
    about_tokenizer="`tokenizer.json`, vocabulary and merges, or `vocab.txt`",
    detect=detect,
    open=open_container,
    open_module=open_module,
    to_gpt=to_gpt,
    detect_checkpoint=detect_checkpoint,
    suffixes=SUFFIXES,
    file_names=(
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ),
    hub_patterns=(
        ("*.safetensors", "*.safetensors.index.json"),
        ("pytorch_model*.bin", "pytorch_model*.bin.index.json"),
        ("*.pt", "*.pth", "*.bin", "*.ckpt"),
    ),
    writer=Writer(
        write=defer("transformers.writer", "write"),
        program=Program("a Hugging Face directory", FIELDS),
        holds_tokenizer=True,
    ),
)
