"""The numbers that schedulers of inference look for, under the names that vLLM made common.

The endpoint picker of the Gateway API Inference Extension, llm-d, KServe and KEDA's examples read these, so they route to and scale
this server without being told anything. Each is also in `/metrics` under a name of our own, or follows from ones that are.
Names as of vLLM's documentation of production metrics, engine version 1.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from appliance.desk.status import DeskStatus

_MODEL = ["model_name"]


def vllm_metrics(status: DeskStatus, model_name: str) -> Iterable[Metric]:
    """From the same snapshot as all others."""
    counters = status.counters
    used = _context_used_ratio(status)
    gauges = (
        ("vllm:num_requests_running", "Requests that a lane works on.", float(sum(lane.request is not None for lane in status.lanes))),
        ("vllm:num_requests_waiting", "Requests that wait for a lane.", float(status.queue_length)),
        ("vllm:kv_cache_usage_perc", "Used part of the lanes' contexts, 0 to 1.", used),
        ("vllm:gpu_cache_usage_perc", "The same under its older name.", used),
    )
    for name, text, value in gauges:
        gauge = GaugeMetricFamily(name, text, labels=_MODEL)
        gauge.add_metric([model_name], value)
        yield gauge
    totals = (
        ("vllm:prompt_tokens", "Prompt tokens of the requests that a lane took.", counters.prompt_tokens),
        ("vllm:generation_tokens", "Tokens generated.", counters.generated_tokens),
        ("vllm:request_success", "Requests that were answered to their end.", counters.finished),
        ("vllm:prefix_cache_queries", "Prompt tokens that could have been there already.", counters.prompt_tokens),
        ("vllm:prefix_cache_hits", "Prompt tokens whose state was reused.", counters.cached_tokens),
    )
    for name, text, total in totals:
        counter = CounterMetricFamily(name, text, labels=_MODEL)
        counter.add_metric([model_name], total)
        yield counter


def _context_used_ratio(status: DeskStatus) -> float:
    """Of all lanes together. A conversation that is kept after its answer counts: its place is given up to the next one that wants it."""
    contexts = sum(lane.context or 0 for lane in status.lanes)
    return min(1.0, sum(lane.context_used for lane in status.lanes) / contexts) if contexts else 0.0
