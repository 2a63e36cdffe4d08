"""Files of torch.save, opened by `torch.load(weights_only=True, mmap=True)`.

The state dict may lie in an inner dictionary; a file with two of them, such as averaged weights
beside the weights, is refused. Two names on one storage stay one storage. Plain values that
nanoGPT's checkpoints keep next to it ("model_args", "config") are the checkpoint's config. No code
in a pickle is ever run.
"""

from __future__ import annotations

import io
import math
import mmap
import pickletools
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.tensors import Native, Read, Storage, StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NESTED = ("state_dict", "model", "model_state_dict", "module")
"""Conventional keys of a state dict."""
MAX_MEMBER = 64 << 20
"""Bytes of a member of the zip file that holds no tensor."""
MAX_PICKLE_ITEMS = 10**8
"""Upper bound of the number of items in tuples, counted once for each use."""
N_LEGACY_PICKLES = 4
"""Number of pickles in a file of before torch 1.6; the last one holds the state dict."""
CONFIG_KEYS = ("model_args", "config")
"""Dicts of plain values beside the state dict that are kept."""


def read_torch_file(file: OpenFile) -> Checkpoint:
    """Return the checkpoint in a file; one without named tensors is a `CorruptInputError`."""
    import torch

    path = file.path
    try:
        members, mapped = _check(file.stream()), file.map()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a legacy file cannot be mapped: it is read at once
            saved = torch.load(path, "cpu", mmap=members is not None, weights_only=True)
    except Exception as error:  # MemoryError, BadZipFile, RuntimeError, UnpicklingError, KeyError..
        why = (str(error) or type(error).__name__).splitlines()[0][:200]
        if "WeightsUnpickler" in str(error) or "weights_only" in str(error).lower():
            why = (
                "it holds more than tensors, and code in a pickle is never run: save the state_dict"
            )
        raise CorruptInputError(f"{path} is no plain file of tensors: {why}") from None
    state = _state_dict(path, saved)
    tensors = {name: stored_tensor(name, tensor) for name, tensor in state.items()}
    if members is not None:
        storages = [tensor.untyped_storage() for tensor in state.values()]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
        largest = (sorted(numbers, reverse=True) for numbers in (sizes.values(), members))
        if any(size > member for size, member in zip_longest(*largest, fillvalue=0)):
            raise CorruptInputError(f"{path} contradicts itself: a storage is cut short in the zip")
        for name, tensor in tensors.items():
            tensors[name] = replace(tensor, read=_while_whole(path, mapped, tensor.read))
    config = {
        key: {name: value for name, value in saved[key].items() if _is_plain(name, value)}
        for key in CONFIG_KEYS
        if isinstance(saved.get(key), Mapping)
    }
    return Checkpoint(path, "torch", tensors, config=config, files=(path,))


def _while_whole(path: Path, mapped: mmap.mmap, read: Read | None) -> Read | None:
    """Return a reader that raises `CorruptInputError` once its mapped file was cut short.

    Reading beyond the end of a mapped file ends the process (SIGBUS), and programs that save again
    in place cut the file short first.
    """

    def read_block(first: int, end: int, low: int, high: int) -> Native:
        if mapped.size() < len(mapped):
            raise CorruptInputError(f"{path} was cut off while it was read")
        return read(first, end, low, high)  # type: ignore[misc]

    return None if read is None else read_block


def _check(file: BinaryIO) -> list[int] | None:
    """Refuse a file that takes far more memory than its own size, as no model does.

    Return the sizes of the storages in a zip file, in bytes; None for a file of before torch 1.6.
    """
    begin = file.read(MAX_MEMBER)
    if begin[:1] not in (b"P", b"\x80"):
        raise ValueError("it begins neither as a zip file nor as a pickle")
    if begin[:2] != b"PK":
        _check_pickle(begin, N_LEGACY_PICKLES)
        return None
    sizes = []
    with zipfile.ZipFile(file) as members:
        for info in members.infolist():
            is_storage = "/data/" in info.filename
            if is_storage:
                sizes.append(info.file_size)
            if info.compress_type or (info.file_size > MAX_MEMBER and not is_storage):
                raise ValueError("it is compressed, or not what torch.save writes")
            if info.filename.endswith("data.pkl"):
                _check_pickle(members.read(info), 1)
    return sizes


def _check_pickle(content: bytes, n_pickles: int) -> None:
    """Refuse a pickle that makes bytes of any number, or repeats tuples inside tuples.

    Hashing such a tuple as a key of a dict would never end.
    """
    if b"\nbytearray\n" in content:
        raise ValueError("its pickle makes a bytearray, as no model does")
    stream, n_items, sizes, is_tuple = io.BytesIO(content), 0, dict[Any, int](), False
    for operation, index, _ in chain.from_iterable(
        pickletools.genops(stream) for _ in range(n_pickles)
    ):
        n_items += 1 + (sizes.get(index, 0) if operation.name.endswith("GET") else 0)
        if operation.name.endswith("PUT") and is_tuple:
            sizes[index] = n_items  # at least those in the tuple
        elif operation.name != "PROTO":
            is_tuple = "TUPLE" in operation.name or index in sizes
        if n_items > MAX_PICKLE_ITEMS:
            raise ValueError("its pickle repeats tuples inside tuples, as no model does")


