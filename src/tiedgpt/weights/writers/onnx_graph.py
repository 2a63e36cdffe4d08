"""A GPT as an ONNX graph: plain nodes, and one initializer that both reads and predicts.

    input_ids       (batch, sequence)              rows of wte.weight --+
    position_ids    (batch, sequence)              rows of wpe.weight --+--> blocks --> ln_f
    attention_mask  (batch, past + sequence)       who sees whom                         |
    past_key_values.N.key, .value                  present.N.key, .value                 v
                                       logits (batch, sequence, V) = Gemm(h, wte.weight, transB=1)

The names are those of Hugging Face optimum's text-generation-with-past. The prefill is a step after
a past of length 0, so one graph serves both. `Gemm` takes W as it lies: of `Transpose(W)`,
onnxruntime would make a second matrix when it loads the file. Operators are of opset 17
(onnx.ai/onnx/operators).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tiedgpt.core.config import GPTConfig
from tiedgpt.weights.checkpoint import EMBEDDING, HEAD
from tiedgpt.weights.formats import onnx_message as onnx
from tiedgpt.weights.formats import protobuf_writer as proto
from tiedgpt.weights.formats.onnx_file import CONSTANT
from tiedgpt.weights.formats.onnx_message import BFLOAT16, BOOL, FLOAT16, FLOAT32, INT64, Attribute
from tiedgpt.weights.formats.protobuf_writer import Message

OPSET, IR_VERSION = 17, 8
"""The first with LayerNormalization; onnxruntime runs it from 1.12 (2022) on."""
LOWEST = {FLOAT32: -3.4028234663852886e38, FLOAT16: -65504.0}
"""The score of what is not seen; finite, so that a row of nothing but padding is no nan."""
BATCH, NEW, PAST = "batch_size", "sequence_length", "past_sequence_length"
ALL = f"{PAST} + {NEW}"


def gpt_graph(config: GPTConfig, data_type: int, initializers: Message) -> Message:
    """Return the GraphProto of a GPT whose initializers, under our names, are of `data_type`.

    Matrices of the blocks are (in, out). bfloat16 ones are cast to float32 and computed in that.
    """
    graph = _Graph(config, data_type)
    x = graph.add("embedded", "Add", graph.tokens(), graph.positions())
    seen = {window: graph.seen(window) for window in dict.fromkeys(_windows(config))}
    for layer, window in enumerate(_windows(config)):
        x = graph.block(x, layer, seen[window])
    if config.norm == "pre":
        x = graph.norm("ln_f", x)
    graph.logits(x)
    return proto.text(2, "gpt") + graph.nodes + initializers + graph.ends


def _windows(config: GPTConfig) -> list[int | None]:
    return [config.window(layer) for layer in range(config.n_layer)]


class _Graph:
    """Nodes in the order of computation; methods take names of values and return their result's."""

    def __init__(self, config: GPTConfig, data_type: int) -> None:
        self.config = config
        self.is_cast = data_type == BFLOAT16
        self.float = FLOAT32 if self.is_cast else data_type
        self.nodes: Message = []
        self.ends: Message = []
        self.made: set[str] = set()
        for name, length in (("input_ids", NEW), ("attention_mask", ALL), ("position_ids", NEW)):
            self.ends += proto.message(11, onnx.value_info(name, INT64, (BATCH, length)))
        self.output("logits", NEW, config.vocab_size)

    def add(self, output: str, op: str, *inputs: str, **attributes: Attribute) -> str:
        """Add a node with one output, and return that."""
        self.nodes += proto.message(1, onnx.node(op, inputs, (output,), **attributes))
        return output

    def whole(self, name: str, *values: int) -> str:
        """Return a list of whole numbers, made once."""
        return self._constant(name, INT64, values)

    def scalar(self, name: str, value: int) -> str:
        """Return a whole number, made once."""
        return self._constant(name, INT64, value)

    def real(self, name: str, value: float) -> str:
        """Return a number of the type that is computed in, made once."""
        return self._constant(name, self.float, value)

    def _constant(self, name: str, data_type: int, values: Sequence[int] | float) -> str:
        name = CONSTANT + name
        if name not in self.made:
            self.made.add(name)
            self.nodes += proto.message(1, onnx.constant(name, data_type, values))
        return name

    def parameter(self, name: str) -> str:
        """Return an initializer in the type that is computed in."""
        if not self.is_cast:
            return name
        cast = f"{name}.float32"
        if cast not in self.made:
            self.made.add(cast)
            self.add(cast, "Cast", name, to=FLOAT32)
        return cast

    def tokens(self) -> str:
        """Read: ids -> their rows of W."""
        return self.add("tokens", "Gather", self.parameter(EMBEDDING), "input_ids")

    def positions(self) -> str:
        """Positions -> their rows of wpe."""
        return self.add("positions", "Gather", self.parameter("wpe.weight"), "position_ids")

    def logits(self, x: str) -> None:
        """Predict: each position's dot product with every row of W, or of the head's matrix."""
        config = self.config
        matrix = self.parameter(EMBEDDING if config.tie_word_embeddings else HEAD)
        rows = self.add("rows", "Reshape", x, self.whole("rows", -1, config.n_embd))
        scores = self.add("scores", "Gemm", rows, matrix, transB=1)
        before = self.add("ids_shape", "Shape", "input_ids")
        size = self.whole("vocab_size", config.vocab_size)
        shape = self.add("logits_shape", "Concat", before, size, axis=0)
        self.add("logits", "Reshape", scores, shape)

    def output(self, name: str, *shape: int | str) -> None:
        """Declare an output of the graph, of the batch's size."""
        self.ends += proto.message(12, onnx.value_info(name, self.float, (BATCH, *shape)))

    def seen(self, window: int | None) -> str:
        """Return which keys each new token sees, (batch, 1, sequence, past + sequence) bool.

        Those that are not padding and not after it; with a window, the last so many of them.
        """
        if "seen" not in self.made:
            self.made.add("seen")
            self._seen_in_dense_layers()
        if window is None:
            return "seen"
        first, axes = self.scalar("1", 1), self.whole("key", 1, 2)
        if "key_rank" not in self.made:  # how many tokens a sequence has up to here
            self.made.add("key_rank")
            ranks = self.add("ranks", "CumSum", "attention_mask", first)
            self.add("key_rank", "Unsqueeze", ranks, axes)
            new = self.add("new_ranks", "Gather", ranks, "new_slots", axis=1)
            query = self.add("query_rank", "Unsqueeze", new, self.whole("query", 1, 3))
            self.add("distance", "Sub", query, "key_rank")
        limit = self.scalar(f"window_{window}", window)
        near = self.add(f"near_{window}", "Less", "distance", limit)
        return self.add(f"seen_{window}", "And", "seen", near)

    def _seen_in_dense_layers(self) -> None:
        """Slot j of a sequence is seen from slot i where j <= i and j is no padding."""
        zero, one = self.scalar("0", 0), self.scalar("1", 1)
        counts = {}
        for name in ("input_ids", "attention_mask"):
            shape = self.add(f"{name}.shape", "Shape", name)
            counts[name] = self.add(f"{name}.length", "Gather", shape, one)
        n_all = counts["attention_mask"]
        n_past = self.add("n_past", "Sub", n_all, counts["input_ids"])
        slots = self.add("slots", "Range", zero, n_all, one)
        new = self.add("new_slots", "Range", n_past, n_all, one)
        query = self.add("query_slots", "Unsqueeze", new, self.whole("column", 1))
        causal = self.add("causal", "LessOrEqual", slots, query)  # (T, past + T)
        real = self.add("is_token", "Cast", "attention_mask", to=BOOL)
        real = self.add("key_is_token", "Unsqueeze", real, self.whole("key", 1, 2))
        self.add("seen", "And", real, causal)

    def block(self, x: str, layer: int, seen: str) -> str:
        """(B, T, D) -> (B, T, D): attention, then MLP, each added to the residual stream."""
        at = f"h.{layer}"
        if self.config.norm == "post":
            attended = self.attention(x, layer, seen)
            x = self.norm(f"{at}.ln_1", self.add(f"{at}.attended", "Add", x, attended))
            return self.norm(f"{at}.ln_2", self.add(f"{at}.out", "Add", x, self.mlp(x, at)))
        attended = self.attention(self.norm(f"{at}.ln_1", x), layer, seen)
        x = self.add(f"{at}.attended", "Add", x, attended)
        return self.add(f"{at}.out", "Add", x, self.mlp(self.norm(f"{at}.ln_2", x), at))

    def norm(self, name: str, x: str) -> str:
        """LayerNorm over D."""
        epsilon = self.config.layer_norm_epsilon
        return self.add(
            f"{name}.out", "LayerNormalization", x, *self._both(name), axis=-1, epsilon=epsilon
        )

    def linear(self, name: str, x: str) -> str:
        """(B, T, in) -> (B, T, out)."""
        weight, *bias = self._both(name)
        if not bias:
            return self.add(f"{name}.out", "MatMul", x, weight)
        product = self.add(f"{name}.product", "MatMul", x, weight)
        return self.add(f"{name}.out", "Add", product, *bias)

    def _both(self, name: str) -> list[str]:
        names = ("weight", "bias") if self.config.bias else ("weight",)
        return [self.parameter(f"{name}.{each}") for each in names]

    def attention(self, x: str, layer: int, seen: str) -> str:
        """Each new token's mean of the values of what it sees, weighted by softmax(q . k)."""
        config, at = self.config, f"h.{layer}.attn"
        split = self.whole("heads", 0, 0, config.n_head, config.head_dim)
        parts = [f"{at}.q", f"{at}.k", f"{at}.v"]
        both = self.linear(f"{at}.c_attn", x)
        self.nodes += proto.message(1, onnx.node("Split", (both,), parts, axis=-1))
        q, k, v = (
            self.add(
                f"{part}.heads", "Transpose", self.add(f"{part}.split", "Reshape", part, split),
                perm=(0, 2, 1, 3),
            )
            for part in parts
        )  # fmt: skip
        k, v = self._with_past(layer, "key", k), self._with_past(layer, "value", v)
        scale = self.real("scale", 1 / math.sqrt(config.head_dim))
        q = self.add(f"{at}.scaled", "Mul", q, scale)
        scores = self.add(
            f"{at}.scores", "MatMul", q, self.add(f"{at}.turned", "Transpose", k, perm=(0, 1, 3, 2))
        )
        lowest = self.real("lowest", LOWEST[self.float])
        scores = self.add(f"{at}.masked", "Where", seen, scores, lowest)
        weights = self.add(f"{at}.weights", "Softmax", scores, axis=-1)
        y = self.add(f"{at}.mean", "MatMul", weights, v)
        y = self.add(f"{at}.by_token", "Transpose", y, perm=(0, 2, 1, 3))
        y = self.add(f"{at}.joined", "Reshape", y, self.whole("joined", 0, 0, config.n_embd))
        return self.linear(f"{at}.c_proj", y)

    def _with_past(self, layer: int, kind: str, new: str) -> str:
        """Put the new keys or values, (B, H, T, D/H), after the past ones, and give both out."""
        past, present = f"past_key_values.{layer}.{kind}", f"present.{layer}.{kind}"
        n_head, width = self.config.n_head, self.config.head_dim
        shape = (BATCH, n_head, PAST, width)
        self.ends += proto.message(11, onnx.value_info(past, self.float, shape))
        self.output(present, n_head, ALL, width)
        return self.add(present, "Concat", past, new, axis=2)

    def mlp(self, x: str, at: str) -> str:
        """Two layers with an activation between."""
        inner = self.linear(f"{at}.mlp.c_fc", x)
        return self.linear(f"{at}.mlp.c_proj", self.activation(f"{at}.mlp", inner))

    def activation(self, at: str, x: str) -> str:
        """Return what `activation_function` makes of x, in operators that every runtime has."""
        kind = self.config.activation_function
        if kind == "relu":
            return self.add(f"{at}.active", "Relu", x)
        if kind == "silu":
            return self.add(f"{at}.active", "Mul", x, self.add(f"{at}.gate", "Sigmoid", x))
        one, half = self.real("one", 1.0), self.real("half", 0.5)
        if kind == "gelu":
            ratio = self.add(f"{at}.ratio", "Div", x, self.real("sqrt_2", math.sqrt(2)))
            bent = self.add(f"{at}.bent", "Erf", ratio)
        else:  # gelu_new: tanh(sqrt(2 / pi) (x + 0.044715 x^3)), factored: no overflow in 16 bits
            cubic = self.add(f"{at}.scaled", "Mul", x, self.real("0.044715", 0.044715))
            cubic = self.add(f"{at}.square", "Mul", cubic, x)
            cubic = self.add(f"{at}.factor", "Add", cubic, one)
            root = self.add(f"{at}.root", "Mul", x, self.real("sqrt_2_pi", math.sqrt(2 / math.pi)))
            bent = self.add(f"{at}.bent", "Tanh", self.add(f"{at}.cubic", "Mul", root, cubic))
        gate = self.add(f"{at}.gate", "Add", bent, one)
        return self.add(f"{at}.active", "Mul", self.add(f"{at}.half", "Mul", x, half), gate)
