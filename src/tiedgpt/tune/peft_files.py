"""Adapters in PEFT's file format: adapter_config.json and adapter_model.safetensors or .bin.

    tensor (after "base_model.model.")                             here
    transformer.h.0.attn.c_attn.lora_A.weight (r, in)              A
    transformer.h.0.attn.c_attn.lora_B.weight (out, r)             B
    transformer.wte.lora_embedding_A (r, V)                        P^T
    transformer.wte.lora_embedding_B (D, r)                        Q^T
    transformer.wte.token_adapter.trainable_tokens_delta (n, D)    rows of W, not differences
    score.weight                                                   a head's layer (modules_to_save)

On a tied model PEFT 0.21 computes something else than some files say: see `_join_faces`. peft is
not imported, and no code in a .bin is run.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tiedgpt.core.model import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import read_json, reading, replacing, require_room, write_json
from tiedgpt.heads import Head
from tiedgpt.signatures import checked
from tiedgpt.tune.adapters import Size, adapt, adapted_layers
from tiedgpt.tune.freezing import Model, TrainableParameters, gpt_of, predicts_with_w
from tiedgpt.weights.containers import read_safetensors, write_safetensors
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.formats.transformers import (
    GPT1,
    GPT2,
    attention_scales,
    model_type_of,
    to_file,
)
from tiedgpt.weights.source import Source
from tiedgpt.weights.tensors import StoredTensor
from tiedgpt.weights.torch_file import read_torch_file, stored_tensor
from tiedgpt.weights.wrappers import BODY_PREFIX

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
OLD_TENSORS = "adapter_model.bin"
PREFIX, BASE = "base_model.model.", "tiedgpt_base"
LORA = {"A": "lora_A.weight", "B": "lora_B.weight"}
EMBEDDING = {"B": "lora_embedding_A", "A": "lora_embedding_B"}  # transposed
MAX_REPETITIONS = 6
"""Maximum number of repetitions in a config's regex: with more, matching could take forever."""
ROWS, COPY = "token_adapter.trainable_tokens_delta", "base_layer.weight"
TASKS = {"ForSequenceClassification": "SEQ_CLS", "Model": "FEATURE_EXTRACTION"}
READ = (
    "r lora_alpha rank_pattern alpha_pattern use_rslora target_modules exclude_modules "
    "layers_to_transform trainable_token_indices modules_to_save ensure_weight_tying"
)
INERT = (  # fields that do not change the adapter's output
    "auto_mapping base_model_name_or_path revision task_type peft_version inference_mode "
    "lora_dropout fan_in_fan_out layers_pattern megatron_core qalora_group_size"
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # others change the base
}
"""Values under which a field changes nothing; every other field must be none, false or empty."""
MERGE_HERE = (
    "adapters on W: PEFT loads them on both sides, but its own merge adds them twice to the one "
    "matrix; merge with tiedgpt.tune.merge"
)


@dataclass
class Layer:
    """The tensors of one layer in a file."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """A, B and rows."""
    ids: list[int] = field(default_factory=list)
    """The ids of `rows`, in the file's order."""
    scale: float = 0.0


@checked
def save_adapter(
    model: Model,
    directory: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
) -> tuple[str, ...]:
    """Write a model's adapters in PEFT's format; return notes on using them with PEFT.

    `base` is the path or hub name of the base model, for PEFT's `AutoPeftModel`: a run stands for
    the model in it, and a path that transformers cannot open is left out. The file holds a
    fingerprint of the base's weights. Raises `UserError`, before anything is written, for adapters
    that PEFT's format cannot hold: a pair and rows on W, rows alone, other trained parameters.
    """
    directory, head_tensors = Path(directory), model.head_tensors if isinstance(model, Head) else ()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" not in name and name not in head_tensors:
            raise UserError(
                f"{name} is trained too, and PEFT's format has no place for it: freeze it, or "
                "merge the adapters and write the whole model (save_pretrained)"
            )
    config, tensors = _describe(model)
    tensors |= {name: model.get_parameter(name).detach() for name in head_tensors}
    stored = {PREFIX + n: stored_tensor(n, tensor.contiguous()) for n, tensor in tensors.items()}
    require_room(directory, sum(tensor.n_bytes for tensor in stored.values()))
    metadata = {"format": "pt", BASE: _fingerprint(gpt_of(model))}
    with replacing(directory / TENSORS) as temporary:
        write_safetensors(temporary, stored, metadata)
    base_name = None if base is None else _find_base(Source.of(base))
    write_json(directory / CONFIG, config | {"base_model_name_or_path": base_name})
    return (MERGE_HERE,) if config["ensure_weight_tying"] else ()


