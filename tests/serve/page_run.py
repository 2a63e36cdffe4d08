"""A tiny run with everything that the page can show: tokens that look like HTML, counts, curves."""

import json

from tests.models import TEXT, opinionated
from tiedgpt import Tokenizer
from tiedgpt.data import ShardWriter

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "${alert(3)}",
    "\u202e",
)
"""Tokens whose texts must be shown, and do nothing."""


def make_run(path, n_positions=48):
    """Write a run's model, tokenizer, counts and curves; return the path."""
    tokenizer = Tokenizer.train([TEXT], 300).with_special_tokens(HOSTILE)
    opinionated(tokenizer, n_positions).save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    (path / "data").mkdir()
    with ShardWriter(path / "data", "train", vocab_size=len(tokenizer)) as writer:
        writer.write(tokenizer.encode_array(TEXT * 4))
    lines = []
    for step in range(1, 31):
        line = {"step": step, "tokens": 100 * step, "tokens_per_second": 1e3, "lr": 1e-3}
        line |= {"loss": 6 - step / 10, "grad_norm": 1.0}
        line |= {"grad_norm_w_input": 0.1, "grad_norm_w_output": 0.9}
        if step % 5 == 0:
            line |= {"val_loss": 5.5 - step / 10, "val_bits_per_byte": 2 - step / 50}
        lines.append(line)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
