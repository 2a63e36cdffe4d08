"""A model in one HTML file: its size, and how fast it opens, answers and writes in Chromium.

    python bench/page_file.py [--sizes little small gpt2] [--rounds 3]

Random weights in the shapes of `tiedgpt train --size` and GPT-2, int8 by rows. Each file is opened
from the disk in a fresh page, without a network. "Answers" is when the tokens with their surprisal
stand on the page, counted from the navigation; "blocks" is the longest task of the page's own
thread from when the file was parsed until the writing ended, 0 where none took 50 ms. This needs
the extra `page`, and Chromium (CHROMIUM names it).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.serve.export import export
from tiedgpt.train.options import SIZES
from turns import cores, keep, processor, show

TEXT = "The matrix that reads a token is the matrix that predicts a token."
WRITTEN = 64
WATCH = """window.longest = 0;
new PerformanceObserver((list) => list.getEntries().forEach((task) => {
    const parsed = performance.getEntriesByType("navigation")[0].domInteractive || Infinity;
    if (task.startTime >= parsed) window.longest = Math.max(window.longest, task.duration);
})).observe({ type: "longtask" });"""
WRITE = """async (most) => {
    const { stream } = await import("page/api.js");
    let [n, since] = [0, 0];
    const body = { prompt: [464, 318], max_tokens: most, temperature: 0, logprobs: 0 };
    for await (const _ of stream("/v1/completions", body)) {
        since ||= performance.now();
        n += 1;
    }
    return 1000 * (n - 2) / (performance.now() - since); }"""


def model_of(size: str, tokenizer: Tokenizer | None) -> GPT:
    """Return a model with random weights; the tokenizer decides its vocabulary, if there is one."""
    if size not in SIZES:
        raise SystemExit(f"no size {size}: {', '.join(SIZES)}")
    shape = SIZES[size]
    names = ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")
    numbers = {name: getattr(shape, name) for name in names}
    if tokenizer is not None:
        numbers["vocab_size"] = len(tokenizer)
    return GPT(GPTConfig(**numbers)).eval()


def measure(browser: Any, address: str) -> dict[str, float]:
    """Open a file once; return the seconds to its answer, its tokens a second, its longest task."""
    with browser.new_context(offline=True) as context:
        page = context.new_page()
        page.set_default_timeout(600_000)
        page.add_init_script(WATCH)
        page.goto(address, wait_until="commit")
        page.wait_for_selector("main .token")
        answers = page.evaluate("performance.now()") / 1000
        writes = page.evaluate(WRITE, WRITTEN)
        return {"answers": answers, "writes": writes, "blocks": page.evaluate("longest")}


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["little", "small", "gpt2"])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    tokenizer = Tokenizer.from_pretrained(os.environ["TIEDGPT_GPT2_BPE"])
    rows: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=["--no-sandbox"]
        )
        for size in given.sizes:
            model = model_of(size, tokenizer if size == "gpt2" else None)
            text: Any = TEXT if size == "gpt2" else list(range(30))
            known = tokenizer if size == "gpt2" else None
            path = Path(folder) / f"{size}.html"
            html = export(model, known, text, name=size, precision="int8", max_bytes=1 << 30)
            path.write_text(html, encoding="utf-8")
            del html, model
            found = [measure(browser, f"file://{path}#view=text") for _ in range(given.rounds)]
            best = {name: statistics.median(one[name] for one in found) for name in found[0]}
            rows[size] = [
                round(path.stat().st_size / 1e6, 2),
                *(round(x, 2) for x in best.values()),
            ]
            path.unlink()
        browser.close()
    heads = ["MB", "answers, s", "tokens/s", "blocks, ms"]
    show("A model in one HTML file", rows, heads)
    machine = {"date": time.strftime("%Y-%m-%d"), "machine": processor(), "threads": cores()}
    found_rows = {size: dict(zip(heads, row, strict=True)) for size, row in rows.items()}
    keep("page_file", machine | found_rows, quick=False)


if __name__ == "__main__":
    main()
