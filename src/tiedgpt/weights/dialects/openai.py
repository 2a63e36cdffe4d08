"""OpenAI's own releases: GPT-2 as a TensorFlow checkpoint, GPT-1 as numbered .npy files.

Both name the variables of their model.py and train.py: `model/h0/attn/c_attn/w`, with `g` for gain,
`b` for bias, and matrices as a convolution's, (1, in, out). GPT-2 has a last norm, `ln_f`; GPT-1
has none, because it normalises after each sublayer (openai/gpt-2, openai/finetune-transformer-lm).

GPT-1 runs with tokens, special tokens and positions in one matrix, `model/we`. Its release holds
positions and tokens apart, and whoever fine-tuned it holds them together. Its training code scores
every row of that matrix, positions too; here, and in transformers, only tokens predict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import Checkpoint, GPTCheckpoint, LazyTensor
from tiedgpt.weights.config_json import config_fields
from tiedgpt.weights.names import EMBEDDING
from tiedgpt.weights.tensors import StoredTensor, printable

SCOPE = "model/"
TOKENS, POSITIONS, BOTH = "model/wte", "model/wpe", "model/we"
LAST = {"g": "weight", "w": "weight", "b": "bias"}
"""The last part of a name -> ours."""
HPARAMS = {
    "n_vocab": "vocab_size",
    "n_ctx": "n_positions",
    "n_embd": "n_embd",
    "n_head": "n_head",
    "n_layer": "n_layer",
}
"""Keys of hparams.json -> ours."""
CLASSIFIER = ("model/clf/w", "model/clf/b")
VARIABLE = r"model/(?:wte|wpe|we|ln_f/[gb]|h\d+/(?:ln_[12]/[gb]|(?:attn|mlp)/c_[a-z]+/[wb]))"
SLOT = re.compile(rf"(?:.*/)?({VARIABLE})/\w+")
"""What an optimizer keeps of a variable: the variable's name, and its own after it."""
FUNCTIONS = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
"""As both programs compute, which no file says."""
GPT2_VOCABULARY, GPT2_END_OF_TEXT = 50257, 50256
GPT1_WIDTH, GPT1_LAYERS, GPT1_HEADS, GPT1_POSITIONS = 768, 12, 12, 512
GPT1_SPECIALS = (0, 3)
"""Special tokens that the release has, and that its program adds: start, delimiter, classify."""


def recognizes(checkpoint: Checkpoint) -> bool:
    """Whether it holds the variables of one of OpenAI's programs."""
    if checkpoint.format == "TensorFlow":
        return any(name in checkpoint.tensors for name in (TOKENS, BOTH))
    return checkpoint.format == "numpy"


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT, without what only training needs.

    Left out, and told in a note, are an optimizer's slots (a variable's name and one more part),
    scalars such as `global_step`, and GPT-1's classifier; any other tensor is kept by its name.

    Raises `UserError` where one matrix holds tokens and positions and nothing says how many.
    """
    tensors, notes = _without_training(checkpoint.tensors)
    fields, foreign, more = _said(checkpoint.config)
    notes += more
    is_gpt1 = checkpoint.format == "numpy" or BOTH in tensors
    fields["norm"] = "post" if is_gpt1 else "pre"
    if BOTH in tensors:
        matrix = tensors.pop(BOTH)
        if TOKENS in tensors or POSITIONS in tensors or len(matrix.shape) != 2:
            raise CorruptInputError(
                f"{checkpoint.source}: {BOTH} of shape {matrix.shape} is not the one matrix of "
                "tokens and positions"
            )
        n_tokens, note = _tokens_in(checkpoint, matrix.shape[0], fields.get("n_positions"))
        tensors[TOKENS] = matrix.row_range(0, n_tokens)
        tensors[POSITIONS] = matrix.row_range(n_tokens, matrix.shape[0])
        notes.append(note)
    ours = {_our_name(name): _in_our_layout(tensor) for name, tensor in tensors.items()}
    if len(ours) < len(tensors):
        raise CorruptInputError(
            f"{checkpoint.source} holds a tensor twice, by OpenAI's name and ours"
        )
    return GPTCheckpoint(
        "OpenAI GPT-1" if is_gpt1 else "OpenAI GPT-2",
        fields, ours, FUNCTIONS | _assumed(ours, is_gpt1=is_gpt1), foreign, tuple(notes),
    )  # fmt: skip


def _without_training(
    tensors: Mapping[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the model's tensors, and notes on the others."""
    kept: dict[str, StoredTensor] = {}
    state, classifier = [], []
    for name, tensor in tensors.items():
        slot = SLOT.fullmatch(name)
        if tensor.shape == () or (slot and slot[1] in tensors):
            state.append(name)
        elif name in CLASSIFIER:
            classifier.append(name)
        else:
            kept[name] = tensor
    notes = []
    if state:
        notes.append(
            f"left out {len(state)} tensors that only training needs, such as "
            f"{printable(state[0])[:80]}"
        )
    if classifier:
        notes.append(f"left out the classifier on top of it: {', '.join(classifier)}")
    return kept, notes


