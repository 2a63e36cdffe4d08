"""An opened checkpoint, and the GPT in it under our names and in our layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.tensors import StoredTensor, printable

if TYPE_CHECKING:
    from tiedgpt.weights.registry import Format

EMBEDDING = "wte.weight"
HEAD = "head.weight"
TIE_KEY = "tie_word_embeddings"

_PARTS = r"(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
WRAPPERS = re.compile(rf"^(?:module\.|{_PARTS})+|(?<=\.){_PARTS}")
"""Parts of parameter names that torch.compile, activation checkpointing and DDP insert."""
ADAPTER = re.compile(r"lora_A|\.lora_")
"""Parts of parameter names that adapters insert."""


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

    @property
    def any_layout(self) -> bool:
        """Whether a matrix may be stored as (D, V); otherwise such a matrix is an error."""
        return self.in_memory or self.format is None or self.format.any_layout

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens by the config, or None."""
        return _size(self.config, "vocab_size")

    @property
    def width(self) -> int | None:
        """Width of the model by the config, or None."""
        return _size(self.config, "n_embd", "hidden_size", "d_model")


def claim_in(config: Mapping[str, Any], source: str | Path) -> Claim | None:
    """Return the claim of a config about the head, or None; `source` is its file."""
    inner = config.get("text_config")
    is_tied = config.get(TIE_KEY, inner.get(TIE_KEY) if isinstance(inner, dict) else None)
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


def to_gpt(checkpoint: Checkpoint, leave_out: Callable[[str], bool] | None = None) -> GPTCheckpoint:
    """Return the GPT in a checkpoint, without the tensors that `leave_out(our name)` selects.

    Raises `UserError` for another architecture, `CorruptInputError` if its tensors contradict each
    other, or if neither W nor a head is a matrix.
    """
    assert checkpoint.format is not None
    source = str(checkpoint.source)
    try:
        gpt = checkpoint.format.to_gpt(checkpoint)
    except (CorruptInputError, UserError) as error:
        if source in str(error):
            raise
        raise type(error)(f"{source}: {error.problem()}", hint=error.hint) from None
    if leave_out is not None:
        gpt = replace(gpt, tensors={n: t for n, t in gpt.tensors.items() if not leave_out(n)})
    matrices = {name: gpt.tensors[name] for name in (EMBEDDING, HEAD) if name in gpt.tensors}
    for name, matrix in matrices.items():
        if not (len(matrix.shape) == 2 and all(matrix.shape)):
            shape = f"must be a matrix (V, D), got {matrix.shape}"
            raise CorruptInputError(f"{source}: {name} {shape}")
    if not matrices:
        raise CorruptInputError(f"{source}: {EMBEDDING} is missing; this is no GPT")
    return gpt


def without_wrappers(checkpoint: Checkpoint) -> Checkpoint:
    """Rename the tensors as in the unwrapped module.

    Raises `UserError` for an adapter, or a model with an unmerged adapter.
    """
    if not any(WRAPPERS.search(name) or ADAPTER.search(name) for name in checkpoint.tensors):
        return checkpoint
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in checkpoint.tensors.items():
        if ADAPTER.search(name):
            raise UserError(
                f"{checkpoint.source} holds an adapter ({printable(name)[:80]})",
                hint="merge it into its model first, with `tiedgpt convert MODEL DEST --adapter "
                "DIRECTORY`",
            )
        bare = WRAPPERS.sub("", name)
        if bare in tensors:
            raise CorruptInputError(
                f"{checkpoint.source} holds {printable(bare)} twice, with and without a prefix"
            )
        tensors[bare] = tensor if bare == name else replace(tensor, name=bare)
    return replace(checkpoint, tensors=tensors)


def shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of `GPT(config)` by our names, without torch."""
    d, inner = config.n_embd, config.inner_dim
    block: dict[str, tuple[int, ...]] = {
        "ln_1": (d,),
        "attn.c_attn": (3 * d, d),
        "attn.c_proj": (d, d),
        "ln_2": (d,),
        "mlp.c_fc": (inner, d),
        "mlp.c_proj": (d, inner),
    }
    all_shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, d),
        "wpe.weight": (config.n_positions, d),
    }
    names = {f"h.{n}.{module}": s for n in range(config.n_layer) for module, s in block.items()}
    if config.norm == "pre":
        names["ln_f"] = (d,)
    for name, shape in names.items():
        all_shapes[f"{name}.weight"] = shape
        if config.bias:
            all_shapes[f"{name}.bias"] = shape[:1]
    if not config.tie_word_embeddings:
        all_shapes[HEAD] = (config.vocab_size, d)
    return all_shapes
