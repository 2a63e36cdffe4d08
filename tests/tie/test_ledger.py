"""The ledger counts by storage: in memory, and in files without building a model."""

import copy
import json

import pytest
import torch
from torch import nn

from tests.tie.checkpoints import (
    HEAD,
    SHAPE,
    WTE,
    D,
    V,
    fresh_head,
    matrix,
    save,
    their_gpt2,
    write_gguf,
    write_onnx,
)
from tiedgpt import GPT, GPTConfig
from tiedgpt.cli.main import main
from tiedgpt.errors import UserError
from tiedgpt.heads import SequenceClassifier
from tiedgpt.tie import audit, ledger

TINY_TOTAL = GPTConfig(**SHAPE).parameter_count()


def full_size(**values):
    from tests.tie.checkpoints import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(**values))


def test_the_counts_124439808_and_163037184_are_explained():
    model = full_size()
    before = ledger(model)
    assert before.total == before.trainable == 124_439_808
    assert before.bytes == 4 * 124_439_808
    shared = [row for row in before.rows if row.shared]
    assert [(row.names, row.shape, row.parameters) for row in shared] == [
        ((WTE, HEAD), (50257, 768), 38_597_376)
    ]
    assert "lm_head.weight share one storage of 50,257 x 768" in before.explain
    model.lm_head = nn.Linear(768, 50257, bias=False, device="meta")
    after = ledger(model)
    assert after.total == 163_037_184
    moved = before.difference(after)
    assert [(row.names, row.parameters) for row in moved.added_rows] == [((HEAD,), 38_597_376)]
    assert (moved.before, moved.after) == (124_439_808, 163_037_184)
    assert (moved.removed_rows, moved.multiply_adds) == ((), 0)
    assert moved.explain.startswith("+38,597,376 parameters. lm_head.weight (50,257 x 768) came in")
    assert f"same storage as {WTE}" in moved.explain
    back = after.difference(before)
    assert back.after == 124_439_808 and [row.names for row in back.removed_rows] == [(HEAD,)]
    assert f"now the same storage as {WTE}" in back.explain


def test_the_product_of_the_shared_matrix_is_counted_and_the_lookup_is_not():
    blocks = 12 * (768 * 3 * 768 + 768 * 768 + 2 * 4 * 768 * 768)
    assert ledger(full_size()).multiply_adds == blocks + 50257 * 768
    rows = {row.names[0]: row.multiply_adds for row in ledger(full_size()).rows}
    assert rows[WTE] == 50257 * 768 and rows["transformer.wpe.weight"] == 0
    assert rows["transformer.h.0.ln_1.weight"] == 0


@pytest.mark.parametrize("tied", [True, False])
def test_our_model_costs_the_same_tied_and_untied(tied):
    model = GPT(GPTConfig(**SHAPE, tie_word_embeddings=tied))
    counted = ledger(model)
    assert counted.total == model.config.parameter_count()
    assert counted.multiply_adds == 2 * 12 * D * D + V * D
    assert (f" wte.weight reads and predicts: one matrix of {V} x {D}" in counted.explain) == tied
    rows = {row.names[0]: row.multiply_adds for row in counted.rows}
    assert rows["wte.weight"] == (V * D if tied else 0)


def test_files_count_like_their_models(tmp_path):
    model = their_gpt2()
    path = save(model, tmp_path / "m")
    torch.save(model.state_dict(), tmp_path / "m.pt")
    for source in (path, tmp_path / "m.pt", model):
        counted = ledger(source)
        assert counted.total == TINY_TOTAL, source
        assert counted.bytes == 4 * TINY_TOTAL
        assert counted.multiply_adds == 2 * 12 * D * D + V * D
        json.dumps(counted.as_dict(), allow_nan=False)
    assert ledger(tmp_path / "m.pt").rows[0].names == (WTE, HEAD)


def test_the_difference_of_a_file_with_two_copies_names_the_second(tmp_path):
    one = ledger(save(their_gpt2(), tmp_path / "one"))
    model = their_gpt2()
    model.lm_head = fresh_head()
    moved = one.difference(ledger(save(model, tmp_path / "two")))
    assert moved.after - moved.before == V * D
    assert "in the shape of transformer.wte.weight" in moved.explain


def test_the_same_model_under_other_names_has_no_difference(tmp_path):
    peer = save(their_gpt2(), tmp_path / "m")
    moved = ledger(peer).difference(ledger(GPT.from_pretrained(peer)))
    assert (moved.added_rows, moved.removed_rows, moved.reasons) == ((), (), ())
    assert moved.explain.startswith("Nothing came in")


def test_a_resize_is_reported():
    model = their_gpt2()
    before = ledger(model)
    model.resize_token_embeddings(V + 7, mean_resizing=False)
    moved = before.difference(ledger(model))
    assert moved.after - moved.before == 7 * D and moved.added_rows == ()
    assert f"went from {V} x {D} to {V + 7} x {D}: +{7 * D}" in moved.explain


