"""Every writer in the registry: an exact copy, a refusal by name, all or nothing."""

import errno
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, prune
from transformers import AutoModelForCausalLM

from tests.models import random_gpt
from tiedgpt import GPT, GPTConfig
from tiedgpt.errors import NoRoomError, UserError
from tiedgpt.serve.page_model import PAGE
from tiedgpt.weights.checkpoint import Writer
from tiedgpt.weights.load import load
from tiedgpt.weights.parameters import PRECISIONS, parameters_for
from tiedgpt.weights.registry import writers

pytestmark = pytest.mark.filterwarnings("ignore::tiedgpt.weights.load.CheckpointWarning")

FILES = [name for name, writer in writers().items() if writer.suffix]
"""Formats of one file, which report their progress."""
VARIANTS = {
    "plain": {},
    "no biases": {"bias": False},
    "dropouts": {"embd_pdrop": 0.0, "attn_pdrop": 0.5, "resid_pdrop": 0.25},
    "GPT-1": {"norm": "post"},
    "GPT-1, narrow, no biases": {"norm": "post", "n_inner": 40, "bias": False},
    "untied": {"tie_word_embeddings": False},
    "inner width, epsilon": {"n_inner": 96, "layer_norm_epsilon": 1e-6},
    "windows": {"attention_windows": (0, 5)},
    "windows, no biases, untied": {
        "attention_windows": (0, 5), "bias": False, "tie_word_embeddings": False,
    },
    "relu": {"activation_function": "relu", "n_inner": 40},
    "exact gelu": {"activation_function": "gelu"},
    "odd width": {"n_embd": 33, "n_head": 3, "n_inner": 70, "tie_word_embeddings": False},
}  # fmt: skip
REFUSED = {
    "norm": "post", "attention_windows": (0, 5), "layer_norm_epsilon": 1e-5 / 2, "n_inner": 48,
    "tie_word_embeddings": False, "activation_function": "relu",
}  # fmt: skip


@pytest.fixture
def make(tokenizer):
    """A model that a writer takes, unless fields say otherwise."""

    def model_for(writer: Writer, **fields) -> GPT:
        required = {"activation_function": writer.program.activation, "n_layer": 2}
        return random_gpt(3, **{"vocab_size": len(tokenizer)} | required | fields)

    return model_for


@pytest.fixture
def write(tokenizer):
    """Write a model, with a tokenizer where the format holds one; return its path."""

    def write_as(name: str, model: GPT, directory: Path, **options) -> Path:
        writer = writers()[name]
        path = directory / f"model{writer.suffix}"
        if name == "gguf":
            options |= {"tokenizer": tokenizer}
            model.config = replace(model.config, eos_token_id=tokenizer.eos_token_id)
        writer.write(model, path, **{"precision": "fp32"} | options)
        return path

    return write_as


def can_hold(name: str, variant: str) -> bool:
    writer, fields = writers()[name], VARIANTS[variant]
    if name == "gguf" and not {"bias", "resid_pdrop"}.isdisjoint(fields):
        return False  # it holds zeros for missing biases, and no dropouts
    program = writer.program
    is_its = fields.get("activation_function") == program.activation
    return all(program.supports(f) or (f == "activation_function" and is_its) for f in fields)


CASES = [(name, variant) for name in writers() for variant in VARIANTS if can_hold(name, variant)]


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_a_model_and_its_config_come_back_bit_for_bit(name, variant, make, write, tmp_path):
    model = make(writers()[name], **VARIANTS[variant])
    loaded = load(write(name, model, tmp_path))
    ids = {"bos_token_id": None, "eos_token_id": None}
    assert replace(loaded.model.config, **ids) == replace(model.config, **ids)
    state = model.state_dict()
    assert loaded.model.state_dict().keys() == state.keys()
    for key, value in loaded.model.state_dict().items():
        assert torch.equal(value, state[key]), key


@pytest.mark.parametrize(
    ("name", "precision"),
    [(n, p) for n, w in writers().items() for p in ("fp16", "bf16") if p in w.precisions],
)
def test_sixteen_bit_files_load_with_rounded_weights(name, precision, make, write, tmp_path):
    model, dtype = make(writers()[name]), PRECISIONS[precision]
    rounded = load(write(name, model, tmp_path / "a", precision=precision), dtype=dtype).model
    model.to(dtype)
    native = load(write(name, model, tmp_path / "b", precision=precision), dtype=dtype).model
    for key, value in model.state_dict().items():
        assert torch.equal(rounded.state_dict()[key], value), key
        assert torch.equal(native.state_dict()[key], value), key


