"""Downloads from the Hugging Face hub, uploads to it, and the hub's errors.

Of a repository, the configs, the tokenizer and the weights in one format are fetched. Of a model
directory, the files that transformers and `tiedgpt` load are sent, and the card; a run's
checkpoints, data and record stay here.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tiedgpt.errors import TiedGPTError, UserError
from tiedgpt.text.directory import FILE_NAMES, VOCABULARIES
from tiedgpt.weights.registry import formats

if TYPE_CHECKING:
    from tiedgpt.core.model import GPT
    from tiedgpt.text.tokenizer import Tokenizer

PATTERNS = (
    "*.safetensors", "*.gguf", "*.Modelfile", "README.md", "config.json", "generation_config.json",
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "model.safetensors.index.json", "tokenizer.json", "vocab.json", "merges.txt",
)  # fmt: skip
"""Files of a model directory that are sent."""
CONFIGS = ("config.json", "generation_config.json", "chat_template.jinja")
NO_WEIGHTS = ("training_args.bin", "optimizer.*", "scheduler.*", "rng_state*", "adapter_model.*")
LOGIN = "run `hf auth login` or set HF_TOKEN"
MESSAGE = "Upload a model by tiedgpt"


@dataclass(frozen=True)
class Upload:
    """Files that are sent to a repository."""

    repo: str
    private: bool
    """Whether the repository, if it is new, is private."""
    files: dict[str, int]
    """Bytes by name."""
    url: str | None = None
    """URL of the commit; None in a dry run."""


def is_hub_name(name: str) -> bool:
    """Return whether a repository of the hub can have this name: "gpt2", "owner/name"."""
    return bool(re.fullmatch(r"[\w][\w.-]*(/[\w.-]+)?", name)) and len(name) <= 96


@contextlib.contextmanager
def asking_hub(problem: str) -> Iterator[None]:
    """Turn an error of the hub, its library or the network into a `UserError` about `problem`."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except TiedGPTError:
        raise
    except LocalEntryNotFoundError:
        raise UserError(f"{problem}: the hub cannot be reached", hint="check the name") from None
    except RepositoryNotFoundError:
        hint = f"check the name; for a private one, {LOGIN}"
        raise UserError(f"{problem}: the hub has no such repository", hint=hint) from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        refusals = {401: "does not know the token", 403: "does not let its user write there"}
        says = refusals.get(status, f"says {status}: {error.server_message}")
        remedy = f"{LOGIN} to a token that may write" if status in refusals else None
        raise UserError(f"{problem}: the hub {says}", hint=remedy) from None
    except Exception as error:  # of whichever HTTP library; or a card that the hub refuses
        texts = filter(None, (str(error), str(error.__cause__ or "")))
        why = " ".join(" ".join(texts).split()) or type(error).__name__
        raise UserError(f"{problem}: {why}") from None


def download(
    name: str, *, weights: bool, revision: str | None, cache_dir: str | os.PathLike[str] | None
) -> Path:
    """Download a repository, its weights only with `weights`, and return the directory.

    Raises `UserError` if
    there is no such repository, or if it holds several models.
    """
    if not is_hub_name(name):
        raise UserError(f"{name} does not exist", hint="check the name")
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = [*CONFIGS, *FILE_NAMES]
    with asking_hub(f"{name} is no file or directory here"):
        try:
            siblings = HfApi().model_info(name, revision=revision).siblings or []
            files = [sibling.rfilename for sibling in siblings]
            patterns = select_files(name, files, weights=weights)
        except (HfHubHTTPError, UserError):
            raise
        except Exception:  # offline, by any HTTP library: the cache may have it all the same
            for format in formats() if weights else ():
                groups = (pattern for group in format.hub_patterns for pattern in group)
                patterns += [*format.hub_configs, *groups]
        options: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir}
        return Path(snapshot_download(name, allow_patterns=patterns, **options))


def select_files(name: str, files: Sequence[str], *, weights: bool = True) -> list[str]:
    """Return the files of a repository to fetch: configs, tokenizer, and weights in one format.

    Raises `UserError` if it holds several models in that format.
    """

    def matching(patterns: Iterable[str], folders: Iterable[Path] = (Path(),)) -> list[str]:
        paths = [Path(file) for file in files if Path(file).parent in folders]
        return [str(path) for path in paths if any(fnmatch(path.name, p) for p in patterns)]

    selected = matching({**dict.fromkeys(CONFIGS), **dict.fromkeys(FILE_NAMES)})
    if not matching(VOCABULARIES):
        records = (format.tokenizer for format in formats())
        selected += matching([record.hub_name for record in records if record is not None])
    others = matching(NO_WEIGHTS)
    for format in formats() if weights else ():
        folders = {Path(), *(Path(file).parent for file in format.file_names)}
        for patterns in format.hub_patterns:
            chosen = [file for file in matching(patterns, folders) if file not in others]
            if format.is_whole_in_one_file and len(chosen) > 1:
                raise UserError(
                    f"{name} holds {len(chosen)} files of weights ({', '.join(chosen[:6])})",
                    hint="download one of them and name it",
                )
            if chosen:
                return [*selected, *matching(format.hub_configs), *chosen]
    return selected


def push(
    directory: Path,
    repo: str,
    *,
    private: bool = True,
    message: str = MESSAGE,
    token: str | None = None,
    dry_run: bool = False,
) -> Upload:
    """Send a model directory to `repo`, "owner/name", in one commit, and return the files.

    A new repository is `private`; an existing one keeps its visibility. Without `token`, that of
    `hf auth login` or HF_TOKEN is used. A dry run sends nothing and needs no token.

    Raises `UserError` for a directory without a model in transformers' layout, a wrong name, no
    token, and if the hub refuses or cannot be reached; then the repository keeps its old files.
    """
    if not is_hub_name(repo) or "/" not in repo:
        raise UserError(f"{repo!r} is no repository", hint="give owner/name")
    if not any(directory.glob("*.safetensors")) or not (directory / "config.json").is_file():
        raise UserError(
            f"{directory} is no directory with config.json and safetensors",
            hint="make one with `tiedgpt convert MODEL out --to transformers`",
        )
    paths = sorted({path for pattern in PATTERNS for path in directory.glob(pattern)})
    upload = Upload(repo, private, {path.name: path.stat().st_size for path in paths})
    if dry_run:
        return upload
    import huggingface_hub

    token = token or huggingface_hub.get_token()
    if token is None:
        raise UserError("you are not logged in to the hub", hint=LOGIN)
    api = huggingface_hub.HfApi(token=token)
    with asking_hub(f"{repo}: nothing was committed"):
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=directory,
            allow_patterns=list(map(glob.escape, upload.files)),
            commit_message=message,
        )
    return Upload(repo, private, upload.files, str(commit.commit_url))


def push_model(
    model: GPT, repo: str, *, tokenizer: Tokenizer | None, private: bool, token: str | None
) -> str:
    """Send a model in memory, and its tokenizer; return the URL of the commit."""
    from tiedgpt.weights.formats.transformers.writer import save_model, save_tokenizer

    with TemporaryDirectory() as directory:
        save_model(model, directory)
        if tokenizer is not None:
            save_tokenizer(tokenizer, model.config, Path(directory))
        return str(push(Path(directory), repo, private=private, token=token).url)
