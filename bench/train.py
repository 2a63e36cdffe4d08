"""Time training steps: ours, transformers' GPT-2 and plain PyTorch GPTs, in turn.

    python bench/train.py [--size tiny little mini] [--dtype fp32] [--rounds 15] [--compile]
    python bench/train.py --size gpt2 --batch 4 --context 512 --dtype bf16 --compile
                          [--ways "ours" "nanogpt compiled" ...]

"recipe" is the default step of `tiedgpt train`: Muon, and the dtype that suits the CPU. "ours" and
the peers use AdamW (fused) in `--dtype`. No dropout, gradients clipped at 1; a step is forward,
backward and update. Sizes are those of `tiedgpt train`, with their batch and context, or published
shapes. Speed: the median of the ratios over rounds in which each takes one step. Memory: the peak
of three steps in a fresh process, with the model. `--compile` adds each under torch.compile, with
the seconds of the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiedgpt import GPT, GPTConfig
from tiedgpt.train.plan.sizes import SIZES

Step = Callable[[Tensor, Tensor], None]
NO_DROPOUT = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}


def shape(args: argparse.Namespace, name: str) -> tuple[GPTConfig, int]:
    """Return the config of a size, and the rows of its batch."""
    size = SIZES[name]
    n_positions = args.context or size.n_positions
    config = GPTConfig(
        n_layer=size.n_layer, n_embd=size.n_embd, n_head=size.n_head, n_positions=n_positions,
        vocab_size=size.vocab_size, **NO_DROPOUT,
    )  # fmt: skip
    return config, args.batch or size.batch_size


class PlainBlock(nn.Module):
    """A pre-norm block."""

    def __init__(self, config: GPTConfig, bias: bool, gelu: str) -> None:
        super().__init__()
        width = config.n_embd
        self.n_head, self.gelu = config.n_head, gelu
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.ln_1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.n_head, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate=self.gelu))


class PlainGPT(nn.Module):
    """A minimal GPT: logits, then cross-entropy on all of them."""

    def __init__(self, config: GPTConfig, bias: bool = True, gelu: str = "tanh") -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(PlainBlock(config, bias, gelu) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=bias)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """(B, T) twice -> ()."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def stepper(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], device: str, dtype: str
) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(ids: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bf16"):
            value = loss(ids, targets)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def recipe(config: GPTConfig, device: str, compiled: bool, dtype: str) -> Step:
    """Our own training step, as `tiedgpt train` runs it."""
    from tiedgpt.train.machine import choose_dtype

    return ours(config, device, compiled, choose_dtype(torch.device(device)), "muon")


def ours(
    config: GPTConfig, device: str, compiled: bool, dtype: str, optimizer: str = "adamw"
) -> Step:
    """Our own training step, as `tiedgpt train --optimizer adamw` runs it."""
    from tiedgpt.train import fast_training
    from tiedgpt.train.plan.values import Plan
    from tiedgpt.train.step.optim.groups import optimizers, parameter_groups
    from tiedgpt.train.step.step import train_step

    model = GPT(config).to(device).train()
    if compiled:
        for block in model.h:
            block.compile()
    rules = optimizers(parameter_groups(model, matrices=optimizer, weight_decay=0.1), lr=1e-4)
    plan = Plan(
        steps=1, batch_size=1 << 20, micro_batch=1 << 20, optimizer=optimizer, lr=1e-4, warmup=0,
        weight_decay=0.1, grad_clip=1.0, dtype=dtype, seed=0, eval_every=1, eval_batches=1,
        save_every=1,
    )  # fmt: skip

    def step(ids: Tensor, targets: Tensor) -> None:
        with fast_training(model):
            train_step(model, rules, (ids.cpu().numpy(), targets.cpu().numpy()), plan)

    return step


def transformers(config: GPTConfig, device: str, compiled: bool, dtype: str) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    names = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", *NO_DROPOUT)
    model = GPT2LMHeadModel(GPT2Config(**{name: getattr(config, name) for name in names}))
    model = model.to(device).train()
    call = torch.compile(model) if compiled else model

    def loss(ids: Tensor, targets: Tensor) -> Tensor:
        return call(input_ids=ids, labels=ids, shift_labels=targets, use_cache=False).loss

    return stepper(model, loss, device, dtype)


def plain(config: GPTConfig, device: str, compiled: bool, dtype: str) -> Step:
    model = PlainGPT(config).to(device).train()
    return stepper(model, torch.compile(model) if compiled else model, device, dtype)


def nanogpt(config: GPTConfig, device: str, compiled: bool, dtype: str) -> Step:
    """Train a plain GPT as nanoGPT builds it: no biases, GELU by erf, V rounded up to 64s."""
    padded = replace(config, vocab_size=config.vocab_size + -config.vocab_size % 64)
    model = PlainGPT(padded, bias=False, gelu="none").to(device).train()
    return stepper(model, torch.compile(model) if compiled else model, device, dtype)


WAYS = {
    "recipe": recipe,
    "ours": ours,
    "transformers": transformers,
    "plain": plain,
    "nanogpt": nanogpt,
}


def batch(config: GPTConfig, size: int, device: str) -> tuple[Tensor, Tensor]:
    ids = torch.randint(config.vocab_size, (size, config.n_positions + 1))
    return ids[:, :-1].contiguous().to(device), ids[:, 1:].contiguous().to(device)


def once(step: Step, data: tuple[Tensor, Tensor]) -> float:
    began = time.perf_counter()
    step(*data)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def peak_megabytes(way: str, arguments: list[str]) -> float:
    command = [sys.executable, __file__, "--alone", way, *arguments]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(out.split()[-1])


def alone(way: str, args: argparse.Namespace, device: str) -> None:
    config, rows = shape(args, args.size[0])
    name, _, compiled = way.partition(" ")
    lines = Path("/proc/self/status").read_text().splitlines()
    before = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    step = WAYS[name](config, device, bool(compiled), args.dtype)
    data = batch(config, rows, device)
    for _ in range(3):
        step(*data)
    lines = Path("/proc/self/status").read_text().splitlines()
    print((next(int(x.split()[1]) for x in lines if x.startswith("VmHWM:")) - before) / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["tiny", "little", "mini"])
    parser.add_argument("--batch", type=int)
    parser.add_argument("--context", type=int)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="the compiled forms, too")
    parser.add_argument("--ways", nargs="+", help="these alone, for example 'nanogpt compiled'")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.alone:
        alone(args.alone, args, device)
        return
    for size in args.size:
        measure(args, size, device)


