"""What KerasHub saved once (see `fixtures/make_keras.py`), unpacked for the tests."""

import tarfile
from pathlib import Path

ARCHIVE = Path(__file__).parent / "fixtures" / "keras" / "saved.tar.xz"


def unpack(directory: Path) -> Path:
    """Return a directory with preset/, sharded/, bfloat16/, model.keras, backbone.keras, ..."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    return directory