def test_gguf_holds_zeros_for_absent_biases(make, write, tmp_path):
    model = make(writers()["gguf"], bias=False)
    back = GPT.from_pretrained(write("gguf", model, tmp_path))
    ids = torch.randint(model.config.vocab_size, (2, 24))
    assert back.config.bias and not back.h[1].mlp.c_fc.bias.any()
    torch.testing.assert_close(back(ids), model(ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        (name, field)
        for name, writer in writers().items()
        for field in REFUSED
        if not writer.program.supports(field)
    ],
)
def test_architectures_a_program_lacks_are_refused_by_name(name, field, make, write, tmp_path):
    writer = writers()[name]
    model = make(writer, **{field: REFUSED[field]})
    with pytest.raises(UserError, match=rf"{field}=\S.* cannot be written") as error:
        write(name, model, tmp_path)
    assert writer.program.name in str(error.value)
    assert not list(tmp_path.iterdir())


CHANGED = {
    "vocab_size": 1103, "n_positions": 19, "n_embd": 24, "n_layer": 3, "n_head": 2, **REFUSED,
    "bias": False, "layer_norm_epsilon": 0.01, "embd_pdrop": 0.5, "attn_pdrop": 0.5,
    "resid_pdrop": 0.5, "bos_token_id": 3, "eos_token_id": 5,
}  # fmt: skip
"""Another value than GPT-2's of every field."""


def logits_of_onnx(path: Path, ids: torch.Tensor) -> torch.Tensor:
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    feeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": ids}
    feeds = {name: tensor.numpy() for name, tensor in feeds.items()}
    for entry in session.get_inputs():
        if entry.name not in feeds:
            feeds[entry.name] = np.zeros((1, entry.shape[1], 0, entry.shape[3]), np.float32)
    return torch.from_numpy(session.run(["logits"], feeds)[0])


def logits_of_transformers(path: Path, ids: torch.Tensor) -> torch.Tensor:
    if "TiedGPT" in (path / "config.json").read_text():
        return GPT.from_pretrained(path)(ids)
    return AutoModelForCausalLM.from_pretrained(path).eval()(ids).logits


PROGRAMS = {"onnx": logits_of_onnx, "transformers": logits_of_transformers}
"""Programs that read a file, beside tiedgpt."""


@pytest.mark.parametrize("field", GPTConfig.__dataclass_fields__)
@pytest.mark.parametrize("name", writers())
@torch.no_grad()
def test_every_field_is_computed_by_the_reader_of_a_format_or_refused(
    name, field, make, write, tmp_path
):
    writer, ids = writers()[name], torch.arange(17)[None]
    model = make(writer, **{field: CHANGED[field]}).eval()
    if not writer.program.supports(field):
        with pytest.raises(UserError, match=rf"{field}=.* cannot be written"):
            write(name, model, tmp_path)
        return
    path = write(name, model, tmp_path)
    logits = PROGRAMS.get(name, lambda path, ids: GPT.from_pretrained(path)(ids))(path, ids)
    torch.testing.assert_close(logits, model(ids), rtol=0, atol=5e-5)


@dataclass(frozen=True, kw_only=True)
class LaterConfig(GPTConfig):
    kind_of_norm: str = "layer"


@pytest.mark.parametrize("program", [*(w.program for w in writers().values()), PAGE])
def test_a_field_that_a_program_does_not_know_is_refused(program, make):
    model = make(writers()["gguf"])
    model.config = LaterConfig(**asdict(model.config))
    assert parameters_for(program, model, approximate_gelu=True)
    model.config = replace(model.config, kind_of_norm="rms")
    with pytest.raises(UserError, match="kind_of_norm='rms' cannot be written"):
        parameters_for(program, model, approximate_gelu=True)


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Parameter(torch.zeros(2, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, 2))


def adapt(model: GPT) -> None:
    model.h[1].attn.c_attn = LoRA(model.h[1].attn.c_attn)


def adapt_the_embedding(model: GPT) -> None:
    model.wte = LoRA(model.h[0].attn.c_attn)


def shard(model: GPT) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    finally:
        torch.distributed.destroy_process_group()


def narrow(model: GPT) -> None:
    mlp = model.h[1].mlp
    mlp.c_fc, mlp.c_proj = nn.Linear(32, 40), nn.Linear(40, 32)


