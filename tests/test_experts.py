"""The expert cache: fill, and swaps step by step."""

from __future__ import annotations

import time

import numpy as np
import pytest
from numpy.typing import NDArray

from appliance.engine.experts import ExpertCache
from appliance.memory.layout import ArenaLayout, BlobLayout, LayerBlobs
from appliance.memory.policy import BoolTable, ExpertId, IntTable, Swap
from appliance.memory.slots import SlotClass
from cuda_ext import _native as native

LAYERS, EXPERTS, SMALL, LARGE = 3, 4, 256, 512


class Scripted:
    """A policy that proposes what the test told it, and remembers what it was told."""

    def __init__(self) -> None:
        self.next: list[Swap] = []
        self.observed: list[tuple[list[int], list[int], list[int], int]] = []
        self.seen: list[tuple[BoolTable, BoolTable, int]] = []

    def observe(self, layers: IntTable, experts: IntTable, counts: IntTable, rows: int) -> None:
        self.observed.append((layers.tolist(), experts.tolist(), counts.tolist(), rows))

    def propose(self, resident: BoolTable, in_flight: BoolTable, limit: int) -> list[Swap]:
        self.seen.append((resident.copy(), in_flight.copy(), limit))
        proposed, self.next = self.next, []
        return proposed


class CacheRig:
    """Layers 0 and 1 have small blobs, layer 2 large ones; blob (l, e) is filled with 10 * l + e."""

    def __init__(self, max_swaps: int = 2, *, may_duplicate: bool = True) -> None:
        sizes = [SMALL, SMALL, LARGE]
        offsets = np.cumsum([0, *(size * EXPERTS for size in sizes)]).tolist()
        layers = tuple(LayerBlobs(i, EXPERTS, BlobLayout((), size), offsets[i]) for i, size in enumerate(sizes))
        self.card = native.HostCard(native.Pool(1), "portable")
        arena = self.card.allocate("arena", offsets[-1])
        self.uses = self.card.allocate("uses", 4 * LAYERS * EXPERTS)
        self.table = native.ExpertTable(LAYERS, EXPERTS, self.card.allocate("table", 4 * LAYERS * EXPERTS), self.uses)
        for layer in layers:
            self.table.set_layer(layer.layer, arena.part(layer.offset, layer.nbytes), layer.blob.nbytes)
            for expert in range(EXPERTS):
                self.table.blob(layer.layer, expert).bytes()[:] = 10 * layer.layer + expert
        self.policy = Scripted()
        layout = ArenaLayout(layers, offsets[-1])
        self.cache = ExpertCache(self.card, self.table, layout, self.policy, max_swaps, may_duplicate=may_duplicate)
        self.cache.add_slots([SlotClass(SMALL, 2 * EXPERTS, 3), SlotClass(LARGE, EXPERTS, 1)])

    def fill(self, *experts: tuple[int, int]) -> list[tuple[int, int]]:
        calls: list[tuple[int, int]] = []
        self.cache.fill([ExpertId(*expert) for expert in experts], lambda done, total: calls.append((done, total)))
        return calls

    def fill_up(self, elsewhere: BoolTable | None = None) -> None:
        """Boundaries until the empty slots are full."""
        deadline = time.monotonic() + 60
        while self.cache.is_filling:
            assert time.monotonic() < deadline
            self.cache.between_windows(self.cache.read_uses(0), elsewhere)

    def use(self, layer: int, expert: int, rows: int) -> None:
        counts: NDArray[np.uint32] = self.uses.bytes().view(np.uint32).reshape(LAYERS, EXPERTS)
        counts[layer, expert] += rows

    def resident(self) -> set[tuple[int, int]]:
        """By the table; every entry's slot must hold that expert's bytes, and no slot two experts."""
        found = {
            (layer, e): self.table.entry(layer, e) for layer in range(LAYERS) for e in range(EXPERTS) if self.table.entry(layer, e) >= 0
        }
        assert len(set(found.values())) == len(found)
        for (layer, expert), slot in found.items():
            assert (self.table.slot(slot).bytes() == 10 * layer + expert).all()
        assert found.keys() == set(zip(*(axis.tolist() for axis in self.cache.resident.nonzero()), strict=True))
        return set(found)


@pytest.fixture
def rig() -> CacheRig:
    return CacheRig()