def test_masks_of_old_files_are_not_counted(tmp_path, capsys):
    state = their_gpt2().state_dict()
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 24, 24)
    state |= {"transformer.h.0.attn.masked_bias": torch.tensor(-1e4), "scale": torch.ones(1)}
    torch.save(state, tmp_path / "m.bin")
    counted = ledger(tmp_path / "m.bin")
    assert counted.total == TINY_TOTAL + 1
    assert counted.left_out == tuple(f"transformer.h.0.attn.{x}bias" for x in ("", "masked_"))
    assert main(["tie", "show", str(tmp_path / "m.bin")]) == 0
    assert f"left out: {', '.join(counted.left_out)}\n" in capsys.readouterr().out


def test_views_of_one_storage_are_one_row():
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = torch.randn(128, D)
            self.whole = nn.Parameter(table)
            self.top = nn.Parameter(table[:V])
            self.across = nn.Parameter(table.T)
            self.apart = nn.Parameter(torch.randn(3))

    counted = ledger(Views())
    assert [row.names for row in counted.rows] == [("whole", "top", "across"), ("apart",)]
    assert counted.total == 128 * D + 3


def test_slices_of_one_buffer_that_do_not_overlap_are_apart():
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.randn(100)
            self.a, self.b = nn.Parameter(flat[:60]), nn.Parameter(flat[60:])

    assert [row.parameters for row in ledger(Flat()).rows] == [60, 40]


def test_a_classifier_in_memory_counts_as_its_directory_does(tiny, tmp_path):
    classifier = SequenceClassifier(tiny, ["a", "b"])
    classifier.save_pretrained(tmp_path / "m")
    for module in (classifier, nn.DataParallel(classifier)):
        memory, file = ledger(module), ledger(tmp_path / "m")
        assert (memory.total, memory.multiply_adds) == (file.total, file.multiply_adds)
        assert memory.reads_and_predicts is file.reads_and_predicts is None
        assert audit(module).verdict == audit(tmp_path / "m").verdict == "no head"
    assert memory.explain in str(memory)


def test_a_plain_embedding_in_the_place_of_wte_does_not_predict(tiny):
    tiny.wte = nn.Embedding(97, 32)
    counted = audit(tiny)
    assert counted.verdict == "broken" and "a module without unembed" in counted.explain
    assert ledger(tiny).reads_and_predicts is None


def test_frozen_parameters_are_marked():
    model = their_gpt2()
    model.transformer.wte.weight.requires_grad_(False)
    counted = ledger(model)
    assert (counted.total - counted.trainable, counted.rows[0].trainable) == (V * D, False)


def test_any_module_has_a_ledger():
    linear = nn.Linear(3, 4)
    net = nn.Sequential(linear, nn.LayerNorm(4), linear)
    counted = ledger(net)
    assert (counted.total, counted.multiply_adds) == (12 + 4 + 8, 24)  # used twice, paid twice
    assert counted.rows[0].names == ("0.weight", "2.weight")
    assert ledger(copy.deepcopy(net)).total == counted.total
    assert ledger(nn.Identity()).total == 0


def test_gguf_and_onnx_files_have_a_ledger(tmp_path):
    w = matrix()
    tensors = {
        "token_embd.weight": w, "position_embd.weight": w[:24], "blk.0.attn_output.weight": w[:D],
        "output_norm.weight": w[0],
    }  # fmt: skip
    for kind, n_bytes in (("F32", 4), ("Q8_0", 34 / 32)):
        counted = ledger(write_gguf(tmp_path / f"{kind}.gguf", tensors, kind=kind))
        assert counted.total == (V + 24 + D + 1) * D
        assert counted.bytes == (V + D) * D * n_bytes + 4 * (24 + 1) * D  # positions stay F32
        assert counted.multiply_adds == D * D + V * D
    one = ledger(write_onnx(tmp_path / "one.onnx", "one"))
    two = ledger(write_onnx(tmp_path / "two.onnx", "copy"))
    assert (one.total, two.total - one.total) == ((V + 24 + D) * D, V * D)  # without a constant
    assert one.multiply_adds == two.multiply_adds == D * D + V * D


def test_complex_and_uninitialised_parameters_are_counted():
    module = nn.ParameterDict({"a": torch.zeros(3, 4, dtype=torch.complex64)})
    assert ledger(module).trainable == 12
    with pytest.raises(UserError, match="no shape yet"):
        ledger(nn.LazyLinear(3))


def test_buffers_of_statistics_are_not_counted(tmp_path):
    torch.save(nn.BatchNorm1d(7).state_dict(), tmp_path / "a.pt")
    counted = ledger(tmp_path / "a.pt")
    assert counted.total == 14 and "running_mean" in counted.left_out
