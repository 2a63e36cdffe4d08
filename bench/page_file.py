"""Measure exported pages in Chromium: size, and time to open, to answer and to write.

    python bench/page_file.py [--sizes little small gpt2] [--rounds 3]

Random weights in the shapes of `tiedgpt train --size` and GPT-2, int8 by rows. Each file is opened
from the disk in a fresh page, without a network. "Answers" is when the tokens with their surprisal
stand on the page, counted from the navigation; "blocks" is the longest task of the page's main
thread from the navigation until the writing ended, 0 if none took 50 ms. It is measured in a second
Chromium without Playwright: while DevTools listen to a page's network, Chromium decodes the file a
second time for them, in one task (TextResourceDecoder::Decode in a trace: 245 ms for 15.6 MB).

The extra `page` and Chromium (CHROMIUM names it) are required.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.serve.export import export
from tiedgpt.train.plan.sizes import SIZES
from turns import cores, keep, processor, show

TEXT = "The matrix that reads a token is the matrix that predicts a token."
WRITTEN = 64
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
LONGEST = """() => new Promise((answer) => new PerformanceObserver((list) =>
    answer(Math.max(0, ...list.getEntriesByType("longtask").map((task) => task.duration))))
    .observe({ type: "longtask", buffered: true }) || setTimeout(() => answer(0), 500))"""
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
    """Open a file once; return the seconds to its answer, and its tokens a second."""
    with browser.new_context(offline=True) as context:
        page = context.new_page()
        page.set_default_timeout(600_000)
        page.goto(address, wait_until="commit")
        page.wait_for_selector("main .token")
        answers = page.evaluate("performance.now()") / 1000
        return {"answers": answers, "writes": page.evaluate(WRITE, WRITTEN)}


def measure_longest_task(playwright: Any, address: str) -> float:
    """Open a file in Chromium without DevTools; return its longest task in milliseconds."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless=new", "--no-sandbox", "--no-first-run", "--remote-debugging-port=0"]
        command = [CHROMIUM, *flags, f"--user-data-dir={profile}", address]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                url = wait_for_page(Path(profile) / "DevToolsActivePort")
                watched = playwright.chromium.connect_over_cdp(url)
                (page,) = (p for p in watched.contexts[0].pages if p.url == address)
                page.wait_for_selector("main .token", timeout=600_000)
                page.evaluate(WRITE, WRITTEN)
                return page.evaluate(LONGEST)
            finally:
                process.terminate()


def wait_for_page(port_file: Path) -> str:
    """Return the address of a Chromium's DevTools once a page is there, that is: was parsed."""
    for _ in range(6000):
        time.sleep(0.1)
        if port_file.exists() and port_file.read_text():
            url = f"http://127.0.0.1:{port_file.read_text().split()[0]}"
            with urllib.request.urlopen(f"{url}/json") as answer:
                if any(page["title"].endswith("tiedgpt") for page in json.load(answer)):
                    return url
    raise SystemExit("the page does not open")


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["little", "small", "gpt2"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_pretrained(os.environ["TIEDGPT_GPT2_BPE"])
    rows: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for size in args.sizes:
            model = model_of(size, tokenizer if size == "gpt2" else None)
            text: Any = TEXT if size == "gpt2" else list(range(30))
            known = tokenizer if size == "gpt2" else None
            path = Path(folder) / f"{size}.html"
            html = export(model, known, text, name=size, precision="int8", max_bytes=1 << 30)
            path.write_text(html, encoding="utf-8")
            del html, model
            address = f"file://{path}#view=text"
            found = [
                measure(browser, address) | {"blocks": measure_longest_task(playwright, address)}
                for _ in range(args.rounds)
            ]
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
