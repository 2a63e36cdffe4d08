"""A small random model of each architecture of transformers that ties: judged, counted, guarded."""

import warnings

import pytest
import torch

from tiedgpt.tie import audit, guard, ledger
from tiedgpt.tie.guards import TieWarning

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

QUICK = ("gpt_neox", "llama", "qwen2", "qwen3", "gemma3_text", "gpt2")
"""Pythia's, Llama's, Qwen's and Gemma's architectures, and GPT-2's."""
OTHERS = """
    afmoe apertus arcee aria_text axk1 axk2 bart beam bert bert-generation big_bird biogpt
    bitnet blenderbot blenderbot-small bloom camembert codegen cohere cohere2 cohere2_moe
    ctrl cwm data2vec-text deepseek_v2 deepseek_v3 deepseek_v4 diffllama doge electra
    ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1 falcon_mamba flex_olmo flint
    gemma gemma2 glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt_bigcode gpt_neox_japanese
    gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoeshared helium
    hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 iquestcoder
    jais2 jamba jetmoe kolibri1 laguna lfm2 lfm3 llama4_text longcat_flash mamba marian
    mbart megatron-bert mellum mimo_v2_flash minicpm3 minimax minimax_m2
    minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder mpt mvp
    nanochat nemotron olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt pegasus persimmon
    phi phi3 phimoe plbart qwen2_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
    qwen4_exp_text recurrent_gemma roberta roberta-prelayernorm roc_bert roformer rwkv
    seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma whisper xglm xlm
    xlm-roberta xlm-roberta-xl xmod youtu
""".split()
V, D = 96, 32
SIZES = dict.fromkeys(
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
    "num_experts_per_tok".split(), 2,
) | dict.fromkeys(
    "num_attention_heads n_head n_heads num_heads num_key_value_heads encoder_attention_heads "
    "decoder_attention_heads num_experts num_local_experts n_routed_experts rotary_dim".split(), 4,
) | dict.fromkeys(
    "hidden_size n_embd d_model dim word_embed_proj_dim embedding_size".split(), D,
) | dict.fromkeys(
    "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner d_ff "
    "max_position_embeddings n_positions n_ctx".split(), 64,
) | {"vocab_size": V, "head_dim": 8, "moe_intermediate_size": 16, "pad_token_id": 0,
     "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
"""Names of the sizes in configs."""


def make(kind: str, tied: bool):
    """Return a small random model; skip architectures missing in this transformers."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config_class = transformers.CONFIG_MAPPING[kind]
    default = config_class()
    sizes = {name: size for name, size in SIZES.items() if hasattr(default, name)}
    torch.manual_seed(0)
    config = config_class(**sizes, tie_word_embeddings=tied)
    return transformers.AutoModelForCausalLM.from_config(config)


def check(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tied, untied = make(kind, True), make(kind, False)
    assert audit(tied).verdict == "tied"
    assert audit(untied).verdict == "untied as claimed"
    counts = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert [ledger(model).total for model in (tied, untied)] == counts and counts[0] < counts[1]
    head = tied.get_output_embeddings()
    with pytest.warns(TieWarning), guard(tied) as watch:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    assert [event.kind for event in watch.events] == ["split"]
    assert audit(tied).verdict == "broken"


@pytest.mark.parametrize("kind", QUICK)
def test_a_model_is_judged_counted_and_guarded(kind):
    check(kind)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OTHERS)
def test_a_model_of_every_other_architecture_is_judged_and_counted(kind):
    check(kind)


SAVED = {
    "gpt_neox": ("gpt_neox.embed_in.weight", "embed_out.weight"),
    "llama": ("model.embed_tokens.weight", "lm_head.weight"),
    "qwen3": ("model.embed_tokens.weight", "lm_head.weight"),
    "openai-gpt": ("transformer.tokens_embed.weight", "lm_head.weight"),
}
"""The names of the input and the output matrix in files."""


@pytest.mark.parametrize("kind", SAVED)
def test_its_saved_directory_is_judged_alike(kind, tmp_path):
    for tied, verdict in ((True, "tied"), (False, "untied as claimed")):
        make(kind, tied).save_pretrained(tmp_path / str(tied))
        report = audit(tmp_path / str(tied))
        assert report.verdict == verdict
        names = SAVED[kind][:1] if tied else SAVED[kind]
        assert tuple(matrix.names[0] for matrix in report.matrices) == names
