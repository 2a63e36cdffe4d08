"""The text that the page opens with: held-out text whose next token the model predicts well."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

from tiedgpt.core.model import GPT
from tiedgpt.data import Shards
from tiedgpt.errors import TiedGPTError
from tiedgpt.files import replacing
from tiedgpt.runtime import eval_mode
from tiedgpt.text import Tokenizer
from tiedgpt.text.bpe import END_OF_TEXT
from tiedgpt.train.storage import OPENING

SENTENCES = re.compile(r"(?:[.!?]\s+|\n)([^\W\d_a-z][^\n*.!?]{30,160})")
MAX_SENTENCES = 100
HELD_OUT_TOKENS = 20_000
"""Number of held-out tokens in which sentences are looked for."""
MIN_CHARACTERS = 30
"""Length of the shortest text that the page opens with."""
WORD = re.compile(r" [^\W\d_]{3,}")


def write_opening(model: GPT, tokenizer: Tokenizer, directory: Path) -> None:
    """Write opening.json into a run's model directory, or remove it if no text is suitable.

    The text is the beginning of a held-out sentence. The next token is the model's first choice,
    a whole word if possible; the score is its log probability plus the mean of those before.
    """
    (directory / OPENING).unlink(missing_ok=True)
    try:
        shards = Shards.in_directory(directory.parent / "data", "val")
        held_out = shards.read(0, min(len(shards), HELD_OUT_TOKENS))
    except (TiedGPTError, OSError):
        return  # the held-out data are no text
    text = tokenizer.decode(held_out.tolist()).replace(END_OF_TEXT, "\n")
    best, opening = (False, float("-inf")), None
    for sentence in SENTENCES.findall(text)[:MAX_SENTENCES]:
        ids = tokenizer.encode(sentence)[: model.config.n_positions]
        with eval_mode(model), torch.inference_mode():
            logits = model(torch.tensor([ids], device=model.wte.weight.device))[0, :-1].float()
        targets = torch.tensor(ids[1:], device=logits.device)
        logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].cpu()
        for at in (logits.argmax(-1) == targets).nonzero()[:, 0].tolist():
            text, token = tokenizer.decode(ids[: at + 1]), tokenizer.decode([ids[at + 1]])
            is_word = (
                bool(WORD.fullmatch(token)) and not sentence[len(text + token) :][:1].isalnum()
            )
            score = is_word, float(logprobs[at] + logprobs[: max(at, 1)].mean())
            is_long = len(text) >= MIN_CHARACTERS and tokenizer.encode(text) == ids[: at + 1]
            if is_long and score > best:
                best, opening = score, {"text": text, "next": token}
    if opening is not None:
        with replacing(directory / OPENING) as temporary:
            temporary.write_text(json.dumps(opening), encoding="utf-8")
