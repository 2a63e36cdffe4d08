"""Measure training and generation on a GPU, ours and the peers' in turn; a JSON line for each.

    python bench/gpu.py [--size gpt2 gpt2-medium] [--minutes 8] [--only train generate run]

train: tokens per second, share of the card's peak and memory of nanoGPT's model (`nanogpt` of
`train.py`: no biases, V rounded up to 64s, AdamW), eager and compiled, and of our training step,
plain and compiled, with AdamW and Muon, in bf16. The speed is the median over rounds in which each
takes one step. generate: tokens per second of `Engine.generate` and of transformers' `generate`,
greedy, for 1, 8 and 64 sequences, and of reading a prompt of 900 tokens, in fp32 and bf16. run: a
training of 60 s on Python's documentation. Weights are random; nothing is downloaded. No step
begins after `--minutes`. Without a GPU, `--device cpu --size nano --quick` checks the script.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]

import torch  # noqa: E402

from tiedgpt import GPT, GPTConfig  # noqa: E402
from tiedgpt.runtime import find_device  # noqa: E402
from tiedgpt.train.plan.sizes import SIZES  # noqa: E402
from tiedgpt.train.step.measures import model_flops, peak_flops  # noqa: E402
from train import nanogpt  # noqa: E402

PROMPT, NEW_TOKENS, LONG_PROMPT = 64, 128, 900
BATCHES = (1, 8, 64)
Step = Callable[[torch.Tensor, torch.Tensor], None]


def ours(config: GPTConfig, device: torch.device, optimizer: str, compile: str, rows: int) -> Step:
    """Return our training step as `tiedgpt train` runs it, in bf16."""
    from tiedgpt.train.plan.values import Plan
    from tiedgpt.train.step.blocks import training_layers
    from tiedgpt.train.step.optim.groups import optimizers, parameter_groups
    from tiedgpt.train.step.step import train_step

    plan = Plan(
        steps=1, batch_size=rows, micro_batch=rows, optimizer=optimizer, lr=1e-4, warmup=0,
        weight_decay=0.1, grad_clip=1.0, dtype="bf16", seed=0, eval_every=1, eval_batches=1,
        save_every=1, compile=compile,
    )  # fmt: skip
    model = GPT(config).to(device).train()
    groups = parameter_groups(model, matrices=optimizer, weight_decay=0.1)
    updates = optimizers(groups, lr=1e-4)

    def step(ids: torch.Tensor, targets: torch.Tensor) -> None:
        with training_layers(model, plan):
            train_step(model, updates, (ids.numpy(), targets.numpy()), plan)

    return step


def peer(config: GPTConfig, device: torch.device, compiled: bool) -> Step:
    """Return the step of nanoGPT's model, whose batches come from the CPU as ours do."""
    step = nanogpt(config, str(device), compiled, "bf16")
    return lambda ids, targets: step(ids.to(device), targets.to(device))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(act: Callable[[], Any], device: torch.device) -> float:
    wait(device)
    began = time.perf_counter()
    act()
    wait(device)
    return time.perf_counter() - began


def measure_training(size: str, device: torch.device, args: argparse.Namespace) -> None:
    record = SIZES[size]
    config = GPTConfig(
        n_layer=record.n_layer, n_embd=record.n_embd, n_head=record.n_head,
        n_positions=record.n_positions, vocab_size=record.vocab_size, embd_pdrop=0.0,
        attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    rows, rounds = (2, 1) if args.quick else (16, 8)
    ways: dict[str, Callable[[], Step]] = {
        "nanogpt": lambda: peer(config, device, False),
        "nanogpt compiled": lambda: peer(config, device, True),
        **{
            f"ours {optimizer}{' compiled' * (compile == 'on')}": (
                lambda optimizer=optimizer, compile=compile: ours(
                    config, device, optimizer, compile, rows
                )
            )
            for optimizer in ("adamw", "muon")
            for compile in ("off", "on")
        },
    }
    batches = [torch.randint(config.vocab_size, (rows, config.n_positions + 1)) for _ in range(4)]
    data = [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in batches]
    steps, facts = dict[str, Step](), dict[str, dict[str, Any]]()
    for name, make in ways.items():
        if args.is_over():
            break
        try:
            steps[name] = make()
            first = seconds_of(lambda name=name: steps[name](*data[0]), device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
            seconds_of(lambda name=name: steps[name](*data[1]), device)
            peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
            facts[name] = {"first step, s": round(first, 1), "GB of a step": (peak - before) / 1e9}
        except Exception as error:
            steps.pop(name, None)
            args.write({"failed": f"train {size} {name}", "error": f"{error!r}"[:400]})
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name, step in steps.items():
            batch = data[number % len(data)]
            seconds[name].append(seconds_of(lambda step=step, batch=batch: step(*batch), device))
    operations = model_flops(GPT(config), config.n_positions) * rows * config.n_positions
    peak = peak_flops(device, "bf16") if device.type == "cuda" else None
    for name, times in seconds.items():
        step_seconds = statistics.median(times)
        line = {
            "train": name,
            "size": size,
            "batch": f"{rows} x {config.n_positions}",
            "tokens/s": round(rows * config.n_positions / step_seconds),
            "share of the peak": peak and round(operations / step_seconds / peak, 3),
        }
        args.write(line | facts[name])


def ours_generating(path: Path, precision: str, slots: int, args: argparse.Namespace) -> Any:
    from dataclasses import replace

    from tiedgpt.infer import Engine

    engine = Engine(path, precision, slots=slots, backend="torch", device=args.device)
    model = engine.runner.model
    model.config = replace(model.config, eos_token_id=None)
    return lambda prompts, n: engine.generate(prompts, max_new_tokens=n, temperature=0)


def transformers_generating(path: Path, precision: str, device: torch.device) -> Any:
    from transformers import GPT2LMHeadModel

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model = GPT2LMHeadModel.from_pretrained(path).to(device, dtype).eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], n: int) -> None:
        ids = torch.tensor(prompts, device=device)
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip

    return generate


