"""The plan: exact sums, never over a budget, and a useful sentence when it does not fit."""

from __future__ import annotations

import fcntl
import json
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from appliance.errors import MemoryBudgetError, SettingsError, UnsupportedModelError
from appliance.gguf_file import TensorInfo, open_gguf
from appliance.memory.arena import HEADER_BYTES, MAGIC, ArenaPlace
from appliance.memory.arena_file import obtainable_bytes
from appliance.memory.layout import ArenaLayout, arena_layout, is_expert_tensor
from appliance.memory.plan import CUDA_RESERVE_BYTES, Machine, Plan, PlanRequest, dense_bytes, make_plan, plan_for, request_from
from appliance.memory.plan_report import render_pair, render_plan
from appliance.memory.slots import deal_slots, slot_order, slots_that_fit
from appliance.memory.workspace import cuda_tables_bytes, kv_bytes, residency_bytes, workspace_bytes
from appliance.models.config import ModelConfig, read_config
from appliance.settings import Settings
from appliance.units import GIB, KIB, MIB
from tests.gguf_writing import ModelShape, write_model

SHAPE = ModelShape(layers=3, experts=8, context=4096)
TYPES = {
    "ffn_gate_exps": "Q4_K",
    "ffn_up_exps": "Q4_K",
    "ffn_down_exps": "Q6_K",
    "blk.2.ffn_down_exps.weight": "Q8_0",
    "ffn_gate_inp": "F16",
}
ROOMY = Machine(64 * GIB, "the machine's memory", 64 * GIB, "/dev/shm")
REQUEST = PlanRequest(cards=("host:0", "host:1"), context=None, chunk=256, kv_type="f16", slots=None, card_bytes=None)


@lru_cache(maxsize=1)
def model() -> tuple[ModelConfig, dict[str, TensorInfo], ArenaLayout]:
    with TemporaryDirectory() as folder:
        gguf = open_gguf(write_model(Path(folder) / "m.gguf", SHAPE, types=TYPES))
        config = read_config(gguf)
        return config, dict(gguf.tensors), arena_layout(gguf, config)


def plan_of(request: PlanRequest = REQUEST, machine: Machine = ROOMY) -> Plan:
    return make_plan(*model(), request, machine)


def refusal(request: PlanRequest = REQUEST, machine: Machine = ROOMY) -> str:
    with pytest.raises(MemoryBudgetError) as caught:
        plan_of(request, machine)
    assert "\n" not in caught.value.message
    return caught.value.message


class TestAccounting:
    def test_a_card_holds_what_its_consumers_need(self) -> None:
        config, tensors, layout = model()
        card = plan_of(replace(REQUEST, context=1000, slots=7)).cards[1]
        assert card.dense_bytes == dense_bytes(tensors)
        assert card.kv_bytes == kv_bytes(config, 1000, "f16")
        assert card.workspace_bytes == sum(workspace_bytes(config, 256, 1000).values())
        assert card.tables_bytes == residency_bytes(config)
        assert card.slots == 7
        assert card.slots_bytes == sum(slot_order(layout)[:7])
        assert card.total_bytes == card.dense_bytes + card.kv_bytes + card.workspace_bytes + card.tables_bytes + card.slots_bytes

    def test_host_memory_holds_arena_processes_and_all_cards(self) -> None:
        plan = plan_of()
        assert plan.host.arena_bytes == HEADER_BYTES + model()[2].total_bytes
        assert plan.host.cards_bytes == sum(card.total_bytes for card in plan.cards)
        assert plan.host.total_bytes == plan.host.arena_bytes + plan.host.processes_bytes + plan.host.cards_bytes

    def test_dense_weights_are_all_but_the_experts_and_routers_count_as_float32(self) -> None:
        tensors = model()[1]
        stored = sum(info.nbytes for info in tensors.values() if not is_expert_tensor(info.name))
        routers = SHAPE.layers * SHAPE.hidden * SHAPE.experts
        assert dense_bytes(tensors) == stored + 2 * routers

    def test_the_smallest_memory_that_is_accepted_is_exactly_the_plans_total(self) -> None:
        request = replace(REQUEST, slots=5)
        total = plan_of(request).host.total_bytes
        assert plan_of(request, replace(ROOMY, memory_bytes=total)).host.total_bytes == total
        assert "host memory must hold" in refusal(request, replace(ROOMY, memory_bytes=total - 1))

    def test_the_smallest_card_that_is_accepted_is_exactly_its_total(self) -> None:
        request = replace(REQUEST, slots=5)
        total = plan_of(request).cards[0].total_bytes
        assert plan_of(replace(request, card_bytes=total)).cards[0].total_bytes == total
        assert "card host:0 must hold" in refusal(replace(request, card_bytes=total - 1))

    def test_the_smallest_shared_memory_that_is_accepted_is_exactly_the_arena(self) -> None:
        arena_bytes = plan_of().host.arena_bytes
        assert plan_of(machine=replace(ROOMY, shm_bytes=arena_bytes))
        assert "/dev/shm must hold" in refusal(machine=replace(ROOMY, shm_bytes=arena_bytes - 1))
        assert plan_of(machine=replace(ROOMY, shm_bytes=None))