NOT_PLAIN = {
    "an unmerged adapter": (adapt, r"h\.1\.attn\.c_attn\.\S+ belongs to an adapter: merge it"),
    "an adapter on the embedding": (adapt_the_embedding, r"wte\.\S+ belongs to an adapter"),
    "a shard": (shard, "is one process's shard: gather"),
    "a parametrization": (
        lambda model: parametrizations.weight_norm(model.h[0].mlp.c_fc),
        r"h\.0\.mlp\.c_fc\.parametrizations\.\S+ is parametrized",
    ),
    "a pruned matrix": (
        lambda model: prune.l1_unstructured(model.h[0].mlp.c_fc, "weight", 0.5),
        r"h\.0\.mlp\.c_fc\.weight_orig is pruned",
    ),
    "a narrower MLP": (narrow, r"h\.1\.mlp\.c_fc\.weight is \(40, 32\), its config says"),
    "another parameter": (
        lambda model: model.add_module("extra", nn.Linear(2, 2)),
        r"extra\.weight is not a GPT's",
    ),
    "a missing parameter": (
        lambda model: delattr(model.h[0].ln_1, "bias"),
        r"h\.0\.ln_1\.bias is missing",
    ),
    "more rows than the config says": (
        lambda model: setattr(model.wte, "weight", nn.Parameter(torch.zeros(999, 32))),
        r"wte\.weight is \(999, 32\)",
    ),
    "a wrapped layer": (
        lambda model: model.set_submodule("h.0.mlp.c_fc", nn.Sequential(nn.Linear(32, 128))),
        r"h\.0\.mlp\.c_fc\.0\.weight",
    ),
    "a head with a bias": (
        lambda model: setattr(model, "head", nn.Linear(32, model.config.vocab_size)),
        "a head of ",
    ),
    "a head that the config denies": (
        lambda model: setattr(model, "head", nn.Linear(32, model.config.vocab_size, bias=False)),
        r"disagree: use tie\(model\), untie",
    ),
    "a model without numbers": (lambda model: model.to("meta"), "has no data"),
}


@pytest.mark.parametrize("change", NOT_PLAIN)
@pytest.mark.parametrize("name", writers())
def test_modified_gpts_are_named_and_not_written(name, change, make, write, tmp_path):
    model = make(writers()[name])
    NOT_PLAIN[change][0](model)
    with pytest.raises(UserError, match=NOT_PLAIN[change][1]):
        write(name, model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [n for n, w in writers().items() if "fp16" in w.precisions])
def test_weights_beyond_float16_leave_the_old_file(name, make, write, tmp_path):
    model = make(writers()[name])
    with torch.no_grad():
        model.h[1].mlp.c_proj.weight[3, 4] = 1e5
    before = write(name, make(writers()[name]), tmp_path)
    file = before / "model.safetensors" if before.is_dir() else before
    sound = file.read_bytes()
    with pytest.raises(UserError, match=r"(mlp\.c_proj|ffn_down)\.weight .* 65,504"):
        write(name, model, tmp_path, precision="fp16")
    assert file.read_bytes() == sound and not list(tmp_path.glob("**/.*"))


@pytest.mark.parametrize("name", FILES)
def test_progress_ends_at_all_bytes(name, make, write, tmp_path):
    seen = []
    write(name, make(writers()[name]), tmp_path, progress=lambda *now: seen.append(now))
    done = [now for now, _ in seen]
    assert done == sorted(done) and {total for _, total in seen} == {done[-1]}


@pytest.mark.parametrize("name", FILES)
def test_a_failure_leaves_the_old_file(name, make, write, tmp_path):
    before = tmp_path / f"model{writers()[name].suffix}"
    before.write_bytes(b"before")

    def fill_the_disk(*_):
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(NoRoomError):
        write(name, make(writers()[name]), tmp_path, progress=fill_the_disk)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"before"]


@pytest.mark.parametrize("name", FILES)
def test_a_directory_is_not_replaced_by_a_file(name, make, write, tmp_path):
    (tmp_path / f"model{writers()[name].suffix}").mkdir()
    with pytest.raises(UserError, match="Is a directory"):
        write(name, make(writers()[name]), tmp_path)


@pytest.mark.parametrize("name", writers())
def test_disk_space_is_checked_first(name, make, write, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(NoRoomError):
        write(name, make(writers()[name]), tmp_path)
    assert not list(tmp_path.iterdir())


# Torch's wrappers leave names as they are.


def compile_eagerly(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def nest(model: GPT) -> None:
    model.h[1].mlp = compile_eagerly(model.h[1].mlp)
    model.h[1] = compile_eagerly(checkpoint_wrapper(model.h[1]))


def merge_what_was_added(model: GPT) -> None:
    layer = model.h[0].mlp.c_fc
    parametrizations.weight_norm(layer)
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    prune.l1_unstructured(model.h[1].mlp.c_fc, "weight", 0.5)
    prune.remove(model.h[1].mlp.c_fc, "weight")


WRAPPED = {
    "regional compilation": lambda model: model.set_submodule("h.0", compile_eagerly(model.h[0])),
    "activation checkpointing": lambda model: model.set_submodule(
        "h.2", checkpoint_wrapper(model.h[2])
    ),
    "nested wrappers": nest,
    "a shared layer": lambda model: model.set_submodule("h.2", model.h[0]),
    "a merged parametrization and a removed mask": merge_what_was_added,
}


@pytest.mark.parametrize("change", WRAPPED)
def test_a_wrapped_or_merged_model_is_written_as_it_computes(tiny, ids, tmp_path, change):
    WRAPPED[change](tiny)
    tiny.save_pretrained(tmp_path)
    peer, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        expected = GPT.from_pretrained(tmp_path)(ids)
        torch.testing.assert_close(peer.eval()(ids).logits, expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(tiny(ids), expected, rtol=0, atol=2e-5)
