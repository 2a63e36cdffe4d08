"""A GPT that was trained already, from which a run starts: its config, its tokenizer, its weights.

It is read once, when the run is planned, and its weights are dropped after the first step's model
has them: from then on everything is in the run's own checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.heads.head import load_body
from tiedgpt.text import Tokenizer


@dataclass
class Pretrained:
    """The GPT at a SOURCE; a head on it, other than that over the vocabulary, stays there."""

    source: str
    keep_head: bool
    """Whether a head of its own over the vocabulary is taken along."""
    _gpt: GPT | None = None

    @property
    def gpt(self) -> GPT:
        """The model, in fp32."""
        if self._gpt is None:
            self._gpt = load_body(self.source, dtype=torch.float32, keep_head=self.keep_head)
        return self._gpt

    def config(self, dropout: float | None) -> GPTConfig:
        """Return its config, with this dropout everywhere unless None."""
        if dropout is None:
            return self.gpt.config
        return replace(self.gpt.config, embd_pdrop=dropout, attn_pdrop=dropout, resid_pdrop=dropout)

    def tokenizer(self, source: str | None = None) -> Tokenizer:
        """Return its tokenizer, or that at `source`; they must belong together."""
        tokenizer = Tokenizer.from_pretrained(source or self.source)
        if len(tokenizer) > self.gpt.config.vocab_size:
            raise UserError(
                f"the tokenizer has {len(tokenizer):,} tokens and {self.source} "
                f"{self.gpt.config.vocab_size:,}: they do not belong together; give --tokenizer"
            )
        return tokenizer

    def put_into(self, gpt: GPT) -> None:
        """Copy its weights into a model of its shape, and let go of them."""
        theirs, ours = self.gpt.state_dict(), gpt.state_dict()
        if {n: t.shape for n, t in theirs.items()} != {n: t.shape for n, t in ours.items()}:
            raise UserError(
                f"{self.source} is another model than when this run began: give another --out"
            )
        gpt.load_state_dict(theirs)
        self._gpt = None