class TestChoices:
    def test_context_is_the_models_own_up_to_8192(self) -> None:
        assert plan_of().context == 4096
        config, tensors, layout = model()
        assert make_plan(replace(config, context=262_144), tensors, layout, REQUEST, ROOMY).context == 8192

    def test_a_context_that_the_model_does_not_have_is_refused(self) -> None:
        with pytest.raises(SettingsError, match=r"context = 5000 is more than the 4096 tokens"):
            plan_of(replace(REQUEST, context=5000))

    def test_chunks_are_not_longer_than_the_context(self) -> None:
        assert plan_of(replace(REQUEST, context=100)).chunk == 100

    def test_a_host_card_has_slots_for_a_quarter_of_the_experts(self) -> None:
        assert [card.slots for card in plan_of().cards] == [6, 6]

    def test_more_slots_than_the_model_has_experts_are_refused(self) -> None:
        assert plan_of(replace(REQUEST, slots=24)).cards[0].slots == 24
        with pytest.raises(SettingsError, match=r"slots = 25 is more than the 24 experts of .*; lower it") as caught:
            plan_of(replace(REQUEST, slots=25))
        assert caught.value.param == "slots"

    def test_a_tight_budget_gives_fewer_slots_and_not_an_error(self) -> None:
        without = plan_of(replace(REQUEST, slots=0)).cards[0].total_bytes
        size = slot_order(model()[2])[0]
        assert plan_of(replace(REQUEST, card_bytes=without + size)).cards[0].slots == 1
        assert plan_of(replace(REQUEST, card_bytes=without)).cards[0].slots == 0

    def test_engines_come_to_the_same_plan_from_its_choices(self) -> None:
        plan = plan_of()
        settings = plan.settings_for_engine(Settings(), "host:0")
        again = plan_of(replace(REQUEST, context=settings.context, chunk=settings.chunk, slots=settings.slots))
        assert again.cards == plan.cards


