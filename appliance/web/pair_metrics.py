"""The pair in `/metrics`: when the helper wakes and sleeps, whose the second card is, and whether the two help each other."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from appliance.desk.status import PairPhase, PairStatus


def pair_metrics(pair: PairStatus) -> Iterable[Metric]:
    """From the same snapshot as all others."""
    phases = GaugeMetricFamily("tandem_pair_phase", "1 for the phase that the pair is in, 0 for the others.", labels=["phase"])
    for phase in PairPhase:
        phases.add_metric([phase], float(phase is pair.phase))
    yield phases
    yield GaugeMetricFamily("tandem_link_up", "1 while each engine computes the other's rows.", float(pair.link_up))
    barred_s = pair.barred_s(time.monotonic())
    yield GaugeMetricFamily("tandem_helper_barred_seconds", "For so long a failed wake still keeps the helper asleep.", barred_s)
    yield CounterMetricFamily("tandem_helper_wakes", "Times that the helper took its slots.", pair.wakes)
    yield CounterMetricFamily("tandem_helper_failed_wakes", "Wakes that were given up.", pair.failed_wakes)
    yield CounterMetricFamily("tandem_helper_sleeps", "Times that the helper gave its slots back.", pair.sleeps)
    yield CounterMetricFamily(
        "tandem_helper_wake_seconds", "From the decision until the helper took requests, all wakes together.", pair.wake_total_s
    )
    yield CounterMetricFamily("tandem_peer_attaches", "Times that the lead took the second card.", pair.attaches)
    yield CounterMetricFamily("tandem_peer_detaches", "Times that the lead gave the second card back.", pair.detaches)
    if pair.wake_s is not None:
        yield GaugeMetricFamily("tandem_helper_last_wake_seconds", "What the last wake took.", pair.wake_s)
    if pair.detach_s is not None:
        yield GaugeMetricFamily(
            "tandem_peer_last_detach_seconds", "Of the last wake, until the lead had given the second card back.", pair.detach_s
        )
