"""nanoGPT's `ckpt.pt`: OpenAI's names over nn.Linear's layout, which is ours; and `meta.pkl`.

A dict of torch.save: "model" (the state dict, wte and lm_head on one storage), "model_args" (sizes,
bias, dropout), "iter_num", "best_val_loss", "config". It does not say which GELU was trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import replacing, require_room
from tiedgpt.weights.checkpoint import EMBEDDING, HEAD, Checkpoint, GPTCheckpoint
from tiedgpt.weights.huggingface import MASK_BUFFERS
from tiedgpt.weights.tensors import StoredTensor, printable

if TYPE_CHECKING:
    from tiedgpt.core.model import GPT
    from tiedgpt.text.tokenizer import Tokenizer

PREFIX = "transformer."
MODEL_ARGS = {
    "n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "block_size": "n_positions",
    "bias": "bias", "vocab_size": "vocab_size", "dropout": "resid_pdrop",
}  # fmt: skip
"""nanoGPT's names -> ours. A fork's further ones are refused where they switch something on."""
KEPT_BESIDE = (
    "activation_function", "embd_pdrop", "attn_pdrop", "resid_pdrop", "bos_token_id", "eos_token_id"
)  # fmt: skip
"""Fields that nanoGPT has no place for: `write` puts them into "config", which nanoGPT ignores."""
FIXED = {"norm": "pre", "attention_windows": None, "layer_norm_epsilon": 1e-5}
"""What nanoGPT computes, besides its GELU, and a model must have."""
NO_LOSS = 1e9
"""nanoGPT's own best_val_loss before the first evaluation."""


def recognizes(checkpoint: Checkpoint) -> bool:
    """Whether it has "model_args", or is a bare state dict whose c_attn lies as (out, in)."""
    if {"n_embd", "block_size"} <= _model_args(checkpoint).keys():
        return True
    return is_prefixed(checkpoint) and has_our_layout(checkpoint)


def is_prefixed(checkpoint: Checkpoint) -> bool:
    """Whether its names begin as nanoGPT's, minGPT's and transformers' do."""
    return any(name.startswith((PREFIX, "lm_head.")) for name in checkpoint.tensors)


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
    args, beside = _model_args(checkpoint), checkpoint.config.get("config")
    fields: dict[str, Any] = {"bias": any(name.endswith(".bias") for name in tensors)}
    if checkpoint.claim is not None:
        fields["tie_word_embeddings"] = checkpoint.claim
    for name, value in args.items():
        if name not in MODEL_ARGS and value:
            raise UserError(
                f"{checkpoint.source}: model_args has {printable(name)}={value!r}, which nanoGPT "
                "itself does not know and which may change the computation: it is not built here"
            )
        if name in MODEL_ARGS and value is not None:
            fields[MODEL_ARGS[name]] = value
    if "resid_pdrop" in fields:
        fields |= dict.fromkeys(("embd_pdrop", "attn_pdrop"), fields["resid_pdrop"])
    if isinstance(beside, Mapping):
        fields |= {name: beside[name] for name in KEPT_BESIDE if name in beside}
    assumed, guess = _gelu(args, masked)
    trained = fields.get("activation_function", "gelu")
    notes = (f"it was trained with {trained}; nanoGPT since June 2023 computes gelu on it",)
    return GPTCheckpoint(
        "nanoGPT", fields, tensors, assumed={"activation_function": assumed},
        notes=notes if trained != "gelu" else (), guesses={"activation_function": guess},
    )  # fmt: skip


def our_tensors(checkpoint: Checkpoint) -> tuple[dict[str, StoredTensor], bool]:
    """Return the tensors by our names, and whether mask buffers were left out."""
    tensors: dict[str, StoredTensor] = {}
    masked = False
    for their_name, stored in checkpoint.tensors.items():
        name = HEAD if their_name == "lm_head.weight" else their_name.removeprefix(PREFIX)
        if MASK_BUFFERS.fullmatch(name):
            masked = True
        elif name in tensors:
            raise CorruptInputError(f"{checkpoint.source} holds {name} twice, with {PREFIX} too")
        else:
            tensors[name] = stored
    drop_shared_head(tensors)
    return tensors, masked


def drop_shared_head(tensors: dict[str, StoredTensor]) -> None:
    """Leave the head out where it is wte under a second name."""
    embedding, head = tensors.get(EMBEDDING), tensors.get(HEAD)
    if embedding and head and embedding.shape == head.shape:
        if head.is_view_of(embedding):
            del tensors[HEAD]


