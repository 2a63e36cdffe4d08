"""How a completion is searched for, beyond drawing one token after another; checked beforehand."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.infer.beam import EarlyStopping
from tiedgpt.infer.constraints import Constraint
from tiedgpt.infer.prompts import Prompt
from tiedgpt.infer.request import Options, Request, require_positive
from tiedgpt.text import Tokenizer


class SearchOptions(Options, total=False):
    """The keywords of `Engine.generate`: those of a `Request`, and those of a `Strategy`."""

    num_beams: int
    length_penalty: float
    early_stopping: EarlyStopping
    best_of: int
    guidance_scale: float
    negative_prompt: Prompt | None
    regex: str | None
    json_schema: str | Mapping[str, Any] | None
    grammar: str | None


_EXCLUDED = {
    "num_beams": (
        *("temperature", "top_k", "top_p", "min_p", "typical_p", "stop", "stop_ids"),
        *("context_end", "top_logprobs", "prompt_logprobs", "speculate"),
    ),
    "guidance_scale": ("context_end",),
}
"""What a request cannot ask for together with a search: nothing is drawn, or it is read anew."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a completion is searched for; impossible values raise `UserError`, naming the field."""

    num_beams: int = 1
    """Above 1: beam search, with that many prefixes, for the likeliest text."""
    length_penalty: float = 1.0
    """Of beam search: above 0 longer texts gain, below 0 shorter ones."""
    early_stopping: EarlyStopping = False
    """Of beam search: end at once (True), sensibly (False), or as late as may help ("never")."""
    best_of: int = 1
    """Above 1: draw that many, and take the one with the highest mean log P."""
    guidance_scale: float = 1.0
    """Above 1: away from how the negative prompt would go on; the text takes twice the work."""
    negative_prompt: Prompt | None = None
    """What to be guided away from; None: the prompt's last token alone."""
    regex: str | None = None
    """The text matches this regular expression (Rust's syntax) as a whole."""
    json_schema: str | Mapping[str, Any] | None = None
    """The text is JSON that this schema allows."""
    grammar: str | None = None
    """The text follows this grammar (Lark's syntax)."""

    def __post_init__(self) -> None:
        require_positive("num_beams", self.num_beams)
        require_positive("best_of", self.best_of)
        for name in ("length_penalty", "guidance_scale"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise UserError(f"{name}={value!r} is no number")
            if not math.isfinite(value):
                raise UserError(f"{name}={value!r} is no finite number")
        if self.early_stopping not in (True, False, "never"):
            raise UserError(f"early_stopping={self.early_stopping!r} is no bool and not 'never'")
        if self.num_beams > 1 and self.best_of > 1:
            raise UserError("num_beams and best_of exclude each other: choose one")
        for name in ("length_penalty", "early_stopping"):
            if self._asks(name) and self.num_beams == 1:
                raise UserError(f"{name} is for beam search: give num_beams above 1 as well")
        if self.negative_prompt is not None and not self.guided:
            raise UserError("negative_prompt needs a guidance_scale other than 1, such as 1.5")
        if any(form is not None for form in self._forms.values()):
            Constraint(**self._forms)

    @property
    def guided(self) -> bool:
        """Whether a negative prompt takes part."""
        return self.guidance_scale != 1

    @property
    def searches(self) -> bool:
        """Whether a prompt takes a search of its own, and not a slot beside others."""
        return self.guided or self.num_beams > 1 or self.best_of > 1

    def constrained(
        self, request: Request, tokenizer: Tokenizer | None, config: GPTConfig
    ) -> Request:
        """Return the request with the constraint, if any, as its last processor.

        Raises UserError for a constraint that cannot be met, as `Constraint.matcher` does.
        """
        if all(form is None for form in self._forms.values()):
            return request
        if tokenizer is None:
            raise UserError("regex, json_schema and grammar need a tokenizer")
        matcher = Constraint(**self._forms).matcher(tokenizer, config)
        return dataclasses.replace(request, processors=(*request.processors, matcher))

    def require_streamable(self) -> None:
        """Raise `UserError` where the text is known only when all of it is."""
        for name in ("num_beams", "best_of"):
            if self._asks(name):
                raise UserError(
                    f"stream and {name}={getattr(self, name)} exclude each other: which text is "
                    "the best is known at its end; use generate"
                )

    def check(self, request: Request) -> None:
        """Raise `UserError`, naming both, for a request that contradicts the strategy."""
        if self.best_of > 1 and request.greedy:
            raise UserError("best_of and temperature=0: all would be the same text; leave one out")
        defaults = {field.name: field.default for field in dataclasses.fields(request)}
        for name, excluded in _EXCLUDED.items():
            for other in excluded if self._asks(name) else ():
                value = getattr(request, other)
                if not value or (value == defaults[other] and other != "temperature"):
                    continue
                raise UserError(
                    f"{name}={getattr(self, name)!r} and {other}={value!r} exclude each other: "
                    "leave one out"
                )

    @property
    def _forms(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("regex", "json_schema", "grammar")}

    def _asks(self, name: str) -> bool:
        """Whether a field was given another value than its default."""
        return bool(getattr(self, name) != type(self).__dataclass_fields__[name].default)


def split(options: SearchOptions) -> tuple[Strategy, Request]:
    """Part the keywords into a strategy and a request that fits it.

    Beam search, which draws nothing, has temperature 0 unless another is given, which is refused.
    Raises `TypeError` for a keyword that is none of either.
    """
    given: dict[str, Any] = dict(options)
    names = {field.name for field in dataclasses.fields(Strategy)}
    known = names | {field.name for field in dataclasses.fields(Request) if field.init}
    for name in given.keys() - known:
        near = difflib.get_close_matches(name, sorted(known), n=1)
        meant = f": is {near[0]} meant?" if near else f"; there are {', '.join(sorted(known))}"
        raise TypeError(f"{name} is no option of generation{meant}")
    strategy = Strategy(**{name: value for name, value in given.items() if name in names})
    rest = {name: value for name, value in given.items() if name not in names}
    if strategy.num_beams > 1:
        rest.setdefault("temperature", 0)
    request = Request(**rest)
    strategy.check(request)
    return strategy, request
