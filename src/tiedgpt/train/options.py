"""The options of a training run and the named sizes. No torch: `--help` reads this.

Options are declared once, in groups: `DataOptions`, `NetworkOptions`, `TimeOptions`,
`OptimizationOptions`, `ComputeOptions`. `TrainOptions` and `TuneOptions` are made of all of them.
The groups alone are never compared or printed; without the methods for it, help comes sooner.
"""

from __future__ import annotations

import math
import re
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from tiedgpt.core.config import PRESETS, GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.names import explains_arguments
from tiedgpt.options import REMOVED_VALUES, argument, flag, option
from tiedgpt.train.plan import Keep, Rule, Schedule, scale_lr_to_width

MAX_VOCABULARY = 1 << 16
AUTO = "auto"
DEFAULT_SIZE = "mini"
"""Size for --steps and --task, where no size is chosen."""
DEFAULT_MINUTES = 3.0
DEFAULT_COOLDOWN = 0.4
"""Hägele et al. 2024 (arXiv 2405.18392), section 4: longer falls gain little."""
DEFAULT_EPOCHS = 3
"""Over labelled examples; as Radford et al. 2018, section 4.1."""
LABELLED_BATCH = 32
"""Examples in a step, as there."""
LEAST_STEPS = 100
"""Minimum number of steps over few labelled examples by default."""
MAX_EPOCHS = 40
"""Maximum number of epochs in such a minimum of steps."""
START_BATCH = 8
"""Sequences in a step of a language model that goes on."""
START_RATE = 6.25e-5 * 768
"""Peak rate after --start, times the width: that of the same paper at its width of 768."""
READING = ("text_field", "encoding", "keep_end_of_text")
"""Options that say how text is read."""
DURATIONS = ("steps", "minutes", "epochs")
"""Options of the training duration; at most one is given."""
EVALUATIONS_PER_RUN = 10
"""Number of evaluations in a run, not counting the final one."""
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
    ("vocab_size", 1, MAX_VOCABULARY, f"1 to {MAX_VOCABULARY:,}, the ids of 16 bits"),
    ("warmup cooldown", 0, 1, "a share from 0 to 1"),
    ("dropout", 0, math.nextafter(1, 0), "a probability in [0, 1)"),
    ("weight_decay", 0, 1e300, "a number from 0"),
    ("seed", 0, 2**63 - 1, "a whole number from 0 to 2^63 - 1"),
)
"""Options, their minimum and maximum, and the range in words."""
TaskName = Literal["lm", "classify", "choose"]
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
    weight_decay: float = 0.1
    """Weight decay of the blocks' matrices; more for small models, which repeat their text."""
    dropout: float = 0.0


def _published(name: str, lr: float) -> Size:
    keys = ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")
    return Size(**{key: PRESETS[name][key] for key in keys}, lr=lr, dropout=0.1)


