"""State dicts in nn.Linear's layout, which is ours: nanoGPT's, minGPT's and tiedgpt's own.

nanoGPT's `ckpt.pt` is a dict of torch.save: "model" (the state dict, wte and lm_head on one
storage), "model_args" (sizes, bias, dropout), "iter_num", "best_val_loss", "config". It does not
say which GELU was trained with.

minGPT saves bare state dicts: two matrices by design, and no word on how many heads there are,
unless the config.json of minGPT's logging lies beside. minGPT of 2022 has nanoGPT's names, mask
buffers, and GELU's tanh form; the first one, of 2020, has names of its own, queries, keys and
values apart, and the exact GELU.

tiedgpt's own, `torch.save(model.state_dict())`, has no prefix. Shapes tell all but the number of
heads, the activation and attention windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import EMBEDDING, HEAD, Checkpoint, Claim, GPTCheckpoint
from tiedgpt.weights.formats.nanogpt import KEPT_BESIDE, MODEL_ARGS, PREFIX
from tiedgpt.weights.formats.transformers import MASK_BUFFERS
from tiedgpt.weights.tensors import StoredTensor, join_qkv, printable

FIRST_MINGPT = {"tok_emb.weight", "blocks.0.attn.key.weight"}
FIRST_NAMES = {
    "tok_emb.weight": EMBEDDING, "pos_emb": "wpe.weight", "blocks.": "h.", ".ln1.": ".ln_1.",
    ".ln2.": ".ln_2.", ".attn.proj.": ".attn.c_proj.", ".attn.mask": ".attn.bias",
    ".mlp.0.": ".mlp.c_fc.", ".mlp.2.": ".mlp.c_proj.",
}  # fmt: skip
"""Parts of the first minGPT's names -> ours."""
HEADS = {
    "openai-gpt": 12, "gpt2": 12, "gpt2-medium": 16, "gpt2-large": 20, "gpt2-xl": 25,
    "gopher-44m": 16, "gpt-mini": 6, "gpt-micro": 4, "gpt-nano": 3,
}  # fmt: skip
"""minGPT's model_type -> n_head."""
LOGGED = ("n_layer", "n_head", "n_embd", "embd_pdrop", "attn_pdrop", "resid_pdrop")
"""Fields in minGPT's config.json."""
OWN_ACTIVATION = "gelu_new"
OWN_NOTE = (
    f"a bare state dict of tiedgpt does not say its activation: {OWN_ACTIVATION} and dense "
    "attention are taken; activation_function= (--activation-function) takes another, and "
    "save_pretrained keeps all"
)


def recognizes(checkpoint: Checkpoint) -> bool:
    """Whether it is one of these: by "model_args", by names, or by a c_attn of (3 D, D)."""
    return bool(_project(checkpoint))


