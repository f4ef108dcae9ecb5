"""The names that schedulers of inference look for, from a desk's snapshot."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from appliance.desk.lane_state import LaneState
from appliance.desk.status import Counters, DeskStatus, LaneStatus, Phase, RequestStatus
from appliance.web.vllm_metrics import vllm_metrics

REQUEST = RequestStatus(id="a", prompt_tokens=5, prompt_done=5, generated_tokens=1, tokens_per_s=0.0)
IDLE = LaneStatus(
    name="lead",
    card="host:0",
    state=LaneState.IDLE,
    reason=None,
    pid=1,
    restarts=0,
    load=None,
    context=1000,
    context_used=0,
    request=None,
    stats=None,
)
BUSY = replace(IDLE, name="helper", card="host:1", state=LaneState.BUSY, context_used=500, request=REQUEST)
STATUS = DeskStatus(
    phase=Phase.READY,
    reason=None,
    load=None,
    context=1000,
    lanes=(IDLE, BUSY),
    queue_length=3,
    counters=Counters(accepted=9, finished=4, cancelled=1, prompt_tokens=70, cached_tokens=30, generated_tokens=200),
)


def values(status: DeskStatus) -> dict[str, float]:
    return {sample.name: sample.value for metric in vllm_metrics(status, "a model") for sample in metric.samples}


def test_what_a_scheduler_reads_follows_from_the_desk() -> None:
    assert values(STATUS) == {
        "vllm:num_requests_running": 1,
        "vllm:num_requests_waiting": 3,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:gpu_cache_usage_perc": 0.25,
        "vllm:prompt_tokens_total": 70,
        "vllm:generation_tokens_total": 200,
        "vllm:request_success_total": 4,
        "vllm:prefix_cache_queries_total": 70,
        "vllm:prefix_cache_hits_total": 30,
    }


def test_before_anything_is_loaded_nothing_is_used() -> None:
    assert values(replace(STATUS, lanes=()))["vllm:kv_cache_usage_perc"] == 0


def test_every_sample_names_the_model() -> None:
    samples = [sample for metric in vllm_metrics(STATUS, 'a "model"') for sample in metric.samples]
    assert all(sample.labels == {"model_name": 'a "model"'} for sample in samples)


def test_prometheus_reads_the_names() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(type("Once", (), {"collect": lambda _self: vllm_metrics(STATUS, "m")})())
    names = {family.name for family in text_string_to_metric_families(generate_latest(registry).decode())}
    assert {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:prompt_tokens"} <= names
