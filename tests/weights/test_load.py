"""Any checkpoint opens and loads alike; no code in a pickle runs; a false one is refused."""

import errno
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tie.checkpoints import (
    break_disk,
    gpt_state,
    matrix,
    write_gguf,
    write_layout,
    write_llmc,
    write_onnx,
)
from tests.weights.conftest import with_head
from tests.weights.fixtures.make_tensorflow import DIRECTORY as TENSORFLOW
from tests.weights.raw_files import safetensors_entry, safetensors_file
from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.tie import audit, ledger
from tiedgpt.weights.load import CheckpointWarning, load
from tiedgpt.weights.registry import writers
from tiedgpt.weights.source import open_checkpoint
from tiedgpt.weights.tensors import by_storage

# Opening


def test_every_format_is_recognised_by_its_content(tmp_path):
    w = torch.from_numpy(matrix())
    save_file({"wte.weight": w}, tmp_path / "a")
    torch.save({"wte.weight": w}, tmp_path / "b")
    torch.save({"wte.weight": w}, tmp_path / "c", _use_new_zipfile_serialization=False)
    write_gguf(tmp_path / "d", {"token_embd.weight": matrix()})
    write_onnx(tmp_path / "e", "one", names=("wte.weight", ""))
    formats = ["safetensors", "torch", "torch", "GGUF", "ONNX"]
    for name, container in zip("abcde", formats, strict=True):
        checkpoint = open_checkpoint(tmp_path / name)
        assert checkpoint.container == container
        tensor = next(
            t for n, t in checkpoint.tensors.items() if n in ("wte.weight", "token_embd.weight")
        )
        assert (tensor.shape, tensor.dtype, tensor.n_bytes) == ((97, 32), "float32", 97 * 32 * 4)
        assert np.array_equal(tensor.rows(90, 97), matrix()[90:])
        assert np.array_equal(tensor.transpose().rows(3, 9), matrix().T[3:9])


def test_views_in_a_torch_file_are_one_storage(tmp_path):
    w = torch.randn(10, 4)
    torch.save({"a": w, "b": w.T, "c": w[2:], "d": w.clone()}, tmp_path / "x.pt")
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    groups = by_storage(checkpoint.tensors.values())
    assert [[tensor.name for tensor in group] for group in groups] == [["a", "b", "c"], ["d"]]
    assert np.array_equal(checkpoint.tensors["b"].rows(0, 4), w.T.numpy())


@pytest.mark.parametrize(("name", "save"), [("a.pt", torch.save), ("a.safetensors", save_file)])
def test_a_file_cut_short_while_it_is_read_is_an_error(name, save, tmp_path):
    save({"w": torch.zeros(2000, 1000)}, tmp_path / name)
    stored = open_checkpoint(tmp_path / name).tensors["w"]
    assert not stored.rows(0, 2).any()
    (tmp_path / name).write_bytes(b"PK")  # in place, as a program that saves again does
    with pytest.raises(CorruptInputError, match=f"{name} was cut off"):
        stored.tensor()


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_pickle_never_runs(tmp_path, legacy):
    state = {"wte.weight": torch.ones(4, 2), "x": Canary(tmp_path / "dead")}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    (tmp_path / "b.bin").write_bytes(pickle.dumps(Canary(tmp_path / "dead")))
    for name in ("a.pt", "b.bin"):
        for look in (audit, ledger):
            with pytest.raises(CorruptInputError, match=name) as caught:
                look(tmp_path / name)
            assert "\n" not in str(caught.value)
    assert not (tmp_path / "dead").exists()


def test_a_directory_of_several_files_is_ambiguous(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, {"token_embd.weight": matrix()})
    with pytest.raises(UserError, match=r"2 files of weights \(a\.gguf, b\.gguf\): name one"):
        open_checkpoint(tmp_path)
    (tmp_path / "b.gguf").unlink()
    for magic in (20240327, 20240328, 20240520):  # llm.c's debug states, tokenizers and shards
        (tmp_path / f"{magic}.bin").write_bytes(magic.to_bytes(4, "little") + bytes(1020))
    assert open_checkpoint(tmp_path).container == "GGUF"


