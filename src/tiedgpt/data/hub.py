"""Data sets of the Hugging Face hub, streamed: `hf:OWNER/NAME[/FOLDER][@REVISION][:SPLIT]`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tiedgpt.errors import TiedGPTError, UserError

HUB = "hf:"
SOURCE = re.compile(r"hf:([\w.-]+/[\w.-]+)((?:/[\w.-]+)*)(?:@([\w./-]+))?(?::([\w.-]+))?", re.ASCII)


@dataclass(frozen=True)
class HubData:
    """One split of a data set at one commit. Code of a data set is never run."""

    repository: str
    folder: str
    commit: str
    split: str | None
    n_bytes: int
    """Size of the files of all splits."""

    @property
    def name(self) -> str:
        """The source with its commit."""
        folder, split = self.folder and f"/{self.folder}", f":{self.split}" if self.split else ""
        return f"{HUB}{self.repository}{folder}@{self.commit}{split}"

    def count_shards(self) -> int:
        """Return the number of files that `datasets` reads independently."""
        return int(self._open().num_shards)

    def records(self, section: tuple[int, int] | None = None) -> Iterator[tuple[str, Any]]:
        """Yield (place, record) for each row, or for the rows of one shard (index, n_shards)."""
        with _reading(self.repository):
            rows, name = self._open(), self.name
            if section is not None:
                index, n_shards = section
                rows, name = rows.shard(n_shards, index), f"{name}, shard {index}"
            for number, row in enumerate(rows, 1):
                yield f"{name}:{number}", row

    def _open(self) -> Any:
        with _reading(self.repository):
            from datasets import load_dataset

            split = self.split or "train"
            source = {"data_dir": self.folder or None, "revision": self.commit}
            data = load_dataset(self.repository, streaming=True, **source)
            if split not in data:
                raise UserError(
                    f"hf:{self.repository} has no split {split!r}", hint=f"it has {', '.join(data)}"
                )
            return data[split]


def find_data(source: str) -> HubData:
    """Return a data set of the hub at its newest commit, or at the revision of the source.

    Raises `UserError` if the hub has no such data set or cannot be reached.
    """
    match = SOURCE.fullmatch(source)
    if match is None:
        raise UserError(
            f"{source!r} names no data set of the hub",
            hint="write hf:OWNER/NAME, hf:OWNER/NAME:SPLIT or hf:OWNER/NAME/FOLDER@REVISION:SPLIT",
        )
    repository, folder, revision, split = match.groups()
    with _reading(repository):
        from huggingface_hub import HfApi

        info = HfApi().dataset_info(repository, revision=revision, files_metadata=True)
        folder = folder.strip("/")
        inside = (file for file in info.siblings or [] if file.rfilename.startswith(folder))
        n_bytes = sum(file.size or 0 for file in inside)
        return HubData(repository, folder, str(info.sha), split, n_bytes)


@contextmanager
def _reading(repository: str) -> Iterator[None]:
    """Convert every error of `datasets` and of the hub to `UserError`."""
    try:
        yield
    except (TiedGPTError, GeneratorExit):
        raise
    except ImportError:
        raise UserError(
            "hf: data sets need the package datasets", hint="pip install 'tiedgpt[data]'"
        ) from None
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        first_line = str(error).strip().partition("\n")[0]
        reason = f"the hub says {status}" if status else first_line or type(error).__name__
        raise UserError(
            f"hf:{repository} cannot be read: {reason}", hint="check the name and the network"
        ) from None
