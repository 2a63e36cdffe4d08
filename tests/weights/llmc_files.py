"""llm.c's checkpoints in this test's own words, from what its train_gpt2.cu writes.

256 int32: magic, version, T, V, L, H, C, Vp; then sixteen arrays, the padded rows of wte among
them. Nothing of tiedgpt is used.
"""

from pathlib import Path

import numpy as np
import torch

HEADER = "<256i"
ORDER = (
    ("wte", "Vp,C", "wte.weight"), ("wpe", "T,C", "wpe.weight"),
    ("ln1w", "L,C", "ln_1.weight"), ("ln1b", "L,C", "ln_1.bias"),
    ("qkvw", "L,3C,C", "attn.c_attn.weight"), ("qkvb", "L,3C", "attn.c_attn.bias"),
    ("attprojw", "L,C,C", "attn.c_proj.weight"), ("attprojb", "L,C", "attn.c_proj.bias"),
    ("ln2w", "L,C", "ln_2.weight"), ("ln2b", "L,C", "ln_2.bias"),
    ("fcw", "L,4C,C", "mlp.c_fc.weight"), ("fcb", "L,4C", "mlp.c_fc.bias"),
    ("fcprojw", "L,C,4C", "mlp.c_proj.weight"), ("fcprojb", "L,C", "mlp.c_proj.bias"),
    ("lnfw", "C", "ln_f.weight"), ("lnfb", "C", "ln_f.bias"),
)  # fmt: skip
"""llm.c's name, shape, and OpenAI's name."""


def shape_of(units: str, sizes: dict[str, int]) -> tuple[int, ...]:
    sizes_of = sizes | {f"{n}C": n * sizes["C"] for n in (3, 4)}
    return tuple(sizes_of[unit] for unit in units.split(","))


def write_checkpoint(
    path: Path, version: int, state: dict[str, torch.Tensor] | None = None, **sizes: int
) -> dict[str, np.ndarray]:
    """Write a checkpoint; return its numbers as float32 by OpenAI's names, in the file's order.

    `state` gives some tensors as (out, in); what it lacks is random, the padding too.
    """
    random = np.random.default_rng(3)
    numbers: dict[str, np.ndarray] = {}
    for _, units, ours in ORDER:
        per_layer = units.startswith("L,")
        shape = shape_of(units.removeprefix("L,"), sizes)
        names = [f"h.{i}.{ours}" for i in range(sizes["L"])] if per_layer else [ours]
        for name in names:
            array = random.standard_normal(shape).astype(np.float32)
            if state is not None:
                values = state[name].detach().float().numpy()
                array[: len(values)] = values
            numbers[name] = to_bfloat16(array)[1] if version == 5 else array
    padded = 0 if version == 1 else sizes["Vp"]
    header = np.zeros(256, "<i4")
    header[:8] = [20240326, version, *(sizes[k] for k in ("T", "V", "L", "H", "C")), padded]
    with path.open("wb") as file:
        file.write(header.tobytes())
        for array in numbers.values():
            file.write((to_bfloat16(array)[0] if version == 5 else array).tobytes())
    return numbers


def to_bfloat16(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 rounded to bfloat16 (nearest, even): its bits and its values."""
    bits = np.ascontiguousarray(array).view("<u4").astype(np.uint64)
    upper = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return upper, (upper.astype("<u4") << 16).view("<f4")
