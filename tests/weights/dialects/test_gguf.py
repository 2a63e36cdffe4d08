"""GGUF files of gpt2, as llama.cpp's library writes them, are loaded; what is none is refused."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiedgpt import GPT
from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.weights.dialects.gguf import to_ours, to_theirs
from tiedgpt.weights.load import load
from tiedgpt.weights.names import shapes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gguf


def their_file(
    path: Path,
    model: GPT,
    kind: str = "F32",
    *,
    architecture="gpt2",
    leave=(),
    pairs=None,
    more=None,
) -> Path:
    """Write a model as their converter does, with their library; `kind` holds for matrices."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    plain = {
        "add_context_length": config.n_positions,
        "add_embedding_length": config.n_embd,
        "add_block_count": config.n_layer,
        "add_feed_forward_length": config.inner_dim,
        "add_head_count": config.n_head,
        "add_layer_norm_eps": config.layer_norm_epsilon,
    }
    for name, value in plain.items():
        if name not in leave:
            getattr(writer, name)(value)
    for name, value in (pairs or {}).items():
        getattr(writer, name)(value)
    state = {to_theirs(name): t.detach().numpy() for name, t in model.named_parameters()}
    for name, array in (state | (more or {})).items():
        if name in leave:
            continue
        vector = array.ndim == 1 or name == "position_embd.weight"
        ggml = gguf.GGMLQuantizationType["F32" if vector else kind]
        writer.add_tensor(name, gguf.quants.quantize(array, ggml), raw_dtype=ggml)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_their_file_is_loaded_bit_for_bit(tiny, tmp_path):
    loaded = load(their_file(tmp_path / "a.gguf", tiny))
    assert loaded.model.head is None
    assert loaded.model.config.n_head == tiny.config.n_head
    assert loaded.model.config.layer_norm_epsilon == 1e-5
    for name, theirs in tiny.named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), theirs), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_smaller_types_are_read_as_their_library_reads_them(kind, tiny, ids, tmp_path):
    path = their_file(tmp_path / "a.gguf", tiny, kind)
    model = GPT.from_pretrained(path, dtype=torch.float32)
    for tensor in gguf.GGUFReader(path).tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        ours = model.get_parameter(to_ours(tensor.name)).detach().numpy()
        assert np.array_equal(ours, expected.reshape(ours.shape)), tensor.name
    wanted = {"F16": torch.float16, "BF16": torch.bfloat16, "Q8_0": torch.float32}[kind]
    assert GPT.from_pretrained(path).wte.weight.dtype is wanted
    assert torch.allclose(model(ids), tiny(ids), rtol=0, atol=1.5)


def test_what_was_quantized_is_told(tiny, tmp_path):
    assert any("Q8_0" in note for note in load(their_file(tmp_path / "a", tiny, "Q8_0")).notes)
    assert load(their_file(tmp_path / "b", tiny)).notes == ()


def test_a_second_equal_matrix_is_tied_and_told(tiny, tmp_path):
    head = {"output.weight": tiny.wte.weight.detach().numpy()}
    loaded = load(their_file(tmp_path / "a.gguf", tiny, more=head))
    assert loaded.model.head is None
    assert any("equal" in note for note in loaded.notes)


def test_a_second_other_matrix_needs_a_word(tiny, tmp_path):
    head = {"output.weight": tiny.wte.weight.detach().numpy() + 1}
    path = their_file(tmp_path / "a.gguf", tiny, more=head)
    with pytest.raises(CorruptInputError, match="resolve"):
        GPT.from_pretrained(path)
    model = GPT.from_pretrained(path, resolve="untie")
    assert torch.equal(model.head.weight, tiny.wte.weight + 1)


def test_other_architectures_are_refused_by_name(tiny, tmp_path):
    for name in ("llama", "gptneox", "starcoder"):
        with pytest.raises(UserError, match=name):
            GPT.from_pretrained(their_file(tmp_path / name, tiny, architecture=name))


def test_other_quantizations_are_refused_with_what_to_do(tiny, tmp_path):
    with pytest.raises(UserError, match=r"(?s)token_embd\.weight is Q4_0.*llama-quantize"):
        GPT.from_pretrained(their_file(tmp_path / "a.gguf", tiny, "Q4_0"))


def test_what_attends_otherwise_is_refused(tiny, tmp_path):
    for pairs, named in (
        ({"add_head_count_kv": 2}, "head_count_kv=2"),
        ({"add_key_length": 16}, "key_length=16"),
        ({"add_causal_attention": False}, "causal=False"),
    ):
        with pytest.raises(UserError, match=named):
            GPT.from_pretrained(their_file(tmp_path / named, tiny, pairs=pairs))
    same = {"add_head_count_kv": 4, "add_key_length": 8, "add_causal_attention": True}
    assert GPT.from_pretrained(their_file(tmp_path / "same", tiny, pairs=same))


def test_the_number_of_heads_is_asked_for_and_never_guessed(tiny, ids, tmp_path):
    path = their_file(tmp_path / "a.gguf", tiny, leave=("add_head_count",))
    with pytest.raises(UserError, match="n_head"):
        GPT.from_pretrained(path)
    assert torch.equal(GPT.from_pretrained(path, n_head=4)(ids), tiny(ids))


def test_missing_and_foreign_tensors_are_named(tiny, tmp_path):
    path = their_file(tmp_path / "a", tiny, leave=("blk.1.ffn_up.bias",))
    with pytest.raises(CorruptInputError, match=r"h\.1\.mlp\.c_fc\.bias is missing"):
        GPT.from_pretrained(path)
    more = {"rope_freqs.weight": np.ones(4, np.float32)}
    with pytest.raises(CorruptInputError, match=r"rope_freqs\.weight is not a GPT's"):
        GPT.from_pretrained(their_file(tmp_path / "b", tiny, more=more))
    more = {"wte.weight": np.ones((97, 32), np.float32)}
    with pytest.raises(CorruptInputError, match=r"wte\.weight twice"):
        GPT.from_pretrained(their_file(tmp_path / "c", tiny, more=more))


def test_sizes_that_are_none_are_refused(tiny, tmp_path):
    path = their_file(tmp_path / "a", tiny, leave=("add_head_count",), pairs={"add_head_count": 0})
    with pytest.raises(CorruptInputError, match="head_count=0"):
        GPT.from_pretrained(path)


def test_names_there_and_back_and_they_are_theirs(tiny_config):
    names = gguf.TENSOR_NAMES
    of_gpt2 = {
        names[tensor].format(bid=bid)
        for tensor in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.GPT2]
        for bid in range(tiny_config.n_layer)
    }
    theirs = {name: to_theirs(name) for name in [*shapes(tiny_config), "head.weight"]}
    assert {name.rpartition(".")[0] for name in theirs.values()} == of_gpt2
    assert all(to_ours(name) == ours for ours, name in theirs.items())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_changed_and_cut_files_give_our_error_or_a_model(tiny, tmp_path, data):
    path = tmp_path / "a.gguf"
    if not path.exists():
        their_file(path, tiny)
    whole = bytearray(path.read_bytes())
    header = len(whole) - sum(p.numel() for p in tiny.parameters()) * 4
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, header))] = data.draw(st.integers(0, 255))
    size = data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))
    (tmp_path / "b.gguf").write_bytes(whole[:size])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ids outside the vocabulary
        try:
            GPT.from_pretrained(tmp_path / "b.gguf")
        except TiedGPTError:
            pass
