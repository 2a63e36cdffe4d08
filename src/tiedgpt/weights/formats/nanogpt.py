"""nanoGPT's `ckpt.pt` and its `meta.pkl`.

`ckpt.pt` is a dict of torch.save: "model" (the state dict, wte and lm_head on one storage),
"model_args" (sizes, bias, dropout), "iter_num", "best_val_loss", "config". It does not say which
GELU was trained with. `meta.pkl` holds a vocabulary of characters. A pickle is a program: each of
its instructions is looked at first, and only then does Python's own unpickler follow them, without
a way to reach any class or function.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import reading, replacing, require_room
from tiedgpt.weights.checkpoint import (
    EMBEDDING,
    Checkpoint,
    Format,
    GPTCheckpoint,
    Program,
    TokenizerFile,
    Writer,
)
from tiedgpt.weights.containers import detect, open_container
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.formats.state_dict import has_biases, has_linear_layout, has_prefix
from tiedgpt.weights.formats.transformers import LM_HEAD, our_tensors
from tiedgpt.weights.tensors import printable
from tiedgpt.weights.wrappers import BODY_PREFIX

if TYPE_CHECKING:
    from tiedgpt.core.model import GPT
    from tiedgpt.text.tokenizer import Tokenizer

MODEL_ARGS = {
    "n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "block_size": "n_positions",
    "bias": "bias", "vocab_size": "vocab_size", "dropout": "resid_pdrop",
}  # fmt: skip
"""nanoGPT's names -> ours. A fork's further ones are refused if they switch something on."""
CONFIG_FIELDS = (
    "activation_function", "embd_pdrop", "attn_pdrop", "resid_pdrop", "bos_token_id", "eos_token_id"
)  # fmt: skip
"""Fields that nanoGPT has no place for: `write` puts them into "config", which nanoGPT ignores."""
NO_LOSS = 1e9
"""nanoGPT's own best_val_loss before the first evaluation."""
MAX_META_BYTES = 4 << 20
MAX_INSTRUCTIONS = 1_000_000
"""Both limits exceed a vocabulary of all characters of Unicode."""
PICKLED_DICT = re.compile(rb"(\x80[\x02-\x05](\x95.{8})?)?(\}|\(d)", re.DOTALL)
"""The first bytes of a pickle that creates a dict, of any protocol."""
STORES = {"PUT", "BINPUT", "LONG_BINPUT"}
ALLOWED = STORES | {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "GET", "BINGET", "LONG_BINGET",
    "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1",
}  # fmt: skip


def detect_checkpoint(checkpoint: Checkpoint) -> bool:
    """Whether it has nanoGPT's "model_args", or its names and a c_attn of (3 D, D)."""
    args = _mapping(checkpoint, "model_args").keys() >= {"n_embd", "block_size"}
    return args or (has_prefix(checkpoint) and has_linear_layout(checkpoint))


