"""The options of a training run and the named sizes. No torch: `--help` reads this.

Options are declared once, in groups: `DataOptions`, `NetworkOptions`, `TimeOptions`,
`OptimizationOptions`, `ComputeOptions`. `TrainOptions` consists of all of them, for `tiedgpt train`
and `tiedgpt tune`. The groups alone are never compared or printed, so they have no methods for it.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from tiedgpt.core.config import PRESETS, GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.files import suggest
from tiedgpt.names import explains_arguments
from tiedgpt.options import REMOVED_VALUES, argument, flag, is_option_of, option, option_of_verb
from tiedgpt.signatures import check_fields
from tiedgpt.train.objectives import ObjectiveRecord, find_record, list_tasks
from tiedgpt.train.optim import OPTIMIZERS, find_optimizer, scale_lr_to_width

if TYPE_CHECKING:
    from tiedgpt.train.planning import Facts

MAX_VOCABULARY = 1 << 16
AUTO = "auto"
DEFAULT_SIZE = "mini"
"""Size for --steps and --task, which do not choose one."""
DEFAULT_MINUTES = 3.0
DEFAULT_COOLDOWN = 0.4
"""Hägele et al. 2024 (arXiv 2405.18392), section 4: longer cooldowns gain little."""
TUNE_EPOCHS = 3
"""Epochs of fine-tuning by default, as Radford et al. 2018, section 4.1."""
START_BATCH = 8
"""Default batch size with --start."""
START_RATE = 6.25e-5 * 768
"""Peak learning rate with --start, times the width: 6.25e-5 at a width of 768, as in that paper."""
READING = ("text_field", "encoding", "quoting", "keep_end_of_text")
"""Options that say how text is read."""
DURATIONS = ("steps", "minutes", "epochs")
"""Options of the training duration; at most one is given."""
EVALUATIONS_PER_RUN = 10
"""Number of evaluations in a run, not counting the final one."""
TUNE_TOKENS = 8192
"""Tokens per step of fine-tuning; fewer if an epoch has fewer than `TUNE_STEPS` such steps."""
TUNE_STEPS = 16
TUNE_LEAST_STEPS = 300
"""Minimum number of steps over few examples; a small model takes about 200 to memorize 30 replies.
"""
MAX_EPOCHS = 40
"""Maximum number of epochs for a minimum number of steps."""
TUNE_EVALUATIONS_PER_EPOCH = 4
TUNE_PATIENCE = 4
TUNE_DROPOUT = 0.1
TUNE_DECAY = 0.01
LORA_RATE = 10
"""Ratio of the adapters' learning rate to that of the matrices (LoRA Without Regret)."""
MEMORIZING_RATE, MEMORIZING_LORA_RATE = 4, 20
"""The same for a few examples that are memorized, without and with adapters."""
TRAIN: dict[str, dict[str, Any]] = {"train": {}}
TUNE: dict[str, dict[str, Any]] = {"tune": {}}
"""The verbs of an option that only `tiedgpt train`, or only `tiedgpt tune`, has."""
EXAMPLES = "examples with replies"
ONLY_FOR = {
    "template": EXAMPLES, "too_long": EXAMPLES, "skip_bad": EXAMPLES, "text_field": "text",
    "sample_prompt": "text",
}  # fmt: skip
"""Options of fine-tuning that are only for one kind of data."""
FRESH_ONLY = ("size", "width", "vocab_size", "tokenizer", "window", "bias")
"""Options of a fresh model; one to --start from has its own."""
TEXT_ONLY = ("text_field", "keep_end_of_text", "sample_prompt")
"""Options of --task lm."""
RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("minutes epochs lr grad_clip", math.ulp(0), 1e300, "a positive number"),
    (
        "steps context batch_size micro_batch patience eval_every window",
        *(1, math.inf, "at least 1"),
    ),
    ("lora", 1, math.inf, "a rank of at least 1"),
    ("vocab_size", 1, MAX_VOCABULARY, f"1 to {MAX_VOCABULARY:,}, the ids of 16 bits"),
    ("warmup cooldown", 0, 1, "a share from 0 to 1"),
    ("dropout", 0, math.nextafter(1, 0), "a probability in [0, 1)"),
    ("weight_decay", 0, 1e300, "a number from 0"),
    ("seed", 0, 2**63 - 1, "a whole number from 0 to 2^63 - 1"),
)
"""Options, their minimum and maximum, and the range in words."""
Recipe = Literal["train", "tune"]
Schedule = Literal["linear", "wsd", "cosine"]
Keep = Literal["best", "last"]
TrackerName = Literal["trackio", "wandb", "tensorboard"]


