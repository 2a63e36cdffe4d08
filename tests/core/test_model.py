import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tiedgpt import GPT, GPTConfig
from tiedgpt.core.cache import KVCache
from tiedgpt.errors import UserError


@pytest.mark.parametrize("kind", ["gpt2", "openai-gpt"])
@torch.no_grad()
def test_logits_and_states_equal_transformers(kind, ids):
    shape = {"vocab_size": 97, "n_positions": 24, "n_embd": 35, "n_layer": 2, "n_head": 5}
    config = AutoConfig.for_model(kind, **shape, bos_token_id=1, eos_token_id=1)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    for parameter in theirs.parameters():
        parameter.normal_(std=0.3)
    model, out = GPT.from_pretrained(theirs), theirs(ids, output_hidden_states=True)
    torch.testing.assert_close(model(ids), out.logits, rtol=1e-4, atol=1e-4)
    for ours, its in zip(model.states(ids), out.hidden_states[:2], strict=False):
        torch.testing.assert_close(ours, its, rtol=1e-4, atol=1e-4)


def test_predictions_are_dot_products_with_the_embedding_rows(tiny, ids):
    h = tiny.body(ids)
    torch.testing.assert_close(tiny(ids)[1, 5, 60], h[1, 5] @ tiny.wte.weight[60])
    torch.testing.assert_close(tiny.wte(ids)[1, 5], tiny.wte.weight[ids[1, 5]])


def test_position_i_cannot_see_position_j_after_it(tiny, ids):
    changed = ids.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 97
    torch.testing.assert_close(tiny(ids)[:, :10], tiny(changed)[:, :10])
    assert not torch.allclose(tiny(ids)[:, 10:], tiny(changed)[:, 10:])


def test_every_earlier_position_is_seen(tiny, ids):
    last = tiny(ids)[:, -1]
    for j in range(24):
        changed = ids.clone()
        changed[:, j] = (changed[:, j] + 1) % 97
        assert not torch.allclose(last, tiny(changed)[:, -1])


def test_states_are_the_residual_stream_from_the_embedding_to_the_last_block(tiny, ids):
    states = list(tiny.states(ids))
    assert len(states) == 1 + 3
    torch.testing.assert_close(states[0], tiny.wte(ids) + tiny.wpe.weight[:24])
    torch.testing.assert_close(tiny.ln_f(states[-1]), tiny.body(ids))


def test_a_head_of_its_own_predicts_and_print_says_so(tiny_config, ids):
    model = GPT(replace(tiny_config, tie_word_embeddings=False)).eval()
    torch.testing.assert_close(model(ids), model.head(model.body(ids)))
    assert "the head predicts" in str(model)


def test_print_says_that_the_matrix_reads_and_predicts(tiny):
    for head in (None, torch.nn.Identity()):  # a head may hold on to wte
        tiny.head = head
        assert "wte reads and predicts" in str(tiny)
    assert "(wte): TiedEmbedding(97, 32)" in str(tiny)


@pytest.mark.parametrize(
    ("norm", "positions", "projections"), [("pre", 0.01, 0.02 / 4), ("post", 0.02, 0.02)]
)
def test_fresh_weights_have_openais_spread(norm, positions, projections):
    torch.manual_seed(0)
    shape = {"vocab_size": 2000, "n_positions": 512, "n_embd": 128, "n_layer": 8, "n_head": 4}
    model = GPT(GPTConfig(**shape, norm=norm))
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.wpe.weight.std().item() == pytest.approx(positions, rel=0.02)
    block = model.h[3]
    assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for projection in (block.attn.c_proj, block.mlp.c_proj):
        assert projection.weight.std().item() == pytest.approx(projections, rel=0.03)
        assert not projection.bias.any()
    assert not block.ln_1.bias.any() and (block.ln_1.weight == 1).all()


def test_a_fresh_models_loss_is_log_v_plus_half_the_logits_variance():
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=5000, n_positions=128, n_embd=256, n_layer=2, n_head=4)
    ids = torch.randint(5000, (8, 128))
    targets = torch.randint(5000, (8, 128))
    expected = math.log(5000) + 256 * 0.02**2 / 2
    assert GPT(config).eval().loss(ids, targets).item() == pytest.approx(expected, abs=0.05)


