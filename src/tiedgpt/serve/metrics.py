"""/metrics for Prometheus: vLLM's names and units, with the prefix `tiedgpt:` in place of `vllm:`.

Gauges and token counts are the engine's own, read when a client asks; the engine's thread records
times as tokens come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiedgpt.infer import Engine, Token
from tiedgpt.infer.scheduler import RequestTimes

PREFIX = "tiedgpt:"
MODEL = "model_name"
"""The label by which vLLM's dashboards select a model."""
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
GAUGES = {
    "num_requests_running": ("running", "Texts that hold a slot."),
    "num_requests_waiting": ("waiting", "Texts that wait for a slot."),
    "kv_cache_usage_perc": ("cache_usage", "Share of the slots' positions in use, from 0 to 1."),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "generation_tokens": ("generated_tokens", "Tokens written."),
    "prefix_cache_queries": ("prompt_tokens", "Tokens of prompts looked for in slots."),
    "prefix_cache_hits": ("reused_tokens", "Tokens of prompts that a slot still held."),
    "engine_seconds": ("seconds", "Seconds of computing."),
}
TIMES = {
    "time_to_first_token": ("Until the first token of a text was sent.", SECONDS),
    "inter_token_latency": ("Between two tokens of a text.", BETWEEN),
    "e2e_request_latency": ("Until the end of a text.", SECONDS),
    "request_queue_time": ("Until a text had a slot.", SECONDS),
    "request_prefill_time": ("From the slot to the first token.", SECONDS),
    "request_decode_time": ("From the first token to the end.", SECONDS),
    "request_inference_time": ("From the slot to the end.", SECONDS),
    "request_time_per_output_token": ("Mean time of a token after the first.", BETWEEN),
}
"""Histograms of seconds."""
LENGTHS = {
    "request_prompt_tokens": "Tokens of a text's prompt.",
    "request_generation_tokens": "Tokens of a text.",
    "request_max_num_generation_tokens": "Tokens of a text; vLLM takes the longest of a request.",
}
"""Histograms of tokens."""
REASONS = {"cancelled": "abort", "context": "length"}


class _EngineStats(Collector):
    """The engine's numbers since the application was created: a warm-up before does not count."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name, self.before = engine, name, engine.stats()

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self.engine.stats()
        for name, (key, about) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, about, labels=[MODEL])
            gauge.add_metric([self.name], stats[key])
            yield gauge
        for name, (key, about) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, about, labels=[MODEL])
            counter.add_metric([self.name], stats[key] - self.before[key])
            yield counter


class Metrics:
    """The counters of one application, labelled with its model's name."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineStats(engine, name))

        def histogram(family: str, about: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(
                PREFIX + family, about, [MODEL], buckets=buckets, registry=self.registry
            ).labels(name)

        steps = [n * 10**power for power in range(9) for n in (1, 2, 5)]
        lengths = [n for n in steps if n < engine.runner.config.n_positions]
        self.histograms = {
            family: histogram(f"{family}_seconds", about, buckets)
            for family, (about, buckets) in TIMES.items()
        } | {family: histogram(family, about, lengths) for family, about in LENGTHS.items()}
        self.name = name
        self.ended = Counter(
            f"{PREFIX}request_success",
            "Texts that ended.",
            [MODEL, "finished_reason"],
            registry=self.registry,
        )
        self.responses = Counter(
            f"{PREFIX}http_responses", "By status.", ["status"], registry=self.registry
        )

    def text(self) -> bytes:
        """Return all in Prometheus's text format."""
        return generate_latest(self.registry)

    def observe(self, **values: float) -> None:
        """Record a value in each of the histograms named."""
        for family, value in values.items():
            self.histograms[family].observe(value)


class TextTimer:
    """Records the times of one text, and passes on each token, and None at the end.

    The engine's thread calls it.
    """

    def __init__(
        self, metrics: Metrics, n_prompt: int, on_token: Callable[[Token | None], None]
    ) -> None:
        self.metrics, self.n_prompt, self.on_token = metrics, n_prompt, on_token
        self.began = time.monotonic()
        self.last: float | None = None

    def token(self, token: Token) -> None:
        """Record a new token."""
        now = time.monotonic()
        if self.last is None:
            self.metrics.observe(time_to_first_token=now - self.began)
        else:
            self.metrics.observe(inter_token_latency=now - self.last)
        self.last = now
        self.on_token(token)

    def end(self, times: RequestTimes, future: Future[Any]) -> None:
        """Record that the text ended, or failed."""
        observe, reason = self.metrics.observe, "error"
        if future.exception() is None:
            reason, n_tokens = future.result().finish_reason, len(future.result().ids)
            ended = times.ended or time.monotonic()
            observe(
                request_prompt_tokens=self.n_prompt,
                request_generation_tokens=n_tokens,
                request_max_num_generation_tokens=n_tokens,
                request_queue_time=(times.started or ended) - times.created,
            )
            if times.started is not None:
                observe(request_inference_time=ended - times.started)
            if times.started is not None and times.first_token is not None:
                decode_seconds = ended - times.first_token
                observe(request_prefill_time=times.first_token - times.started)
                observe(request_decode_time=decode_seconds)
                if n_tokens > 1:
                    observe(request_time_per_output_token=decode_seconds / (n_tokens - 1))
        self.metrics.ended.labels(self.metrics.name, REASONS.get(reason, reason)).inc()
        observe(e2e_request_latency=time.monotonic() - self.began)
        self.on_token(None)
