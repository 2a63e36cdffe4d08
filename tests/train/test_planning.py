"""Plans as a table: (options, facts, machine) -> plan."""

import dataclasses
import math
import re

import pytest

from tests.train.conftest import PLAN
from tiedgpt import GPTConfig
from tiedgpt.errors import CorruptInputError, NoRoomError, UserError
from tiedgpt.train.plan.groups import parse_bytes
from tiedgpt.train.plan.memory import describe_memory, estimate_memory, halve_micro_batch
from tiedgpt.train.plan.options import TrainOptions, TuneOptions
from tiedgpt.train.plan.plan import find_warnings, plan_run
from tiedgpt.train.plan.size import (
    MAX_AUTO_EPOCHS,
    choose_context,
    choose_vocabulary_size,
    effective_tokens,
    expected_loss,
)
from tiedgpt.train.plan.time import PaceChecks, count_final_rows, count_steps, replan
from tiedgpt.train.plan.values import Facts, Machine
from tiedgpt.train.step.optim import scale_lr_to_width

SPEEDS = {
    "nano": 45_000, "tiny": 25_000, "little": 16_500, "slim": 8_500, "mini": 5_100, "small": 1_300
}  # fmt: skip
"""Tokens per second of two cores, as measured."""
MB = 1_000_000
SMALL = GPTConfig(vocab_size=4096, n_positions=256, n_embd=384, n_layer=6, n_head=6)
GPT2 = GPTConfig.preset("gpt2", embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
N = 124_439_808


def machine(speed=1.0, **changes):
    """Return a machine that trains each size at its speed in `SPEEDS`, times a factor."""

    def tokens_per_second(config, plan):
        return speed * SPEEDS.get(plan.size, 400)

    return Machine(tokens_per_second=tokens_per_second, **changes)


def text(tokens, context=128):
    """Return the facts of a text of so many tokens."""
    rows = max(1, -(-(tokens - 1) // context))
    return Facts(
        unit="tokens", row_units=context, row_tokens=context, epoch_rows=rows,
        held_out_rows=rows / 10, text_tokens=tokens, text_bytes=4 * tokens,
    )  # fmt: skip


def config_of(options, vocab_size=1024):
    return options.model_config(vocab_size=vocab_size, bos=None, eos=None)


def plan(options=None, *, tokens=600_000, on=None, config=None, facts=None, spent=0.0, **asked):
    """Return the config and the plan of options for a text on a machine."""
    options = options or TrainOptions(**asked)
    config = config or config_of(options)
    facts = facts or text(tokens, config.n_positions)
    return plan_run(options, config, facts, on or machine(), seconds_spent=spent)


def h100(compile_seconds=30.0, free_bytes=79e9, **changes):
    """Return an H100 by arithmetic: 6 N + 12 L D T operations a token, at a share of the peak.

    The share grows with the width to 0.3 of 989 TFLOP/s at 768; compiled blocks have 1.5 times it.
    """

    def tokens_per_second(config, plan):
        attention = 12 * config.n_layer * config.n_embd * config.n_positions
        share = 0.3 * min(1.0, config.n_embd / 768) ** 1.5 * (1.5 if plan.compile == "on" else 1.0)
        return 989e12 * share / (6 * config.parameter_count() + attention)

    return Machine(
        tokens_per_second=tokens_per_second, device="cuda:0", dtype="bf16", free_bytes=free_bytes,
        compile_seconds=lambda: compile_seconds, **changes,
    )  # fmt: skip


GPU_PLANS = {
    "a minute on the documentation": (
        {"minutes": 1.0}, 641_000, {"size": "mini", "compile": "off", "minutes": None},
    ),
    "an hour on a thousand million tokens": (
        {"minutes": 60.0}, 10**9,
        {"size": "gpt2", "batch_size": 512, "micro_batch": 64, "lr": 6e-4, "compile": "on"},
    ),
    "ten days on a million million": (
        {"minutes": 14400.0}, 10**12,
        {"size": "gpt2-medium", "batch_size": 512, "lr": 3e-4, "compile": "on"},
    ),
    "a named size": (
        {"minutes": 60.0, "size": "gpt2"}, 10**9,
        {"batch_size": 512, "micro_batch": 64, "compile": "on"},
    ),
    "5 minutes": ({"minutes": 5.0, "size": "gpt2"}, 10**9, {"batch_size": 128, "micro_batch": 64}),
    "3 steps": ({"steps": 3, "size": "gpt2"}, 10**9, {"batch_size": 512, "compile": "off"}),
    "1,000 steps": ({"steps": 1000, "size": "gpt2"}, 10**9, {"batch_size": 512, "compile": "on"}),
    "an epoch": ({"epochs": 1.0, "size": "gpt2"}, 10**9, {"batch_size": 512, "steps": 1908}),
    "a batch that is given": (
        {"minutes": 60.0, "size": "gpt2", "batch_size": 24}, 10**9,
        {"batch_size": 24, "micro_batch": 24},
    ),
}  # fmt: skip
"""Options, tokens of the text, and fields of the plan on an H100."""


@pytest.mark.parametrize("case", GPU_PLANS)
def test_a_plan_on_a_gpu_follows_time_text_and_size(case):
    options, tokens, expected = GPU_PLANS[case]
    _, planned = plan(tokens=tokens, on=h100(), **options)
    assert {name: getattr(planned, name) for name in expected} == expected
    assert planned.dtype == "bf16"


RECIPES = {
    "nano": (1 << 11, 1.6e-2), "tiny": (1 << 11, 1.2e-2), "little": (1 << 11, 1e-2),
    "slim": (1 << 10, 3.5e-3), "mini": (1 << 10, 3e-3), "small": (1 << 12, 2e-3),
    "medium": (1 << 13, 1e-3),
    "gpt1": (1 << 15, 2.5e-4), "gpt2": (1 << 19, 6e-4), "gpt2-medium": (1 << 19, 3e-4),
    "gpt2-large": (1 << 19, 2.5e-4), "gpt2-xl": (1 << 20, 2e-4), "gpt3-small": (1 << 19, 6e-4),
    "gpt3-medium": (1 << 19, 3e-4), "gpt3-large": (1 << 19, 2.5e-4), "gpt3-xl": (1 << 20, 2e-4),
    "gpt3-2.7b": (1 << 20, 1.6e-4), "gpt3-6.7b": (1 << 21, 1.2e-4), "gpt3-13b": (1 << 21, 1e-4),
    "gpt3-175b": (1 << 21, 0.6e-4),  # 3.2 million tokens, rounded down to a power of two
}  # fmt: skip
"""Tokens of a batch and peak rate: ours, and those of Brown et al. 2020, table 2.1."""


@pytest.mark.parametrize("size", RECIPES)
def test_a_named_size_has_its_published_recipe_on_a_gpu(size):
    config, planned = plan(steps=3, size=size, tokens=10**9, on=h100(free_bytes=math.inf))
    assert (planned.batch_size * config.n_positions, planned.lr) == RECIPES[size]
    assert planned.weight_decay == (0.3 if size in ("nano", "tiny", "little", "slim") else 0.1)


@pytest.mark.parametrize(("size", "dropout"), [("auto", 0.0), ("gpt2", 0.1)])
def test_a_published_size_that_is_chosen_has_no_dropout(size, dropout):
    config, planned = plan(minutes=60.0, size=size, tokens=10**9, on=h100())
    assert planned.size == "gpt2" and config.resid_pdrop == dropout


def test_a_published_size_on_a_cpu_keeps_its_batch():
    for device in ("cpu", "mps"):
        _, planned = plan(minutes=60.0, size="gpt2", on=machine(device=device))
        assert (planned.batch_size, planned.micro_batch) == (16, 8)


@pytest.mark.parametrize(("free", "micro_batch"), [(79e9, 64), (22e9, 32), (12e9, 16), (5e9, 8)])
def test_micro_batches_fill_the_memory_of_a_gpu(free, micro_batch):
    _, planned = plan(steps=9, size="gpt2", dropout=0.0, on=h100(free_bytes=free), tokens=10**9)
    assert planned.micro_batch == micro_batch


@pytest.mark.parametrize(
    ("minutes", "seconds", "compiles"),
    [(3.0, 30.0, "on"), (1.0, 30.0, "off"), (3.0, 100.0, "off"), (60.0, 100.0, "on")],
)
def test_blocks_are_compiled_if_it_saves_more_than_it_takes(minutes, seconds, compiles):
    _, planned = plan(minutes=minutes, size="medium", on=h100(seconds), tokens=10**9)
    assert planned.compile == compiles


def test_compiling_is_counted_in_the_minutes():
    (_, without), (_, counted) = (
        plan(minutes=10.0, size="gpt2", batch_size=64, compile="on", tokens=10**9, on=h100(seconds))
        for seconds in (0.0, 60.0)
    )
    assert counted.steps == pytest.approx(0.9 * without.steps, rel=0.01)


def test_sizes_are_compared_without_compiling_and_one_is_compiled():
    measured, tokens_per_second = [], h100().tokens_per_second

    def watched(config, draft):
        measured.append((draft.size, draft.compile))
        return tokens_per_second(config, draft)

    on = dataclasses.replace(h100(), tokens_per_second=watched)
    for compile in ("auto", "on"):
        measured.clear()
        _, planned = plan(minutes=60.0, tokens=10**9, on=on, compile=compile)
        *compared, last = measured
        assert last == (planned.size, "on") and {how for _, how in compared} == {"off"}


# Size


@pytest.mark.parametrize(
    ("minutes", "speed", "tokens", "size"),
    [
        (0.05, 1.0, 641_000, "nano"),
        (1.0, 1.0, 641_000, "tiny"),
        (3.0, 2.3, 641_000, "little"),
        (10.0, 1.5, 1_003_854, "slim"),  # Tiny Shakespeare by characters
        (120.0, 2.3, 50_000_000, "slim"),
        (300.0, 2.3, 50_000_000, "mini"),
        (3.0, 1.0, 20_000, "nano"),
        (3.0, 1.0, 50, "nano"),
        (0.6, 1.0, 600_000, "tiny"),
        (0.6, 0.02, 600_000, "nano"),
        (0.6, 0.0001, 600_000, "nano"),
    ],
)
def test_more_time_text_and_speed_choose_a_larger_model(minutes, speed, tokens, size):
    _, chosen = plan(minutes=minutes, tokens=tokens, on=machine(speed))
    assert chosen.size == size and chosen.reason.startswith(f"{size} has the lowest expected loss")


def test_a_size_with_fewer_than_50_steps_is_not_chosen():
    def tokens_per_second(config, draft):
        return {"nano": 1000, "tiny": 100}[draft.size]

    _, chosen = plan(minutes=0.6, on=Machine(tokens_per_second=tokens_per_second))
    assert chosen.size == "nano" and chosen.steps >= 50
    even = Machine(tokens_per_second=lambda _, draft: 320 * (draft.size in ("nano", "tiny")) or 1)
    assert plan(minutes=1.0, batch_size=3, context=128, on=even)[1].size == "tiny"  # 50 steps
    asked = {"size": "tiny"}
    assert plan(minutes=0.6, on=Machine(tokens_per_second=tokens_per_second), **asked)[1].steps < 50


@pytest.mark.parametrize(
    ("minutes", "speed", "sizes"),
    [
        (0.25, 1.0, {"nano", "tiny"}),
        (3.0, 1.0, {"tiny", "little"}),
        (0.6, 4e-4, {"nano", "tiny"}),  # too few steps even of the first, tiny
    ],
)
def test_a_larger_size_is_measured_only_if_it_can_win(minutes, speed, sizes):
    measured, tokens_per_second = [], machine(speed).tokens_per_second

    def watched(config, draft):
        measured.append(draft.size)
        return tokens_per_second(config, draft)

    plan(minutes=minutes, on=Machine(tokens_per_second=watched))
    assert measured[0] == "tiny" and {*measured} == sizes


def test_given_epochs_are_trained():
    config, chosen = plan(epochs=2.0, tokens=20_000)
    rows = text(20_000, config.n_positions).epoch_rows
    assert chosen.steps * chosen.batch_size == pytest.approx(2 * rows, abs=chosen.batch_size)
    assert chosen.minutes is None and chosen.reason


@pytest.mark.parametrize(
    ("minutes", "tokens", "dropout", "batch_size"),
    [(1, 200_000, 0.0, 16), (6, 600_000, 0.1, 16), (10, 10**6, 0.0, 16), (0.1, 600_000, 0.0, 7)],
)
def test_many_epochs_bring_dropout_and_short_runs_small_batches(
    minutes, tokens, dropout, batch_size
):
    config, chosen = plan(minutes=minutes, tokens=tokens)
    assert (config.resid_pdrop, chosen.batch_size) == (dropout, batch_size)


def test_a_size_that_does_not_fit_in_memory_is_not_chosen():
    _, free = plan(minutes=120.0, tokens=50_000_000, on=machine(2.3))
    _, tight = plan(minutes=120.0, tokens=50_000_000, on=machine(2.3, free_bytes=10 * MB))
    assert (free.size, tight.size) == ("slim", "nano")


def test_preparation_counts_in_the_size_and_half_of_the_time_is_training():
    whole, late, too_late = (
        plan(minutes=1.0, size="tiny", spent=spent)[1].steps for spent in (0.0, 20.0, 300.0)
    )
    assert late == pytest.approx(whole * 2 / 3, rel=0.1)
    assert too_late == pytest.approx(whole / 2, rel=0.1)


def test_given_options_are_not_changed():
    asked = {"context": 32, "batch_size": 3, "dropout": 0.3, "lr": 0.5, "weight_decay": 0.7}
    config, chosen = plan(minutes=3.0, **asked)
    assert (chosen.batch_size, chosen.lr, chosen.weight_decay) == (3, 0.5, 0.7)
    assert (config.n_positions, config.resid_pdrop) == (32, 0.3)
    assert plan(size="tiny", steps=9, keep="last")[1].keep == "last"
    scores = [
        plan(size="tiny", steps=steps, score=score, tokens=614_400)[1].final_batches
        for score, steps in (("auto", 9), ("all", 9), ("auto", 480), ("auto", 490))
    ]
    assert scores == [4, None, 29, None]  # of 30 batches
    assert not TrainOptions(size="tiny").chooses and not TrainOptions(steps=5).chooses


def test_a_small_text_ends_after_16_epochs_and_says_so():
    config, chosen = plan(minutes=3.0, tokens=20_000)
    assert "20,000 tokens are too little text for 3 minutes" in chosen.reason
    assert "16 epochs" in chosen.reason and not re.search(r"\d s\b|tokens/s", chosen.reason)
    rows = text(20_000, config.n_positions).epoch_rows
    trained = chosen.steps * chosen.batch_size
    assert trained == pytest.approx(MAX_AUTO_EPOCHS * rows, abs=chosen.batch_size)
    assert chosen.minutes is None and chosen.steps >= 100


def test_a_text_of_a_few_bytes_is_refused():
    with pytest.raises(UserError, match="5 bytes, too few"):
        plan(minutes=1.0, facts=dataclasses.replace(text(2), text_bytes=5))


def test_effective_tokens_grow_more_slowly_with_every_epoch():
    assert effective_tokens(500, 1000) == 500 and effective_tokens(1000, 1000) == 1000
    gains = [effective_tokens(n * 1000, 1000) - effective_tokens(n * 1000 - 1000, 1000)
             for n in (2, 4, 16)]  # fmt: skip
    assert 1000 > gains[0] > gains[1] > gains[2] > 0
    assert expected_loss("tiny", 1e6, 10**6) > expected_loss("tiny", 2e6, 2 * 10**6)


def test_vocabulary_and_context_depend_on_the_text():
    sizes = [choose_vocabulary_size(n) for n in (30, 30_000, 300_000, 1_100_000, 2_400_000, 10**9)]
    assert sizes == [384, 384, 384, 1024, 2048, 8192]
    contexts = [choose_context("tiny", n) for n in (5, 25, 500, 3_000, 10**6)]
    assert contexts == [4, 8, 16, 128, 128]


@pytest.mark.parametrize(
    ("asked", "tokens", "warning"),
    [
        ({"steps": 200, "size": "tiny", "batch_size": 16}, 3_000, "a batch holds 67% of the train"),
        ({"steps": 200, "size": "nano"}, 20_000, None),  # the size's own batch holds 10 %
        ({"steps": 200}, 20_000, "parameters per token .* it: give a smaller --size, or more text"),
        ({"steps": 200, "start": "runs/a"}, 20_000, None),  # its size was chosen before
        ({"steps": 200, "start": "runs/a", "batch_size": 16}, 160 * 128, None),
        ({"steps": 200, "start": "runs/a", "batch_size": 16}, 159 * 128, "a batch holds 10% of"),
        ({"steps": 200, "size": "nano"}, 173_824 // 24, "parameters per token"),
        ({"steps": 200, "size": "nano"}, 173_824 // 24 + 1, None),
        ({"size": "tiny", "steps": 100}, 100_000_000, None),
        ({"size": "tiny", "steps": 99}, 100_000_000, "^99 steps only: .* more --minutes, --steps"),
        ({"size": "tiny", "epochs": 1.0}, 100_000, "^49 steps only"),
        ({"size": "gpt2", "steps": 100}, 600_000, "parameters per token .* smaller --size"),
        ({"size": "gpt2", "steps": 1000, "batch_size": 1}, 6_000_000, None),  # 0.2 epochs
        ({"minutes": 1.0}, 600_000, None),
    ],
)
def test_batches_and_models_too_large_for_the_data_have_a_warning(asked, tokens, warning):
    options = TrainOptions(**asked)
    config, planned = plan(options, tokens=tokens)
    facts = text(tokens, config.n_positions)
    warnings = find_warnings(options, config, facts, machine(), planned)
    assert any(re.search(warning, line) for line in warnings) if warning else not warnings


@pytest.mark.parametrize(("changes", "is_warned"), [({}, False), ({"steps": 40}, True)])
def test_few_steps_have_a_warning_only_on_request(changes, is_warned):
    options = TuneOptions(data=("x.jsonl",), start="gpt2", **changes)
    facts = dataclasses.replace(text(3_000), unit="examples", n_examples=2, epoch_rows=2)
    config, planned = plan(options, facts=facts, config=SMALL)
    assert planned.steps < 100
    warnings = find_warnings(options, config, facts, machine(), planned)
    assert any("steps only" in line for line in warnings) == is_warned


@pytest.mark.parametrize(
    ("requested", "device", "unit", "missing", "compiles"),
    [
        ("auto", "cpu", "tokens", None, "off"),
        ("auto", "cuda:0", "tokens", None, "on"),
        ("auto", "cuda:0", "examples", None, "off"),
        ("auto", "cuda:0", "tokens", "no C++ compiler", "off"),
        ("on", "cpu", "tokens", None, "on"),
        ("on", "cpu", "tokens", "no C++ compiler", "off"),
        ("off", "cuda:0", "tokens", None, "off"),
    ],
)
def test_blocks_are_compiled_on_request_and_on_gpus(requested, device, unit, missing, compiles):
    options = TrainOptions(size="tiny", steps=200, compile=requested)
    on = machine(device=device, missing_compiler=missing)
    facts = dataclasses.replace(text(10**7), unit=unit)
    config, planned = plan(options, facts=facts, on=on)
    assert planned.compile == compiles
    warnings = find_warnings(options, config, facts, on, planned)
    expected = [f"--compile {requested}: {missing}; blocks are not compiled"]
    assert warnings == (expected if missing else [])


# Memory


def total(config, rows, micro_batch=None, *, on=None, n_trained=None, **more):
    sizes = {"batch_size": rows, "micro_batch": micro_batch or rows, "optimizer": "adamw"}
    made = dataclasses.replace(PLAN, **sizes | more)
    facts = dataclasses.replace(text(10**6, config.n_positions), n_trained=n_trained)
    return estimate_memory(config, made, facts, on or machine())


def test_weights_gradients_and_moments_take_sixteen_bytes_a_parameter_and_shards_divide_them():
    static = "weights", "gradients", "optimizer state"
    assert [total(GPT2, 8)[part] for part in static] == [4 * N, 4 * N, 8 * N]
    ddp, fsdp = machine(n_processes=8), machine(n_processes=8, n_shards=8)
    sharded, w, block = total(GPT2, 8, on=fsdp), 50257 * 768, 12 * 768**2
    assert [sharded[part] for part in static] == [4 * N // 8, 4 * N // 8, N]
    assert sharded["gathered weights"] == 4 * (w + 1024 * 768 + 2 * block)
    assert sharded["gathered gradients"] == 4 * (w + block)
    assert total(GPT2, 8, on=ddp)["gradient buckets"] == 4 * N
    for rows, micro_batch, shares, n in ((8, 8, 1, 1), (8, 4, 1, 2), (8, 4, 2, 1), (7, 3, 2, 2)):
        parts = total(GPT2, rows, micro_batch, on=machine(n_processes=shares))
        assert parts["W's gradients apart"] == n * 4 * w
    assert total(GPT2, 8, optimizer="muon")["optimizer state"] == 8 * N - 4 * 12 * block
    frozen = total(GPT2, 8, n_trained=1000)
    assert [frozen[name] for name in static] == [4 * N, 4000, 8000]
    assert "W's gradients apart" in total(GPT2, 8).keys() - frozen.keys()


@pytest.mark.parametrize(
    ("device", "dtype", "n_bytes", "rows", "kept"),
    [("cpu", "fp32", 4, 256, 64), ("cpu", "bf16", 2, 512, 36), ("cuda", "bf16", 6, 512, 36)],
)
def test_logits_take_a_chunk_of_50_mib_and_a_block_its_states(device, dtype, n_bytes, rows, kept):
    on, sizes = machine(device=device), 8 * 1024 * 768
    parts = total(GPT2, 8, on=on, dtype=dtype)
    assert parts["logits and loss"] == n_bytes * rows * 50257 + 8 * sizes
    assert parts["activations"] == 12 * kept * sizes
    w, block = 50257 * 768, 12 * 768**2
    narrow = {12: 2 * (12 * block + w), 1: 2 * (block + w)} if device == "cuda" else {}
    assert parts.get("weights in bf16") == narrow.get(12)
    parts = total(GPT2, 8, on=on, dtype=dtype, recompute="blocks")
    assert parts["activations"] == (kept + 12 * 4) * sizes  # one block, and the input of each
    assert parts.get("weights in bf16") == narrow.get(1)


@pytest.mark.parametrize(
    ("free", "asked", "micro_batch", "recompute"),
    [
        (8_000 * MB, {}, 32, "off"),
        (1_000 * MB, {}, 8, "off"),
        (600 * MB, {}, 4, "off"),
        (600 * MB, {"recompute": "blocks"}, 16, "blocks"),
        (8_000 * MB, {"micro_batch": 16}, 16, "off"),
        (8_000 * MB, {"memory": "1300MB"}, 8, "off"),
        (8_000 * MB, {"memory": "520MB"}, 2, "blocks"),
    ],
)
def test_the_largest_micro_batch_that_fits_is_taken(free, asked, micro_batch, recompute):
    options = TrainOptions(size="small", steps=5, batch_size=64, **asked)
    on = machine(free_bytes=free, used_bytes=250 * MB)
    _, made = plan(options, config=SMALL, on=on)
    assert (made.micro_batch, made.recompute) == (micro_batch, recompute)
    limit = free if made.memory is None else min(free, made.memory - 250 * MB)
    needed = sum(estimate_memory(SMALL, made, text(600_000, 256), on).values())
    assert needed <= limit
    assert plan(options, config=SMALL, on=machine(free_bytes=needed))[1].micro_batch == micro_batch


@pytest.mark.parametrize(
    ("config", "asked", "free", "says"),
    [
        ("gpt3-175b", {}, 8_000 * MB, "173,999,284,224 parameters need 2,088.2 GB .* smaller"),
        ("gpt2", {"batch_size": 10**9, "micro_batch": 1}, 8_000 * MB, "smaller --batch-size$"),
        ("gpt2", {"batch_size": 64, "micro_batch": 64}, 8_000 * MB, "64 sequences .* --recompute"),
        ("gpt2", {"memory": "100MB"}, 8_000 * MB, "the program alone takes 250 MB"),
        ("gpt2", {"memory": "300MB"}, 8_000 * MB, "--memory leaves 50 MB"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_the_arithmetic(config, asked, free, says):
    options = TrainOptions(size=config, steps=5, **asked)
    with pytest.raises(NoRoomError, match=says) as error:
        plan(options, on=machine(free_bytes=free, used_bytes=250 * MB))
    assert error.value.exit_code == 4


def test_more_processes_than_rows_are_refused():
    with pytest.raises(UserError, match="a batch of 2 rows for 4 processes"):
        plan(size="tiny", steps=5, batch_size=2, on=machine(n_processes=4))
    assert plan(size="tiny", steps=5, batch_size=8, on=machine(n_processes=4))[1].micro_batch == 2


def test_a_plan_describes_how_it_keeps_its_limit():
    made = dataclasses.replace(PLAN, micro_batch=2, recompute="blocks", memory=305 * MB)
    assert describe_memory(made) == "2 sequences at a time, blocks recomputed in backward, to " \
        "stay in 305 MB"  # fmt: skip


def test_a_halved_micro_batch_scores_as_many_rows():
    before = dataclasses.replace(PLAN, micro_batch=5, eval_batches=3, final_batches=7)
    after = halve_micro_batch(before, 7)
    assert (after.micro_batch, after.eval_batches, after.final_batches) == (2, 8, 18)
    assert after.since == 7 and after.batch_size == before.batch_size


@pytest.mark.parametrize(
    ("words", "size"), [("2", 2e9), ("1.5", 1.5e9), ("0.001KB", 1), ("800 mb", 8e8), (".5g", 5e8)]
)
def test_a_size_of_memory_is_parsed(words, size):
    assert parse_bytes(words) == size


@pytest.mark.parametrize("words", ["", "0", "-1", "2 GiBs", "much", "nan"])
def test_invalid_sizes_of_memory_are_refused(words):
    with pytest.raises(UserError, match="--memory"):
        TrainOptions(memory=words)


# Time


@pytest.mark.parametrize("seconds", [60, 600])
@pytest.mark.parametrize("held_out_rows", [10.0, 1e6])
@pytest.mark.parametrize("step_seconds", [0.01, 0.5])
def test_steps_fill_the_time_and_scoring_takes_little_of_it(seconds, held_out_rows, step_seconds):
    made = dataclasses.replace(PLAN, batch_size=16, micro_batch=16)
    steps = count_steps(seconds, step_seconds, held_out_rows, made)
    final = step_seconds / 3 * count_final_rows(seconds / step_seconds, held_out_rows, made) / 16
    assert final <= max(0.02 * seconds, 4 * step_seconds / 3) + 1e-9
    assert 0.93 * seconds < steps * step_seconds + final < seconds


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ({"steps": 7}, 7),
        ({"epochs": 2.0, "batch_size": 10}, 938),
        ({"minutes": 1.0, "size": "tiny", "batch_size": 16}, 696),
        ({"minutes": 10.0, "size": "tiny", "batch_size": 16}, 7182),
    ],
)
def test_the_number_of_steps_comes_from_steps_epochs_or_minutes(asked, steps):
    made = plan(TrainOptions(**{"size": "tiny"} | asked), tokens=600_065)[1]
    assert made.steps == pytest.approx(steps, rel=0.01)


@pytest.mark.parametrize(
    ("examples", "steps", "says"),
    [(999, 300, "few examples: 300 steps"), (1000, 300, "few examples"), (10**5, 0, "")],
)
def test_few_examples_are_tuned_on_for_at_least_300_steps(examples, steps, says):
    facts = Facts(unit="tokens", row_units=64, row_tokens=64, epoch_rows=examples,
                  n_examples=examples, n_held_out=examples // 20)  # fmt: skip
    options = TuneOptions(data=("x",), start="m")
    _, made = plan(options, config=SMALL, facts=facts)
    assert made.reason.startswith(says) and made.steps >= steps
    assert made.can_end_early == (examples >= 1000)  # 50 are held out


@pytest.mark.parametrize(
    ("row_tokens", "rows", "batch_size"),
    [(64, 10**5, 128), (2731, 10**5, 2), (8193, 99, 1), (64, 32, 2), (64, 31, 1)],
)
def test_a_step_of_tuning_has_8192_tokens_or_a_sixteenth_of_the_rows(row_tokens, rows, batch_size):
    facts = Facts(row_tokens=row_tokens, epoch_rows=rows, n_examples=rows, n_held_out=50)
    _, planned = plan(TuneOptions(data=("x",), start="m"), config=SMALL, facts=facts)
    assert planned.batch_size == batch_size


@pytest.mark.parametrize(
    ("options", "examples", "held_out", "lr", "eval_every"),
    [
        ({}, 10**5, 50, 1.25e-4, 195), ({"epochs": 2.0}, 10**5, 1, 1.25e-4, 195),
        ({"epochs": 0.1}, 10**5, 50, 1.25e-4, 79), ({"lora": 8}, 10**5, 50, 1.25e-3, 195),
        ({}, 1, 0, 5e-4, 3), ({"lora": 8}, 2, 0, 2.5e-3, 6), ({}, 0, 0, 1.25e-4, 195),
    ],
)  # fmt: skip
def test_tuning_has_a_rate_of_6e_5_at_width_768_and_4_evaluations_an_epoch(
    options, examples, held_out, lr, eval_every
):
    """Adapters have 10 times the rate of Radford et al. 2018; few examples 4 and 20 times."""
    sizes = {"epoch_rows": examples or 10**5, "n_examples": examples, "n_held_out": held_out}
    facts = Facts(row_tokens=64, **sizes)
    _, planned = plan(TuneOptions(data=("x",), start="m", **options), config=SMALL, facts=facts)
    assert (planned.lr, planned.eval_every) == (pytest.approx(lr), eval_every)
    assert (planned.weight_decay, planned.patience, planned.optimizer) == (0.01, 4, "adamw")


@pytest.mark.parametrize(
    ("begin", "pace", "deadline", "steps"),
    [
        (0, 1.0, None, [10, 25, 50, 75, 90]), (30, 1.0, None, [50, 75, 90]),
        (0, 0.5, None, [10, 25, 50, 75, 90]), (0, 1.9, None, [6, 14, 27, 40, 48]),
        (30, 1.9, None, [41, 54, 62]), (0, 1.0, 1053.0, [6, 14, 27, 40, 48]),
    ],
)  # fmt: skip
def test_the_pace_is_compared_at_shares_of_the_steps_or_of_the_time(begin, pace, deadline, steps):
    minutes_plan = dataclasses.replace(PLAN, steps=100, minutes=100 / 60)
    checks = PaceChecks(minutes_plan, begin, 1000.0, deadline)
    paces = {
        n: checks.measure(minutes_plan, n, 1000 + pace * (n - begin)) for n in range(begin, 101)
    }
    assert {n: paces[n] for n in paces if paces[n] is not None} == pytest.approx(
        dict.fromkeys(steps, pace)
    )
    checks = PaceChecks(minutes_plan, 0, 1000.0, None)  # as steps get slower
    paces = [checks.measure(minutes_plan, n, 1000 + n**2 / 100) for n in (10, 25, 50)]
    assert paces == pytest.approx([0.1, 0.35, 0.75])
    assert PaceChecks(minutes_plan, 0, 1000.0, None).measure(minutes_plan, 0, 1090.0) is None


@pytest.mark.parametrize(
    ("pace", "left", "steps", "every"),
    [
        (1.0, 61.0, 100, 7), (1.0, 58.0, 100, 7), (1.0, 57.0, 95, 7),  # 5 % fewer are a new plan
        (2.0, 61.0, 69, 7), (0.5, 61.0, 158, 11), (9.0, 0.0, 41, 7),
    ],
)  # fmt: skip
def test_a_new_plan_ends_with_the_time(pace, left, steps, every):
    shape = {"steps": 100, "warmup": 5, "cooldown": 30, "eval_every": 7, "schedule": "wsd"}
    before = dataclasses.replace(PLAN, minutes=100 / 60, **shape)
    after = replan(before, 8.0, 40, left, pace)
    if after is None:
        assert steps == 100
        return
    assert after.steps == pytest.approx(steps, abs=2) and after.since == 40
    assert after.rate(after.steps - 1) < 0.1 * after.lr
    assert (after.cooldown, after.eval_every) == (round(0.3 * after.steps), every)
    assert after.save_every == after.steps // 4


# The learning rate


def rates(schedule="linear", *, steps=100, warmup=10, cooldown=0):
    shape = {"steps": steps, "warmup": warmup, "cooldown": cooldown}
    made = dataclasses.replace(PLAN, lr=1.0, schedule=schedule, **shape)
    return [made.rate(step) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["linear", "wsd", "cosine"])
def test_every_schedule_rises_linearly_to_its_peak_and_then_only_falls(schedule):
    made = rates(schedule, cooldown=40)
    assert made[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert max(made) == made[9] == made[10] == 1.0
    assert made[10:] == sorted(made[10:], reverse=True)


def test_linear_falls_to_zero_after_the_last_step():
    assert rates()[-1] == pytest.approx(1 / 90)
    assert rates(warmup=0, steps=1) == [1.0]


def test_wsd_stays_at_its_peak_and_falls_linearly_in_the_cooldown():
    made = rates("wsd", cooldown=40)
    assert set(made[10:61]) == {1.0} and made[61] < 1
    assert made[60:] == pytest.approx([n / 40 for n in range(40, 0, -1)])
    assert set(rates("wsd", cooldown=0)[10:]) == {1.0}
    assert rates("wsd", cooldown=90) == pytest.approx(rates("linear"))


def test_cosine_falls_to_a_tenth_and_is_half_way_there_in_the_middle():
    made = rates("cosine")
    assert made[55] == pytest.approx(0.55)
    assert made[-1] == pytest.approx(0.1, abs=1e-3) and min(made[10:]) > 0.1


def test_shares_of_the_steps_become_steps_of_the_plan():
    _, made = plan(size="tiny", steps=200, schedule="wsd")
    assert (made.schedule, made.warmup, made.cooldown) == ("wsd", 10, 80)
    assert made.rate(119) == made.rate(120) == made.lr > made.rate(121)


@pytest.mark.parametrize(
    "damage",
    [{"minutes": 0.0}, {"minutes": math.nan}, {"lr": math.nan}, {"warmup": -5}, {"since": -1},
     {"schedule": "steps"}, {"schedule": 7}, {"lr": "0.1"}, {"steps": 6.5}, {"compile": True}],
)  # fmt: skip
def test_a_plan_with_impossible_numbers_is_refused(damage):
    with pytest.raises(CorruptInputError, match="invalid plan"):
        dataclasses.replace(PLAN, **damage)


def test_the_learning_rate_scales_with_the_width_for_adamw_and_its_root_for_muon():
    assert scale_lr_to_width(1e-3, width=128, to=512, optimizer="adamw") == pytest.approx(2.5e-4)
    assert scale_lr_to_width(1e-3, width=128, to=512, optimizer="muon") == pytest.approx(5e-4)
    for size, width, n_head, lrs in (
        ("tiny", 512, 16, (6e-3, 1e-3)), ("little", 768, 24, (5e-3, 7.5e-4)),
    ):  # fmt: skip
        options = TrainOptions(size=size, width=width, steps=5)
        config, muon = plan(options)
        assert (config.n_embd, config.n_head, config.n_layer) == (width, n_head, 2)
        _, adamw = plan(dataclasses.replace(options, optimizer="adamw"))
        assert (muon.lr, adamw.lr) == pytest.approx(lrs)


# Options


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"size": "huge"}, "no size 'huge'.* there are auto, nano, tiny, little, slim, mini"),
        ({"size": "gpt-2"}, "no size 'gpt-2': did you mean gpt2"),
        ({"size": "medum"}, "no size 'medum': did you mean medium"),
        ({"minutes": 1.0, "steps": 5}, "only one of"),
        ({"minutes": -1.0}, "minutes must be"),
        ({"lr": float("nan")}, "lr must be"),
        ({"steps": 0}, "steps must be"),
        ({"eval_every": 0}, "eval_every must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"warmup": 2.0}, "warmup must be"),
        ({"dropout": 1.0}, "dropout must be"),
        ({"seed": -1}, "seed must be .* >= 0"),
        ({"seed": 2**63}, r"seed must be .* < 2\*\*63"),
        ({"keep": "last", "patience": 3}, "--patience 3 is for --keep best"),
        ({"cooldown": 0.2}, "--schedule wsd"),
        ({"schedule": "wsd", "cooldown": 0.8, "warmup": 0.3}, "add up to more than 1"),
        ({"size": "tiny", "width": 100}, "--width must be a multiple of 32"),
        ({"tokenizer": "char", "vocab_size": 300}, "--vocab-size .* leave out --tokenizer"),
        ({"start": "x", "width": 512}, "--width"),
        ({"start": "x", "window": 4}, "--window"),
        ({"start": "x", "bias": False}, "--no-bias"),
        ({"window": 0}, "window must be"),
        ({"optimizer": "sgd"}, "one of auto, adamw, muon, got 'sgd'"),
    ],
)
def test_impossible_options_are_named(wrong, says):
    with pytest.raises(UserError, match=says):
        TrainOptions(**wrong)
    with pytest.raises(TypeError, match="positional"):
        TrainOptions("cats.txt", **wrong)


def test_bands_of_gpt3_and_no_biases_are_options():
    config = config_of(TrainOptions(size="tiny", window=16, bias=False))
    assert config.attention_windows == (0, 16) and not config.bias
    plain = config_of(TrainOptions(size="tiny"))
    assert (plain.attention_windows, plain.bias, plain.resid_pdrop) == (None, True, 0.0)
