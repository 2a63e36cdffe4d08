"""Read a GPT of transformers' layout: headers first, every shape checked before memory is taken.

A directory (config.json beside model.safetensors, a sharded index, or pytorch_model.bin), one
file of weights, or a hub name -> a `GPT` in eval mode.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import read_json
from tiedgpt.weights.config_json import (
    FILE_FIELDS,
    TRANSFORMERS_DEFAULTS,
    config_fields,
    drop_foreign_ids,
    model_type_from,
)
from tiedgpt.weights.hub import local_directory
from tiedgpt.weights.names import EMBEDDING, HEAD, ModelType, from_file, is_transposed, shapes
from tiedgpt.weights.safetensors_file import SafetensorsFile
from tiedgpt.weights.two_matrices import settle

PATTERNS = ("config.json", "*.safetensors", "*.safetensors.index.json")
MODEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class FileTensor:
    """A tensor that can be read: its shape in the file, and how to get it."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass
class Loaded:
    """A model, where it came from, and what is worth telling about it."""

    model: GPT
    path: Path
    notes: list[str] = field(default_factory=list)


def load_model(
    source: str | os.PathLike[str],
    *,
    resolve: str | None = None,
    dtype: torch.dtype | None = None,
    **config: Any,
) -> GPT:
    """Load a model; see `GPT.from_pretrained`."""
    return load(source, resolve=resolve, dtype=dtype, **config).model


def load(
    source: str | os.PathLike[str],
    *,
    resolve: str | None = None,
    dtype: torch.dtype | None = None,
    **config: Any,
) -> Loaded:
    """Load a model and say what was found; see `GPT.from_pretrained`."""
    path = local_directory(Path(source) if isinstance(source, os.PathLike) else source, PATTERNS)
    claims = _read_claims(path)
    files = _rename(path, _open_tensors(path), model_type_from(claims))
    fields, foreign = config_fields(claims)
    supplied = _supply(fields, config)
    loaded = Loaded(model=None, path=path)  # type: ignore[arg-type]
    settled = settle(
        path,
        claim=fields.get("tie_word_embeddings"),
        embedding=files.get(EMBEDDING),
        head=files.get(HEAD),
        resolve=resolve,
    )
    loaded.notes += settled.notes
    for name, tensor in ((EMBEDDING, settled.embedding), (HEAD, settled.head)):
        files.pop(name, None)
        if tensor is not None:
            files[name] = tensor
    supplied["tie_word_embeddings"] = settled.head is None
    built = _config(path, supplied, files, known_type="model_type" in claims)
    _check_tensors(path, files, shapes(built))
    loaded.model = _build(built, files, dtype)
    loaded.model.foreign_config = foreign
    return loaded


def _read_claims(path: Path) -> dict[str, Any]:
    """Return config.json as it stands, or {} where a lone file of weights has none beside it."""
    config_path = (path if path.is_dir() else path.parent) / "config.json"
    if config_path.exists():
        return read_json(config_path)
    if path.is_dir():
        raise UserError(f"{path} has no config.json: it is no model directory")
    return {}