def to_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT."""
    tensors = our_tensors(checkpoint)
    fields: dict[str, Any] = {"bias": has_biases(tensors)}
    args, beside = _mapping(checkpoint, "model_args"), _mapping(checkpoint, "config")
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
    fields |= {name: beside[name] for name in CONFIG_FIELDS if name in beside}
    assumed, guess = _gelu(args, masked=len(tensors) < len(checkpoint.tensors))
    trained = fields.get("activation_function", "gelu")
    notes = (f"the model was trained with {trained}; nanoGPT since June 2023 computes gelu",)
    return GPTCheckpoint(
        "nanoGPT",
        fields,
        tensors,
        assumed={"activation_function": assumed},
        notes=notes if trained != "gelu" else (),
        guesses={"activation_function": guess},
    )


def _gelu(args: Mapping[str, Any], *, masked: bool) -> tuple[str, str]:
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


def _mapping(checkpoint: Checkpoint, key: str) -> Mapping[str, Any]:
    value = checkpoint.config.get(key)
    return value if isinstance(value, Mapping) else {}


def write(
    model: GPT,
    path: Path,
    *,
    tokenizer: Tokenizer | None = None,
    precision: str = "fp32",
    progress: Callable[[int, int], None] | None = None,
    approximate_gelu: bool = False,
) -> None:
    """Write `path` for nanoGPT in "fp32", "bf16" or "fp16".

    nanoGPT's `sample.py --init_from=resume` loads it unchanged. Without an "optimizer", train.py
    cannot resume from it. The tokenizer has no place in the file.

    nanoGPT computes the exact GELU since June 2023 and did the tanh form before. A model of GPT-2's
    tanh form (`gelu_new`) is therefore refused unless `approximate_gelu` says that it may run a
    little differently there. Read back here, the model is what it was: the activation, each dropout
    and the special ids are noted in "config" (nanoGPT's one dropout is `resid_pdrop`).

    Raises `UserError`, before anything is written, for what nanoGPT does not compute: a head of its
    own, GPT-1's norm, banded attention, other activations, another MLP width or epsilon.
    """
    import torch

    from tiedgpt.weights.parameters import PRECISIONS, convert_tensor, parameters_for

    config = model.config
    parameters = parameters_for(WRITER.program, model, approximate_gelu=approximate_gelu)
    state = {}
    for name, parameter in parameters.items():
        tensor = convert_tensor(name, parameter, PRECISIONS[precision])
        alone = tensor.untyped_storage().nbytes() == tensor.nbytes  # storages are saved whole
        state[BODY_PREFIX + name] = tensor if alone else tensor.clone()
    n_bytes = sum(tensor.nbytes for tensor in state.values())
    require_room(path.parent, n_bytes)
    state[LM_HEAD] = state[BODY_PREFIX + EMBEDDING]
    checkpoint = {
        "model": state,
        "model_args": {key: getattr(config, field) for key, field in MODEL_ARGS.items()},
        "iter_num": 0,
        "best_val_loss": NO_LOSS,
        "config": {name: getattr(config, name) for name in CONFIG_FIELDS},
    }
    with replacing(path) as temporary:
        torch.save(checkpoint, temporary)
        if progress is not None:
            progress(n_bytes, n_bytes)


def read_tokenizer(file: OpenFile) -> Tokenizer:
    """Return the character vocabulary of a `meta.pkl`, with its ids and no other token.

    Raises `CorruptInputError` where its entries contradict each other, `UserError` where its tokens
    are not single characters.
    """
    from tiedgpt.text.characters import tokenizer_of_ids
    from tiedgpt.text.tokenizer import Tokenizer

    path, meta = file.path, read_data_pickle(file)
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


class _DataOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def read_data_pickle(file: OpenFile) -> Any:
    """Return the value in a pickle of any protocol: dicts, strings and whole numbers.

    Raises `CorruptInputError` for anything else that a pickle can hold, before a value is created.
    """
    with reading(file.path, "pickle of a vocabulary"):
        content = file.stream().read(MAX_META_BYTES + 1)
        if len(content) > MAX_META_BYTES:
            raise ValueError(f"more than {MAX_META_BYTES:,} bytes are too many for a vocabulary")
        for number, (instruction, argument, _) in enumerate(pickletools.genops(content)):
            if instruction.name not in ALLOWED:
                raise ValueError(
                    f"it holds more than dicts, strings and whole numbers ({instruction.name}), "
                    "which is never run"
                )
            # The unpickler makes room for as many values as a store's index says.
            n_values = (argument or 0) if instruction.name in STORES else 0
            if max(number, n_values) > MAX_INSTRUCTIONS:
                raise ValueError("too many instructions for a vocabulary")
        return _DataOnly(io.BytesIO(content)).load()


WRITER = Writer(
    write=write,
    program=Program("nanoGPT", fields=("bias",), activation="gelu"),
    suffix=".pt",
    options=("approximate_gelu",),
)
FORMAT = Format(
    name="nanogpt",
    title="nanoGPT",
    about="`ckpt.pt`, state dicts",
    about_tokenizer="`meta.pkl`, read without executing code",
    detect=detect,
    open=open_container,
    to_gpt=to_gpt,
    detect_checkpoint=detect_checkpoint,
    tokenizer=TokenizerFile(
        read=read_tokenizer,
        detect=lambda file: file.path.suffix == ".pkl" or bool(PICKLED_DICT.match(file.head)),
        pattern="meta.pkl",
        hub_name="meta.pkl",
    ),
    writer=WRITER,
)
