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

The nodes are written in ONNX's own text form, which `onnx.parser` reads. Names in it are parameters
(`wte.weight`), constants (`constant.heads`) and results. `a.out = Norm(x)` and `a.out = Linear(x)`
stand for a LayerNorm and a linear layer with the parameters `a.weight` and `a.bias`; `.b` in block
3 is `h.3.b`.

onnxruntime packs the matrix that predicts into a copy of its own when it loads a file. Where memory
counts more than the time of a step, set "session.disable_prepacking" to "1": then W is there once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from tiedgpt import __version__
from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.files import replacing, require_room
from tiedgpt.weights.checkpoint import EMBEDDING, HEAD, shapes
from tiedgpt.weights.huggingface import is_transposed
from tiedgpt.weights.onnx import CONSTANT, METADATA_KEY
from tiedgpt.weights.packages import require_package
from tiedgpt.weights.plain_model import (
    PRECISIONS,
    chosen_precision,
    converted,
    plain_parameters,
)

if TYPE_CHECKING:
    from tiedgpt.text.tokenizer import Tokenizer

OPSET, IR_VERSION = 17, 8
LARGEST_FILE = 1_900_000_000
"""Bytes of weights that the file itself holds: no reader takes a message of 2 GiB."""
ALIGNMENT = 4096
"""Of tensors in a file of their own, so that a runtime can map them into memory."""
TYPES = {torch.float32: "FLOAT", torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}
Write = Callable[[BinaryIO, str], None]
"""Writes the numbers of the tensor of a name."""
GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9
"""Field numbers of ModelProto, GraphProto and TensorProto."""

MASK = """
    is_token = Cast<to = 9>(attention_mask)
    key_is_token = Unsqueeze(is_token, constant.key_axes)
    ids_shape = Shape(input_ids)
    all_shape = Shape(attention_mask)
    n_new = Gather(ids_shape, constant.1)
    n_all = Gather(all_shape, constant.1)
    n_past = Sub(n_all, n_new)
    slots = Range(constant.0, n_all, constant.1)
    new_slots = Range(n_past, n_all, constant.1)
    query_slots = Unsqueeze(new_slots, constant.column)
    causal = LessOrEqual(slots, query_slots)
    mask = And(key_is_token, causal)
"""
"""Which keys each new token attends to, (batch, 1, sequence, past + sequence) bool: those that are
neither padding nor after it."""
DISTANCE = """
    ranks = CumSum(attention_mask, constant.1)
    key_ranks = Unsqueeze(ranks, constant.key_axes)
    new_ranks = Gather<axis = 1>(ranks, new_slots)
    query_ranks = Unsqueeze(new_ranks, constant.query_axes)
    distance = Sub(query_ranks, key_ranks)
"""
"""How many tokens, without padding, a key is before each new token."""
WINDOW = """
    near_{0} = Less(distance, constant.window_{0})
    mask_{0} = And(mask, near_{0})
"""
EMBEDDED = """
    tokens = Gather(wte.weight, input_ids)
    positions = Gather(wpe.weight, position_ids)
    embedded = Add(tokens, positions)
"""
ATTENTION = """
    .attn.q, .attn.k, .attn.v = Split<axis = -1>(.attn.c_attn.out)
    .attn.q.split = Reshape(.attn.q, constant.heads)
    .attn.k.split = Reshape(.attn.k, constant.heads)
    .attn.v.split = Reshape(.attn.v, constant.heads)
    .attn.q.heads = Transpose<perm = [0, 2, 1, 3]>(.attn.q.split)
    .attn.k.heads = Transpose<perm = [0, 2, 1, 3]>(.attn.k.split)
    .attn.v.heads = Transpose<perm = [0, 2, 1, 3]>(.attn.v.split)
    present.{n}.key = Concat<axis = 2>(past_key_values.{n}.key, .attn.k.heads)
    present.{n}.value = Concat<axis = 2>(past_key_values.{n}.value, .attn.v.heads)
    .attn.scaled = Mul(.attn.q.heads, constant.scale)
    .attn.turned = Transpose<perm = [0, 1, 3, 2]>(present.{n}.key)
    .attn.scores = MatMul(.attn.scaled, .attn.turned)
    .attn.masked = Where({mask}, .attn.scores, constant.lowest)
    .attn.weights = Softmax<axis = -1>(.attn.masked)
    .attn.mean = MatMul(.attn.weights, present.{n}.value)
    .attn.by_token = Transpose<perm = [0, 2, 1, 3]>(.attn.mean)
    .attn.joined = Reshape(.attn.by_token, constant.joined)
    .attn.c_proj.out = Linear(.attn.joined)
    .attended = Add({x}, .attn.c_proj.out)
"""
GATE = """
    .mlp.gate = Add(.mlp.bent, constant.one)
    .mlp.half = Mul(.mlp.c_fc.out, constant.half)
    .mlp.active = Mul(.mlp.half, .mlp.gate)
"""
GELU_NEW = """
    .mlp.scaled = Mul(.mlp.c_fc.out, constant.cubic)
    .mlp.square = Mul(.mlp.scaled, .mlp.c_fc.out)
    .mlp.factor = Add(.mlp.square, constant.one)
    .mlp.root = Mul(.mlp.c_fc.out, constant.sqrt_2_pi)
    .mlp.cubic = Mul(.mlp.root, .mlp.factor)
    .mlp.bent = Tanh(.mlp.cubic)
"""
"""tanh(sqrt(2 / pi) (x + 0.044715 x^3)), factored so that fp16 does not overflow."""
GELU = ".mlp.ratio = Div(.mlp.c_fc.out, constant.sqrt_2)  .mlp.bent = Erf(.mlp.ratio)"
SILU = ".mlp.gate = Sigmoid(.mlp.c_fc.out)  .mlp.active = Mul(.mlp.c_fc.out, .mlp.gate)"
RELU = ".mlp.active = Relu(.mlp.c_fc.out)"
ACTIVATIONS = {"relu": RELU, "silu": SILU, "gelu": GELU + GATE, "gelu_new": GELU_NEW + GATE}
PRE = """
    .ln_1.out = Norm({x})
    .attn.c_attn.out = Linear(.ln_1.out)
    ATTENTION
    .ln_2.out = Norm(.attended)
    .mlp.c_fc.out = Linear(.ln_2.out)
    ACTIVATION
    .mlp.c_proj.out = Linear(.mlp.active)
    .out = Add(.attended, .mlp.c_proj.out)
"""
POST = """
    .attn.c_attn.out = Linear({x})
    ATTENTION
    .ln_1.out = Norm(.attended)
    .mlp.c_fc.out = Linear(.ln_1.out)
    ACTIVATION
    .mlp.c_proj.out = Linear(.mlp.active)
    .sum = Add(.ln_1.out, .mlp.c_proj.out)
    .ln_2.out = Norm(.sum)
"""
BLOCKS = {"pre": (PRE, ".out"), "post": (POST, ".ln_2.out")}
"""GPT-2's and GPT-1's block, and its result."""
LOGITS = """
    rows = Reshape({x}, constant.rows)
    logits_of_rows = Gemm<transB = 1>(rows, {matrix})
    logits_shape = Concat<axis = 0>(ids_shape, constant.vocab_size)
    logits = Reshape(logits_of_rows, logits_shape)
"""
"""Each position's dot product with every row of W, or of the head's matrix."""


