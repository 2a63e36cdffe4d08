"""Tiny checkpoints of every format, made with the real libraries."""

import json
import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

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


def their_gpt2(**values) -> GPT2LMHeadModel:
    """A tiny GPT-2 of transformers whose weights do not look freshly initialised."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**{**SHAPE, **IDS, **values})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(
                1 + 0.5 * torch.randn(parameter.shape[0]).reshape(-1, *[1] * (parameter.ndim - 1))
            )
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


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
    """Change a saved directory's tensors through a function, and keys of its config."""
    path = directory / "config.json"
    values = json.loads(path.read_text()) | config
    path.write_text(json.dumps({k: v for k, v in values.items() if v != "REMOVE"}))
    if tensors is not None:
        state = load_file(directory / "model.safetensors")
        tensors(state)
        state = {name: tensor.contiguous() for name, tensor in state.items()}
        save_file(state, directory / "model.safetensors", {"format": "pt"})
    return directory


def matrix(seed: int = 1, rows: int = V, width: int = D) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def write_gguf(path: Path, tensors: dict[str, np.ndarray], *, kind: str = "F32") -> Path:
    """Write with llama.cpp's own library; `kind` is ggml's name of the type."""
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_name("tiny")
    writer.add_token_list([f"token{i}" for i in range(50)])
    writer.add_array("numbers", [1, 2, 3])
    ggml = gguf.GGMLQuantizationType[kind]
    for name, array in tensors.items():
        if array.ndim == 1 or kind == "F32":
            writer.add_tensor(name, array)
        else:
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
    stored = {read: w, "wpe": matrix(3, 24), "block": matrix(4, D, D)}
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