class TestRefusals:
    def test_the_three_largest_consumers_are_named_largest_first(self) -> None:
        message = refusal(replace(REQUEST, slots=24, context=4096), replace(ROOMY, memory_bytes=64 * MIB))
        shown = re.search(r"its largest consumers are (.*?);", message)
        assert shown
        assert len(shown[1].split(", ")) == 3
        assert shown[1].startswith("the processes 512 MiB, ")

    def test_both_sizes_and_the_source_of_the_limit_are_named(self) -> None:
        message = refusal(machine=Machine(100 * MIB, "the container's memory limit", None, "/dev/shm"))
        assert "but the container's memory limit allows 100 MiB" in message

    @pytest.mark.parametrize(
        ("request_", "setting"),
        [
            (replace(REQUEST, context=4096, chunk=8, slots=0), "context"),
            (replace(REQUEST, context=256, chunk=256, slots=0), "chunk"),
            (replace(REQUEST, context=512, chunk=8, slots=24), "slots"),
            (replace(REQUEST, context=500, chunk=8, kv_type="f32", slots=0), "kv_type"),
            (replace(REQUEST, context=500, chunk=8, kv_type="f16", slots=0), "kv_type"),
        ],
    )
    def test_the_setting_that_frees_most_is_found_by_trying(self, request_: PlanRequest, setting: str) -> None:
        total = plan_of(request_).cards[0].total_bytes
        assert re.search(
            rf"; {setting} = \w+ frees the most there \(.*\) and is enough", refusal(replace(request_, card_bytes=total - 1024))
        )

    def test_following_the_advice_makes_it_fit(self) -> None:
        request = replace(REQUEST, slots=24, card_bytes=plan_of(replace(REQUEST, slots=2)).cards[0].total_bytes)
        advised = re.search(r"(\w+) = (\w+) frees the most", refusal(request))
        assert advised
        assert advised[1] in ("slots", "context", "chunk")
        assert plan_of(replace(request, **{advised[1]: int(advised[2])}))

    def test_parked_conversations_give_way_first_where_they_are_what_is_too_much(self) -> None:
        request = replace(REQUEST, is_elastic=True, parked_bytes=0)
        needed = plan_of(request).host.total_bytes
        advice = refusal(replace(request, parked_bytes=4 * GIB), replace(ROOMY, memory_bytes=needed + 100 * MIB))
        assert "; parked_mib = 64 frees the most there" in advice
        assert "and is enough" in advice

    def test_advice_that_is_not_enough_says_so(self) -> None:
        assert "are still lacking, so a smaller quantisation of the model is needed too" in refusal(replace(REQUEST, card_bytes=1 * MIB))

    def test_a_small_card_is_told_what_it_would_need(self) -> None:
        message = refusal(replace(REQUEST, slots=4, card_bytes=2 * MIB))
        needed = re.search(r"raise card_memory_mib to (\d+)", message)
        assert needed
        assert plan_of(replace(REQUEST, slots=4, card_bytes=int(needed[1]) * MIB))

    def test_one_card_is_advised_when_two_are_too_many(self) -> None:
        request = replace(REQUEST, context=16, chunk=8, slots=0)
        total = plan_of(request).host.total_bytes
        assert "cards = host:0 frees the most there" in refusal(request, replace(ROOMY, memory_bytes=total - MIB))

    def test_small_shared_memory_is_told_how_to_grow(self) -> None:
        assert "docker run --shm-size" in refusal(machine=replace(ROOMY, shm_bytes=64 * KIB))


MEMORY = st.integers(0, 2 * GIB)
REQUESTS = st.builds(
    PlanRequest,
    cards=st.sampled_from([("host:0",), ("host:0", "host:1")]),
    context=st.none() | st.integers(16, 4096),
    chunk=st.integers(8, 512),
    kv_type=st.sampled_from(["f16", "f32", "int8"]),
    slots=st.none() | st.integers(0, 24),
    card_bytes=st.none() | st.integers(1, 64 * MIB),
)
MACHINES = st.builds(Machine, MEMORY, st.just("the limit"), st.none() | st.integers(0, 64 * MIB), st.just("/dev/shm"))


def plan_or_none(request: PlanRequest, machine: Machine) -> Plan | None:
    try:
        return plan_of(request, machine)
    except MemoryBudgetError:
        return None