def write(
    model: GPT,
    path: Path,
    *,
    tokenizer: Tokenizer | None = None,
    precision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    largest_file: int = LARGEST_FILE,
) -> None:
    """Write `path`; a graph holds no tokenizer, but one that is given must fit the model.

    `precision`: "fp32"; "fp16", also computed in fp16; "bf16", stored so and computed in fp32;
    None: the model's own. Weights of more than `largest_file` bytes go to `<name>_data` beside it.
    One tensor at a time is copied. Raises `UserError`, before anything is written, for models that
    are not plain GPTs.
    """
    onnx = require_package("onnx", "writing ONNX files")
    require_package("onnx.parser", "writing ONNX files")
    path, config = Path(path), model.config
    parameters = plain_parameters(model, "an ONNX graph")
    dtype = PRECISIONS[chosen_precision(model, precision, PRECISIONS, "ONNX")]
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
    kind = onnx.TensorProto.DataType.Value(TYPES[dtype])
    protos = [onnx.TensorProto(name=n, dims=t.shape, data_type=kind) for n, t in tensors.items()]
    done = 0

    def write_data(file: BinaryIO, name: str) -> None:
        nonlocal done
        data = converted(name, tensors[name], dtype).flatten().view(torch.uint8).numpy().data
        done += file.write(data)
        if progress is not None:
            progress(done, n_bytes)

    proto = onnx.helper.make_model(
        _graph(onnx, config, dtype),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=IR_VERSION,
        producer_name="tiedgpt", producer_version=__version__,
    )  # fmt: skip
    onnx.helper.set_model_props(proto, {METADATA_KEY: json.dumps(asdict(config))})
    write_file = _write_two if n_bytes > largest_file else _write_one
    write_file(path, proto, protos, dtype.itemsize, write_data)


def _write_one(path: Path, model: Any, tensors: list[Any], width: int, write_data: Write) -> None:
    """Write the graph with the tensors in it; `onnx.save` would hold a copy of all in memory."""
    graph, starts, whole = model.graph.SerializeToString(), {}, 0
    model.ClearField("graph")
    for tensor in tensors:
        size = math.prod(tensor.dims) * width
        start = tensor.SerializeToString() + _field(RAW_DATA, size)
        starts[tensor.name] = _field(INITIALIZER, len(start) + size) + start
        whole += len(starts[tensor.name]) + size
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(model.SerializeToString() + _field(GRAPH, len(graph) + whole) + graph)
        for name, start in starts.items():
            file.write(start)
            write_data(file, name)