PUBLISHED_RATES = {
    "gpt1": 2.5e-4, "gpt2": 6e-4, "gpt2-medium": 3e-4, "gpt2-large": 2.5e-4, "gpt2-xl": 2e-4,
    "gpt3-small": 6e-4, "gpt3-medium": 3e-4, "gpt3-large": 2.5e-4, "gpt3-xl": 2e-4,
    "gpt3-2.7b": 1.6e-4, "gpt3-6.7b": 1.2e-4, "gpt3-13b": 1e-4, "gpt3-175b": 0.6e-4,
}  # fmt: skip
"""Peak rates of the presets: Brown et al. 2020, table 2.1."""
SIZES = {
    "nano": Size(2, 64, 2, 128, 512, 1.6e-2, weight_decay=0.3),
    "tiny": Size(2, 128, 4, 128, 1024, 1.2e-2, lr_adamw=4e-3, weight_decay=0.3),
    "little": Size(2, 192, 6, 128, 1024, 1e-2, lr_adamw=3e-3, weight_decay=0.3),
    "mini": Size(4, 256, 4, 128, 4096, 3e-3, batch_size=8),
    "small": Size(6, 384, 6, 256, 4096, 2e-3),
    "medium": Size(8, 512, 8, 512, 8192, 1e-3),
} | {name: _published(name, lr) for name, lr in PUBLISHED_RATES.items()}
BYTES = {"": 1e9, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_bytes(text: str) -> int:
    """Return the bytes in "2" (GB), "2GB", "800MB" or "1.5 g"; `UserError` for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([kmgt]?)b?", text.strip().lower())
    size = int(float(found[1]) * BYTES[found[2]]) if found else 0
    if size < 1:
        raise UserError(
            f"--memory must be a size, got {text!r}",
            hint="give gigabytes, as 2 or 1.5, or a size, as 800MB",
        )
    return size


def format_count(count: float, noun: str) -> str:
    """Return so many of something in words: `1 minute`, `2,400 documents`."""
    return f"1 {noun}" if count == 1 else f"{count:,.10g} {noun}s"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DataOptions:
    """The training data and how they are read."""

    GROUP: ClassVar = "data"
    data: tuple[str, ...] = argument(
        "Files of text, .jsonl, .csv, .tsv or .parquet, also compressed; folders, globs, - for "
        "standard input, hf:OWNER/NAME[:SPLIT] of the hub, or a directory of `tiedgpt data "
        "prepare`; default: Python's own docs.",
        default=(),
    )
    val: str | None = option(None, "Validate on this data.", metavar="DATA")
    text_field: str = option(
        "text", "The field of records (.jsonl, .csv, ...) that holds the text.", metavar="NAME"
    )
    encoding: str = option(
        "auto",
        "Encoding of text that is not UTF-8: cp1252, utf-16, ...; auto: guess it, with a note.",
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
    optimizer: Literal["auto", "muon", "adamw"] = option(
        "auto",
        "Optimizer of the blocks' matrices; AdamW trains all other parameters.",
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
        "8,192 tokens.",
    )
    dtype: Literal["auto", "fp32", "bf16"] = option(
        "auto",
        "dtype of the matmuls; auto: bf16 where this device computes in it. Weights stay in fp32.",
    )
    device: str = option(
        "auto",
        "Device to train on: cpu, cuda, cuda:1, mps; auto: a GPU if there is one.",
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
        "Compile the blocks with torch.compile; auto: only on a GPU. Results are not "
        "bit-identical to uncompiled training.",
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(  # the help lists the options of the last one first
    ComputeOptions, OptimizationOptions, TimeOptions, NetworkOptions, DataOptions
):
    """The options of every run."""

    sample_prompt: str | None = option(
        None, "Prompt of the samples that are shown at evaluations.", "output"
    )

    def __post_init__(self) -> None:
        if sum(getattr(self, name) is not None for name in DURATIONS) > 1:
            raise UserError("give only one of --minutes, --steps and --epochs")
        for names, least, most, expected in RANGES:
            for name in names.split():
                value = getattr(self, name, None)
                if value is not None and not least <= value <= most:
                    raise UserError(f"must be {expected}, got {value}", option=name)
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
        if self.memory is not None:
            parse_bytes(self.memory)

    def duration_or(self, default: Duration) -> Duration:
        """Return the training duration, or the default if none is given."""
        amounts = ((name, getattr(self, name)) for name in DURATIONS)
        return next((Duration(*each) for each in amounts if each[1] is not None), default)

    def fill_in(self, defaults: dict[str, Any]) -> dict[str, Any]:
        """Return options by name, with these defaults for those that were not given."""
        options = {name: getattr(self, name) for name in defaults}
        return {n: defaults[n] if x in (None, AUTO) else x for n, x in options.items()}

    def differences(self, recorded: dict[str, Any]) -> list[str]:
        """Name what differs between these options and those of an earlier command."""
        differences = []
        for each in fields(self):
            now, then = getattr(self, each.name), recorded.get(each.name, each.default)
            then = tuple(then) if isinstance(then, list) else then
            if now != then and not (now in (None, ()) and then in (None, ())):
                was, is_ = (_format(value, each.default) for value in (then, now))
                differences.append(f"{flag(each)} was {was} and is {is_}")
        return differences


def _format(value: Any, default: Any) -> str:
    if isinstance(value, bool):
        return "not given" if value == default else "given"
    if value in (None, ()):
        return "not given"
    return ", ".join(value) if isinstance(value, tuple) else str(value)


@explains_arguments
@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """Options of training a fresh model or one to start from.

    What was not set is derived: from the time, the text and the machine, or from `size`.
    """

    GROUP: ClassVar = "model"
    evaluations: ClassVar = EVALUATIONS_PER_RUN
    task: TaskName = option(
        "lm",
        "lm: predict text. The others need .jsonl: classify texts, or choose a continuation.",
        "data",
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
    )
    start: str | None = option(
        None,
        "Start from this GPT (directory, file, hub name): its shape, its tokenizer, its weights.",
        metavar="MODEL",
    )
    size: str = option(
        AUTO,
        "auto: chosen by text, time and speed (mini with --task or --steps); or nano, tiny, "
        "little, mini, small, medium, gpt1 .. gpt3-175b.",
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
    )
    bias: bool = option(
        True, "Train without biases in linear layers and LayerNorms, as nanoGPT does."
    )
    DEFAULTS: ClassVar = {
        "val": "about a tenth of the data",
        "context": "the size's, or fewer for short text with --size auto; with --start, the "
        "model's context",
        "dropout": "the model's with --start; 0.1 for published sizes, or if --size auto expects "
        "many epochs; else 0",
        "minutes": "3, or 3 epochs of labelled examples and at least 100 steps",
        "eval_every": "a tenth of the steps",
        "patience": "when the validation loss has risen again, but not with fewer than 50 "
        "held-out examples",
        "batch_size": "the size's, or fewer for short runs with --size auto; 8 with --start; 32 "
        "labelled examples",
        "optimizer": "muon, or adamw with --start",
        "lr": "by size, width and optimizer, shown by --verbose",
        "weight_decay": "0.1, or 0.3 for small sizes",
    }

    def __post_init__(self) -> None:
        if self.task not in get_args(TaskName):
            remedy = REMOVED_VALUES.get(("task", self.task), f"use {', '.join(get_args(TaskName))}")
            raise UserError(f"there is no --task {self.task}", hint=remedy)
        if self.task != "lm" and not self.data:
            raise UserError(f"--task {self.task} needs examples", hint="name a .jsonl file")
        if self.size not in (AUTO, *SIZES):
            raise UserError(f"no size {self.size!r}", hint=f"there are {AUTO}, {', '.join(SIZES)}")
        super().__post_init__()
        self._require_task_and_origin()
        if self.tokenizer != "bpe" and self.vocab_size is not None:
            raise UserError(
                "--vocab-size is for a BPE that is trained", hint="leave out --tokenizer"
            )
        if self.width is not None and (self.width < 1 or self.width % self._head_width()):
            raise UserError(
                f"--width must be a multiple of {self._head_width()}, the head size of --size "
                f"{self.named_size}, got {self.width}"
            )

    def _require_task_and_origin(self) -> None:
        """Raise `UserError` for options of another task, or of a fresh model where none is made."""
        for each in fields(self):
            value, name = getattr(self, each.name), each.name
            if value == each.default:
                continue
            if self.task != "lm" and name in TEXT_ONLY:
                raise UserError(f"{flag(each)} {value} is for --task lm")
            may_differ = name == "tokenizer" and value != "char"
            if self.start and name in FRESH_ONLY and not may_differ:
                raise UserError(f"{flag(each)} is for a fresh model: {self.start} has its own")

    @property
    def continues(self) -> bool:
        """Whether training starts from a model."""
        return self.start is not None

    @property
    def chooses(self) -> bool:
        """Whether the size of a fresh model is to be chosen: see `planning.py`."""
        fresh = self.task == "lm" and not self.continues
        return fresh and self.size == AUTO and self.width is None and self.steps is None

    @property
    def duration(self) -> Duration:
        """Return the training duration."""
        text, labelled = ("minutes", DEFAULT_MINUTES), ("epochs", DEFAULT_EPOCHS, LEAST_STEPS)
        return self.duration_or(Duration(*(text if self.task == "lm" else labelled)))

    @property
    def named_size(self) -> str:
        """Return the name of the size, the default one for auto."""
        return DEFAULT_SIZE if self.size == AUTO else self.size

    @property
    def shape(self) -> Size:
        """Return the shape and the recipe of the size."""
        return SIZES[self.named_size]

    def plan_fields(self, config: GPTConfig, context: int, epoch_rows: int) -> dict[str, Any]:
        """Return the fields of a plan that options decide.

        The data have `epoch_rows` rows of `context` tokens.
        """
        size, is_fresh = self.shape, self.start is None
        usual: Rule = "muon" if is_fresh else "adamw"
        rule = usual if self.optimizer == "auto" else self.optimizer
        rate = size.lr if rule == "muon" or size.lr_adamw is None else size.lr_adamw
        rate = scale_lr_to_width(rate, width=size.n_embd, to=config.n_embd, rule=rule)
        batch = size.batch_size if is_fresh else START_BATCH
        return {"size": "" if self.continues else self.named_size} | self.fill_in(
            {
                "optimizer": rule,
                "lr": rate if is_fresh else START_RATE / config.n_embd,
                "batch_size": batch if self.task == "lm" else LABELLED_BATCH,
                "weight_decay": size.weight_decay if is_fresh else 0.1,
                "patience": None,
            }
        )

    def _head_width(self) -> int:
        return self.shape.n_embd // self.shape.n_head

    def model_config(self, *, vocab_size: int, bos: int | None, eos: int | None) -> GPTConfig:
        """Return the config of the size that was asked for, on this vocabulary."""
        size = self.shape
        dropout = size.dropout if self.dropout is None else self.dropout
        heads = size.n_head if self.width is None else self.width // self._head_width()
        return GPTConfig(
            vocab_size=vocab_size,
            n_positions=self.context or size.n_positions,
            n_embd=self.width or size.n_embd,
            n_layer=size.n_layer,
            n_head=heads,
            bias=self.bias,
            attention_windows=None if self.window is None else (0, self.window),
            norm=PRESETS.get(self.named_size, {}).get("norm", "pre"),
            embd_pdrop=dropout,
            attn_pdrop=0.0,  # with dropout, attention loses its fast kernels
            resid_pdrop=dropout,
            bos_token_id=bos,
            eos_token_id=eos,
        )
