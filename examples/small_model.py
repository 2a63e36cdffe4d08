"""The small GPT that the examples use, trained in seconds on a made-up diary.

    python examples/small_model.py [DIRECTORY]

The other examples call `small_model()`.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from tiedgpt.cli.main import main

CITIES = {"Oslo": "rain", "Cairo": "sun", "Quito": "fog", "Perth": "wind"}
DID = {
    "rain": "stayed at home",
    "sun": "went to the park",
    "fog": "read a book",
    "wind": "flew a kite",
}
PEOPLE = ("Anna", "Ben", "Chiyo", "Dara")


def diary(n: int, seed: int = 0) -> str:
    """Return n entries. The city mostly decides the weather; the weather decides the rest."""
    draw = random.Random(seed)
    entries = []
    for _ in range(n):
        city = draw.choice(list(CITIES))
        weather = CITIES[city] if draw.random() < 0.8 else draw.choice(list(DID))
        who = draw.choice(PEOPLE)
        year, month, day = draw.randrange(2000, 2030), draw.randrange(1, 13), draw.randrange(1, 29)
        date, degrees = f"{year}-{month:02}-{day:02}", draw.randrange(30)
        entries.append(f"{date} {city}: {weather}, {degrees} degrees. {who} {DID[weather]}.")
    return "\n".join(entries) + "\n"


def small_model(run: str | Path = "runs/diary-1", steps: int = 300) -> str:
    """Train the model, unless it exists; return the run's directory."""
    run = Path(run)
    if not (run / "model" / "config.json").exists():
        text = Path("diary.txt")
        text.write_text(diary(3000))
        options = f"--size nano --steps {steps} --context 64 --vocab-size 400 --out"
        if code := main(["train", str(text), *options.split(), str(run)]):
            raise SystemExit(code)
    return str(run)


if __name__ == "__main__":
    if "--help" in sys.argv:
        sys.exit(print(__doc__))
    print(small_model(*sys.argv[1:2]))
