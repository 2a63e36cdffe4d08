import dataclasses
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from tests.train.conftest import CHARACTERS, CPU, PLAN, open_trial
from tests.train.trials import SERVER
from tiedgpt import GPTConfig
from tiedgpt.errors import NoRoomError, UserError
from tiedgpt.train import sizing
from tiedgpt.train.measures import held_memory, peak_memory
from tiedgpt.train.objective import Data
from tiedgpt.train.objectives.language import LanguageModelling
from tiedgpt.train.optim import make_optimizers
from tiedgpt.train.options import TrainOptions, parse_bytes
from tiedgpt.train.parallel import World
from tiedgpt.train.sizing import (
    Peak,
    describe_memory,
    measure_peak,
    require_lasting,
    require_memory,
)
from tiedgpt.train.step import train_step

SMALL = GPTConfig(vocab_size=4096, n_positions=256, n_embd=384, n_layer=6, n_head=6)
GPT2 = GPTConfig.preset("gpt2")
ONE = World(CPU)
MB = 1_000_000


def rows(batch_size, micro_batch=None, **more):
    """Return a plan of batches that are computed at once, or in parts."""
    sizes = {"batch_size": batch_size, "micro_batch": micro_batch or batch_size}
    return dataclasses.replace(PLAN, **({"optimizer": "adamw"} | sizes | more))


def run_of(config, n_trained=None):
    """Return the objective and the data of a run whose rows fill the context."""
    objective = LanguageModelling(config, CHARACTERS, n_trained=n_trained)
    return objective, Data(batches=None, held_out=None, row_tokens=config.n_positions)


@pytest.fixture
def free(monkeypatch):
    """Have so many bytes be free."""
    return lambda size: monkeypatch.setattr(sizing, "measure_free", lambda device: size)


@pytest.fixture
def known(monkeypatch):
    """Have a row take 10 MB, and 2 MB where blocks are computed again."""
    monkeypatch.setattr(sizing, "ABUNDANT", 0.0)

    def peak(objective, data, plan, at_most, device):
        return Peak(250 * MB, 300 * MB, 2 * MB if plan.recompute == "blocks" else 10 * MB)

    monkeypatch.setattr(sizing, "measure_peak", peak)
    monkeypatch.setattr(sizing, "held_memory", lambda device: 250 * MB)


WIDE = {"n_positions": 128, "n_embd": 128, "n_layer": 3}
"""A row of such a model takes some 8 MB."""


def resident_growth(path, config, *plans):
    """Train two steps by each plan; return the most bytes that the last of them added."""
    torch.set_num_threads(1)
    trial = open_trial(path, config)
    for plan in plans:
        began = held_memory(CPU)
        model = trial.objective.build().train()
        _, rules = make_optimizers(trial.objective, model, plan)
        batch_of = trial.data.batches(plan.batch_size, plan.seed)
        for step in range(2):
            train_step(model, rules, batch_of(step), plan)
    return peak_memory(CPU) - began


def test_the_peak_of_many_rows_is_foreseen_from_a_few(trial, tmp_path):
    wide = trial(config=WIDE)
    foreseen = measure_peak(wide.objective, wide.data, rows(64), 64, CPU)
    assert foreseen.before <= foreseen.at(1) < foreseen.at(64) - 200 * MB
    with ProcessPoolExecutor(1, mp_context=SERVER) as fresh:
        plans = rows(1), rows(64)  # the first one loads libraries
        taken = fresh.submit(
            resident_growth, tmp_path / "run", wide.objective.config, *plans
        ).result()
    assert taken > 200 * MB
    assert foreseen.at(64) - foreseen.before == pytest.approx(taken, rel=0.3)


def test_a_peak_does_not_depend_on_what_the_process_did_before(trial):
    wide = trial(config=WIDE)

    def measured():
        peak = measure_peak(wide.objective, wide.data, rows(4), 4, CPU)
        return peak.fixed - peak.before, peak.a_row

    first = measured()
    blocks = [torch.ones(1000 * n) for n in range(1, 400)]  # 320 MB
    held = blocks[::10]
    assert measured() == first, "the process holds more"
    del blocks
    assert measured() == first, "malloc keeps what was freed"
    assert len(held) == 40


def test_a_batch_that_cannot_fit_is_refused_with_the_arithmetic(free, known):
    free(1_500 * MB)
    peak = Peak(before=250 * MB, fixed=500 * MB, a_row=50 * MB)
    require_memory(*run_of(SMALL), rows(16), ONE, peak)
    says = (
        r"a batch of 512 x 256 tokens, 512 sequences at a time, needs about 25\.[89] GB, [\d.]+ MB "
        r"of them for weights.* cpu has 1\.5 GB free: use a smaller --batch-size or "
        "--micro-batch, or --recompute blocks"
    )
    with pytest.raises(NoRoomError, match=says) as error:
        require_memory(*run_of(SMALL), rows(512), ONE, peak)
    assert error.value.exit_code == 4
    require_memory(*run_of(SMALL), rows(512, 16), ONE, peak)


