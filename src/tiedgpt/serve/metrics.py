"""/metrics for Prometheus: vLLM's names and units, with the prefix `tiedgpt:` in place of `vllm:`.

Gauges and token counts are the engine's own, read when a client asks; the engine's thread records
times as tokens come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiedgpt.infer import Engine, Token

PREFIX = "tiedgpt:"
FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
GAUGES = {
    "num_requests_running": ("running", "Texts that hold a slot."),
    "num_requests_waiting": ("waiting", "Texts that wait for a slot."),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "generation_tokens": ("generated_tokens", "Tokens written."),
    "prefix_cache_queries": ("prompt_tokens", "Tokens of prompts looked for in slots."),
    "prefix_cache_hits": ("reused_tokens", "Tokens of prompts that a slot still held."),
    "engine_seconds": ("seconds", "Seconds of computing."),
}
REASONS = {"cancelled": "abort", "context": "length"}


class _EngineStats(Collector):
    """The engine's numbers since the application was created: a warm-up before does not count."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.before = engine, engine.stats()

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self.engine.stats()
        for name, (key, about) in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, about, stats[key])
        for name, (key, about) in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, about, stats[key] - self.before[key])


class Metrics:
    """The counters of one application."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineStats(engine))

        def histogram(name: str, about: str, buckets: tuple[float, ...] = FIRST) -> Histogram:
            return Histogram(PREFIX + name, about, buckets=buckets, registry=self.registry)

        self.first = histogram("time_to_first_token_seconds", "Until the first token of a request.")
        self.between = histogram("inter_token_latency_seconds", "Between two tokens.", BETWEEN)
        self.whole = histogram("e2e_request_latency_seconds", "Until the end of a request's text.")
        self.ended = Counter(
            f"{PREFIX}request_success", "Texts that ended.", ["finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self.responses = Counter(
            f"{PREFIX}http_responses", "By status.", ["status"], registry=self.registry
        )

    def text(self) -> bytes:
        """Return all in Prometheus's text format."""
        return generate_latest(self.registry)


class TextTimer:
    """Records the times of one text, and passes on each token, and None at the end.

    The engine's thread calls it.
    """

    def __init__(self, metrics: Metrics, on_token: Callable[[Token | None], None]) -> None:
        self.metrics, self.on_token = metrics, on_token
        self.began = time.monotonic()
        self.last: float | None = None

    def token(self, token: Token) -> None:
        """Record a new token."""
        now = time.monotonic()
        if self.last is None:
            self.metrics.first.observe(now - self.began)
        else:
            self.metrics.between.observe(now - self.last)
        self.last = now
        self.on_token(token)

    def end(self, future: Future[Any]) -> None:
        """Record that the text ended, or failed."""
        reason = "error" if future.exception() else future.result().finish_reason
        self.metrics.ended.labels(REASONS.get(reason, reason)).inc()
        self.metrics.whole.observe(time.monotonic() - self.began)
        self.on_token(None)
