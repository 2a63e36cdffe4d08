"""The audit's verdicts and texts, on checkpoints written by the real libraries."""

import copy
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace as Config
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization as parametrize

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
from tiedgpt import GPT, GPTConfig
from tiedgpt import tie as tie_package
from tiedgpt.errors import UserError
from tiedgpt.tie import audit, fix, ledger
from tiedgpt.weights.containers import read_safetensors
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.torch_file import stored_tensor


def judged(source, verdict: str, *some: str, **names):
    """Assert the verdict, its exit code, and that these findings are among those made."""
    report = audit(source, **names)
    assert report.verdict == verdict, report.explain
    is_broken = verdict in ("broken", "contradicts the claim") or report.load_error is not None
    assert report.exit_code == (6 if is_broken else 0)
    assert {*some} <= {finding.kind for finding in report.findings}, report.explain
    assert all(finding.explain and "\n" not in finding.title for finding in report.findings)
    json.dumps(report.as_dict(), allow_nan=False)
    return report


# a saved model of transformers, with a change to its tensors or its config


class Case(NamedTuple):
    verdict: str
    findings: tuple[str, ...] = ()
    change: Callable[[dict], object] = lambda state: None
    config: dict = {}  # noqa: RUF012
    says: str = ""
    comparison: dict = {}  # noqa: RUF012
    wasted_bytes: int = 0


def head(make) -> Callable[[dict], object]:
    """Add a head, made of the embedding."""
    return lambda state: state.update({HEAD: make(state[WTE]).clone()})


def one_row(w: torch.Tensor, row: int, value: float) -> torch.Tensor:
    changed = w.clone()
    changed[row, 1] = value
    return changed


