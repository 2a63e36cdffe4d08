"""nanoGPT's `ckpt.pt`: OpenAI's names over nn.Linear's layout, which is ours; and `meta.pkl`.

A dict of torch.save: "model" (the state dict, wte and lm_head on one storage), "model_args" (sizes,
bias, dropout), "iter_num", "best_val_loss", "config". It does not say which GELU was trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import replacing, require_room
from tiedgpt.weights.checkpoint import EMBEDDING, HEAD, Checkpoint, GPTCheckpoint, LazyTensor
from tiedgpt.weights.huggingface import MASK_BUFFERS
from tiedgpt.weights.plain_pickle import read_plain_pickle
from tiedgpt.weights.tensors import printable

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from tiedgpt.core.model import GPT
    from tiedgpt.text.tokenizer import Tokenizer

PREFIX = "transformer."
MODEL_ARGS = {
    "block_size": ("n_positions",),
    "vocab_size": ("vocab_size",),
    "n_layer": ("n_layer",),
    "n_head": ("n_head",),
    "n_embd": ("n_embd",),
    "bias": ("bias",),
    "dropout": ("embd_pdrop", "attn_pdrop", "resid_pdrop"),
}
"""nanoGPT's names -> ours. A fork's further ones are refused where they switch something on."""
KEPT_BESIDE = (
    "activation_function", "embd_pdrop", "attn_pdrop", "resid_pdrop", "bos_token_id",
    "eos_token_id",
)  # fmt: skip
"""Fields that nanoGPT has no place for: `write` puts them into "config", which nanoGPT ignores."""
FIXED = {"norm": "pre", "attention_windows": None, "layer_norm_epsilon": 1e-5}
"""What nanoGPT computes, besides its GELU, and a model must have."""
_AGAIN = "get the file again from where it came from"
NO_LOSS = 1e9
"""nanoGPT's own best_val_loss before the first evaluation."""
GELU_NOTE = (
    "the file does not say which GELU it was trained with; {taken} is taken, as {whose} has it: "
    "activation_function={other!r} (--activation-function) takes the other"
)


def recognizes(checkpoint: Checkpoint) -> bool:
    """Whether it has "model_args", or is a bare state dict whose c_attn lies as (out, in)."""
    if checkpoint.format not in ("torch", "safetensors"):
        return False
    if {"n_embd", "block_size"} <= _model_args(checkpoint).keys():
        return True
    prefixed = any(name.startswith((PREFIX, "lm_head.")) for name in checkpoint.tensors)
    return prefixed and has_our_layout(checkpoint)