class Duration(NamedTuple):
    """Training duration: minutes, epochs or steps."""

    unit: str
    """One of `DURATIONS`."""
    amount: float
    least_steps: int = 1
    """Minimum number of steps; more epochs are trained over few examples."""


@dataclass(frozen=True)
class Size:
    """A named shape with the recipe that suits it."""

    n_layer: int
    n_embd: int
    n_head: int
    n_positions: int
    vocab_size: int
    """Tokens of a vocabulary trained for it."""
    lr: float
    """Peak learning rate, with Muon; measured for tiny and mini (`bench/recipe.py`)."""
    _: KW_ONLY
    lr_adamw: float | None = None
    """With AdamW alone; None: the same."""
    batch_size: int = 16
    """Sequences in a step."""
    batch_tokens: int | None = None
    """Tokens in a step on a GPU, as published; None: those of `batch_size`."""
    weight_decay: float = 0.1
    """Weight decay of the blocks' matrices; more for small models, which repeat their text."""
    dropout: float = 0.0


SHAPE = ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")
PUBLISHED_RATES = {
    "gpt1": 2.5e-4, "gpt2": 6e-4, "gpt2-medium": 3e-4, "gpt2-large": 2.5e-4, "gpt2-xl": 2e-4,
    "gpt3-small": 6e-4, "gpt3-medium": 3e-4, "gpt3-large": 2.5e-4, "gpt3-xl": 2e-4,
    "gpt3-2.7b": 1.6e-4, "gpt3-6.7b": 1.2e-4, "gpt3-13b": 1e-4, "gpt3-175b": 0.6e-4,
}  # fmt: skip
"""Peak rates of the presets: Brown et al. 2020, table 2.1."""
PUBLISHED_BATCHES = {
    "gpt1": 1 << 15, "gpt2": 1 << 19, "gpt2-medium": 1 << 19, "gpt2-large": 1 << 19,
    "gpt2-xl": 1 << 20, "gpt3-small": 1 << 19, "gpt3-medium": 1 << 19, "gpt3-large": 1 << 19,
    "gpt3-xl": 1 << 20, "gpt3-2.7b": 1 << 20, "gpt3-6.7b": 1 << 21, "gpt3-13b": 1 << 21,
    "gpt3-175b": 3 << 20,
}  # fmt: skip
"""Tokens in a step of the presets: Radford et al. 2018, section 4.1; Brown et al. 2020, table 2.1.
"""
RECIPES: dict[str, dict[str, Any]] = {
    "nano": {"lr": 1.6e-2, "weight_decay": 0.3},
    "tiny": {"lr": 1.2e-2, "lr_adamw": 4e-3, "weight_decay": 0.3},
    "little": {"lr": 1e-2, "lr_adamw": 3e-3, "weight_decay": 0.3},
    "mini": {"lr": 3e-3, "batch_size": 8},
    "small": {"lr": 2e-3},
    "medium": {"lr": 1e-3},
} | {
    name: {"lr": lr, "batch_tokens": PUBLISHED_BATCHES[name], "dropout": 0.1}
    for name, lr in PUBLISHED_RATES.items()
}
SIZES = {
    name: Size(**{key: PRESETS[name][key] for key in SHAPE}, **recipe)
    for name, recipe in RECIPES.items()
}