def test_a_model_that_cannot_fit_is_refused_before_it_is_built():
    with pytest.raises(NoRoomError, match=r"174,604,259,328 parameters need 2,793\.7 GB"):
        require_lasting(*run_of(GPTConfig.preset("gpt3-175b")), rows(1), ONE)


def test_frozen_parameters_take_no_gradients_and_moments(free, known):
    free(1_000 * MB)
    with pytest.raises(NoRoomError, match=r"124,439,808 parameters need 2\.0 GB"):
        require_lasting(*run_of(GPT2), rows(1), ONE)
    require_lasting(*run_of(GPT2, n_trained=1_000_000), rows(1), ONE)


def test_a_batch_that_cannot_fit_is_refused_before_it_is_read():
    with pytest.raises(NoRoomError, match="use a smaller --batch-size"):
        require_lasting(*run_of(GPT2), rows(10**12, 1), ONE)
    require_lasting(*run_of(GPT2), rows(512, 1), ONE)


def test_a_micro_batch_that_was_not_asked_for_is_halved_until_it_fits(trial, options, free, known):
    run, asked = trial(), dataclasses.replace(options, batch_size=64, dtype="bf16")
    free(800 * MB)
    assert run.make_plan(asked).micro_batch == 64
    free(300 * MB)
    assert run.make_plan(asked).micro_batch == 16
    with pytest.raises(NoRoomError, match="32 sequences at a time"):
        run.make_plan(asked, micro_batch=32)


def test_a_budget_decides_how_many_sequences_go_at_a_time_and_what_is_recomputed(
    trial, options, known
):
    run, asked = trial(), {"batch_size": 64, "dtype": "bf16"}

    def planned(budget, **more):
        plan = run.make_plan(options, **asked, memory=budget, **more)
        return plan.micro_batch, plan.recompute, describe_memory(plan)

    assert planned("2GB")[:2] == (64, "off")
    assert planned("500MB")[:2] == (16, "off")
    micro, recompute, said = planned("305MB")
    assert (micro, recompute) == (2, "blocks")
    assert said == "2 sequences at a time, blocks computed again in backward, to stay in 305 MB"
    with pytest.raises(NoRoomError, match=r"of --memory 305 MB left beside the program"):
        planned("305MB", recompute="off")


@pytest.mark.parametrize(
    ("text", "size"), [("2", 2e9), ("1.5", 1.5e9), ("2GB", 2e9), ("800 mb", 8e8), (".5g", 5e8)]
)
def test_a_budget_is_read_as_people_write_it(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "2 GiBs", "much", "nan"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UserError, match="--memory"):
        TrainOptions(memory=text)


def test_a_budget_below_the_program_itself_says_so(known):
    with pytest.raises(NoRoomError, match="--memory 100 MB: the program alone takes 250 MB"):
        require_lasting(*run_of(SMALL), rows(1, memory=100 * MB), ONE)


def test_each_of_several_processes_needs_its_share_and_has_its_share(free, known):
    ddp, fsdp = World(CPU), World(CPU)
    ddp.size = ddp.n_local = fsdp.size = fsdp.n_shards = 2
    peak, lasting = Peak(250 * MB, 450 * MB, 10 * MB), 16 * SMALL.parameter_count()
    for world, more in ((ONE, 0), (ddp, lasting // 4), (fsdp, -lasting // 2)):
        need = (200 + 8 * 10) * MB + more
        free((need + MB) * world.n_local)
        require_memory(*run_of(SMALL), rows(8 * world.size, 8), world, peak)
        free((need - MB) * world.n_local)
        with pytest.raises(NoRoomError):
            require_memory(*run_of(SMALL), rows(8 * world.size, 8), world, peak)
    free(2_000 * MB)
    with pytest.raises(NoRoomError, match=r"cpu has 1\.0 GB free for each process"):
        require_lasting(*run_of(GPT2), rows(2, 1), ddp)


@pytest.mark.parametrize("shape", [(2, 64, 2), (3, 128, 8)])
def test_a_step_that_is_said_to_fit_by_far_takes_less_than_the_bound(trial, monkeypatch, shape):
    n_layer, n_embd, n_head = shape
    run = trial(config={"n_layer": n_layer, "n_embd": n_embd, "n_head": n_head})
    config, world = run.objective.config, World(torch.device("cpu"))
    peak = sizing.measure_peak(run.objective, run.data, run.plan, 8, world.device)
    taken = (peak.at(8) - peak.before) / sizing.ABUNDANT
    n_tokens = 8 * run.data.row_tokens
    monkeypatch.setattr(sizing, "measure_free", lambda device: taken)
    assert not sizing._has_abundant_room(config, n_tokens, world)
    monkeypatch.setattr(sizing, "measure_free", lambda device: 1e12)
    assert sizing._has_abundant_room(config, n_tokens, world)