@checked
def load_adapter(model: Model, directory: str | os.PathLike[str]) -> TrainableParameters:
    """Put adapters in PEFT's format on their base, in place; return the trainable parameters.

    Dropout, which only training uses, is ignored. Raises `UserError`, with the model unchanged, for
    an unsupported adapter (it names the field), for another base or shape, and for an adapter that
    changes a tied W for reading or predicting only: untie the model first.
    """
    gpt, directory = gpt_of(model), Path(directory)
    config = read_json(directory / CONFIG)
    _require_supported(config)
    with reading(directory, "adapter"):
        layers, head_tensors = _read(model, config, directory)
        layers = _join_faces(model, config, layers)
    sizes = {
        name: Size(len(layer.tensors.get("A", ())), layer.scale, tuple(sorted(layer.ids)))
        for name, layer in layers.items()
    }
    trainable = adapt(model, sizes)
    with torch.no_grad():
        for name, layer in layers.items():
            _fill(gpt.get_submodule(name), layer)
        for name, tensor in head_tensors.items():
            model.get_parameter(name).copy_(tensor)
    return trainable


def _find_base(source: Source) -> str | None:
    """Return the hub name or directory by which transformers opens a source, or None."""
    if not Path(str(source)).expanduser().exists():
        return str(source)
    path = source.path / "config.json"
    config = read_json(path, source.read) if path.is_file() else {}
    is_theirs = config.get("model_type") in (GPT2.name, GPT1.name) and not attention_scales(config)
    return str(source.path) if is_theirs else None


def _names(model: Model) -> dict[str, str]:
    """Return PEFT's names of the layers of a GPT that may be adapted, by ours."""
    modules = gpt_of(model).h.named_modules(prefix="h")
    blocks = (name for name, module in modules if isinstance(module, nn.Linear))
    names = (*blocks, "wte", "head")
    return {n: _peft_name(model, f"{n}.weight").removesuffix(".weight") for n in names}


def _peft_name(model: Model, name: str) -> str:
    """Return PEFT's name of a parameter of a GPT."""
    prefix = BODY_PREFIX if isinstance(model, Head) and not model.head_tensors else ""
    return to_file(name, model_type_of(gpt_of(model).config)).removeprefix(prefix)


def _fingerprint(gpt: GPT) -> str:
    """Return a digest of the first numbers of each matrix of the blocks, as bf16."""
    digest = hashlib.sha256()
    for name, parameter in gpt.h.named_parameters():
        if "lora_" not in name and parameter.ndim == 2:
            some = parameter.detach().flatten()[:256].to("cpu", torch.bfloat16)
            digest.update(f"{name} {tuple(parameter.shape)} {some.tolist()}".encode())
    return digest.hexdigest()


@torch.no_grad()
def _describe(model: Model) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return adapter_config.json and the tensors by PEFT's names, without the prefix."""
    names, tensors = _names(model), dict[str, Tensor]()
    ranks, alphas, rows = dict[str, int](), dict[str, float](), dict[str, list[int]]()
    both = False
    for name, layer in adapted_layers(gpt_of(model)).items():
        peft_name, A, B, ids = names[name], layer.lora_A, layer.lora_B, layer.lora_ids
        if A is not None and B is not None and ids is not None:
            raise UserError(
                f"{name} has a low-rank pair and rows that are trained whole; PEFT takes one or "
                "the other",
                hint="merge the adapters and write the whole model (save_pretrained)",
            )
        if ids is not None:
            tensors[f"{peft_name}.{ROWS}"] = layer.matrix()[ids]
            rows[peft_name] = ids.tolist()
        if A is not None and B is not None:
            role, pair = (EMBEDDING, (A.T, B.T)) if name == "wte" else (LORA, (A, B))
            tensors |= {f"{peft_name}.{role[k]}": t for k, t in zip("AB", pair, strict=True)}
            ranks[peft_name], alphas[peft_name] = len(A), round(layer.scale * len(A), 9)
            both |= name == "wte" and predicts_with_w(model)
    if not ranks:
        raise UserError("PEFT's format needs a low-rank pair, and the model has none: merge")
    rank, alpha = next(iter(ranks.values())), next(iter(alphas.values()))
    head = model if isinstance(model, Head) else None
    head_layers = {name.rpartition(".")[0] for name in head.head_tensors} if head else set()
    config = {
        "peft_type": "LORA",
        "task_type": TASKS.get(head.architecture) if head else "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {re.escape(n): r for n, r in ranks.items() if r != rank},
        "alpha_pattern": {re.escape(n): a for n, a in alphas.items() if a != alpha},
        "target_modules": [*ranks, *(["lm_head"] if both else [])],
        "ensure_weight_tying": both,
        "trainable_token_indices": rows or None,
        "modules_to_save": sorted(head_layers) or None,
        "fan_in_fan_out": True,
        "bias": "none",
        "inference_mode": True,
    }
    return config, tensors


