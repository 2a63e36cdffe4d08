"""The shape of a GPT as one frozen record, the papers' presets, and its size by formula.

No torch is imported here: a config can be made, checked and counted without it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from tiedgpt.errors import UserError
from tiedgpt.names import OTHER_NAMES
from tiedgpt.options import option, read_number
from tiedgpt.signatures import check_fields

Activation = Literal["gelu_new", "gelu", "relu", "silu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Everything that decides a GPT's parameters and its computation, under OpenAI's names.

    Unknown and impossible values raise `UserError`, naming the field.
    """

    vocab_size: int = option(least=1)
    """V: rows of the matrix that reads and predicts."""
    n_positions: int = option(least=1)
    """Longest sequence of tokens; one learned row of `wpe` for each position."""
    n_embd: int = option(least=1)
    """D: width of the residual stream."""
    n_layer: int = option(least=1)
    """L: number of blocks."""
    n_head: int = option(least=1)
    """H: attention heads in a block; divides `n_embd`."""
    n_inner: int | None = option(None, least=1)
    """Width inside the MLP; None means 4 D."""
    activation_function: Activation = "gelu_new"
    """`gelu_new` is the tanh form of GPT-1 and GPT-2; `gelu` the exact one."""
    norm: Literal["pre", "post"] = "pre"
    """GPT-2 normalises before each sublayer and once at the end; GPT-1 after each sublayer."""
    layer_norm_epsilon: float = option(1e-5, above=0, below=1)
    """Added to the variance in every LayerNorm."""
    bias: bool = True
    """Whether linear layers and LayerNorms have biases; nanoGPT trains without."""
    attention_windows: tuple[int, ...] | None = None
    """How many positions a position sees, its own included, in each layer; 0: all. The pattern
    repeats over the layers: GPT-3's dense and banded ones are (0, w). None: all dense."""
    embd_pdrop: float = option(0.1, least=0, below=1)
    """Dropout on the sum of token and position embeddings."""
    attn_pdrop: float = option(0.1, least=0, below=1)
    """Dropout on the attention weights."""
    resid_pdrop: float = option(0.1, least=0, below=1)
    """Dropout on what each sublayer adds to the residual stream."""
    tie_word_embeddings: bool = True
    """Whether `wte` also predicts; otherwise the model has a separate head."""
    bos_token_id: int | None = option(None, least=0)
    """Token that starts a text, if there is one."""
    eos_token_id: int | None = option(None, least=0)
    """Token that ends a text, if there is one."""

    def __new__(cls, *_: Any, **values: Any) -> GPTConfig:
        """Refuse unknown fields with `UserError`, before the dataclass's own check."""
        names = sorted(field.name for field in fields(cls))
        for name in values:
            if name not in names:
                other = OTHER_NAMES["GPTConfig"].get(name)
                hint = f"use {other}" if other else f"its fields are {', '.join(names)}"
                raise UserError(f"GPTConfig has no {name!r}", hint=hint)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.n_embd % self.n_head:
            problem = f"must be a multiple of n_head={self.n_head}, got {self.n_embd}"
            raise UserError(problem, option="n_embd")
        for name in ("bos_token_id", "eos_token_id"):
            token = getattr(self, name)
            if token is not None and token >= self.vocab_size:
                problem = f"must be an id below vocab_size={self.vocab_size}, got {token}"
                raise UserError(problem, option=name)
        windows = self.attention_windows
        if windows is not None:  # JSON and TOML give lists; a tuple is kept
            windows = tuple(read_number("attention_windows", n, int, least=0) for n in windows)
            if not 1 <= len(windows) <= self.n_layer:
                problem = f"must be 1 to {self.n_layer} integers, got {len(windows)}"
                raise UserError(problem, option="attention_windows")
            dense = all(window == 0 or window >= self.n_positions for window in windows)
            object.__setattr__(self, "attention_windows", None if dense else windows)

    def window(self, layer: int) -> int | None:
        """Return how many positions, its own included, a position of this layer sees."""
        windows = self.attention_windows or (0,)
        return windows[layer % len(windows)] or None

    @property
    def head_dim(self) -> int:
        """Width of one attention head, D / H."""
        return self.n_embd // self.n_head

    @property
    def inner_dim(self) -> int:
        """Width inside the MLP."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    def parameter_count(self) -> int:
        """Return the number of parameters, by formula; the tied matrix counts once."""
        width, inner = self.n_embd, self.inner_dim
        embeddings = (self.vocab_size + self.n_positions) * width
        matrices = 4 * width * width + 2 * width * inner
        biases = 5 * width + inner if self.bias else 0
        norm = 2 * width if self.bias else width
        final_norm = norm if self.norm == "pre" else 0
        head = 0 if self.tie_word_embeddings else self.vocab_size * width
        return embeddings + self.n_layer * (matrices + biases + 2 * norm) + final_norm + head

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> GPTConfig:
        """Return a published shape, or one of `tiedgpt train --size`, any field overridden.

        Shapes: GPT-1 (Radford et al. 2018), GPT-2 (Radford et al. 2019; the sizes as released),
        GPT-3 (Brown et al. 2020, table 2.1, with every layer's attention dense). Two rows of that
        table are impossible: XL's 24 heads of 128 do not make its width of 2,048, so 16 heads are
        built; 13B's width of 5,140 is not 40 heads of 128, so 5,120 is built.

        A preset's end-of-text id is kept only with the vocabulary that it belongs to.
        """
        if not isinstance(name, str) or name not in PRESETS:
            raise UserError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
        values = dict(PRESETS[name])
        if overrides.get("vocab_size", values["vocab_size"]) != values["vocab_size"]:
            values.pop("bos_token_id", None)
            values.pop("eos_token_id", None)
        return cls(**(values | overrides))


def _gpt(n_layer: int, n_embd: int, n_head: int, *, n_positions: int) -> dict[str, Any]:
    shape = {"n_positions": n_positions, "n_embd": n_embd, "n_layer": n_layer, "n_head": n_head}
    return shape | {"vocab_size": 50257, "bos_token_id": 50256, "eos_token_id": 50256}


def _small(*sizes: int) -> dict[str, Any]:
    shape = zip(("n_layer", "n_embd", "n_head", "n_positions", "vocab_size"), sizes, strict=True)
    return {**dict(shape), "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}


PRESETS: dict[str, dict[str, Any]] = {
    "nano": _small(2, 64, 2, 128, 512), "tiny": _small(2, 128, 4, 128, 1024),
    "little": _small(2, 192, 6, 128, 1024), "slim": _small(4, 192, 3, 128, 1024),
    "mini": _small(4, 256, 4, 128, 4096), "small": _small(6, 384, 6, 256, 4096),
    "medium": _small(8, 512, 8, 512, 8192),
    "gpt1": {
        "vocab_size": 40478, "n_positions": 512, "n_embd": 768, "n_layer": 12, "n_head": 12,
        "norm": "post",
    },
    "gpt2": _gpt(12, 768, 12, n_positions=1024),
    "gpt2-medium": _gpt(24, 1024, 16, n_positions=1024),
    "gpt2-large": _gpt(36, 1280, 20, n_positions=1024),
    "gpt2-xl": _gpt(48, 1600, 25, n_positions=1024),
    "gpt3-small": _gpt(12, 768, 12, n_positions=2048),
    "gpt3-medium": _gpt(24, 1024, 16, n_positions=2048),
    "gpt3-large": _gpt(24, 1536, 16, n_positions=2048),
    "gpt3-xl": _gpt(24, 2048, 16, n_positions=2048),
    "gpt3-2.7b": _gpt(32, 2560, 32, n_positions=2048),
    "gpt3-6.7b": _gpt(32, 4096, 32, n_positions=2048),
    "gpt3-13b": _gpt(40, 5120, 40, n_positions=2048),
    "gpt3-175b": _gpt(96, 12288, 96, n_positions=2048),
}  # fmt: skip