def test_a_fill_takes_slots_of_the_right_size_in_order(rig: CacheRig) -> None:
    calls = rig.fill((2, 3), (0, 0), (2, 1), (1, 2), (0, 1), (1, 3))
    assert rig.resident() == {(2, 3), (0, 0), (1, 2), (0, 1)}
    assert calls == [(LARGE, 1280), (LARGE + SMALL, 1280), (LARGE + 2 * SMALL, 1280), (1280, 1280)]
    assert (rig.cache.num_slots, rig.cache.num_resident) == (4, 4)


def test_a_swap_takes_the_victim_out_before_the_newcomer_is_in(rig: CacheRig) -> None:
    rig.fill((0, 0), (0, 1))
    rig.policy.next = [Swap(1, 3, 0, 0)]
    rig.cache.between_windows(rig.cache.read_uses(1))
    assert rig.resident() == {(0, 1)}
    rig.cache.settle()
    assert rig.resident() == {(0, 1), (1, 3)}
    assert rig.cache.num_swaps == 1


def test_experts_in_flight_are_named_to_the_policy_and_count_against_the_limit(rig: CacheRig) -> None:
    rig.fill((0, 0), (0, 1), (1, 0))
    rig.policy.next = [Swap(0, 2, 0, 0)]
    rig.cache.between_windows(rig.cache.read_uses(1))
    rig.cache.between_windows(rig.cache.read_uses(1))
    resident, in_flight, limit = rig.policy.seen[-1]
    assert not resident[0, 0]
    landed = rig.cache.num_swaps == 1  # the copy may be through already
    assert bool(in_flight[0, 0]) is bool(in_flight[0, 2]) is not landed
    assert limit == (2 if landed else 1)


def test_uses_reach_the_policy_once(rig: CacheRig) -> None:
    rig.use(0, 2, 5)
    rig.use(2, 1, 1)
    rig.cache.between_windows(rig.cache.read_uses(4))
    rig.cache.between_windows(rig.cache.read_uses(1))
    assert rig.policy.observed == [([0, 2], [2, 1], [5, 1], 4)]
    assert rig.cache.total_uses[0, 2] == 5


def test_without_swaps_the_policy_is_not_asked() -> None:
    rig = CacheRig(max_swaps=0)
    rig.fill((0, 0))
    rig.use(0, 1, 3)
    rig.cache.between_windows(rig.cache.read_uses(3))
    assert rig.policy.seen == []
    assert rig.resident() == {(0, 0)}


def test_many_random_swaps_keep_table_and_slots_consistent(rig: CacheRig) -> None:
    rig.fill((0, 0), (0, 1), (1, 0), (2, 0))
    rng = np.random.default_rng(4)
    for _ in range(200):
        held = rig.resident()
        layer = int(rng.integers(0, LAYERS))
        absent = [(layer, e) for e in range(EXPERTS) if (layer, e) not in held]
        size_class = {2} if layer == 2 else {0, 1}
        victims = sorted(expert for expert in held if expert[0] in size_class)
        if victims and absent:
            rig.policy.next = [Swap(*absent[rng.integers(len(absent))], *victims[rng.integers(len(victims))])]
        rig.cache.between_windows(rig.cache.read_uses(1))
        rig.cache.settle()
    assert len(rig.resident()) == 4
    assert rig.cache.num_swaps > 100


def test_memory_given_back_takes_the_last_slots_first_and_comes_back_with_the_hottest(rig: CacheRig) -> None:
    rig.fill((0, 0), (0, 1), (2, 0))
    for expert, rows in (((0, 0), 9), ((0, 1), 1), ((2, 0), 5), ((1, 3), 7)):
        rig.use(*expert, rows)
    rig.cache.between_windows(rig.cache.read_uses(1))
    assert rig.cache.give_back(1) == LARGE
    assert rig.resident() == {(0, 0), (0, 1)}
    assert rig.cache.num_slots == 3
    assert rig.cache.give_back(SMALL + 1) == 2 * SMALL, "the empty slot and the one before it"
    assert rig.resident() == {(0, 0)}
    rig.cache.take_again([layer * EXPERTS + expert for layer, expert in ((0, 0), (1, 3), (2, 0), (0, 1), (1, 0))])
    assert rig.cache.num_slots == 4
    assert rig.resident() == {(0, 0)}, "it serves before it is full"
    rig.fill_up()
    assert rig.resident() == {(0, 0), (1, 3), (0, 1), (2, 0)}


