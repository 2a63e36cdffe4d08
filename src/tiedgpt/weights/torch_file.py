"""Files of torch.save: looked through first, then loaded by torch as weights only, mapped.

The state dict may lie under "model", "state_dict", "model_state_dict" or "module". Two names on one
storage stay one storage; names lose what a compiled or wrapped module put into them. What nanoGPT's
checkpoints say beside it in plain values ("model_args", "config") is the checkpoint's config. No
code in a pickle is ever run.
"""

from __future__ import annotations

import math
import pickletools
import re
import struct
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import Checkpoint, unwrapped
from tiedgpt.weights.tensors import Native, Read, Storage, StoredTensor, plain_reader

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".pt", ".pth", ".bin")
NESTED = ("state_dict", "model", "model_state_dict", "module")
MAX_MEMBER = 64 << 20
"""Bytes of a member of the zip file that holds no tensor."""
MAX_NESTING = 8
MAKES_BYTES = ("builtins bytearray", "__builtin__ bytearray")
LEGACY_PICKLES = 4
"""A file of before torch 1.6: a magic number, a version, the machine, and what was saved."""
KEPT = ("model_args", "config")
"""Dicts of plain values beside the state dict that are kept, of which each at most so much:"""
MAX_KEPT, MAX_KEPT_TEXT = 256, 1024
LOCAL_HEADER = 30
"""Bytes before a zip member's name; then come the name, an extra field, and the data."""


def detect(path: Path, head: bytes) -> bool:
    """Whether a file begins as a zip file or a pickle, or has the name of one."""
    begins = head[:2] == b"PK" or re.match(rb"\x80[\x02-\x05]", head)
    return bool(begins) or path.suffix in SUFFIXES


