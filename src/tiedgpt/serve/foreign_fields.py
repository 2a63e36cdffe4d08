"""Tables of other programs' fields: labels, neutral values, and remedies.

A label describes a request and changes no text: it is accepted with any value. A neutral field
would change the text with another value: it is accepted with the values that change nothing.
Other fields are refused, and `REMEDIES` say what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiedgpt.names import NOT_HERE

LABELS = frozenset({
    # OpenAI
    "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "verbosity", "reasoning_effort", "parallel_tool_calls", "prediction",
    # vLLM
    "request_id", "session_id", "priority", "cache_salt", "include_reasoning", "stream_interval",
    "chat_template_kwargs", "spaces_between_special_tokens",
    # llama.cpp
    "cache_prompt", "id_slot", "timings_per_token", "return_progress", "reasoning_format",
})  # fmt: skip
"""Labels of a request; no template takes arguments."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"), "best_of": (1,), "suffix": ("",), "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    # vLLM
    "use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,),
    "allowed_token_ids": ([],), "logprob_token_ids": ([],),
    "bad_words": ([],), "documents": ([],), "return_prompt_text": (False,), "echo": (False,),
    # llama.cpp
    "typical_p": (1,), "mirostat": (0,), "dynatemp_range": (0,),
    "dry_multiplier": (0,), "n_keep": (0,), "lora": ([],),
}  # fmt: skip
"""Neutral fields of a request, each with its accepted values; null is always accepted."""
RESPONSES_LABELS = frozenset({"reasoning", "max_tool_calls", "context_management"})
RESPONSES_NEUTRAL = {**NEUTRAL, "background": (False,), "truncation": ("disabled",)}
"""Further labels and neutral fields of /v1/responses."""
MESSAGE_LABELS = frozenset({"id", "status", "phase", "name", "annotations"})
MESSAGE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "type": ("message", "text"),
    "tool_calls": ([],),
    "reasoning_content": ("",),
}
"""Neutral fields of a message; `"type": "message"` marks an item of /v1/responses."""
NO_MESSAGES = {
    "choices": "send choices[0].message of the answer",
    "output": "send the items of the answer's output",
    "message": "send the message alone",
    "text": "call the text content",
}
"""Fields of an object without `content` that stands in a message's place, and what to do."""
PART_LABELS = frozenset({"annotations", "logprobs", "cache_control", "prompt_cache_breakpoint"})
"""Labels of a part of a message's content."""

_TOOLS = "the model calls no tools; response_format, json_schema, regex and grammar give a form"
_CONSTRAINTS = "use regex, json_schema or grammar"
_STATE = "nothing is stored here: send the earlier messages as input"
REMEDIES = NOT_HERE | {
    **dict.fromkeys(("tools", "functions", "function_call", "tool_calls", "tool_choice"), _TOOLS),
    **dict.fromkeys(("structured_outputs", "guided_choice", "structural_tag"), _CONSTRAINTS),
    **dict.fromkeys(("previous_response_id", "conversation"), _STATE),
    "suffix": "put the text after it into the prompt",
    **dict.fromkeys(("modalities", "audio"), "answers are text"),
    "service_tier": "there is one",
    "moderation": "check the text yourself",
    "web_search_options": "put what the model should know into the prompt",
    "use_beam_search": "use num_beams",
    "allowed_token_ids": "use logit_bias or regex",
    "prompt_logprobs": "use echo with logprobs in /v1/completions",
    "truncate_prompt_tokens": "shorten the prompt",
    "documents": "put them into a message",
    "chat_template": "the model's own is used",
    "background": "wait for the answer, or stream it",
    "truncation": "shorten the input",
    "type": "the conversation consists of messages",
    "messages": "send them to /v1/chat/completions",
    "prompt": "send it to /v1/completions",
    "early_stopping": "use early_stopping= of GenerationConfig in Python",
    "length_penalty": "use length_penalty= of GenerationConfig in Python",
}
"""Fields that are refused, with what to do instead."""


def has_no_effect(
    name: str, value: Any, labels: frozenset[str], neutral: Mapping[str, tuple[Any, ...]]
) -> bool:
    """Whether a field is a label, or has one of its neutral values."""
    accepted = neutral.get(name, ())
    return name in labels or any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in accepted
    )