UNTIED, ALL_ROWS = {"tie_word_embeddings": False}, {"rows_compared": V, "differing_rows": 0}
CASES = {
    "claimed untied": Case("contradicts the claim", ("missing",), config=UNTIED),
    "a misspelt key": Case("tied", ("one matrix", "config"), config={"tie_word_embedding": False}),
    "a copy": Case(
        "tied, stored twice", ("equal copies",), head(torch.clone), comparison=ALL_ROWS,
        says="Dropping one loses nothing", wasted_bytes=4 * V * D,
    ),
    "transposed": Case(
        "broken", ("transposed", "equal copies"), head(lambda w: w.T), comparison=ALL_ROWS,
        says=r"Write a copy that loads:\ntiedgpt tie fix \S*/m m-fixed$", wasted_bytes=4 * V * D,
    ),
    "transposed, of Llama": Case(
        "broken", ("transposed", "equal copies"), head(lambda w: w.T), wasted_bytes=4 * V * D,
        config={"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    ),
    "padded with zeros": Case(
        "broken", ("equal copies", "padded"), head(lambda w: torch.cat([w, torch.zeros(31, D)])),
        says=r"31 rows more than the 97 tokens(.|\n)* 0 of them hold", comparison=ALL_ROWS,
        wasted_bytes=4 * 128 * D,
    ),
    "padded with ones": Case(
        "broken", ("equal copies", "padded"), head(lambda w: torch.cat([w, torch.ones(31, D)])),
        says=r"31 of them hold numbers other than zero", wasted_bytes=4 * 128 * D,
    ),
    "padded and drifted": Case(
        "broken", ("drifted", "padded"), head(lambda w: torch.cat([-w, torch.ones(31, D)])),
        says="with --keep input or --keep output:",
    ),
    "a row too few": Case(
        "broken", ("drifted", "padded"), head(lambda w: -w[:96]), says="with --keep input:"
    ),
    "both padded": Case(
        "tied", ("one matrix", "padded"),
        lambda state: state.update({WTE: torch.cat([state[WTE], torch.zeros(31, D)])}),
    ),
    "another width": Case("broken", ("shapes",), head(lambda w: torch.randn(V, D + 1))),
    "only a head": Case(
        "tied", ("one matrix",), lambda state: state.update({HEAD: state.pop(WTE)}),
        says="has the head's name",
    ),
    "infinity": Case(
        "broken", ("drifted", "not finite"), head(lambda w: one_row(w, 7, torch.inf)),
        says="infinite or none", comparison={"first_rows": (7,), "not_finite_rows": 1},
    ),
    "NaN": Case(
        "broken", ("drifted", "not finite"), head(lambda w: one_row(w, 7, torch.nan)),
        says="One of them is zero", comparison={"first_rows": (7,), "cosine": None},
    ),
    "one row": Case(
        "broken", ("drifted",), head(lambda w: one_row(w, 7, 2.0)), says="Most rows are equal",
    ),
    "half of the rows": Case(
        "broken", ("drifted",), lambda state: state.update({
            WTE: state[WTE][:96], HEAD: torch.cat([2 * state[WTE][:48], state[WTE][48:96]])
        }),
        says=r"48 of 96(.|\n)*began as one matrix", config={"vocab_size": 96},
    ),
    "noise": Case(
        "broken", ("drifted",), head(lambda w: w + w.std() * torch.randn(V, D)),
        says="related but far apart",
    ),
    "a coarser type": Case(
        "broken", ("drifted",), head(lambda w: w.to(torch.bfloat16)),
        says="Rounding to the coarser", comparison={"within_rounding": True},
    ),
    "a bias and a transform": Case(
        "tied", ("one matrix", "does not load"),
        lambda state: state.update({
            "lm_head.bias": torch.zeros(V), "lm_head.layer_norm.weight": torch.zeros(D),
            "lm_head.dense.weight": torch.zeros(D, D),
            "cls.predictions.transform.dense.weight": torch.zeros(D, D),
        }),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_changed_file_is_judged_and_described(tmp_path, name):
    case = CASES[name]
    path = rewrite(save(their_gpt2(), tmp_path / "m"), case.change, **case.config)
    report = judged(path, case.verdict)
    assert {finding.kind for finding in report.findings} - {"claim"} == {*case.findings}
    assert re.search(case.says, report.explain)
    assert report.wasted_bytes == case.wasted_bytes
    assert {key: getattr(report.comparison, key) for key in case.comparison} == case.comparison
    if len(report.matrices) == 1:
        assert report.matrices[0].roles == ("reads", "predicts")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_float_type_is_read(tmp_path, dtype):
    def add(state):
        state[WTE] = state[WTE].to(dtype)
        state[HEAD] = state[WTE].clone()
        state[HEAD][4] += 1

    report = judged(rewrite(save(their_gpt2(), tmp_path / "m"), add), "broken")
    assert (report.comparison.differing_rows, report.comparison.first_rows) == (1, (4,))
    assert report.comparison.largest == pytest.approx(1, rel=1e-2)


@pytest.mark.parametrize("shards", [False, True])
def test_a_model_saved_with_a_replaced_head_is_broken(tmp_path, shards):
    model = their_gpt2()
    model.lm_head = fresh_head()
    path = save(model, tmp_path / "run" / "model", **({"max_shard_size": "20KB"} if shards else {}))
    assert (path / "model.safetensors.index.json").exists() == shards
    report = judged(tmp_path / "run", "broken", "drifted", "fresh")  # it stands for its model
    assert report.comparison.differing_rows == V
    assert report.comparison.first_rows == tuple(range(10))
    assert abs(report.comparison.cosine) < 0.1
    fresh = [finding for finding in report.findings if finding.kind == "fresh"]
    assert [finding.title.split()[0] for finding in fresh] == [HEAD]
    assert "N(0, 0.02)" in fresh[0].explain and "nothing in common" in report.explain
    largest = (model.lm_head.weight - model.transformer.wte.weight).abs().max().item()
    assert report.comparison.largest == pytest.approx(largest, rel=1e-6)


def numbers(shape="standard_normal", std=0.02, mean=0.0, power=1.0, rows=0.0) -> torch.Tensor:
    """A matrix of exact mean and deviation; `power` changes its tails, `rows` its rows' norms."""
    x = getattr(np.random.default_rng(0), shape)((512, 503)) - 0.5 * (shape == "random")
    x = np.sign(x) * np.abs(x) ** power
    if rows:
        x *= (1 + rows * (-1) ** np.arange(512)[:, None]) / np.linalg.norm(x, axis=1, keepdims=True)
    return torch.from_numpy(std * ((x - x.mean()) / x.std() + mean)).float()


FRESH, LINEAR = "N(0, 0.02)", {"shape": "random", "std": (3 * 503) ** -0.5}
INITIALIZATIONS = [
    ({}, FRESH), ({"std": 503**-0.5}, "N(0, 0.045)"), (LINEAR, "uniform in +-0.045"),
    ({"std": 0.01055}, "N(0, 0.01)"), ({"std": 1.0565}, None), ({"std": 0.945}, "N(0, 1)"),
    ({"mean": 0.0198}, FRESH), ({"mean": -0.02}, None),
    ({"rows": 0.078}, FRESH), ({"rows": 0.0796}, None),  # 2.5 times the spread of N's
    ({"power": 1.0302}, FRESH), ({"power": 1.0306}, None), ({"power": 0.9656}, None),
    (LINEAR | {"power": 1.131}, "uniform"), (LINEAR | {"power": 1.133}, None),
    (LINEAR | {"std": 1.049 * 1509**-0.5}, "uniform"), (LINEAR | {"std": 1.051 * 1509**-0.5}, None),
    ({"cosine": 0.0298}, FRESH), ({"cosine": 0.03}, None),
]  # fmt: skip
"""Numbers on both sides of each bound for 512 x 503 of them, and the initialization."""


@pytest.mark.parametrize(("changes", "initialization"), INITIALIZATIONS)
def test_numbers_are_fresh_within_the_spread_of_a_sample(changes, initialization):
    changes = dict(changes)
    cosine, w = changes.pop("cosine", 0.0), numbers(rows=0.5).flip(1)
    x = numbers(**changes).double()
    along = w.double() / w.double().norm()
    across = x - (x * along).sum() * along
    head = across + cosine / (1 - cosine**2) ** 0.5 * across.norm() * along
    module = nn.ModuleDict({"wte": nn.Embedding(512, 503), "head": nn.Linear(503, 512, bias=False)})
    module.load_state_dict({"wte.weight": w, "head.weight": head.float()})
    fresh = [f.explain for f in audit(module).findings if f.kind == "fresh"]
    assert (initialization or "") in "".join(fresh) and len(fresh) == (initialization is not None)


def test_a_merged_adapter_with_a_saved_head_is_broken(tmp_path):
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
    report = judged(rewrite(path, tie_word_embeddings=True), "broken", "drifted")
    assert report.comparison.differing_rows == 6
    assert report.comparison.first_rows == (3, 4, 5, 6, 7, 8)
    assert report.comparison.largest == pytest.approx(0.1, rel=1e-4)
    assert 0.9 < report.comparison.cosine < 1


@pytest.mark.parametrize("legacy", [False, True])
def test_a_nested_torch_file_with_compiled_names_is_judged(tmp_path, legacy):
    options = {"_use_new_zipfile_serialization": not legacy}
    state = {f"_orig_mod.{name}": t for name, t in their_gpt2().state_dict().items()}
    torch.save({"model": state, "step": 3}, tmp_path / "a.pt", **options)
    assert judged(tmp_path / "a.pt", "tied", "same storage").matrices[0].names == (WTE, HEAD)
    state["_orig_mod.lm_head.weight"] = torch.randn(V, D)
    torch.save({"model": state}, tmp_path / "b.pt", **options)
    judged(tmp_path / "b.pt", "broken", "drifted")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_gguf_files_of_quantized_types_are_judged(tmp_path, kind):
    w, changed = matrix(), matrix()
    changed[5] *= -1
    path = write_gguf(
        tmp_path / "a.gguf", {"token_embd.weight": w, "output.weight": changed}, kind=kind
    )
    report = judged(path, "untied as claimed", "drifted")
    assert (report.comparison.differing_rows, report.comparison.first_rows) == (1, (5,))
    if kind != "Q4_0":
        assert report.comparison.largest == pytest.approx(2 * abs(w[5]).max(), rel=0.02)


@pytest.mark.parametrize("names", [("W", "H"), (WTE, "onnx::MatMul_12"), (WTE, HEAD)])
@pytest.mark.parametrize("external", [False, True])
def test_onnx_files_with_one_and_two_copies_are_told_apart(tmp_path, names, external):
    for head, verdict in (
        ("one", "tied"), ("gemm", "tied"), ("copy", "tied, stored twice"), ("other", "broken"),
    ):  # fmt: skip
        path = write_onnx(tmp_path / f"{head}.onnx", head, external=external, names=names)
        report = judged(path, verdict)
        assert report.matrices[0].names[0] == names[0]
        assert report.wasted_bytes == (V * D * 4 if head == "copy" else 0)
        (tmp_path / "data.bin").unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_torchs_onnx_export_holds_two_copies(tmp_path, tied):
    torch.manual_seed(1)
    model = GPT(GPTConfig(**SHAPE, tie_word_embeddings=tied)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = torch.zeros(1, 5, dtype=torch.long)
        torch.onnx.export(model, (ids,), tmp_path / "m.onnx", dynamo=True, verbose=False)
    judged(tmp_path / "m.onnx", "tied, stored twice" if tied else "broken", "transposed")


def test_a_tied_replaced_and_wrapped_module_is_judged():
    model = their_gpt2()
    judged(model, "tied", "same storage")
    judged(copy.deepcopy(model), "tied", "same storage")
    model.lm_head = nn.Sequential(nn.Linear(D, D), nn.Dropout(), fresh_head())
    report = judged(model, "broken", "drifted")
    assert report.matrices[1].names == ("lm_head.2.weight",)


def test_a_vocabulary_of_three_times_the_width_is_recognised():
    """Then the attention's matrices (3D, D) have the shape of W."""
    model = GPT(GPTConfig(vocab_size=96, n_positions=8, n_embd=32, n_layer=2, n_head=2))
    assert model.h[0].attn.c_attn.weight.shape == model.wte.weight.shape
    assert judged(model, "tied").matrices[0].roles == ("reads", "predicts")
    assert ledger(model).total == model.config.parameter_count()


def test_separate_equal_parameters_in_memory_are_broken():
    model = their_gpt2()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    judged(model, "broken", "equal copies")
    model.requires_grad_(False)
    judged(model, "tied, stored twice", "equal copies")
    model = their_gpt2()
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    judged(model, "broken", "same storage", "two parameters on one storage")
    model.to("meta").lm_head = nn.Linear(D, V, bias=False, device="meta")
    judged(model, "broken", "not comparable")


def test_a_module_with_other_names_is_judged():
    class Odd(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.lookup, self.score = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
            if tied:
                self.score.weight = self.lookup.weight

    tied = Odd(tied=True)
    tied.h = nn.ModuleList([nn.ModuleDict({"output": weight_norm(nn.Linear(D, D))})])  # no head
    tied = judged(tied, "tied", "same storage")
    assert "counts it 2 times" in tied.explain
    untied = judged(Odd(tied=False), "untied as claimed", "drifted")  # it never said it was a GPT
    assert "nothing is claimed\nThe module has no config" in untied.explain
    assert untied.claim is None and "broken" not in untied.explain


class Buffered(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.register_buffer("w", w)


class Twice(nn.Module):
    def forward(self, w):
        return 2 * w


def with_lora(model, name):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=[name], r=2))


def layer_changed_by(change):
    return lambda model, name: change(getattr(model, name)) and None


DERIVED = {
    "buffer": lambda model, name: setattr(model, name, Buffered(torch.ones(V, D))),
    "quantized": lambda model, name: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}),
    "old norm": layer_changed_by(nn.utils.weight_norm),
    "new norm": layer_changed_by(weight_norm),
    "twice": layer_changed_by(lambda head: parametrize(head, "weight", Twice())),
    "lora": with_lora,
    "no matrix": lambda model, name: setattr(model, name, nn.Identity()),
}
"""Change a head or its model in place, or return another model."""


@pytest.mark.parametrize("how", DERIVED)
@pytest.mark.filterwarnings("ignore")
def test_a_head_derived_from_the_matrix_is_not_tied(how):
    model = their_gpt2()
    model = DERIVED[how](model, "lm_head") or model
    judged(model, "broken", "derived")
    model.config.tie_word_embeddings = False
    judged(model, "untied as claimed", "derived")
    other = nn.ModuleDict({"wte": nn.Embedding(V, D), "head": nn.Linear(D, V, bias=False)})
    other.head.weight = other.wte.weight
    judged(DERIVED[how](other, "head") or other, "broken", "derived")


def test_a_module_that_contains_the_model_is_judged():
    model = their_gpt2()
    judged(nn.DataParallel(model), "tied", "same storage")
    judged(nn.DataParallel(model.transformer), "no head")
    model.config.tie_word_embeddings = False
    judged(model, "contradicts the claim", "claim")
    for claim in ({}, {"tie_word_embeddings": None}, {"tie_word_embeddings": True}):
        model.config = Config(**claim, text_config=Config(tie_word_embeddings=False))
        judged(nn.DataParallel(model), "tied" if any(claim.values()) else "contradicts the claim")


def test_matrices_that_no_name_tells_apart_are_asked_about(tmp_path):
    path = save(their_gpt2(), tmp_path / "m")

    def rename(state):
        state["a.x"], state["b.x"] = state.pop(WTE), torch.randn(V, D)

    def add_two(state):
        for name in ("encoder", "decoder"):
            state[f"{name}.embed_tokens.weight"] = state["a.x"].clone()

    rewrite(path, rename)
    for names, says in (
        ({}, r"a\.x .*--input .* and --output"),
        ({"input_name": "a.x"}, r"does not tell whether it predicts: b\.x"),
        ({"input_name": "nothing"}, r"no matrix 'nothing'"),
    ):
        with pytest.raises(UserError, match=says):
            audit(path, **names)
    judged(path, "broken", input_name="a.x", output_name="b.x")
    judged(path, "tied", input_name="a.x", output_name="a.x")
    says = r"could be the input: .*coder\.embed_tokens.*coder.*--input"
    with pytest.raises(UserError, match=says):
        audit(rewrite(path, add_two))


def test_only_a_model_is_judged_and_no_adapter_alone(tmp_path):
    with pytest.raises(UserError, match="neither"):
        audit(3)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="adapter"):
        audit(tmp_path)
    tensors = {"base.wte.weight": torch.zeros(V, D), "base.h.0.lora_A.weight": torch.zeros(2, D)}
    for name in ("adapter_model.safetensors", "x.safetensors"):
        save_file(tensors, tmp_path / name)
        with pytest.raises(UserError, match="adapter"):
            audit(tmp_path / name)


def test_a_row_too_wide_for_an_embedding_is_ignored(tmp_path):
    width = (1 << 22) + 1
    header = {"wte.weight": {"dtype": "U8", "shape": [2, width], "data_offsets": [0, 2 * width]}}
    raw = json.dumps(header).encode()
    with (tmp_path / "a").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + 2 * width)
    with pytest.raises(UserError, match="no matrix"):
        audit(tmp_path / "a")


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
    assert set(read_safetensors(OpenFile(tmp_path / "big.safetensors"))[0]) == set(header)
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
    assert verdict == ("broken" if across else "tied, stored twice")
    assert 5 < int(megabytes) < 300, megabytes


X = torch.randn(V + 10, 2 * D)
VIEWS = {
    "interleaved": (X[:V, :D], X[:V, D:]),
    "shifted": (X[:V], X[10:]),
    "square": (X[: 2 * D], X[: 2 * D].T),
}


@pytest.mark.parametrize("name", VIEWS)
def test_two_views_of_one_storage_are_two_matrices(tmp_path, name):
    torch.save(dict(zip(("wte.weight", HEAD), VIEWS[name], strict=True)), tmp_path / "a.pt")
    assert len(judged(tmp_path / "a.pt", "broken", "drifted").matrices) == 2
    assert "one matrix" not in ledger(tmp_path / "a.pt").explain or name == "square"


def test_a_transposed_view_is_the_same_matrix():
    w = their_gpt2().transformer.wte.weight
    assert stored_tensor("a", w).is_view_of(stored_tensor("b", w.detach().T))
    assert not stored_tensor("a", w).is_view_of(stored_tensor("b", w.detach()[1:]))


@pytest.mark.parametrize("claim", [True, False, "REMOVE"])
@pytest.mark.parametrize("name", ["GPT2Model", "LlamaForSequenceClassification"])
def test_a_body_or_a_classifier_has_no_head(tmp_path, name, claim):
    path = rewrite(
        save(their_gpt2(), tmp_path / "m"), architectures=[name], tie_word_embeddings=claim
    )
    report = judged(path, "no head", "no head")
    assert "does not predict tokens" in report.explain
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
def test_an_unreadable_head_is_never_judged_tied(tmp_path, tensors):
    path = rewrite(save(their_gpt2(), tmp_path / "m"), lambda state: state.update(tensors))
    assert judged(path, "broken", "not comparable").matrices[0].roles == ("reads",)
    with pytest.raises(UserError, match="predicts and is not read"):
        fix(path, tmp_path / "new")
    judged(rewrite(path, tie_word_embeddings=False), "untied as claimed", "not comparable")


def test_the_embedding_of_a_saved_body_only_reads(tmp_path):
    path = save(their_gpt2().transformer, tmp_path / "m")
    report = judged(path, "no head", "no head")
    assert [(m.names, m.roles) for m in report.matrices] == [(("wte.weight",), ("reads",))]
    assert "reads and predicts" not in report.explain + ledger(path).explain
    assert judged(their_gpt2().transformer, "no head").matrices[0].roles == ("reads",)


EMBED = "embed_tokens.weight"
ROLES_BY_NAME = [
    (["shared.weight", f"encoder.{EMBED}", f"decoder.{EMBED}"], "tied"),
    ([f"model.{EMBED}", f"model.layers.61.{EMBED}"], "tied"),
    (["m.word_embeddings.weight", "vocab_projector.weight"], "untied as claimed"),
    (["m.word_embeddings.weight", "generator_lm_head.weight"], "untied as claimed"),
    (["m.word_embeddings.weight", "lm_head.weight"], "untied as claimed"),
    (["m.word_embeddings.weight", "embed_out.weight"], "untied as claimed"),
]


@pytest.mark.parametrize(("names", "verdict"), ROLES_BY_NAME)
def test_names_of_other_architectures_tell_the_roles(tmp_path, names, verdict):
    save_file({name: torch.randn(V, D) for name in names}, tmp_path / "model.safetensors")
    is_tied = verdict == "tied"
    config = {"model_type": "other", "tie_word_embeddings": is_tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = judged(tmp_path, verdict)
    assert [matrix.names[0] for matrix in report.matrices] == names[: 1 if is_tied else 2]


def test_an_embedding_with_an_unknown_name_is_ambiguous_not_missing(tmp_path):
    state = {"transformer.w.weight": torch.randn(V, D), HEAD: torch.randn(V, D)}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "ctrl", "tie_word_embeddings": false}')
    with pytest.raises(UserError, match=r"transformer\.w\.weight.*--input"):
        audit(tmp_path)
    report = judged(tmp_path, "untied as claimed", input_name="transformer.w")
    assert [matrix.names[0] for matrix in report.matrices] == [*state]


def test_control_characters_in_names_are_shown_as_text(tmp_path):
    save_file({"\x1b[2J\n.wte.weight": torch.randn(V, D)}, tmp_path / "a")
    report = judged(tmp_path / "a", "tied")
    assert "\x1b" not in report.explain and "\\x1b[2J" in report.explain


def test_the_package_lists_its_public_names():
    assert dir(tie_package) == sorted(tie_package.__all__)


def lens_state(head: torch.Tensor, w: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a state dict by TransformerLens's names, whose matrices lie as (in, out)."""
    return {
        "embed.W_E": w, "pos_embed.W_pos": torch.randn(24, D), "ln_final.w": torch.ones(D),
        "blocks.0.attn.W_Q": torch.randn(4, D, D // 4), "blocks.0.mlp.W_in": torch.randn(D, 4 * D),
        "blocks.0.mlp.W_out": torch.randn(4 * D, D), "unembed.W_U": head,
        "unembed.b_U": torch.ones(V),
    }  # fmt: skip


def flax_state(head: torch.Tensor, w: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "params.embed.embedding": w, "params.pos_embed.embedding": torch.randn(24, D),
        "params.lm_head.kernel": head,
    }  # fmt: skip


def keras_state(head: torch.Tensor, w: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"token_embedding.embeddings.weight": w, "output_projection.kernel": head}


@pytest.mark.parametrize("container", ["state.pt", "state.safetensors"])
@pytest.mark.parametrize("layout", [lens_state, flax_state, keras_state])
def test_a_transposed_head_of_an_unknown_layout_is_never_broken(tmp_path, layout, container):
    torch.manual_seed(0)
    w, other = torch.randn(V, D), torch.randn(V, D)
    for head, verdict in ((w, "tied, stored twice"), (other, "untied as claimed")):
        state = layout(head.T.contiguous(), w)
        path = tmp_path / container
        (save_file if path.suffix == ".safetensors" else torch.save)(state, path)
        report = audit(path)
        assert report.verdict == verdict and report.exit_code == 0
        assert report.transposed == (report.matrices[1].names[0],)
        assert "transposed" in {finding.kind for finding in report.findings}
        for keep in (None, "input", "output", "both"):
            with pytest.raises(UserError, match="nothing to mend"):
                fix(path, tmp_path / "fixed", keep=keep)
