"""The options of `train` and of `tune`. No torch: `--help` reads this."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal

from typing_extensions import override

from tiedgpt.core.config import PRESETS, GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.files import suggest
from tiedgpt.names import explains_arguments
from tiedgpt.options import argument, flag, option
from tiedgpt.train.plan.groups import (
    AUTO,
    EVALUATIONS_PER_RUN,
    MAX_VOCABULARY,
    START_RATE,
    Duration,
    Recipe,
    RunOptions,
)
from tiedgpt.train.plan.sizes import SIZES, Size
from tiedgpt.train.plan.values import Facts
from tiedgpt.train.step.optim import scale_lr_to_width
from tiedgpt.train.tasks.registry import TaskRecord, find_record, list_tasks

DEFAULT_SIZE = "mini"
"""Size for --steps and --task, which do not choose one."""
DEFAULT_MINUTES = 3.0
START_BATCH = 8
"""Default batch size with --start."""
FRESH_ONLY = ("size", "width", "vocab_size", "tokenizer", "window", "bias")
"""Options of a fresh model; one to --start from has its own."""
TEXT_ONLY = ("text_field", "keep_end_of_text", "sample_prompt")
"""Options of --task lm."""
TUNE_EPOCHS = 3
"""Epochs of fine-tuning by default, as Radford et al. 2018, section 4.1."""
TUNE_TOKENS = 8192
"""Tokens per step of fine-tuning; fewer if an epoch has fewer than `TUNE_STEPS` such steps."""
TUNE_STEPS = 16
TUNE_LEAST_STEPS = 300
"""Minimum number of steps over few examples; a small model takes about 200 to memorize 30 replies.
"""
TUNE_EVALUATIONS_PER_EPOCH = 4
TUNE_PATIENCE = 4
TUNE_DROPOUT = 0.1
TUNE_DECAY = 0.01
LORA_RATE = 10
"""Ratio of the adapters' learning rate to that of the matrices (LoRA Without Regret)."""
MEMORIZING_RATE, MEMORIZING_LORA_RATE = 4, 20
"""The same for a few examples that are memorized, without and with adapters."""
LORA_TARGETS = "attn.c_attn,attn.c_proj,mlp.c_fc,mlp.c_proj"
"""The four matrices of each block."""
EXAMPLES = "examples with replies"
ONLY_FOR = {
    "template": EXAMPLES,
    "too_long": EXAMPLES,
    "skip_bad": EXAMPLES,
    "text_field": "text",
    "sample_prompt": "text",
}
"""Options of fine-tuning that are only for one kind of data."""
_SAMPLE_PROMPT = "Prompt of the samples that are shown at evaluations."


