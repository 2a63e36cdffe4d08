"""Adapters in PEFT's format: writing, reading and refusals."""

import json

import pytest
import torch
from safetensors.torch import load

from tests.heads.conftest import make  # noqa: F401
from tests.tune.test_adapters import ALL, drawn
from tiedgpt import GPT, GPTConfig
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.heads import MultipleChoice, SequenceClassifier
from tiedgpt.tie import add_tokens, audit, untie
from tiedgpt.tune import freeze, load_adapter, lora, merge, save_adapter
from tiedgpt.tune.adapters import BLOCKS, adapted_layers
from tiedgpt.weights.containers import write_safetensors
from tiedgpt.weights.torch_file import stored_tensor

WTE = "base_model.model.transformer.wte"
HEAD = "base_model.model.lm_head"


@pytest.fixture
def base(tiny):
    """Return fresh copies of one GPT."""
    state = tiny.state_dict()

    def made():
        model = GPT(tiny.config).eval()
        model.load_state_dict(state)
        return model

    return made


def rewrite(directory, change=None, **fields):
    """Change the tensors and the config of a saved adapter."""
    path = directory / "adapter_model.safetensors"
    tensors = load(path.read_bytes())
    if change:
        change(tensors)
        stored = {name: stored_tensor(name, t.contiguous()) for name, t in tensors.items()}
        write_safetensors(path, stored, {"format": "pt"})
    config = directory / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))


def unchanged(model, other):
    same = (torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    return all(same) and not adapted_layers(model) and model.head is None


@pytest.mark.parametrize("targets", [BLOCKS, ["h.1*.c_proj", "h.0.mlp.c_fc"], ALL])
def test_a_saved_adapter_loads_onto_its_base_bit_for_bit(base, ids, targets, tmp_path):
    model = base()
    lora(model, rank=3, targets=targets, alpha=5.0)
    drawn(model)
    notes = save_adapter(model, tmp_path, base="gpt2")
    assert len(notes) == ("wte" in targets)
    again = base()
    report = load_adapter(again, tmp_path)
    assert report.moving == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert torch.equal(again(ids), model(ids))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "gpt2" and config["r"] == 3


def test_new_rows_load_onto_a_base_with_other_new_rows(base, ids, tmp_path):
    model, other = base(), base()
    add_tokens(model, 3)
    add_tokens(other, 3, seed=7)
    lora(model, tokens=[97, 98, 99])
    drawn(model)
    save_adapter(model, tmp_path)
    with pytest.raises(UserError, match=r"token 99 has a row .*, and the base 97 rows: add"):
        load_adapter(base(), tmp_path)
    load_adapter(other, tmp_path)
    new = torch.cat([ids[:, :20], torch.tensor([[97, 98, 99]] * 3)], 1)
    torch.testing.assert_close(other(new), model(new), rtol=1e-5, atol=1e-4)
    sizes = r"rows must be \(2, 32\), got \(3, 32\)"
    for wrong, says in (([7, 8, 8], "each once"), ([7, 8, "9"], "each once"), ([7, 8], sizes)):
        rewrite(tmp_path, trainable_token_indices=wrong)
        with pytest.raises((CorruptInputError, UserError), match=says):
            load_adapter(other, tmp_path)


def test_an_untied_model_has_separate_adapters_for_each_matrix(base, ids, tmp_path):
    model, other = base(), base()
    untie(model)
    untie(other)
    lora(model, targets=["wte", "head", "attn.c_attn"])
    drawn(model)
    assert save_adapter(model, tmp_path) == ()
    load_adapter(other, tmp_path)
    assert torch.equal(other(ids), model(ids))


@pytest.mark.parametrize("kind", [SequenceClassifier, MultipleChoice])
def test_a_heads_layers_are_saved_in_its_adapter(make, kind, tmp_path):  # noqa: F811
    model, other = make(kind), make(kind)
    lora(model)
    drawn(model)
    save_adapter(model, tmp_path)
    load_adapter(other, tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(other.get_parameter(name), parameter), name
    with pytest.raises(UserError, match="no place for"):
        load_adapter(make(kind).gpt, tmp_path)


def test_unsupported_adapters_are_refused_and_nothing_is_written(base, tmp_path):
    def refused(model, says):
        with pytest.raises(UserError, match=says):
            save_adapter(model, tmp_path / "adapter")
        assert not (tmp_path / "adapter").exists()

    model = base()
    refused(model.requires_grad_(False), "the model has none")
    lora(model, tokens=[4], targets=["wte"])
    refused(model, "wte has a low-rank pair and rows that are trained whole")
    merge(model)
    lora(model, targets=[], tokens=[4])
    refused(model, "needs a low-rank pair")
    merge(model)
    lora(model)
    freeze(model, "+ln_f")
    refused(model, "ln_f.weight is trained too")
    freeze(model, "ln_f")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="cannot write"):
        save_adapter(model, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


# One side of W or both


@pytest.fixture
def adapter(base, tmp_path):
    """Save an adapter on the blocks and W, and return its directory."""
    model = base()
    lora(model, rank=2, targets=["attn.c_attn", "wte"])
    drawn(model)
    save_adapter(model, tmp_path / "a")
    return tmp_path / "a"


def as_head(tensors, factor=1.0):
    """Write wte's pair under lm_head, where A and B change places."""
    tensors[f"{HEAD}.lora_A.weight"] = factor * tensors[f"{WTE}.lora_embedding_B"].T
    tensors[f"{HEAD}.lora_B.weight"] = tensors[f"{WTE}.lora_embedding_A"].T


def only_head(tensors):
    as_head(tensors)
    del tensors[f"{WTE}.lora_embedding_A"], tensors[f"{WTE}.lora_embedding_B"]


@pytest.mark.parametrize(
    ("change", "fields", "adapted"),
    [
        (None, {"target_modules": ["c_attn", "wte"], "ensure_weight_tying": False}, {"wte"}),
        (only_head, {"target_modules": ["attn.c_attn", "lm_head"]}, {"head"}),
        (lambda tensors: as_head(tensors, 1.5), {"init_lora_weights": True}, {"wte", "head"}),
    ],
)
def test_an_adapter_of_one_side_of_w_needs_an_untied_model(base, adapter, change, fields, adapted):
    rewrite(adapter, change, **fields)
    model = base()
    with pytest.raises(UserError, match=r"untie the model first \(tiedgpt\.tie\.untie\)"):
        load_adapter(model, adapter)
    assert unchanged(model, base())
    untie(model)
    load_adapter(model, adapter)
    assert {name for name in adapted_layers(model) if not name.startswith("h.")} == adapted
    merge(model)
    w = base().wte.weight
    for name in ("wte", "head"):
        assert torch.equal(model.get_submodule(name).weight, w) == (name not in adapted)


def test_one_pair_under_both_names_adapts_both_sides(base, adapter, ids):
    expected = base()
    load_adapter(expected, adapter)
    rewrite(adapter, as_head, target_modules=["attn.c_attn", "transformer.wte"])
    model = base()
    load_adapter(model, adapter)
    assert torch.equal(model(ids), expected(ids)) and audit(model).verdict == "tied"
    with pytest.raises(UserError, match="has adapters already"):
        load_adapter(model, adapter)


# What is refused


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"peft_type": "LOHA"}, "peft_type='LOHA'"),
        ({"target_parameters": ["wte.weight"]}, "target_parameters"),
        ({"use_qalora": True}, "use_qalora"),
        ({"some_variant_of_2031": {"x": 1}}, "some_variant_of_2031"),
        ({"r": 3}, "must be"),
        ({"rank_pattern": {"h.1.attn.c_attn": 5}}, "h.1.attn.c_attn A must be"),
        ({"target_modules": ["attn.c_attn", "mlp.c_fc"]}, "incomplete.*h.0.mlp.c_fc"),
        ({"target_modules": r".*\.c_(attn|fc)"}, "incomplete.*h.0.mlp.c_fc"),
        ({"target_modules": "(.|h)*x"}, "too many repetitions"),
        ({"rank_pattern": {".*" * 9 + "x": 5}}, "too many repetitions"),
    ],
)
def test_unsupported_adapter_types_are_refused_by_field_name(base, adapter, fields, says):
    rewrite(adapter, **fields)
    model = base()
    with pytest.raises(UserError, match=says):
        load_adapter(model, adapter)
    assert unchanged(model, base())


