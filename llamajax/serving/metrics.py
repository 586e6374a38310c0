"""Measurements of a server, in Prometheus' text format."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from llamajax.serving.models import Served

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class Metrics:
    """Counters and histograms of requests, and what the engines count."""

    def __init__(self, models: Mapping[str, Served]) -> None:
        """Creates the metrics, all zero."""
        self._models, self._registry = models, CollectorRegistry()
        self.requests = Counter("llamajax_requests", "Answered requests.", ("path", "status"), registry=self._registry)
        self.refused = Counter("llamajax_queue_full", "Requests refused because the queue is full.", registry=self._registry)
        timed = {"buckets": _SECONDS, "registry": self._registry}
        self.first_token_s = Histogram("llamajax_first_token_seconds", "From a request to its first token.", **timed)
        self.request_s = Histogram("llamajax_request_seconds", "From a request to its last token.", **timed)
        self._registry.register(_OfEngines(models))

    def text(self) -> bytes:
        """Returns all metrics."""
        return generate_latest(self._registry)


class _OfEngines:
    """Reads the engines' own totals whenever the metrics are read."""

    def __init__(self, models: Mapping[str, Served]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        counters = {
            "prompt_tokens": "Tokens of prompts.",
            "shared_tokens": "Tokens of prompts that were not read again, because an earlier request had them.",
            "new_tokens": "Generated tokens.",
            "steps": "Steps of the engine.",
        }
        for name, about in counters.items():
            family = CounterMetricFamily(f"llamajax_{name}", about, labels=("model",))
            for served in self._models.values():
                family.add_metric((served.name,), getattr(served.engine.totals, name))
            yield family
        gauges = {
            "slots": ("Slots for sequences.", lambda served: len(served.engine.slots)),
            "running": ("Sequences in a slot.", lambda served: served.engine.num_running),
            "waiting": ("Sequences that wait for a slot.", lambda served: len(served.engine.waiting)),
        }
        for name, (about, value) in gauges.items():
            family = GaugeMetricFamily(f"llamajax_{name}", about, labels=("model",))
            for served in self._models.values():
                family.add_metric((served.name,), value(served))
            yield family
