"""Multiple choice: which of several continuations is right.

The "double heads" of Radford et al. 2018, section 3.2: L_3 = L_choice + lambda L_language with
lambda = 0.5. The vocabulary's head predicts tokens while this head gives each choice a logit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from tiedgpt.core.loss import IGNORED
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.heads.head import DROPOUT, Head, cross_entropy, dropout_from
from tiedgpt.heads.padding import checked_lengths, last_state

LANGUAGE_WEIGHT = 0.5
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "summary_type": ("cls_index",),
    "summary_use_proj": (True,),
    "summary_proj_to_labels": (True,),
    "summary_activation": (None,),
    "summary_last_dropout": (0.0, None),
}
"""transformers' keys that shape the logit of a choice, with the values that are supported."""


class MultipleChoice(Head):
    """A logit for each choice, read at its last token, beside the prediction of tokens."""

    architecture = "DoubleHeadsModel"
    predicts_tokens = True
    own = ("multiple_choice_head.summary.weight", "multiple_choice_head.summary.bias")

    def __init__(self, gpt: GPT, *, dropout: float = DROPOUT) -> None:
        super().__init__(gpt)
        parts = OrderedDict(dropout=nn.Dropout(dropout), summary=self.linear(1, bias=True))
        self.multiple_choice_head = nn.Sequential(parts)

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Ids (B, C, T), lengths (B, C) -> logits (B, C).

        A length of 0 means that there is no such choice; its logit is -inf.
        """
        return self._choices(self.gpt.body(ids.flatten(0, 1)), ids, lengths)

    def losses(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Ids (B, C, T), lengths (B, C), targets (B, C, T), answers (B,) -> both terms of L_3.

        `targets[b, c, t]` is the id that follows `ids[b, c, t]`, or -100 where the language term
        does not count it, for example in wrong choices.
        """
        ids, lengths, targets, answers = batch
        h = self.gpt.body(ids.flatten(0, 1))  # (B * C, T, D)
        targets = targets.flatten()
        counted = targets != IGNORED
        language = self.gpt.head_loss(h.flatten(0, 1)[counted], targets[counted])
        choice = cross_entropy(self._choices(h, ids, lengths), answers)
        return LANGUAGE_WEIGHT * language, choice

    def _choices(self, h: Tensor, ids: Tensor, lengths: Tensor | None) -> Tensor:
        """States (B * C, T, D), ids (B, C, T), lengths (B, C) -> logits (B, C)."""
        flat = None if lengths is None else lengths.flatten()
        flat = checked_lengths(ids.flatten(0, 1), flat, least=0)
        logits = self.multiple_choice_head(last_state(h, flat))[:, 0]
        return logits.masked_fill(flat == 0, float("-inf")).view(ids.shape[:2])

    def config_keys(self) -> dict[str, Any]:
        """Return the keys by which transformers builds the same logit."""
        return {key: values[0] for key, values in SUPPORTED.items()} | {
            "summary_first_dropout": self.multiple_choice_head.get_submodule("dropout").p,
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
        }

    @classmethod
    def options_from(cls, config: Mapping[str, Any], n_outputs: int) -> dict[str, Any]:
        """Return the dropout; raise `UserError` for another kind of summary."""
        for key, values in SUPPORTED.items():
            if config.get(key, values[0]) not in values:
                raise UserError(
                    f"{key}={config[key]!r} in config.json is not supported, only {values[0]!r} is"
                )
        return {"dropout": dropout_from(config, "summary_first_dropout")}
