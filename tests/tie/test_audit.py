"""The audit's verdicts on checkpoints that the real libraries wrote."""

import copy
import json
import re
import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.tie.checkpoints import (
    HEAD,
    SHAPE,
    WTE,
    D,
    V,
    fresh_head,
    matrix,
    rewrite,
    save,
    their_gpt2,
    write_gguf,
    write_onnx,
)  # fmt: skip
from tests.weights.karpathy import FirstMinGPT, Karpathy
from tiedgpt import GPT, GPTConfig
from tiedgpt import tie as tie_package
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.tie import audit, fix, ledger
from tiedgpt.weights.safetensors_file import SafetensorsFile
from tiedgpt.weights.torch_file import stored_tensor


def kinds(found) -> list[str]:
    return [finding.kind for finding in found.findings]


def judged(source, verdict: str, *some: str, **names):
    """Assert the verdict, its exit code, and that these findings are among those made."""
    found = audit(source, **names)
    assert found.verdict == verdict, found.explain
    assert found.exit_code == (6 if verdict in ("broken", "contradicts the claim") else 0)
    assert set(some) <= set(kinds(found)), kinds(found)
    assert all(finding.explain and "\n" not in finding.title for finding in found.findings)
    json.dumps(found.as_dict(), allow_nan=False)
    return found


# transformers' own files


def test_saved_tied(tmp_path):
    found = judged(save(their_gpt2(), tmp_path / "m"), "tied", "one matrix")
    assert [(m.names, m.roles, m.shape) for m in found.matrices] == [
        ((WTE,), ("reads", "predicts"), (V, D))
    ]
    assert (found.claim, found.wasted_bytes, found.comparison) == (True, 0, None)


def test_a_run_directory_stands_for_its_model(tmp_path):
    save(their_gpt2(), tmp_path / "run" / "model")
    judged(tmp_path / "run", "tied")


def test_saved_after_its_head_was_replaced(tmp_path):
    model = their_gpt2()
    model.lm_head = fresh_head()
    found = judged(save(model, tmp_path / "m"), "broken", "drifted", "fresh")
    assert found.comparison.differing_rows == V
    assert found.comparison.first_rows == tuple(range(10))
    assert abs(found.comparison.cosine) < 0.1
    fresh = [finding for finding in found.findings if finding.kind == "fresh"]
    assert [finding.title.split()[0] for finding in fresh] == [HEAD]
    assert "N(0, 0.02)" in fresh[0].explain
    largest = (model.lm_head.weight - model.transformer.wte.weight).abs().max().item()
    assert found.comparison.largest == pytest.approx(largest, rel=1e-6)


def test_saved_after_its_tokens_were_resized(tmp_path):
    model = their_gpt2()
    model.resize_token_embeddings(V + 7, mean_resizing=False)
    found = judged(save(model, tmp_path / "m"), "tied")
    assert found.matrices[0].shape == (V + 7, D)


def test_saved_after_only_the_embedding_was_resized(tmp_path):
    model = their_gpt2()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.transformer.wte = nn.Embedding.from_pretrained(
        torch.cat([model.lm_head.weight.detach(), torch.randn(7, D)])
    )
    found = judged(save(model, tmp_path / "m"), "broken", "equal copies", "padded")
    assert "7 rows" in found.explain


