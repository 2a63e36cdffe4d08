"""Write nanoGPT's `ckpt.pt`, which `formats/state_dict.py` reads, and read its `meta.pkl`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import replacing, require_room
from tiedgpt.weights.checkpoint import EMBEDDING

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
NO_LOSS = 1e9
"""nanoGPT's own best_val_loss before the first evaluation."""


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

    from tiedgpt.weights import parameters as plain_model

    config = model.config
    plain_model.require_computed("nanoGPT", model, plain_model.GPT2_ALONE)
    plain_model.require_gelu(
        "nanoGPT (since June 2023)", model, "gelu", approximate_gelu=approximate_gelu
    )
    known = plain_model.PRECISIONS
    dtype = known[plain_model.chosen_precision(model, precision, known, "nanoGPT")]
    state = {}
    for name, parameter in plain_model.plain_parameters(model, "nanoGPT").items():
        tensor = plain_model.converted(name, parameter, dtype)
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
    from tiedgpt.weights.formats.nanogpt.data_pickle import read_plain_pickle

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
