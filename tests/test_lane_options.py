"""How lanes are started: alone, side by side, or as an elastic pair, and what that takes of memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.demo import DEMO_MODEL
from appliance.errors import SettingsError
from appliance.gguf_file import open_gguf
from appliance.memory import plan as plan_module
from appliance.memory.limits import usable_cores
from appliance.memory.link_file import link_bytes
from appliance.memory.plan import PARKED_CONTEXTS, plan_for
from appliance.memory.plan_report import render_pair, render_plan
from appliance.models.config import read_config
from appliance.settings import Settings
from appliance.units import GIB, MIB
from appliance.web.lane_options import pair_options
from cuda_ext import _native as native
from tests.arena_rig import shm_folder

CONTENT_ID = "0123456789abcdef" * 4


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    with shm_folder() as folder:
        yield folder


def settings(shm_dir: Path, **values: object) -> Settings:
    return Settings.model_validate({"model": DEMO_MODEL, "cards": "host:0,host:1", "context": 512, "shm_dir": shm_dir, **values})


def words(options: tuple[str, ...]) -> set[str]:
    return {word for word in options if word.startswith("--")}


def test_without_the_pair_nothing_of_it_is_started(shm_dir: Path) -> None:
    chosen = settings(shm_dir)
    options = pair_options(chosen, plan_for(chosen), CONTENT_ID)
    assert options.elastic is None
    assert options.shared_files == ()
    assert [words(lane) for lane in options.lanes] == [{"--threads", "--share"}] * 2


def test_the_pair_meets_in_one_file_and_the_helper_starts_asleep(shm_dir: Path) -> None:
    chosen = settings(shm_dir, elastic={"enabled": True, "hold_s": 7})
    plan = plan_for(chosen)
    lead, helper = (options := pair_options(chosen, plan, CONTENT_ID)).lanes
    assert options.elastic is not None
    assert (options.elastic.hold_s, options.elastic.hold_threads < usable_cores()) == (7, True)
    assert lead[lead.index("--peer-device") + 1] == "host:1"
    assert lead[lead.index("--peer-slots") + 1] == str(plan.cards[1].slots)
    assert "--asleep" in helper
    assert "--asleep" not in lead
    assert "--peer-device" not in helper
    assert [lane[lane.index("--peer-link-role") + 1] for lane in (lead, helper)] == ["0", "1"]
    assert lead[lead.index("--peer-link") + 1] == helper[helper.index("--peer-link") + 1]
    assert [path.suffix for path in options.shared_files] == [".parked", ".link"]


def test_what_is_switched_off_is_not_started(shm_dir: Path) -> None:
    chosen = settings(shm_dir, elastic={"enabled": True, "link": False}, parked_mib=0)
    options = pair_options(chosen, plan_for(chosen), CONTENT_ID)
    assert words(options.lanes[0]) == {"--threads", "--share", "--peer-hot", "--peer-device", "--peer-slots"}
    assert words(options.lanes[1]) == {"--threads", "--share", "--peer-hot", "--asleep"}
    assert options.shared_files == ()


def test_both_engines_are_told_what_the_second_card_takes(shm_dir: Path) -> None:
    chosen = settings(shm_dir, elastic={"enabled": True, "peer_hot_ratio": 0.25})
    options = pair_options(chosen, plan_for(chosen), CONTENT_ID)
    assert [lane[lane.index("--peer-hot") + 1] for lane in options.lanes] == ["0.25", "0.25"]


def test_conversations_may_be_parked_without_the_pair(shm_dir: Path) -> None:
    chosen = settings(shm_dir, parked_mib=5)
    plan = plan_for(chosen)
    assert (plan.host.parked_bytes, plan.host.link_bytes) == (5 * MIB, 0)
    assert all(lane[lane.index("--parked-mib") + 1] == "5" for lane in pair_options(chosen, plan, CONTENT_ID).lanes)


def test_the_plan_counts_link_and_parked_conversations(shm_dir: Path) -> None:
    plain, pair = (plan_for(settings(shm_dir, slots=100, elastic={"enabled": enabled})) for enabled in (False, True))
    extra_bytes = PARKED_CONTEXTS * plain.cards[0].kv_bytes + link_bytes(plain.config, plain.chunk)
    assert pair.host.total_bytes - plain.host.total_bytes == extra_bytes
    assert "parked conversations" in render_plan(pair)
    assert "parked conversations" not in render_plan(plain)
    assert "two at a time" in render_pair(pair)


@pytest.mark.parametrize("chunk", [8, 256, 2048])
def test_the_size_of_the_link_file_is_that_of_the_native_layout(chunk: int) -> None:
    config = read_config(open_gguf(DEMO_MODEL))
    geometry = native.LinkGeometry(config.layers, config.experts, config.top_k, min(chunk, 256), config.hidden)
    assert link_bytes(config, chunk) == geometry.file_bytes


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "is_built_for_gpus", lambda: True)
    monkeypatch.setattr(plan_module, "free_gpu_bytes", lambda: {"cuda:0": 1800 * MIB, "cuda:1": 1562 * MIB})


@pytest.mark.usefixtures("two_gpus")
def test_a_lead_on_gpus_is_told_how_many_slots_the_second_card_has(shm_dir: Path) -> None:
    chosen = settings(shm_dir, cards="auto", chunk=64, elastic={"enabled": True, "peer_reserve_mib": 2})
    plan = plan_for(chosen)
    assert [card.card for card in plan.cards] == ["cuda:0", "cuda:1"]
    assert 0 < plan.cards[1].slots < plan.cards[0].slots
    lead, helper = pair_options(chosen, plan, CONTENT_ID).lanes
    assert lead[lead.index("--peer-device") + 1] == "cuda:1"
    assert lead[lead.index("--peer-slots") + 1] == str(plan.cards[1].slots)
    assert "--peer-slots" not in helper


@pytest.mark.usefixtures("two_gpus")
def test_a_pair_is_two_cards(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "free_gpu_bytes", lambda: {"cuda:0": 24 * GIB})
    with pytest.raises(SettingsError, match="elastic_enabled needs two cards of one kind, and there is cuda:0 alone"):
        plan_for(settings(shm_dir, cards="auto", elastic={"enabled": True}))