@torch.no_grad()
def test_sequences_of_different_lengths_share_a_cache(tiny, ids):
    lengths = [3, 11, 7]
    cache = KVCache.allocate(tiny.config, batch_size=3)
    for row, length in enumerate(lengths):
        tiny(ids[row : row + 1, :length], cache.rows(row, row + 1))
    cache.lengths = list(lengths)
    for step in range(6):
        newest = torch.stack([ids[row, n + step] for row, n in enumerate(lengths)])[:, None]
        logits = tiny(newest, cache)
        for row, n in enumerate(lengths):
            alone = tiny(ids[row : row + 1, : n + step + 1])[0, -1]
            torch.testing.assert_close(logits[row, 0], alone, atol=2e-6, rtol=1e-5)
    cache.copy_row(2, 1)
    assert cache.lengths == [9, 13, 13]
    ours, alone = tiny(ids[2:3, 13:15], cache.rows(1, 2))[0], tiny(ids[2:3, :15])[0, -2:]
    torch.testing.assert_close(ours, alone, atol=2e-6, rtol=1e-5)


def test_dropout_acts_in_training_at_three_places_and_never_in_inference(tiny_config, ids):
    model = GPT(tiny_config)
    assert not torch.equal(model.train()(ids), model(ids))
    assert torch.equal(model.eval()(ids), model(ids))
    for place in ("embd_pdrop", "attn_pdrop", "resid_pdrop"):
        off = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0} | {place: 0.5}
        model = GPT(GPTConfig(**{**vars(tiny_config), **off})).train()
        assert not torch.equal(model(ids), model(ids)), place


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (torch.tensor([[0, 97]]), "between 0 and 96"),
        (torch.tensor([[-1]]), "between 0 and 96"),
        (torch.zeros(1, 25, dtype=torch.long), "got 25"),
        (torch.zeros(1, 0, dtype=torch.long), "got 0"),
        (torch.zeros(5, dtype=torch.long), "shape"),
        (torch.zeros(1, 5), "int64 or int32"),
    ],
)
def test_invalid_ids_are_refused(tiny, wrong, says):
    with pytest.raises(UserError, match=says):
        tiny(wrong)


@torch.no_grad()
def test_a_cache_of_another_dtype_is_refused_by_name(tiny, ids):
    cache = KVCache.allocate(tiny.config, batch_size=3)
    with pytest.raises(UserError, match=r"allocate it with dtype=torch\.bfloat16"):
        tiny.bfloat16()(ids, cache)
    fitting = KVCache.allocate(tiny.config, batch_size=3, dtype=torch.bfloat16)
    assert tiny(ids, fitting).shape == (3, 24, 97)


def test_a_cache_is_for_inference_and_one_model_shape(tiny, tiny_config, ids):
    with pytest.raises(UserError, match=r"torch\.no_grad"):
        tiny(ids, KVCache.allocate(tiny.config, batch_size=3))
    for change in ({"n_layer": 2}, {"n_embd": 64}, {"n_embd": 64, "n_head": 8}):
        other = replace(tiny_config, **change)
        with pytest.raises(UserError, match="another shape"):
            tiny(ids, KVCache.allocate(other, batch_size=3))
    with pytest.raises(UserError, match="batch_size"):
        KVCache.allocate(tiny.config, batch_size=0)


@torch.no_grad()
def test_a_full_cache_is_an_error(tiny, ids):
    cache = KVCache.allocate(tiny.config, batch_size=3, capacity=10)
    assert cache.attention_mask(7, 5) == (0, None)
    tiny(ids[:, :10], cache)
    with pytest.raises(UserError, match="got 1 after 10"):
        tiny(ids[:, :1], cache)
    with pytest.raises(UserError, match="holds 3 sequences, got ids of 2"):
        tiny(ids[:2, :1], KVCache.allocate(tiny.config, batch_size=3))
    with pytest.raises(UserError, match="capacity must be"):
        KVCache.allocate(tiny.config, batch_size=1, capacity=25)


def test_a_model_on_the_meta_device_has_shapes_and_draws_nothing():
    """Drawing there would import hundreds of torch's modules, which takes seconds."""
    code = (
        "import sys, torch\n"
        "from tiedgpt import GPT, GPTConfig\n"
        "state, before = torch.get_rng_state(), set(sys.modules)\n"
        "with torch.device('meta'):\n"
        "    model = GPT(GPTConfig.preset('gpt2-xl'))\n"
        "assert all(p.is_meta and p.requires_grad for p in model.parameters())\n"
        "assert sum(p.numel() for p in model.parameters()) == 1_557_611_200\n"
        "assert torch.equal(state, torch.get_rng_state())\n"
        "assert len(set(sys.modules) - before) < 20\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
