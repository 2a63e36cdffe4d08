"""The network: tokens in, one prediction for each of them out.

Follow `self.wte`: it reads at the bottom of `states` and predicts in `logits`.
Shapes: B batch, T positions, D width, V vocabulary, L layers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tiedgpt.core.cache import KVCache, positions_after
from tiedgpt.core.config import GPTConfig
from tiedgpt.core.embedding import (
    READS_AND_PREDICTS,
    READS_ONLY,
    PredictingGradient,
    TiedEmbedding,
)
from tiedgpt.core.layers import Block, layer_norm
from tiedgpt.core.loss import head_cross_entropy, linear_cross_entropy
from tiedgpt.errors import UserError


def plain_matrix(head: nn.Module) -> Tensor | None:
    """Return the matrix (V, D) of a head that is h W^T and nothing more, else None."""
    if type(head) is nn.Linear and [name for name, _ in head.named_parameters()] == ["weight"]:
        return head.weight
    return None


class GPT(nn.Module):
    """A GPT with OpenAI's names; a fresh one is initialised as in the papers.

    `head` is None when `wte` predicts (tied), or a module (..., D) -> (..., V) of its own.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.foreign_config: dict[str, Any] = {}  # keys of the file's config that change nothing
        self.wte = TiedEmbedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = layer_norm(config) if config.norm == "pre" else nn.Identity()
        self.head: nn.Module | None = None
        if not config.tie_word_embeddings:
            self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw fresh weights from torch's global random stream.

        GPT-2: tokens and products N(0, 0.02), positions N(0, 0.01), what writes into the residual
        stream scaled by 1/sqrt(2 L), biases 0 (Radford et al. 2019 and the released code).
        GPT-1: N(0, 0.02) throughout.
        """
        pre = self.config.norm == "pre"
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer) if pre else 0.02
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, residual_std if name.endswith(".c_proj") else 0.02)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        self.wte.weight.normal_(0.0, 0.02)
        self.wpe.weight.normal_(0.0, 0.01 if pre else 0.02)

    def states(
        self, ids: Tensor, cache: KVCache | None = None, *read: PredictingGradient
    ) -> Iterator[Tensor]:
        """Yield the residual stream (B, T, D) after the embedding and after each of L blocks.

        ids (B, T) holds int64 or int32. With a cache, ids are what comes after the tokens in it.
        `read` goes to `wte`.
        """
        positions = self._place(ids, cache)
        x = self.drop(self.wte(ids, *read) + self.wpe(positions))  # h_0 = U W_e + W_p
        yield x
        for layer, block in enumerate(self.h):
            x = block(x, layer, cache)
            yield x
        if cache is not None:
            cache.advance(ids.shape[1])

    def body(self, ids: Tensor, cache: KVCache | None = None, *read: PredictingGradient) -> Tensor:
        """(B, T) -> (B, T, D): the last state after the final norm, what the head is given."""
        for state in self.states(ids, cache, *read):
            x = state
        return self.ln_f(x)

    def logits(self, h: Tensor) -> Tensor:
        """(..., D) -> (..., V): scores by whichever predicts, `wte` or a head of its own."""
        return self.wte.unembed(h) if self.head is None else self.head(h)  # h_n W_e^T

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """(B, T) -> (B, T, V): at each of T tokens, a score for every token that may follow."""
        return self.logits(self.body(ids, cache))

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats over the targets that are not -100.

        targets (B, T): `targets[b, t]` is the id that follows `ids[b, t]`; nothing is shifted
        here. The (B, T, V) logits are never held at once.
        """
        if targets.shape != ids.shape:
            raise UserError(
                f"targets {tuple(targets.shape)} must have the shape of ids {tuple(ids.shape)}: "
                "one answer for each position"
            )
        targets = targets.flatten()
        plain = type(self.wte) is TiedEmbedding and self.wte.weight.is_leaf
        if self.head is None and plain and not torch.compiler.is_compiling():
            both = PredictingGradient()  # of W: what reading adds, it is added to
            h = self.body(ids, None, both).flatten(0, 1)
            return linear_cross_entropy(h, self.wte.weight, targets, both)
        h = self.body(ids).flatten(0, 1)
        if self.head is None:
            return linear_cross_entropy(h, self.wte.weight, targets)
        matrix = plain_matrix(self.head)
        if matrix is not None:
            return linear_cross_entropy(h, matrix, targets)
        return head_cross_entropy(h, self.head, targets)

    def extra_repr(self) -> str:
        """Count the parameters in `print(model)`."""
        return f"{sum(p.numel() for p in self.parameters()):,} parameters"

    def __repr__(self) -> str:
        text = super().__repr__()
        tied = self.head is None or self.config.tie_word_embeddings  # a head may hold on to wte
        return text if tied else text.replace(READS_AND_PREDICTS, READS_ONLY)

    def _place(self, ids: Tensor, cache: KVCache | None) -> Tensor:
        """Check ids against the context; return their positions (B|1, T)."""
        if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise UserError(
                f"ids must be whole numbers of shape (B, T), not {ids.dtype} {tuple(ids.shape)}"
            )
        n_new = ids.shape[1]
        lengths = [0] if cache is None else cache.lengths
        room = self.config.n_positions if cache is None else cache.capacity
        if n_new < 1 or max(lengths) + n_new > room:
            before = f" after {max(lengths)} in the cache" if cache is not None else ""
            raise UserError(f"{n_new} tokens{before}: a sequence here holds 1 to {room}")
        if cache is not None and len(lengths) != ids.shape[0]:
            raise UserError(f"{ids.shape[0]} sequences for a cache of {len(lengths)}")
        return positions_after([0], n_new, ids.device) if cache is None else cache.positions(n_new)

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str] | nn.Module,
        *,
        resolve: str | None = None,
        dtype: torch.dtype | None = None,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        **config: Any,
    ) -> GPT:
        """Load a model from a directory, a file or a hub name, in eval mode.

        `source` may also be a GPT-2 or GPT-1 of transformers in memory: its weights are copied.
        dtype None keeps the file's. `resolve` ("untie", "keep-input", "keep-output", "tie") says
        what to do where a file holds two different matrices, or lacks the head that its config
        claims. `revision` (a branch, tag or commit) and `cache_dir` are for hub names. `config`
        fills in what the file does not say; it may change dropout (`attn_pdrop=0.0`), and
        contradict nothing else. Assumptions are told in a `CheckpointWarning`.

        Raises `CorruptInputError` for files that are damaged or not GPTs, `UserError` for what is
        asked for wrongly, for classifiers (see `tiedgpt.heads`) and for adapters.
        """
        from tiedgpt.weights.load import load_model

        return load_model(
            source, resolve=resolve, dtype=dtype, revision=revision, cache_dir=cache_dir, **config
        )

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write a Hugging Face directory that transformers loads as it is.

        Existing files of the same names are replaced, each atomically. Raises `UserError`, before
        anything is written, for a model that is not what its config says: an unmerged adapter,
        parametrizations, a pruned or added module.
        """
        from tiedgpt.weights.save import save_model

        save_model(self, directory)
