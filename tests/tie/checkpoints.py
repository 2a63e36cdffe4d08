"""Tiny checkpoints of every format, made with the real libraries."""

import hashlib
import io
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tiedgpt import GPT, GPTConfig
from tiedgpt.cli.main import main
from tiedgpt.weights.registry import writers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gguf
    import onnx
    import transformers
    from onnx import TensorProto, helper, numpy_helper
    from transformers import GPT2Config, GPT2LMHeadModel

transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()

V, D = 97, 32
SHAPE = {"vocab_size": V, "n_positions": 24, "n_embd": D, "n_layer": 2, "n_head": 4}
IDS = {"bos_token_id": 1, "eos_token_id": 1}
WTE, HEAD = "transformer.wte.weight", "lm_head.weight"
CONV1D = re.compile(r".*\.c_\w+\.weight")
"""Matrices that transformers stores as (in, out)."""


def their_gpt2(*, bias: bool = True, **values) -> GPT2LMHeadModel:
    """A tiny GPT-2 of transformers whose weights do not look freshly initialised."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**{**SHAPE, **IDS, **values})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(
                1 + 0.5 * torch.randn(parameter.shape[0]).reshape(-1, *[1] * (parameter.ndim - 1))
            )
            parameter.add_(0.05 * torch.randn_like(parameter))
            if not bias and name.endswith(".bias"):
                parameter.zero_()
    return model


def state_of(model: GPT2LMHeadModel) -> dict[str, torch.Tensor]:
    """Return the body's weights by OpenAI's names, as (out, in)."""
    state = model.transformer.state_dict()
    return {n: t.T.contiguous() if CONV1D.fullmatch(n) else t for n, t in state.items()}


def nanogpt_state(
    model: GPT2LMHeadModel, *, bias: bool = False, masks: bool = False
) -> dict[str, torch.Tensor]:
    """Return a GPT-2 of transformers as nanoGPT's or minGPT's state dict, the head with it."""
    state = {f"transformer.{name}": tensor for name, tensor in state_of(model).items()}
    state = {n: t for n, t in state.items() if bias or not n.endswith(".bias")}
    n = model.config.n_positions
    for layer in range(model.config.n_layer) if masks else ():
        state[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, n, n).tril()
    return state | {HEAD: model.state_dict()[HEAD]}


def fresh_head() -> nn.Linear:
    torch.manual_seed(5)
    head = nn.Linear(D, V, bias=False)
    nn.init.normal_(head.weight, std=0.02)
    return head


def save(model, directory: Path, **options) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(directory, **options)
    return directory


def rewrite(directory: Path, tensors=None, **config) -> Path:
    """Change keys of a saved directory's config, and its tensors.

    `tensors` changes their dict or returns another.
    """
    path = directory / "config.json"
    values = json.loads(path.read_text()) | config
    path.write_text(json.dumps({k: v for k, v in values.items() if v != "REMOVE"}))
    if tensors is not None:
        state = load_file(directory / "model.safetensors")
        changed = tensors(state)
        state = changed if isinstance(changed, dict) else state
        state = {name: tensor.contiguous() for name, tensor in state.items()}
        save_file(state, directory / "model.safetensors", {"format": "pt"})
    return directory


def break_disk(monkeypatch, fault: Callable[[bytearray], None]) -> None:
    """Call `fault` with each block that is written to a `Path`: it may change or refuse it."""
    path_open = Path.open

    class FaultyFile(io.BufferedWriter):
        def write(self, block):
            changed = bytearray(memoryview(block).cast("B"))
            fault(changed)
            return super().write(changed)

    def open_faulty(path, mode="r", *args, **options):
        if mode == "wb":
            return FaultyFile(io.FileIO(path, "wb"))
        return path_open(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", open_faulty)


def flip_a_bit(block: bytearray) -> None:
    """Change a bit of a block as large as a matrix over the vocabulary."""
    if len(block) >= V * D * 4:
        block[100] ^= 1


def digest(directory: Path) -> dict[str, str]:
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


@torch.no_grad()
def differs_in_transformers(copy: Path, ours: nn.Module) -> bool:
    """Whether transformers, if it has a class for the copy, computes other logits from it."""
    if "model_type" not in (copy / "config.json").read_text():
        return False
    peer, ids = GPT2LMHeadModel.from_pretrained(copy).float().eval(), torch.arange(V)[None, :24]
    return float((ours(ids) - peer(ids).logits).abs().max()) > 1e-4


def matrix(seed: int = 1, rows: int = V, width: int = D) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


GGUF_SIZES = {
    "context_length": 24, "embedding_length": D, "block_count": 2, "head_count": 4,
    "feed_forward_length": 4 * D, "layer_norm_eps": 1e-5,
}  # fmt: skip


def gguf_tensors(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return tensors by llama.cpp's names. A tensor that it does not know keeps its name."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, n_blocks=3)
    tensors = {}
    for name, tensor in state.items():
        key = "lm_head.weight" if name == "head.weight" else name
        tensors[names.get_name(key, (".weight", ".bias")) or name] = tensor.detach().numpy()
    return tensors


def write_gguf(
    path: Path, tensors: dict[str, np.ndarray], *, kind="F32", architecture="gpt2", **values
) -> Path:
    """Write with llama.cpp's own library; `kind` is ggml's name of the matrices' type.

    `values` are the arguments of the writer's `add_NAME` methods; None leaves one out.
    """
    writer = gguf.GGUFWriter(path, architecture)
    values = {"name": "tiny", "token_list": ["a"] * 50, "array": ("numbers", [1, 2, 3])} | values
    for name, value in values.items():
        if value is not None:
            getattr(writer, f"add_{name}")(*(value if isinstance(value, tuple) else (value,)))
    for name, array in tensors.items():
        is_plain = array.ndim == 1 or name == "position_embd.weight"
        ggml = gguf.GGMLQuantizationType["F32" if is_plain else kind]
        writer.add_tensor(name, gguf.quants.quantize(array, ggml), raw_dtype=ggml)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_onnx(path: Path, head: str, *, external: bool = False, names=("W", "H")) -> Path:
    """A graph that gathers rows, adds positions, and multiplies; `head` says with what.

    one: Transpose(W); gemm: Gemm(W, transB); copy: W^T stored again; other: another matrix.
    """
    w, h = matrix(), matrix(2)
    read, predict = names
    stored = {read: w, "wpe": matrix(3, 24), "block": matrix(4, D, D), "one": np.ones(1, "f4")}
    nodes = [
        helper.make_node("Gather", [read, "ids"], ["x"]),
        helper.make_node("Gather", ["wpe", "ids"], ["p"]),
        helper.make_node("Add", ["x", "p"], ["y"]),
        helper.make_node("MatMul", ["y", "block"], ["z"]),
    ]
    if head == "one":
        nodes.append(helper.make_node("Transpose", [read], ["Wt"], perm=[1, 0]))
        nodes.append(helper.make_node("MatMul", ["z", "Wt"], ["logits"]))
    elif head == "gemm":
        nodes.append(helper.make_node("Gemm", ["z", read], ["logits"], transB=1))
    else:
        stored[predict] = np.ascontiguousarray((w if head == "copy" else h).T)
        nodes.append(helper.make_node("MatMul", ["z", predict], ["logits"]))
    graph = helper.make_graph(
        nodes, "tiny",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [5])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [5, V])],
        [numpy_helper.from_array(array, name) for name, array in stored.items()],
    )  # fmt: skip
    model = helper.make_model(graph)
    onnx.checker.check_model(model)
    onnx.save(
        model, path, save_as_external_data=external, location="data.bin", size_threshold=0
    )  # fmt: skip
    return path


# llm.c: 256 int32 (magic, version, T, V, L, H, C, Vp), then sixteen arrays, wte padded

LLMC_ORDER = (
    "wte.weight wpe.weight ln_1.weight ln_1.bias attn.c_attn.weight attn.c_attn.bias "
    "attn.c_proj.weight attn.c_proj.bias ln_2.weight ln_2.bias mlp.c_fc.weight mlp.c_fc.bias "
    "mlp.c_proj.weight mlp.c_proj.bias ln_f.weight ln_f.bias"
).split()
"""OpenAI's names in llm.c's order; those of a block stand for an array of each layer."""


def write_llmc(
    path: Path, version: int, state: dict[str, torch.Tensor] | None = None, **sizes: int
) -> dict[str, np.ndarray]:
    """Write a checkpoint of llm.c; return its numbers as float32, by name.

    `state` has (out, in); without it, the numbers are random, as those of the padding are.
    """
    n_tokens, n_layer, width = (sizes[key] for key in "VLC")
    if state is None:
        shape = {"vocab_size": n_tokens, "n_positions": sizes["T"], "n_embd": width}
        state = state_of(their_gpt2(**shape, n_layer=n_layer, n_head=1))
    padding = torch.randn(sizes["Vp"] - n_tokens, width)
    state = state | {"wte.weight": torch.cat([state["wte.weight"], padding])}
    dtype = torch.bfloat16 if version == 5 else torch.float32
    names = [
        name for ours in LLMC_ORDER
        for name in ([ours] if ours in state else [f"h.{i}.{ours}" for i in range(n_layer)])
    ]  # fmt: skip
    header = np.zeros(256, "<i4")
    padded = 0 if version == 1 else sizes["Vp"]
    header[:8] = [20240326, version, *(sizes[key] for key in "TVLHC"), padded]
    arrays = {name: state[name].detach().to(dtype).contiguous() for name in names}
    numbers = [array.view(torch.uint8).numpy().tobytes() for array in arrays.values()]
    path.write_bytes(header.tobytes() + b"".join(numbers))
    return {name: array.float().numpy() for name, array in arrays.items()}


# A GPT in every layout

CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": V, "n_embd": D,
    "n_positions": SHAPE["n_positions"], "n_layer": SHAPE["n_layer"], "n_head": SHAPE["n_head"],
}  # fmt: skip
N_HEAD = {"n_head": SHAPE["n_head"], "activation_function": "gelu_new"}
"""Facts missing in nanoGPT's, minGPT's and bare files."""


def gpt_state(content: str) -> dict[str, torch.Tensor]:
    """Return every weight of a GPT by our names, as (out, in), with W as `content` says."""
    torch.manual_seed(0)
    state = {
        name: t + torch.randn_like(t) / 9
        for name, t in GPT(GPTConfig(**SHAPE)).state_dict().items()
    }
    longer = torch.from_numpy(matrix(7, V + 4))
    w = longer[:V].clone()
    both = {
        "one": (w, None),
        "equal": (w, w.clone()),
        "different": (w, torch.from_numpy(matrix(8))),
        "views": (w, w),
        "transposed": (w, w.T.contiguous()),
        "longer head": (w, longer),
        "longer embedding": (longer, w),
        "only a head": (None, w),
    }[content]
    del state["wte.weight"]
    matrices = zip(("wte.weight", "head.weight"), both, strict=True)
    return state | {name: matrix for name, matrix in matrices if matrix is not None}


def peer_state(state: dict[str, torch.Tensor], *, turn: bool) -> dict[str, torch.Tensor]:
    """The names of transformers and nanoGPT; transformers' matrices in blocks lie as (in, out)."""
    named = {
        "lm_head.weight" if n == "head.weight" else f"transformer.{n}": t for n, t in state.items()
    }
    return {n: t.T.contiguous() if turn and CONV1D.fullmatch(n) else t for n, t in named.items()}