def has_our_layout(checkpoint: Checkpoint) -> bool:
    """Whether it is a state dict without a config.json of transformers, c_attn as (3 D, D)."""
    if isinstance(checkpoint.config.get("model_type"), str):
        return False
    for prefix in (PREFIX, ""):
        stored = checkpoint.tensors.get(prefix + "h.0.attn.c_attn.weight")
        if stored is not None and len(stored.shape) == 2:
            return stored.shape[0] == 3 * stored.shape[1]
    return False


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT; one storage under two names is one matrix."""
    tensors, masked = our_tensors(checkpoint)
    args = _model_args(checkpoint)
    fields: dict[str, Any] = {"bias": any(name.endswith(".bias") for name in tensors)}
    if checkpoint.claim is not None:
        fields["tie_word_embeddings"] = checkpoint.claim
    fields |= _fields(checkpoint, args)
    assumed, guess = _gelu(args, masked)
    trained = fields.get("activation_function", "gelu")
    notes = (f"it was trained with {trained}; nanoGPT since June 2023 computes gelu on it",)
    return GPTCheckpoint(
        "nanoGPT", fields, tensors, assumed={"activation_function": assumed},
        notes=notes if trained != "gelu" else (),
        guesses={} if guess is None else {"activation_function": guess},
    )  # fmt: skip


def our_tensors(checkpoint: Checkpoint) -> tuple[dict[str, LazyTensor], bool]:
    """Return the tensors by our names, and whether mask buffers were left out."""
    tensors: dict[str, LazyTensor] = {}
    masked = False
    for their_name, stored in checkpoint.tensors.items():
        name = their_name.removeprefix(PREFIX)
        name = HEAD if name == "lm_head.weight" else name
        if MASK_BUFFERS.fullmatch(name):
            masked = True
        elif name in tensors:
            raise CorruptInputError(f"{checkpoint.source} holds {name} twice, with {PREFIX} too")
        else:
            tensors[name] = LazyTensor(stored)
    drop_shared_head(tensors)
    return tensors, masked


def drop_shared_head(tensors: dict[str, LazyTensor]) -> None:
    """Leave the head out where it is wte under a second name."""
    embedding, head = tensors.get(EMBEDDING), tensors.get(HEAD)
    if embedding is None or head is None or embedding.shape != head.shape:
        return
    if head.stored.is_view_of(embedding.stored):
        del tensors[HEAD]


def _model_args(checkpoint: Checkpoint) -> Mapping[str, Any]:
    args = checkpoint.config.get("model_args")
    return args if isinstance(args, Mapping) else {}


def _fields(checkpoint: Checkpoint, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return what model_args say, and what `write` adds in "config", under our names."""
    fields: dict[str, Any] = {}
    for name, value in args.items():
        if name in MODEL_ARGS:
            if value is not None:
                fields |= dict.fromkeys(MODEL_ARGS[name], value)
        elif value:
            raise UserError(
                f"{checkpoint.source}: model_args has {printable(name)}={value!r}, which nanoGPT "
                "itself does not know and which may change the computation: it is not built here"
            )
    beside = checkpoint.config.get("config")
    if isinstance(beside, Mapping):
        fields |= {name: beside[name] for name in KEPT_BESIDE if name in beside}
    return fields


def _gelu(args: Mapping[str, Any], masked: bool) -> tuple[str, str | None]:
    """Return the GELU that is most likely meant, and a note unless it is certain.

    nanoGPT computed the tanh form until June 2023 and the exact one since. "bias" stands in
    model_args since January 2023. Mask buffers were saved where PyTorch was older than 2.0, of
    March 2023, or the model was trained with dropout shortly before.
    """
    if args and "bias" not in args:
        return "gelu_new", None
    taken, other, whose = "gelu", "gelu_new", "nanoGPT since June 2023"
    if masked:
        taken, other, whose = "gelu_new", "gelu", "nanoGPT in the days of PyTorch 1 and its masks"
    return taken, GELU_NOTE.format(taken=taken, other=other, whose=whose)


def write(
    model: GPT,
    path: Path,
    *,
    tokenizer: Tokenizer | None = None,
    precision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    approximate_gelu: bool = False,
) -> None:
    """Write `path` for nanoGPT in "fp32", "bf16" or "fp16"; None is the model's own type.

    nanoGPT's `sample.py --init_from=resume` loads it as it is. There is no "optimizer": train.py
    cannot resume from it.

    nanoGPT computes the exact GELU since June 2023 and did the tanh form before. A model of GPT-2's
    tanh form (`gelu_new`) is therefore refused unless `approximate_gelu` says that it may run a
    little differently there, as GPT-2 itself does in nanoGPT. Read back here, the model is what it
    was: the activation, each dropout and the special ids are noted in "config" (nanoGPT's one
    dropout is `resid_pdrop`).

    Raises `UserError`, before anything is written, for what nanoGPT does not compute: a head of its
    own, GPT-1's norm, banded attention, other activations, another MLP width or epsilon. The
    tokenizer has no place in the file.
    """
    import torch

    from tiedgpt.weights.plain_model import (
        PRECISIONS,
        plain_parameters,
        require_computed,
        require_gelu,
    )

    config = model.config
    require_computed("nanoGPT", model, FIXED)
    require_gelu("nanoGPT (since June 2023)", model, "gelu", approximate_gelu=approximate_gelu)
    if precision is not None and precision not in PRECISIONS:
        raise UserError(f"precision={precision!r} is none of {', '.join(PRECISIONS)}")
    parameters = plain_parameters(model, "nanoGPT")
    dtype = model.wte.weight.dtype if precision is None else PRECISIONS[precision]
    n_bytes = config.parameter_count() * dtype.itemsize
    require_room(path.parent, n_bytes)
    state = {PREFIX + name: _on_its_own(name, p, dtype) for name, p in parameters.items()}
    state["lm_head.weight"] = state[PREFIX + EMBEDDING]
    checkpoint = {
        "model": state,
        "model_args": {
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "n_embd": config.n_embd,
            "block_size": config.n_positions,
            "bias": config.bias,
            "vocab_size": config.vocab_size,
            "dropout": config.resid_pdrop,
        },
        "iter_num": 0,
        "best_val_loss": NO_LOSS,
        "config": {name: getattr(config, name) for name in KEPT_BESIDE},
    }
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.save(checkpoint, _Counted(file, n_bytes, progress))  # type: ignore[arg-type]


