"""Sequences of different lengths in one batch, padded on the right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiedgpt.errors import UserError


def pad(sequences: Sequence[Sequence[int]], *, pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """Return ids (B, T), padded with `pad_id` on the right, and lengths (B,).

    Any id of the vocabulary will do: causal attention never looks to the right.
    """
    lengths = [len(sequence) for sequence in sequences]
    if not lengths or not min(lengths):
        raise UserError("a batch needs at least one sequence, and each at least one token")
    longest = max(lengths)
    rows = [[*sequence, *[pad_id] * (longest - len(sequence))] for sequence in sequences]
    return torch.tensor(rows), torch.tensor(lengths)


def checked_lengths(ids: Tensor, lengths: Tensor | None, *, least: int = 1) -> Tensor:
    """Return the lengths (B,) of ids (B, T); None means that there is no padding.

    Raises `UserError` for a length below `least` or above T. Values are checked on the CPU only:
    elsewhere the check would wait for the device.
    """
    n_rows, longest = ids.shape
    if lengths is None:
        return torch.full((n_rows,), longest, device=ids.device)
    if lengths.shape != (n_rows,):
        raise UserError(f"lengths {tuple(lengths.shape)}: {n_rows} sequences need ({n_rows},)")
    if lengths.device.type == "cpu" and n_rows:
        low, high = int(lengths.min()), int(lengths.max())
        if low < least or high > longest:
            raise UserError(f"lengths must be {least} to {longest} here, got {low} to {high}")
    return lengths


def is_token(ids: Tensor, lengths: Tensor) -> Tensor:
    """Return (B, T) bool: True at a token, False at padding."""
    return torch.arange(ids.shape[-1], device=ids.device) < lengths[..., None]


def last_state(h: Tensor, lengths: Tensor) -> Tensor:
    """(B, T, D) -> (B, D): the state of each sequence's last token, which has seen the others."""
    rows = torch.arange(h.shape[0], device=h.device)
    return h[rows, (lengths - 1).clamp(min=0)]