def read(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`; one without named tensors is a `CorruptInputError`."""
    saved = _load(path)
    state = _state_dict(path, saved)
    size = path.stat().st_size
    base = _base_address(path, state)
    tensors: dict[str, StoredTensor] = {}
    for their_name, tensor in state.items():
        name = unwrapped(their_name)
        try:
            name.encode()
        except UnicodeEncodeError:
            raise CorruptInputError(f"{path}: the name {name[:80]!r} is no text") from None
        if name in tensors:
            raise CorruptInputError(f"{path} holds {name!r} twice, with and without a prefix")
        _check(path, name, tensor, size)
        stored = stored_tensor(name, tensor)
        if base is not None and tensor.numel() and tensor.is_contiguous():
            columns = tensor.shape[-1] if tensor.ndim else 1
            start = tensor.data_ptr() - base
            reader = plain_reader(path, start, columns, tensor.element_size())
            stored = replace(stored, read=reader)
        tensors[name] = stored
    config = {key: _plain(saved[key]) for key in KEPT if isinstance(saved.get(key), Mapping)}
    return Checkpoint(path, "torch", tensors, config=config, files=(path,))


def stored_tensor(name: str, tensor: Tensor, *, owner: int | None = None) -> StoredTensor:
    """Return a tensor in memory as one that can be read by blocks."""
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    whole = local.shape == tensor.shape and local.device.type != "meta" and not local.is_complex()
    return StoredTensor(
        name,
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        tensor.numel() * tensor.element_size(),
        _storage(local),
        _reader(local) if whole else None,
        trainable=tensor.requires_grad,
        owner=owner,
        strides=None if tensor.is_contiguous() else tuple(tensor.stride()),
    )


def _storage(tensor: Tensor) -> Storage:
    """Return the bytes that a tensor spans; on the meta device the storage object is the place."""
    storage: object = tensor
    try:
        storage = tensor.untyped_storage()
        base = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sharded and wrapped tensors may have none
        base = 0
    width = tensor.element_size()
    if tensor.numel() == 0:
        return Storage(("empty", id(tensor)), 0, 0)
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start = int(tensor.storage_offset()) * width
    stop = start + int(reach) * width
    if base == 0:
        return Storage(("no address", id(storage)), start, stop)
    return Storage(str(tensor.device), base + start, base + stop)


def _reader(tensor: Tensor) -> Read:
    rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1] if tensor.ndim else 1

    def read_block(first: int, end: int, left: int, right: int) -> Native:
        import torch

        with torch.no_grad():
            matrix = tensor.detach().reshape(rows, columns)[first:end, left:right]
            flat = matrix.cpu().contiguous().flatten().view(torch.uint8).numpy()
        native: Native = flat.view(np.dtype(f"<u{tensor.element_size()}"))
        return native.reshape(end - first, right - left)

    return read_block


def _base_address(path: Path, state: Mapping[str, Tensor]) -> int | None:
    """Return the address at which a zip file is mapped, or None where it is not sure.

    A model that lived in the map would end the process (SIGBUS) when another program cuts the file
    short. So tensors are read by place, into memory of their own; the map only tells the places.
    Under the right address each storage is one of the zip file's members.
    """
    import torch

    if not _is_zip(path):
        return None
    places = _data_places(path)
    dense = [t for t in state.values() if t.layout is torch.strided and t.device.type == "cpu"]
    storages = {(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in dense}
    storages = {(address, size) for address, size in storages if size}
    if not storages:
        return None
    address, size = next(iter(storages))
    bases = [address - start for start, n_bytes in places.items() if n_bytes == size]
    fitting = [base for base in bases if all(places.get(a - base) == n for a, n in storages)]
    return fitting[0] if len(fitting) == 1 else None


def _data_places(path: Path) -> dict[int, int]:
    """Return start -> size, in bytes, of the storages in a zip file of torch.save."""
    places = {}
    with zipfile.ZipFile(path) as file, path.open("rb") as raw:
        for info in file.infolist():
            if "/data/" in info.filename:
                raw.seek(info.header_offset + 26)
                name, extra = struct.unpack("<HH", raw.read(4))
                places[info.header_offset + LOCAL_HEADER + name + extra] = info.file_size
    return places


def _load(path: Path) -> Any:
    import torch

    mapped = _is_zip(path)  # a legacy file is read whole
    if mapped:
        _check_zip(path)
    else:
        _check_legacy(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except MemoryError:
        raise CorruptInputError(f"{path} claims more than the memory there is") from None
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, OSError, KeyError, ...
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "WeightsUnpickler" in str(error) or "weights_only" in str(error).lower():
            why = "it holds more than tensors, and code in a pickle is never run"
        raise CorruptInputError(f"{path} is no plain file of tensors: {why}") from None


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _check_zip(path: Path) -> None:
    """Refuse a zip file that would grow when it is read."""
    try:
        with zipfile.ZipFile(path) as file:
            for info in file.infolist():
                name = info.filename.rpartition("/")[2]
                limit = 64 if name in ("byteorder", "version") else MAX_MEMBER
                if info.compress_type or ("/data/" not in info.filename and info.file_size > limit):
                    raise CorruptInputError(
                        f"{path}: {name[:80]!r} in it is compressed, or {info.file_size:,} bytes: "
                        "torch.save writes no such file"
                    )
                if name == "data.pkl":
                    _check_pickle(path, file.read(info))
    except CorruptInputError:
        raise
    except Exception as error:  # BadZipFile, EOFError, struct.error, RuntimeError, ...
        why = str(error) or type(error).__name__
        raise CorruptInputError(f"{path} is no sound file of torch.save: {why}") from None


def _check_legacy(path: Path) -> None:
    """Look into the pickles with which a file of before torch 1.6 begins."""
    with path.open("rb") as file:
        for _ in range(LEGACY_PICKLES):
            try:
                _check_pickle(path, file)
            except CorruptInputError:
                raise
            except ValueError:  # no such file, or cut off: torch says so
                return


def _check_pickle(path: Path, raw: bytes | BinaryIO) -> None:
    """Refuse a pickle that would take unbounded memory or time, as no model does.

    torch's own unpickler makes a bytearray as large as the pickle says; and hashing a tuple of
    tuples of tuples, each holding the last twice, never ends. The stack is followed only to see how
    deeply tuples are nested: it holds each value's depth.
    """
    mark = -1
    stack: list[int] = []
    memo: dict[Any, int] = {}
    try:
        for op, arg, _ in pickletools.genops(raw):
            if op.name == "GLOBAL" and arg in MAKES_BYTES:
                raise CorruptInputError(f"{path}: its pickle makes a bytearray, as no model does")
            if op.name in ("BINGET", "LONG_BINGET", "GET"):
                stack.append(memo.get(arg, 0))
            elif op.name in ("BINPUT", "LONG_BINPUT", "PUT"):
                memo[arg] = stack[-1]
            elif op.name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif op.name == "DUP":
                stack.append(stack[-1])
            else:
                popped: list[int] = []
                before = op.stack_before
                if pickletools.stackslice in before or op.name == "POP_MARK":
                    while stack[-1] != mark:
                        popped.append(stack.pop())
                    stack.pop()
                    before = before[: before.index(pickletools.markobject)]
                popped += [stack.pop() for _ in before]
                depth = 1 + max(popped, default=0) if op.name.startswith("TUPLE") else 0
                if depth > MAX_NESTING:
                    raise CorruptInputError(f"{path}: its pickle nests tuples, as no model does")
                after = op.stack_after
                stack += [mark if item is pickletools.markobject else depth for item in after]
    except (IndexError, UnicodeDecodeError, struct.error) as error:
        raise CorruptInputError(f"{path}: its pickle is damaged: {error}") from None


def _state_dict(path: Path, value: Any) -> dict[str, Tensor]:
    """Return the dict of tensors in what was saved, by their names in it."""
    import torch

    for _ in range(4):
        if isinstance(value, torch.Tensor):
            raise CorruptInputError(f"{path} holds one tensor, not a state dict of named ones")
        if not isinstance(value, Mapping):
            break
        tensors = {str(key): item for key, item in value.items() if isinstance(item, torch.Tensor)}
        nested = [key for key in NESTED if isinstance(value.get(key), Mapping)]
        if not nested and tensors:
            return tensors
        if not nested:
            break
        value = value[nested[0]]
    raise CorruptInputError(f"{path} holds no state dict: names of tensors are expected")


def _plain(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values that JSON has too."""

    def is_plain(value: object) -> bool:
        if isinstance(value, str):
            return len(value) <= MAX_KEPT_TEXT and value.isprintable()
        if isinstance(value, float):
            return math.isfinite(value)
        if isinstance(value, int):
            return -(2**63) <= value < 2**63
        return value is None

    first = list(values.items())[:MAX_KEPT]
    named = [(key, value) for key, value in first if isinstance(key, str) and is_plain(key)]
    return {key: value for key, value in named if is_plain(value)}


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
