"""What a user may ask of fine-tuning. No torch: `--help` reads this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.options import option
from tiedgpt.train.options import DEFAULT_EPOCHS, TrainOptions, flag

TUNE_TOKENS = 8192
"""Tokens in a step of fine-tuning, where an epoch has `TUNE_STEPS` steps of so many."""
TUNE_STEPS = 16
TUNE_LEAST_STEPS = 300
"""Over few examples; a small model takes about 200 to learn 30 replies by heart."""
TUNE_PATIENCE = 4
TUNE_DROPOUT = 0.1
LORA_RATE = 10
"""How many times the usual rate suits adapters."""
MEMORIZING_RATE = 4
"""How many times it suits a few examples that are learned by heart."""
EXAMPLES = "examples with replies"
ONLY_FOR = {
    "template": EXAMPLES, "too_long": EXAMPLES, "skip_bad": EXAMPLES, "text_field": "text",
    "sample_prompt": "text",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TuneOptions(TrainOptions):
    """Fine-tuning of `start` on little data: other defaults, and what examples and adapters need.

    The rate is that of Radford et al. 2018; ten times that suits adapters (LoRA Without Regret).
    """

    weight_decay: float | None = option(
        0.01, "Weight decay of the blocks' matrices; W, norms and biases have none.", "optimization"
    )
    dropout: float | None = option(
        None,
        "Dropout of embeddings and residual branches; attention has none; default: 0.1, or 0 "
        "for fewer than 100 examples.",
        "model",
    )
    patience: int | None = option(
        None,
        "Stop after this many evaluations without improvement; default: 4, but all steps are "
        "trained with fewer than 50 held-out examples.",
        "time",
    )
    examples: bool = False
    """Whether the data are examples with replies, and not text; the data decide."""
    memorizes: bool = option(
        False,
        "Whether the examples are so few that they are to be learned by heart; the data decide.",
    )
    template: Literal["chatml", "plain"] | None = option(
        None, "Chat template; default: the one of --from, or chatml.", "data"
    )
    too_long: Literal["drop", "cut", "error"] = option(
        "drop", "What to do with examples longer than the context.", "data"
    )
    skip_bad: bool = option(False, "Skip and count lines that are not valid examples.", "data")
    packing: Literal["auto", "on", "off"] = option(
        "auto",
        "on: several examples or texts per row, which do not attend to each other; off: one "
        "example per row, and text continues from row to row; auto: on for examples, off for "
        "text.",
        "data",
    )
    lora: int | None = option(
        None,
        "Train LoRA adapters of this rank instead of the matrices; 8 is usual. model/ holds "
        "the merged model.",
        "model",
    )
    lora_targets: str | None = option(
        None,
        "Matrices that get adapters, separated by commas: attn.c_attn, h.0.*, wte, ...; wte "
        "adapts W for reading and predicting; default: the four matrices of each block.",
        "model",
    )

    def __post_init__(self) -> None:
        if self.start is None:
            raise UserError("name the model to tune: --from MODEL")
        if self.lora_targets is not None and self.lora is None:
            raise UserError("--lora-targets needs the rank of the adapters: --lora 8")
        if self.lora is not None and self.freeze is not None:
            raise UserError(
                "--lora freezes everything but the adapters", hint="give it without --freeze"
            )
        if self.lora is not None and self.lora < 1:
            raise UserError(f"--lora must be a rank of at least 1, got {self.lora}")
        super().__post_init__()

    def require_fit(self, *, examples: bool) -> None:
        """Raise `UserError` for options that are for examples where the data are text, or so."""
        data = EXAMPLES if examples else "text"
        for name, kind in ONLY_FOR.items():
            if kind != data and getattr(self, name) != getattr(TuneOptions, name):
                raise UserError(f"{flag(name)} is for {kind}, and the data are {data}")

    def batch_rows(self, context: int, epoch_rows: int) -> int:
        """Return the rows of about 8,192 tokens, fewer where an epoch has less than 16 of them."""
        most = max(1, TUNE_TOKENS // context)
        return self.batch_size or min(most, max(1, epoch_rows // TUNE_STEPS))

    @property
    def duration(self) -> tuple[str, float]:
        """For how long is trained: 3 epochs where nothing says it."""
        return super().duration if self.says_duration else ("epochs", DEFAULT_EPOCHS)

    @property
    def least_steps(self) -> int:
        """The steps that few examples need, where nothing says for how long is trained."""
        return TUNE_LEAST_STEPS if self.examples and not self.says_duration else 1

    @property
    def start_dropout(self) -> float | None:
        """The dropout of the model that is tuned: none where examples are learned by heart."""
        default = 0.0 if self.memorizes else TUNE_DROPOUT
        return default if self.dropout is None else self.dropout

    @property
    def limit_of_patience(self) -> int | None:
        """The evaluations without improvement that end the run."""
        return TUNE_PATIENCE if self.patience is None else self.patience

    def evaluations(self) -> int:
        """Return how often a run is evaluated on its way: four times an epoch."""
        return max(1, round(4 * (self.epochs or DEFAULT_EPOCHS)))

    def peak_rate(self, config: GPTConfig) -> float:
        """Return the peak learning rate."""
        if self.lr is not None:
            return self.lr
        times = LORA_RATE if self.lora is not None else MEMORIZING_RATE if self.memorizes else 1
        return times * super().peak_rate(config)
