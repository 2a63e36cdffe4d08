"""From records to padded batches of ids, the same in training and in prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tiedgpt.errors import UserError
from tiedgpt.signatures import checked, require_type

LARGEST_NUMBER = 1e18
"""Maximum size of a number to learn: the square of a larger one overflows in fp32."""


def is_number(value: Any) -> bool:
    """Return whether a value is an int or a float of at most `LARGEST_NUMBER`, and no bool."""
    return type(value) in (int, float) and abs(value) <= LARGEST_NUMBER


def format_fields(fields: Mapping[str, str]) -> str:
    """Return the fields of a record with their values in messages: {"text": ..}."""
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"


def read_field(record: Mapping[str, Any], field: str) -> Any:
    """Return the value of a field; raise `UserError` if it is missing or null."""
    if (value := record.get(field)) is None:
        fields = ", ".join(map(repr, record)) or "no field"
        raise UserError(f"no value in the field {field!r}; the record has {fields}")
    return value


def read_text(record: Mapping[str, Any], field: str) -> str:
    """Return the text in a field; raise `UserError` if it is missing or blank."""
    value = record.get(field)
    if not isinstance(value, str):
        fields = ", ".join(map(repr, record)) or "no field"
        raise UserError(f"no string in the field {field!r}; the record has {fields}")
    if not value.strip():
        raise UserError(f"the field {field!r} is empty")
    return value


def read_choices(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the text of a record followed by each of its choices.

    Raises `UserError` if `text` is missing or blank, or `choices` is not a list of texts.
    """
    text, choices = read_text(record, "text"), record.get("choices")
    if not isinstance(choices, list) or not choices:
        raise UserError("no list in the field 'choices'")
    for choice in choices:
        if not isinstance(choice, str) or not choice.strip():
            raise UserError(f"{choice!r} in 'choices' is not a text")
    spaced = text[-1].isspace()
    return tuple(text + ("" if spaced or c[0].isspace() else " ") + c for c in choices)


def read_answer(record: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """Return the text with each choice, and `answer`, the index of the right choice.

    Raises `UserError` for fewer than two choices, or an `answer` that is not their index.
    """
    texts, answer = read_choices(record), read_field(record, "answer")
    if len(texts) < 2:
        raise UserError("one choice leaves nothing to choose", hint="give two or more")
    if type(answer) is not int or not 0 <= answer < len(texts):
        raise UserError(
            f"the answer {answer!r} is not the index of a choice, 0 to {len(texts) - 1}"
        )
    return texts, answer


def read_label(record: Mapping[str, Any]) -> str:
    """Return the name in the field `label`, which may be an integer, else `UserError`."""
    label = read_field(record, "label")
    if isinstance(label, bool) or not isinstance(label, (str, int)) or label == "":
        raise UserError(f"the label {label!r} is neither a name nor an integer")
    return str(label)


def read_number(record: Mapping[str, Any]) -> float:
    """Return the number in the field `number`, else `UserError`."""
    number = read_field(record, "number")
    if not is_number(number):
        raise UserError(
            f"the field 'number' must be an unquoted number from -{LARGEST_NUMBER:.0e} to "
            f"{LARGEST_NUMBER:.0e}, got {number!r}"
        )
    return float(number)


@checked
def pad(
    sequences: Sequence[Sequence[int]], *, pad_id: int = 0, device: str | torch.device = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return ids (B, T), padded with `pad_id` on the right, and lengths (B,).

    Any id of the vocabulary will do: causal attention never looks to the right.
    """
    lengths = [len(sequence) for sequence in sequences]
    if not lengths or not min(lengths):
        raise UserError("a batch needs at least one sequence, and each at least one token")
    longest = max(lengths)
    rows = [[*sequence, *[pad_id] * (longest - len(sequence))] for sequence in sequences]
    return torch.tensor(rows, device=device), torch.tensor(lengths, device=device)


def check_lengths(ids: Tensor, lengths: Tensor | None, *, minimum: int = 1) -> Tensor:
    """Return the lengths (B,) of ids (B, T); None means that there is no padding.

    Raises `UserError` for a length below `minimum` or above T. Values are checked on the CPU only:
    elsewhere the check would wait for the device.
    """
    n_rows, longest = ids.shape
    if lengths is None:
        return torch.full((n_rows,), longest, device=ids.device)
    require_type("the head", "lengths", lengths, Tensor)
    if lengths.shape != (n_rows,):
        raise UserError(f"lengths {tuple(lengths.shape)}: {n_rows} sequences need ({n_rows},)")
    if lengths.device.type == "cpu" and n_rows:
        low, high = int(lengths.min()), int(lengths.max())
        if low < minimum or high > longest:
            raise UserError(f"lengths must be {minimum} to {longest} here, got {low} to {high}")
    return lengths


def last_state(h: Tensor, lengths: Tensor) -> Tensor:
    """(B, T, D) -> (B, D): return the state of each sequence's last token."""
    rows = torch.arange(h.shape[0], device=h.device)
    return h[rows, (lengths - 1).clamp(min=0)]