def test_expanded_and_complex_tensors_are_read_or_refused(tmp_path):
    w = torch.randn(32).expand(97, 32)
    torch.save({"wte.weight": w, "c": torch.zeros(3, 4, dtype=torch.complex128)}, tmp_path / "a.pt")
    checkpoint = open_checkpoint(tmp_path / "a.pt")
    assert np.array_equal(checkpoint.tensors["wte.weight"].rows(5, 7), w[5:7].numpy())
    assert audit(tmp_path / "a.pt").verdict == "tied"
    torch.save({"wte.weight": w.to(torch.complex128), "lm_head.weight": w}, tmp_path / "b.pt")
    assert "not comparable" in [finding.kind for finding in audit(tmp_path / "b.pt").findings]


def test_a_name_of_half_a_character_is_escaped(tmp_path):
    torch.save({"wte.\ud800": torch.zeros(2, 3)}, tmp_path / "a.pt")
    assert [*open_checkpoint(tmp_path / "a.pt").tensors] == ["wte.\\ud800"]


def test_a_hugging_face_directory_loads_without_other_formats_modules_and_a_compiler(saved):
    program = """
import sys
from tiedgpt import GPT
GPT.from_pretrained(sys.argv[1])
print(*sorted(name for name in sys.modules if name.startswith("tiedgpt.weights.")))
sys.exit("torch._dynamo" in sys.modules)  # which drawing random numbers would import
"""
    command = [sys.executable, "-c", program, str(saved)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    others = {"gguf", "onnx", "llmc", "packed", "torch_file", "nanogpt", "state_dict"}
    imported = {name.removeprefix("tiedgpt.weights.") for name in done.stdout.split()}
    imported = {name.removeprefix("formats.") for name in imported}
    assert {"containers", "transformers"} <= imported
    assert not imported & others


@pytest.fixture
def unreadable(monkeypatch):
    """Refuse to open files of these names, since root may read files of any mode."""

    def refuse(*names: str) -> None:
        original_open = Path.open

        def opened(self, *arguments, **options):
            if self.name in names:
                raise PermissionError(errno.EACCES, "Permission denied", str(self))
            return original_open(self, *arguments, **options)

        monkeypatch.setattr(Path, "open", opened)

    return refuse


def test_a_file_that_holds_no_weights_need_not_be_readable(tmp_path, unreadable):
    write_onnx(tmp_path / "a.onnx", "one")
    (tmp_path / "secret").write_text("mine")
    unreadable("secret")
    assert open_checkpoint(tmp_path).container == "ONNX"


def test_weights_that_may_not_be_read_are_named(tmp_path, unreadable):
    for name in ("a.pt", "a.index"):
        (tmp_path / name).write_text("mine")
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "a.safetensors")
    unreadable("a.pt", "a.index", "a.safetensors")
    for name in ("a.pt", "a.index", "a.safetensors"):
        with pytest.raises(UserError, match=f"{name}: cannot be read.*Permission denied"):
            open_checkpoint(tmp_path / name)


def test_every_dtype_of_safetensors_is_known(tmp_path):
    for dtype, size in {"C64": 8, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1}.items():
        header = {"a": safetensors_entry([1], 0, size, dtype)}
        (tmp_path / "a.safetensors").write_bytes(safetensors_file(header, bytes(size)))
        assert open_checkpoint(tmp_path / "a.safetensors").tensors["a"].n_bytes == size


# Loading


def assert_is(model: GPT, tiny: GPT) -> None:
    assert not model.training
    for name, parameter in tiny.state_dict().items():
        assert torch.equal(parameter, model.state_dict()[name]), name


def renamed(pattern: str, by: str):
    return lambda state: {re.sub(pattern, by, name): t for name, t in state.items()}


