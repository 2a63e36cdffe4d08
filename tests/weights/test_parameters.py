"""What is written is the model that its config says, under torch's wrappers too, or nothing is."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, prune
from transformers import AutoModelForCausalLM

from tiedgpt import GPT
from tiedgpt.errors import UserError


def assert_written_as_it_computes(model: GPT, ids, path) -> None:
    model.save_pretrained(path)
    theirs, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        expected = GPT.from_pretrained(path)(ids)
        torch.testing.assert_close(theirs.eval()(ids).logits, expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(model(ids), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("block", [0, 2])
def test_regional_compilation_leaves_the_names_as_they_are(tiny, ids, tmp_path, block):
    with torch.no_grad():
        before = tiny(ids)
    tiny.h[block] = torch.compile(tiny.h[block], backend="eager")
    assert_written_as_it_computes(tiny, ids, tmp_path)
    with torch.no_grad():
        assert torch.equal(GPT.from_pretrained(tmp_path)(ids), before)


def test_activation_checkpointing_leaves_the_names_as_they_are(tiny, ids, tmp_path):
    for layer, block in enumerate(tiny.h):
        tiny.h[layer] = checkpoint_wrapper(block)
    assert_written_as_it_computes(tiny, ids, tmp_path)


def test_wrappers_within_wrappers(tiny, ids, tmp_path):
    tiny.h[1].mlp = torch.compile(tiny.h[1].mlp, backend="eager")
    tiny.h[1] = torch.compile(checkpoint_wrapper(tiny.h[1]), backend="eager")
    assert_written_as_it_computes(tiny, ids, tmp_path)


def test_a_layer_that_stands_twice_is_written_twice(tiny, ids, tmp_path):
    tiny.h[2] = tiny.h[0]
    assert_written_as_it_computes(tiny, ids, tmp_path)


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
        torch.distributed.fsdp.fully_shard(
            model, mesh=torch.distributed.init_device_mesh("cpu", (1,))
        )
    finally:
        torch.distributed.destroy_process_group()


def narrow(model: GPT) -> None:
    mlp = model.h[1].mlp
    mlp.c_fc, mlp.c_proj = nn.Linear(32, 40), nn.Linear(40, 32)


def add(model: GPT) -> None:
    model.extra = nn.Linear(2, 2)


def remove(model: GPT) -> None:
    del model.h[0].ln_1.bias


def resize(model: GPT) -> None:
    model.wte.weight = nn.Parameter(torch.zeros(99, 32))


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
    "another parameter": (add, r"extra\.weight is not a GPT's"),
    "a missing parameter": (remove, r"h\.0\.ln_1\.bias is missing"),
    "more rows than the config says": (resize, r"wte\.weight is \(99, 32\)"),
    "a model without numbers": (lambda model: model.to("meta"), "has no data"),
}


@pytest.mark.parametrize("what", NOT_PLAIN)
def test_what_a_directory_cannot_hold_is_refused_by_name(what, tiny, tmp_path):
    change, message = NOT_PLAIN[what]
    change(tiny)
    with pytest.raises(UserError, match=message):
        tiny.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_merged_parametrization_and_a_removed_mask_are_written(tiny, ids, tmp_path):
    layer = tiny.h[0].mlp.c_fc
    parametrizations.weight_norm(layer)
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    prune.l1_unstructured(tiny.h[1].mlp.c_fc, "weight", 0.5)
    prune.remove(tiny.h[1].mlp.c_fc, "weight")
    assert_written_as_it_computes(tiny, ids, tmp_path)
