"""nanoGPT's and minGPT's state dicts: OpenAI's names over nn.Linear's layout, which is ours.

nanoGPT's `ckpt.pt` says its sizes beside the weights ("model_args") and holds wte and lm_head on
one storage. minGPT's file is the bare state dict: two matrices, and nothing says how many heads
there are, unless the config.json of its logging lies beside. The first minGPT (2020) had names of
its own, and queries, keys and values apart. Which GELU was trained with stands in none of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import Checkpoint, GPTCheckpoint, LazyTensor
from tiedgpt.weights.names import EMBEDDING, HEAD, MASK_BUFFERS
from tiedgpt.weights.tensors import StoredTensor, joined, printable

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
"""What nanoGPT has no place for: our writer puts it into "config", which nanoGPT carries along."""
MINGPT_HEADS = {
    "openai-gpt": 12, "gpt2": 12, "gpt2-medium": 16, "gpt2-large": 20, "gpt2-xl": 25,
    "gopher-44m": 16, "gpt-mini": 6, "gpt-micro": 4, "gpt-nano": 3,
}  # fmt: skip
"""minGPT's model_type -> n_head."""
FIRST_NAMES = {
    "tok_emb.weight": EMBEDDING,
    "pos_emb": "wpe.weight",
    "head.weight": HEAD,
    "ln1": "ln_1",
    "ln2": "ln_2",
    "attn.proj": "attn.c_proj",
    "mlp.0": "mlp.c_fc",
    "mlp.2": "mlp.c_proj",
}
"""The first minGPT's names -> ours; from ln1 on, of a part of a block."""
FIRST_BLOCK = re.compile(r"blocks\.(0|[1-9]\d{0,5})\.([\w.]+)\.(weight|bias)")
FIRST_MASK = re.compile(r"blocks\.\d+\.attn\.mask")
QKV = ("attn.query", "attn.key", "attn.value")
"""What c_attn holds, in its order."""
GELU_NOTE = (
    "the file does not say which GELU it was trained with; {taken} is taken, as {whose} has it: "
    "activation_function={other!r} (--activation-function) takes the other"
)


def recognizes(checkpoint: Checkpoint) -> bool:
    """Whether this is nanoGPT's or minGPT's: by "model_args", or a c_attn that lies (out, in)."""
    if checkpoint.format not in ("torch", "safetensors"):
        return False
    if {"n_embd", "block_size"} <= _model_args(checkpoint).keys():
        return True
    if isinstance(checkpoint.config.get("model_type"), str):
        return False  # config.json of transformers
    if _is_first_mingpt(checkpoint):
        return True
    names = [prefix + "h.0.attn.c_attn.weight" for prefix in (PREFIX, "")]
    shapes = [checkpoint.tensors[name].shape for name in names if name in checkpoint.tensors]
    return any(len(shape) == 2 and shape[0] == 3 * shape[1] for shape in shapes)


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT in such a checkpoint; one storage under two names is one matrix."""
    if _is_first_mingpt(checkpoint):
        return GPTCheckpoint(
            "minGPT", _mingpt_fields(checkpoint), _first_mingpt(checkpoint),
            assumed={"activation_function": "gelu"},
        )  # fmt: skip
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
    _drop_shared_head(tensors)
    args = _model_args(checkpoint)
    biased = any(name.endswith(".bias") for name in tensors)
    if not args and masked and biased and HEAD in tensors:
        return GPTCheckpoint(
            "minGPT", _mingpt_fields(checkpoint), tensors,
            assumed={"activation_function": "gelu_new"},
        )  # fmt: skip
    fields: dict[str, Any] = {"bias": biased, **_claim(checkpoint), **_fields(checkpoint, args)}
    assumed, guess = _gelu(args, masked)
    told = fields.get("activation_function", "gelu")
    notes = (f"it was trained with {told}; nanoGPT since June 2023 computes gelu on it",)
    return GPTCheckpoint(
        "nanoGPT", fields, tensors, assumed={"activation_function": assumed},
        notes=notes if told != "gelu" else (),
        guesses={} if guess is None else {"activation_function": guess},
    )  # fmt: skip


def _claim(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a config.json beside the file claims of the tie, where it says so."""
    return {} if checkpoint.claim is None else {"tie_word_embeddings": checkpoint.claim}


