"""Runners of models: from a `GPT` or a source to the runner of a backend.

The engine imports torch only here, and only for a runner that needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.infer.generation_config import nearest_name
from tiedgpt.infer.session import Runner
from tiedgpt.runtime import device_for_inference, device_name, find_device
from tiedgpt.text import Tokenizer
from tiedgpt.weights.formats.packed import find_packed, open_packed
from tiedgpt.weights.formats.packed.panels import Precision
from tiedgpt.weights.source import Source

if TYPE_CHECKING:
    from tiedgpt.core.model import GPT

QUANTIZED = ("int8", "int4")
PRECISIONS = ("auto", "fp32", "bf16", "fp16", *QUANTIZED)
ENGINE_OPTIONS = tuple(
    "precision slots backend device tokenizer resolve threads queue_size".split()
)
BACKENDS = ("auto", "torch", "kernels")
LARGE = 5_000_000
"""The parameters of a model from which kernels are worth the time to compile them once."""
EXACT_PRECISION: dict[str, Precision] = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp32",
}
"""The precision that holds weights of a dtype exactly."""
MAX_PADDING = 1024
"""The most rows that padding adds to a vocabulary."""


@dataclass(frozen=True)
class BackendOptions:
    """The choices of an engine; impossible ones raise `UserError`."""

    precision: str
    backend: str
    threads: int | None
    device: object = "auto"
    """A name or a torch.device, as `device_name` reads it."""

    def __post_init__(self) -> None:
        for name, choices in (("precision", PRECISIONS), ("backend", BACKENDS)):
            if (value := getattr(self, name)) not in choices:
                raise UserError(f"must be one of {', '.join(choices)}, got {value!r}", option=name)
        if self.backend == "torch" and self.precision in QUANTIZED:
            raise UserError(
                f"torch does not compute {self.precision}: backend='kernels' does, on the CPU"
            )
        if self.backend == "kernels" and self.precision == "fp16":
            raise UserError("kernels compute fp32, bf16, int8 and int4, not fp16")
        if self.needs_kernels and not self.allows_cpu:
            name = "precision" if self.precision in QUANTIZED else "backend"
            raise UserError(
                f"exclude each other: {getattr(self, name)} is computed by kernels for CPUs, and "
                f"not on {self.device}",
                option=("device", name),
                hint="leave out the device, or take bf16 on the GPU",
            )

    @property
    def needs_kernels(self) -> bool:
        """Whether only kernels can compute this."""
        return self.backend == "kernels" or self.precision in QUANTIZED

    @property
    def allows_cpu(self) -> bool:
        """Whether the device may be the CPU."""
        return device_name(self.device) in ("auto", "cpu")

    def notes(self) -> tuple[str, ...]:
        """Return a note if a precision takes the CPU although there is a GPU."""
        import torch

        is_asked = device_name(self.device) == "cpu" or self.precision not in QUANTIZED
        if is_asked or not torch.cuda.is_available():
            return ()
        return (f"{self.precision} is computed by the CPU's kernels; bf16 would use the GPU",)


def require_engine_options(config: Mapping[str, Any]) -> None:
    """Raise `TypeError` for a name that is neither an option of `Engine` nor a config's field."""
    for name in config.keys() - GPTConfig.__dataclass_fields__.keys():
        near = nearest_name(name, ENGINE_OPTIONS)
        suggestion = f": did you mean {near}?" if near else ""
        raise TypeError(
            f"{name} is no option of Engine; known are {', '.join(ENGINE_OPTIONS)}, and the "
            f"fields of a GPTConfig{suggestion}"
        )