@pytest.mark.parametrize(
    "fields", [{"r": "two"}, {"r": 0}, {"lora_alpha": None}, {"rank_pattern": {"(": 2}},
               {"rank_pattern": [1]}, {"target_modules": "("}, {"target_modules": 7}],
)  # fmt: skip
def test_a_damaged_config_is_our_error(base, adapter, fields):
    rewrite(adapter, **fields)
    with pytest.raises((CorruptInputError, UserError)):
        load_adapter(base(), adapter)


def test_another_base_is_refused(base, adapter, tiny_config):
    other = base()
    with torch.no_grad():
        other.h[0].attn.c_attn.weight[0, 0] += 1
    with pytest.raises(UserError, match="another base: its blocks hold other weights"):
        load_adapter(other, adapter)
    half = base().to(torch.bfloat16)
    load_adapter(half, adapter)  # the same weights, rounded
    rewrite(adapter, len, target_modules=["c_attn", "wte", "lm_head"])  # no memory of its base
    wide = GPT(GPTConfig(**{**vars(tiny_config), "n_embd": 48}))
    with pytest.raises(UserError, match=r"another base: .* must be \(2, 48\), got \(2, 32\)"):
        load_adapter(wide, adapter)
    long = GPT(GPTConfig(**{**vars(tiny_config), "n_layer": 4}))
    with pytest.raises(UserError, match=r"nothing for transformer\.h\.3\.attn"):
        load_adapter(long, adapter)
    short = GPT(GPTConfig(**{**vars(tiny_config), "n_layer": 2}))
    with pytest.raises(UserError, match=r"no place for transformer\.h\.2\.attn"):
        load_adapter(short, adapter)


@pytest.mark.parametrize("name", ["transformer.wte.weight", "lm_head.weight"])
def test_a_whole_matrix_in_the_file_is_refused_with_the_reason(base, adapter, name):
    rewrite(adapter, lambda t: t.update({f"base_model.model.{name}": torch.zeros(97, 32)}))
    with pytest.raises(UserError, match="in the place of one side of W, which unties the model"):
        load_adapter(base(), adapter)


def test_missing_files_halves_and_ids_are_refused(base, adapter, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_adapter(base(), tmp_path / "nothing")
    whole = {f"{WTE}.lora_embedding_A": torch.ones(32, 3, dtype=torch.int32)}
    rewrite(adapter, lambda tensors: tensors.update(whole))
    with pytest.raises(CorruptInputError, match=r"must hold floats, got torch\.int32"):
        load_adapter(base(), adapter)
    rewrite(adapter, lambda tensors: tensors.pop(f"{WTE}.lora_embedding_A"))
    with pytest.raises(CorruptInputError):
        load_adapter(base(), adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"adapter_model\.bin"):
        load_adapter(base(), adapter)
