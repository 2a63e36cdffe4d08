"""The options of generation, declared and checked once, for Python and the command line."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from tiedgpt.errors import UserError
from tiedgpt.names import NOT_HERE, OTHER_NAMES
from tiedgpt.options import MAX_INT, option, read_number
from tiedgpt.signatures import check_fields

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Logits = NDArray[np.float32]
else:
    Logits = Any  # numpy is imported by the engine, not by `tiedgpt generate --help`

ContextEnd = Literal["stop", "slide"]
EarlyStopping = bool | Literal["never"]
Processor = Callable[[Sequence[int], int, Logits], Logits]
"""(ids of prompt and text, how many are the prompt's, logits (V,)) -> the logits to choose from."""
Prompt = str | Sequence[int]
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would overflow."""
MAX_THREADS = 256
# In the fields below, `neutral` is the value with which a sampling option changes nothing, and
# `uniform` the name of a random number that is drawn for each token while the option is on.


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """The options of generation; None means an option's default.

    Impossible values raise `UserError`, naming the option.
    """

    GROUP = "sampling"
    max_new_tokens: int = option(128, "Maximum number of tokens to generate.", short="n", least=1)
    temperature: float = option(
        1.0,
        "0: greedy decoding; 1: sample from the model's own distribution.",
        short="t",
        least=0,
        served={"most": 2},
        neutral=1.0,
    )
    top_k: int | None = option(
        None, "Sample only from the k likeliest tokens; 0 or -1: from all.", least=-1, neutral=0
    )
    top_p: float | None = option(
        None,
        "Nucleus sampling: sample from the likeliest tokens that together reach this probability; "
        "0: greedy decoding.",
        least=0,
        most=1,
        neutral=1.0,
    )
    min_p: float | None = option(
        None,
        "Drop tokens whose probability is below this share of the highest probability.",
        least=0,
        most=1,
        neutral=0.0,
    )
    top_n_sigma: float | None = option(
        None,
        "Keep tokens whose logit is within this many standard deviations of the highest.",
        least=0,
        neutral=0.0,
    )
    xtc_probability: float = option(
        0.0,
        "Exclude top choices (XTC): probability of drawing a token without the likeliest ones.",
        least=0,
        most=1,
        neutral=0.0,
        uniform="xtc_uniform",
    )
    xtc_threshold: float = option(
        0.1,
        "XTC excludes tokens of at least this probability, except the least likely of them; above "
        "0.5: none.",
        least=0,
        most=1,
        neutral=0.1,
    )
    repetition_penalty: float = option(
        1.0,
        "Above 1, tokens already in the prompt or the text become less likely.",
        least=1e-6,
        served={"most": 10},
        neutral=1.0,
    )
    presence_penalty: float = option(
        0.0,
        "Subtracted from the logits of tokens that were already generated.",
        served={"least": -2, "most": 2},
        neutral=0.0,
    )
    frequency_penalty: float = option(
        0.0,
        "Subtracted from a token's logit once for each time that it was generated.",
        served={"least": -2, "most": 2},
        neutral=0.0,
    )
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these ids; -inf excludes an id."""
    processors: Sequence[Processor] = ()
    """Functions that change the logits before all other options, in this order."""
    seed: int | None = option(
        None, "The same seed gives the same text; default: a new seed each time.", least=0
    )
    stop: str | Sequence[str] = option(
        (),
        "The text ends where the first of these strings begins, however tokens divide it.",
        "the end",
    )
    stop_ids: Sequence[int] = ()
    """The text ends with the first of these ids, as with the end-of-text token."""
    include_stop: bool = False
    """Whether the text includes the stop string, or the stop id's text, that ends it."""
    min_new_tokens: int = option(0, least=0)
    """No end-of-text token, stop id or stop string in this many first tokens ends the text."""
    ignore_eos: bool = False
    """Whether the text continues after an end-of-text token, which its text does not show."""
    skip_special_tokens: bool = False
    """Whether the text leaves out the tokenizer's special tokens; their ids are in `ids`."""
    context_end: ContextEnd = option(
        "stop",
        "When the context is full: stop, or slide (drop the older half and continue).",
        "the end",
    )
    timeout: float | None = option(
        None,
        "End the text after this many seconds, including the wait for a slot.",
        "the end",
        least=0,
    )
    top_logprobs: int = option(0, least=0)
    """For each new token, return this many of the likeliest tokens with their logprobs."""
    prompt_logprobs: bool | int = option(False, least=0)
    """Return the logprob of each prompt token after the first; a number: the likeliest as well."""
    n: int = option(1, "Number of texts per prompt.", "several texts", least=1, served={"most": 8})
    num_beams: int = option(
        1, "Above 1: beam search with this many beams.", "several texts", least=1
    )
    length_penalty: float = option(1.0, least=-50, most=50)
    """Beam search: above 0 favours longer texts, below 0 shorter ones."""
    early_stopping: EarlyStopping = False
    """Beam search: stop when there are enough texts (True), when a better one is unlikely (False),
    or when a better one is impossible ("never")."""
    regex: str | None = option(
        None,
        "The whole text matches this regular expression (Rust's syntax).",
        "form",
        metavar="REGEX",
    )
    json_schema: str | Mapping[str, Any] | None = option(
        None, "The text is JSON that this schema allows.", "form", metavar="FILE"
    )
    grammar: str | None = option(
        None, "The text follows this grammar (Lark's syntax).", "form", metavar="FILE"
    )

    def __new__(cls, *_: Any, **options: Any) -> GenerationConfig:
        """Answer an option that does not exist with the one to use."""
        _require_known(options, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, field_ in _FIELDS.items():
            if getattr(self, name) is None and field_.default is not None:
                self._set(name, default_of(name))
        check_fields(self)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(t, str) and t for t in stop):
            raise _refusal("stop", "a list of strings that are not empty", stop)
        self._set("stop", tuple(stop))
        self._set("stop_ids", _ids("stop_ids", self.stop_ids))
        self._set("processors", tuple(self.processors))
        if self.top_k is not None and self.top_k <= 0:
            self._set("top_k", None)
        _check_bias(self.logit_bias)
        self._check_together()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        """Raise `UserError`, naming both, for options that contradict each other."""
        if self.n > 1 and self.num_beams > 1:
            raise UserError("exclude each other", option=("num_beams", "n"))
        if self.n > 1 and self.greedy:
            name = "top_p" if self.top_p == 0 else "temperature"
            raise UserError("0 would make the same text each time", option=("n", name))
        if self.min_new_tokens > self.max_new_tokens:
            raise UserError(
                f"contradict each other: {self.min_new_tokens} is more than {self.max_new_tokens}",
                option=("min_new_tokens", "max_new_tokens"),
            )
        for name in ("length_penalty", "early_stopping"):
            if self._is_set(name) and self.num_beams == 1:
                raise UserError(
                    "is for beam search",
                    option=name,
                    hint="use two beams or more (num_beams, --num-beams)",
                )
        if len(self.constraint) > 1:
            raise UserError("exclude each other", option=tuple(self.constraint))
        for name in ("min_new_tokens", "ignore_eos") if self.constraint else ():
            if self._is_set(name):
                raise UserError("exclude each other", option=(name, *self.constraint))
        for name in _EXCLUDED_BY_BEAMS if self.num_beams > 1 else ():
            if self._is_set(name) and not (name == "temperature" and self.temperature == 0):
                raise UserError("exclude each other", option=("num_beams", name))

    def _is_set(self, name: str) -> bool:
        """Whether an option differs from its default."""
        return bool(getattr(self, name) != default_of(name))

    @cached_property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW or self.top_p == 0

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """The options of sampling by name; the temperature is 0 if decoding is greedy."""
        values = {name: getattr(self, name) for name in NEUTRAL}
        numbers = {name: NEUTRAL[name] if x is None else x for name, x in values.items()}
        return numbers | {"temperature": 0.0 if self.greedy else self.temperature}

    @cached_property
    def penalizes(self) -> bool:
        """Whether the ids of prompt and text change logits."""
        return any(self.numbers[name] != NEUTRAL[name] for name in _PENALTIES)

    @property
    def constraint(self) -> dict[str, Any]:
        """The constraint on the text as {option: value}, or an empty dictionary."""
        values = {name: getattr(self, name) for name in ("regex", "json_schema", "grammar")}
        return {name: value for name, value in values.items() if value is not None}


_FIELDS: dict[str, Any] = {option.name: option for option in fields(GenerationConfig)}
NEUTRAL = {name: x.metadata["neutral"] for name, x in _FIELDS.items() if "neutral" in x.metadata}
"""The sampling options, each with the value that changes nothing."""
UNIFORMS = {name: x.metadata["uniform"] for name, x in _FIELDS.items() if "uniform" in x.metadata}
"""The random number of each option that has one of its own."""
_PENALTIES = [name for name in NEUTRAL if name.endswith("_penalty")]
_EXCLUDED_BY_BEAMS = (
    *(name for name in NEUTRAL if name not in _PENALTIES),
    *("stop", "include_stop", "min_new_tokens", "ignore_eos"),
    *("context_end", "top_logprobs", "prompt_logprobs"),
)
"""Options of sampling and streaming, which beam search does not use."""


def nearest_name(name: str, options: Iterable[str]) -> str | None:
    """Return the option that another library's name, or a misspelt one, most likely means."""
    near = difflib.get_close_matches(name, options, n=1)
    return OTHER_NAMES["GenerationConfig"].get(name) or next(iter(near), None)


def default_of(name: str) -> object:
    """Return an option's default."""
    default = _FIELDS[name].default
    return default if name != "logit_bias" else {}


def _require_known(options: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Raise `TypeError` for an unknown option, and name the likely one or a remedy."""
    for name in options.keys() - fields.keys():
        hint = f"; known are {', '.join(fields)}"
        if near := nearest_name(name, fields):
            engine = "" if near in fields else " It is an option of Engine."
            hint = f": did you mean {near}?{engine}"
        if name in NOT_HERE:
            hint = f": {NOT_HERE[name]}"
        raise TypeError(f"{name} is no option of generation{hint}")


def with_options(config: GenerationConfig | None, options: Mapping[str, Any]) -> GenerationConfig:
    """Return the config with some options changed; raise `TypeError` for an unknown option."""
    if config is None:
        return GenerationConfig(**options)
    if not isinstance(config, GenerationConfig):
        raise UserError(f"must be a GenerationConfig, got {type(config).__name__}", option="config")
    _require_known(options, _FIELDS)
    return replace(config, **options)


def require_positive(name: str, value: Any, greatest: int = MAX_INT) -> int:
    """Return an integer from 1 to `greatest`; anything else is a `UserError`."""
    return read_number(name, value, int, least=1, most=greatest)


def is_id(value: object) -> bool:
    """Whether a value is an integer, also one of NumPy or torch, and not a bool."""
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(value, bool) and not getattr(value, "shape", ())


def _refusal(name: str, allowed: str, value: object) -> UserError:
    return UserError(f"must be {allowed}, got {value!r}", option=name)


def _ids(name: str, ids: Any) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes)) or not (
        isinstance(ids, Sequence) or hasattr(ids, "__array__")
    ):
        raise _refusal(name, "a list of ids", ids)
    return tuple(read_number(name, token, int, least=0) for token in ids)


def _check_bias(bias: Any) -> None:
    if not isinstance(bias, Mapping):
        raise _refusal("logit_bias", "a dictionary of ids and numbers", bias)
    _ids("logit_bias", list(bias))
    for value in bias.values():
        if type(value) is bool or not isinstance(value, Real) or not float(value) < math.inf:
            raise _refusal("logit_bias", "numbers below inf", value)
