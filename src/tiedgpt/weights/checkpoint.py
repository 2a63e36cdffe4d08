"""A checkpoint as it is opened, and the GPT in it by our names and in our layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
"""What torch.compile, activation checkpointing and DDP put into the names of parameters."""
ADAPTER = re.compile(r"lora_A|\.lora_")
"""What adapters put into them."""


@dataclass(frozen=True)
class Claim:
    """Whether it is said that the head is tied, and where. One stands for the whole checkpoint.

    What the file itself says goes before a config.json beside it, and both before what its format
    or its project means where they are silent.
    """

    is_tied: bool | None = None
    """None where nothing says so."""
    source: str = "nothing says whether the head is tied"
    different_is_untied: bool = False
    """Where nothing is said: whether two matrices that differ are an untied head all the same."""


@dataclass(frozen=True)
class Usage:
    """What a graph, a module or config.json tells of the matrices beyond names: for audits."""

    reads: tuple[str, ...] = ()
    """Names of matrices that are looked up."""
    predicts: tuple[str, ...] = ()
    """Names of matrices that predict, or, of a module, that may."""
    products: tuple[str, ...] | None = None
    """Names of all matrices that multiply, where a graph tells; else None."""
    headless: bool = False
    """Whether it is known that nothing here predicts tokens: a bare body, a classifier."""
    head_computation: str = ""
    """Of a module, why its head computes with something derived from, or other than, W."""

    @property
    def is_of_graph(self) -> bool:
        """Whether a graph of operators tells it, which knows better than names."""
        return self.products is not None


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a checkpoint, not read yet, its config, and what is claimed of its head."""

    source: Path | str
    container: str
    """What holds the tensors, for people: safetensors, torch, GGUF, ONNX, or module."""
    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, Any] = field(default_factory=dict)
    """What the file itself says beside its tensors, and what else a config.json beside it says."""
    claim: Claim = Claim()
    files: tuple[Path, ...] = ()
    usage: Usage = Usage()
    format: Format | None = None
    """Set where it is opened; None of a module that is no model of transformers."""
    in_memory: bool = False

    @property
    def any_layout(self) -> bool:
        """Whether it is known which matrices lie as (D, V); else such a matrix is a fault."""
        return self.in_memory or self.format is None or self.format.any_layout

    @property
    def vocabulary(self) -> int | None:
        """The number of tokens, where the config tells it."""
        return _size(self.config, "vocab_size")

    @property
    def width(self) -> int | None:
        """The width of the model, where the config tells it."""
        return _size(self.config, "n_embd", "hidden_size", "d_model")


def claim_in(config: Mapping[str, Any], place: str | Path) -> Claim | None:
    """Return what a config claims of the head, None where it is silent; `place` is its file."""
    inner = config.get("text_config")
    is_tied = config.get(TIE_KEY, inner.get(TIE_KEY) if isinstance(inner, dict) else None)
    if is_tied is None:
        return None
    if not isinstance(is_tied, bool):
        raise CorruptInputError(f"{place}: {TIE_KEY} is {is_tied!r}, neither true nor false")
    return Claim(is_tied, f"{Path(place).name} says {TIE_KEY}: {str(is_tied).lower()}")


def _size(config: Mapping[str, Any], *keys: str) -> int | None:
    """Return the first of some sizes that a config, or the text's config in it, says."""
    inner = config.get("text_config")
    config = {**inner, **config} if isinstance(inner, dict) else config
    sizes = (config.get(key) for key in keys)
    return next((size for size in sizes if type(size) is int and size > 0), None)


@dataclass(frozen=True)
class GPTCheckpoint:
    """The GPT in a checkpoint: config fields, and tensors under our names."""

    layout: str
    """Whose names and layout: "transformers gpt2", "nanoGPT", ..."""
    fields: Mapping[str, Any]
    """What the checkpoint says, under GPTConfig's names."""
    tensors: dict[str, StoredTensor]
    """Our names; `head.weight` where there is a second matrix."""
    assumed: Mapping[str, Any] = field(default_factory=dict)
    """What such a checkpoint means where it is silent."""
    foreign: Mapping[str, Any] = field(default_factory=dict)
    """Keys of its config that change nothing here."""
    notes: tuple[str, ...] = ()
    guesses: Mapping[str, str] = field(default_factory=dict)
    """Notes on what is assumed and uncertain, by its field; one that the caller gives is none."""


def to_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT in a checkpoint.

    Raises `UserError` where it is another kind of model, `CorruptInputError` where its tensors
    contradict each other.
    """
    assert checkpoint.format is not None
    try:
        return checkpoint.format.to_gpt(checkpoint)
    except (CorruptInputError, UserError) as error:
        if str(checkpoint.source) in str(error):
            raise
        raise type(error)(f"{checkpoint.source}: {error.problem()}", hint=error.hint) from None


def without_wrappers(checkpoint: Checkpoint) -> Checkpoint:
    """Return it with the names that parameters have in the module that was wrapped.

    Raises `UserError` for an adapter, or a model with one that is not merged.
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
    names = {f"h.{n}.{part}": s for n in range(config.n_layer) for part, s in block.items()}
    if config.norm == "pre":
        names["ln_f"] = (d,)
    for name, shape in names.items():
        all_shapes[f"{name}.weight"] = shape
        if config.bias:
            all_shapes[f"{name}.bias"] = shape[:1]
    if not config.tie_word_embeddings:
        all_shapes[HEAD] = (config.vocab_size, d)
    return all_shapes
