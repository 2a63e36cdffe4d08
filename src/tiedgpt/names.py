"""Lazy imports of public names, and error messages for the names of other libraries.

A package names its exports once, as imports in its `__init__.pyi`, and imports them at first use by
`__getattr__, __dir__ = lazy_names(__name__)`.

`OTHER_NAMES` maps names of transformers, nanoGPT, peft, vLLM and llama.cpp to the names here; the
error for such a name ends with the name to use. The errors stay `AttributeError` and `TypeError`,
so `hasattr`, `copy` and `pickle` work as usual.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

Called = TypeVar("Called", bound=Callable[..., Any])

_FROM_PRETRAINED = "use GPT.from_pretrained(source) and Tokenizer.from_pretrained(source)"
_NO_DRAFTS = "generate without drafts: the packed engine is fast by itself"
_PEFT_SAVES = "use tiedgpt.tune.save_adapter(model, directory)"

OTHER_NAMES: dict[str, dict[str, str]] = {
    "tiedgpt": {
        "AutoModelForCausalLM": "use tiedgpt.GPT",
        "AutoTokenizer": "use tiedgpt.Tokenizer",
        "GPT2Config": "use tiedgpt.GPTConfig",
        "GPT2LMHeadModel": "use tiedgpt.GPT",
        "GPT2Model": "use tiedgpt.GPT and model.body(ids)",
        "GPT2Tokenizer": "use tiedgpt.Tokenizer",
        "LLM": "use tiedgpt.Engine",
        "SamplingParams": "use tiedgpt.infer.GenerationConfig",
        "Trainer": "use tiedgpt.train.train or tiedgpt.train.Trainer",
        "TrainingArguments": "use tiedgpt.train.TrainOptions",
        "from_pretrained": _FROM_PRETRAINED,
        "generate": "use tiedgpt.Engine(source).generate(prompt)",
        "load": _FROM_PRETRAINED,
        "pipeline": "use tiedgpt.Engine(source).generate(prompt)",
    },
    "tiedgpt.inspect": {
        "activation_patching": "use tiedgpt.inspect.patch",
        "attention_patterns": "use tiedgpt.inspect.attention",
        "head_ablation": "use tiedgpt.inspect.ablate",
        "logit_attribution": "use tiedgpt.inspect.dot",
        "logit_lens": "use tiedgpt.inspect.lens",
        "nearest_neighbors": "use tiedgpt.inspect.neighbours",
        "neighbors": "use tiedgpt.inspect.neighbours",
    },
    "tiedgpt.tie": {
        "check": "use tiedgpt.tie.audit(model)",
        "is_tied": 'use tiedgpt.tie.audit(model).verdict == "tied"',
        "resize_token_embeddings": "use tiedgpt.tie.resize_vocab(model, size)",
        "tie_weights": "use tiedgpt.tie.tie(model)",
        "untie_weights": "use tiedgpt.tie.untie(model)",
    },
    "GPT": {
        "blocks": "use model.h",
        "crop_block_size": "load the model and build another with a smaller n_positions",
        "embed": "use model.wte(ids)",
        "from_config": "use tiedgpt.GPT(config)",
        "generate": "use tiedgpt.Engine(model).generate(prompt)",
        "get_input_embeddings": "use model.wte",
        "get_num_params": "use model.config.parameter_count()",
        "get_output_embeddings": "use model.head or, where it is None, model.wte.unembed(h)",
        "hidden_states": "use model.states(ids)",
        "layers": "use model.h",
        "lm_head": "where W is tied, model.head is None and model.wte.unembed(h) predicts",
        "merge_and_unload": "use tiedgpt.tune.merge(model)",
        "num_parameters": "use model.config.parameter_count() or tiedgpt.tie.ledger(model)",
        "resize_token_embeddings": "use tiedgpt.tie.resize_vocab(model, size)",
        "save": "use model.save_pretrained(directory)",
        "save_adapter": _PEFT_SAVES,
        "tie_weights": "use tiedgpt.tie.tie(model); a model whose head is None is tied",
        "transformer": "use the model itself: model.wte, model.wpe, model.h, model.ln_f",
        "unembed": "use model.wte.unembed(h)",
    },
    "Tokenizer": {
        "add_special_tokens": "use tokenizer.with_special_tokens(tokens)",
        "add_tokens": "use tokenizer.with_special_tokens(tokens)",
        "apply_chat_template": "use tiedgpt.Engine(source).chat(messages), or the template of "
        "tiedgpt.data.read_template(source)",
        "batch_decode": "use [tokenizer.decode(ids) for ids in batch]",
        "convert_ids_to_tokens": "use tokenizer.token_bytes(id)",
        "convert_tokens_to_ids": "use tokenizer.encode(token, allow_special=True)",
        "encode_ordinary": "use tokenizer.encode(text)",
        "encode_plus": "use tokenizer.encode(text)",
        "eos_token": "use tokenizer.eos_token_id",
        "eot_token": "use tokenizer.eos_token_id",
        "get_vocab": "use tokenizer.token_bytes(id) for each id below tokenizer.vocab_size",
        "n_vocab": "use tokenizer.vocab_size",
        "pad_token": "use tiedgpt.heads.pad(ids), which needs no padding token",
        "pad_token_id": "use tiedgpt.heads.pad(ids), which needs no padding token",
        "vocab": "use tokenizer.token_bytes(id) for each id below tokenizer.vocab_size",
        "tokenize": "use tokenizer.encode(text), and tokenizer.token_bytes(id) for an id's text",
    },
    "GPTConfig": {
        "block_size": "n_positions", "context_length": "n_positions", "d_model": "n_embd",
        "dim": "n_embd", "dropout": "embd_pdrop, attn_pdrop and resid_pdrop", "d_ff": "n_inner",
        "hidden_act": "activation_function", "hidden_size": "n_embd",
        "intermediate_size": "n_inner", "layer_norm_eps": "layer_norm_epsilon",
        "max_position_embeddings": "n_positions", "max_seq_len": "n_positions",
        "n_ctx": "n_positions", "n_heads": "n_head", "n_layers": "n_layer",
        "n_vocab": "vocab_size", "num_attention_heads": "n_head", "num_heads": "n_head",
        "num_hidden_layers": "n_layer", "num_layers": "n_layer",
        "tie_weights": "tie_word_embeddings", "tied": "tie_word_embeddings",
    },
    "TrainOptions": {
        "learning_rate": "lr", "max_steps": "steps", "max_iters": "steps",
        "num_train_epochs": "epochs", "num_epochs": "epochs", "epoch": "epochs",
        "train_batch_size": "batch_size",
        "per_device_train_batch_size": "batch_size", "gradient_accumulation_steps": "micro_batch",
        "block_size": "context", "seq_length": "context", "max_length": "context",
        "warmup_steps": "warmup", "warmup_ratio": "warmup", "warmup_iters": "warmup",
        "max_grad_norm": "grad_clip", "eval_steps": "eval_every", "eval_interval": "eval_every",
        "optim": "optimizer", "precision": "dtype", "early_stopping_patience": "patience",
    },
    "GenerationConfig": {
        "max_length": "max_new_tokens", "max_tokens": "max_new_tokens", "do_sample": "temperature",
        "max_completion_tokens": "max_new_tokens", "max_output_tokens": "max_new_tokens",
        "max_num_seqs": "slots", "num_return_sequences": "n", "n_threads": "threads",
        "n_predict": "max_new_tokens", "min_tokens": "min_new_tokens",
        "stop_token_ids": "stop_ids", "include_stop_str_in_output": "include_stop",
        "repeat_penalty": "repetition_penalty", "n_probs": "top_logprobs",
        "eos_token_id": "stop_ids", "stop_strings": "stop", "until": "stop",
        "guided_regex": "regex", "guided_json": "json_schema", "guided_grammar": "grammar",
    },
    "lora": {
        "lora_alpha": "alpha", "r": "rank", "lora_rank": "rank", "target_modules": "targets",
        "modules": "targets",
    },
}  # fmt: skip
"""Maps a package, class or function to a table from another library's name to the answer."""
NOT_HERE = {
    **dict.fromkeys(("assistant_model", "draft_model", "prompt_lookup_num_tokens"), _NO_DRAFTS),
    **dict.fromkeys(("bad_words", "bad_words_ids"), "use logit_bias for single ids, or processors"),
    "best_of": "use n with a seed, and choose among the completions by their log-probabilities",
    "logprob_token_ids": "use `tiedgpt inspect positions`, or Engine.score",
    "typical_p": "use top_p or min_p",
}
"""Other libraries' options of generation that have no counterpart, with what to use instead."""


