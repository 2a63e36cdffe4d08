"""What a project's program computes and a model must have, or it cannot be written for it."""

from __future__ import annotations

from collections.abc import Mapping

from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError

GELUS = ("gelu", "gelu_new")


def require_gelu(whose: str, model: GPT, computed: str, *, approximate_gelu: bool) -> None:
    """Raise `UserError` for another activation than the one computed.

    The exact GELU and its tanh form differ by less than 0.0005 everywhere: `approximate_gelu` lets
    a model of one be run with the other.
    """
    own = model.config.activation_function
    if own == computed or (approximate_gelu and own in GELUS and computed in GELUS):
        return
    anyway = (
        "; its logits would differ a little there: approximate_gelu (--approximate-gelu) writes it "
        "all the same"
    )
    raise UserError(
        f"activation_function={own!r} cannot be written: {whose} computes {computed!r}"
        f"{anyway if own in GELUS else ''}"
    )


def require_computed(whose: str, model: GPT, fixed: Mapping[str, object]) -> None:
    """Raise `UserError`, naming the field, where a model is not of GPT-2's kind.

    `fixed` holds the fields for which a program knows one value; MLPs of width 4 D and a head that
    is W are wanted by all that are written this way.
    """
    config = model.config
    for name, value in fixed.items():
        if getattr(config, name) != value:
            raise UserError(
                f"{name}={getattr(config, name)!r} cannot be written: {whose} has only "
                f"{'dense attention' if name == 'attention_windows' else repr(value)}"
            )
    if config.inner_dim != 4 * config.n_embd:
        raise UserError(
            f"n_inner={config.n_inner} cannot be written: {whose} has MLPs of width 4 D alone"
        )
    if model.head is not None or not config.tie_word_embeddings:
        raise UserError(
            f"a head of its own cannot be written: {whose} predicts with wte; load it with "
            'resolve="keep-input" or "keep-output" (--resolve), or tie(model), to have one matrix'
        )