def _supply(fields: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Add what the caller gives to what the file says; they must not disagree."""
    for name, value in given.items():
        if name not in FILE_FIELDS:
            raise UserError(f"{name!r} is no field of a config; there are {', '.join(FILE_FIELDS)}")
        if name in fields and fields[name] != value:
            raise UserError(f"{name}={value!r} contradicts the file, which says {fields[name]!r}")
    return fields | dict(given)


def _open_tensors(path: Path) -> dict[str, FileTensor]:
    """Return all tensors of a directory or file by the file's names, none of them read yet."""
    if path.is_file():
        return _open_bin(path) if path.suffix in (".bin", ".pt", ".pth") else _open_safe(path)
    if (path / "model.safetensors").exists():
        return _open_safe(path / "model.safetensors")
    for index_name, opener in (
        ("model.safetensors.index.json", _open_safe),
        ("pytorch_model.bin.index.json", _open_bin),
    ):
        if (path / index_name).exists():
            return _open_shards(path / index_name, opener)
    if (path / "pytorch_model.bin").exists():
        return _open_bin(path / "pytorch_model.bin")
    raise UserError(f"{path} has no weights: neither model.safetensors nor pytorch_model.bin")


def _open_shards(
    index: Path, opener: Callable[[Path], dict[str, FileTensor]]
) -> dict[str, FileTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptInputError(f"{index} has no weight_map")
    shard_names = sorted({str(shard) for shard in weight_map.values()})
    tensors: dict[str, FileTensor] = {}
    for shard in shard_names:
        if Path(shard).name != shard or not (index.parent / shard).is_file():
            raise CorruptInputError(f"{index} names the shard {shard!r}, which is not beside it")
        tensors |= opener(index.parent / shard)
    if missing := sorted(weight_map.keys() - tensors.keys()):
        raise CorruptInputError(f"{index} promises {missing[0]!r}, and no shard holds it")
    return tensors


def _open_safe(path: Path) -> dict[str, FileTensor]:
    file = SafetensorsFile.open(path)
    return {
        name: FileTensor(entry.shape, lambda name=name: file.read(name))  # type: ignore[misc]
        for name, entry in file.entries.items()
    }


def _open_bin(path: Path) -> dict[str, FileTensor]:
    """Open a file of torch.save; only tensors are unpickled, code in it never runs."""
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, OSError, KeyError, ...
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptInputError(f"{path} is no plain file of tensors: {why}") from None
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise CorruptInputError(f"{path} holds no state dict: names of tensors are expected")
    return {
        str(name): FileTensor(tuple(t.shape), lambda t=t: t.clone())  # type: ignore[misc]
        for name, t in state.items()
    }


def _rename(
    path: Path, tensors: dict[str, FileTensor], model_type: ModelType
) -> dict[str, FileTensor]:
    """Return the tensors by our names and in our layout, mask buffers left out."""
    renamed: dict[str, FileTensor] = {}
    for their_name, tensor in tensors.items():
        name = from_file(their_name, model_type)
        if name is None:
            continue
        if name in renamed:
            raise CorruptInputError(f"{path} holds {name} twice, with and without its prefix")
        if is_transposed(name) and len(tensor.shape) == 2:
            tensor = FileTensor(tensor.shape[::-1], _transposing(tensor.read))
        renamed[name] = tensor
    if EMBEDDING not in renamed and HEAD not in renamed:
        raise CorruptInputError(f"{path} holds no GPT: there is no {EMBEDDING} among its tensors")
    return renamed


def _transposing(read: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: read().T.contiguous()


def _config(
    path: Path, fields: dict[str, Any], tensors: dict[str, FileTensor], *, known_type: bool
) -> GPTConfig:
    """Return the config; where config.json and the weights disagree on a size, weights decide."""
    fields = dict(fields)
    for name, sizes in ((EMBEDDING, ("vocab_size", "n_embd")), ("wpe.weight", ("n_positions", ""))):
        shape = tensors[name].shape if name in tensors else ()
        if len(shape) != 2:
            raise CorruptInputError(f"{path}: {name} is missing or no matrix; this is no GPT")
        fields |= {size: n for size, n in zip(sizes, shape, strict=True) if size}
    layers = [int(match[1]) for name in tensors if (match := re.match(r"h\.(\d+)\.", name))]
    in_file = 1 + max(layers, default=-1)
    if fields.setdefault("n_layer", in_file) != in_file:
        raise CorruptInputError(
            f"{path}: config.json says n_layer={fields['n_layer']}, the weights have {in_file}"
        )
    if known_type:
        fields = TRANSFORMERS_DEFAULTS | fields
    elif "n_head" not in fields:
        raise UserError(
            f"{path} does not say how many heads it has, and shapes do not tell: give n_head"
        )
    inner = tensors.get("h.0.mlp.c_fc.weight")
    if inner is not None and len(inner.shape) == 2 and inner.shape[0] != 4 * fields["n_embd"]:
        fields["n_inner"] = inner.shape[0]
    drop_foreign_ids(fields)
    return GPTConfig(**fields)


def _check_tensors(
    path: Path, tensors: dict[str, FileTensor], expected: dict[str, tuple[int, ...]]
) -> None:
    """Every parameter is there once, in its shape, and nothing else is."""
    problems = (
        [f"{name} is missing" for name in expected if name not in tensors]
        + [f"{name} is not a GPT's" for name in tensors if name not in expected]
        + [
            f"{name} is {tensor.shape}, not {expected[name]}"
            for name, tensor in tensors.items()
            if name in expected and tensor.shape != expected[name]
        ]
    )
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CorruptInputError(f"{path} does not fit its config: {'; '.join(problems[:3])}{more}")


def _build(config: GPTConfig, tensors: dict[str, FileTensor], dtype: torch.dtype | None) -> GPT:
    """Fill a model with the tensors, each read once; the embedding's dtype holds for all."""
    with torch.device("meta"):
        model = GPT(config)
    state: dict[str, Tensor] = {}
    for name in (EMBEDDING, *(name for name in tensors if name != EMBEDDING)):
        tensor = tensors[name].read()
        if dtype is None:
            dtype = tensor.dtype
            if dtype not in MODEL_DTYPES:
                raise UserError(f"{EMBEDDING} is {dtype}: quantized weights are not read here")
        state[name] = tensor.to(dtype)
    model.load_state_dict(state, assign=True)
    return model.eval()