def test_a_lone_file_uses_the_adjacent_config_or_needs_n_head(saved, tiny, tmp_path):
    assert_is(GPT.from_pretrained(saved / "model.safetensors"), tiny)
    lone = tmp_path / "lone" / "weights.safetensors"
    lone.parent.mkdir()
    lone.write_bytes((saved / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match="give n_head"):
        GPT.from_pretrained(lone)
    model = GPT.from_pretrained(lone, n_head=4)
    assert model.config == tiny.config or model.config.n_head == 4
    assert_is(model, tiny)


def test_sizes_come_from_the_weights_if_the_config_disagrees(rewrite, tiny):
    path = rewrite(config={"n_ctx": 1024, "n_positions": 1024, "vocab_size": 50257})
    model = GPT.from_pretrained(path)
    assert (model.config.n_positions, model.config.vocab_size) == (24, 97)


def test_special_ids_outside_the_vocabulary_are_dropped_with_a_warning(rewrite):
    path = rewrite(config={"bos_token_id": [50256, 0], "eos_token_id": 97})
    with pytest.warns(UserWarning, match="bos_token_id=50256 and eos_token_id=97 outside"):
        model = GPT.from_pretrained(path)
    assert (model.config.bos_token_id, model.config.eos_token_id) == (0, None)


def test_keys_that_change_nothing_are_kept_on_saving(rewrite, tmp_path):
    extra = {"summary_type": "cls_index", "task_specific_params": {"a": 1}, "use_cache": True}
    GPT.from_pretrained(rewrite(config=extra)).save_pretrained(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: written[key] for key in extra} == extra


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("tied", [True, False])
def test_our_bare_state_dict_loads_with_its_assumptions_reported(tmp_path, norm, tied):
    sizes = {"vocab_size": 97, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model = GPT(GPTConfig(**sizes, norm=norm, tie_word_embeddings=tied)).eval()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with pytest.warns(CheckpointWarning, match=r"state dict of tiedgpt.*gelu_new"):
        again = GPT.from_pretrained(tmp_path / "model.pt", n_head=4)
    assert again.config == model.config
    assert_is(again, model)
    with pytest.raises(UserError, match="n_embd must be a multiple of n_head=5"):
        GPT.from_pretrained(tmp_path / "model.pt", n_head=5)
    given = load(tmp_path / "model.pt", n_head=4, activation_function="gelu_new")
    assert given.layout == "torch, tiedgpt state dict" and not given.notes


def test_transformers_aliases_of_config_keys_are_read(rewrite):
    path = rewrite(config={"n_head": "REMOVE", "num_attention_heads": 8})
    assert GPT.from_pretrained(path).config.n_head == 8


def test_saving_again_rewrites_our_card_and_keeps_a_users(tiny, saved):
    card = saved / "README.md"
    assert "42,048" in card.read_text()
    bigger = GPT(type(tiny.config)(**{**vars(tiny.config), "n_layer": 4}))
    bigger.save_pretrained(saved)
    assert f"{bigger.config.parameter_count():,}" in card.read_text()
    card.write_text("mine")
    tiny.save_pretrained(saved)
    assert card.read_text() == "mine"


@pytest.mark.parametrize("content", ["", "[]", "{", "nul\0", "\xff"])
def test_a_damaged_config_is_named(saved, content):
    (saved / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(TiedGPTError, match=r"config\.json|n_head|GPT"):
        GPT.from_pretrained(saved)


def test_a_failed_save_leaves_the_old_files_intact(tiny, saved, monkeypatch):
    before = {file.name: file.read_bytes() for file in saved.iterdir()}

    def fill_the_disk(block):
        if len(block) > 10_000:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match=r"config\.json is a file: give a directory"):
        tiny.save_pretrained(saved / "config.json")
    break_disk(monkeypatch, fill_the_disk)
    with pytest.raises(TiedGPTError) as error:
        tiny.save_pretrained(saved)
    assert error.value.exit_code == 4
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before


def test_a_pipe_is_not_opened_for_a_tokenizer(tmp_path):
    os.mkfifo(tmp_path / "t.pt")
    with pytest.raises(UserError, match=r"t\.pt"):
        Tokenizer.from_pretrained(tmp_path / "t.pt")


@pytest.mark.parametrize(("claim", "given"), [(False, {}), (None, {"resolve": "untie"})])
def test_two_names_of_one_storage_train_separately_when_untied(tmp_path, claim, given):
    write_layout(tmp_path, "torch", gpt_state("views"), beside=claim)
    model = GPT.from_pretrained(tmp_path, **given)
    with torch.no_grad():
        model.head.weight.zero_()
    assert model.wte.weight.any()


def test_expanded_rows_do_not_allocate_their_claimed_size(tmp_path):
    wide = {"wte.weight": torch.ones(1, 32).expand(50_000_000, 32)}
    write_layout(tmp_path, "torch", gpt_state("one") | wide)
    with pytest.raises(CorruptInputError, match=r"wte.weight of shape \(50000000, 32\)"):
        GPT.from_pretrained(tmp_path)


def test_a_files_own_metadata_overrides_an_adjacent_config(tmp_path):
    write_llmc(tmp_path / "model.bin", 3, T=24, V=97, L=1, H=4, C=32, Vp=128)
    (tmp_path / "config.json").write_text('{"num_heads": 2, "vocab_size": 5}')
    assert GPT.from_pretrained(tmp_path / "model.bin").config.n_head == 4


def test_weights_rounded_to_wtes_dtype_are_reported_and_kept_with_dtype(rewrite):
    def halved(state):
        state["transformer.wte.weight"] = state["transformer.wte.weight"].half()

    path = rewrite(tensors=halved)
    loaded = load(path)
    assert loaded.model.wpe.weight.dtype == torch.float16
    assert any("were rounded to float16, wte.weight's type" in note for note in loaded.notes)
    exact = load_file(path / "model.safetensors")["transformer.wpe.weight"]
    exact_model = load(path, dtype=torch.float32)
    assert not exact_model.notes and torch.equal(exact_model.model.wpe.weight, exact)


# Refusals


WTE = "transformer.wte.weight"
UNTIED = {"tie_word_embeddings": False}
REFUSED = [
    (CorruptInputError, "no GPT", {"tensors": renamed("wte", "w")}, {}),
    (CorruptInputError, "no GPT", {"tensors": lambda state: {"x": torch.ones(3)}}, {}),
    (
        CorruptInputError, "is not a GPT",
        {"tensors": lambda s: s | {"transformer.h.2000000.ln_1.weight": torch.ones(32)}}, {},
    ),
    (CorruptInputError, "xxx", {"tensors": lambda s: s | {"x" * 100_000: torch.zeros(1)}}, {}),
    (
        UserError, "quantized",
        {"tensors": lambda state: state | {WTE: torch.ones(97, 32, dtype=torch.int8)}}, {},
    ),
    (UserError, "n_head=8 contradicts the file", {}, {"n_head": 8}),
    (UserError, "vocab_size=50257 contradicts", {}, {"vocab_size": 50257}),
    (UserError, "dtype", {}, {"dtype": torch.int8}),
    (UserError, "no field", {}, {"heads": 8}),
    (UserError, "keep-input", {}, {"resolve": "guess"}),
    (UserError, "holds one matrix", {}, {"resolve": "untie"}),
    (
        UserError, "holds two matrices", {"tensors": with_head(2.0), "config": UNTIED},
        {"resolve": "tie"},
    ),
]  # fmt: skip
"""The error, its words, the changes of a saved model, and the arguments of loading."""


@pytest.mark.parametrize(("error", "says", "changes", "options"), REFUSED)
def test_a_file_or_an_argument_that_does_not_fit_is_refused(error, says, changes, options, rewrite):
    with pytest.raises(error, match=says) as refused:
        GPT.from_pretrained(rewrite(**changes), **options)
    assert len(str(refused.value)) < 1000


def test_a_resolution_and_facts_that_the_file_does_not_hold_are_taken(rewrite, tiny):
    path = rewrite(tensors=with_head(2.0), config=UNTIED)
    assert_is(GPT.from_pretrained(path, resolve="keep-input"), tiny)
    assert GPT.from_pretrained(path, resolve="keep-output").head is None
    model = GPT.from_pretrained(path, attn_pdrop=0.0, resid_pdrop=0.3)
    assert (model.config.attn_pdrop, model.config.resid_pdrop) == (0.0, 0.3)


def test_a_source_that_holds_no_weights_says_what_to_do(tmp_path):
    for _ in range(2):
        with pytest.raises(UserError, match="no weights"):
            GPT.from_pretrained(tmp_path)
        (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="holds no weights: name the directory"):
        open_checkpoint(tmp_path / "config.json")
    with pytest.raises(UserError, match="does not exist"):
        GPT.from_pretrained(tmp_path / "no" / "such" / "place")
    for source in ({"wte.weight": torch.zeros(2, 3)}, 3, None):
        with pytest.raises(UserError, match="must be a path or a hub name, got"):
            open_checkpoint(source)


PACKAGES = {
    "gguf": lambda home: write_gguf(home / "a.gguf", {"w": matrix()}, kind="Q8_0"),
    "onnx": lambda home: write_onnx(home / "a.onnx", "one"),
    "google_crc32c": lambda home: TENSORFLOW / "gpt2" / "model.ckpt.index",
}
"""A package of the extra, and a file that is read with it."""


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_package_is_named_with_its_extra(package, tiny, tmp_path, monkeypatch):
    path = PACKAGES[package](tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    says = rf"needs the package {package} .*pip install 'tiedgpt\[formats\]'"
    with pytest.raises(UserError, match=says):
        for tensor in open_checkpoint(path).tensors.values():
            tensor.rows(0, 1)
    if package in writers():
        with pytest.raises(UserError, match=says):
            writers()[package].write(tiny, tmp_path / "b", precision="fp32", tokenizer=None)