def _said(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return our fields, foreign keys and notes, from hparams.json and a config.json beside."""
    fields, foreign = config_fields(config) if "model_type" in config else ({}, {})
    foreign = {
        key: value for key, value in foreign.items() if key not in ("hparams", "encoder_size")
    }
    hparams = config.get("hparams")
    hparams = hparams if isinstance(hparams, Mapping) else {}
    fields |= {HPARAMS[key]: value for key, value in hparams.items() if key in HPARAMS}
    unused = sorted(hparams.keys() - HPARAMS.keys())
    more = f"hparams.json says more than is used: {printable(', '.join(unused))[:200]}"
    return fields, foreign, [more] if unused else []


def _tokens_in(checkpoint: Checkpoint, n_rows: int, n_positions: Any) -> tuple[int, str]:
    """Return how many rows of the one matrix are tokens, special ones included, and why.

    The positions come last. How many there are is said beside, or they are the release's 512, if
    the encoder's tokens and those that the program adds are what is left.
    """
    encoder = checkpoint.config.get("encoder_size")
    encoder = encoder if type(encoder) is int else None
    why = "as it is said beside"
    if n_positions is None and encoder is not None:
        if n_rows - GPT1_POSITIONS - encoder in GPT1_SPECIALS:
            n_positions, why = GPT1_POSITIONS, "as in the release"
    if n_positions is None:
        raise UserError(
            f"{checkpoint.source}: the {n_rows:,} rows of {BOTH} are tokens, special tokens and, "
            'last, positions, and nothing says how many: write {"n_ctx": ...} into hparams.json '
            "beside it"
        )
    if type(n_positions) is not int or not 0 < n_positions < n_rows - (encoder or 0) + 1:
        raise CorruptInputError(
            f"{checkpoint.source}: {n_positions!r} positions do not fit into the {n_rows:,} rows of "  # noqa: E501
            f"{BOTH}" + (f" beside the encoder's {encoder:,} tokens" if encoder else "")
        )
    n_tokens = n_rows - n_positions
    special = f"{n_tokens - encoder:,} of them special, " if encoder else ""
    return n_tokens, (
        f"{BOTH} is one matrix: {n_tokens:,} tokens, {special}then {n_positions:,} positions, {why}"
    )


def _our_name(name: str) -> str:
    """Return our name of a variable; of what is none, the name as it stands."""
    if not re.fullmatch(VARIABLE, name):
        return name
    *parts, last = name.removeprefix(SCOPE).split("/")
    if not parts:
        return f"{last}.weight"
    return ".".join([re.sub(r"^h(\d+)$", r"h.\1", parts[0]), *parts[1:], LAST[last]])


def _in_our_layout(tensor: StoredTensor) -> LazyTensor:
    """Return a convolution of width 1 as the matrix that it is, (out, in)."""
    is_matrix = tensor.name.endswith("/w")
    if is_matrix and len(tensor.shape) == 3 and tensor.shape[0] == 1:
        tensor = tensor.reshaped(tensor.shape[1:])
    return LazyTensor(tensor, transposed=is_matrix)


def _assumed(tensors: Mapping[str, LazyTensor], *, is_gpt1: bool) -> dict[str, int]:
    """Return what no file says of the very models that OpenAI released."""
    shape = tensors[EMBEDDING].shape if EMBEDDING in tensors else ()
    if not is_gpt1:
        is_theirs = shape[:1] == (GPT2_VOCABULARY,)
        return (
            dict.fromkeys(("bos_token_id", "eos_token_id"), GPT2_END_OF_TEXT) if is_theirs else {}
        )
    n_layer = sum(name.endswith(".ln_2.weight") for name in tensors)
    is_theirs = shape[1:] == (GPT1_WIDTH,) and n_layer == GPT1_LAYERS
    return {"n_head": GPT1_HEADS} if is_theirs else {}