def measure_generation(size: str, device: torch.device, args: argparse.Namespace) -> None:
    record = SIZES[size]
    torch.manual_seed(0)
    config = GPTConfig(
        n_layer=record.n_layer, n_embd=record.n_embd, n_head=record.n_head,
        n_positions=max(1024, record.n_positions), vocab_size=record.vocab_size,
    )  # fmt: skip
    new, rounds = (4, 1) if args.quick else (NEW_TOKENS, 3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        GPT(config).save_pretrained(path)
        for precision in ("fp32", "bf16"):
            try:
                ways = {
                    "ours": ours_generating(path, precision, max(BATCHES), args),
                    "transformers": transformers_generating(path, precision, device),
                }
            except Exception as error:
                args.write({"failed": f"generate {precision}", "error": f"{error!r}"[:400]})
                continue
            work = {f"{n} x {PROMPT} + {new}": (n, PROMPT, new) for n in BATCHES}
            work |= {f"prompt of {LONG_PROMPT}": (1, LONG_PROMPT, 1)}
            for what, (n, length, n_new) in work.items():
                if args.is_over():
                    return
                rates: dict[str, list[float]] = {name: [] for name in ways}
                for number in range(rounds + 1):
                    prompts = [
                        [(31 * row + 7919 * at + 101 * number + 1) % config.vocab_size
                         for at in range(length)] for row in range(n)
                    ]  # fmt: skip
                    for name, generate in ways.items():
                        taken = seconds_of(
                            lambda act=generate, p=prompts, n=n_new: act(p, n), device
                        )
                        if number:
                            tokens = n * n_new if n_new > 1 else length
                            rates[name].append(tokens / taken)
                speeds = {
                    name: round(statistics.median(values), 1) for name, values in rates.items()
                }
                args.write({"generate": what, "size": size, "precision": precision, **speeds})


def measure_run(device: torch.device, args: argparse.Namespace) -> None:
    """Train by the command line's defaults on Python's documentation."""
    from tiedgpt.train import TrainOptions, train
    from tiedgpt.train.events import Ended, Planned

    minutes = 0.1 if args.quick else 1.0
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        for event in train(TrainOptions(minutes=minutes, device=str(device)), Path(folder) / "run"):
            if isinstance(event, Planned):
                plan, parameters = event.plan, event.objective.config.parameter_count()
            if isinstance(event, Ended):
                ended = event
    line = {"run": f"{minutes:g} minutes", "parameters": parameters, "size": plan.size}
    line |= {"steps": ended.step, "batch": plan.batch_size, "compile": plan.compile}
    line |= {"seconds": round(time.perf_counter() - began, 1)}
    args.write(line | {name: ended.metrics[name] for name in ("val_loss", "val_bits_per_byte")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["gpt2", "gpt2-medium"])
    parser.add_argument("--only", nargs="+", default=["train", "generate", "run"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, help="also append the lines to this file")
    parser.add_argument("--quick", action="store_true", help="one short round")
    args = parser.parse_args()
    device = find_device(args.device)
    args.device, began = str(device), time.perf_counter()
    args.is_over = lambda: time.perf_counter() - began > 60 * args.minutes
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    facts = {"date": time.strftime("%Y-%m-%d"), "card": card, "torch": torch.__version__}

    def write(line: dict[str, Any]) -> None:
        text = json.dumps(facts | line)
        print(text, flush=True)
        if args.out is not None:
            with args.out.open("a") as file:
                print(text, file=file)

    args.write = write
    torch.set_float32_matmul_precision("highest")
    measures: list[Callable[[], None]] = []
    measures += [lambda: measure_training(args.size[0], device, args)] * ("train" in args.only)
    measures += [lambda: measure_generation(args.size[0], device, args)] * ("generate" in args.only)
    measures += [lambda: measure_run(device, args)] * ("run" in args.only)
    for size in args.size[1:]:
        measures += [lambda size=size: measure_training(size, device, args)] * (
            "train" in args.only
        )
    for measure in measures:
        if args.is_over():
            break
        try:
            measure()
        except Exception as error:
            write({"failed": repr(error)[:400]})
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
