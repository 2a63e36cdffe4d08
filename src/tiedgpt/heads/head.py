"""A head on a body: what all heads share. The loss as a sum of means, saving, loading."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiedgpt.core.loss import IGNORED
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError

INIT_STD = 0.02


def cross_entropy(scores: Tensor, answers: Tensor) -> Tensor:
    """Scores (..., N), answers (...) -> (): the mean over answers that are not -100, in nats.

    Scores of half precision are computed with in fp32.
    """
    wide = torch.promote_types(scores.dtype, torch.float32)
    return F.cross_entropy(scores.flatten(0, -2).to(wide), answers.flatten(), ignore_index=IGNORED)


class Head(nn.Module):
    """A GPT, `gpt`, of which the body is used, and modules of its own that score its states.

    The names of its own parameters are those of transformers' class.
    """

    gpt: GPT
    architecture: ClassVar[str]
    """The name of transformers' class without the family: "ForSequenceClassification"."""
    predicts_tokens: ClassVar[bool] = False
    """Whether it also uses the body's head over the vocabulary."""
    own: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors that a file holds for it."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        if gpt.head is not None and not self.predicts_tokens:
            raise UserError(
                f"{type(self).__name__} has no place for the model's head over the vocabulary: set "
                "model.head = None in a copy, or use .fresh(source)"
            )
        self.gpt = gpt

    def losses(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Return the means that add up to the loss.

        The last arrays of a batch are the answers, one for each mean, in which -100 is not counted.
        """
        raise UserError(f"{type(self).__name__} has no loss: it predicts nothing")

    def loss(self, *batch: Tensor) -> Tensor:
        """Return the loss, (), in nats; the arguments are those of `losses`."""
        terms = self.losses(*batch)
        return torch.stack(terms).sum()

    def linear(self, n_out: int, *, bias: bool) -> nn.Linear:
        """Return a product (..., D) -> (..., n_out), N(0, 0.02) with biases 0, on the body."""
        weight = self.gpt.wte.weight
        made = nn.Linear(
            self.gpt.config.n_embd, n_out, bias=bias, device=weight.device, dtype=weight.dtype
        )
        with torch.no_grad():
            made.weight.normal_(0.0, INIT_STD)
            if made.bias is not None:
                made.bias.zero_()
        return made

    def description(self) -> dict[str, Any]:
        """Return what config.json says of the head."""
        return {}

    @classmethod
    def options_from(
        cls, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Any]:
        """Return the constructor's options, read off a config.json and its tensors' shapes.

        Raises `UserError`, naming the key, for what is not built here.
        """
        return {}

    @classmethod
    def fresh(
        cls, source: str | os.PathLike[str], *, dtype: torch.dtype | None = None, **options: Any
    ) -> Self:
        """Put a new head, N(0, 0.02), on the body of any GPT at `source`, in eval mode.

        `options` are the constructor's (`labels=[...]`). A head that the source has is left there.
        """
        from tiedgpt.heads.storing import load_body

        gpt = load_body(source, dtype=dtype, keep_head=cls.predicts_tokens).model
        return cls(gpt, **options).eval()

    @classmethod
    def from_pretrained(
        cls, source: str | os.PathLike[str], *, dtype: torch.dtype | None = None, **options: Any
    ) -> Self:
        """Load a body with its head from a Hugging Face directory or hub name, in eval mode.

        A file without this head is an error, never a fresh head: that is `fresh`.
        """
        from tiedgpt.heads.storing import load_head

        return load_head(cls, source, dtype=dtype, options=options)

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write a Hugging Face directory that transformers' class loads as it is.

        For a GPT-1 body transformers has no class for tags or spans, and refuses the directory by
        the name in `architectures`; it loads back here.
        """
        from tiedgpt.heads.storing import save_head

        save_head(self, directory)
