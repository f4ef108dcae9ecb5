"""`/metrics` from a desk's snapshots: every series stands in its page, counters never fall, and the pair is told as it is."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from appliance.desk.status import DeskStatus
from appliance.protocol import LoadProgress, Stats
from appliance.web.metrics import metrics_of
from tests.test_desk_pair import Rig, awake, settled

PAGE = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")


def stats(**counts: object) -> Stats:
    none = dict.fromkeys(("windows", "prompt_tokens", "generated_tokens", "swaps", "resident_experts", "slots", "context_used"), 0)
    return Stats.model_validate({"rows_by_tier": {}, "busy": False, "isa": "avx2", "pool_threads": 1, "pool_held": 0, **none, **counts})


def values(status: DeskStatus) -> dict[str, float]:
    """By name and labels without the card: `tandem_expert_rows_total lead own`."""
    return {
        " ".join([sample.name, *(value for label, value in sample.labels.items() if label != "card")]): sample.value
        for metric in metrics_of(status, "m")
        for sample in metric.samples
    }


def of(rig: Rig) -> dict[str, float]:
    return values(rig.state.status({}))


def test_every_series_stands_in_its_page_with_its_meaning() -> None:
    rig = awake()
    rig.say("lead", stats())
    rig.die("helper")
    rig.say("helper", LoadProgress(stage="dense", done_bytes=1, total_bytes=2))
    rig.die("lead")
    families = [metric for metric in metrics_of(rig.state.status({}), "m") if not metric.name.startswith("vllm:")]
    told = {f"{metric.name}{'_total' if metric.type == 'counter' else ''}": metric.documentation for metric in families}
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| `tandem_")]
    assert {row[0]: row[2] for row in rows} == told


def test_without_a_pair_nothing_is_said_of_one() -> None:
    status = settled().state.status({})
    assert any(name.startswith("tandem_helper") for name in values(status))
    alone = DeskStatus(status.phase, None, None, None, status.lanes, 0, status.counters)
    assert not [name for name in values(alone) if name.startswith(("tandem_helper", "tandem_pair", "tandem_link_up"))]


def test_counters_stay_when_their_engine_is_replaced() -> None:
    rig = settled()
    seen: list[dict[str, float]] = []

    def look() -> dict[str, float]:
        seen.append({name: value for name, value in of(rig).items() if "_total" in name})
        return seen[-1]

    counts = {
        "windows": 5,
        "swaps": 2,
        "served_rows": 7,
        "late_experts": 1,
        "link_losses": 1,
        "parked_conversations": 3,
        "resumed_conversations": 2,
    }
    rig.say("lead", stats(rows_by_tier={"own": 10, "host": 4}, **counts))
    assert look()["tandem_expert_rows_total lead own"] == 10
    rig.die("lead")
    assert look()["tandem_expert_rows_total lead own"] == 10
    rig.ready("lead")
    assert look()["tandem_served_rows_total lead"] == 7
    rig.say("lead", stats(rows_by_tier={"own": 1, "peer": 2}, **counts))
    last = look()
    assert {name: last[f"tandem_expert_rows_total lead {name}"] for name in ("own", "peer", "host")} == {"own": 11, "peer": 2, "host": 4}
    doubled = {"windows": 10, "swaps": 4, "served_rows": 14, "late_experts": 2, "link_losses": 2}
    doubled |= {"conversations_parked": 6, "conversations_resumed": 4}
    assert {name: last[f"tandem_{name}_total lead"] for name in doubled} == doubled
    for before, after in pairwise(seen):
        assert all(after[name] >= value for name, value in before.items())


def test_a_wake_and_a_sleep_of_the_helper_are_told() -> None:
    rig = settled()
    now = of(rig)
    assert (now["tandem_pair_phase asleep"], now["tandem_pair_phase awake"], now["tandem_peer_attaches_total"]) == (1, 0, 1)
    assert "tandem_helper_last_wake_seconds" not in now
    rig.submit("a")
    rig.submit("b")
    rig.pass_time(0.5)
    assert of(rig)["tandem_pair_phase waking"] == 1
    rig.answer("lead")
    rig.pass_time(1.5)
    rig.answer_all()
    now = of(rig)
    assert (now["tandem_pair_phase awake"], now["tandem_link_up"], now["tandem_helper_wakes_total"], now["tandem_peer_detaches_total"]) == (
        1,
        1,
        1,
        1,
    )
    assert (now["tandem_peer_last_detach_seconds"], now["tandem_helper_last_wake_seconds"], now["tandem_helper_wake_seconds_total"]) == (
        0.5,
        2,
        2,
    )
    rig.finish("helper")
    rig.pass_time(11)
    rig.answer_all()
    now = of(rig)
    assert (
        now["tandem_pair_phase asleep"],
        now["tandem_link_up"],
        now["tandem_helper_sleeps_total"],
        now["tandem_peer_attaches_total"],
    ) == (1, 0, 1, 2)
    assert now["tandem_helper_failed_wakes_total"] == 0


def test_a_failed_wake_is_told_and_is_no_wake() -> None:
    rig = settled()
    rig.submit("a")
    rig.submit("b")
    rig.answer("lead")
    rig.say("helper", rig.engines["helper"].refuse())
    now = of(rig)
    assert (now["tandem_helper_failed_wakes_total"], now["tandem_helper_wakes_total"]) == (1, 0)


def test_the_store_is_as_the_last_report_has_it() -> None:
    rig = settled()
    rig.say("lead", stats(stored_conversations=2, stored_bytes=200))
    rig.pass_time(1)
    rig.say("helper", stats(stored_conversations=3, stored_bytes=300))
    assert (of(rig)["tandem_parked_conversations"], of(rig)["tandem_parked_bytes"]) == (3, 300)
    rig.die("helper")
    assert of(rig)["tandem_parked_bytes"] == 200


def test_polling_sends_no_line() -> None:
    rig = settled()
    mark = len(rig.sent)
    for _ in range(50):
        of(rig)
    assert rig.lines_since(mark) == []
