"""`HarnessModel`: an engine as a model of lm-evaluation-harness (`tiedgpt[eval]`).

    lm_eval.simple_evaluate(HarnessModel("gpt2"), tasks=["lambada_openai", "hellaswag"])

Its scores equal those of the harness's transformers model: the harness encodes the pairs, the last
n_positions + 1 ids are read, an empty context is the beginning-of-text token, and rolling scores
predict every token of a text in windows that do not overlap.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

from tiedgpt.errors import UserError
from tiedgpt.evaluate.texts import require_tokenizer
from tiedgpt.infer import Engine
from tiedgpt.infer.prompts import start_id

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as error:
    raise UserError(
        f"eval --tasks needs lm-evaluation-harness ({error})", hint="pip install 'tiedgpt[eval]'"
    ) from None

__all__ = ["HarnessModel", "simple_evaluate"]

ScoredAnswer = tuple[float, bool]
"""The logprob of a continuation, and whether greedy decoding writes it."""
MAX_NEW_TOKENS = 256
"""Default number of generated tokens, for tasks that set none."""
SAMPLING = ("temperature", "top_p", "top_k")


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """An engine, or whatever `Engine` opens, as a model of the harness."""

    def __init__(self, source: Engine | str | os.PathLike[str], **options: Any) -> None:
        super().__init__()
        self.engine = source if isinstance(source, Engine) else Engine(source, **options)
        self._tokenizer = require_tokenizer(self.engine)
        self.max_length = self.engine.runner.config.n_positions

    @property
    def eot_token_id(self) -> int:
        """The id that ends texts."""
        end = self.engine.runner.config.eos_token_id
        return self.prefix_token_id if end is None else end

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without a context."""
        return start_id(self.engine.runner.config)

    @property
    def tokenizer_name(self) -> str:
        """Key of the harness's cache of requests."""
        return repr(self._tokenizer)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Return a text's ids; special tokens are never added."""
        return self._tokenizer.encode(string, allow_special=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[ScoredAnswer]:
        rows = [(context + target)[-self.max_length - 1 :] for _, context, target in requests]
        order = sorted(range(len(requests)), key=rows.__getitem__)  # neighbours share a prefix
        answers = cast("list[ScoredAnswer]", [None] * len(requests))
        step = 4 * self.engine.n_slots
        with tqdm(total=len(requests), desc="scoring", disable=disable_tqdm) as bar:
            for first in range(0, len(order), step):
                some = order[first : first + step]
                targets = [requests[at][2] for at in some]
                contexts = [rows[at][: -len(requests[at][2])] for at in some]
                for at, scored in zip(some, self.engine.score(targets, contexts), strict=True):
                    answers[at] = scored.total, scored.is_greedy
                    if (request := requests[at][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", request, answers[at])
                bar.update(len(some))
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the logprob of each whole text."""
        windows = [
            [
                (None, *make_disjoint_window(pair))
                for pair in get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1
                )
            ]
            for request in requests
        ]
        flat = [window for group in windows for window in group]
        answers = iter(self._loglikelihood_tokens(flat, disable_tqdm))
        totals = [sum(next(answers)[0] for _ in group) for group in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate a continuation of each context, up to the task's stop strings."""
        end = self._tokenizer.decode([self.eot_token_id])
        texts = []
        for request in tqdm(requests, desc="generating", disable=disable_tqdm):
            context, settings = request.args
            options = normalize_gen_kwargs(settings, MAX_NEW_TOKENS)
            n_new = min(options["max_gen_toks"], self.max_length - 1)
            ids = self.tok_encode(context) or [self.prefix_token_id]
            sampled = {name: options[name] for name in SAMPLING if name in options}
            completion = self.engine.generate(
                ids[-(self.max_length - n_new) :],
                max_new_tokens=n_new,
                stop=tuple(handle_stop_sequences(options.get("until"), eos=end)),
                **(sampled if options["do_sample"] else {"temperature": 0}),
            )
            texts.append(completion.text)
            self.cache_hook.add_partial("generate_until", request.args, completion.text)
        return texts