def _on_its_own(name: str, parameter: Tensor, dtype: dtype) -> Tensor:
    """Return the values on a storage that holds nothing else, since storages are saved whole."""
    from tiedgpt.weights.plain_model import converted

    tensor = converted(name, parameter, dtype)
    alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if alone else tensor.clone()


class _Counted:
    """A file that reports how much of `n_bytes` was written."""

    def __init__(
        self, file: BinaryIO, n_bytes: int, progress: Callable[[int, int], None] | None
    ) -> None:
        self.file, self.n_bytes, self.progress, self.done = file, n_bytes, progress, 0

    def write(self, data: bytes) -> int:
        self.done += self.file.write(data)
        if self.progress is not None:
            self.progress(min(self.done, self.n_bytes), self.n_bytes)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def tokenizer(path: Path) -> Tokenizer:
    """Return the character vocabulary of a `meta.pkl`, with its ids and no other token.

    Raises `CorruptInputError` where its entries contradict each other, `UserError` where its tokens
    are not single characters.
    """
    from tiedgpt.text.characters import tokenizer_of_ids
    from tiedgpt.text.tokenizer import Tokenizer

    meta = read_plain_pickle(path)
    ids = meta.get("stoi") if isinstance(meta, dict) else None
    if not isinstance(ids, dict) or not ids:
        raise CorruptInputError(f"{path} has no stoi, which gives each character its id; {_AGAIN}")
    for character, id in ids.items():
        if type(character) is not str or type(id) is not int or not 0 <= id < len(ids):
            raise CorruptInputError(
                f"{path} gives {_shown(character)} the id {_shown(id)} among {len(ids)} characters"
                f"; {_AGAIN}"
            )
        if len(character) != 1:
            raise UserError(
                f"{path} gives an id to {_shown(character)}, which is not one character; only "
                f"vocabularies of single characters are read from such files"
            )
        if "\ud800" <= character <= "\udfff":
            raise CorruptInputError(f"{path} has {character!r}, which is no character; {_AGAIN}")
    characters = {id: character for character, id in ids.items()}
    if len(characters) < len(ids):
        raise CorruptInputError(f"{path} gives two characters the same id; {_AGAIN}")
    if meta.get("itos", characters) != characters:
        raise CorruptInputError(f"{path}: its itos is not its stoi the other way round; {_AGAIN}")
    size = meta.get("vocab_size", len(ids))
    if type(size) is not int or size != len(ids):
        raise CorruptInputError(
            f"{path} says vocab_size {_shown(size)} and has {len(ids)} characters; {_AGAIN}"
        )
    return Tokenizer(tokenizer_of_ids(ids), None, str(path))


def _shown(value: object) -> str:
    """Show a value of a file in a line, whatever its length."""
    if not isinstance(value, str | int):
        return f"a {type(value).__name__}"
    text = repr(value) if isinstance(value, str) or -(10**20) < value < 10**20 else "a huge number"
    return text if len(text) <= 40 else text[:40] + "..."
