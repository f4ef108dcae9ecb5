"""`/metrics`, computed from the desk's status when it is asked for. Nothing is counted here, so nothing can disagree."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from appliance.desk.desk import Desk
from appliance.desk.lane_state import TAKES_REQUESTS
from appliance.desk.status import DeskStatus, LaneStatus
from appliance.web.pair_metrics import pair_metrics
from appliance.web.vllm_metrics import vllm_metrics

_LANE = ["lane", "card"]
_LaneMetric: TypeAlias = tuple[str, str, Callable[[LaneStatus], float]]


class DeskCollector(Collector):
    """Turns one snapshot into metrics. Thread-safe."""

    def __init__(self, desk: Desk, model_name: str) -> None:
        self._desk = desk
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        yield from metrics_of(self._desk.status(), self._model_name)


def metrics_of(status: DeskStatus, model_name: str) -> Iterable[Metric]:
    """All that `/metrics` says."""
    yield from _desk_metrics(status)
    for name, text, read in _LANE_GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=_LANE)
        for lane in status.lanes:
            gauge.add_metric([lane.name, lane.card], read(lane))
        yield gauge
    for name, text, read in _LANE_COUNTERS:
        counter = CounterMetricFamily(name, text, labels=_LANE)
        for lane in status.lanes:
            counter.add_metric([lane.name, lane.card], read(lane))
        yield counter
    yield _rows_by_tier(status)
    yield from _parked(status)
    if status.pair is not None:
        yield from pair_metrics(status.pair)
    yield from vllm_metrics(status, model_name)


def registry_for(desk: Desk, model_name: str) -> CollectorRegistry:
    """A registry of its own, so that nothing else in the process can add to ours."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(DeskCollector(desk, model_name))
    return registry


_LANE_GAUGES: tuple[_LaneMetric, ...] = (
    ("tandem_lane_up", "1 while the lane takes requests or works on one.", lambda lane: float(lane.state in TAKES_REQUESTS)),
    ("tandem_lane_busy", "1 while the lane works on a request.", lambda lane: float(lane.request is not None)),
    ("tandem_context_used_tokens", "Tokens of the conversation that the lane holds.", lambda lane: float(lane.context_used)),
    ("tandem_slots", "Expert slots of the lane's card.", lambda lane: float(lane.stats.slots if lane.stats else 0)),
    ("tandem_peer_experts", "Experts in slots of the peer card.", lambda lane: float(lane.stats.peer_experts if lane.stats else 0)),
    ("tandem_resident_experts", "Experts in the lane's slots.", lambda lane: float(lane.stats.resident_experts if lane.stats else 0)),
)
_LANE_COUNTERS: tuple[_LaneMetric, ...] = (
    ("tandem_lane_restarts", "Times that the lane's engine was started again.", lambda lane: float(lane.restarts)),
    ("tandem_swaps", "Cached experts replaced while serving.", lambda lane: lane.totals.swaps),
    ("tandem_windows", "Decode windows and prompt chunks run.", lambda lane: lane.totals.windows),
    ("tandem_served_rows", "Routed expert rows computed for the other engine.", lambda lane: lane.totals.served_rows),
    ("tandem_late_experts", "Of those, experts that had left their slot when they were asked for.", lambda lane: lane.totals.late_experts),
    ("tandem_link_losses", "Windows run again because the other engine did not answer.", lambda lane: lane.totals.link_losses),
    ("tandem_conversations_parked", "Conversations that the lane put into the store.", lambda lane: lane.totals.parked_conversations),
    ("tandem_conversations_resumed", "Prompts that the lane went on with from the store.", lambda lane: lane.totals.resumed_conversations),
)
"""Of all engines that the lane has had: `LaneTotals`."""


def _desk_metrics(status: DeskStatus) -> Iterable[Metric]:
    counters = status.counters
    yield GaugeMetricFamily("tandem_ready", "1 while /readyz says so.", float(status.unready_reason is None))
    yield GaugeMetricFamily("tandem_queue_length", "Requests that wait for a lane.", status.queue_length)
    yield GaugeMetricFamily(
        "tandem_lanes_up", "Lanes that take requests or work on one.", sum(lane.state in TAKES_REQUESTS for lane in status.lanes)
    )
    requests = CounterMetricFamily("tandem_requests", "Requests by how they ended; rejected ones were never accepted.", labels=["outcome"])
    for outcome in ("finished", "cancelled", "failed", "rejected"):
        requests.add_metric([outcome], getattr(counters, outcome))
    yield requests
    yield CounterMetricFamily("tandem_requests_accepted", "Requests taken into the line.", counters.accepted)
    yield CounterMetricFamily("tandem_prompt_tokens", "Prompt tokens of the requests that a lane took.", counters.prompt_tokens)
    yield CounterMetricFamily("tandem_cached_tokens", "Prompt tokens whose state was reused.", counters.cached_tokens)
    yield CounterMetricFamily("tandem_generated_tokens", "Tokens generated.", counters.generated_tokens)
    if status.load is not None:
        yield GaugeMetricFamily("tandem_load_done_bytes", "Of the stage that start-up is in.", status.load.done_bytes)
        yield GaugeMetricFamily("tandem_load_total_bytes", "Of the stage that start-up is in.", status.load.total_bytes)


def _rows_by_tier(status: DeskStatus) -> Metric:
    rows = CounterMetricFamily("tandem_expert_rows", "Routed expert rows by the tier that computed them.", labels=[*_LANE, "tier"])
    for lane in status.lanes:
        for tier, count in lane.totals.rows_by_tier.items():
            rows.add_metric([lane.name, lane.card, tier], count)
    return rows


def _parked(status: DeskStatus) -> Iterable[Metric]:
    """Of the store that the lanes share, as the one that reported last has seen it."""
    reports = [(lane.stats_at or 0.0, lane.stats) for lane in status.lanes if lane.stats is not None]
    stats = max(reports, key=lambda report: report[0])[1] if reports else None
    yield GaugeMetricFamily("tandem_parked_conversations", "Conversations in the store.", stats.stored_conversations if stats else 0)
    yield GaugeMetricFamily("tandem_parked_bytes", "What they take of shared memory.", stats.stored_bytes if stats else 0)