def _as_text(value: Any) -> Any:
    """Return the text of a path, or any other value unchanged."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


BYTES = {"": 1e9, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_bytes(text: str) -> int:
    """Return the bytes in "2" (GB), "2GB", "800MB" or "1.5 g"; `UserError` for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([kmgt]?)b?", text.strip().lower())
    size = int(float(match[1]) * BYTES[match[2]]) if match else 0
    if size < 1:
        raise UserError(
            f"--memory must be a size, got {text!r}",
            hint="give gigabytes, as 2 or 1.5, or a size, as 800MB",
        )
    return size


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FileOptions:
    """How files of data are read."""

    encoding: str = option(
        "auto",
        "Encoding of text that is not UTF-8: cp1252, utf-16, ...; auto: guess it, with a note.",
        "data",
    )
    quoting: bool = option(
        True, "Take quotes in .csv and .tsv for text: each line is a row.", "data"
    )

    @property
    def file_reading(self) -> dict[str, Any]:
        """Return the options of `tiedgpt.data.documents` for files of any kind."""
        return {"encoding": self.encoding, "quoting": self.quoting}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DataOptions(FileOptions):
    """The training data and how they are read."""

    GROUP: ClassVar = "data"
    data: tuple[str, ...] = argument(
        "Files of text, .jsonl, .csv, .tsv or .parquet, also compressed; folders, globs, - for "
        "standard input, hf:OWNER/NAME[:SPLIT] of the hub, or a directory of `tiedgpt data "
        "prepare`; default: Python's own docs.",
        default=(),
        verbs={
            "train": {},
            "tune": {
                "help": "Examples in .jsonl, or text: files, folders, globs, - for standard input.",
                "default": MISSING,
            },
        },
    )
    val: str | None = option(None, "Validate on this data.", metavar="DATA")
    text_field: str = option(
        "text", "The field of records (.jsonl, .csv, ...) that holds the text.", metavar="NAME"
    )
    keep_end_of_text: bool = option(
        False, "Take <|endoftext|> in text files for text; by itself it separates documents."
    )

    @property
    def reading(self) -> dict[str, Any]:
        """Return the options of `tiedgpt.data.documents`."""
        return {name: getattr(self, name) for name in READING}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class NetworkOptions:
    """Changes to the model that is trained."""

    GROUP: ClassVar = "model"
    context: int | None = option(None, "Tokens per sequence.")
    freeze: str | None = option(
        None,
        "Parameters to freeze, separated by commas: wte, h.0, h.*.attn, body (all but the "
        "head). +h.11 is trained again; the last match decides.",
    )
    dropout: float | None = option(None, "Dropout of embeddings and residual branches.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TimeOptions:
    """Training duration and evaluations."""

    GROUP: ClassVar = "time"
    minutes: float | None = option(None, "Train for about this many minutes.", short="m")
    steps: int | None = option(None, "Train for this many steps instead.")
    epochs: float | None = option(None, "Train for this many passes over the data instead.")
    eval_every: int | None = option(None, "Steps between evaluations.")
    patience: int | None = option(None, "Stop after this many evaluations without improvement.")
    keep: Keep = option(
        "best",
        "best: keep the weights with the best validation loss; last: train all steps and keep "
        "the last weights.",
    )
    score: Literal["auto", "all"] = option(
        "auto",
        "Held-out data for the final score; auto: as much as 2 % of the training time allows; "
        "all: everything.",
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OptimizationOptions:
    """The optimizer, its learning rate, and the order of the data."""

    GROUP: ClassVar = "optimization"
    seed: int = option(0, "Seed of the initial weights and of the order of the data.")
    batch_size: int | None = option(None, "Sequences per step.", short="b")
    optimizer: str = option(
        AUTO,
        "Optimizer of the blocks' matrices; AdamW trains all other parameters.",
        choices=lambda: (AUTO, *OPTIMIZERS),
    )
    lr: float | None = option(None, "Peak learning rate.")
    warmup: float = option(0.05, "Share of the steps in which the learning rate rises to its peak.")
    schedule: Schedule = option(
        "linear",
        "Learning rate after the warm-up: linear decays to 0; wsd stays constant, then decays "
        "to 0; cosine decays to a tenth.",
    )
    cooldown: float = option(
        DEFAULT_COOLDOWN,
        "With --schedule wsd: share of the steps in which the learning rate decays.",
    )
    weight_decay: float | None = option(
        None, "Weight decay of the blocks' matrices; W, norms and biases have none."
    )
    grad_clip: float = 1.0
    """Clip the gradient to this norm."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ComputeOptions:
    """How a step is computed."""

    GROUP: ClassVar = "memory and speed"
    micro_batch: int | None = option(
        None,
        "Sequences computed at a time (gradient accumulation); default: what fits, at most "
        "8,192 tokens, on a GPU 65,536.",
    )
    dtype: Literal["auto", "fp32", "bf16"] = option(
        "auto",
        "dtype of the matmuls; auto: bf16 where this device computes in it. Weights stay in fp32.",
    )
    device: str = option(
        "auto", "Device to train on: cpu, cuda, cuda:1, mps; auto: a GPU if there is one."
    )
    memory: str | None = option(
        None,
        "Memory limit of a process, as 2 (GB) or 800MB; decides --micro-batch; default: no limit.",
        metavar="SIZE",
    )
    recompute: Literal["auto", "off", "blocks"] = option(
        "auto",
        "blocks: activation checkpointing (recompute blocks in backward); auto: if --memory "
        "needs it.",
    )
    compile: Literal["auto", "on", "off"] = option(
        "auto",
        "Compile the blocks with torch.compile; auto: only on a GPU, if it saves more time than "
        "it takes. Results are not bit-identical to uncompiled training.",
    )


def _format(value: Any, default: Any) -> str:
    if isinstance(value, bool):
        return "not given" if value == default else "given"
    if value in (None, ()):
        return "not given"
    return ", ".join(value) if isinstance(value, tuple) else str(value)


@explains_arguments
@dataclass(frozen=True, kw_only=True)
class TrainOptions(  # the help lists the options of the last one first
    ComputeOptions, OptimizationOptions, TimeOptions, NetworkOptions, DataOptions
):
    """Options of a training: of a fresh model, or of one to start from.

    Options that are not given have the defaults of a recipe: "train" derives them from the time,
    the text and the machine, or from `size`; "tune" has those of Radford et al. 2018 for
    fine-tuning `start` on little data.
    """

    GROUP: ClassVar = "model"
    recipe: Recipe = "train"
    """The verb of the command line whose defaults apply."""
    sample_prompt: str | None = option(
        None, "Prompt of the samples that are shown at evaluations.", "output"
    )
    task: str = option(
        "lm",
        "lm: predict text. The others need .jsonl: classify texts, or choose a continuation.",
        "data",
        choices=list_tasks,
        verbs=TRAIN,
    )
    objective: str | None = option(
        None,
        "An objective of your own, instead of --task: the class CLASS of the file MODULE.py.",
        "data",
        metavar="MODULE:CLASS",
        verbs=TRAIN,
    )
    tokenizer: str = option(
        "bpe",
        "bpe: trained on the data (with --start: the model's own); char: the data's "
        "characters; or a directory, file or hub name.",
        "data",
        metavar="TOKENIZER",
        verbs=TRAIN,
    )
    vocab_size: int | None = option(
        None,
        "Size of the vocabulary to train; default: with --size auto one token per 1,000 "
        "characters of text, 384 to 8,192; else the size's.",
        "data",
        verbs=TRAIN,
    )
    start: str | None = option(
        None,
        "Start from this GPT (directory, file, hub name): its shape, its tokenizer, its weights.",
        metavar="MODEL",
        verbs={
            "train": {},
            "tune": {
                "help": "The model to tune: directory, file, hub name or run; default: the newest "
                "run.",
                "long": "from",
            },
        },
    )
    size: str = option(
        AUTO,
        "auto: chosen by text, time and speed (mini with --task or --steps); or nano, tiny, "
        "little, mini, small, medium, gpt1 .. gpt3-175b.",
        metavar="SIZE",
        short="s",
        verbs=TRAIN,
    )
    width: int | None = option(
        None,
        "Width of the hidden states; the heads and the learning rate follow; default: the size's.",
        verbs=TRAIN,
    )
    window: int | None = option(
        None,
        "Every second block sees only the last N positions, as in GPT-3; default: all.",
        verbs=TRAIN,
    )
    bias: bool = option(
        True, "Train without biases in linear layers and LayerNorms, as nanoGPT does.", verbs=TRAIN
    )
    template: Literal["chatml", "plain"] | None = option(
        None, "Chat template; default: the one of --from, or chatml.", "data", verbs=TUNE
    )
    too_long: Literal["drop", "cut", "error"] = option(
        "drop", "What to do with examples longer than the context.", "data", verbs=TUNE
    )
    skip_bad: bool = option(
        False, "Skip and count lines that are not valid examples.", "data", verbs=TUNE
    )
    packing: Literal["auto", "on", "off"] = option(
        "auto",
        "on: several examples or texts per row, which do not attend to each other; off: one "
        "example per row, and text continues from row to row; auto: on for examples, off for "
        "text.",
        "data",
        verbs=TUNE,
    )
    lora: int | None = option(
        None,
        "Train LoRA adapters of this rank instead of the matrices; 8 is usual. model/ holds "
        "the merged model.",
        verbs=TUNE,
    )
    lora_targets: str | None = option(
        None,
        "Matrices that get adapters, separated by commas: attn.c_attn, h.0.*, wte, ...; wte "
        "adapts W for reading and predicting; default: the four matrices of each block.",
        verbs=TUNE,
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
        },
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
        },
    }

    def __post_init__(self) -> None:
        data: Any = [self.data] if isinstance(self.data, (str, os.PathLike)) else self.data
        if isinstance(data, (list, tuple)):
            object.__setattr__(self, "data", tuple(map(_as_text, data)))
        for name in ("val", "start", "tokenizer"):
            object.__setattr__(self, name, _as_text(getattr(self, name)))
        check_fields(self)
        if self.objective is not None and self.task != "lm":
            raise UserError("give only one of --task and --objective")
        if self.task not in list_tasks():
            remedy = REMOVED_VALUES.get(("task", self.task), f"use {', '.join(list_tasks())}")
            raise UserError(f"there is no --task {self.task}", hint=remedy)
        if not self.objective_record.reads_text and not self.data:
            task = self.objective or f"--task {self.task}"
            raise UserError(f"{task} needs examples", hint="name a .jsonl file")
        if self.recipe == "tune" and not self.data:
            raise UserError("DATA is missing", hint="give a .jsonl file of examples, or text")
        if self.size not in (AUTO, *SIZES):
            hint = suggest(self.size, SIZES) or f"there are {AUTO}, {', '.join(SIZES)}"
            raise UserError(f"no size {self.size!r}", hint=hint)
        if self.optimizer != AUTO:
            find_optimizer(self.optimizer)
        if sum(getattr(self, name) is not None for name in DURATIONS) > 1:
            raise UserError("give only one of --minutes, --steps and --epochs")
        for names, least, most, expected in RANGES:
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not least <= value <= most:
                    raise UserError(f"must be {expected}, got {value}", option=name)
        if self.memory is not None:
            parse_bytes(self.memory)
        self._check_recipe()
        self._check_conflicts()

    def _check_conflicts(self) -> None:
        """Raise `UserError` for options that exclude or need each other."""
        if self.keep == "last" and self.patience is not None:
            raise UserError(
                f"--patience {self.patience} is for --keep best",
                hint="--keep last trains all steps",
            )
        if self.schedule != "wsd" and self.cooldown != DEFAULT_COOLDOWN:
            raise UserError(f"--cooldown {self.cooldown} is for --schedule wsd")
        if self.schedule == "wsd" and self.warmup + self.cooldown > 1:
            raise UserError(
                f"--warmup {self.warmup} and --cooldown {self.cooldown} add up to more than 1"
            )
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
        if self.lora_targets is not None and self.lora is None:
            raise UserError("--lora-targets needs the rank of the adapters: --lora 8")
        if self.lora is not None and self.freeze is not None:
            raise UserError(
                "--lora freezes everything but the adapters", hint="give it without --freeze"
            )

    def _check_recipe(self) -> None:
        """Raise `UserError` for options of another verb, of a fresh model, or of another task."""
        for each in fields(self):
            value, name = getattr(self, each.name), each.name
            if value == each.default:
                continue
            if not is_option_of(each, self.recipe):
                raise UserError(f"{flag(each)} is not an option of tiedgpt {self.recipe}")
            if not self.objective_record.reads_text and name in TEXT_ONLY:
                raise UserError(f"{flag(each)} {value} is for --task lm")
            may_differ = name == "tokenizer" and value != "char"
            if self.start and name in FRESH_ONLY and not may_differ:
                raise UserError(f"{flag(each)} is for a fresh model: {self.start} has its own")

    def check_data(self, *, examples: bool) -> None:
        """Raise `UserError` for options of fine-tuning that are not for these data."""
        data = EXAMPLES if examples else "text"
        for each in fields(self):
            needed = ONLY_FOR.get(each.name, data)
            if needed != data and getattr(self, each.name) != each.default:
                raise UserError(f"{flag(each)} is for {needed}, and the data are {data}")

    def record(self) -> dict[str, Any]:
        """Return the options of the recipe by name, as run.toml holds them."""
        return {f.name: getattr(self, f.name) for f in fields(self) if is_option_of(f, self.recipe)}

    def differences(self, recorded: dict[str, Any]) -> list[str]:
        """Name what differs between these options and those of an earlier command."""
        differences = []
        for each in fields(self):
            now, then = getattr(self, each.name), recorded.get(each.name, each.default)
            then = tuple(then) if isinstance(then, list) else then
            if now != then and not (now in (None, ()) and then in (None, ())):
                was, is_ = (_format(value, each.default) for value in (then, now))
                name = flag(option_of_verb(each, self.recipe))
                differences.append(f"{name} was {was} and is {is_}")
        return differences

    @property
    def objective_record(self) -> ObjectiveRecord:
        """The record of --objective or --task."""
        return find_record({"objective": self.objective, "task": self.task})

    @property
    def chooses(self) -> bool:
        """Whether the size of a fresh model is to be chosen: see `planning.py`."""
        reads_text = self.objective_record.reads_text and self.recipe == "train"
        return (
            reads_text
            and self.start is None
            and self.size == AUTO
            and self.width is None
            and self.steps is None
        )

    @property
    def duration(self) -> Duration:
        """Return the training duration."""
        for unit in DURATIONS:
            if getattr(self, unit) is not None:
                return Duration(unit, getattr(self, unit))
        if self.recipe == "tune":
            return Duration("epochs", TUNE_EPOCHS, TUNE_LEAST_STEPS)
        record = self.objective_record
        if record.epochs is None:
            return Duration("minutes", DEFAULT_MINUTES)
        return Duration("epochs", record.epochs, record.min_steps)

    @property
    def evaluations(self) -> int:
        """Number of evaluations in a run, not counting the final one."""
        if self.recipe == "train":
            return EVALUATIONS_PER_RUN
        return max(1, round(TUNE_EVALUATIONS_PER_EPOCH * (self.epochs or TUNE_EPOCHS)))

    @property
    def named_size(self) -> str:
        """Return the name of the size, the default one for auto."""
        return DEFAULT_SIZE if self.size == AUTO else self.size

    @property
    def shape(self) -> Size:
        """Return the shape and the recipe of the size."""
        return SIZES[self.named_size]

    def plan_fields(self, config: GPTConfig, facts: Facts) -> dict[str, Any]:
        """Return the fields of a plan that options decide."""
        defaults = self._train_defaults(config)
        if self.recipe == "tune":
            defaults = self._tune_defaults(config, facts)
        options = {name: getattr(self, name) for name in defaults}
        fields = {n: defaults[n] if x in (None, AUTO) else x for n, x in options.items()}
        return fields | {"size": self.named_size if self.start is None else ""}

    def _train_defaults(self, config: GPTConfig) -> dict[str, Any]:
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
            "batch_size": self.objective_record.batch_size or batch,
            "weight_decay": size.weight_decay if is_fresh else 0.1,
            "patience": None,
        }

    def _tune_defaults(self, config: GPTConfig, facts: Facts) -> dict[str, Any]:
        """Return the defaults of fine-tuning: a step has about 8,192 tokens.

        It has fewer if an epoch would have less than 16 such steps.
        """
        rates = (MEMORIZING_RATE, MEMORIZING_LORA_RATE) if facts.memorizes else (1, LORA_RATE)
        max_rows = max(1, TUNE_TOKENS // facts.row_tokens)
        return {
            "optimizer": "adamw",
            "lr": rates[self.lora is not None] * START_RATE / config.n_embd,
            "batch_size": min(max_rows, max(1, facts.epoch_rows // TUNE_STEPS)),
            "weight_decay": TUNE_DECAY,
            "patience": TUNE_PATIENCE,
        }

    def model_config(self, *, vocab_size: int, bos: int | None, eos: int | None) -> GPTConfig:
        """Return the config of the size that was asked for, on this vocabulary."""
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
