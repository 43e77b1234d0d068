"""Prometheus metrics: the engine's counters as they stand, and what requests saw of time."""

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from oasis_tp.request import FinishReason
from oasis_tp.server.bridge import EngineBridge

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
NEXT_TOKEN_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
REQUEST_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)


class EngineCollector:
    """Reads the engine's counters when Prometheus asks."""

    def __init__(self, bridge: EngineBridge) -> None:
        self._bridge = bridge

    def collect(self) -> Iterable[Metric]:
        stats = self._bridge.stats()
        gauges = {
            "num_requests_running": ("Requests that hold a row.", stats.num_running),
            "num_requests_waiting": ("Requests that wait for room.", stats.num_waiting),
            "kv_cache_usage_perc": (
                "Share of the device KV pages in use (1 is all).",
                stats.kv_pages_used / max(stats.kv_pages_total, 1),
            ),
            "host_kv_usage_perc": (
                "Share of the host KV blocks in use (1 is all).",
                stats.host_blocks_used / max(stats.host_blocks_total, 1),
            ),
        }
        counters = {
            "prompt_tokens": ("Prompt tokens computed.", stats.prompt_tokens),
            "generation_tokens": ("Tokens generated.", stats.generation_tokens),
            "spec_decode_num_drafts": ("Runs of tokens drafted.", stats.drafts),
            "spec_decode_num_draft_tokens": ("Drafted tokens verified.", stats.draft_tokens),
            "spec_decode_num_accepted_tokens": ("Drafted tokens that were right.", stats.accepted_tokens),
            "hot_block_hits": ("Selected blocks found on the device.", stats.selected_blocks - stats.missed_blocks),
            "hot_block_misses": ("Selected blocks fetched on the path.", stats.missed_blocks),
            "corrupted_requests": ("Requests whose numbers were not finite.", stats.corrupted_requests),
            "host_to_device_bytes": ("KV bytes read from the host tier, at rank 0.", stats.host_to_device_bytes),
            "device_to_host_bytes": ("KV bytes written to the host tier, at rank 0.", stats.device_to_host_bytes),
            "copy_stall_seconds": ("What rank 0 waited for background copies.", stats.exposed_wait_ns / 1e9),
            "engine_steps": ("Steps run.", stats.steps),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"oasis_tp:{name}", text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"oasis_tp:{name}", text, value=value)
        ahead = CounterMetricFamily("oasis_tp:prefetch_blocks", "Blocks brought in ahead.", labels=["outcome"])
        for outcome in ("used", "late", "wasted"):
            ahead.add_metric([outcome], getattr(stats, f"prefetch_{outcome}"))
        yield ahead


class Metrics:
    """One server's registry; nothing is global, so that several servers can live in one process."""

    def __init__(self, bridge: EngineBridge) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(bridge))
        self.first_token = self._histogram("time_to_first_token", "From arrival to the first token.", FIRST_TOKEN_S)
        self.next_token = self._histogram("inter_token_latency", "Between two tokens of one output.", NEXT_TOKEN_S)
        self.request = self._histogram("e2e_request_latency", "From arrival to the last token.", REQUEST_S)
        self.missed_mass = Histogram(
            "oasis_tp:missed_mass", "Estimated share of attention that an output left out.", buckets=SHARES,
            registry=self._registry,
        )  # fmt: skip
        self.success = Counter(
            "oasis_tp:request_success", "Outputs that ended.", ["finished_reason"], registry=self._registry
        )
        for reason in FinishReason:
            self.success.labels(reason.value)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets_s: tuple[float, ...]) -> Histogram:
        return Histogram(f"oasis_tp:{name}_seconds", text, buckets=buckets_s, registry=self._registry)


class OutputTimer:
    """Times one output as its tokens arrive."""

    def __init__(self, metrics: Metrics, arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival  # time.monotonic()
        self._last: float | None = None

    def token(self) -> None:
        now = time.monotonic()
        if self._last is None:
            self._metrics.first_token.observe(now - self._arrival)
        else:
            self._metrics.next_token.observe(now - self._last)
        self._last = now

    def finish(self, reason: FinishReason, missed_mass: float | None = None) -> None:
        if missed_mass is not None:
            self._metrics.missed_mass.observe(missed_mass)
        self._metrics.request.observe(time.monotonic() - self._arrival)
        self._metrics.success.labels(reason.value).inc()
