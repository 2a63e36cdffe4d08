"""What a project's program computes and a model must have, or it cannot be written for it."""

from __future__ import annotations

from collections.abc import Mapping

from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError


def require_computed(whose: str, model: GPT, fixed: Mapping[str, object]) -> None:
    """Raise `UserError`, naming the field, where a model is not of GPT-2's kind.

    `fixed` holds the fields for which a program knows one value; MLPs of width 4 D and a head that
    is W are wanted by all that are written this way.
    """
    config = model.config
    for name, value in fixed.items():
        if getattr(config, name) != value:
            raise UserError(
                f"{name}={getattr(config, name)!r} cannot be written: {whose} computes with "
                f"{value!r} alone"
            )
    if config.inner_dim != 4 * config.n_embd:
        raise UserError(
            f"n_inner={config.n_inner} cannot be written: {whose} has MLPs of width 4 D alone"
        )
    if model.head is not None or not config.tie_word_embeddings:
        raise UserError(
            f"a head of its own cannot be written: {whose} predicts with wte; tiedgpt.tie.tie "
            "makes the two one matrix, where that is what you want"
        )