class TestProperties:
    @hypothesis_settings(deadline=None)
    @given(REQUESTS, MACHINES)
    def test_a_plan_never_exceeds_any_limit(self, request_: PlanRequest, machine: Machine) -> None:
        plan = plan_or_none(request_, machine)
        if plan is None:
            return
        assert plan.host.total_bytes <= machine.memory_bytes
        assert machine.shm_bytes is None or plan.host.arena_bytes <= machine.shm_bytes
        assert all(request_.card_bytes is None or card.total_bytes <= request_.card_bytes for card in plan.cards)
        assert all(dealt.slots <= dealt.num_experts for card in plan.cards for dealt in card.slot_classes)

    @hypothesis_settings(deadline=None)
    @given(REQUESTS, MACHINES, st.integers(0, GIB), st.integers(0, 32 * MIB))
    def test_more_memory_never_means_fewer_slots(self, request_: PlanRequest, machine: Machine, more: int, more_card: int) -> None:
        plan = plan_or_none(request_, machine)
        if plan is None:
            return
        card_bytes = None if request_.card_bytes is None else request_.card_bytes + more_card
        larger = plan_of(replace(request_, card_bytes=card_bytes), replace(machine, memory_bytes=machine.memory_bytes + more))
        for card, larger_card in zip(plan.cards, larger.cards, strict=True):
            for dealt, more_dealt in zip(card.slot_classes, larger_card.slot_classes, strict=True):
                assert dealt.slots <= more_dealt.slots

    @given(st.integers(0, 24))
    def test_slots_are_dealt_in_proportion_to_the_experts(self, slots: int) -> None:
        layout = model()[2]
        classes = deal_slots(layout, slots)
        assert sum(dealt.slots for dealt in classes) == slots
        assert all(abs(dealt.slots - slots * dealt.num_experts / layout.num_experts) < 1 for dealt in classes)

    @given(st.integers(0, 4 * MIB))
    def test_slots_that_fit_are_as_many_as_fit(self, budget: int) -> None:
        order = slot_order(model()[2])
        count = slots_that_fit(order, budget)
        assert sum(order[:count]) <= budget
        assert count == len(order) or sum(order[: count + 1]) > budget


class TestPlanFor:
    def test_reads_the_file_and_the_machine(self, tmp_path: Path) -> None:
        path = write_model(tmp_path / "m.gguf", SHAPE, types=TYPES, shards=3)
        plan = plan_for(Settings(model=path, shm_dir=tmp_path, slots=3))
        assert [card.card for card in plan.cards] == ["host:0", "host:1"]
        assert plan.host.machine.memory_bytes > 0

    def test_only_arenas_that_nobody_has_mapped_make_room(self, tmp_path: Path) -> None:
        place = ArenaPlace(tmp_path, "ab" * 32, model()[2])
        unused, mapped, foreign = (tmp_path / f"tandem-{number}-00.arena" for number in ("00", "11", "22"))
        for file, first in ((unused, MAGIC), (mapped, MAGIC), (foreign, b"nothing of ours")):
            file.write_bytes(first + bytes(MIB))
            file.chmod(0o600)
        with mapped.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_SH)
            assert obtainable_bytes(place) == unused.stat().st_blocks * 512
        assert unused.exists()

    def test_an_arena_that_is_there_already_is_not_counted_twice(self, tmp_path: Path) -> None:
        place = ArenaPlace(tmp_path, "ab" * 32, model()[2])
        place.path.write_bytes(bytes(place.file_bytes))
        assert obtainable_bytes(place) >= place.file_bytes

    def test_gpus_are_refused_where_there_are_none(self, tmp_path: Path) -> None:
        path = write_model(tmp_path / "m.gguf")
        with pytest.raises(SettingsError, match=r"cards = .* names cuda:0, but this machine shows no GPU"):
            plan_for(Settings(model=path, cards="cuda:0"))

    def test_a_folder_of_shared_memory_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        path = write_model(tmp_path / "m.gguf")
        with pytest.raises(SettingsError, match=r"shm_dir .*nowhere cannot be used"):
            plan_for(Settings(model=path, shm_dir=tmp_path / "nowhere"))


