"""Which of several continuations is right: a score of each, beside the scores of tokens.

The "double heads" of Radford et al. 2018, section 3.2: L_3 = L_choice + lambda L_language, with
lambda = 0.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from tiedgpt.core.loss import IGNORED, head_cross_entropy, linear_cross_entropy
from tiedgpt.core.model import GPT, plain_matrix
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.heads.head import Head, cross_entropy
from tiedgpt.heads.padding import at_last, whole

LANGUAGE_WEIGHT = 0.5
BUILT: dict[str, tuple[Any, ...]] = {
    "summary_type": ("cls_index",),
    "summary_use_proj": (True,),
    "summary_proj_to_labels": (True,),
    "summary_activation": (None,),
    "summary_last_dropout": (None, 0, 0.0),
}
"""Keys of transformers that shape the choice's score, with the values that are built here."""


class Summary(nn.Module):
    """One number from a state: dropout, then a product with a bias."""

    def __init__(self, product: nn.Linear, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.summary = product

    def forward(self, h: Tensor) -> Tensor:
        """(..., D) -> (...)."""
        return self.summary(self.dropout(h)).squeeze(-1)


class MultipleChoice(Head):
    """A score for each choice, read at its last token; and the body still predicts tokens."""

    architecture = "DoubleHeadsModel"
    predicts_tokens = True
    own = ("multiple_choice_head.summary.weight", "multiple_choice_head.summary.bias")

    def __init__(self, gpt: GPT, *, dropout: float = 0.1) -> None:
        super().__init__(gpt)
        self.multiple_choice_head = Summary(self.linear(1, bias=True), dropout)

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Ids (B, C, T), lengths (B, C) -> (B, C): higher is likelier.

        A length of 0 says that there is no such choice; its score is -inf.
        """
        return self._choices(self.gpt.body(ids.flatten(0, 1)), ids, lengths)

    def losses(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Return the two terms of L_3 for ids, targets (B, C, T), lengths (B, C), answers (B,).

        `targets[b, c, t]` is the id that follows `ids[b, c, t]`, or -100 where the language term
        does not count it: under wrong choices, if wrong text is not to be learned.
        """
        ids, lengths, targets, answers = batch
        h = self.gpt.body(ids.flatten(0, 1))  # (B * C, T, D)
        counted = targets.flatten() != IGNORED
        language = self._language(h.flatten(0, 1)[counted], targets.flatten()[counted])
        choice = cross_entropy(self._choices(h, ids, lengths), answers)
        return LANGUAGE_WEIGHT * language, choice

    def _choices(self, h: Tensor, ids: Tensor, lengths: Tensor | None) -> Tensor:
        flat = ids.flatten(0, 1)
        there = whole(flat, None if lengths is None else lengths.flatten(), least=0)
        scores = self.multiple_choice_head(at_last(h, there))
        return scores.masked_fill(there == 0, float("-inf")).view(ids.shape[:2])

    def _language(self, h: Tensor, targets: Tensor) -> Tensor:
        """Take h (N, D), targets (N,) -> (): the mean cross-entropy of tokens."""
        head = self.gpt.head
        matrix = self.gpt.wte.weight if head is None else plain_matrix(head)
        if matrix is None:
            assert head is not None
            return head_cross_entropy(h, head, targets)
        return linear_cross_entropy(h, matrix, targets)

    def description(self) -> dict[str, Any]:
        """Say how transformers is to build the choice's score."""
        keys = {key: values[0] for key, values in BUILT.items() if key != "summary_last_dropout"}
        dropout = {"summary_first_dropout": self.multiple_choice_head.dropout.p}
        return keys | dropout | {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}

    @classmethod
    def options_from(
        cls, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Any]:
        """Return the dropout; refuse another kind of summary by its key."""
        for key, built in BUILT.items():
            if key in config and config[key] not in built:
                raise UserError(
                    f"the model's config has {key}={config[key]!r}, which is not built here: "
                    f"{built[0]!r} is"
                )
        dropout = config.get("summary_first_dropout", 0.1)
        if type(dropout) not in (int, float) or not 0 <= dropout < 1:
            raise CorruptInputError(
                f"summary_first_dropout={dropout!r} is no probability in [0, 1)"
            )
        return {"dropout": dropout}