ALIASES = {"TuneOptions": "TrainOptions"}
"""Maps a class to the one whose table it shares."""


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__` for public names imported at first use.

    The names, which `__all__` lists too, are the imports in the package's stub of the form
    `from tiedgpt.core.model import GPT as GPT`, which make a name public for type checkers. A
    module may have the name of its public function: importing it does not hide the function.
    """

    @functools.cache
    def homes() -> dict[str, str]:
        """Return the module of each name."""
        import re  # here, because `import tiedgpt` alone needs neither module
        from pkgutil import get_data

        stub = (get_data(package, "__init__.pyi") or b"").decode()
        imports = re.findall(r"from (\S+) import\W+(\w+) as", stub)
        return {name: module for module, name in imports}

    def get(name: str) -> Any:
        if name == "__all__":
            return sorted(homes())
        if name not in homes():
            problem = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(problem + _hint(name, package))
        if homes()[name] == package:  # a package inside this one
            return import_module(f"{package}.{name}")
        return getattr(import_module(homes()[name]), name)

    class Package(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            is_module = isinstance(value, ModuleType)
            if not (is_module and homes().get(name, package) != package):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = Package
    return get, lambda: sorted(homes())


def _hint(name: str, *tables: str) -> str:
    """Return ": " and the name here of another library's attribute; "" for one in no table."""
    answers = (OTHER_NAMES[table][name] for table in tables if name in OTHER_NAMES.get(table, {}))
    return next((f": {answer}" for answer in answers), "")


class ExplainsNames:
    """A class whose error for a missing attribute ends with the name here, by `OTHER_NAMES`."""

    if not TYPE_CHECKING:  # type checkers report missing attributes themselves

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                names = [base.__name__ for base in type(self).__mro__]
                problem = f"{names[0]!r} object has no attribute {name!r}"
                raise AttributeError(problem + _hint(name, *names)) from None


def explains_arguments(called: Called) -> Called:
    """Return a function or dataclass whose `TypeError` for an argument names the one to use."""
    function: Any = called.__init__ if isinstance(called, type) else called  # type: ignore[misc]
    names = OTHER_NAMES[ALIASES.get(called.__name__, called.__name__)]

    @functools.wraps(function)
    def explained(*arguments: Any, **options: Any) -> Any:
        for name in options.keys() & names.keys():
            raise TypeError(f"{called.__name__}() has no argument {name!r}: use {names[name]}=")
        return function(*arguments, **options)

    if isinstance(called, type):
        called.__init__ = explained  # type: ignore[misc]
        return called
    return explained  # type: ignore[return-value]