class TestOutput:
    def test_json_has_the_sizes_of_the_plan(self) -> None:
        plan = plan_of()
        shown = json.loads(json.dumps(plan.to_json()))
        assert shown["host"]["total_bytes"] == plan.host.total_bytes
        assert [card["total_bytes"] for card in shown["cards"]] == [card.total_bytes for card in plan.cards]
        assert sum(dealt["slots"] for dealt in shown["cards"][0]["slot_classes"]) == shown["cards"][0]["slots"]

    def test_the_table_names_every_consumer_and_card_in_aligned_columns(self) -> None:
        plan = plan_of(replace(REQUEST, card_bytes=64 * MIB))
        text = render_plan(plan)
        for word in (*plan.cards[0].consumers(), "host:0", "host:1", "arena", "processes", "budget", "25% of 24 experts"):
            assert word in text
        lines = text.splitlines()
        first = next(index for index, line in enumerate(lines) if line.startswith("card "))
        assert len({len(line) for line in lines[first : first + 8]}) == 1


class TestGpus:
    ROOMY_GPUS = replace(ROOMY, gpu_bytes={"cuda:0": 24 * GIB, "cuda:1": 2 * GIB})
    REQUEST = replace(REQUEST, cards=("cuda:0", "cuda:1"), chunk=512)

    def test_slots_follow_each_gpus_own_free_memory(self) -> None:
        large, small = plan_of(
            self.REQUEST, replace(self.ROOMY_GPUS, gpu_bytes={"cuda:0": 24 * GIB, "cuda:1": CUDA_RESERVE_BYTES + 20 * MIB})
        ).cards
        assert large.slots == model()[2].num_experts
        assert 0 <= small.slots < large.slots
        assert small.total_bytes <= 20 * MIB

    def test_a_gpu_takes_no_host_memory(self) -> None:
        assert plan_of(self.REQUEST, self.ROOMY_GPUS).host.cards_bytes == 0

    def test_a_gpu_that_is_not_there_is_named(self) -> None:
        with pytest.raises(SettingsError, match="cuda:3, but this machine shows cuda:0, cuda:1"):
            plan_of(replace(self.REQUEST, cards=("cuda:3",)), self.ROOMY_GPUS)

    @pytest.mark.parametrize(
        ("shape", "sentence"),
        [
            ({"experts": 512, "top_k": 17}, "17 of 512 experts per token; card cuda:0 can choose up to 16 of 512, host cards any number"),
            ({"experts": 513}, "of 513 experts per token; card cuda:0 can choose up to 16 of 512"),
            ({"hidden": 48}, "rows of 48 and .* values; card cuda:0 takes multiples of 32, host cards any"),
        ],
    )
    def test_a_shape_that_gpus_do_not_have_is_refused(self, shape: dict[str, int], sentence: str) -> None:
        config, tensors, layout = model()
        with pytest.raises(UnsupportedModelError, match=sentence):
            make_plan(replace(config, **shape), tensors, layout, self.REQUEST, self.ROOMY_GPUS)  # type: ignore[arg-type]
        assert make_plan(replace(config, **shape), tensors, layout, REQUEST, ROOMY).cards  # type: ignore[arg-type]

    def test_a_gpu_that_is_too_small_is_refused_with_both_sizes(self) -> None:
        tiny = replace(self.ROOMY_GPUS, gpu_bytes={"cuda:0": GIB, "cuda:1": CUDA_RESERVE_BYTES + MIB})
        assert "card cuda:1 must hold" in refusal(self.REQUEST, tiny)