def _require_supported(config: Mapping[str, Any]) -> None:
    """Raise `UserError`, naming the field, for an unsupported kind of adapter."""
    for name, value in config.items():
        allowed = NEUTRAL.get(name, (None, False, "", {}, []))
        if name not in f"{READ} {INERT}".split() and value not in allowed:
            raise UserError(
                f"{CONFIG}: {name}={value!r} is not supported: adapters here are plain LoRA",
                hint="merge this one with PEFT and load the merged model",
            )


def _read(
    model: Model, config: Mapping[str, Any], directory: Path
) -> tuple[dict[str, Layer], dict[str, Tensor]]:
    """Return a file's layers and the head's tensors, checked against the model."""
    path, entries, metadata = _open(directory)
    gpt, names = gpt_of(model), _names(model)
    if BASE not in metadata and (scales := attention_scales(gpt.foreign_config)):
        raise UserError(
            f"{path} was trained with PEFT, and the base's {' and '.join(scales)} scales its "
            "queries, which hold the scale here",
            hint="merge it with PEFT and load the merged model",
        )
    if metadata.get(BASE, fingerprint := _fingerprint(gpt)) != fingerprint:
        raise UserError(f"{path} was made for another base: its blocks hold other weights")
    layers, head_tensors = dict[str, Layer](), dict[str, Tensor]()
    places = {
        f"{peft_name}.{end}": (name, role)
        for name, peft_name in names.items()
        for role, end in [*(EMBEDDING if name == "wte" else LORA).items(), ("rows", ROWS)]
    }
    copies = {f"{names[name]}.{COPY}" for name in ("wte", "head")}
    for key, entry in entries.items():
        peft_name, tensor = key.removeprefix(PREFIX), entry.tensor()
        if not tensor.is_floating_point():
            raise CorruptInputError(f"{path}: {key} must hold floats, got {tensor.dtype}")
        if isinstance(model, Head) and peft_name in model.head_tensors:
            _require_shape(peft_name, tensor, tuple(model.get_parameter(peft_name).shape))
            head_tensors[peft_name] = tensor
        elif peft_name in places:
            name, role = places[peft_name]
            tensor = tensor.T if "lora_embedding" in peft_name else tensor
            layers.setdefault(name, Layer()).tensors[role] = tensor
        elif peft_name in copies:  # PEFT's, of an embedding that it adapted
            if not torch.equal(tensor.to(gpt.wte.weight), gpt.wte.weight) and gpt.head is None:
                raise UserError(f"{path} was made for another base: it holds another W")
        elif peft_name.removesuffix(".weight") in (names["wte"], names["head"]):
            raise UserError(
                f"{path} holds {peft_name} whole (modules_to_save, or a resized vocabulary): PEFT "
                "put it in the place of one side of W, which unties the model",
                hint="merge it with PEFT",
            )
        elif peft_name in {_peft_name(model, n) for n, _ in gpt.named_parameters()}:
            raise UserError(
                f"{path} holds {peft_name} whole (modules_to_save): adapters here are pairs, and "
                "the base's own tensors stay as they are",
                hint="merge it with PEFT and load the merged model",
            )
        else:
            raise UserError(f"{path} is for another base: this model has no place for {peft_name}")
    for name, layer in layers.items():
        at = gpt.wte if name in ("wte", "head") and gpt.head is None else gpt.get_submodule(name)
        _check(config, names[name], layer, tuple(at.weight.shape))  # type: ignore[arg-type]
    targets, partial = config.get("target_modules") or (), config.get("exclude_modules")
    partial = partial or config.get("layers_to_transform") is not None
    for name, peft_name in names.items():
        if isinstance(targets, str):
            is_target = _fits(targets, peft_name)
        else:
            is_target = any(f".{peft_name}".endswith(f".{target}") for target in targets)
        if is_target and name.startswith("h.") and name not in layers and not partial:
            raise UserError(f"{path} is incomplete, or for another base: nothing for {peft_name}")
    return layers, head_tensors


def _open(directory: Path) -> tuple[Path, Mapping[str, StoredTensor], dict[str, str]]:
    """Return the path, the tensors and the metadata of an adapter's file."""
    path = directory / TENSORS
    if path.exists():
        return path, *read_safetensors(OpenFile(path))
    old = directory / OLD_TENSORS
    if not old.exists():
        raise UserError(f"{path} does not exist, nor does {OLD_TENSORS}")
    return old, read_torch_file(OpenFile(old)).tensors, {}


