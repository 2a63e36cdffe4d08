"""Write a GPT as ONNX: a graph that runs anywhere, with W once in the file.

    input_ids       (batch, sequence)          Gather: rows of wte.weight --+
    position_ids    (batch, sequence)          Gather: rows of wpe.weight --+--> blocks --> ln_f
    attention_mask  (batch, past + sequence)   1 for tokens, 0 for padding                   |
    past_key_values.N.key, .value              (batch, heads, past, D / heads)               v
      -> logits (batch, sequence, V) = Gemm(h, wte.weight, transB=1)
         present.N.key, .value                 (batch, heads, past + sequence, D / heads)

The names are those of Hugging Face optimum's text-generation-with-past and of transformers.js.
Prefill is a step with a past of length 0, so one graph serves both. Prompts of different lengths
are padded; the logits of padding mean nothing. `Gemm` takes W as it is stored: of `Transpose(W)`,
onnxruntime would make a second matrix when it loads the file. Operators are of opset 17, which
onnxruntime runs from 1.12 (2022) on. The config is in the metadata, so that `onnx.py` reads the
same model back.

onnxruntime packs the matrix that predicts into a copy of its own when it loads a file. Where memory
counts more than the time of a step, set "session.disable_prepacking" to "1": then W is there once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from tiedgpt import __version__
from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.files import replacing, require_room
from tiedgpt.weights.checkpoint import EMBEDDING, HEAD
from tiedgpt.weights.huggingface import is_transposed
from tiedgpt.weights.onnx import CONSTANT, METADATA_KEY
from tiedgpt.weights.packages import require_package
from tiedgpt.weights.plain_model import PRECISIONS, converted, plain_parameters

if TYPE_CHECKING:
    from tiedgpt.text.tokenizer import Tokenizer

OPSET, IR_VERSION = 17, 8
LARGEST_FILE = 1_900_000_000
"""Bytes of weights that the file itself holds: no reader takes a message of 2 GiB."""
ALIGNMENT = 4096
"""Of tensors in a file of their own, so that a runtime can map them into memory."""
TYPES = {torch.float32: "FLOAT", torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}
BATCH, NEW, PAST = "batch_size", "sequence_length", "past_sequence_length"
ALL = f"{PAST} + {NEW}"
GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9
"""Field numbers of ModelProto, GraphProto and TensorProto."""

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""


def write(
    model: GPT,
    path: Path,
    *,
    tokenizer: Tokenizer | None = None,
    precision: str | None = None,
    progress: Progress | None = None,
    largest_file: int = LARGEST_FILE,
) -> None:
    """Write `path`; a graph holds no tokenizer, but one that is given must fit the model.

    `precision`: "fp32"; "fp16", also computed in fp16; "bf16", stored so and computed in fp32;
    None: the model's own. Weights of more than `largest_file` bytes go to `<name>_data` beside it.
    One tensor at a time is copied. Raises `UserError`, before anything is written, for models that
    are not plain GPTs.
    """
    onnx = require_package("onnx", "writing ONNX files")
    path, config = Path(path), model.config
    parameters = plain_parameters(model, "an ONNX graph")
    if precision is not None and precision not in PRECISIONS:
        raise UserError(f"precision={precision!r} is none of {', '.join(PRECISIONS)}")
    dtype = model.wte.weight.dtype if precision is None else PRECISIONS[precision]
    if dtype not in TYPES:
        raise UserError(f"a model in {dtype} is not written as ONNX: give a precision, say fp32")
    if path.is_dir():
        raise UserError(f"{path} is a directory; give the name of a file to write")
    if tokenizer is not None and len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {config.vocab_size}: "
            "they do not belong together"
        )
    tensors = {n: p.detach().T if is_transposed(n) else p.detach() for n, p in parameters.items()}
    n_bytes = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize
    require_room(path.parent, n_bytes + (ALIGNMENT + 256) * len(tensors))
    writer = _Writer(onnx, tensors, dtype, progress, n_bytes)
    proto = _model(onnx, config, dtype)
    if n_bytes > largest_file:
        writer.write_two(path, proto)
    else:
        writer.write_one(path, proto)


class _Writer:
    """Writes tensors one at a time, so that a large model needs no memory for a second copy.

    `onnx.save` would serialize the whole model in memory.
    """

    def __init__(
        self,
        onnx: Any,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        progress: Progress | None,
        n_bytes: int,
    ) -> None:
        self.onnx, self.tensors, self.dtype = onnx, tensors, dtype
        self.progress, self.n_bytes, self.done = progress, n_bytes, 0

    def write_one(self, path: Path, model: Any) -> None:
        """Write the graph with the tensors in it."""
        graph = model.graph.SerializeToString()
        model.ClearField("graph")
        heads = {name: self._proto(name).SerializeToString() for name in self.tensors}
        starts = {name: head + _field(RAW_DATA, self._size(name)) for name, head in heads.items()}
        sizes = {name: len(start) + self._size(name) for name, start in starts.items()}
        whole = len(graph)
        whole += sum(len(_field(INITIALIZER, size)) + size for size in sizes.values())
        with replacing(path) as temporary, temporary.open("wb") as file:
            file.write(model.SerializeToString() + _field(GRAPH, whole) + graph)
            for name, start in starts.items():
                file.write(_field(INITIALIZER, sizes[name]) + start)
                self._write(file, name)

    def write_two(self, path: Path, model: Any) -> None:
        """Write the tensors to a file of their own, which is in place before the graph is."""
        beside = path.with_name(path.name + "_data")
        with replacing(path) as graph, replacing(beside) as weights:
            with weights.open("wb") as file:
                for name in self.tensors:
                    file.write(bytes(-file.tell() % ALIGNMENT))
                    tensor = self._proto(name)
                    tensor.data_location = self.onnx.TensorProto.EXTERNAL
                    place = {
                        "location": beside.name, "offset": file.tell(), "length": self._size(name),
                    }  # fmt: skip
                    for key, value in place.items():
                        tensor.external_data.add(key=key, value=str(value))
                    model.graph.initializer.append(tensor)
                    self._write(file, name)
            graph.write_bytes(model.SerializeToString())

    def _proto(self, name: str) -> Any:
        """Return a tensor without its data."""
        kind = getattr(self.onnx.TensorProto, TYPES[self.dtype])
        return self.onnx.TensorProto(name=name, dims=self.tensors[name].shape, data_type=kind)

    def _size(self, name: str) -> int:
        return self.tensors[name].numel() * self.dtype.itemsize

    def _write(self, file: BinaryIO, name: str) -> None:
        data = converted(name, self.tensors[name], self.dtype)
        file.write(data.flatten().view(torch.uint8).numpy().data)
        self.done += self._size(name)
        if self.progress is not None:
            self.progress(self.done, self.n_bytes)


def _field(number: int, n_bytes: int) -> bytes:
    """Return the tag and the length before a protobuf field of bytes or of a message."""
    encoded = bytearray([number << 3 | 2])
    while n_bytes > 127:
        encoded.append(n_bytes & 127 | 128)
        n_bytes >>= 7
    encoded.append(n_bytes)
    return bytes(encoded)


def _model(onnx: Any, config: GPTConfig, dtype: torch.dtype) -> Any:
    """Return the ModelProto of a GPT, without its initializers."""
    model = onnx.helper.make_model(
        _Graph(onnx, config, dtype).build(),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=IR_VERSION,
        producer_name="tiedgpt", producer_version=__version__,
    )  # fmt: skip
    onnx.helper.set_model_props(model, {METADATA_KEY: json.dumps(asdict(config))})
    return model


class _Graph:
    """Nodes in the order of computation; methods take names of values and return their result's.

    The initializers have our parameters' names; the blocks' matrices are (in, out).
    """

    def __init__(self, onnx: Any, config: GPTConfig, dtype: torch.dtype) -> None:
        self.onnx, self.config = onnx, config
        self.is_cast = dtype is torch.bfloat16  # computed in float32
        self.float = np.dtype("float16" if dtype is torch.float16 else "float32")
        self.nodes: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.made: set[str] = set()

    def build(self) -> Any:
        """Return the GraphProto."""
        config, integer = self.config, np.dtype("int64")
        for name, length in (("input_ids", NEW), ("attention_mask", ALL), ("position_ids", NEW)):
            self.inputs.append(self.value_info(name, integer, BATCH, length))
        self.outputs.append(self.value_info("logits", self.float, BATCH, NEW, config.vocab_size))
        tokens = self.add("tokens", "Gather", self.parameter(EMBEDDING), "input_ids")
        positions = self.add("positions", "Gather", self.parameter("wpe.weight"), "position_ids")
        x = self.add("embedded", "Add", tokens, positions)
        windows = [config.window(layer) for layer in range(config.n_layer)]
        masks = {window: self.mask(window) for window in dict.fromkeys(windows)}
        for layer, window in enumerate(windows):
            x = self.block(x, layer, masks[window])
        if config.norm == "pre":
            x = self.norm("ln_f", x)
        self.logits(x)
        return self.onnx.helper.make_graph(self.nodes, "gpt", self.inputs, self.outputs)

    def add(self, output: str, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output, and return that."""
        self.nodes.append(
            self.onnx.helper.make_node(op, inputs, [output], name=output, **attributes)
        )
        return output

    def once(self, output: str, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node unless it is there already."""
        if output not in self.made:
            self.made.add(output)
            self.add(output, op, *inputs, **attributes)
        return output

    def integers(self, name: str, values: int | Sequence[int]) -> str:
        """Return a constant: a list of integers, or one without axes."""
        return self._constant(name, np.array(values, np.int64))

    def number(self, name: str, value: float) -> str:
        """Return a constant of the dtype of the computation."""
        return self._constant(name, np.array(value, self.float))

    def _constant(self, name: str, array: np.ndarray[Any, Any]) -> str:
        tensor = self.onnx.numpy_helper.from_array(array, CONSTANT + name)
        return self.once(CONSTANT + name, "Constant", value=tensor)

    def parameter(self, name: str) -> str:
        """Return an initializer in the dtype of the computation."""
        if not self.is_cast:
            return name
        return self.once(f"{name}.float32", "Cast", name, to=self.onnx.TensorProto.FLOAT)

    def value_info(self, name: str, dtype: np.dtype[Any], *shape: int | str) -> Any:
        """Return the declaration of an input or output of the graph."""
        kind = self.onnx.helper.np_dtype_to_tensor_dtype(dtype)
        return self.onnx.helper.make_tensor_value_info(name, kind, shape)

    def logits(self, x: str) -> None:
        """Predict: each position's dot product with every row of W, or of the head's matrix."""
        config = self.config
        matrix = self.parameter(EMBEDDING if config.tie_word_embeddings else HEAD)
        rows = self.add("rows", "Reshape", x, self.integers("rows", [-1, config.n_embd]))
        products = self.add("logits_of_rows", "Gemm", rows, matrix, transB=1)
        ids_shape = self.add("ids_shape", "Shape", "input_ids")
        vocab_size = self.integers("vocab_size", [config.vocab_size])
        shape = self.add("logits_shape", "Concat", ids_shape, vocab_size, axis=0)
        self.add("logits", "Reshape", products, shape)

    def mask(self, window: int | None) -> str:
        """Return which keys each new token attends to, (batch, 1, sequence, past + sequence) bool.

        Those that are neither padding nor after it; with a window, only the last so many of them.
        """
        mask = self.once("mask", "And", self.is_token(), self.causal())
        if window is None:
            return mask
        one, axes = self.integers("1", 1), self.integers("key_axes", [1, 2])
        ranks = self.once("ranks", "CumSum", "attention_mask", one)  # tokens of a row up to here
        key = self.once("key_ranks", "Unsqueeze", ranks, axes)
        new = self.once("new_ranks", "Gather", ranks, "new_slots", axis=1)
        query = self.once("query_ranks", "Unsqueeze", new, self.integers("query_axes", [1, 3]))
        distance = self.once("distance", "Sub", query, key)
        limit = self.integers(f"window_{window}", window)
        near = self.add(f"near_{window}", "Less", distance, limit)
        return self.add(f"mask_{window}", "And", mask, near)

    def is_token(self) -> str:
        """Return where there is no padding, (batch, 1, 1, past + sequence) bool."""
        flags = self.once("is_token", "Cast", "attention_mask", to=self.onnx.TensorProto.BOOL)
        return self.once("key_is_token", "Unsqueeze", flags, self.integers("key_axes", [1, 2]))

    def causal(self) -> str:
        """Return slot j <= slot i for new slots i and all slots j, (sequence, past + sequence)."""
        zero, one = self.integers("0", 0), self.integers("1", 1)
        lengths = {}
        for name in ("input_ids", "attention_mask"):
            shape = self.once(f"{name}.shape", "Shape", name)
            lengths[name] = self.once(f"{name}.length", "Gather", shape, one)
        n_all = lengths["attention_mask"]
        n_past = self.once("n_past", "Sub", n_all, lengths["input_ids"])
        slots = self.once("slots", "Range", zero, n_all, one)
        new = self.once("new_slots", "Range", n_past, n_all, one)
        query = self.once("query_slots", "Unsqueeze", new, self.integers("column", [1]))
        return self.once("causal", "LessOrEqual", slots, query)

    def block(self, x: str, layer: int, mask: str) -> str:
        """(B, T, D) -> (B, T, D): attention, then MLP, each added to the residual stream."""
        at = f"h.{layer}"
        if self.config.norm == "post":
            attended = self.attention(x, layer, mask)
            x = self.norm(f"{at}.ln_1", self.add(f"{at}.attended", "Add", x, attended))
            return self.norm(f"{at}.ln_2", self.add(f"{at}.out", "Add", x, self.mlp(x, at)))
        attended = self.attention(self.norm(f"{at}.ln_1", x), layer, mask)
        x = self.add(f"{at}.attended", "Add", x, attended)
        return self.add(f"{at}.out", "Add", x, self.mlp(self.norm(f"{at}.ln_2", x), at))

    def norm(self, name: str, x: str) -> str:
        """LayerNorm over D."""
        weights, epsilon = self._weight_and_bias(name), self.config.layer_norm_epsilon
        return self.add(f"{name}.out", "LayerNormalization", x, *weights, axis=-1, epsilon=epsilon)

    def linear(self, name: str, x: str) -> str:
        """(B, T, in) -> (B, T, out)."""
        weight, *bias = self._weight_and_bias(name)
        if not bias:
            return self.add(f"{name}.out", "MatMul", x, weight)
        product = self.add(f"{name}.product", "MatMul", x, weight)
        return self.add(f"{name}.out", "Add", product, *bias)

    def _weight_and_bias(self, name: str) -> list[str]:
        kinds = ("weight", "bias") if self.config.bias else ("weight",)
        return [self.parameter(f"{name}.{kind}") for kind in kinds]

    def attention(self, x: str, layer: int, mask: str) -> str:
        """Causal self-attention over the cached and the new keys and values."""
        config, at = self.config, f"h.{layer}.attn"
        split = self.integers("heads", [0, 0, config.n_head, config.head_dim])
        parts = [f"{at}.q", f"{at}.k", f"{at}.v"]
        qkv = self.linear(f"{at}.c_attn", x)
        self.nodes.append(
            self.onnx.helper.make_node("Split", [qkv], parts, name=f"{at}.qkv", axis=-1)
        )
        heads = []
        for part in parts:
            reshaped = self.add(f"{part}.split", "Reshape", part, split)
            heads.append(self.add(f"{part}.heads", "Transpose", reshaped, perm=[0, 2, 1, 3]))
        q, k, v = heads
        k, v = self.with_cache(layer, "key", k), self.with_cache(layer, "value", v)
        q = self.add(f"{at}.scaled", "Mul", q, self.number("scale", config.head_dim**-0.5))
        k = self.add(f"{at}.k.transposed", "Transpose", k, perm=[0, 1, 3, 2])
        scores = self.add(f"{at}.scores", "MatMul", q, k)
        lowest = self.number("lowest", float(np.finfo(self.float).min))  # finite: padding is no nan
        scores = self.add(f"{at}.masked", "Where", mask, scores, lowest)
        weights = self.add(f"{at}.weights", "Softmax", scores, axis=-1)
        y = self.add(f"{at}.mean", "MatMul", weights, v)
        y = self.add(f"{at}.by_token", "Transpose", y, perm=[0, 2, 1, 3])
        y = self.add(f"{at}.joined", "Reshape", y, self.integers("joined", [0, 0, config.n_embd]))
        return self.linear(f"{at}.c_proj", y)

    def with_cache(self, layer: int, kind: str, new: str) -> str:
        """Append the new keys or values, (B, H, T, D/H), to the past ones, and output both."""
        past, present = f"past_key_values.{layer}.{kind}", f"present.{layer}.{kind}"
        n_head, width = self.config.n_head, self.config.head_dim
        self.inputs.append(self.value_info(past, self.float, BATCH, n_head, PAST, width))
        self.outputs.append(self.value_info(present, self.float, BATCH, n_head, ALL, width))
        return self.add(present, "Concat", past, new, axis=2)

    def mlp(self, x: str, at: str) -> str:
        """Two linear layers with an activation between."""
        inner = self.linear(f"{at}.mlp.c_fc", x)
        return self.linear(f"{at}.mlp.c_proj", self.activation(f"{at}.mlp", inner))

    def activation(self, at: str, x: str) -> str:
        """Apply `activation_function`, in operators that every runtime has."""
        kind = self.config.activation_function
        if kind == "relu":
            return self.add(f"{at}.active", "Relu", x)
        if kind == "silu":
            return self.add(f"{at}.active", "Mul", x, self.add(f"{at}.gate", "Sigmoid", x))
        one, half = self.number("one", 1.0), self.number("half", 0.5)
        if kind == "gelu":
            ratio = self.add(f"{at}.ratio", "Div", x, self.number("sqrt_2", math.sqrt(2)))
            bent = self.add(f"{at}.bent", "Erf", ratio)
        else:  # gelu_new: tanh(sqrt(2 / pi) (x + 0.044715 x^3)), factored: fp16 does not overflow
            cubic = self.add(f"{at}.scaled", "Mul", x, self.number("0.044715", 0.044715))
            cubic = self.add(f"{at}.square", "Mul", cubic, x)
            cubic = self.add(f"{at}.factor", "Add", cubic, one)
            root = self.number("sqrt_2_pi", math.sqrt(2 / math.pi))
            root = self.add(f"{at}.root", "Mul", x, root)
            bent = self.add(f"{at}.bent", "Tanh", self.add(f"{at}.cubic", "Mul", root, cubic))
        gate = self.add(f"{at}.gate", "Add", bent, one)
        return self.add(f"{at}.active", "Mul", self.add(f"{at}.half", "Mul", x, half), gate)