def _model_args(checkpoint: Checkpoint) -> Mapping[str, Any]:
    args = checkpoint.config.get("model_args")
    return args if isinstance(args, Mapping) else {}


def _gelu(args: Mapping[str, Any], masked: bool) -> tuple[str, str]:
    """Return the GELU that is most likely meant, and a note, which is empty if it is certain.

    nanoGPT computed the tanh form until June 2023 and the exact one since. "bias" stands in
    model_args since January 2023. Mask buffers were saved where PyTorch was older than 2.0, of
    March 2023, or the model was trained with dropout shortly before.
    """
    if args and "bias" not in args:
        return "gelu_new", ""
    taken, other, whose = "gelu", "gelu_new", "nanoGPT since June 2023"
    if masked:
        taken, other, whose = "gelu_new", "gelu", "nanoGPT in the days of PyTorch 1 and its masks"
    return taken, (
        f"the file does not say which GELU it was trained with; {taken} is taken, as {whose} has "
        f"it: activation_function={other!r} (--activation-function) takes the other"
    )


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
    cannot resume from it. The tokenizer has no place in the file.

    nanoGPT computes the exact GELU since June 2023 and did the tanh form before. A model of GPT-2's
    tanh form (`gelu_new`) is therefore refused unless `approximate_gelu` says that it may run a
    little differently there. Read back here, the model is what it was: the activation, each dropout
    and the special ids are noted in "config" (nanoGPT's one dropout is `resid_pdrop`).

    Raises `UserError`, before anything is written, for what nanoGPT does not compute: a head of its
    own, GPT-1's norm, banded attention, other activations, another MLP width or epsilon.
    """
    import torch

    from tiedgpt.weights import plain_model

    config = model.config
    plain_model.require_computed("nanoGPT", model, FIXED)
    plain_model.require_gelu(
        "nanoGPT (since June 2023)", model, "gelu", approximate_gelu=approximate_gelu
    )
    dtypes = {None: model.wte.weight.dtype} | plain_model.PRECISIONS
    if precision not in dtypes:
        raise UserError(f"precision={precision!r} is none of {', '.join(plain_model.PRECISIONS)}")
    state = {}
    for name, parameter in plain_model.plain_parameters(model, "nanoGPT").items():
        tensor = plain_model.converted(name, parameter, dtypes[precision])
        alone = tensor.untyped_storage().nbytes() == tensor.nbytes  # storages are saved whole
        state[PREFIX + name] = tensor if alone else tensor.clone()
    n_bytes = sum(tensor.nbytes for tensor in state.values())
    require_room(path.parent, n_bytes)
    state["lm_head.weight"] = state[PREFIX + EMBEDDING]
    checkpoint = {
        "model": state,
        "model_args": {theirs: getattr(config, ours) for theirs, ours in MODEL_ARGS.items()},
        "iter_num": 0,
        "best_val_loss": NO_LOSS,
        "config": {name: getattr(config, name) for name in KEPT_BESIDE},
    }
    with replacing(path) as temporary:
        torch.save(checkpoint, temporary)
        if progress is not None:
            progress(n_bytes, n_bytes)


def tokenizer(path: Path) -> Tokenizer:
    """Return the character vocabulary of a `meta.pkl`, with its ids and no other token.

    Raises `CorruptInputError` where its entries contradict each other, `UserError` where its tokens
    are not single characters.
    """
    from tiedgpt.text.characters import tokenizer_of_ids
    from tiedgpt.text.tokenizer import Tokenizer
    from tiedgpt.weights.plain_pickle import read_plain_pickle

    meta = read_plain_pickle(path)
    meta = meta if isinstance(meta, dict) else {}
    ids = meta.get("stoi")
    ids = ids if isinstance(ids, dict) else {}
    characters = {id: character for character, id in ids.items() if type(id) is int}
    if (
        not ids
        or characters.keys() != set(range(len(ids)))
        or any(type(c) is not str or "\ud800" <= c[:1] <= "\udfff" for c in ids)
        or meta.get("itos", characters) != characters
        or meta.get("vocab_size", len(ids)) != len(ids)
    ):
        raise CorruptInputError(
            f"{path}: it must have a stoi that gives each of its characters an id from 0 on, and "
            "an itos and vocab_size that say the same; get the file again from where it came from"
        )
    for character in ids:
        if len(character) != 1:
            raise UserError(
                f"{path} gives an id to {character[:40]!r}, which is not one character; only "
                "vocabularies of single characters are read from such files"
            )
    return Tokenizer(tokenizer_of_ids(ids), None, str(path))