def _model_args(checkpoint: Checkpoint) -> Mapping[str, Any]:
    args = checkpoint.config.get("model_args")
    return args if isinstance(args, Mapping) else {}


def _fields(checkpoint: Checkpoint, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return what nanoGPT's model_args say, and what our writer adds, under our names."""
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


def _drop_shared_head(tensors: dict[str, LazyTensor]) -> None:
    """Leave lm_head out where it is wte under a second name."""
    embedding, head = tensors.get(EMBEDDING), tensors.get(HEAD)
    if embedding is None or head is None or embedding.shape != head.shape:
        return
    if head.stored.is_view_of(embedding.stored):
        del tensors[HEAD]


def _mingpt_fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what minGPT's own config.json says, where it lies beside: heads and dropout."""
    model = checkpoint.config.get("model")
    if not isinstance(model, Mapping):
        return _claim(checkpoint)
    told = _claim(checkpoint) | {
        name: model[name]
        for name in ("n_layer", "n_head", "n_embd", "embd_pdrop", "attn_pdrop", "resid_pdrop")
        if model.get(name) is not None
    }
    kind = model.get("model_type")
    if isinstance(kind, str) and kind in MINGPT_HEADS:
        told.setdefault("n_head", MINGPT_HEADS[kind])
    return told


def _is_first_mingpt(checkpoint: Checkpoint) -> bool:
    return {"tok_emb.weight", "blocks.0.attn.key.weight"} <= checkpoint.tensors.keys()


def _first_mingpt(checkpoint: Checkpoint) -> dict[str, LazyTensor]:
    """Return the first minGPT's tensors by our names, queries, keys and values joined."""
    tensors: dict[str, LazyTensor] = {}
    joined: dict[str, list[StoredTensor | None]] = {}

    def put(name: str, stored: StoredTensor) -> None:
        if name in tensors:
            raise CorruptInputError(f"{checkpoint.source} holds {printable(name)} under two names")
        tensors[name] = LazyTensor(stored)

    for their_name, stored in checkpoint.tensors.items():
        match = FIRST_BLOCK.fullmatch(their_name)
        if FIRST_MASK.fullmatch(their_name):
            continue
        if match is None:
            name = FIRST_NAMES.get(their_name, their_name)
            if name == "wpe.weight" and len(stored.shape) == 3 and stored.shape[0] == 1:
                stored = stored.reshaped(stored.shape[1:])
            put(name, stored)
            continue
        layer, part, kind = match.groups()
        if part in QKV:
            whole = joined.setdefault(f"h.{layer}.attn.c_attn.{kind}", [None, None, None])
            whole[QKV.index(part)] = stored
            continue
        put(f"h.{layer}.{FIRST_NAMES.get(part, part)}.{kind}", stored)
    for name, parts in joined.items():
        put(name, _join(checkpoint, name, parts))
    _drop_shared_head(tensors)
    return tensors


def _join(checkpoint: Checkpoint, name: str, parts: list[StoredTensor | None]) -> StoredTensor:
    """Return queries, keys and values as the rows of one tensor; nothing is read."""
    there = [part for part in parts if part is not None]
    whole = joined(name, there) if len(there) == len(parts) else None
    if whole is None:
        shapes = ", ".join(f"{part.name} {part.shape} {part.dtype}" for part in there)
        raise CorruptInputError(
            f"{checkpoint.source}: {name} is made of {', '.join(QKV)}, one shape and type each; "
            f"there are {shapes}"
        )
    return whole
