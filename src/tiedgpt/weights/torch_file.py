"""Files of torch.save: looked through first, then loaded by torch as weights only, mapped.

The state dict may lie under "model", "state_dict", "model_state_dict" or "module". Two names on one
storage stay one storage; names lose what a compiled or wrapped module put into them. What nanoGPT's
checkpoints say beside it in plain values ("model_args", "config") is the checkpoint's config. No
code in a pickle is ever run.
"""

from __future__ import annotations

import math
import pickletools
import struct
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.tensors import Native, Read, Storage, StoredTensor, file_reader

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NESTED = ("state_dict", "model", "model_state_dict", "module")
MAX_MEMBER = 64 << 20
"""Bytes of a member of the zip file that holds no tensor."""
MAX_WORK = 1 << 28
"""Steps of the unpickler, and of the hashing of tuples that it builds."""
LEGACY_PICKLES = 5
"""A file of before torch 1.6: a magic number, a version, the machine, what was saved, and keys."""
CONFIG_KEYS = ("model_args", "config")
"""Dicts of plain values beside the state dict that are kept."""


def read_torch_file(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`; one without named tensors is a `CorruptInputError`."""
    saved, places = _load(path)
    state, size = _state_dict(path, saved), path.stat().st_size
    for name, tensor in state.items():
        _check(path, name, tensor, size)
    base = _base_address(state, places)
    tensors = {}
    for name, tensor in state.items():
        tensors[name] = stored_tensor(name, tensor)
        if base is not None and tensor.numel() and tensor.is_contiguous():
            columns = tensor.shape[-1] if tensor.ndim else 1
            reader = file_reader(path, tensor.data_ptr() - base, columns, tensor.element_size())
            tensors[name] = replace(tensors[name], read=reader)
    configs = {key: saved[key] for key in CONFIG_KEYS if isinstance(saved.get(key), Mapping)}
    config = {key: _json_values(values) for key, values in configs.items()}
    return Checkpoint(path, "torch", tensors, config=config, files=(path,))


def stored_tensor(
    name: str, tensor: Tensor, *, owner: int | None = None, dtype: torch.dtype | None = None
) -> StoredTensor:
    """Return a tensor in memory as one that can be read by blocks, each converted to `dtype`."""
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    whole = local.shape == tensor.shape and local.device.type != "meta" and not local.is_complex()
    dtype = dtype or tensor.dtype
    return StoredTensor(
        name,
        tuple(tensor.shape),
        str(dtype).removeprefix("torch."),
        tensor.numel() * dtype.itemsize,
        _storage(local),
        _reader(name, local, dtype) if whole else None,
        trainable=tensor.requires_grad,
        owner=owner,
        strides=None if tensor.is_contiguous() else tuple(tensor.stride()),
    )


def _storage(tensor: Tensor) -> Storage:
    """Return the bytes that a tensor spans; on the meta device the storage object is the place."""
    if tensor.numel() == 0:
        return Storage(("empty", id(tensor)), 0, 0)
    place: object = tensor
    try:
        place = tensor.untyped_storage()
        base = place.data_ptr()
    except (RuntimeError, NotImplementedError):  # sharded and wrapped tensors may have none
        base = 0
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    width = tensor.element_size()
    start = base + int(tensor.storage_offset()) * width
    where = str(tensor.device) if base else ("no address", id(place))
    return Storage(where, start, start + int(reach) * width)


def _reader(name: str, tensor: Tensor, dtype: torch.dtype) -> Read:
    rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1] if tensor.ndim else 1

    def read_block(first: int, end: int, left: int, right: int) -> Native:
        import torch

        from tiedgpt.weights.parameters import convert_tensor

        matrix = tensor.detach().reshape(rows, columns)[first:end, left:right]
        flat = convert_tensor(name, matrix, dtype).flatten().view(torch.uint8).numpy()
        native: Native = flat.view(f"<u{dtype.itemsize}")
        return native.reshape(end - first, right - left)

    return read_block


def _base_address(state: Mapping[str, Tensor], places: Mapping[int, int]) -> int | None:
    """Return the address at which a zip file is mapped, or None where it is not sure.

    Under the right address each storage is one of the zip file's members. The map only tells the
    places: reading it would end the process (SIGBUS) when another program cuts the file short.
    """
    held = (tensor.untyped_storage() for tensor in state.values())
    storages = [(storage.data_ptr(), storage.nbytes()) for storage in held if storage.nbytes()]
    address, n_bytes = storages[0] if storages else (0, 0)
    bases = [address - start for start, size in places.items() if size == n_bytes > 0]
    fitting = [b for b in bases if all(places.get(a - b) == n for a, n in storages)]
    return fitting[0] if len(fitting) == 1 else None


def _load(path: Path) -> tuple[Any, dict[int, int]]:
    """Return what was saved, and of a zip file start -> bytes of each storage in it."""
    import torch

    try:
        with path.open("rb") as file:
            start = file.read(2)
            if start[:1] not in (b"P", b"\x80"):
                raise ValueError("it begins neither as a zip file nor as a pickle")
            is_zip = start == b"PK"  # a legacy file cannot be mapped: it is read whole
            places = _check_zip(file) if is_zip else _check_legacy(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved = torch.load(path, map_location="cpu", mmap=is_zip, weights_only=True)
        return saved, places
    except Exception as error:  # MemoryError, BadZipFile, RuntimeError, UnpicklingError, KeyError..
        why = (str(error) or type(error).__name__).splitlines()[0][:200]
        if "WeightsUnpickler" in str(error) or "weights_only" in str(error).lower():
            why = (
                "it holds more than tensors, and code in a pickle is never run: save the state_dict"
            )
        raise CorruptInputError(f"{path} is no plain file of tensors: {why}") from None


def _check_zip(file: BinaryIO) -> dict[int, int]:
    """Refuse a zip file that would grow when it is read; return the places of its storages."""
    places = {}
    with zipfile.ZipFile(file) as members:
        for info in members.infolist():
            is_storage = "/data/" in info.filename
            if info.compress_type or (info.file_size > MAX_MEMBER and not is_storage):
                raise ValueError("it is compressed, or not what torch.save writes")
            if info.filename.endswith("data.pkl"):
                _check_pickle(members.read(info))
            if is_storage:
                file.seek(info.header_offset)
                name, extra = struct.unpack("<26xHH", file.read(30))
                places[info.header_offset + 30 + name + extra] = info.file_size
    return places


def _check_legacy(file: BinaryIO) -> dict[int, int]:
    """Look into the pickles with which a file of before torch 1.6 begins."""
    file.seek(0)
    for _ in range(LEGACY_PICKLES):
        _check_pickle(file)
    return {}


def _check_pickle(raw: bytes | BinaryIO) -> None:
    """Refuse a pickle that would take unbounded memory or time, as no model does.

    torch's own unpickler makes a bytearray as large as the pickle says; and it hashes tuples of
    tuples, each of which may hold the last one many times. A tuple costs at most as much as all
    steps before it, each time that it is fetched from the memo.
    """
    work, last = 0, ""
    costs: dict[Any, int] = {}
    for op, arg, _ in pickletools.genops(raw):
        if op.name == "GLOBAL" and str(arg).endswith(" bytearray"):
            raise ValueError("its pickle makes a bytearray, as no model does")
        if op.name in ("BINGET", "LONG_BINGET"):
            work += costs.get(arg, 0)
        elif op.name in ("BINPUT", "LONG_BINPUT"):
            costs[arg] = work if last.startswith("TUPLE") else 0
        work, last = work + 1, op.name
        if work > MAX_WORK:
            raise ValueError("its pickle nests tuples, as no model does")


def _state_dict(path: Path, value: Any) -> dict[str, Tensor]:
    """Return the dict of tensors in what was saved, by their names in it."""
    import torch

    for _ in range(4):
        if not isinstance(value, Mapping):
            break
        nested = next((value[key] for key in NESTED if isinstance(value.get(key), Mapping)), None)
        tensors = {
            str(key).encode(errors="backslashreplace").decode(): item
            for key, item in value.items()
            if isinstance(item, torch.Tensor)
        }
        if nested is None and tensors:
            return tensors
        value = nested
    raise CorruptInputError(f"{path} holds no state dict: names of tensors are expected")


def _json_values(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values that JSON has too, and that a message can show."""
    shown = {key: value for key, value in values.items() if isinstance(key, str) and len(key) < 999}
    return {key: value for key, value in shown.items() if _is_json_value(value)}


def _is_json_value(value: object) -> bool:
    if isinstance(value, str):
        return len(value) < 999
    return value is None or (isinstance(value, int | float) and abs(value) < 1e308)


def _check(path: Path, name: str, tensor: Tensor, file_size: int) -> None:
    """Refuse all but dense tensors within the file's bytes."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise UserError(f"{path}: {name!r} is {tensor.layout} on {tensor.device}: not read here")
    held = tensor.untyped_storage().nbytes()
    wider = tensor.numel() * tensor.element_size() > held  # rows that are repeated take no bytes
    if held > file_size or (wider and (tensor.ndim > 2 or tensor.numel() > 1 << 34)):
        raise CorruptInputError(
            f"{path} lies: {name!r} of shape {tuple(tensor.shape)} does not fit a storage of "
            f"{held:,} bytes in a file of {file_size:,}"
        )
