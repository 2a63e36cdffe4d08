"""Train on Shakespeare by characters for given minutes, beside nanoGPT's recipe for a CPU.

    python bench/shakespeare.py FILE [--minutes 0.25 1 5 10] [--options --seed 1 ...]

The first nine tenths of the file are trained, the rest is validation text: nats per character of
all of it. Ours is `tiedgpt train` with its default options, each in a fresh process, from Enter to
the prompt. nanoGPT's recipe for a CPU is written in plain PyTorch with the model and the options of
its README: 4 layers of 128, context 64, 12 rows, 2,000 steps of AdamW, not compiled; its time
contains its nine evaluations.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from tiedgpt import GPTConfig
from train import NO_DROPOUT, PlainGPT

STEPS, WARMUP, ROWS, CONTEXT = 2000, 100, 12, 64
MOST, LEAST = 1e-3, 1e-4
EVERY, EVAL_BATCHES = 250, 20


def draw(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return random rows and their targets, (12, 64) each."""
    starts = torch.randint(len(ids) - CONTEXT, (ROWS,)).tolist()
    rows = torch.stack([ids[start : start + CONTEXT + 1] for start in starts])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@torch.no_grad()
def loss_on_all(model: PlainGPT, ids: Tensor) -> float:
    """Return the mean loss of all whole rows."""
    count = (len(ids) - 1) // CONTEXT
    inputs = ids[: count * CONTEXT].view(count, CONTEXT)
    targets = ids[1 : count * CONTEXT + 1].view(count, CONTEXT)
    parts = zip(inputs.split(200), targets.split(200), strict=True)
    return sum(float(model(*part)) * len(part[0]) for part in parts) / count


def nanogpt(train: str, valid: str) -> tuple[float, float]:
    """Return the seconds and the nats per character of nanoGPT's recipe."""
    began = time.perf_counter()
    torch.manual_seed(1337)
    codes = {character: code for code, character in enumerate(sorted(set(train + valid)))}
    known = torch.tensor([codes[character] for character in train])
    held_out = torch.tensor([codes[character] for character in valid])
    config = GPTConfig(
        n_layer=4, n_embd=128, n_head=4, n_positions=CONTEXT, vocab_size=len(codes), **NO_DROPOUT
    )
    model = PlainGPT(config, bias=False, gelu="none")
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            ends = name.endswith(("proj.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * config.n_layer) if ends else 1))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    rule = torch.optim.AdamW(groups, lr=MOST, betas=(0.9, 0.99))
    for step in range(STEPS + 1):
        share = (step - WARMUP) / (STEPS - WARMUP)
        cosine = LEAST + (MOST - LEAST) * (1 + math.cos(math.pi * share)) / 2
        for group in rule.param_groups:
            group["lr"] = MOST * (step + 1) / (WARMUP + 1) if step < WARMUP else cosine
        if step % EVERY == 0:
            with torch.no_grad():
                for part in (known, held_out):
                    sum(float(model(*draw(part))) for _ in range(EVAL_BATCHES))
        loss = model(*draw(known))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rule.step()
        rule.zero_grad(set_to_none=True)
        loss.item()
    return time.perf_counter() - began, loss_on_all(model, held_out)


def ours(folder: Path, minutes: float, options: list[str]) -> dict[str, object]:
    """Return what `tiedgpt train --minutes` reaches."""
    run = folder / f"run-{minutes}"
    command = [sys.executable, "-m", "tiedgpt", "train", str(folder / "train.txt")]
    command += ["--val", str(folder / "val.txt"), "--tokenizer", "char", "--out", str(run)]
    began = time.perf_counter()
    subprocess.run([*command, "--minutes", str(minutes), *options], check=True)
    seconds = time.perf_counter() - began
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    config = json.loads((run / "model" / "config.json").read_text())
    return {"seconds": seconds, "last": lines[-1], "config": config}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--minutes", type=float, nargs="*", default=[0.25, 1, 5, 10])
    parser.add_argument("--without-nanogpt", action="store_true")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="of tiedgpt train")
    args = parser.parse_args()
    text = args.file.read_text(encoding="utf-8")
    train, valid = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    print(platform.processor() or platform.machine(), torch.get_num_threads(), "threads")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.txt").write_text(train, encoding="utf-8")
        (folder / "val.txt").write_text(valid, encoding="utf-8")
        if not args.without_nanogpt:
            seconds, nats = nanogpt(train, valid)
            print(f"nanoGPT's recipe: {nats:.4f} nats in {seconds:.0f} s", flush=True)
        for minutes in args.minutes:
            print(f"{minutes} minutes: {ours(folder, minutes, args.options)}", flush=True)


if __name__ == "__main__":
    main()