def measure(args: argparse.Namespace, size: str, device: str) -> None:
    config, rows = shape(args, size)
    names = args.ways or [*WAYS, *(f"{way} compiled" for way in WAYS if args.compile)]
    data = batch(config, rows, device)
    steps, first = {}, {}
    for name in names:
        torch.manual_seed(0)
        way, _, compiled = name.partition(" ")
        steps[name] = WAYS[way](config, device, bool(compiled), args.dtype)
        first[name] = round(once(steps[name], data), 1)
        once(steps[name], data)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:
            seconds[name].append(once(steps[name], data))
    tokens = data[0].numel()
    ratios = {
        name: round(statistics.median(
            b / a for a, b in zip(seconds["ours"], seconds[name], strict=True)), 2)
        for name in names
    }  # fmt: skip
    steps.clear()
    asked = ["--size", size, "--batch", str(rows), "--context", str(config.n_positions)]
    asked += ["--dtype", args.dtype]
    memory = {} if args.no_memory else {n: round(peak_megabytes(n, asked)) for n in names}
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {device}",
        "torch": torch.__version__,
        "model": f"{size}, {config.parameter_count():,} parameters, "
        f"{rows} x {config.n_positions} tokens, {args.dtype}",
        "tokens/s": {n: round(tokens / statistics.median(t)) for n, t in seconds.items()},
        "ours is faster by (median of ratios)": ratios,
        "first step, s": first,
        "peak MB, models included": memory,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
