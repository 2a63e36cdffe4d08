"""What is written for llm.c is what its readers expect, byte for byte, and reads back as it was."""

import numpy as np

from tests.weights.llmc_files import ORDER, read_checkpoint, to_bfloat16
from tiedgpt import GPT, GPTConfig
from tiedgpt.weights.formats.llmc import write as write_llmc


def test_float32_is_what_llmc_reads(tiny, tmp_path):
    write_llmc(tiny, tmp_path / "model.bin")
    sizes, arrays = read_checkpoint(tmp_path / "model.bin")
    assert sizes == {"T": 24, "V": 97, "L": 3, "H": 4, "C": 32, "Vp": 128}
    state = {name: parameter.detach().numpy() for name, parameter in tiny.named_parameters()}
    assert not arrays["wte"][97:].any()
    assert np.array_equal(arrays["wte"][:97], state["wte.weight"])
    for theirs, units, ours in ORDER[1:]:
        expected = state[ours] if not units.startswith("L") else np.stack(
            [state[f"h.{layer}.{ours}"] for layer in range(3)]
        )  # fmt: skip
        assert np.array_equal(arrays[theirs], expected), theirs


def test_bfloat16_is_rounded_to_the_nearest(tiny, tmp_path):
    write_llmc(tiny, tmp_path / "model.bin", precision="bf16")
    _, arrays = read_checkpoint(tmp_path / "model.bin")
    expected = to_bfloat16(tiny.wpe.weight.detach().numpy())[1]
    assert np.array_equal(arrays["wpe"], expected)


def test_one_w_is_in_the_file(tiny, tmp_path):
    write_llmc(tiny, tmp_path / "model.bin")
    numbers = tiny.config.parameter_count() + (128 - 97) * 32
    assert (tmp_path / "model.bin").stat().st_size == 1024 + 4 * numbers


def test_a_vocabulary_of_whole_blocks_gets_no_padding(tmp_path):
    model = GPT(GPTConfig(vocab_size=256, n_positions=4, n_embd=8, n_layer=1, n_head=2))
    write_llmc(model, tmp_path / "model.bin")
    assert read_checkpoint(tmp_path / "model.bin")[0]["Vp"] == 256