def claim_by_design(checkpoint: Checkpoint) -> Claim | None:
    """Return what a project means by two matrices where nothing is said; None of other projects."""
    project = _project(checkpoint)
    if project not in ("minGPT", "tiedgpt"):
        return None
    embedding, head = (_our_tensors(checkpoint)[0].get(name) for name in (EMBEDDING, HEAD))
    if embedding is None or head is None or head.is_view_of(embedding):
        return None
    meant = "untied by design" if project == "minGPT" else "tied unless it saves a second matrix"
    return Claim(False, f"{project} is {meant}")


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT."""
    project = _project(checkpoint)
    tensors, masked = _our_tensors(checkpoint)
    fields: dict[str, Any] = {"bias": any(name.endswith(".bias") for name in tensors)}
    if project == "nanoGPT":
        return _nanogpt(checkpoint, fields, tensors, masked)
    if project == "minGPT":
        logged = _mapping(checkpoint, "model")
        fields |= {name: logged[name] for name in LOGGED if logged.get(name) is not None}
        if logged.get("model_type") in tuple(HEADS):
            fields.setdefault("n_head", HEADS[logged["model_type"]])
        gelu = "gelu" if checkpoint.tensors.keys() >= FIRST_MINGPT else "gelu_new"
        return GPTCheckpoint("minGPT", fields, tensors, assumed={"activation_function": gelu})
    fields["norm"] = "pre" if "ln_f.weight" in tensors else "post"
    return GPTCheckpoint(
        "tiedgpt state dict", fields, tensors, assumed={"activation_function": OWN_ACTIVATION},
        guesses={"activation_function": OWN_NOTE},
    )  # fmt: skip


def _mapping(checkpoint: Checkpoint, key: str) -> Mapping[str, Any]:
    value = checkpoint.config.get(key)
    return value if isinstance(value, Mapping) else {}


def _project(checkpoint: Checkpoint) -> str:
    """Return whose state dict it is: "nanoGPT", "minGPT", "tiedgpt", or "" for another's."""
    names = checkpoint.tensors.keys()
    if names >= FIRST_MINGPT:
        return "minGPT"
    if _mapping(checkpoint, "model_args").keys() >= {"n_embd", "block_size"}:
        return "nanoGPT"
    if isinstance(checkpoint.config.get("model_type"), str):  # transformers'
        return ""
    prefix = PREFIX if any(name.startswith((PREFIX, "lm_head.")) for name in names) else ""
    c_attn = checkpoint.tensors.get(prefix + "h.0.attn.c_attn.weight")
    if c_attn is None or len(c_attn.shape) != 2 or c_attn.shape[0] != 3 * c_attn.shape[1]:
        return ""
    if not prefix:
        return "tiedgpt" if EMBEDDING in names else ""
    tensors, masked = _our_tensors(checkpoint)
    biased = any(name.endswith(".bias") for name in tensors)
    embedding, head = tensors.get(EMBEDDING), tensors.get(HEAD)
    two = head is not None and not (embedding is not None and head.is_view_of(embedding))
    untied = masked and biased and two and "model_args" not in checkpoint.config
    return "minGPT" if untied else "nanoGPT"


def _our_tensors(checkpoint: Checkpoint) -> tuple[dict[str, StoredTensor], bool]:
    """Return the tensors by our names, and whether mask buffers were left out."""
    tensors: dict[str, StoredTensor] = {}
    masked = False
    for their_name, stored in _of_2022(checkpoint).items():
        name = HEAD if their_name == "lm_head.weight" else their_name.removeprefix(PREFIX)
        if MASK_BUFFERS.fullmatch(name):
            masked = True
        elif name in tensors:
            raise CorruptInputError(f"{checkpoint.source} holds {printable(name)} twice")
        else:
            tensors[name] = stored
    return tensors, masked


def _of_2022(checkpoint: Checkpoint) -> Mapping[str, StoredTensor]:
    """Return the first minGPT's tensors under the second's names; all others as they are."""
    if not checkpoint.tensors.keys() >= FIRST_MINGPT:
        return checkpoint.tensors
    tensors: dict[str, StoredTensor] = {}
    for name, stored in checkpoint.tensors.items():
        if name == "pos_emb" and len(stored.shape) == 3 and stored.shape[0] == 1:
            stored = stored.reshaped(stored.shape[1:])
        for theirs, ours in FIRST_NAMES.items():
            name = name.replace(theirs, ours)
        if name in tensors:
            raise CorruptInputError(f"{checkpoint.source} holds {printable(name)} twice")
        tensors[name] = stored
    join_qkv(checkpoint.source, tensors)
    return tensors


def _nanogpt(
    checkpoint: Checkpoint, fields: dict[str, Any], tensors: dict[str, StoredTensor], masked: bool
) -> GPTCheckpoint:
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
    fields |= {name: beside[name] for name in KEPT_BESIDE if name in beside}
    assumed, guess = _gelu(args, masked)
    trained = fields.get("activation_function", "gelu")
    notes = (f"it was trained with {trained}; nanoGPT since June 2023 computes gelu on it",)
    return GPTCheckpoint(
        "nanoGPT", fields, tensors, assumed={"activation_function": assumed},
        notes=notes if trained != "gelu" else (), guesses={"activation_function": guess},
    )  # fmt: skip


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