def _write_two(path: Path, model: Any, tensors: list[Any], width: int, write_data: Write) -> None:
    """Write the tensors to a file of their own, which is in place before the graph is."""
    beside = path.with_name(path.name + "_data")
    with replacing(path) as graph, replacing(beside) as weights:
        with weights.open("wb") as file:
            for tensor in tensors:
                file.write(bytes(-file.tell() % ALIGNMENT))
                length = math.prod(tensor.dims) * width
                place = {"location": beside.name, "offset": file.tell(), "length": length}
                for key, value in place.items():
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
    helper, types, declare = onnx.helper, onnx.TensorProto, onnx.helper.make_tensor_value_info
    is_half = dtype is torch.float16
    kind = types.FLOAT16 if is_half else types.FLOAT
    floats = np.dtype(np.float16 if is_half else np.float32)
    batch, new, past = "batch_size", "sequence_length", "past_sequence_length"
    both, n_head, width = f"{past} + {new}", config.n_head, config.head_dim
    lengths = {"input_ids": new, "attention_mask": both, "position_ids": new}
    inputs = [declare(name, types.INT64, (batch, length)) for name, length in lengths.items()]
    outputs = [declare("logits", kind, (batch, new, config.vocab_size))]
    for layer in range(config.n_layer):
        for part in (f"{layer}.key", f"{layer}.value"):
            cached = declare(f"past_key_values.{part}", kind, (batch, n_head, past, width))
            inputs.append(cached)
            outputs.append(declare(f"present.{part}", kind, (batch, n_head, both, width)))
    text = _text(config)
    if dtype is torch.bfloat16:  # computed in float32
        casts = (f"{name}.float32 = Cast<to = 1>({name})" for name in shapes(config))
        text = "\n".join(casts) + re.sub(r"\.(weight|bias)\b", r".\1.float32", text)
    text = re.sub(r"\b[a-z_]\w*(\.\w+)+", r'"\g<0>"', text)
    nodes = []
    for name, value in _constants(config, floats).items():
        if f'"{CONSTANT}{name}"' in text:
            array = np.array(value, floats if isinstance(value, float) else np.int64)
            tensor = onnx.numpy_helper.from_array(array, CONSTANT + name)
            nodes.append(helper.make_node("Constant", [], [CONSTANT + name], value=tensor))
    nodes += onnx.parser.parse_graph(f"gpt () => () {{ {text} }}").node
    for node in nodes:
        node.name = node.output[0]
    return helper.make_graph(nodes, "gpt", inputs, outputs)


def _constants(config: GPTConfig, floats: np.dtype[Any]) -> dict[str, Any]:
    return {
        "0": 0,
        "1": 1,
        "column": [1],
        "key_axes": [1, 2],
        "query_axes": [1, 3],
        "heads": [0, 0, config.n_head, config.head_dim],
        "joined": [0, 0, config.n_embd],
        "rows": [-1, config.n_embd],
        "vocab_size": [config.vocab_size],
        "scale": config.head_dim**-0.5,
        "lowest": float(np.finfo(floats).min),  # finite: padding is no nan
        "one": 1.0,
        "half": 0.5,
        "sqrt_2": math.sqrt(2),
        "sqrt_2_pi": math.sqrt(2 / math.pi),
        "cubic": 0.044715,
        **{f"window_{window}": window for window in config.attention_windows or ()},
    }


def _text(config: GPTConfig) -> str:
    """Return the nodes in the order of computation."""
    windows = [config.window(layer) for layer in range(config.n_layer)]
    banded = sorted({window for window in windows if window is not None})
    parts = [MASK, DISTANCE if banded else "", *(WINDOW.format(window) for window in banded)]
    parts.append(EMBEDDED)
    block, out = BLOCKS[config.norm]
    block = block.replace("ATTENTION", ATTENTION)
    block = block.replace("ACTIVATION", ACTIVATIONS[config.activation_function])
    x = "embedded"
    for layer, window in enumerate(windows):
        mask = "mask" if window is None else f"mask_{window}"
        relative = block.format(n=layer, x=x, mask=mask)
        parts.append(re.sub(r"(?<!\w)\.(?=\w)", f"h.{layer}.", relative))
        x = f"h.{layer}{out}"
    if config.norm == "pre":
        parts.append(f"ln_f.out = Norm({x})")
        x = "ln_f.out"
    parts.append(LOGITS.format(x=x, matrix=EMBEDDING if config.tie_word_embeddings else HEAD))
    text = "\n".join(parts)
    options = f"axis = -1, epsilon = {float(config.layer_norm_epsilon)}"
    norm = rf"\1.out = LayerNormalization<{options}>(\2, \1.weight, \1.bias)"
    linear = r"\1.product = MatMul(\2, \1.weight)  \1.out = Add(\1.product, \1.bias)"
    if not config.bias:
        norm = norm.replace(r", \1.bias", "")
        linear = r"\1.out = MatMul(\2, \1.weight)"
    text = re.sub(r"(\S+)\.out = Norm\((\S+)\)", norm, text)
    return re.sub(r"(\S+)\.out = Linear\((\S+)\)", linear, text)
