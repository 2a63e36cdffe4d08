"""Values of the options of generation, on which all front ends and backends are tested."""

import math

BAD_VALUES = {
    "max_new_tokens": [0, -1, 1.5, True, "5"],
    "temperature": [-1, math.nan, math.inf, 10**400, True, "1"],
    "top_k": [-2, 2.5],
    "top_p": [1.1, -1],
    "min_p": [-0.1, 2, "0.1"],
    "top_n_sigma": [-1, "1"],
    "xtc_probability": [-0.1, 1.5, "0.5"],
    "xtc_threshold": [-0.1, 2, True],
    "repetition_penalty": [0, -1],
    "presence_penalty": [math.inf, "a"],
    "frequency_penalty": [math.nan],
    "logit_bias": [{-1: 1.0}, {3: math.nan}, {3: math.inf}, {3: "x"}, [3], {10**8: 1.0}],
    "processors": [len, [None]],
    "seed": [-1, 1 << 64, 1.5, "1"],
    "stop": [[""], "", 3, b"a", [5]],
    "stop_ids": [3, "3", [True], [-1], [10**8]],
    "include_stop": [1, "yes"],
    "min_new_tokens": [-1, 1.5, True],
    "ignore_eos": [1, "yes"],
    "skip_special_tokens": [1, "yes"],
    "context_end": ["wrap"],
    "timeout": [-1, math.inf],
    "top_logprobs": [-1, True],
    "prompt_logprobs": [-1],
    "n": [0, -1, 1.0],
    "num_beams": [0, 1.5],
    "length_penalty": [math.nan, 51, -51],
    "early_stopping": ["soon"],
    "regex": ["[", 5],
    "json_schema": ["{", '{"type": 5}', "[1]"],
    "grammar": ["nonsense ::="],
}
"""Rejected values by field of GenerationConfig."""
SAMPLING = [
    {"temperature": 0.8},
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_n_sigma": 1.0},
    {"xtc_probability": 0.7, "xtc_threshold": 0.02},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.2},
]
"""Values with which each sampling option changes a text, alone and after the others."""
BAD_PAIRS = [
    {"num_beams": 2, "temperature": 0.7},
    {"num_beams": 2, "top_p": 0.9},
    {"num_beams": 2, "xtc_probability": 0.5},
    {"num_beams": 2, "stop": "x"},
    {"num_beams": 2, "context_end": "slide"},
    {"num_beams": 2, "top_logprobs": 2},
    {"num_beams": 2, "n": 2},
    {"n": 2, "temperature": 0},
    {"regex": "a", "grammar": 'start: "a"'},
    {"regex": "a", "ignore_eos": True},
    {"grammar": 'start: "a"', "min_new_tokens": 2},
    {"n": 2, "top_p": 0},
    {"num_beams": 2, "ignore_eos": True},
    {"min_new_tokens": 9, "max_new_tokens": 8},
]
"""Options that exclude each other."""
