"""Write a GPT as ONNX: a graph that runs anywhere, with W once in the file.

    input_ids       (batch, sequence)          Gather: rows of wte.weight --+
    position_ids    (batch, sequence)          Gather: rows of wpe.weight --+--> blocks --> ln_f
    attention_mask  (batch, past + sequence)   1 for tokens, 0 for padding                   |
    past_key_values.N.key, .value              (batch, heads, past, D / heads)               v
      -> logits (batch, sequence, V) = Gemm(h, wte.weight, transB=1)
         present.N.key, .value                 (batch, heads, past + sequence, D / heads)

The names are those of Hugging Face optimum's text-generation-with-past and of transformers.js.
Prefill is a step with a past of length 0, so one graph serves both. Prompts of different lengths
are padded; the logits of padding mean nothing. `Gemm` takes W in its stored layout: of
`Transpose(W)`, onnxruntime would make a second matrix when it loads the file. Operators are of
opset 17, which onnxruntime runs from 1.12 (2022) on. The config is in the metadata, so that the
same model is read back.

A linear layer's or a LayerNorm's result is named after it: `h.3.mlp.c_fc.out`.

onnxruntime packs the matrix that predicts into a copy of its own when it loads a file. Where memory
counts more than the time of a step, set "session.disable_prepacking" to "1": then W is there once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from tiedgpt import __version__
from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.files import replacing, require_room
from tiedgpt.runtime import require_package
from tiedgpt.weights.checkpoint import EMBEDDING, HEAD
from tiedgpt.weights.formats.onnx import CONSTANT, METADATA_KEY, WRITER
from tiedgpt.weights.formats.transformers import CONV1D
from tiedgpt.weights.parameters import PRECISIONS, convert_tensor, parameters_for

OPSET, IR_VERSION = 17, 8
LARGEST_FILE = 1_900_000_000
"""Bytes of weights that the file itself holds: no reader takes a message of 2 GiB."""
ALIGNMENT = 4096
"""Alignment of tensors in a separate file, so that a runtime can map them into memory."""
TYPES = {torch.float32: "FLOAT", torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}
Write = Callable[[BinaryIO, str], None]
"""Writes the numbers of the tensor of a name."""
GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9
"""Field numbers of ModelProto, GraphProto and TensorProto."""


def write(
    model: GPT,
    path: Path,
    *,
    precision: str = "fp32",
    progress: Callable[[int, int], None] | None = None,
    largest_file: int = LARGEST_FILE,
    **_: Any,
) -> None:
    """Write `path`; a graph holds no tokenizer.

    `precision`: "fp32"; "fp16", also computed in fp16; "bf16", stored so and computed in fp32.
    Weights of more than `largest_file` bytes go to `<name>_data` next to it. One tensor at a time
    is copied. Raises `UserError`, before anything is written, for models that are not plain GPTs.
    """
    onnx = require_package("onnx", "writing ONNX files")
    config, dtype = model.config, PRECISIONS[precision]
    parameters = parameters_for(WRITER.program, model)
    tensors = {
        n: p.detach().T if CONV1D.fullmatch(n) else p.detach() for n, p in parameters.items()
    }
    n_bytes = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize
    require_room(path.parent, n_bytes + (ALIGNMENT + 256) * len(tensors))
    number = onnx.TensorProto.DataType.Value(TYPES[dtype])
    protos = [onnx.TensorProto(name=n, dims=t.shape, data_type=number) for n, t in tensors.items()]
    done = 0

    def write_data(file: BinaryIO, name: str) -> None:
        nonlocal done
        data = convert_tensor(name, tensors[name], dtype).flatten().view(torch.uint8).numpy().data
        done += file.write(data)
        if progress is not None:
            progress(done, n_bytes)

    proto = onnx.helper.make_model(
        _graph(onnx, config, dtype),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="tiedgpt",
        producer_version=__version__,
    )
    onnx.helper.set_model_props(proto, {METADATA_KEY: json.dumps(asdict(config))})
    write_file = _write_two if n_bytes > largest_file else _write_one
    write_file(path, proto, protos, dtype.itemsize, write_data)


def _write_one(path: Path, model: Any, tensors: list[Any], width: int, write_data: Write) -> None:
    """Write the graph with the tensors in it; `onnx.save` would hold a copy of all in memory."""
    graph, starts, n_bytes = model.graph.SerializeToString(), {}, 0
    model.ClearField("graph")
    for tensor in tensors:
        size = math.prod(tensor.dims) * width
        start = tensor.SerializeToString() + _field(RAW_DATA, size)
        starts[tensor.name] = _field(INITIALIZER, len(start) + size) + start
        n_bytes += len(starts[tensor.name]) + size
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(model.SerializeToString() + _field(GRAPH, len(graph) + n_bytes) + graph)
        for name, start in starts.items():
            file.write(start)
            write_data(file, name)


def _write_two(path: Path, model: Any, tensors: list[Any], width: int, write_data: Write) -> None:
    """Write the tensors to a separate file first, then the graph."""
    beside = path.with_name(path.name + "_data")
    with replacing(path) as graph, replacing(beside) as weights:
        with weights.open("wb") as file:
            for tensor in tensors:
                file.write(bytes(-file.tell() % ALIGNMENT))
                length = math.prod(tensor.dims) * width
                entries = {"location": beside.name, "offset": file.tell(), "length": length}
                for key, value in entries.items():
                    tensor.external_data.add(key=key, value=str(value))
                tensor.data_location = tensor.EXTERNAL
                model.graph.initializer.append(tensor)
                write_data(file, tensor.name)
        graph.write_bytes(model.SerializeToString())


def _field(number: int, n_bytes: int) -> bytes:
    """Return the tag and the length before a protobuf field of bytes or of a message."""
    encoded = bytearray([number << 3 | 2])
    while n_bytes > 127:
        encoded.append(n_bytes & 127 | 128)
        n_bytes >>= 7
    return bytes([*encoded, n_bytes])


def _graph(onnx: Any, config: GPTConfig, dtype: torch.dtype) -> Any:
    """Return the GraphProto of a GPT, without its initializers."""
    types, declare = onnx.TensorProto, onnx.helper.make_tensor_value_info
    floats = types.FLOAT16 if dtype is torch.float16 else types.FLOAT
    batch, new, past = "batch_size", "sequence_length", "past_sequence_length"
    both, n_head, width = f"{past} + {new}", config.n_head, config.head_dim
    lengths = {"input_ids": new, "attention_mask": both, "position_ids": new}
    inputs = [declare(name, types.INT64, (batch, length)) for name, length in lengths.items()]
    outputs = [declare("logits", floats, (batch, new, config.vocab_size))]
    for layer in range(config.n_layer):
        for name in (f"{layer}.key", f"{layer}.value"):
            cached = declare(f"past_key_values.{name}", floats, (batch, n_head, past, width))
            inputs.append(cached)
            outputs.append(declare(f"present.{name}", floats, (batch, n_head, both, width)))
    network = _Network(onnx, config, dtype)
    network.compute_logits()
    return onnx.helper.make_graph(network.nodes, "gpt", inputs, outputs)


class _Network:
    """The nodes of a GPT in the order of computation. Every result is the name of a value."""

    def __init__(self, onnx: Any, config: GPTConfig, dtype: torch.dtype) -> None:
        self.onnx, self.config = onnx, config
        self.floats: np.dtype[Any] = np.dtype(np.float16 if dtype is torch.float16 else np.float32)
        self.stored_as_bf16 = dtype is torch.bfloat16  # computed in float32
        self.nodes: list[Any] = []
        self.named: set[str] = set()

    def __call__(self, op: str, *inputs: Any, out: str = "", **attributes: Any) -> str:
        """Add a node; numbers among its inputs become constants, several outputs are "a b"."""
        names = [x if isinstance(x, str) else self.constant(x) for x in inputs]
        out = out or f"{op}_{len(self.nodes)}"
        outputs = out.split()
        node = self.onnx.helper.make_node(op, names, outputs, name=outputs[0], **attributes)
        self.nodes.append(node)
        return out

    def constant(self, value: float | int | list[int]) -> str:
        name = f"{CONSTANT}{value}".replace(" ", "")
        if name not in self.named:
            array = np.array(value, self.floats if isinstance(value, float) else np.int64)
            self("Constant", out=name, value=self.onnx.numpy_helper.from_array(array, name))
            self.named.add(name)
        return name

    def parameter(self, name: str) -> str:
        if not self.stored_as_bf16:
            return name
        if name not in self.named:
            self("Cast", name, out=f"{name}.float32", to=self.onnx.TensorProto.FLOAT)
            self.named.add(name)
        return f"{name}.float32"

    def compute_logits(self) -> None:
        config, masks = self.config, self.masks()
        tokens = self("Gather", self.parameter(EMBEDDING), "input_ids")
        positions = self("Gather", self.parameter("wpe.weight"), "position_ids")
        x = self("Add", tokens, positions)
        block = self.pre_norm_block if config.norm == "pre" else self.post_norm_block
        for layer in range(config.n_layer):
            x = block(x, f"h.{layer}", layer, masks[config.window(layer)])
        if config.norm == "pre":
            x = self.norm(x, "ln_f")
        matrix = self.parameter(EMBEDDING if config.tie_word_embeddings else HEAD)
        rows = self("Gemm", self("Reshape", x, [-1, config.n_embd]), matrix, transB=1)
        shape = self("Concat", self("Shape", "input_ids"), [config.vocab_size], axis=0)
        self("Reshape", rows, shape, out="logits")

    def masks(self) -> dict[int | None, str]:
        """Return, by window, which keys a new token attends to: tokens that are not after it.

        Shape (batch, 1, sequence, past + sequence), bool. A window counts tokens without padding.
        """
        n_new = self("Gather", self("Shape", "input_ids"), 1)
        n_all = self("Gather", self("Shape", "attention_mask"), 1)
        new_slots = self("Range", self("Sub", n_all, n_new), n_all, 1)
        is_token = self("Cast", "attention_mask", to=self.onnx.TensorProto.BOOL)
        slots = self("Range", 0, n_all, 1)
        causal = self("LessOrEqual", slots, self("Unsqueeze", new_slots, [1]))
        masks: dict[int | None, str] = {}
        masks[None] = self("And", self("Unsqueeze", is_token, [1, 2]), causal)
        windows = {self.config.window(layer) for layer in range(self.config.n_layer)} - {None}
        if windows:
            ranks = self("CumSum", "attention_mask", 1)
            queries = self("Unsqueeze", self("Gather", ranks, new_slots, axis=1), [1, 3])
            distance = self("Sub", queries, self("Unsqueeze", ranks, [1, 2]))
            for window in sorted(windows, key=str):
                masks[window] = self("And", masks[None], self("Less", distance, window))
        return masks

    def pre_norm_block(self, x: str, name: str, layer: int, mask: str) -> str:
        x = self("Add", x, self.attention(self.norm(x, f"{name}.ln_1"), layer, mask))
        return self("Add", x, self.mlp(self.norm(x, f"{name}.ln_2"), f"{name}.mlp"))

    def post_norm_block(self, x: str, name: str, layer: int, mask: str) -> str:
        x = self.norm(self("Add", x, self.attention(x, layer, mask)), f"{name}.ln_1")
        return self.norm(self("Add", x, self.mlp(x, f"{name}.mlp")), f"{name}.ln_2")

    def norm(self, x: str, name: str) -> str:
        suffixes = ("weight", "bias") if self.config.bias else ("weight",)
        inputs = [self.parameter(f"{name}.{suffix}") for suffix in suffixes]
        return self(
            "LayerNormalization",
            x,
            *inputs,
            out=f"{name}.out",
            axis=-1,
            epsilon=float(self.config.layer_norm_epsilon),
        )

    def linear(self, x: str, name: str) -> str:
        weight = self.parameter(f"{name}.weight")
        if not self.config.bias:
            return self("MatMul", x, weight, out=f"{name}.out")
        return self(
            "Add", self("MatMul", x, weight), self.parameter(f"{name}.bias"), out=f"{name}.out"
        )

    def attention(self, x: str, layer: int, mask: str) -> str:
        name, config = f"h.{layer}.attn", self.config
        qkv = self.linear(x, f"{name}.c_attn")
        parts = self("Split", qkv, out=f"{name}.q {name}.k {name}.v", axis=-1).split()
        by_head = [self("Reshape", t, [0, 0, config.n_head, config.head_dim]) for t in parts]
        q, k, v = (self("Transpose", t, perm=[0, 2, 1, 3]) for t in by_head)
        past, present = f"past_key_values.{layer}", f"present.{layer}"
        k = self("Concat", f"{past}.key", k, out=f"{present}.key", axis=2)
        v = self("Concat", f"{past}.value", v, out=f"{present}.value", axis=2)
        scaled = self("Mul", q, config.head_dim**-0.5)
        scores = self("MatMul", scaled, self("Transpose", k, perm=[0, 1, 3, 2]))
        lowest = float(np.finfo(self.floats).min)  # finite: padding is no nan
        weights = self("Softmax", self("Where", mask, scores, lowest), axis=-1)
        mean = self("Transpose", self("MatMul", weights, v), perm=[0, 2, 1, 3])
        return self.linear(self("Reshape", mean, [0, 0, config.n_embd]), f"{name}.c_proj")

    def mlp(self, x: str, name: str) -> str:
        x = self.linear(x, f"{name}.c_fc")
        return self.linear(self.activation(x), f"{name}.c_proj")

    def activation(self, x: str) -> str:
        name = self.config.activation_function
        if name == "relu":
            return self("Relu", x)
        if name == "silu":
            return self("Mul", x, self("Sigmoid", x))
        if name == "gelu":
            bent = self("Erf", self("Div", x, math.sqrt(2)))
        else:  # tanh(sqrt(2 / pi) (x + 0.044715 x^3)), factored so that fp16 does not overflow
            factor = self("Add", self("Mul", self("Mul", x, 0.044715), x), 1.0)
            bent = self("Tanh", self("Mul", self("Mul", x, math.sqrt(2 / math.pi)), factor))
        return self("Mul", self("Mul", x, 0.5), self("Add", bent, 1.0))
