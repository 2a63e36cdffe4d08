"""Where the tensors of a mapped torch.save file lie in it.

A model that went on living in the map would end with the process (SIGBUS) when another program cut
the file short, as one does that saves in place. So tensors are read by place into memory of their
own; the map only tells the places.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path

LOCAL_HEADER = 30
"""Bytes before a member's name; then come the name, an extra field, and the data."""


def data_places(path: Path) -> dict[int, int]:
    """Return start -> size, in bytes, of the storages in a zip file of torch.save."""
    places = {}
    with zipfile.ZipFile(path) as file, path.open("rb") as raw:
        for info in file.infolist():
            if "/data/" not in info.filename:
                continue
            raw.seek(info.header_offset + 26)
            lengths = raw.read(4)
            name, extra = (
                int.from_bytes(lengths[:2], "little"),
                int.from_bytes(lengths[2:], "little"),
            )
            places[info.header_offset + LOCAL_HEADER + name + extra] = info.file_size
    return places


def base_address(storages: Iterable[tuple[int, int]], places: dict[int, int]) -> int | None:
    """Return the address at which the file is mapped, or None where it is not, or none is sure.

    `storages` are (address, size) in memory; under the right base each is one of the places.
    """
    held = {storage for storage in storages if storage[1]}
    if not held:
        return None
    address, size = next(iter(held))
    bases = [address - start for start, n_bytes in places.items() if n_bytes == size]
    fitting = [base for base in bases if all(places.get(a - base) == n for a, n in held)]
    return fitting[0] if len(fitting) == 1 else None