@explains_arguments
@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """Options of a training: of a fresh model, or of one to start from."""

    recipe: ClassVar[Recipe] = "train"
    sample_prompt: str | None = option(None, _SAMPLE_PROMPT, "output")
    task: str = option(
        "lm",
        "lm: predict text. The others need .jsonl: classify texts, choose a continuation, or "
        "regress (predict a number).",
        "data",
        choices=list_tasks,
    )
    objective: str | None = option(
        None,
        "An objective of your own, instead of --task: the class CLASS of the file MODULE.py.",
        "data",
        metavar="MODULE:CLASS",
    )
    tokenizer: str = option(
        "bpe",
        "bpe: trained on the data (with --start: the model's own); char: the data's "
        "characters; or a directory, file or hub name.",
        "data",
        metavar="TOKENIZER",
    )
    vocab_size: int | None = option(
        None,
        "Size of the vocabulary to train; default: with --size auto one token per 1,000 "
        "characters of text, 384 to 8,192; else the size's.",
        "data",
        least=1,
        most=MAX_VOCABULARY,
    )
    start: str | None = option(
        None,
        "Start from this GPT (directory, file, hub name): its shape, its tokenizer, its weights.",
        metavar="MODEL",
    )
    size: str = option(
        AUTO,
        "auto: chosen by text, time and speed (mini with --task or --steps); or nano, tiny, "
        "little, slim, mini, small, medium, gpt1 .. gpt3-175b.",
        metavar="SIZE",
        short="s",
    )
    width: int | None = option(
        None,
        "Width of the hidden states; the heads and the learning rate follow; default: the size's.",
    )
    window: int | None = option(
        None,
        "Every second block sees only the last N positions, as in GPT-3; default: all.",
        least=1,
    )
    bias: bool = option(
        True, "Train without biases in linear layers and LayerNorms, as nanoGPT does."
    )
    DEFAULTS: ClassVar = {
        "train": {
            "val": "about a tenth of the data",
            "context": "the size's, or fewer for short text with --size auto; with --start, the "
            "model's context",
            "dropout": "the model's with --start; 0.1 for published sizes, or if --size auto "
            "expects many epochs; else 0",
            "minutes": "3, or 3 epochs of labelled examples and at least 100 steps",
            "eval_every": "a tenth of the steps; with --minutes, at least about ten seconds",
            "patience": "when the validation loss has risen again, but not with fewer than 50 "
            "held-out examples",
            "batch_size": "the size's, for published sizes on a GPU as published; fewer for short "
            "runs with --size auto; 8 with --start; 32 labelled examples",
            "optimizer": "muon, or adamw with --start",
            "lr": "by size, width and optimizer, shown by --verbose",
            "weight_decay": "0.1, or 0.3 for small sizes",
        }
    }

    @override
    def check(self) -> None:
        if self.objective is not None and self.task != "lm":
            raise UserError("give only one of --task and --objective")
        if not self.task_record.reads_text and not self.data:
            task = self.objective or f"--task {self.task}"
            raise UserError(f"{task} needs examples", hint="name a .jsonl file")
        if self.size not in (AUTO, *SIZES):
            hint = suggest(self.size, SIZES) or f"there are {AUTO}, {', '.join(SIZES)}"
            raise UserError(f"no size {self.size!r}", hint=hint)
        super().check()

    @override
    def check_conflicts(self) -> None:
        for each in fields(self):
            value, name = getattr(self, each.name), each.name
            if value == each.default:
                continue
            if not self.task_record.reads_text and name in TEXT_ONLY:
                raise UserError(f"{flag(each)} {value} is for --task lm")
            may_differ = name == "tokenizer" and value != "char"
            if self.start and name in FRESH_ONLY and not may_differ:
                raise UserError(f"{flag(each)} is for a fresh model: {self.start} has its own")
        super().check_conflicts()
        if self.tokenizer != "bpe" and self.vocab_size is not None:
            raise UserError(
                "--vocab-size is for a BPE that is trained", hint="leave out --tokenizer"
            )
        head_width = self.shape.n_embd // self.shape.n_head
        if self.width is not None and (self.width < 1 or self.width % head_width):
            raise UserError(
                f"--width must be a multiple of {head_width}, the head size of --size "
                f"{self.named_size}, got {self.width}"
            )

    @property
    def task_record(self) -> TaskRecord:
        """The record of --objective or --task."""
        return find_record({"objective": self.objective, "task": self.task})

    @property
    @override
    def chooses(self) -> bool:
        is_fresh_text = self.task_record.reads_text and self.start is None
        return is_fresh_text and (self.size, self.width, self.steps) == (AUTO, None, None)

    @property
    @override
    def tokenizer_source(self) -> str | None:
        return self.start if self.tokenizer == "bpe" else self.tokenizer

    @property
    @override
    def default_duration(self) -> Duration:
        record = self.task_record
        if record.epochs is None:
            return Duration("minutes", DEFAULT_MINUTES)
        return Duration("epochs", record.epochs, record.min_steps)

    @property
    @override
    def evaluations(self) -> int:
        return EVALUATIONS_PER_RUN

    @property
    @override
    def run_suffix(self) -> str:
        if self.task_record.reads_text and self.start is None:
            return self.size
        return (self.objective or self.task).partition(":")[0]

    @property
    def named_size(self) -> str:
        """The name of the size, the default one for auto."""
        return DEFAULT_SIZE if self.size == AUTO else self.size

    @property
    def shape(self) -> Size:
        """The shape and the recipe of the size."""
        return SIZES[self.named_size]

    @override
    def start_dropout(self, *, memorizes: bool) -> float | None:
        return self.dropout

    @override
    def plan_fields(self, config: GPTConfig, facts: Facts) -> dict[str, Any]:
        size = self.named_size if self.start is None else ""
        return super().plan_fields(config, facts) | {"size": size}

    @override
    def plan_defaults(self, config: GPTConfig, facts: Facts) -> dict[str, Any]:
        size, is_fresh = self.shape, self.start is None
        optimizer = self.optimizer
        if optimizer == AUTO:
            optimizer = "muon" if is_fresh else "adamw"
        lr = size.lr if optimizer == "muon" or size.lr_adamw is None else size.lr_adamw
        lr = scale_lr_to_width(lr, width=size.n_embd, to=config.n_embd, optimizer=optimizer)
        batch = size.batch_size if is_fresh else START_BATCH
        return {
            "optimizer": optimizer,
            "lr": lr if is_fresh else START_RATE / config.n_embd,
            "batch_size": self.task_record.batch_size or batch,
            "weight_decay": size.weight_decay if is_fresh else 0.1,
            "patience": None,
        }

    def model_config(self, *, vocab_size: int, bos: int | None, eos: int | None) -> GPTConfig:
        """Return the config of a fresh model of the size on this vocabulary."""
        size, width = self.shape, self.width or self.shape.n_embd
        dropout = size.dropout if self.dropout is None else self.dropout
        return GPTConfig(
            vocab_size=vocab_size,
            n_positions=self.context or size.n_positions,
            n_embd=width,
            n_layer=size.n_layer,
            n_head=width * size.n_head // size.n_embd,
            bias=self.bias,
            attention_windows=None if self.window is None else (0, self.window),
            norm=PRESETS.get(self.named_size, {}).get("norm", "pre"),
            embd_pdrop=dropout,
            attn_pdrop=0.0,  # with dropout, attention loses its fast kernels
            resid_pdrop=dropout,
            bos_token_id=bos,
            eos_token_id=eos,
        )


