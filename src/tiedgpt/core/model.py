"""The network: it reads tokens and predicts the next one at each position.

Follow `self.wte`: it reads at the bottom of `states` and predicts in `logits`.
Shapes: B batch, T positions, D width, V vocabulary, L layers.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tiedgpt.core.cache import KVCache
from tiedgpt.core.config import GPTConfig
from tiedgpt.core.embedding import TiedEmbedding
from tiedgpt.core.layers import Block, layer_norm
from tiedgpt.core.loss import INTEGERS, chunk_rows, chunked_cross_entropy, require_target_shape
from tiedgpt.errors import UserError
from tiedgpt.names import ExplainsNames
from tiedgpt.signatures import require_type


class GPT(ExplainsNames, nn.Module):
    """A GPT with OpenAI's names; a new one is initialised as in the papers.

    Under `with torch.device("meta")` its shapes are built and no weights are drawn.
    `head` is None when `wte` predicts (tied), otherwise a module (..., D) -> (..., V).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        require_type("GPT", "config", config, GPTConfig)
        self.config = config
        self.foreign_config: dict[str, Any] = {}  # keys of the file's config that change nothing
        tokens = torch.empty(config.vocab_size, config.n_embd)
        positions = torch.empty(config.n_positions, config.n_embd)
        self.wte = TiedEmbedding.from_pretrained(tokens, freeze=False)  # type: ignore[no-untyped-call]
        self.wpe = nn.Embedding.from_pretrained(positions, freeze=False)
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

        GPT-2: tokens and linear layers N(0, 0.02), positions N(0, 0.01), the projections into the
        residual stream scaled by 1/sqrt(2 L), biases 0 (Radford et al. 2019, the released code).
        GPT-1: N(0, 0.02) throughout.
        """
        if self.wte.weight.is_meta:
            return
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
        self, ids: Tensor, cache: KVCache | None = None, *, document_starts: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Yield the residual stream (B, T, D) after the embedding and after each of L blocks.

        ids (B, T) int64 or int32; with a cache, the tokens that follow the cached ones.
        `document_starts` (B, T) packs documents into a row: the index where each token's document
        begins. A token then sees only its document, and its position counts from there.
        """
        self._check_ids(ids, cache)
        n_new, mask = ids.shape[1], None
        positions = torch.arange(n_new, device=ids.device)[None]
        if cache is not None:
            positions = cache.positions(n_new)
        if document_starts is not None:
            require_type("GPT", "document_starts", starts := document_starts, Tensor)
            if cache is not None or starts.shape != ids.shape or starts.dtype not in INTEGERS:
                raise UserError(
                    f"must hold an index for each of ids {tuple(ids.shape)}, without a cache, got "
                    f"{starts.dtype} {tuple(starts.shape)}",
                    option="document_starts",
                )
            mask = (positions >= starts[:, :, None]) & (positions <= positions[:, :, None])
            within, mask = (starts >= 0) & (starts <= positions), mask[:, None]  # (B, 1, T, T)
            positions = torch.where(within, positions - starts, -1)  # wpe refuses -1
        try:
            position_vectors = self.wpe(positions)
        except IndexError:
            raise UserError(
                "must hold, for each token, an index from 0 to its own", option="document_starts"
            ) from None
        x = self.drop(self.wte(ids) + position_vectors)  # h_0 = U W_e + W_p
        yield x
        for layer, block in enumerate(self.h):
            x = block(x, layer, cache, mask)
            yield x
        if cache is not None:
            cache.advance(n_new)

    def body(
        self, ids: Tensor, cache: KVCache | None = None, *, document_starts: Tensor | None = None
    ) -> Tensor:
        """(B, T) -> (B, T, D): the last state after the final norm, the input of the head."""
        for state in self.states(ids, cache, document_starts=document_starts):
            x = state
        return self.ln_f(x)

    def logits(self, h: Tensor) -> Tensor:
        """(..., D) -> (..., V), by `wte` or by an untied head."""
        return self.wte.unembed(h) if self.head is None else self.head(h)  # h_n W_e^T

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """(B, T) -> (B, T, V): at each of T tokens, a logit for every token that may follow."""
        return self.logits(self.body(ids, cache))

    def loss(
        self, ids: Tensor, targets: Tensor, *, document_starts: Tensor | None = None
    ) -> Tensor:
        """Mean cross-entropy in nats over the targets that are not -100.

        targets (B, T): `targets[b, t]` is the id that follows `ids[b, t]`; nothing is shifted
        here. Equals `F.cross_entropy` of `model(ids)` in value and gradients, but the (B, T, V)
        logits are never held at once. `document_starts` packs documents; see `states`.
        """
        for name, value in (("ids", ids), ("targets", targets)):
            require_type("GPT.loss", name, value, Tensor)
        if targets.shape != ids.shape:
            raise UserError(
                "ids and targets must have one shape (B, T), got "
                f"{tuple(ids.shape)} and {tuple(targets.shape)}"
            )
        h = self.body(ids, document_starts=document_starts)
        return self.head_loss(h.flatten(0, 1), targets.flatten())

    def head_loss(self, h: Tensor, targets: Tensor) -> Tensor:
        """Return the loss () of final states h (N, D) and targets (N,)."""
        require_target_shape(h, targets)
        n_rows = chunk_rows(len(h), self.config.vocab_size, h.dtype)
        return chunked_cross_entropy(h, targets, self.logits, n_rows)

    def extra_repr(self) -> str:
        """Return the number of parameters, and the matrix that predicts, for `print(model)`."""
        tied = self.head is None or self.config.tie_word_embeddings  # a head may hold on to wte
        predicts = "wte reads and predicts" if tied else "wte reads, the head predicts"
        return f"{sum(p.numel() for p in self.parameters()):,} parameters, {predicts}"

    def _check_ids(self, ids: Tensor, cache: KVCache | None) -> None:
        require_type("GPT", "ids", ids, Tensor)
        if ids.ndim != 2 or ids.dtype not in INTEGERS:
            raise UserError(
                f"ids must be int64 or int32 of shape (B, T), got {ids.dtype} {tuple(ids.shape)}"
            )
        lengths, capacity = [0], self.config.n_positions
        if cache is not None:
            require_type("GPT", "cache", cache, KVCache)
            lengths, capacity = cache.lengths, min(capacity, cache.capacity)
            shape, config = cache.keys.shape, self.config
            if (shape[0], shape[2], shape[4]) != (config.n_layer, config.n_head, config.head_dim):
                raise UserError("the cache was allocated for a model of another shape")
            if len(lengths) != len(ids):
                raise UserError(f"the cache holds {len(lengths)} sequences, got ids of {len(ids)}")
        if ids.shape[1] < 1 or max(lengths) + ids.shape[1] > capacity:
            raise UserError(
                f"a sequence must have 1 to {capacity} tokens, got {ids.shape[1]} after "
                f"{max(lengths)}"
            )

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
        """Load a model in eval mode from a directory, a file, a hub name or transformers' module.

        dtype None keeps the file's. `resolve` ("untie", "keep-input", "keep-output", "tie") decides
        for a file with two different matrices, or without the head that it claims. `revision` and
        `cache_dir` are for hub names. `config` adds fields that the file lacks, and may change
        dropout. A `CheckpointWarning` names assumptions.

        Raises `CorruptInputError` for damaged files and files without a GPT, else `UserError`.
        """
        from tiedgpt.weights.load import CheckpointWarning, load

        loaded = load(
            source, resolve=resolve, dtype=dtype, revision=revision, cache_dir=cache_dir, **config
        )
        for note in loaded.notes:
            warnings.warn(f"{loaded.path}: {note}", CheckpointWarning, stacklevel=2)
        return loaded.model

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write a Hugging Face directory that transformers loads.

        Raises `UserError`, before anything is written, for a model that differs from its config:
        an unmerged adapter, parametrizations, a pruned or added module.
        """
        from tiedgpt.weights.formats.transformers.writer import save_model

        save_model(self, directory)

    def push_to_hub(
        self, repo: str, *, tokenizer: Any = None, private: bool = True, token: str | None = None
    ) -> str:
        """Send the model, and its tokenizer, to "owner/name" on the Hugging Face hub.

        Returns the URL of the commit. A new repository is private. `token` None takes that of
        `hf auth login` or HF_TOKEN. Raises `UserError` as `save_pretrained`, without a token, and
        where the hub refuses or cannot be reached.
        """
        from tiedgpt.weights.hub import push_model

        return push_model(self, repo, tokenizer=tokenizer, private=private, token=token)
