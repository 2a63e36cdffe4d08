"""A model directory, to a repository of the Hugging Face hub: what is sent, and what is not.

Sent are the files that transformers and `tiedgpt` load, and the card. A run's checkpoints, data and
record stay here, and paths of this machine are replaced by the names of their files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tiedgpt.errors import UserError
from tiedgpt.files import reading
from tiedgpt.weights.sources import HUB_NAME

if TYPE_CHECKING:
    from tiedgpt.core.model import GPT
    from tiedgpt.text.tokenizer import Tokenizer

TEXTS = (
    "README.md", "config.json", "generation_config.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "model.safetensors.index.json",
)  # fmt: skip
"""Files of a model directory that are sent without paths of this machine."""
TOKENS = ("tokenizer.json", "vocab.json", "merges.txt")
"""Files that are sent as they are: tokens may look like paths."""
MESSAGE = "Upload a model by tiedgpt"


@dataclass(frozen=True)
class Upload:
    """What is sent to a repository."""

    repo: str
    private: bool
    """Of a repository that is new."""
    files: dict[str, int]
    """Bytes by name."""
    cleaned: tuple[str, ...]
    """The files in which paths of this machine were replaced."""
    url: str | None = None
    """Of the commit; None in a dry run."""


def push(
    directory: Path,
    repo: str,
    *,
    more: Iterable[Path] = (),
    paths: Iterable[str] = (),
    private: bool = True,
    message: str = MESSAGE,
    token: str | None = None,
    dry_run: bool = False,
) -> Upload:
    """Send a model directory to `repo`, "owner/name", in one commit; return what was sent.

    A repository that is new is `private`; one that is there keeps its visibility. `more` are files
    to send with it. `paths` are names of files and directories here that no file may tell, beside
    those below the home, the working and the model's directory. `token` None takes the one of
    `hf auth login` or HF_TOKEN. A dry run sends nothing and needs neither.

    Raises `UserError` for a directory that holds no model of transformers' layout, a wrong name, no
    token, and where the hub refuses or cannot be reached; then the repository has its old files.
    """
    is_name = HUB_NAME.fullmatch(repo) and not repo.startswith((".", "-"))
    if not is_name or repo.count("/") != 1 or len(repo) > 96:
        raise UserError(f"{repo!r} is no repository", hint="give owner/name")
    weights = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    if not weights or not (directory / "config.json").is_file():
        hint = "make one with `tiedgpt convert MODEL out --to transformers`"
        problem = f"{directory} is no directory with config.json and safetensors"
        raise UserError(problem, hint=hint)
    named = [directory / name for name in (*TEXTS, *TOKENS)]
    paths, cleaned = set(paths), []
    contents: dict[str, bytes | Path] = {}
    for path in [*weights, *filter(Path.is_file, named), *more]:
        contents[path.name] = path
        if path.name in TEXTS or path.suffix == ".Modelfile":
            with reading(path, "text in UTF-8"):
                text = path.read_text(encoding="utf-8")
            if (clean := without_paths(text, directory, paths)) != text:
                contents[path.name] = clean.encode()
                cleaned.append(path.name)
    sizes = {
        name: len(held) if isinstance(held, bytes) else held.stat().st_size
        for name, held in contents.items()
    }
    url = None if dry_run else _commit(repo, contents, private, message, token)
    return Upload(repo, private, sizes, tuple(cleaned), url)


def without_paths(text: str, directory: Path, paths: Iterable[str]) -> str:
    """Return a text with each path of this machine replaced by its last part."""
    for path in sorted((path for path in paths if "/" in path), key=len, reverse=True):
        for spelling in (path, json.dumps(path)[1:-1]):
            text = re.sub(rf"(?<![\w./]){re.escape(spelling)}(?![\w/])", Path(path).name, text)
    places = {Path.home(), Path.cwd(), directory.resolve()} - {Path("/")}
    for place in sorted(map(str, places), key=len, reverse=True):
        below = rf"(?<![\w:/.]){re.escape(place)}(/[^\s'\"`|)<>,;]*)?(?![\w-])"
        text = re.sub(below, lambda found: Path(found[0]).name, text)
    return text


def _commit(
    repo: str, contents: dict[str, bytes | Path], private: bool, message: str, token: str | None
) -> str:
    """Make the repository, if it is not there, and commit all files at once; return the URL."""
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    token = token or get_token()
    if token is None:
        raise UserError(
            "the hub takes files from its users alone, and there is no token",
            hint="run `hf auth login`, or set HF_TOKEN",
        )
    operations = [CommitOperationAdd(name, held) for name, held in contents.items()]
    try:
        api = HfApi(token=token)
        api.create_repo(repo, private=private, exist_ok=True)
        return str(api.create_commit(repo, operations, commit_message=message).commit_url)
    except HfHubHTTPError as error:
        status = error.response.status_code
        refusals = {401: "does not know the token", 403: "does not let its user write there"}
        hint = "run `hf auth login` with a token that may write" if status in refusals else None
        said = refusals.get(status, f"says {status}: {error.server_message}")
        raise UserError(f"{repo}: the hub {said}", hint=hint) from None
    except Exception as error:  # of whichever HTTP library; or a card that the hub refuses
        told = filter(None, (str(error), str(error.__cause__ or "")))
        why = " ".join(" ".join(told).split()) or type(error).__name__
        raise UserError(f"{repo}: nothing was committed: {why}") from None


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
