"""llama.cpp, CTranslate2, onnxruntime and transformers as `ways.py` wants them."""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from cpu_class import MISSING
from formats import Files
from ways import Prompts, Room, Way, ours, stepping


def llama(files: Files, room: Room, precision: str, flash: bool = False) -> Way:
    """llama.cpp by its C calls: `llama_decode`, scores of each last token, the largest taken."""
    import llama_cpp as c

    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)
    asked = c.llama_context_default_params()
    asked.n_ctx = room.slots * (room.capacity + -room.capacity % 256)  # of each: 256s
    asked.n_seq_max = room.slots
    asked.n_batch = asked.n_ctx
    asked.n_threads = asked.n_threads_batch = room.threads
    asked.flash_attn_type = (
        c.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else c.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    path = str(files.gguf(precision)).encode()
    model = c.llama_model_load_from_file(path, c.llama_model_default_params())
    context = c.llama_init_from_model(model, asked)
    n_vocab = (c.llama_vocab_n_tokens(c.llama_model_get_vocab(model)),)
    batch = c.llama_batch_init(asked.n_batch, 0, 1)
    filled = [0] * room.slots

    def read_on(prompts: Prompts) -> list[int]:
        batch.n_tokens, last = 0, []
        for slot, ids in enumerate(prompts):
            for id in ids:
                at = batch.n_tokens
                batch.token[at], batch.pos[at], batch.logits[at] = id, filled[slot], 0
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, slot
                batch.n_tokens, filled[slot] = at + 1, filled[slot] + 1
            batch.logits[at] = 1
            last.append(at)
        if c.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        rows = (c.llama_get_logits_ith(context, at) for at in last)
        return [int(np.ctypeslib.as_array(row, shape=n_vocab).argmax()) for row in rows]

    def read(prompts: Prompts) -> list[int]:
        c.llama_memory_clear(c.llama_get_memory(context), False)
        filled[:] = [0] * room.slots
        return read_on(prompts)

    weakref.finalize(read_on, c.llama_model_free, model)
    weakref.finalize(read_on, c.llama_free, context)  # the last is called first
    return stepping(read, lambda ids: read_on([[id] for id in ids]))


def ctranslate2(files: Files, room: Room, precision: str) -> Way:
    """`Generator.generate_batch`; each step's end is seen by its callback."""
    import ctranslate2

    path = files.ctranslate2(precision)
    generator = ctranslate2.Generator(
        str(path), compute_type=precision, inter_threads=1, intra_threads=room.threads
    )
    tokens = json.loads((path / "vocabulary.json").read_text())

    def way(prompts: Prompts, n: int) -> tuple[float, float]:
        texts = [[tokens[id] for id in ids] for ids in prompts]
        stamps: list[float] = []
        began = time.perf_counter()
        generator.generate_batch(
            texts, max_length=n + 1, min_length=n + 1, include_prompt_in_result=False,
            callback=lambda _: stamps.append(time.perf_counter()),
        )  # fmt: skip
        assert len(stamps) == len(texts) * (n + 1)
        return stamps[len(texts) - 1] - began, stamps[-1] - stamps[len(texts) - 1]

    return way


def onnxruntime(files: Files, room: Room) -> Way:
    """Our graph; keys and values stay in onnxruntime's own memory from step to step."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = room.threads
    graph = ort.InferenceSession(files.onnx, options, providers=["CPUExecutionProvider"])
    outputs = [output.name for output in graph.get_outputs()]
    past = [value for value in graph.get_inputs() if value.name.startswith("past_key_values")]
    value_of = ort.OrtValue.ortvalue_from_numpy
    cache: list[Any] = []
    filled = 0

    def read_on(prompts: Prompts) -> list[int]:
        nonlocal filled
        slots, new = len(prompts), len(prompts[0])
        positions = np.tile(np.arange(filled, filled + new), (slots, 1))
        given = {
            "input_ids": value_of(np.array(prompts, np.int64)),
            "position_ids": value_of(positions),
            "attention_mask": value_of(np.ones((slots, filled + new), np.int64)),
        } | {value.name: kept for value, kept in zip(past, cache, strict=True)}
        logits, *cache[:] = graph.run_with_ort_values(outputs, given)
        filled += new
        return [int(id) for id in logits.numpy()[:, -1].argmax(axis=1)]

    def read(prompts: Prompts) -> list[int]:
        nonlocal filled
        filled = 0
        heads, width = past[0].shape[1], past[0].shape[3]
        none = np.zeros((len(prompts), heads, 0, width), np.float32)
        cache[:] = [value_of(none) for _ in past]
        return read_on(prompts)

    return stepping(read, lambda ids: read_on([[id] for id in ids]))


def transformers(
    files: Files, room: Room, precision: str, compiled: bool = False, device: str = "cpu"
) -> Way:
    """`generate()`; each step's end is seen by its streamer."""
    import torch
    import transformers

    torch.set_num_threads(room.threads)
    transformers.utils.logging.disable_progress_bar()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model = transformers.AutoModelForCausalLM.from_pretrained(files.hf, dtype=dtype)
    model = model.to(device).eval()
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {"do_sample": False, "use_cache": True, "pad_token_id": 0}
    if compiled:
        how = transformers.generation.CompileConfig()
        if device == "cpu":
            how._compile_all_devices = True  # the one switch for CPUs
        else:
            how.mode = "reduce-overhead"  # CUDA graphs
        options |= {"cache_implementation": "static", "compile_config": how}

    def way(prompts: Prompts, n: int) -> tuple[float, float]:
        ids = torch.tensor(prompts, device=device)
        watch = Stopwatch()
        began = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=n + 1, streamer=watch,
            **options,
        )  # fmt: skip
        _, first, *_ = watch.stamps
        assert len(watch.stamps) == n + 2  # the prompt comes first
        return first - began, watch.stamps[-1] - first

    return way


class Stopwatch:
    """A streamer that only looks at the clock."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def put(self, _: Any) -> None:
        """Note the time."""
        self.stamps.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


WAYS: dict[str, tuple[Callable[..., Way], dict[str, Any]]] = {
    **{f"ours {p}": (ours, {"precision": p}) for p in ("fp32", "bf16", "int8", "int4")},
    **{
        f"llama.cpp {name}{' flash' * flash}": (llama, {"precision": p, "flash": flash})
        for name, p in {"F32": "fp32", "BF16": "bf16", "Q8_0": "q8_0", "Q4_0": "q4_0"}.items()
        for flash in (False, True)
    },
    **{f"ctranslate2 {p}": (ctranslate2, {"precision": p}) for p in ("float32", "int8")},
    "onnxruntime fp32": (onnxruntime, {}),
    **{
        f"transformers {p}{' compiled' * how}": (transformers, {"precision": p, "compiled": how})
        for p in ("fp32", "bf16")
        for how in (False, True)
    },
}


def open_way(name: str, files: Files, room: Room) -> Way:
    """Load the engine `name`; write its model first if it is missing."""
    make, options = WAYS[name]
    try:
        return make(files, room, **options)
    except ModuleNotFoundError:
        raise SystemExit(MISSING.format(name.split()[0])) from None