def make_runner(model: GPT, options: BackendOptions) -> tuple[Runner, tuple[str, ...]]:
    """Return a runner of a model, or of a copy in another precision or on another device; notes."""
    import copy

    from tiedgpt.core.model import GPT
    from tiedgpt.infer.torch_session import PRECISION_DTYPES, TorchRunner

    if hasattr(model, "merge_and_unload"):
        raise UserError(
            f"{type(model).__name__} has PEFT's adapters",
            hint="merge and save it: model.merge_and_unload().save_pretrained(folder)",
        )
    if not isinstance(model, GPT):
        raise UserError(f"{type(model).__name__} is neither a GPT nor a path or hub name")
    if options.needs_kernels:
        return _pack(model, options), options.notes()
    weight, name = model.wte.weight, device_name(options.device)
    dtype = PRECISION_DTYPES[options.precision] or weight.dtype
    device = weight.device if name == "auto" else find_device(name)
    if (dtype, device) != (weight.dtype, weight.device):
        model = copy.deepcopy(model).to(device, dtype)
    return TorchRunner(model, options.threads), ()


def open_runner(
    source: Source, options: BackendOptions, *, resolve: str | None, **config: Any
) -> tuple[Runner, tuple[str, ...]]:
    """Return the runner of a source on the device of the options, and notes for the user."""
    packed = find_packed(source.path)
    if packed is not None and options.backend != "torch":
        from tiedgpt.infer.packed_session import PackedRunner

        if resolve is not None or config:
            named = [*config, *(["resolve"] if resolve is not None else [])]
            raise UserError(f"{packed} says all itself", hint=f"leave out {', '.join(named)}")
        if not options.allows_cpu:
            raise UserError(
                f"{options.device} cannot be used: {packed} is packed for the CPU's kernels",
                option="device",
                hint="leave it out, or convert the weights: backend='torch' (--backend torch)",
            )
        model = open_packed(packed)
        if options.precision not in ("auto", model.precision):
            raise UserError(
                f"{packed} is packed in {model.precision}, not {options.precision}",
                hint=f"pack the model that it was made of with --precision {options.precision}",
            )
        return PackedRunner(model, threads=options.threads), ()
    from tiedgpt.infer.torch_session import PRECISION_DTYPES, TorchRunner
    from tiedgpt.weights.load import load

    if not options.allows_cpu:
        find_device(options.device)  # an error comes before the weights are read
    loaded = load(source, dtype=PRECISION_DTYPES.get(options.precision), resolve=resolve, **config)
    if options.needs_kernels:
        return _pack(loaded.model, options), (*loaded.notes, *options.notes())
    gpt = loaded.model
    device = device_for_inference(options.device, gpt.config.parameter_count())
    if device.type == "cpu" and options.backend == "auto" and _is_for_kernels(gpt, options):
        return _pack(gpt, options), loaded.notes
    return TorchRunner(gpt.to(device), options.threads), loaded.notes


def _pack(model: GPT, options: BackendOptions) -> Runner:
    """Pack a model for the kernels, by default without loss; return its runner."""
    from tiedgpt.infer.packed_session import PackedRunner
    from tiedgpt.weights.formats.packed.writer import pack_gpt

    exact = EXACT_PRECISION.get(str(model.wte.weight.dtype), "fp32")
    precision = exact if options.precision == "auto" else cast(Precision, options.precision)
    return PackedRunner(pack_gpt(model, precision), threads=options.threads)


def _is_for_kernels(model: GPT, options: BackendOptions) -> bool:
    """Whether backend="auto" means kernels for a model on a CPU."""
    from tiedgpt.weights.formats.packed.writer import can_pack

    if options.precision == "fp16" or str(model.wte.weight.dtype) not in EXACT_PRECISION:
        return False
    return model.config.parameter_count() >= LARGE and can_pack(model)


def compare_vocabularies(tokenizer: Tokenizer | None, vocab_size: int) -> tuple[str, ...]:
    """Compare a tokenizer with the model's rows; return notes."""
    if tokenizer is not None and len(tokenizer) > vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {vocab_size}"
            ": they do not belong together"
        )
    if tokenizer is not None and len(tokenizer) < vocab_size - MAX_PADDING:
        return (
            f"the tokenizer has {len(tokenizer):,} tokens and the model rows for "
            f"{vocab_size:,}: the others are never drawn",
        )
    return ()
