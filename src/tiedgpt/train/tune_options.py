"""The options of fine-tuning. No torch: `--help` reads this."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.names import explains_arguments
from tiedgpt.options import argument, flag, option
from tiedgpt.train.options import (
    AUTO,
    DEFAULT_EPOCHS,
    START_RATE,
    Duration,
    RunOptions,
    TaskName,
    TrainOptions,
)

TUNE_TOKENS = 8192
"""Tokens in a step of fine-tuning, where an epoch has `TUNE_STEPS` steps of so many."""
TUNE_STEPS = 16
TUNE_LEAST_STEPS = 300
"""Over few examples; a small model takes about 200 to learn 30 replies by heart."""
TUNE_PATIENCE = 4
TUNE_DROPOUT = 0.1
TUNE_DECAY = 0.01
LORA_RATE = 10
"""How many times the usual rate suits adapters."""
MEMORIZING_RATE, MEMORIZING_LORA_RATE = 4, 20
"""The same for a few examples that are learned by heart: without and with adapters."""
EXAMPLES = "examples with replies"
ONLY_FOR = {
    "template": EXAMPLES, "too_long": EXAMPLES, "skip_bad": EXAMPLES, "text_field": "text",
    "sample_prompt": "text",
}  # fmt: skip


@explains_arguments
@dataclass(frozen=True, kw_only=True)
class TuneOptions(RunOptions):
    """Fine-tuning of `start` on little data.

    The rate is that of Radford et al. 2018; ten times that suits adapters (LoRA Without Regret).
    """

    GROUP: ClassVar = "model"
    data: tuple[str, ...] = argument(
        "Examples in .jsonl, or text: files, folders, globs, - for standard input."
    )
    start: str | None = option(
        None,
        "The model to tune: directory, file, hub name or run; default: the newest run.",
        metavar="MODEL",
        long="from",
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
    )
    lora_targets: str | None = option(
        None,
        "Matrices that get adapters, separated by commas: attn.c_attn, h.0.*, wte, ...; wte "
        "adapts W for reading and predicting; default: the four matrices of each block.",
    )
    examples: bool = False
    """Whether the data are examples with replies, and not text; the data decide."""
    memorizes: bool = False
    """Whether the examples are so few that they are learned by heart; the data decide."""
    DEFAULTS: ClassVar = {
        "val": "a tenth of the text, or one in twenty examples",
        "context": "the model's context",
        "dropout": "0.1, or 0 for fewer than 100 examples",
        "epochs": "3, and with examples at least 300 steps",
        "eval_every": "four evaluations per epoch",
        "patience": "4, but all steps are trained with fewer than 50 held-out examples",
        "batch_size": "8,192 tokens, or fewer for little data",
        "optimizer": "adamw",
        "lr": "6.25e-5 x 768 / width, with --lora ten times that; with fewer than 100 examples "
        "four times, or with --lora twenty times",
        "weight_decay": f"{TUNE_DECAY}",
    }
    task: ClassVar[TaskName] = "lm"
    size: ClassVar[str] = AUTO
    tokenizer: ClassVar[str] = "bpe"
    continues: ClassVar[bool] = True
    chooses: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.data:
            raise UserError("DATA is missing", hint="give a .jsonl file of examples, or text")
        if self.lora_targets is not None and self.lora is None:
            raise UserError("--lora-targets needs the rank of the adapters: --lora 8")
        if self.lora is not None and self.freeze is not None:
            raise UserError(
                "--lora freezes everything but the adapters", hint="give it without --freeze"
            )
        if self.lora is not None and self.lora < 1:
            raise UserError(f"must be a rank of at least 1, got {self.lora}", option="lora")
        super().__post_init__()

    def require_fit(self, *, examples: bool) -> None:
        """Raise `UserError` for options that are for examples where the data are text, or so."""
        data = EXAMPLES if examples else "text"
        for each in fields(self):
            kind = ONLY_FOR.get(each.name, data)
            if kind != data and getattr(self, each.name) != each.default:
                raise UserError(f"{flag(each)} is for {kind}, and the data are {data}")

    @property
    def duration(self) -> Duration:
        """Return the training duration."""
        least = TUNE_LEAST_STEPS if self.examples else 1
        return self.duration_or(Duration("epochs", DEFAULT_EPOCHS, least))

    @property
    def evaluations(self) -> int:
        """How often a run is evaluated on its way: four times an epoch."""
        return max(1, round(4 * (self.epochs or DEFAULT_EPOCHS)))

    @property
    def start_dropout(self) -> float:
        """The dropout of the model that is tuned: none where examples are learned by heart."""
        default = 0.0 if self.memorizes else TUNE_DROPOUT
        return default if self.dropout is None else self.dropout

    def plan_fields(self, config: GPTConfig, context: int, epoch_rows: int) -> dict[str, Any]:
        """Return the fields of a plan that options decide; see `TrainOptions`.

        A step has about 8,192 tokens, fewer where an epoch would have less than 16 such steps.
        """
        rates = (MEMORIZING_RATE, MEMORIZING_LORA_RATE) if self.memorizes else (1, LORA_RATE)
        times = rates[self.lora is not None]
        most_rows = max(1, TUNE_TOKENS // context)
        return self.fill_in(
            {
                "optimizer": "adamw",
                "lr": times * START_RATE / config.n_embd,
                "batch_size": min(most_rows, max(1, epoch_rows // TUNE_STEPS)),
                "weight_decay": TUNE_DECAY,
                "patience": TUNE_PATIENCE,
            }
        )


AnyOptions = TrainOptions | TuneOptions
"""Options of a run."""
