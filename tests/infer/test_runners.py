"""The choice of a runner by source, precision and size."""

import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.infer.conftest import equal
from tests.infer.option_values import SAMPLING
from tiedgpt import GPT, GPTConfig
from tiedgpt.cli.main import main
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.infer import Engine, runners
from tiedgpt.infer.kernels import sampling as kernel_sampling
from tiedgpt.weights.formats.packed import FILE


@pytest.fixture
def source(engine, tmp_path):
    engine.model.save_pretrained(tmp_path / "model")
    engine.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def greedy(engine, **options):
    return engine.generate("the cat", max_new_tokens=12, temperature=0, **options).ids


def test_a_packed_directory_or_repository_of_the_hub_generates_without_torch(packed, tmp_path):
    snapshot, blobs = tmp_path / "cache" / "snapshots" / "0123abcd", tmp_path / "cache" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(packed.iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    program = """
import fnmatch, sys
import huggingface_hub
from tiedgpt.infer import Engine

def snapshot_download(name, allow_patterns, **_):
    assert name == "someone/packed"
    assert any(fnmatch.fnmatch(file, p) for file in wanted for p in allow_patterns)
    return sys.argv[1]

huggingface_hub.snapshot_download = snapshot_download
wanted = ["packed.safetensors", "tokenizer.json"]
for source in ("someone/packed", sys.argv[1], sys.argv[1] + "/packed.safetensors"):
    engine = Engine(source)
    assert engine.backend == "kernels" and engine.runner.packed.precision == "int8"
    assert engine.generate("the cat", max_new_tokens=4, temperature=0).text
assert not {"torch", "transformers"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program, str(snapshot)], check=True, cwd=tmp_path)


def test_a_run_whose_model_is_packed_is_computed_by_kernels(packed, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.move(packed, tmp_path / "run" / "model")
    assert Engine(tmp_path / "run").backend == "kernels"


def test_a_packed_file_truncated_in_use_raises_and_does_not_kill_the_process(packed):
    engine = Engine(packed)
    greedy(engine)
    os.truncate(packed / FILE, 4096)
    for _ in range(2):
        with pytest.raises(CorruptInputError, match="cut short while it was in use"):
            greedy(engine)


def test_eight_bits_are_the_same_from_a_model_a_source_and_a_packed_directory(
    engine, source, packed
):
    expected = greedy(Engine(packed))
    assert greedy(Engine(source, "int8")) == expected
    assert greedy(Engine(packed, "int8")) == expected
    assert greedy(Engine(engine.model, "int8", tokenizer=engine.tokenizer)) == expected
    assert engine.model.wte.weight.dtype == torch.float32


def test_kernels_and_torch_write_the_same_text(engine, source):
    kernels, through_torch = Engine(source, backend="kernels"), Engine(source, backend="torch")
    assert (kernels.backend, through_torch.backend) == ("kernels", "torch")
    assert greedy(kernels) == greedy(through_torch) == greedy(engine)
    for options in (
        *SAMPLING,
        {"temperature": 0.8, "top_p": 0.9},
        {"top_k": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 0, "logit_bias": {7: 9.0, 8: -math.inf}},
        {"top_p": 0.9, "repetition_penalty": 1.3, "logit_bias": {7: 2.0}},
        {"num_beams": 3},
        {"temperature": 0, "context_end": "slide", "max_new_tokens": 30},
    ):
        prompts = [[1, 2], [4], [7] * 40]
        ours, theirs = (
            one.generate(prompts, seed=3, **options) for one in (kernels, through_torch)
        )
        equal(ours, theirs, exact=False)
        assert ours[2].dropped or "context_end" not in options
    scored = kernels.score("the cat sat on the mat").logprobs
    assert scored == pytest.approx(engine.score("the cat sat on the mat").logprobs, abs=1e-4)
    with pytest.raises(UserError, match="no torch model"):
        _ = kernels.model


def test_torch_compiles_nothing_to_sample_and_writes_the_same_text_as_with_kernels(
    source, tmp_path
):
    program = """
import json, sys
from tiedgpt.infer import Engine

engine, options = Engine(sys.argv[1], backend="torch"), json.loads(sys.argv[2])
print(json.dumps([text.ids for text in engine.generate(options.pop("prompts"), **options)]))
assert "numba" not in sys.modules
"""
    options = {"prompts": [[1, 2], [4], [7] * 40], "seed": 3, "top_p": 0.9, "max_new_tokens": 20}
    options |= {"temperature": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.02}
    command = [sys.executable, "-c", program, str(source), json.dumps(options)]
    empty = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "empty")}
    ran = subprocess.run(command, check=True, env=empty, capture_output=True, text=True)
    assert not (tmp_path / "empty").exists()
    greedy(Engine(source, backend="kernels"))  # compiles what is missing
    assert kernel_sampling.is_compiled()
    ours = Engine(source, backend="torch").generate(options.pop("prompts"), **options)
    assert json.loads(ran.stdout) == [text.ids for text in ours]


def test_a_packed_directory_refuses_other_precisions_and_configs(packed):
    with pytest.raises(UserError, match="packed in int8, not bf16"):
        Engine(packed, "bf16")
    with pytest.raises(UserError, match="says all itself: leave out n_head, resolve"):
        Engine(packed, n_head=4, resolve="tie")
    assert Engine(packed, backend="torch").backend == "torch"


def test_an_unknown_option_of_an_engine_is_refused_before_anything_is_opened(packed, source):
    for name in ("slot", "devices", "dtype", "revision"):
        for where in (packed, source, "no/such/model"):
            with pytest.raises(TypeError, match=f"^{name} is no option of Engine; .* slots,"):
                Engine(where, **{name: 3})


def test_large_plain_models_get_kernels_on_a_cpu_unless_they_are_in_memory(
    engine, source, monkeypatch
):
    assert Engine(source).backend == "torch"
    monkeypatch.setattr(runners, "LARGE", 1000)
    assert Engine(source).backend == "kernels"
    assert Engine(source, "bf16").runner.packed.precision == "bf16"
    assert Engine(source, "fp16").backend == "torch"
    assert Engine(engine.model).backend == "torch"
    assert Engine(engine.model, "fp32", backend="kernels").backend == "kernels"


def test_choices_that_exclude_each_other_are_refused(source):
    with pytest.raises(UserError, match="torch does not compute int8"):
        Engine(source, "int8", backend="torch")
    with pytest.raises(UserError, match="not fp16"):
        Engine(source, "fp16", backend="kernels")
    with pytest.raises(UserError, match="backend must be one of auto, torch, kernels, got 'cuda'"):
        Engine(source, backend="cuda")
    with pytest.raises(UserError, match=r"tokenizer must be a tiedgpt\.Tokenizer"):
        Engine(source, tokenizer=["the", "cat"])


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps", torch.device("cuda", 1)])
@pytest.mark.parametrize("options", [{"precision": "int8"}, {"backend": "kernels"}])
def test_kernels_exclude_a_gpu(engine, source, packed, device, options):
    for model in (engine.model, source, "no/such/model"):
        with pytest.raises(UserError, match=f"^device and {next(iter(options))} exclude") as error:
            Engine(model, device=device, **options)
        assert str(device) in error.value.message and "leave out" in error.value.hint
    with pytest.raises(UserError, match="packed for the CPU's kernels") as error:
        Engine(packed, device=device)
    assert "backend='torch'" in error.value.hint


def test_a_quantized_precision_takes_the_cpu_beside_a_gpu_and_says_so(
    engine, source, packed, monkeypatch
):
    assert not Engine(source, "int8").notes
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for model in (source, engine.model):
        for precision in ("int8", "int4"):
            (note,) = Engine(model, precision).notes
            assert precision in note and "CPU" in note and "bf16" in note
            assert not Engine(model, precision, device="cpu").notes
    assert Engine(packed).backend == "kernels"


def test_a_device_that_is_not_here_is_refused_before_the_weights_are_read(source, engine):
    (source / "model.safetensors").write_bytes(b"damaged")
    for model in (source, engine.model):
        with pytest.raises(UserError, match=r"^device cuda:63 cannot be used here") as error:
            Engine(model, device="cuda:63")
        assert "cpu" in error.value.hint


def test_the_cpu_is_the_default_of_a_small_model_beside_a_gpu(source, engine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("auto", None, "cpu", "CPU", torch.device("cpu")):
        chosen = Engine(source, device=device)
        assert chosen.model.wte.weight.device == torch.device("cpu")
        assert greedy(chosen) == greedy(engine)
    assert Engine(engine.model, device="cpu").model is engine.model


def test_a_model_in_memory_stays_on_its_device_or_is_copied_to_another():
    model = GPT(GPTConfig(vocab_size=11, n_positions=5, n_embd=6, n_layer=1, n_head=2))
    assert Engine(model).model is model
    with torch.device("meta"):
        elsewhere = GPT(model.config)
    assert Engine(elsewhere).model is elsewhere and "torch on meta" in repr(Engine(elsewhere))


def test_the_command_generates_from_a_packed_directory(source, tmp_path, capsys):
    assert main(["convert", str(source), str(tmp_path / "p"), "--to", "packed"]) == 0
    out = capsys.readouterr().out
    assert "W is stored once" in out and "(tolerance 0.05)" in out
    kept = (tmp_path / "p" / FILE).stat()
    again = ["convert", str(source), str(tmp_path / "p"), "--to", "packed", "--overwrite"]
    assert main(again) == 1
    assert "new or empty" in capsys.readouterr().err
    assert (tmp_path / "p" / FILE).stat() == kept
    assert main(["convert", str(tmp_path / "p"), str(tmp_path / "back")]) == 0
    assert "int8 panels; 2 blocks" in capsys.readouterr().out
    command = ["generate", str(tmp_path / "p"), "--prompt", "the cat", "--max-new-tokens", "3"]
    assert main([*command, "--threads", "2"]) == 0
    assert capsys.readouterr().out.startswith("the cat")
    assert main([*command, "--precision", "int4"]) == 1
    assert "packed in int8" in capsys.readouterr().err
