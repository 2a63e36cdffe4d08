"""A GPT in a file, by our names and in our layout, whoever wrote the file.

Each format's module has `as_gpt`, which translates the file's names and layout into ours. A format
that shares its container with others (safetensors, torch.save) also says whether a checkpoint is
its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.tensors import StoredTensor, printable

EMBEDDING = "wte.weight"
HEAD = "head.weight"
TIE_KEY = "tie_word_embeddings"

MODULES = {
    "GGUF": "gguf", "ONNX": "onnx", "llm.c": "llmc", "packed": "packed",
    "TensorFlow": "openai_gpt2", "numpy": "openai_gpt1", "module": "transformers",
}  # fmt: skip
"""`Checkpoint.format` -> the module of `formats` whose `as_gpt` understands it."""
GPT2 = {
    "norm": "pre", "attention_windows": None, "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new", "bias": True, "tie_word_embeddings": True,
}  # fmt: skip
"""What llm.c computes, in our fields; its files do not say it."""
IN_SHARED_CONTAINERS = ("transformers", "state_dict")
"""Modules with `recognizes` and `as_gpt`, asked in this order about safetensors and torch files."""
_PARTS = r"(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
WRAPPERS = re.compile(rf"^(?:module\.|{_PARTS})+|(?<=\.){_PARTS}")
"""What torch.compile, activation checkpointing and DDP put into the names of parameters."""


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
class Checkpoint:
    """All tensors of a checkpoint, not read yet, and what the file and config.json claim."""

    source: Path | str
    format: str
    """safetensors, torch, GGUF, ONNX, or module."""
    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, Any] = field(default_factory=dict)
    """What the file itself says beside its tensors, and what else a config.json beside it says."""
    claim: Claim = Claim()
    reads: tuple[str, ...] = ()
    """Names of matrices that are known to be looked up, by graph or by module."""
    predicts: tuple[str, ...] = ()
    """Names of matrices that are known to predict, or, of a module, that may."""
    products: tuple[str, ...] | None = None
    """Names of all matrices that multiply, where a graph tells; else None."""
    files: tuple[Path, ...] = ()
    headless: bool = False
    """Whether it is known that nothing here predicts tokens: a bare body, a classifier."""
    derived: str = ""
    """Of a module, why its head computes with something derived from, or other than, W."""

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
    is_tied = of_text(config).get(TIE_KEY)
    if is_tied is None:
        return None
    if not isinstance(is_tied, bool):
        raise CorruptInputError(f"{place}: {TIE_KEY} is {is_tied!r}, neither true nor false")
    return Claim(is_tied, f"{Path(place).name} says {TIE_KEY}: {str(is_tied).lower()}")


def of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with what a config of several models says of the text's."""
    inner = config.get("text_config")
    return {**inner, **config} if isinstance(inner, dict) else config


def _size(config: Mapping[str, Any], *keys: str) -> int | None:
    sizes = (of_text(config).get(key) for key in keys)
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


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT in a checkpoint.

    A safetensors or torch file that no project recognizes is read as transformers', which may lack
    its config.json. Raises `UserError` where it is another kind of model, `CorruptInputError` where
    its tensors contradict each other.
    """
    name = MODULES.get(checkpoint.format)
    if name is None:
        shared = (n for n in IN_SHARED_CONTAINERS if _module(n).recognizes(checkpoint))
        name = next(shared, "transformers")
    try:
        gpt: GPTCheckpoint = _module(name).as_gpt(checkpoint)
    except (CorruptInputError, UserError) as error:
        if str(checkpoint.source) in str(error):
            raise
        raise type(error)(f"{checkpoint.source}: {error}") from None
    return gpt


def _module(name: str) -> Any:
    return import_module(f"tiedgpt.weights.formats.{name}")


def unwrapped(name: str) -> str:
    """Return a parameter's name without the parts that torch's wrappers put into it."""
    return WRAPPERS.sub("", name)


def plain(checkpoint: Checkpoint) -> Checkpoint:
    """Return it with the names of the module that was wrapped; an adapter is a `UserError`."""
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in checkpoint.tensors.items():
        if "lora_A" in name or ".lora_" in name:
            raise UserError(
                f"{checkpoint.source} holds an adapter ({printable(name)[:80]})",
                hint=(
                    "merge it into its model first, with `tiedgpt convert MODEL DEST --adapter "
                    "DIRECTORY`"
                ),
            )
        bare = unwrapped(name) if checkpoint.format in ("safetensors", "torch", "module") else name
        if bare in tensors:
            raise CorruptInputError(
                f"{checkpoint.source} holds {printable(bare)} twice, with and without a prefix"
            )
        tensors[bare] = replace(tensor, name=bare)
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
