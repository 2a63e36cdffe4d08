"""Containers that several formats share: safetensors, torch.save's files, and indexes of shards.

Such a file holds named tensors and says little more; whose they are is told by names and shapes, or
by a config.json beside it (`Format.recognizes`).
"""

from __future__ import annotations

import re
from pathlib import Path

from tiedgpt.errors import CorruptInputError
from tiedgpt.files import beside, read_json
from tiedgpt.weights.checkpoint import Checkpoint, without_wrappers
from tiedgpt.weights.registry import head_of
from tiedgpt.weights.safetensors_file import SafetensorsFile, is_safetensors
from tiedgpt.weights.tensors import StoredTensor

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
INDEX = ".index.json"
BEGINS = re.compile(rb".{4}\0{4}\{|PK|\x80[\x02-\x05]", re.DOTALL)
"""The first bytes of safetensors (as `is_safetensors`), of a zip file and of a pickle."""


def detect(path: Path, head: bytes) -> bool:
    """Whether a file begins as safetensors, a zip file or a pickle, or is an index of shards."""
    return bool(BEGINS.match(head)) or path.name.endswith(INDEX)


def open_container(path: Path) -> Checkpoint:
    """Return all tensors of a file, or of the shards that an index lists; only headers are read."""
    if path.name.endswith(INDEX):
        return _open_index(path)
    if path.suffix != ".safetensors" and not is_safetensors(head_of(path)):
        from tiedgpt.weights.torch_file import read_torch_file

        return without_wrappers(read_torch_file(path))
    file = SafetensorsFile.open(path)
    return without_wrappers(Checkpoint(path, "safetensors", file.entries, files=(path,)))


def _open_index(path: Path) -> Checkpoint:
    """Open the shards that an index lists; they lie beside it."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptInputError(f"{path} has no weight_map")
    tensors: dict[str, StoredTensor] = {}
    files, container = [path], ""
    for shard in sorted(set(map(str, weight_map.values()))):
        if shard.endswith(INDEX):
            raise CorruptInputError(f"{path} names an index as a shard: {shard[:80]!r}")
        file = beside(path, shard, links=True)
        opened = open_container(file)
        if twice := tensors.keys() & opened.tensors.keys():
            raise CorruptInputError(f"{path}: two shards hold {min(twice)!r}")
        tensors |= opened.tensors
        files, container = [*files, file], opened.container
    if missing := sorted(weight_map.keys() - tensors.keys()):
        raise CorruptInputError(f"{path} promises {missing[0]!r}, and no shard holds it")
    return Checkpoint(path, container, tensors, files=tuple(files))
