"""Greedy generation by us and by the peers, each over its fastest plain way, behind one call.

    way = peers.open_way("llama.cpp Q8_0 flash", files, Room(slots=1, capacity=1024, threads=2))
    reading, decoding = way([prompt], n)     seconds until every prompt's first token is chosen, and
                                             seconds for n more tokens of each

Prompts are lists of ids, as many as there are slots, all of one length. No way stops at an end of
text. Whatever a way needs is imported when it is opened, so that its memory is its own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

from formats import Files
from tiedgpt.infer.session import Session

Prompts = list[list[int]]
Way = Callable[[Prompts, int], tuple[float, float]]


CLASSES: dict[str, tuple[str, tuple[str, ...]]] = {
    "fp32": (
        "fp32",
        ("llama.cpp F32", "llama.cpp F32 flash", "ctranslate2 float32", "onnxruntime fp32",
         "transformers fp32"),
    ),
    "bf16": ("bf16", ("llama.cpp BF16", "llama.cpp BF16 flash", "transformers bf16")),
    "int8": ("int8", ("llama.cpp Q8_0", "llama.cpp Q8_0 flash", "ctranslate2 int8")),
    "4-bit": ("int4", ("llama.cpp Q4_0", "llama.cpp Q4_0 flash")),
}  # fmt: skip
"""Our precision, and the peers compared with it."""


@dataclass(frozen=True)
class Room:
    """The number of sequences and positions, and the number of threads."""

    slots: int
    capacity: int
    """Positions of a slot."""
    threads: int


def stepping(read: Callable[[Prompts], list[int]], step: Callable[[list[int]], list[int]]) -> Way:
    """Make a way of two functions: prompts -> next ids, and last ids -> next ids."""

    def way(prompts: Prompts, n: int) -> tuple[float, float]:
        began = time.perf_counter()
        ids = read(prompts)
        first = time.perf_counter()
        for _ in range(n):
            ids = step(ids)
        return first - began, time.perf_counter() - first

    return way


def ours(files: Files, room: Room, precision: str) -> Way:
    from tiedgpt.infer.packed_session import PackedRunner
    from tiedgpt.weights.formats.packed import open_packed

    runner = PackedRunner(open_packed(files.packed(precision)), threads=room.threads)
    return in_session(runner.session(n_slots=room.slots, capacity=room.capacity))


def in_session(session: Session) -> Way:
    """Make a way of all slots of a session."""
    slots = range(session.n_slots)

    def step(ids: list[int]) -> list[int]:
        return [int(logits[0].argmax()) for logits in session.read(slots, [[id] for id in ids])]

    def read(prompts: Prompts) -> list[int]:
        for slot in slots:
            session.truncate(slot, 0)
        return [int(logits[0].argmax()) for logits in session.read(slots, prompts)]

    return stepping(read, step)


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the engines."""
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--peers", nargs="+", help="only these, such as llama.cpp")
    parser.add_argument("--compile", action="store_true", help="transformers compiled, too: g++")


def names_of(kind: str, args: argparse.Namespace) -> list[str]:
    """Return the names of a class's ways, ours first."""
    precision, peers = CLASSES[kind]
    names = chosen(peers, args.peers)
    if args.compile:
        names += [f"{peer} compiled" for peer in names if peer.startswith("transformers")]
    return [f"ours {precision}", *names]


def chosen(peers: tuple[str, ...], engines: list[str] | None) -> list[str]:
    """Return the peers of these engines, or all."""
    return [peer for peer in peers if not engines or peer.split()[0] in engines]
