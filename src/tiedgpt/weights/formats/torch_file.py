"""torch.save's files as a checkpoint: mapped, weights only, no code in them ever runs.

The state dict may lie under "model" or "state_dict", and its names may carry what a compiled or
wrapped module puts before them. Two names on one storage stay one storage. What nanoGPT's
checkpoints say beside it in plain values ("model_args", "config") is the checkpoint's config.
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

import numpy as np

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.formats.torch_places import base_address, data_places
from tiedgpt.weights.tensors import Native, Read, Storage, StoredTensor, plain_reader

if TYPE_CHECKING:
    from torch import Tensor

NESTED = ("state_dict", "model", "model_state_dict", "module")
MAX_MEMBER = 64 << 20
MAX_NESTING = 8
MAKES_BYTES = ("builtins bytearray", "__builtin__ bytearray")
LEGACY_PICKLES = 4
"""A magic number, a version, the machine, and what was saved."""
KEPT = ("model_args", "config")
"""Dicts of plain values beside the state dict that are kept, of which each at most so much:"""
MAX_KEPT, MAX_KEPT_TEXT = 256, 1024
WRAPPERS = ("_orig_mod.", "module.")


def open_torch(path: Path) -> Checkpoint:
    """Open a file of torch.save; one that holds no tensors by name is a `CorruptInputError`."""
    saved = _load(path)
    state = _state_dict(path, saved)
    size = path.stat().st_size
    base = _base_address(path, state)
    tensors: dict[str, StoredTensor] = {}
    for their_name, tensor in state.items():
        name = _unwrapped(their_name)
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
            read = plain_reader(path, start, columns, tensor.element_size())
            stored = replace(stored, read=read)
        tensors[name] = stored
    config = {key: _plain(saved[key]) for key in KEPT if isinstance(saved.get(key), Mapping)}
    return Checkpoint(path, "torch", tensors, config=config, files=(path,))


def _base_address(path: Path, state: Mapping[str, Tensor]) -> int | None:
    """Return where in memory a file is mapped, if it is."""
    import torch

    if not _is_zip(path):
        return None
    plain = [t for t in state.values() if t.layout is torch.strided and t.device.type == "cpu"]
    held = [t.untyped_storage() for t in plain]
    return base_address(((s.data_ptr(), s.nbytes()) for s in held), data_places(path))


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
    held: object = tensor
    try:
        held = tensor.untyped_storage()
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
        return Storage(("no address", id(held)), start, stop)
    return Storage(str(tensor.device), base + start, base + stop)


def _reader(tensor: Tensor) -> Read:
    rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1] if tensor.ndim else 1

    def read(first: int, end: int, left: int, right: int) -> Native:
        import torch

        with torch.no_grad():
            matrix = tensor.detach().reshape(rows, columns)[first:end, left:right]
            flat = matrix.cpu().contiguous().flatten().view(torch.uint8).numpy()
        native: Native = flat.view(np.dtype(f"<u{tensor.element_size()}"))
        return native.reshape(end - first, right - left)

    return read


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
    except (
        Exception
    ) as error:  # zipfile raises BadZipFile, EOFError, struct.error, RuntimeError, ...
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
    """Refuse what torch would do and no model needs.

    A bytearray is made as large as is said; and of tuples of tuples of tuples, hashing one that
    holds the last twice never ends.
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
                for _ in before:
                    popped.append(stack.pop())
                deep = 1 + max(popped, default=0) if op.name.startswith("TUPLE") else 0
                if deep > MAX_NESTING:
                    raise CorruptInputError(f"{path}: its pickle nests tuples, as no model does")
                after = op.stack_after
                stack += [mark if item is pickletools.markobject else deep for item in after]
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
    """Return what is said in plain values that JSON has too."""
    return {
        key: value for key, value in list(values.items())[:MAX_KEPT]
        if isinstance(key, str) and _is_plain(key) and _is_plain(value)
    }  # fmt: skip


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_KEPT_TEXT and value.isprintable()
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return value is None


def _unwrapped(name: str) -> str:
    while name.startswith(WRAPPERS):
        for wrapper in WRAPPERS:
            name = name.removeprefix(wrapper)
    return name


def _check(path: Path, name: str, tensor: Tensor, file_size: int) -> None:
    """Refuse what is no dense tensor within the file's bytes."""
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