class TestGpuPairs:
    FREE_BYTES = 2 * CUDA_RESERVE_BYTES + 40 * MIB
    MACHINE = replace(ROOMY, gpu_bytes={"cuda:0": FREE_BYTES, "cuda:1": FREE_BYTES})
    REQUEST = replace(TestGpus.REQUEST, is_elastic=True, has_peer=True)

    def test_the_second_card_leaves_room_for_the_leads_part_too(self) -> None:
        lead, helper = plan_of(self.REQUEST, self.MACHINE).cards
        assert lead.reserve_bytes == CUDA_RESERVE_BYTES
        assert helper.reserve_bytes == 2 * CUDA_RESERVE_BYTES + cuda_tables_bytes(model()[0])
        assert helper.total_bytes <= self.FREE_BYTES - helper.reserve_bytes

    def test_without_a_peer_each_card_has_one_process(self) -> None:
        plan = plan_of(replace(self.REQUEST, has_peer=False), self.MACHINE)
        assert [card.reserve_bytes for card in plan.cards] == [CUDA_RESERVE_BYTES] * 2

    def test_what_is_left_to_others_is_taken_from_the_second_card_alone(self) -> None:
        plain = plan_of(self.REQUEST, self.MACHINE).cards
        lead, helper = plan_of(replace(self.REQUEST, peer_reserve_bytes=8 * MIB), self.MACHINE).cards
        assert lead == plain[0]
        assert helper.reserve_bytes == plain[1].reserve_bytes + 8 * MIB
        assert plain[1].budget_bytes is not None
        assert helper.budget_bytes == plain[1].budget_bytes - 8 * MIB

    def test_a_second_card_that_is_too_small_is_told_what_it_would_need(self) -> None:
        message = refusal(self.REQUEST, replace(self.MACHINE, gpu_bytes={"cuda:0": GIB, "cuda:1": 2 * CUDA_RESERVE_BYTES}))
        needed = re.search(r"use a card with (\d+) MiB free", message)
        assert needed
        assert plan_of(self.REQUEST, replace(self.MACHINE, gpu_bytes={"cuda:0": GIB, "cuda:1": int(needed[1]) * MIB}))

    def test_too_much_left_to_others_is_told_by_its_setting_and_how_much_may_be(self) -> None:
        message = refusal(replace(self.REQUEST, peer_reserve_bytes=40 * MIB), self.MACHINE)
        assert "elastic_peer_reserve_mib = 40 leaves card cuda:1 0 B of the 40.0 MiB" in message
        most = re.search(r"lower elastic_peer_reserve_mib to (\d+) or less", message)
        assert most
        assert plan_of(replace(self.REQUEST, peer_reserve_bytes=int(most[1]) * MIB), self.MACHINE)
        assert "lower elastic_peer_reserve_mib" in refusal(replace(self.REQUEST, peer_reserve_bytes=(int(most[1]) + 1) * MIB), self.MACHINE)

    def test_what_does_not_fit_anyway_is_not_the_fault_of_what_is_left_to_others(self) -> None:
        tiny = replace(self.MACHINE, gpu_bytes={"cuda:0": GIB, "cuda:1": 2 * CUDA_RESERVE_BYTES})
        assert "use a card with" in refusal(replace(self.REQUEST, peer_reserve_bytes=MIB), tiny)

    def test_one_card_is_no_advice_for_a_pair(self) -> None:
        tiny = replace(self.MACHINE, gpu_bytes={"cuda:0": GIB, "cuda:1": 2 * CUDA_RESERVE_BYTES})
        assert "cards = cuda:0" not in refusal(self.REQUEST, tiny)

    def test_a_host_card_has_no_memory_to_leave_to_others(self) -> None:
        elastic = {"enabled": True, "peer_reserve_mib": 8}
        with pytest.raises(SettingsError, match=r"elastic_peer_reserve_mib leaves memory of a second GPU.*host:1"):
            request_from(Settings.model_validate({"cards": "host:0,host:1", "elastic": elastic}))
        assert request_from(Settings.model_validate({"cards": "host:0,host:1", "elastic": elastic | {"enabled": False}}))

    def test_the_table_shows_both_states_and_what_is_left_free(self) -> None:
        plan = plan_of(self.REQUEST, self.MACHINE)
        assert re.search(r"left free +768 MiB +1\.50 GiB", render_plan(plan))
        text = render_pair(plan)
        assert "one at a time" in text
        assert "two at a time" in text
        assert "1.50 GiB of cuda:1 are left free" in text
