import dataclasses
import shutil

import pytest
import torch

from tests.train.conftest import CPU
from tiedgpt.train import compiling
from tiedgpt.train.compiling import decide
from tiedgpt.train.events import Started
from tiedgpt.train.language import LanguageModelling
from tiedgpt.train.loop import train
from tiedgpt.train.planning import make_plan


def test_without_a_compiler_blocks_run_as_they_are_and_a_line_says_so(
    monkeypatch, new_run, config, options
):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    compiles, line = decide("on", CPU)
    assert not compiles
    assert line.startswith("--compile on: no C++ compiler is here (g++, clang++")
    assert "install one or set CXX; the blocks run as they are" in line and "\n" not in line
    run, tokenizer = new_run()
    task = LanguageModelling(run, config, tokenizer)
    assert make_plan(dataclasses.replace(options, compile="on"), task, CPU).compile == "off"


def test_blocks_are_compiled_by_themselves_on_a_gpu_and_for_rows_of_one_length(monkeypatch):
    monkeypatch.setattr(compiling, "missing", lambda device: None)
    gpu = torch.device("cuda")
    assert decide("auto", gpu) == (True, None)
    assert decide("auto", gpu, one_shape=False) == decide("auto", CPU) == (False, None)
    assert decide("on", CPU) == (True, None)
    assert decide("off", gpu) == (False, None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own code
def test_a_compiled_run_that_was_stopped_equals_one_that_was_not(new_run, config, plan):
    plan = dataclasses.replace(plan, compile="on")
    config = dataclasses.replace(config, embd_pdrop=0.1, attn_pdrop=0.1, resid_pdrop=0.1)
    weights = []
    for name, stops in (("whole", (6,)), ("resumed", (3, 6))):
        run, tokenizer = new_run(name)
        task = LanguageModelling(run, config, tokenizer)
        last = [0]
        for until in stops:
            for event in train(
                run, task, plan, CPU, stop_requested=lambda u=until, now=last: now[0] >= u
            ):
                last[0] = event.step
                if isinstance(event, Started):
                    assert any(note.startswith("compiled the blocks in") for note in event.notes)
                    assert not any("_orig_mod" in key for key in event.model.state_dict())
        weights.append((run.model / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_each_shape_has_code_of_its_own(monkeypatch):
    """torch compiles a code eight times at most and then runs it as it is."""

    def twice(x):
        return 2 * x

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    forms = [compiling.compiled(twice, torch.Size((4, n, 8))) for n in (16, 32)]
    assert forms[0].__code__ != forms[1].__code__ and forms[0](3) == forms[1](3) == 6
    assert compiling.compiled(twice, torch.Size((4, 16, 8))) is forms[0]