def _state_dict(path: Path, value: Any) -> dict[str, Tensor]:
    """Return the state dict of a saved value.

    Raises `CorruptInputError` if none exists or a tensor does not fit its storage or the file,
    `UserError` for several state dicts and for tensors that are not dense.
    """
    for _ in range(4):
        if not isinstance(value, Mapping):
            break
        items = _tensors_in(value)
        inner = [key for key, item in value.items() if _holds_model(key, item)]
        if len(inner) > 1 or (inner and inner[0] not in NESTED and _holds_matrix(value)):
            keys = [*map(repr, inner), *(["its first level"] if _holds_matrix(value) else [])]
            raise UserError(
                f"{path} holds several state dicts, and which one is the model is not known: "
                f"{', '.join(keys)[:500]}",
                hint="save one of them alone: torch.save(torch.load(FILE)[KEY], NEW_FILE)",
            )
        nested = value[inner[0]] if inner else None
        if nested is None and items:
            names = (str(key).encode(errors="backslashreplace").decode() for key in items)
            state = dict(zip(names, items.values(), strict=True))
            for name, tensor in state.items():
                _check_tensor(path, name, tensor)
            return state
        value = nested
    raise CorruptInputError(f"{path} holds no state dict: names of tensors are expected")


def _holds_model(key: object, value: object) -> bool:
    """Whether a dictionary is a state dict or holds one under a conventional key."""
    if not isinstance(value, Mapping) or str(key).lower().startswith("optim"):
        return False
    return _holds_matrix(value) or any(_holds_matrix(value.get(key)) for key in NESTED)


def _holds_matrix(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return any(tensor.ndim > 1 for tensor in _tensors_in(value).values())


def _tensors_in(value: Mapping[Any, Any]) -> dict[Any, Tensor]:
    import torch

    return {key: item for key, item in value.items() if isinstance(item, torch.Tensor)}


def _check_tensor(path: Path, name: str, tensor: Tensor) -> None:
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise UserError(f"{path}: {name!r} is {tensor.layout} on {tensor.device}: not read here")
    n_bytes, file_size = tensor.untyped_storage().nbytes(), path.stat().st_size
    wider = tensor.numel() * tensor.element_size() > n_bytes  # rows that are repeated take no bytes
    if n_bytes > file_size or (wider and (tensor.ndim > 2 or tensor.numel() > 1 << 34)):
        raise CorruptInputError(
            f"{path} contradicts itself: {name!r} of shape {tuple(tensor.shape)} does not fit a "
            f"storage of {n_bytes:,} bytes in a file of {file_size:,}"
        )


def _is_plain(name: object, value: object) -> bool:
    """Return whether JSON can hold a named value and a message can show it."""
    if not isinstance(name, str) or len(name) >= 999:
        return False
    if isinstance(value, str):
        return len(value) < 999
    return value is None or (isinstance(value, int | float) and abs(value) < 1e308)


def stored_tensor(
    name: str, tensor: Tensor, *, owner: int | None = None, dtype: torch.dtype | None = None
) -> StoredTensor:
    """Return a tensor in memory as a `StoredTensor` that converts each block to `dtype`."""
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    dense = local.shape == tensor.shape and local.device.type != "meta" and not local.is_complex()
    dtype = dtype or tensor.dtype
    return StoredTensor(
        name,
        tuple(tensor.shape),
        str(dtype).removeprefix("torch."),
        tensor.numel() * dtype.itemsize,
        _storage(local),
        _reader(name, local, dtype) if dense else None,
        trainable=tensor.requires_grad,
        owner=owner,
        strides=None if tensor.is_contiguous() else tuple(tensor.stride()),
    )


def _storage(tensor: Tensor) -> Storage:
    """Return the bytes that a tensor spans; on the meta device the storage object is the place."""
    if tensor.numel() == 0:
        return Storage(("empty", id(tensor)), 0, 0)
    holder: object = tensor
    try:
        holder = tensor.untyped_storage()
        base = holder.data_ptr()
    except (RuntimeError, NotImplementedError):  # sharded and wrapped tensors may have none
        base = 0
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    width = tensor.element_size()
    start = base + int(tensor.storage_offset()) * width
    where = str(tensor.device) if base else ("no address", id(holder))
    return Storage(where, start, start + int(reach) * width)


def _reader(name: str, tensor: Tensor, dtype: torch.dtype) -> Read:
    rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1] if tensor.ndim else 1

    def read_block(first: int, end: int, low: int, high: int) -> Native:
        import torch

        from tiedgpt.weights.parameters import convert_tensor

        matrix = tensor.detach().reshape(rows, columns)[first:end, low:high]
        flat = convert_tensor(name, matrix, dtype).flatten().view(torch.uint8).numpy()
        native: Native = flat.view(f"<u{dtype.itemsize}")
        return native.reshape(end - first, high - low)

    return read_block
