"""Loading real files, and refusing bad ones."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tie.checkpoints import write_llmc
from tests.weights.conftest import with_head
from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.weights.load import CheckpointWarning, load


def assert_is(model: GPT, tiny: GPT) -> None:
    assert not model.training
    for name, parameter in tiny.state_dict().items():
        assert torch.equal(parameter, model.state_dict()[name]), name


def test_loading_draws_no_random_numbers_and_imports_no_compiler(saved):
    code = "import sys; from tiedgpt import GPT; GPT.from_pretrained(sys.argv[1]); "
    code += "sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, saved], check=True)


def with_masks(state):
    for layer in range(3):
        state[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 24, 24).tril()
        state[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)


def renamed(pattern: str, by: str):
    return lambda state: {re.sub(pattern, by, name): t for name, t in state.items()}


NAMES = {
    "no prefix": renamed(r"^transformer\.", ""),
    "mask buffers of old files": with_masks,
    "torch.compile": renamed("^", "_orig_mod."),
    "DDP": renamed("^", "module."),
    "DDP of torch.compile": renamed("^", "module._orig_mod."),
    "regional compilation": renamed(r"\.h\.1\.", ".h.1._orig_mod."),
    "the head's name alone": renamed(r"transformer\.wte", "lm_head"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_tied_model_is_read_under_other_names(rewrite, tiny, name):
    assert_is(GPT.from_pretrained(rewrite(tensors=NAMES[name])), tiny)


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


def test_a_run_directory_stands_for_the_model_in_it(saved, tiny, tmp_path):
    (tmp_path / "run").mkdir()
    saved.rename(tmp_path / "run" / "model")
    assert_is(GPT.from_pretrained(tmp_path / "run"), tiny)


def test_sizes_come_from_the_weights_if_the_config_disagrees(rewrite, tiny):
    path = rewrite(config={"n_ctx": 1024, "n_positions": 1024, "vocab_size": 50257})
    model = GPT.from_pretrained(path)
    assert (model.config.n_positions, model.config.vocab_size) == (24, 97)


def test_special_ids_outside_the_vocabulary_are_dropped_with_a_warning(rewrite):
    path = rewrite(config={"bos_token_id": 50256, "eos_token_id": 50256})
    with pytest.warns(UserWarning, match="eos_token_id=50256 outside"):
        model = GPT.from_pretrained(path)
    assert model.config.eos_token_id is None


def test_keys_that_change_nothing_are_kept_on_saving(rewrite, tmp_path):
    extra = {"summary_type": "cls_index", "task_specific_params": {"a": 1}, "use_cache": True}
    GPT.from_pretrained(rewrite(config=extra)).save_pretrained(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: written[key] for key in extra} == extra


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"quantization_config": {"bits": 8}}, "quantization_config"),
        ({"activation_function": "mish"}, "mish"),
        ({"model_type": "llama"}, "llama"),
    ],
)
def test_unsupported_config_values_are_refused_by_name(rewrite, config, named):
    with pytest.raises(UserError, match=named):
        GPT.from_pretrained(rewrite(config=config))


def test_arguments_supply_only_facts_missing_in_the_file(saved):
    with pytest.raises(UserError, match="contradicts the file"):
        GPT.from_pretrained(saved, n_head=8)
    with pytest.raises(UserError, match="contradicts"):
        GPT.from_pretrained(saved, vocab_size=50257)
    with pytest.raises(UserError, match="dtype"):
        GPT.from_pretrained(saved, dtype=torch.int8)
    with pytest.raises(UserError, match="no field"):
        GPT.from_pretrained(saved, heads=8)
    with pytest.raises(UserError, match="keep-input"):
        GPT.from_pretrained(saved, resolve="guess")
    model = GPT.from_pretrained(saved, attn_pdrop=0.0, resid_pdrop=0.3)
    assert (model.config.attn_pdrop, model.config.resid_pdrop) == (0.0, 0.3)


def test_a_classifiers_body_loads_tied(tmp_path):
    from transformers import GPT2Config, GPT2ForSequenceClassification

    sizes = {"vocab_size": 97, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    peer = GPT2ForSequenceClassification(GPT2Config(**sizes, **ids))
    peer.save_pretrained(tmp_path / "classifier")
    with pytest.raises(UserError, match=r"score\.weight.*tiedgpt\.heads"):
        GPT.from_pretrained(tmp_path / "classifier")
    peer.transformer.save_pretrained(tmp_path / "body")
    body = GPT.from_pretrained(tmp_path / "body")
    assert body.head is None and torch.equal(body.wte.weight, peer.transformer.wte.weight)


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


def test_notes_about_a_file_are_warnings(rewrite):
    with pytest.warns(CheckpointWarning, match="are equal: tied"):
        GPT.from_pretrained(rewrite(tensors=with_head()))


# When a file holds two matrices: the config's claim comes first.


def test_a_resolution_that_cannot_apply_is_refused_and_never_ignored(rewrite, saved, tiny):
    with pytest.raises(UserError, match="holds one matrix"):
        GPT.from_pretrained(saved, resolve="untie")
    path = rewrite(tensors=with_head(2.0), config={"tie_word_embeddings": False})
    with pytest.raises(UserError, match="holds two matrices"):
        GPT.from_pretrained(path, resolve="tie")
    assert_is(GPT.from_pretrained(path, resolve="keep-input"), tiny)
    assert GPT.from_pretrained(path, resolve="keep-output").head is None


def test_transformers_aliases_of_config_keys_are_read(rewrite):
    path = rewrite(config={"n_head": "REMOVE", "num_attention_heads": 8})
    assert GPT.from_pretrained(path).config.n_head == 8


def test_a_huge_layer_number_is_refused_at_once(rewrite):
    def far(state):
        state["transformer.h.2000000.ln_1.weight"] = torch.ones(32)

    with pytest.raises(CorruptInputError):
        GPT.from_pretrained(rewrite(tensors=far))


def test_saving_again_rewrites_our_card_and_keeps_a_users(tiny, saved):
    card = saved / "README.md"
    assert "42,048" in card.read_text()
    bigger = GPT(type(tiny.config)(**{**vars(tiny.config), "n_layer": 4}))
    bigger.save_pretrained(saved)
    assert f"{bigger.config.parameter_count():,}" in card.read_text()
    card.write_text("mine")
    tiny.save_pretrained(saved)
    assert card.read_text() == "mine"


# Bad input: one line of our own, the right kind, nothing half-done.


def test_tensors_without_an_embedding_are_no_gpt(rewrite):
    with pytest.raises(CorruptInputError, match="no GPT"):
        GPT.from_pretrained(rewrite(tensors=renamed(r"wte", "w")))
    with pytest.raises(CorruptInputError, match="no GPT"):
        GPT.from_pretrained(rewrite(tensors=lambda state: {"x": torch.ones(3)}))


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"n_layer": 10**9}, CorruptInputError),
        ({"n_layer": 2}, CorruptInputError),
        ({"n_embd": 64}, CorruptInputError),
        ({"n_head": 5}, CorruptInputError),
        ({"n_head": "4"}, CorruptInputError),
        ({"n_inner": 10**12}, CorruptInputError),
        ({"layer_norm_epsilon": 10**400}, CorruptInputError),
        ({"tie_word_embeddings": "false"}, CorruptInputError),
        ({"num_attention_heads": 2}, CorruptInputError),
        ({"activation_function": ["gelu"]}, UserError),
        ({"model_type": {}}, UserError),
    ],
)
def test_false_configs_are_refused_before_allocation(rewrite, config, error):
    with pytest.raises(error):
        GPT.from_pretrained(rewrite(config=config))


def test_integer_tensors_in_quantized_files_are_refused(rewrite):
    def quantized(state):
        state["transformer.wte.weight"] = torch.ones(97, 32, dtype=torch.int8)

    with pytest.raises(UserError, match="quantized"):
        GPT.from_pretrained(rewrite(tensors=quantized))


@pytest.mark.parametrize("content", ["", "[]", "{", "nul\0", "\xff"])
def test_a_damaged_config_is_named(saved, content):
    (saved / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(TiedGPTError, match=r"config\.json|n_head|GPT"):
        GPT.from_pretrained(saved)


def test_missing_directories_and_names_are_refused(tmp_path):
    for _ in range(2):
        with pytest.raises(UserError, match="no weights"):
            GPT.from_pretrained(tmp_path)
        (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="does not exist"):
        GPT.from_pretrained(tmp_path / "no" / "such" / "place")


def test_a_failed_save_leaves_the_old_files_intact(tiny, saved, monkeypatch):
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    from tiedgpt.weights.formats.transformers import writer as save_module

    def cut_off(path, tensors, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save_module, "write_safetensors", cut_off)
    with pytest.raises(TiedGPTError) as error:
        tiny.save_pretrained(saved)
    assert error.value.exit_code == 4
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before


def test_a_contradiction_in_a_config_names_its_directory(tiny, tmp_path):
    tiny.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for wrong in ({"hidden_size": 7}, {"model_type": "bloom"}, {"activation_function": "tanhh"}):
        (tmp_path / "config.json").write_text(json.dumps(config | wrong))
        with pytest.raises(TiedGPTError, match=re.escape(str(tmp_path))):
            load(tmp_path)


def test_a_pipe_is_not_opened_for_a_tokenizer(tmp_path):
    os.mkfifo(tmp_path / "t.pt")
    with pytest.raises(UserError, match=r"t\.pt"):
        Tokenizer.from_pretrained(tmp_path / "t.pt")


@pytest.fixture
def as_torch(saved: Path, tmp_path: Path):
    """Write a directory of torch.save with the model's tensors, some of them changed."""

    def write(changes: dict, *, config: dict | None = None, zipped: bool = True) -> Path:
        state = load_file(saved / "model.safetensors")
        state |= {name: change(state) for name, change in changes.items()}
        values = json.loads((saved / "config.json").read_text()) | (config or {})
        directory = tmp_path / "torch"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(values))
        torch.save(state, directory / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        return directory

    return write


@pytest.mark.parametrize("given", [{}, {"resolve": "untie"}])
def test_two_names_of_one_storage_train_separately_when_untied(as_torch, given):
    path = as_torch(
        {"lm_head.weight": lambda state: state["transformer.wte.weight"]},
        config={} if given else {"tie_word_embeddings": False},
    )
    model = GPT.from_pretrained(path, **given)
    with torch.no_grad():
        model.head.weight.zero_()
    assert model.wte.weight.any()


def test_expanded_rows_do_not_allocate_their_claimed_size(as_torch):
    wide = {"transformer.wte.weight": lambda _: torch.ones(1, 32).expand(50_000_000, 32)}
    with pytest.raises(CorruptInputError, match=r"wte.weight of shape \(50000000, 32\)"):
        GPT.from_pretrained(as_torch(wide))


class _Grows:
    def __reduce__(self):
        return bytearray, (1 << 33,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_makes_bytes_of_any_number_is_refused(as_torch, zipped):
    with pytest.raises(CorruptInputError, match="bytearray"):
        GPT.from_pretrained(as_torch({"more": lambda _: _Grows()}, zipped=zipped))


@pytest.mark.parametrize("n_items", [2, 5000])
def test_a_pickle_with_an_unhashably_deep_key_is_refused(tmp_path, n_items):
    """Keys of tuples that hold a tuple twice, 40 deep, or 5000 times, 3 deep."""
    path = tmp_path / "empty.pt"
    torch.save({}, path)
    key = b"K\x00\x85q\x00"
    for _ in range(40 if n_items == 2 else 3):
        key += b"(" + b"h\x00" * n_items + b"tq\x00"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "hostile.pt", "w") as new:
        for name in old.namelist():
            hostile = b"\x80\x02}" + key + b"K\x00s."
            new.writestr(name, hostile if name.endswith("data.pkl") else old.read(name))
    with pytest.raises(CorruptInputError, match="tuples inside tuples"):
        GPT.from_pretrained(tmp_path / "hostile.pt")


def test_a_files_own_metadata_overrides_an_adjacent_config(tmp_path):
    write_llmc(tmp_path / "model.bin", 3, T=24, V=97, L=1, H=4, C=32, Vp=128)
    (tmp_path / "config.json").write_text('{"num_heads": 2, "vocab_size": 5}')
    assert GPT.from_pretrained(tmp_path / "model.bin").config.n_head == 4


def test_long_names_are_shortened_in_messages(rewrite):
    with pytest.raises(CorruptInputError) as caught:
        GPT.from_pretrained(rewrite(tensors=lambda state: state | {"x" * 100_000: torch.zeros(1)}))
    assert len(str(caught.value)) < 1000


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