def test_a_merged_adapter_that_saved_its_head(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(target_modules=["c_attn"], modules_to_save=["lm_head"], r=2)
        model = get_peft_model(their_gpt2(), config)
    with torch.no_grad():
        saved = next(p for n, p in model.named_parameters() if "modules_to_save" in n)
        saved[3:9] += 0.1
    live = judged(model, "broken", "drifted")
    assert "modules_to_save" in live.matrices[1].names[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = model.merge_and_unload()
    path = save(merged, tmp_path / "m")  # peft 0.21 unties the config on merging
    judged(rewrite(path, tie_word_embeddings=False), "untied as claimed", "drifted")
    found = judged(rewrite(path, tie_word_embeddings=True), "broken", "drifted")
    assert found.comparison.differing_rows == 6
    assert found.comparison.first_rows == (3, 4, 5, 6, 7, 8)
    assert found.comparison.largest == pytest.approx(0.1, rel=1e-4)
    assert 0.9 < found.comparison.cosine < 1


def test_untied_as_its_config_says(tmp_path):
    model = their_gpt2(tie_word_embeddings=False)
    found = judged(save(model, tmp_path / "m"), "untied as claimed", "drifted")
    assert found.wasted_bytes == 0
    judged(model, "untied as claimed")


def test_untied_though_its_config_says_tied(tmp_path):
    path = save(their_gpt2(tie_word_embeddings=False), tmp_path / "m")
    judged(rewrite(path, tie_word_embeddings=True), "broken", "drifted")
    judged(rewrite(path, tie_word_embeddings="REMOVE"), "broken", "drifted")


def test_tied_though_its_config_says_untied(tmp_path):
    path = rewrite(save(their_gpt2(), tmp_path / "m"), tie_word_embeddings=False)
    judged(path, "contradicts the claim", "missing")
    model = their_gpt2()
    model.config.tie_word_embeddings = False
    judged(model, "contradicts the claim", "claim")


def test_equal_copies_in_a_file_are_wasteful_and_sound(tmp_path):
    def add(state):
        state[HEAD] = state[WTE].clone()

    path = rewrite(save(their_gpt2(), tmp_path / "m"), add)
    found = judged(path, "tied twice", "equal copies")
    assert (found.wasted_bytes, found.comparison.differing_rows) == (V * D * 4, 0)
    found = judged(rewrite(path, tie_word_embeddings=False), "untied as claimed", "equal copies")
    assert found.wasted_bytes == V * D * 4


@pytest.mark.parametrize("claim", [True, False])
def test_a_head_saved_transposed(tmp_path, claim):
    def add(state):
        state[HEAD] = state[WTE].T.clone()

    path = rewrite(save(their_gpt2(), tmp_path / "m"), add, tie_word_embeddings=claim)
    found = judged(path, "broken", "transposed", "equal copies")
    assert found.transposed == (HEAD,) and found.comparison.rows_compared == V
    assert (
        "`tiedgpt tie fix MODEL DEST` writes a copy" in found.explain
        and "resolve=" not in found.explain
    )
    with pytest.raises(CorruptInputError, match=r"is transposed.*`tiedgpt tie fix MODEL DEST`"):
        GPT.from_pretrained(path)


@pytest.mark.parametrize("filler", [0.0, 1.0])
def test_a_head_padded_to_a_multiple_of_64(tmp_path, filler):
    def add(state):
        state[HEAD] = torch.cat([state[WTE], torch.full((128 - V, D), filler)])

    found = judged(rewrite(save(their_gpt2(), tmp_path / "m"), add), "broken", "padded")
    padded = next(f for f in found.findings if f.kind == "padded")
    assert "31 rows more than the 97 tokens" in padded.title
    assert f"{31 if filler else 0} of them hold numbers other than zero" in padded.explain
    assert found.comparison.equal


def test_both_faces_padded_is_tied_and_told(tmp_path):
    def pad(state):
        state[WTE] = torch.cat([state[WTE], torch.zeros(128 - V, D)])

    judged(rewrite(save(their_gpt2(), tmp_path / "m"), pad), "tied", "padded")


def test_a_head_of_another_width_does_not_fit(tmp_path):
    def add(state):
        state[HEAD] = torch.randn(V, D + 1)

    judged(rewrite(save(their_gpt2(), tmp_path / "m"), add), "broken", "shapes")


def test_only_the_head_is_there(tmp_path):
    def move(state):
        state[HEAD] = state.pop(WTE)

    judged(rewrite(save(their_gpt2(), tmp_path / "m"), move), "tied", "one matrix")


def test_a_misspelt_claim_is_told(tmp_path):
    path = rewrite(save(their_gpt2(), tmp_path / "m"), tie_word_embedding=False)
    judged(path, "tied", "config")


def test_numbers_that_are_not_finite(tmp_path):
    def add(state):
        state[WTE][5, 2] = float("nan")
        state[HEAD] = state[WTE].clone()
        state[HEAD][7, 1] = float("inf")

    found = judged(rewrite(save(their_gpt2(), tmp_path / "m"), add), "broken", "not finite")
    assert found.comparison.first_rows == (7,)


def test_a_copy_in_a_coarser_type_differs_by_rounding(tmp_path):
    def add(state):
        state[HEAD] = state[WTE].to(torch.bfloat16)

    found = judged(rewrite(save(their_gpt2(), tmp_path / "m"), add), "broken", "drifted")
    assert found.comparison.within_rounding and found.comparison.cosine > 0.9999


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_float_type_is_read(tmp_path, dtype):
    def add(state):
        state[WTE] = state[WTE].to(dtype)
        state[HEAD] = state[WTE].clone()
        state[HEAD][4] += 1

    found = judged(rewrite(save(their_gpt2(), tmp_path / "m"), add), "broken")
    assert (found.comparison.differing_rows, found.comparison.first_rows) == (1, (4,))
    assert found.comparison.largest == pytest.approx(1, rel=1e-2)


def test_shards(tmp_path):
    model = their_gpt2()
    model.lm_head = fresh_head()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    assert (tmp_path / "m" / "model.safetensors.index.json").exists()
    judged(tmp_path / "m", "broken", "drifted")


def test_the_first_gpt(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(**SHAPE))
    found = judged(save(model, tmp_path / "m"), "tied")
    assert found.matrices[0].names == ("transformer.tokens_embed.weight",)


def test_a_llama(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=40, num_hidden_layers=1,
        num_attention_heads=2, pad_token_id=0,
    )  # fmt: skip
    found = judged(save(LlamaForCausalLM(config), tmp_path / "m"), "untied as claimed")
    assert [m.names[0] for m in found.matrices] == ["model.embed_tokens.weight", HEAD]


# torch's files


def test_a_torch_file_keeps_the_storage_shared(tmp_path):
    model = their_gpt2()
    torch.save(model.state_dict(), tmp_path / "a.pt")
    found = judged(tmp_path / "a.pt", "tied", "same storage")
    assert found.matrices[0].names == (WTE, HEAD)


def test_a_torch_file_nested_and_compiled(tmp_path):
    state = {f"_orig_mod.{name}": t for name, t in their_gpt2().state_dict().items()}
    torch.save({"model": state, "step": 3}, tmp_path / "a.pt")
    judged(tmp_path / "a.pt", "tied", "same storage")
    state["_orig_mod.lm_head.weight"] = torch.randn(V, D)
    torch.save({"model": state}, tmp_path / "b.pt")
    judged(tmp_path / "b.pt", "broken", "drifted")


def test_a_legacy_torch_file(tmp_path):
    torch.save(their_gpt2().state_dict(), tmp_path / "a.bin", _use_new_zipfile_serialization=False)
    judged(tmp_path / "a.bin", "tied", "same storage")


# GGUF


def test_gguf_without_and_with_a_head(tmp_path):
    w = matrix()
    base = {"token_embd.weight": w, "output_norm.weight": w[0], "position_embd.weight": w[:24]}
    judged(write_gguf(tmp_path / "a.gguf", base), "tied", "one matrix")
    equal = judged(
        write_gguf(tmp_path / "b.gguf", base | {"output.weight": w}), "tied twice", "equal copies"
    )
    assert equal.wasted_bytes == w.nbytes
    own = base | {"output.weight": matrix(2)}
    found = judged(write_gguf(tmp_path / "c.gguf", own), "untied as claimed", "drifted")
    assert "output.weight" in found.claim_source


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_gguf_of_other_types(tmp_path, kind):
    w, changed = matrix(), matrix()
    changed[5] *= -1
    path = write_gguf(
        tmp_path / "a.gguf", {"token_embd.weight": w, "output.weight": changed}, kind=kind
    )
    found = judged(path, "untied as claimed", "drifted")
    assert (found.comparison.differing_rows, found.comparison.first_rows) == (1, (5,))
    if kind != "Q4_0":
        assert found.comparison.largest == pytest.approx(2 * abs(w[5]).max(), rel=0.02)


# ONNX


@pytest.mark.parametrize("names", [("W", "H"), (WTE, "onnx::MatMul_12"), (WTE, HEAD)])
@pytest.mark.parametrize("external", [False, True])
def test_onnx_with_one_and_with_two_copies(tmp_path, names, external):
    for head, verdict in (
        ("one", "tied"), ("gemm", "tied"), ("copy", "tied twice"), ("other", "broken"),
    ):  # fmt: skip
        path = write_onnx(tmp_path / f"{head}.onnx", head, external=external, names=names)
        found = judged(path, verdict)
        assert found.matrices[0].names[0] == names[0]
        assert found.wasted_bytes == (V * D * 4 if head == "copy" else 0)
        (tmp_path / "data.bin").unlink(missing_ok=True)


@pytest.mark.parametrize("tied", [True, False])
def test_what_torch_exports_holds_two_copies(tmp_path, tied):
    torch.manual_seed(1)
    model = GPT(GPTConfig(**SHAPE, tie_word_embeddings=tied)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = torch.zeros(1, 5, dtype=torch.long)
        torch.onnx.export(model, (ids,), tmp_path / "m.onnx", dynamo=True, verbose=False)
    judged(tmp_path / "m.onnx", "tied twice" if tied else "broken", "transposed")


# modules in memory


def test_our_own_model_tied_and_untied():
    judged(GPT(GPTConfig(**SHAPE)), "tied", "one matrix")
    judged(GPT(GPTConfig(**SHAPE, tie_word_embeddings=False)), "untied as claimed")
    changed = GPT(GPTConfig(**SHAPE))
    changed.head = fresh_head()
    judged(changed, "broken", "drifted")


def test_a_module_tied_replaced_and_wrapped():
    model = their_gpt2()
    judged(model, "tied", "same storage")
    judged(copy.deepcopy(model), "tied", "same storage")
    model.lm_head = nn.Sequential(nn.Linear(D, D), nn.Dropout(), fresh_head())
    found = judged(model, "broken", "drifted")
    assert found.matrices[1].names == ("lm_head.2.weight",)


def test_a_vocabulary_of_three_times_the_width_is_no_riddle():
    """Then the attention's matrices (3D, D) have the shape of W."""
    model = GPT(GPTConfig(vocab_size=96, n_positions=8, n_embd=32, n_layer=2, n_head=2))
    assert model.h[0].attn.c_attn.weight.shape == model.wte.weight.shape
    assert judged(model, "tied").matrices[0].roles == ("reads", "predicts")
    assert ledger(model).total == model.config.parameter_count()


def test_an_equal_copy_in_memory_is_broken_for_training_parts_it():
    model = their_gpt2()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    judged(model, "broken", "equal copies")
    model.requires_grad_(False)
    judged(model, "tied twice", "equal copies")


def test_two_parameters_on_one_storage_are_broken():
    model = their_gpt2()
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    found = judged(model, "broken", "same storage", "two parameters on one storage")
    assert "twice" in found.explain


def test_a_model_on_the_meta_device():
    model = their_gpt2().to("meta")
    model.lm_head = nn.Linear(D, V, bias=False, device="meta")
    judged(model, "broken", "not comparable")


def test_a_module_with_names_of_its_own():
    class Odd(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.lookup, self.score = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
            if tied:
                self.score.weight = self.lookup.weight

    tied = judged(Odd(tied=True), "tied", "same storage")
    assert "counts it 2 times" in tied.explain
    untied = judged(Odd(tied=False), "untied as claimed", "drifted")  # it never said it was a GPT
    assert "nothing is claimed\nThe module has no config" in untied.explain
    assert untied.claim is None and "broken" not in untied.explain


# what cannot be judged


def test_no_embedding_or_several_candidates_are_asked_about(tmp_path):
    path = save(their_gpt2(), tmp_path / "m")

    def rename(state):
        state["a.x"], state["b.x"] = state.pop(WTE), torch.randn(V, D)

    with pytest.raises(UserError, match=r"a\.x .*--input .* and --output"):
        audit(rewrite(path, rename))
    judged(path, "broken", input_name="a.x", output_name="b.x")
    with pytest.raises(UserError, match=r"does not tell whether it predicts: b\.x"):
        audit(path, input_name="a.x")
    judged(path, "tied", input_name="a.x", output_name="a.x")
    with pytest.raises(UserError, match=r"no matrix 'nothing'"):
        audit(path, input_name="nothing")

    def two(state):
        state["encoder.embed_tokens.weight"] = state["a.x"].clone()
        state["decoder.embed_tokens.weight"] = state["a.x"].clone()

    with pytest.raises(
        UserError, match=r"could be the input: .*coder\.embed_tokens.*coder.*--input"
    ):
        audit(rewrite(path, two))


def test_sources_that_are_none(tmp_path):
    with pytest.raises(UserError, match="neither"):
        audit(3)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no weights"):
        audit(tmp_path / "empty")
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="adapter"):
        audit(tmp_path / "empty")
    (tmp_path / "noise").write_bytes(b"\xff" * 100)
    with pytest.raises(CorruptInputError, match="no known checkpoint format"):
        audit(tmp_path / "noise")


def test_a_claim_that_is_no_bool(tmp_path):
    with pytest.raises(CorruptInputError, match="neither true nor false"):
        audit(rewrite(save(their_gpt2(), tmp_path / "m"), tie_word_embeddings="no"))


# cost


def test_auditing_files_imports_no_torch(tmp_path):
    def add(state):
        state[HEAD] = state[WTE] + 1

    rewrite(save(their_gpt2(), tmp_path / "m"), add)
    write_gguf(tmp_path / "a.gguf", {"token_embd.weight": matrix(), "output.weight": matrix(2)})
    write_onnx(tmp_path / "a.onnx", "other")
    code = (
        "import sys; from tiedgpt.tie import audit, ledger\n"
        "for path in sys.argv[1:]: audit(path); ledger(path)\n"
        "print([m for m in ('torch', 'gguf') if m in sys.modules])"
    )
    paths = [tmp_path / "m", tmp_path / "a.gguf", tmp_path / "a.onnx"]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("across", [False, True])
def test_a_file_of_gigabytes_takes_memory_of_megabytes(tmp_path, across):
    rows, width = 131_072, 1024  # 512 MB each, sparse
    shape = [width, rows] if across else [rows, width]
    size = rows * width * 4
    header = {
        "wte.weight": {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, size]},
        HEAD: {"dtype": "F32", "shape": shape, "data_offsets": [size, 2 * size]},
    }
    raw = json.dumps(header).encode()
    with (tmp_path / "big.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + 2 * size)
    assert set(SafetensorsFile.open(tmp_path / "big.safetensors").entries) == set(header)
    code = (
        "import re, sys; from tiedgpt.tie import audit; import numpy\n"
        "def peak():  # of this process alone; ru_maxrss remembers the parent's\n"
        "    text = open('/proc/self/status').read()\n"
        "    return int(re.search(r'VmHWM:\\s+(\\d+)', text)[1]) // 1024\n"
        "start = peak(); found = audit(sys.argv[1])\n"
        "print(found.verdict); print(peak() - start)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "big.safetensors")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    verdict, megabytes = done.stdout.strip().split("\n")
    assert verdict == ("broken" if across else "tied twice")
    assert 5 < int(megabytes) < 300, megabytes


# two matrices that look like one, and heads that do not look like one


@pytest.mark.parametrize("views", ["interleaved", "shifted", "square"])
def test_two_views_of_one_storage_are_two_matrices(tmp_path, views):
    x = torch.randn(V + 10, 2 * D)
    reads, head = {
        "interleaved": (x[:V, :D], x[:V, D:]),
        "shifted": (x[:V], x[10:]),
        "square": (x[: 2 * D], x[: 2 * D].T),
    }[views]
    torch.save({"wte.weight": reads, HEAD: head}, tmp_path / "a.pt")
    found = judged(tmp_path / "a.pt", "broken", "drifted")
    assert len(found.matrices) == 2
    assert "one matrix" not in ledger(tmp_path / "a.pt").explain or views == "square"


def test_a_transposed_view_is_the_same_matrix():
    model = their_gpt2()
    w = model.transformer.wte.weight
    assert stored_tensor("a", w).is_view_of(stored_tensor("b", w.detach().T))
    assert not stored_tensor("a", w).is_view_of(stored_tensor("b", w.detach()[1:]))


@pytest.mark.parametrize("claim", [True, False, "REMOVE"])
@pytest.mark.parametrize("name", ["GPT2Model", "LlamaForSequenceClassification"])
def test_a_body_or_a_classifier_has_no_head(tmp_path, name, claim):
    path = rewrite(
        save(their_gpt2(), tmp_path / "m"), architectures=[name], tie_word_embeddings=claim
    )
    found = judged(path, "no head", "no head")
    assert "does not predict tokens" in found.explain
    assert sum(row.multiply_adds for row in ledger(path).rows if WTE in row.names) == 0
    with pytest.raises(UserError, match="does not predict"):
        fix(path, tmp_path / "new")
    judged(rewrite(path, architectures=["Mine"], tie_word_embeddings=True), "tied")


@pytest.mark.parametrize(
    "tensors",
    [
        {"lm_head.qweight": torch.zeros(D // 8, V, dtype=torch.int32)},
        {"lm_head.weight_packed": torch.zeros(V, D // 8, dtype=torch.int32)},
        {"lm_head.weight": torch.zeros(V * D)},
        {"lm_head.weight": torch.zeros(V, D, 1)},
        {"lm_head.weight": torch.zeros(V * D // 2, 1, dtype=torch.uint8)},
        {"lm_head.weight_v": torch.zeros(V, D), "lm_head.weight_g": torch.ones(V, 1)},
        {"output.qweight": torch.zeros(D // 8, V, dtype=torch.int32)},
    ],
)
def test_a_head_that_cannot_be_read_is_never_tied(tmp_path, tensors):
    path = rewrite(save(their_gpt2(), tmp_path / "m"), lambda state: state.update(tensors))
    judged(path, "broken", "not comparable")
    with pytest.raises(UserError, match="predicts and is not read"):
        fix(path, tmp_path / "new")
    judged(rewrite(path, tie_word_embeddings=False), "untied as claimed", "not comparable")


def test_a_heads_bias_and_transform_are_no_head(tmp_path):
    def add(state):
        state["lm_head.bias"] = torch.zeros(V)
        state["lm_head.dense.weight"] = torch.zeros(D, D)
        state["lm_head.layer_norm.weight"] = torch.zeros(D)
        state["cls.predictions.transform.dense.weight"] = torch.zeros(D, D)

    judged(rewrite(save(their_gpt2(), tmp_path / "m"), add), "tied")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "x.safetensors"])
def test_an_adapter_alone_is_refused(tmp_path, name):
    tensors = {"base.wte.weight": torch.zeros(V, D), "base.h.0.lora_A.weight": torch.zeros(2, D)}
    save_file(tensors, tmp_path / name)
    with pytest.raises(UserError, match="adapter"):
        audit(tmp_path / name)


class Buffered(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.register_buffer("w", w)


def doubled():
    class Twice(nn.Module):
        def forward(self, w):
            return 2 * w

    return Twice()


@pytest.mark.parametrize(
    "how", ["buffer", "quantized", "old norm", "new norm", "twice", "lora", "no matrix"]
)
@pytest.mark.filterwarnings("ignore")
def test_a_head_derived_from_the_matrix_is_not_tied(how):
    model = their_gpt2()
    if how == "buffer":
        model.lm_head = Buffered(model.transformer.wte.weight.detach() * 2)
    elif how == "quantized":
        model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    elif how == "old norm":
        nn.utils.weight_norm(model.lm_head)
    elif how == "new norm":
        nn.utils.parametrizations.weight_norm(model.lm_head)
    elif how == "twice":
        nn.utils.parametrize.register_parametrization(model.lm_head, "weight", doubled())
    elif how == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=["lm_head"], r=2))
    else:
        model.lm_head = nn.Identity()
    judged(model, "broken", "derived")
    model.config.tie_word_embeddings = False
    judged(model, "untied as claimed", "derived")


def test_a_live_body_has_no_head_and_its_embedding_only_reads():
    found = judged(their_gpt2().transformer, "no head", "no head")
    assert [matrix.roles for matrix in found.matrices] == [("reads",)]


def test_a_saved_body_has_no_head_and_its_embedding_only_reads(tmp_path):
    path = save(their_gpt2().transformer, tmp_path / "m")
    assert json.loads((path / "config.json").read_text())["architectures"] == ["GPT2Model"]
    found = judged(path, "no head", "no head")
    assert [(m.names, m.roles) for m in found.matrices] == [(("wte.weight",), ("reads",))]
    assert "reads and predicts" not in found.explain + ledger(path).explain


# formats that are untied by design


MINGPT = {
    "vocab_size": V, "block_size": 24, "n_embd": D, "n_layer": 2, "n_head": 4, "dropout": 0.0,
    "bias": True,
}  # fmt: skip


def mingpt(tmp_path, *, first: bool = False, equal: bool = False):
    """A state dict of either generation of minGPT, which has two matrices."""
    model = FirstMinGPT(MINGPT) if first else Karpathy(MINGPT, masks=True, tied=False)
    state = model.state_dict()
    names = ("tok_emb.weight", "head.weight") if first else (WTE, HEAD)
    if equal:
        state[names[1]] = state[names[0]].clone()
    torch.save(state, tmp_path / "model.pt")
    return tmp_path / "model.pt"


@pytest.mark.parametrize("first", [False, True])
def test_a_mingpt_is_untied_as_claimed(tmp_path, first):
    path = mingpt(tmp_path, first=first)
    found = judged(path, "untied as claimed", "drifted", "claim")
    assert "minGPT is untied by design" in found.claim_source
    with pytest.raises(UserError, match="nothing to mend"):
        fix(path, tmp_path / "new")
    judged(mingpt(tmp_path, first=first, equal=True), "untied as claimed", "equal copies")


def test_the_config_beside_a_mingpt_has_the_last_word(tmp_path):
    path = mingpt(tmp_path)
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    judged(path, "broken", "drifted")


def test_a_holder_is_looked_through():
    model = their_gpt2()
    model.config.tie_word_embeddings = False
    judged(nn.DataParallel(model), "contradicts the claim")
    model.config.tie_word_embeddings = True
    judged(nn.DataParallel(model), "tied", "same storage")
    judged(nn.DataParallel(model.transformer), "no head")


def test_the_shared_table_and_the_models_own_are_preferred(tmp_path):
    names = ["shared", "encoder.embed_tokens", "decoder.embed_tokens"]
    save_file({f"{name}.weight": torch.randn(V, D) for name in names}, tmp_path / "a")
    assert audit(tmp_path / "a").matrices[0].names == ("shared.weight",)
    names = ["model.embed_tokens", "model.layers.61.embed_tokens"]
    save_file({f"{name}.weight": torch.randn(V, D) for name in names}, tmp_path / "b")
    assert audit(tmp_path / "b").matrices[0].names == ("model.embed_tokens.weight",)


def test_what_differs_by_an_infinity_is_told_so(tmp_path):
    w = torch.randn(V, D)
    save_file({"wte.weight": w, HEAD: torch.where(w == w[3, 3], torch.inf, w)}, tmp_path / "a")
    found = judged(tmp_path / "a", "broken", "drifted")
    assert "infinite or none" in found.explain and "number is 0" not in found.explain


def test_control_characters_in_names_are_shown_as_text(tmp_path):
    save_file({"\x1b[2J\n.wte.weight": torch.randn(V, D)}, tmp_path / "a")
    found = judged(tmp_path / "a", "tied")
    assert "\x1b" not in found.explain and "\\x1b[2J" in found.explain


def test_a_row_too_wide_for_an_embedding_is_none(tmp_path):
    width = (1 << 22) + 1
    header = {"wte.weight": {"dtype": "U8", "shape": [2, width], "data_offsets": [0, 2 * width]}}
    raw = json.dumps(header).encode()
    with (tmp_path / "a").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + 2 * width)
    with pytest.raises(UserError, match="no matrix"):
        audit(tmp_path / "a")


def test_our_own_head_with_a_computed_weight_is_not_tied():
    model = GPT(GPTConfig(**SHAPE))
    model.head = nn.utils.parametrizations.weight_norm(fresh_head())
    judged(model, "broken", "derived")


def test_the_package_lists_its_public_names():
    assert dir(tie_package) == sorted(tie_package.__all__)


# what an audit says is what loading does


@pytest.mark.parametrize("claim", [True, False, "REMOVE"])
@pytest.mark.parametrize("rows", [(V + 4, V), (V, V + 4)])
def test_a_resize_of_one_side_is_broken_and_the_command_that_is_named_mends_it(
    tmp_path, claim, rows
):
    def resize(state):
        longer = torch.cat([state[WTE], torch.ones(4, D)])
        state[WTE], state[HEAD] = longer[: rows[0]], longer[: rows[1]].clone()

    path = rewrite(
        save(their_gpt2(), tmp_path / "m"), resize, tie_word_embeddings=claim, vocab_size=rows[0]
    )
    found = judged(path, "broken", "padded", "equal copies")
    needs_a_choice = claim is False
    keeps = "input" if rows[1] < rows[0] else "input | output"
    keep = f" --keep {keeps}" if needs_a_choice else ""
    assert f"`tiedgpt tie fix MODEL DEST{keep}`" in found.explain
    with pytest.raises(CorruptInputError, match=r"`tiedgpt tie fix MODEL DEST" + re.escape(keep)):
        GPT.from_pretrained(path)
    mended = fix(path, tmp_path / "new", keep="input" if needs_a_choice else None)
    assert mended.after.verdict == "tied"
    assert GPT.from_pretrained(tmp_path / "new").wte.weight.shape == (rows[0], D)


@pytest.mark.parametrize("head", ["vocab_projector", "generator_lm_head", "lm_head", "embed_out"])
def test_heads_of_other_architectures_are_known_by_name(tmp_path, head):
    state = {"m.word_embeddings.weight": torch.randn(V, D), f"{head}.weight": torch.randn(V, D)}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "other", "tie_word_embeddings": false}')
    assert judged(tmp_path, "untied as claimed").matrices[1].names == (f"{head}.weight",)


def test_an_embedding_of_an_unknown_name_is_asked_about_and_not_called_missing(tmp_path):
    state = {"transformer.w.weight": torch.randn(V, D), HEAD: torch.randn(V, D)}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "ctrl", "tie_word_embeddings": false}')
    with pytest.raises(UserError, match=r"transformer\.w\.weight.*--input"):
        audit(tmp_path)
    found = judged(tmp_path, "untied as claimed", input_name="transformer.w")
    assert [matrix.names for matrix in found.matrices] == [("transformer.w.weight",), (HEAD,)]
