"""From options to a plan: what was not set is derived, and measured where the machine decides."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import torch
import torch.nn.functional as F

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.data import EncodedCorpus
from tiedgpt.errors import NoRoomError, UserError
from tiedgpt.text import Tokenizer
from tiedgpt.train.optim import optimizers, parameter_groups
from tiedgpt.train.options import DEFAULT_MINUTES, SIZES, TrainOptions
from tiedgpt.train.plan import DTYPES, Plan
from tiedgpt.train.step import train_step

MICRO_BATCH_TOKENS = 8192
EVALUATIONS = 10
FINAL_EVALUATION_TOKENS = 2_000_000


def training_device() -> torch.device:
    """Return the GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_plan(
    options: TrainOptions, config: GPTConfig, encoded: EncodedCorpus, device: torch.device
) -> Plan:
    """Derive what was not set, measuring where the machine decides.

    Raises `UserError` for text shorter than the context and `NoRoomError` for a model that cannot
    fit in memory, before anything is built.
    """
    size = SIZES[options.size]
    if encoded.train.tokens < config.n_positions + 1:
        raise UserError(
            f"the training text has {encoded.train.tokens:,} tokens and the context is "
            f"{config.n_positions}: use --context below {encoded.train.tokens} or more text"
        )
    if encoded.val.tokens < 2:
        raise UserError(
            f"the validation text has {encoded.val.tokens} tokens, too few to predict one: use "
            "more text, or give --val"
        )
    batch_size = options.batch_size or size.batch_size
    micro = options.micro_batch or max(1, MICRO_BATCH_TOKENS // config.n_positions)
    micro = min(micro, batch_size)
    require_memory(config, device, batch_size=batch_size, micro_batch=micro)
    dtype = faster_dtype(config, device) if options.dtype == "auto" else options.dtype
    draft = Plan(
        steps=options.steps or 1,
        batch_size=batch_size,
        micro_batch=micro,
        optimizer=options.optimizer,
        lr=options.lr or size.lr,
        warmup=0,
        weight_decay=options.weight_decay,
        grad_clip=options.grad_clip,
        dtype=dtype,
        seed=options.seed,
        eval_every=1,
        eval_batches=1,
        save_every=1,
    )
    steps = options.steps
    if steps is None:
        steps = measured_steps(options.minutes or DEFAULT_MINUTES, config, draft, encoded, device)
    eval_every = max(1, min(steps // EVALUATIONS, 1000))
    return replace(
        draft,
        steps=steps,
        warmup=round(options.warmup * steps),
        eval_every=eval_every,
        eval_batches=max(4, eval_every // 20),
        save_every=max(1, min(steps // 4, 1000)),
    )


def require_memory(
    config: GPTConfig, device: torch.device, *, batch_size: int = 1, micro_batch: int = 1
) -> None:
    """Raise `NoRoomError` where weights, gradients, moments or a batch can certainly not fit."""
    needed = 16 * config.parameter_count()
    room = _memory(device)
    ids = 4 * 8 * batch_size * config.n_positions
    states = 16 * micro_batch * config.n_positions * config.n_embd * config.n_layer
    if room is not None and needed <= room < needed + ids + states:
        raise NoRoomError(
            f"a batch of {batch_size:,} x {config.n_positions:,} tokens, {micro_batch:,} sequences "
            f"at a time, needs {(ids + states) / 1e9:,.1f} GB beside the weights' "
            f"{needed / 1e9:,.1f} GB, and {device} has {room / 1e9:,.1f} GB free: use a smaller "
            "--batch-size or --micro-batch"
        )
    if room is not None and needed > room:
        raise NoRoomError(
            f"{config.parameter_count():,} parameters need {needed / 1e9:,.1f} GB to train (weight,"
            f" gradient and two moments of 4 bytes each) and {device} has {room / 1e9:,.1f} GB free"
        )


def _memory(device: torch.device) -> int | None:
    """Return the free bytes of a device, or None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            known = dict(line.split(":") for line in file)
        return int(known["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def faster_dtype(config: GPTConfig, device: torch.device) -> str:
    """Return "bf16" where a product of the MLP's shape is faster in it than in fp32."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    seconds = {}
    for name, dtype in DTYPES.items():
        x = torch.randn(1024, config.n_embd, dtype=dtype, device=device)
        w = torch.randn(config.inner_dim, config.n_embd, dtype=dtype, device=device)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            F.linear(x, w)
            times.append(time.perf_counter() - began)
        seconds[name] = min(times)
    return "bf16" if seconds["bf16"] < 0.8 * seconds["fp32"] else "fp32"


def measured_steps(
    minutes: float, config: GPTConfig, plan: Plan, encoded: EncodedCorpus, device: torch.device
) -> int:
    """Turn minutes into steps by timing a few steps and an evaluation of a throw-away model."""
    model = GPT(config).to(device).train()
    groups = parameter_groups(model, matrices=plan.optimizer, weight_decay=plan.weight_decay)
    optimizers_ = optimizers(groups, lr=1e-5)
    ids = torch.randint(config.vocab_size, (plan.batch_size, config.n_positions)).numpy()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 4 and len(times) < 30):
        began = time.perf_counter()
        train_step(model, optimizers_, (ids, ids), plan)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    step = statistics.median(times[1:])
    # A forward is a third of a step; evaluations see a twentieth of it, the last all of the text.
    tokens = plan.batch_size * config.n_positions
    last = step / 3 * min(encoded.val.tokens, FINAL_EVALUATION_TOKENS) / tokens
    return max(1, int((minutes * 60 - last) / (step * (1 + 1 / 3 / 20))))


def tokenizer_config(options: TrainOptions, tokenizer: Tokenizer) -> GPTConfig:
    """Return the model's config for this vocabulary."""
    return options.model_config(
        vocab_size=len(tokenizer), bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id
    )
