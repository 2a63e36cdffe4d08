"""Data sets of the Hugging Face hub: `hf:OWNER/NAME[/FOLDER][@REVISION][:SPLIT]` -> files here.

Only files are read that `readers.py` knows; no code of a data set is run. The files of a split are
those that its card lists, or else those with its name in theirs.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tiedgpt.data.readers import DELIMITERS, PARQUET, ending
from tiedgpt.errors import TiedGPTError, UserError
from tiedgpt.files import JSON_LINES, writing

HUB = "hf:"
SOURCE = re.compile(r"hf:([\w.-]+/[\w.-]+)((?:/[\w.-]+)*)(?:@([\w./-]+))?(?::([\w.-]+))?", re.ASCII)
KINDS = (PARQUET, *JSON_LINES, *DELIMITERS, ".txt")
"""Endings of files with texts; the first that a data set has is read."""
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""What each split may be called in names of files, as in `datasets`."""


@dataclass(frozen=True)
class HubData:
    """The files of a data set, which are on this machine."""

    names: dict[str, str]
    """What each path is called: `hf:OWNER/NAME@REVISION/FILE`."""
    pin: str
    """The source with the commit that it was found at."""


def fetch_data(source: str) -> HubData:
    """Fetch the files of a split into the hub's cache, as they are at one commit.

    Without a split it is the training split. Raises `UserError` where there is no such data set or
    split, or no file that can be read; `NoRoomError` where the disk is full.
    """
    parts = SOURCE.fullmatch(source)
    if parts is None:
        raise UserError(
            f"{source!r} names no data set of the hub",
            hint="write hf:OWNER/NAME, hf:OWNER/NAME:SPLIT or hf:OWNER/NAME/FOLDER@REVISION:SPLIT",
        )
    repository, folder, revision, split = parts.groups()
    root, commit, files = _download(repository, folder.strip("/"), revision, split)
    names = {str(root / file): f"{HUB}{repository}@{commit}/{file}" for file in files}
    return HubData(names, f"{HUB}{repository}{folder}@{commit}" + f":{split}" * bool(split))


def _download(
    repository: str, folder: str, revision: str | None, split: str | None
) -> tuple[Path, str, list[str]]:
    """Return where a split's files are in the cache, their commit and their names."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi().dataset_info(repository, revision=revision)
        names = [sibling.rfilename for sibling in info.siblings or []]
        card: Any = info.card_data or {}
        configs = card.get("configs") or ()
        files = select_data(repository, names, folder, split, configs)
        commit, patterns = str(info.sha), list(map(glob.escape, files))
        with writing(Path(HF_HUB_CACHE)):
            root = snapshot_download(
                repository, repo_type="dataset", revision=commit, allow_patterns=patterns
            )
        return Path(root), commit, files
    except TiedGPTError:
        raise
    except HfHubHTTPError as error:
        why = f"the hub says {error.response.status_code}"
    except Exception:  # offline, by whichever HTTP library: the cache may have it all the same
        why = "the hub cannot be reached, and its cache has no such commit"
        if (snapshot := _find_snapshot(repository, revision)) is not None:
            here = [str(file.relative_to(snapshot)) for file in snapshot.rglob("*.*")]
            return snapshot, snapshot.name, select_data(repository, here, folder, split)
    raise UserError(f"hf:{repository} cannot be fetched: {why}", hint="check the name")


def _find_snapshot(repository: str, revision: str | None) -> Path | None:
    """Return the directory of a revision in the hub's cache; None where there is none."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    with suppress(CacheNotFound):
        for cache in scan_cache_dir().repos:
            for each in cache.revisions if cache.repo_id == repository else ():
                if cache.repo_type == "dataset" and revision == each.commit_hash:
                    return Path(each.snapshot_path)
    return None


def select_data(
    repository: str,
    files: Sequence[str],
    folder: str,
    split: str | None,
    configs: Sequence[dict[str, Any]] = (),
) -> list[str]:
    """Return the files of a repository that hold a split, in order.

    `configs` are the data sets that its card describes. `UserError` where nothing can be read.
    """
    inside = [file for file in sorted(files) if file.startswith(f"{folder}/" if folder else "")]
    kind = next((kind for kind in KINDS if any(ending(file) == kind for file in inside)), None)
    if kind is None:
        raise UserError(
            f"hf:{repository}{'/' * bool(folder)}{folder} has no {', '.join(KINDS)} files",
            hint="name another data set or folder",
        )
    of_kind = [file for file in inside if ending(file) == kind]
    splits = {} if folder else _splits_of_card(repository, configs, of_kind)
    for name, words in () if splits else SPLITS.items():
        word = re.compile(rf"(^|[/._-])({'|'.join(words)})([/._-]|$)", re.IGNORECASE)
        if there := [file for file in of_kind if word.search(file[len(folder) :])]:
            splits[name] = there
    if split is None and not splits:
        return of_kind
    chosen = splits.get(split or "train")
    if chosen is None:
        raise UserError(
            f"hf:{repository} has no split {split or 'train'!r}",
            hint=f"it has {', '.join(splits) or 'none: leave it out'}",
        )
    return chosen


def _splits_of_card(
    repository: str, configs: Sequence[dict[str, Any]], files: Sequence[str]
) -> dict[str, list[str]]:
    """Return the files of each split of the default data set on a card; {} where it lists none."""
    listed = [each for each in configs if isinstance(each.get("data_files"), list)]
    if len(listed) > 1:
        listed = [c for c in listed if c.get("default") or c.get("config_name") == "default"]
    if not listed:
        return {}
    splits: dict[str, list[str]] = {}
    for entry in listed[0]["data_files"]:
        if isinstance(entry, dict) and "split" in entry:
            paths = entry.get("path")
            patterns = [paths] if isinstance(paths, str) else paths or []
            there = [file for file in files if any(fnmatch(file, p) for p in patterns)]
            splits |= {str(entry["split"]): there} if there else {}
    return splits
