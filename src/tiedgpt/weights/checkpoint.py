"""The records of a checkpoint: its tensors, config and claim, its GPT, and its format.

A `Format` opens a file as a `Checkpoint` and translates that into a `GPTCheckpoint`. `registry.py`
lists the formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiedgpt.errors import CorruptInputError
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.tensors import StoredTensor

if TYPE_CHECKING:
    from torch import nn

    from tiedgpt.text.tokenizer import Tokenizer

EMBEDDING = "wte.weight"
HEAD = "head.weight"
TIE_KEY = "tie_word_embeddings"


@dataclass(frozen=True)
class Claim:
    """Claim that the head is tied or untied, and the source of the claim.

    The file itself takes precedence over a config.json next to it, and both over the convention of
    the format.
    """

    is_tied: bool | None = None
    """None if nothing says it."""
    source: str = "nothing says whether the head is tied"
    different_is_untied: bool = False
    """Whether two different matrices mean an untied head when nothing says it."""


@dataclass(frozen=True)
class Usage:
    """Use of the matrices as a graph, a module or config.json shows it, for audits."""

    reads: tuple[str, ...] = ()
    """Names of the matrices in lookups."""
    predicts: tuple[str, ...] = ()
    """Names of the matrices that predict or, in a module, may predict."""
    products: tuple[str, ...] | None = None
    """Names of all matrices in products of a graph; None without a graph."""
    headless: bool = False
    """Whether the model is known not to predict tokens: a bare body, a classifier."""
    head_computation: str = ""
    """Reason why the head of a module computes with something other than W; "" if it does not."""

    @property
    def is_of_graph(self) -> bool:
        """Whether a graph of operators shows it, which is more reliable than names."""
        return self.products is not None


@dataclass(frozen=True)
class Checkpoint:
    """Unread tensors of a checkpoint, its config, and the claim about its head."""

    source: Path | str
    container: str
    """Container of the tensors, for messages: safetensors, torch, GGUF, ONNX, or module."""
    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, Any] = field(default_factory=dict)
    """Values of the file, which override those of a config.json next to it."""
    claim: Claim = Claim()
    files: tuple[Path, ...] = ()
    usage: Usage = Usage()
    format: Format | None = None
    """None for a module that is not a model of transformers."""
    in_memory: bool = False
    is_unknown: bool = False
    """Whether neither names nor config.json tell which program loads the file."""

    @property
    def any_layout(self) -> bool:
        """Whether a matrix may be stored as (D, V); otherwise such a matrix is an error."""
        is_free = self.in_memory or self.is_unknown
        return is_free or self.format is None or self.format.any_layout

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens by the config, or None."""
        return _size(self.config, "vocab_size")

    @property
    def width(self) -> int | None:
        """Width of the model by the config, or None."""
        return _size(self.config, "n_embd", "hidden_size", "d_model")


@dataclass(frozen=True)
class GPTCheckpoint:
    """GPT in a checkpoint: config fields, and tensors under our names."""

    layout: str
    """Origin of names and layout: "transformers gpt2", "nanoGPT", ..."""
    fields: Mapping[str, Any]
    """Values in the checkpoint under GPTConfig's names."""
    tensors: dict[str, StoredTensor]
    """Tensors under our names, with `head.weight` if there is a second matrix."""
    assumed: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields that such a checkpoint leaves out."""
    foreign: Mapping[str, Any] = field(default_factory=dict)
    """Keys of its config that do not change the computation."""
    notes: tuple[str, ...] = ()
    guesses: Mapping[str, str] = field(default_factory=dict)
    """Notes on uncertain values by field, left out for fields that the caller gives."""


@dataclass(frozen=True, kw_only=True)
class TokenizerFile:
    """Tokenizer of a format, inside the file of the weights or next to it."""

    read: Callable[[OpenFile], Tokenizer]
    """Function that reads the tokenizer."""
    detect: Callable[[OpenFile], bool]
    """Whether a file holds a tokenizer, by its first bytes, its members or its name."""
    pattern: str
    """Glob pattern of the files that may hold a tokenizer."""
    hub_name: str = ""
    """Name of the tokenizer file in hub repositories."""
    is_in_weights: bool = False
    """Whether the file of the weights holds it, so that it belongs to that model alone."""


SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
NOT_COMPUTED = ("embd_pdrop", "attn_pdrop", "resid_pdrop", "bos_token_id", "eos_token_id")
"""Config fields that do not change the logits of a model in use."""


@dataclass(frozen=True)
class Program:
    """A program that runs a model, and the models that it computes."""

    name: str
    """Name in messages: "llama.cpp's gpt2"."""
    fields: tuple[str, ...]
    """Config fields that it computes with, beside `SIZES`; all others must have GPT-2's values."""
    activation: str = "gelu_new"
    """The activation that it computes, unless `fields` has activation_function."""

    def supports(self, name: str) -> bool:
        """Return whether a config field may have another value than GPT-2's."""
        return name in (*SIZES, *NOT_COMPUTED, *self.fields)