@explains_arguments
@dataclass(frozen=True, kw_only=True)
class TuneOptions(RunOptions):
    """Options of fine-tuning: defaults are those of Radford et al. 2018 for little data."""

    recipe: ClassVar[Recipe] = "tune"
    data: tuple[str, ...] = argument(
        "Examples in .jsonl, or text: files, folders, globs, - for standard input.",
        default=(),
        verbs={"tune": {"default": MISSING}},
    )
    sample_prompt: str | None = option(None, _SAMPLE_PROMPT, "output")
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
        least=1,
    )
    lora_targets: str | None = option(
        None,
        "Matrices that get adapters, separated by commas: attn.c_attn, h.0.*, wte, ...; wte "
        "adapts W for reading and predicting; default: the four matrices of each block.",
    )
    DEFAULTS: ClassVar = {
        "tune": {
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
    }

    @override
    def check(self) -> None:
        if not self.data:
            raise UserError("DATA is missing", hint="give a .jsonl file of examples, or text")
        super().check()

    @override
    def check_conflicts(self) -> None:
        super().check_conflicts()
        if self.lora_targets is not None and self.lora is None:
            raise UserError("--lora-targets needs the rank of the adapters: --lora 8")
        if self.lora is not None and self.freeze is not None:
            raise UserError(
                "--lora freezes everything but the adapters", hint="give it without --freeze"
            )

    @property
    def adapter_targets(self) -> tuple[str, ...]:
        """The matrices that get adapters."""
        return tuple((self.lora_targets or LORA_TARGETS).split(","))

    def check_data(self, *, examples: bool) -> None:
        """Raise `UserError` for options that are not for these data."""
        data = EXAMPLES if examples else "text"
        for each in fields(self):
            needed = ONLY_FOR.get(each.name, data)
            if needed != data and getattr(self, each.name) != each.default:
                raise UserError(f"{flag(each)} is for {needed}, and the data are {data}")

    @property
    @override
    def tokenizer_source(self) -> str | None:
        return self.start

    @property
    @override
    def default_duration(self) -> Duration:
        return Duration("epochs", TUNE_EPOCHS, TUNE_LEAST_STEPS)

    @property
    @override
    def evaluations(self) -> int:
        return max(1, round(TUNE_EVALUATIONS_PER_EPOCH * (self.epochs or TUNE_EPOCHS)))

    @property
    @override
    def run_suffix(self) -> str:
        return "tuned"

    @override
    def start_dropout(self, *, memorizes: bool) -> float | None:
        default = 0.0 if memorizes else TUNE_DROPOUT
        return default if self.dropout is None else self.dropout

    @override
    def plan_defaults(self, config: GPTConfig, facts: Facts) -> dict[str, Any]:
        """Return the defaults; a step has about 8,192 tokens.

        It has fewer if an epoch would have less than 16 such steps.
        """
        rate, lora_rate = 1, LORA_RATE
        if facts.memorizes:
            rate, lora_rate = MEMORIZING_RATE, MEMORIZING_LORA_RATE
        max_rows = max(1, TUNE_TOKENS // facts.row_tokens)
        return {
            "optimizer": "adamw",
            "lr": (rate if self.lora is None else lora_rate) * START_RATE / config.n_embd,
            "batch_size": min(max_rows, max(1, facts.epoch_rows // TUNE_STEPS)),
            "weight_decay": TUNE_DECAY,
            "patience": TUNE_PATIENCE,
        }