def _fits(pattern: str, name: str) -> bool:
    """Whether a config's regex matches a name; `UserError` for one with exponential time."""
    if re.search(r"\)[*+{]", pattern) or len(re.findall("[*+{]", pattern)) > MAX_REPETITIONS:
        raise UserError(f"the pattern {pattern[:60]!r} of the adapter has too many repetitions")
    return re.fullmatch(pattern, name) is not None


def _check(config: Mapping[str, Any], peft_name: str, layer: Layer, shape: tuple[int, ...]) -> None:
    """Set a layer's scale and ids, and compare its shapes with a matrix (out, in)."""

    def value(patterns: str, default: Any) -> Any:  # the first that fits, as PEFT does
        values = (config.get(patterns) or {}).items()
        endings = [".".join(peft_name.split(".")[n:]) for n in range(peft_name.count(".") + 1)]
        return next((v for key, v in values if any(_fits(key, e) for e in endings)), default)

    if "A" in layer.tensors or "B" in layer.tensors:
        rank, alpha = (
            value("rank_pattern", config["r"]),
            value("alpha_pattern", config["lora_alpha"]),
        )
        layer.scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        _require_shape(f"{peft_name} A", layer.tensors["A"], (rank, shape[1]))
        _require_shape(f"{peft_name} B", layer.tensors["B"], (shape[0], rank))
    if "rows" in layer.tensors:
        ids = config["trainable_token_indices"]
        if isinstance(ids, dict):
            ids = next(some for key, some in ids.items() if f".{peft_name}".endswith(f".{key}"))
        if len({*ids}) < len(ids) or not all(isinstance(i, int) for i in ids):
            raise CorruptInputError(f"{CONFIG}: trainable_token_indices must be ids, each once")
        if max(ids, default=0) >= shape[0]:
            raise UserError(
                f"token {max(ids):,} has a row in the adapter, and the base {shape[0]:,} rows: "
                "add the new tokens to the base first (tiedgpt.tie.add_tokens), or take the merged "
                "model, which `tiedgpt tune` writes beside the adapter"
            )
        layer.ids = ids
        _require_shape(f"{peft_name} rows", layer.tensors["rows"], (len(ids), shape[1]))


def _require_shape(what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise UserError(
            f"the adapter is for another base: {what} must be {shape}, got {tuple(tensor.shape)}"
        )


def _join_faces(
    model: Model, config: Mapping[str, Any], layers: dict[str, Layer]
) -> dict[str, Layer]:
    """Return the layers to adapt, with one pair for both sides of a tied W.

    PEFT 0.21 on a tied GPT-2:

        in the file                         PEFT
        wte; ensure_weight_tying and        both sides: `save_adapter` writes this
          lm_head in target_modules
        wte and lm_head, one pair           trained on both sides, loaded again on one
        rows (trainable_token_indices)      both sides
        wte or lm_head alone, or two pairs  one side, or two different matrices: refused here
    """
    reads, predicts = layers.get("wte"), layers.get("head")
    if not predicts_with_w(model):
        if predicts is not None and gpt_of(model).head is None:
            raise UserError("the adapter is for another base: this one predicts no tokens")
        return layers
    if predicts is None and (reads is None or "A" not in reads.tensors):
        return layers
    if predicts is not None and "A" not in predicts.tensors:
        raise UserError("the adapter has rows of its own for lm_head: its base is not tied")
    is_flagged = config.get("ensure_weight_tying") and "lm_head" in config["target_modules"]
    if reads and (is_flagged if predicts is None else _equal(reads, predicts)):
        return {name: layer for name, layer in layers.items() if name != "head"}
    raise UserError(
        "the adapter gives the tied W another value for reading than for predicting: untie the "
        "model first (tiedgpt.tie.untie), or use transformers with PEFT"
    )


def _equal(a: Layer, b: Layer) -> bool:
    """Whether two layers hold the same pair."""
    same = (torch.equal(a.tensors[name], b.tensors[name]) for name in "AB" if name in a.tensors)
    return "A" in a.tensors and a.scale == b.scale and all(same)


def _fill(layer: Any, stored: Layer) -> None:
    """Copy a file's values into an adapted layer."""
    for name in stored.tensors.keys() & {"A", "B"}:
        getattr(layer, f"lora_{name}").copy_(stored.tensors[name])
    if stored.ids:
        rows = stored.tensors["rows"][torch.tensor(stored.ids, device="cpu").argsort()].to(
            layer.lora_rows
        )
        layer.lora_rows.copy_(rows - layer.weight[layer.lora_ids].to(rows))