@dataclass(frozen=True, kw_only=True)
class Writer:
    """Function that writes a format, and the limits of the format."""

    write: Callable[..., tuple[str, ...] | None]
    """`write(model, path, precision=, tokenizer=, progress=, **options)`; may return notes."""
    program: Program
    """Program that runs such a file."""
    precisions: tuple[str, ...] = ("fp32", "fp16", "bf16")
    """Supported precisions of the tensors."""
    default: str = ""
    """Default precision; "" for the precision of the model."""
    suffix: str = ""
    """Suffix of the file; "" for a format that is a directory."""
    bundled: str = ""
    """Name of the file in a directory with config and tokenizer, written if DEST has no suffix."""
    holds_tokenizer: bool = False
    """Whether the format stores the tokenizer."""
    options: tuple[str, ...] = ()
    """Further keywords of `write` that `convert` offers."""

    def is_directory(self, path: Path) -> bool:
        """Return whether a directory is written at `path`."""
        return not self.suffix or (bool(self.bundled) and path.suffix != self.suffix)


@dataclass(frozen=True, kw_only=True)
class Format:
    """Checkpoint format: how to recognize, open, translate and write it.

    `tests/weights/test_registry.py` defines one in some thirty lines.
    """

    name: str
    """Name for `convert --to`."""
    title: str
    """Name in messages and documentation: "GGUF"."""
    about: str
    """Supported files, for the table in docs/formats.md."""
    about_tokenizer: str = ""
    """Tokenizer files, for the table in docs/formats.md."""
    detect: Callable[[OpenFile], bool]
    """Whether a file has this format, by its first bytes, its members or its name."""
    open: Callable[[OpenFile], Checkpoint]
    """Function that reads the headers of a file."""
    open_module: Callable[[nn.Module], Checkpoint] | None = None
    """Function that opens a model in memory and raises `UserError` for any other."""
    to_gpt: Callable[[Checkpoint], GPTCheckpoint]
    """Function that translates names and layout into ours."""
    detect_checkpoint: Callable[[Checkpoint], bool] = lambda checkpoint: True
    """Whether a checkpoint in a shared container (safetensors, torch.save) has this format."""
    claim: Callable[[Checkpoint], Claim | None] = lambda checkpoint: None
    """Convention of the format for two matrices without any claim."""
    suffixes: tuple[str, ...] = ()
    """Suffixes of its files."""
    is_model_file: Callable[[OpenFile], bool] = lambda file: True
    """Whether a file with one of the suffixes holds weights."""
    file_names: tuple[str, ...] = ()
    """Names of the file of the weights in a directory, the likeliest first."""
    hub_patterns: tuple[tuple[str, ...], ...] = ()
    """Groups of patterns of files in a hub repository; the first group present is downloaded."""
    hub_configs: tuple[str, ...] = ()
    """Other files that are downloaded with them."""
    is_whole_in_one_file: bool = False
    """Whether each file in a repository is a separate model, so that the user must name one."""
    any_layout: bool = False
    """Whether a matrix may be stored as (D, V); otherwise such a matrix is an error."""
    tokenizer: TokenizerFile | None = None
    """Its tokenizer, if it is not one of transformers' or OpenAI's files."""
    writer: Writer | None = None
    """None for a format that is only read."""
    packages: tuple[str, ...] = ()
    """Packages, beyond the base installation, that some of its files need."""
    extra: str = "formats"
    """Extra that installs these packages."""


def claim_in(config: Mapping[str, Any], source: str | Path) -> Claim | None:
    """Return the claim of a config about the head, or None; `source` is its file."""
    inner, is_tied = config.get("text_config"), config.get(TIE_KEY)
    if is_tied is None and isinstance(inner, dict):
        is_tied = inner.get(TIE_KEY)
    if is_tied is None:
        return None
    if not isinstance(is_tied, bool):
        raise CorruptInputError(f"{source}: {TIE_KEY} is {is_tied!r}, neither true nor false")
    return Claim(is_tied, f"{Path(source).name} says {TIE_KEY}: {str(is_tied).lower()}")


def _size(config: Mapping[str, Any], *keys: str) -> int | None:
    """Return the first of some sizes in a config or in its `text_config`."""
    inner = config.get("text_config")
    config = {**inner, **config} if isinstance(inner, dict) else config
    sizes = (config.get(key) for key in keys)
    return next((size for size in sizes if type(size) is int and size > 0), None)
