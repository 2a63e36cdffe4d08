"""Open the input of an inspection: a model, its tokenizer and a text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.options import read_number
from tiedgpt.text import Tokenizer
from tiedgpt.weights.source import Source, tokenizer_for

Model = GPT | nn.Module | str | os.PathLike[str]
"""A GPT, transformers' GPT-2 or GPT-1 in memory, or a path, a run directory, a hub name."""
Text = str | Sequence[int] | np.ndarray | Tensor
"""A text, or the ids of its tokens (T,)."""


@dataclass(frozen=True)
class InspectionInput:
    """A model and the text that it reads."""

    model: GPT
    tokenizer: Tokenizer | None
    ids: Tensor
    """(1, T) int64 on the model's device."""

    @property
    def targets(self) -> Tensor:
        """(T,) the id that follows each token; -1 after the last."""
        return torch.cat([self.ids[0, 1:], self.ids.new_tensor([-1])])

    def text(self, *others: np.ndarray) -> dict[str, Any]:
        """Return the fields that results share: ids, their pieces, and the text of all ids."""
        ids = numpy(self.ids[0])
        distinct = sorted({int(id) for array in (ids, *others) for id in array.flat})
        words = {id: piece(self.tokenizer, id) for id in distinct}
        return {"ids": ids, "pieces": tuple(words[id] for id in ids.tolist()), "words": words}


def index(value: int, n: int, name: str) -> int:
    """Return an index from 0 to n - 1; a negative one counts from the end."""
    value = read_number(name, value, int)
    if not -n <= value < n:
        raise UserError(f"must be from 0 to {n - 1}, or -1 to -{n}, got {value}", option=name)
    return value % n


def token_id(value: int | str, tokenizer: Tokenizer | None, n: int, name: str) -> int:
    """Return the id of a token, given as an id or as its text; `UserError` if it is not one."""
    if isinstance(value, int):
        return index(value, n, name)
    if tokenizer is None:
        raise UserError("needs a tokenizer to be a text", option=name, hint="give an id")
    ids = tokenizer.encode(value)
    if len(ids) != 1:
        raise UserError(
            f"must be one token, got {len(ids)} for {value!r}",
            option=name,
            hint="give one token's text, perhaps with a blank before it, or its id",
        )
    return index(ids[0], n, name)


def open_model(
    model: Model, tokenizer: Any, *, needed: bool = False
) -> tuple[GPT, Tokenizer | None]:
    """Return the GPT and its tokenizer; see `tokenizer_for`."""
    model = model if isinstance(model, nn.Module) else Source.of(model)
    tokenizer = tokenizer_for(model, tokenizer, needed=needed)
    return model if isinstance(model, GPT) else GPT.from_pretrained(model), tokenizer


def open_input(model: Model, tokenizer: Any, text: Text, *, least: int = 1) -> InspectionInput:
    """Open a model and a text, and check that the text has `least` tokens or more.

    With a path or a hub name as the model, a text may stand in the tokenizer's place.
    """
    if isinstance(text, str) and not text and isinstance(tokenizer, str):
        if tokenizer and not os.path.exists(tokenizer):
            if isinstance(model, nn.Module):
                raise UserError(
                    f"{tokenizer!r} is in the tokenizer's place",
                    hint="give a tokenizer and a text, or name the text: text=...",
                )
            tokenizer, text = None, tokenizer
    if isinstance(text, (str, Sequence)) and not text:
        raise UserError("the text is empty", hint="give at least a word")
    gpt, tokenizer = open_model(model, tokenizer, needed=isinstance(text, str))
    if isinstance(text, str):
        assert tokenizer is not None
        text = tokenizer.encode_document(text)
    try:
        ids = np.asarray(text.cpu() if isinstance(text, Tensor) else text)
    except ValueError:  # lists of different lengths
        ids = np.asarray(None)
    size, context = gpt.config.vocab_size, gpt.config.n_positions
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(
            f"the text must be a str or ids, which must be integers of shape (T,), got "
            f"{type(text).__name__} of {ids.dtype} {ids.shape}"
        )
    if not least <= len(ids) <= context:
        raise UserError(
            f"the text must have {least} to {context:,} tokens, the model's context, got "
            f"{len(ids):,}",
            hint=f"give a {('shorter' if len(ids) > context else 'longer')} one",
        )
    if ids.min() < 0 or ids.max() >= size:
        wrong = int(ids[(ids < 0) | (ids >= size)][0])
        raise UserError(
            f"id {wrong} is outside the model's vocabulary of {size:,} tokens: the text or the "
            "tokenizer belongs to another model"
        )
    device = next(gpt.parameters()).device
    return InspectionInput(gpt, tokenizer, torch.from_numpy(ids.astype(np.int64))[None].to(device))


def piece(tokenizer: Tokenizer | None, id: int) -> str:
    r"""Return the text of one token.

    Part of a character is written as OpenAI's API does, `bytes:\xe2\x80`; an id that no tokenizer
    knows as `id:50300`.
    """
    try:
        data = b"" if tokenizer is None else tokenizer.token_bytes(id)
        return f"id:{id}" if tokenizer is None else data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    except UserError:
        return f"id:{id}"


def numpy(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array, half precision as fp32."""
    tensor = tensor.detach().cpu()
    narrow = tensor.dtype in (torch.bfloat16, torch.float16)
    return (tensor.float() if narrow else tensor).numpy()


def join(parts: Iterable[Tensor]) -> np.ndarray:
    """Return tensors of several chunks as one array."""
    return numpy(torch.cat(list(parts)))
