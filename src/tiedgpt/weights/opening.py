"""Open any checkpoint: the format is recognized by content, and only headers are read.

SOURCE: a file of safetensors, torch.save, GGUF, ONNX or llm.c; a sharded index; a TensorFlow or
numpy checkpoint; what is packed for our CPU kernels; a directory with one of these; a run
directory, which stands for the model in it; or a hub name. What config.json beside the weights
claims is taken along.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import beside, read_json, reading
from tiedgpt.weights.checkpoint import TIE_KEY, Checkpoint, Claim, claim_in, plain
from tiedgpt.weights.hub import local_directory
from tiedgpt.weights.tensors import StoredTensor

FORMATS = (
    "safetensors_file", "formats.openai_gpt1", "formats.gguf", "formats.llmc", "formats.onnx",
    "torch_file", "formats.openai_gpt2",
)  # fmt: skip
"""The checkpoint formats in the order in which they are asked: each the name of a module of this
package with `detect(path, head)` and `read(path)`."""
WEIGHT_NAMES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "model.onnx", "onnx/model.onnx", "packed.safetensors",
    "params_shapes.json",
)  # fmt: skip
WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".gguf", ".onnx")
BODIES = re.compile(r"(Model|For[A-Z]\w*)$")
PREDICTING = re.compile(
    r"LMHead|ForCausalLM|ForConditionalGeneration|ForMaskedLM|DoubleHeads|ForPreTraining|MTModel"
)
"""Architectures that end as bodies and classifiers do, and those that predict tokens all the same;
of any other name nothing is known."""


def open_checkpoint(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """Return what a checkpoint holds, without reading its tensors.

    `revision` and `cache_dir` are of a repository of the hub. Raises `CorruptInputError` for files
    that are damaged or of no known format, `UserError` where there is nothing at `source` or it is
    unclear what is meant.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise UserError(
            f"a checkpoint must be a path or a hub name, got {type(source).__name__}; torch.save a "
            "state dict first"
        )
    path = local_directory(source, revision=revision, cache_dir=cache_dir)
    directory, file = (path, _weights_in(path)) if path.is_dir() else (path.parent, path)
    checkpoint = replace(plain(_open_file(file)), source=path)
    checkpoint = _with_config(checkpoint, directory / "config.json")
    in_shared_container = checkpoint.format in ("safetensors", "torch")
    if checkpoint.claim.is_tied is None and in_shared_container:
        from tiedgpt.weights.formats.state_dict import claim_by_design

        return replace(checkpoint, claim=claim_by_design(checkpoint) or checkpoint.claim)
    return checkpoint


def _weights_in(directory: Path) -> Path:
    """Return the file of a directory that holds, or lists, its weights."""
    for name in WEIGHT_NAMES:
        if (directory / name).is_file():
            return directory / name
    with reading(directory, "directory of a model"):
        files = [f for f in sorted(directory.iterdir()) if f.is_file() and _has_weights(f)]
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:6])
        raise UserError(
            f"{directory} holds {len(files)} files of weights ({names})", hint="name one"
        )
    if (directory / "adapter_config.json").exists():
        raise UserError(
            f"{directory} holds an adapter, not a model", hint="merge it first, then look"
        )
    raise UserError(f"{directory} has no weights: no {', '.join(WEIGHT_SUFFIXES)} or .index")


def _has_weights(file: Path) -> bool:
    """Whether a file's name is one of weights, and its content not one of llm.c's other kinds."""
    from tiedgpt.weights.formats.llmc import OTHER_MAGICS
    from tiedgpt.weights.formats.openai_gpt2.tensorflow_bundle import is_index

    if file.suffix == ".index":
        return is_index(file)
    if file.suffix not in WEIGHT_SUFFIXES:
        return False
    with reading(file, "file of weights"), file.open("rb") as opened:
        return opened.read(4) not in OTHER_MAGICS


def _open_file(path: Path) -> Checkpoint:
    """Recognize a file by its first bytes and open it."""
    if path.name.endswith(".index.json"):
        return _open_index(path)
    if not path.is_file():
        raise UserError(f"{path} is neither a file nor a directory")
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    for name in FORMATS if head else ():
        module: Any = import_module(f"tiedgpt.weights.{name}")
        if module.detect(path, head):
            checkpoint: Checkpoint = module.read(path)
            return checkpoint
    if path.suffix == ".json":
        raise UserError(
            f"{path} holds no weights", hint=f"name the directory {path.parent} instead"
        )
    raise CorruptInputError(
        f"{path} is {'of no known checkpoint format' if head else 'empty'}: safetensors, "
        "torch.save, GGUF, ONNX, llm.c's .bin, TensorFlow's checkpoints and numbered .npy files "
        "are read"
    )


def _open_index(path: Path) -> Checkpoint:
    """Open the shards that an index lists; they lie beside it."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptInputError(f"{path} has no weight_map")
    tensors: dict[str, StoredTensor] = {}
    files, kind = [path], ""
    for shard in sorted(set(map(str, weight_map.values()))):
        if shard.endswith(".index.json"):
            raise CorruptInputError(f"{path} names an index as a shard: {shard[:80]!r}")
        file = beside(path, shard, links=True)
        opened = _open_file(file)
        if twice := tensors.keys() & opened.tensors.keys():
            raise CorruptInputError(f"{path}: two shards hold {min(twice)!r}")
        tensors |= opened.tensors
        files, kind = [*files, file], opened.format
    if missing := sorted(weight_map.keys() - tensors.keys()):
        raise CorruptInputError(f"{path} promises {missing[0]!r}, and no shard holds it")
    return Checkpoint(path, kind, tensors, files=tuple(files))


def _with_config(checkpoint: Checkpoint, config_path: Path) -> Checkpoint:
    """Add what config.json says, where there is one; what the file says of itself holds."""
    if not config_path.is_file():
        return checkpoint
    config, claim = read_json(config_path), checkpoint.claim
    beside = claim_in(config, config_path)
    if beside is not None and claim.is_tied is None:
        claim = beside
    elif claim == Claim():
        claim = Claim(source=f"config.json does not say {TIE_KEY}")
    names = config.get("architectures")
    names = list(map(str, names)) if isinstance(names, list) else []
    headless = names and all(BODIES.search(n) and not PREDICTING.search(n) for n in names)
    return replace(
        checkpoint, config=config | dict(checkpoint.config), claim=claim, headless=bool(headless)
    )