LAYOUTS = {
    "safetensors": "transformers", "torch": "transformers", "nanoGPT": "nanogpt",
    "minGPT": "mingpt", "tiedgpt": "state_dict", "GGUF": "gguf", "llm.c": "llmc",
}  # fmt: skip
"""Layouts as their own programs write them, each with its format; `convert` writes all others."""


def converted_cells(name: str) -> list[tuple]:
    """Return the cells of a format, which `convert` writes."""
    writer = writers()[name]
    written = [(True, "one")]
    if writer.program.supports("tie_word_embeddings"):
        written += [(False, "equal"), (False, "different")]
    beside = ("none", True, False) if writer.suffix else ("none",)
    return [(name, claim, other, content) for claim, content in written for other in beside]


def write_layout(
    home: Path, layout: str, state: dict[str, torch.Tensor], inside=None, beside=None
) -> Path:
    """Write a GPT, and a config.json unless `beside` is "none"; return the path a user would type.

    `inside` and `beside` are the claims of the file and of config.json.
    """
    config = {} if beside in (None, "none") else {"tie_word_embeddings": beside}
    path = home
    match layout:
        case "safetensors":
            save_file(peer_state(state, turn=True), home / "model.safetensors", {"format": "pt"})
            config |= CONFIG
        case "torch":
            torch.save(peer_state(state, turn=True), home / "pytorch_model.bin")
            config |= CONFIG
        case "nanoGPT":
            args = {k: SHAPE[k] for k in ("n_layer", "n_head", "n_embd", "vocab_size")}
            args |= {"block_size": SHAPE["n_positions"], "bias": True, "dropout": 0.0}
            path = home / "ckpt.pt"
            torch.save({"model": peer_state(state, turn=False), "model_args": args}, path)
        case "minGPT":
            n = SHAPE["n_positions"]
            mask = {f"h.{i}.attn.bias": torch.ones(n, n).tril()[None, None] for i in range(2)}
            path = home / "model.pt"
            torch.save(peer_state(state | mask, turn=False), path)
        case "tiedgpt":
            path = home / "state.pt"
            torch.save(state, path)
        case "GGUF":
            path = home / "model.gguf"
            claim = None if inside is None else ("tiedgpt.tie_word_embeddings", inside)
            write_gguf(path, gguf_tensors(state), bool=claim, **GGUF_SIZES)
        case "llm.c":
            sizes = {"T": SHAPE["n_positions"], "V": V, "L": 2, "H": 4, "C": D, "Vp": 128}
            path = home / "model.bin"
            write_llmc(path, 3, state, **sizes)
            config |= CONFIG
        case name:
            directory = home / "plain"
            directory.mkdir()
            untied = {"tie_word_embeddings": inside}
            (directory / "config.json").write_text(json.dumps(CONFIG | untied))
            save_file(
                peer_state(state, turn=True), directory / "model.safetensors", {"format": "pt"}
            )
            path = home / f"model{writers()[name].suffix}"
            options = ["--to", name, "--precision", "fp32"]
            assert main(["convert", str(directory), str(path), *options]) == 0
    if beside != "none":
        (home / "config.json").write_text(json.dumps(config))
    return path