def test_what_another_card_holds_is_neither_filled_nor_swapped_in_while_others_are_left(rig: CacheRig) -> None:
    rig.cache.give_back(3 * SMALL + LARGE)
    rig.cache.take_again(range(EXPERTS))
    elsewhere = np.zeros((LAYERS, EXPERTS), dtype=np.bool_)
    elsewhere[0, 1] = True
    rig.fill_up(elsewhere)
    assert rig.resident() == {(0, 0), (0, 2), (0, 3)}
    _, busy, _ = rig.policy.seen[-1]
    assert busy[0, 1]


def flat(*experts: tuple[int, int]) -> list[int]:
    return [layer * EXPERTS + expert for layer, expert in experts]


def elsewhere(*experts: tuple[int, int]) -> BoolTable:
    held = np.zeros((LAYERS, EXPERTS), dtype=np.bool_)
    for expert in experts:
        held[expert] = True
    return held


SMALL_EXPERTS = [(layer, expert) for expert in range(EXPERTS) for layer in (0, 1)]


def test_slots_are_filled_with_what_nobody_holds_before_copies_of_what_another_card_holds(rig: CacheRig) -> None:
    rig.cache.give_back(3 * SMALL + LARGE)
    rig.cache.take_again(flat(*SMALL_EXPERTS))
    rig.fill_up(elsewhere(*SMALL_EXPERTS[:6]))
    assert rig.resident() == {*SMALL_EXPERTS[6:], SMALL_EXPERTS[0]}, "two that nobody holds, and the hottest copy"


def test_a_card_that_is_looked_up_second_takes_no_copies() -> None:
    rig = CacheRig(may_duplicate=False)
    rig.cache.give_back(3 * SMALL + LARGE)
    rig.cache.take_again(flat(*SMALL_EXPERTS))
    rig.fill_up(elsewhere(*SMALL_EXPERTS[:6]))
    assert rig.resident() == set(SMALL_EXPERTS[6:])


def test_an_empty_slot_takes_what_another_card_gives_up_later() -> None:
    rig = CacheRig(may_duplicate=False)
    rig.cache.give_back(3 * SMALL + LARGE)
    rig.cache.take_again(flat(*SMALL_EXPERTS))
    rig.fill_up(elsewhere(*SMALL_EXPERTS[:6]))
    rig.cache.between_windows(rig.cache.read_uses(1), elsewhere(*SMALL_EXPERTS[1:6]))
    rig.cache.settle()
    assert rig.resident() == {*SMALL_EXPERTS[6:], SMALL_EXPERTS[0]}


def test_what_begins_to_fill_a_slot_is_not_offered_for_a_swap_too(rig: CacheRig) -> None:
    rig.cache.give_back(3 * SMALL + LARGE)
    rig.cache.take_again(flat((0, 0)))
    rig.cache.between_windows(rig.cache.read_uses(1), elsewhere((1, 1)))
    _, busy, _ = rig.policy.seen[-1]
    assert busy[0, 0]
    assert busy[1, 1]


def test_giving_memory_back_while_it_fills_stops_the_fill(rig: CacheRig) -> None:
    rig.cache.give_back(3 * SMALL + LARGE)
    rig.cache.take_again(range(EXPERTS))
    rig.cache.between_windows(rig.cache.read_uses(0))
    rig.cache.give_back(3 * SMALL + LARGE)
    assert not rig.cache.is_filling
    assert (rig.cache.num_slots, rig.cache.num_resident) == (0, 0)


def test_memory_that_is_not_there_any_more_leaves_the_slots_given_back(rig: CacheRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.cache.give_back(3 * SMALL + LARGE)

    class Gone:
        nbytes = SMALL

        def part(self, offset: int, nbytes: int) -> Gone:
            assert (offset, nbytes) == (0, SMALL)
            return self

        def touch(self) -> None:
            raise MemoryError

        def discard(self) -> None:
            pass

    monkeypatch.setattr(rig.cache, "_memories", [*rig.cache._memories, Gone()])
    with pytest.raises(MemoryError):
        rig.cache.take_again([0])
    monkeypatch.undo()
    assert (rig.cache.num_slots, rig.cache.is_filling) == (0, False)
