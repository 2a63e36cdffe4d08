"""Upload of a model directory to a repository of the Hugging Face hub, and the hub's errors.

The files that transformers and `tiedgpt` load are sent, and the card. A run's checkpoints, data
and record stay here.
"""

from __future__ import annotations

import contextlib
import glob
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tiedgpt.errors import TiedGPTError, UserError

if TYPE_CHECKING:
    from tiedgpt.core.model import GPT
    from tiedgpt.text.tokenizer import Tokenizer

PATTERNS = (
    "*.safetensors", "*.gguf", "*.Modelfile", "README.md", "config.json", "generation_config.json",
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "model.safetensors.index.json", "tokenizer.json", "vocab.json", "merges.txt",
)  # fmt: skip
"""Files of a model directory that are sent."""
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
