"""Host cards: pool, command and copy threads, memory by use."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from cuda_ext import _native as native
from tests.op_rig import OpRig, floats, same_bits

DEADLINE_S = 20.0


def busy_card(num_rows: int = 64, width: int = 2048) -> tuple[OpRig, native.View]:
    """A card with a program of some hundred operations that hardly change their input."""
    rig = OpRig(num_rows, num_threads=2)
    x = rig.give(np.ones((num_rows, width), np.float32))
    for _ in range(400):
        rig.recorder.norm(
            x, rig.give(np.ones(width, np.float32)), 1e-6, native.Rows.all, native.RowsMemory(rig.take(num_rows * width * 4), None, width)
        )
    return rig, x


def test_an_idle_pool_uses_less_than_a_hundredth_of_a_core() -> None:
    rig = OpRig(1, num_threads=3)
    rig.recorder.norm(
        rig.give(np.ones((1, 32), np.float32)),
        rig.give(np.ones(32, np.float32)),
        1e-6,
        native.Rows.all,
        native.RowsMemory(rig.take(128), None, 32),
    )
    rig.run(1)
    deadline = time.monotonic() + DEADLINE_S
    while True:  # the threads may spin for a moment after the run
        cpu_s, wall_s = time.process_time(), time.monotonic()
        threading.Event().wait(0.5)
        share = (time.process_time() - cpu_s) / (time.monotonic() - wall_s)
        if share < 0.01:
            return
        assert time.monotonic() < deadline, f"an idle pool uses {share:.3f} of a core"


def test_held_threads_stay_held_until_they_are_let_go() -> None:
    pool = native.Pool(3)
    pool.hold(2)
    assert (pool.num_threads, pool.num_held) == (3, 2)
    pool.hold(0)
    assert pool.num_held == 0
    with pytest.raises(ValueError, match="cannot hold 3 of 3 threads; at least one must go on"):
        pool.hold(3)


@pytest.mark.parametrize("num_threads", [1, 2, 9, 17])
def test_every_item_is_done_once_whatever_threads_are_held(num_threads: int) -> None:
    pool = native.Pool(num_threads)
    rng = random.Random(num_threads)
    for _ in range(2000):
        pool.hold(rng.randrange(num_threads))
        num_items, grain = rng.randrange(50), rng.randrange(1, 8)
        done: list[int] = []
        pool.parallel_for(num_items, grain, lambda begin, end: done.extend(range(begin, end)))  # noqa: B023
        assert sorted(done) == list(range(num_items))


def test_a_thread_that_is_stuck_holds_up_one_part_alone() -> None:
    num_items = 40
    driver = threading.get_ident()
    done = dict.fromkeys([driver, 0], 0)
    stuck, rest_done = threading.Event(), threading.Event()

    def part(begin: int, end: int) -> None:
        by_driver = threading.get_ident() == driver
        if by_driver:
            assert stuck.wait(DEADLINE_S)
        else:
            stuck.set()
            assert rest_done.wait(DEADLINE_S)
        done[driver if by_driver else 0] += end - begin
        if done[driver] == num_items - 1:
            rest_done.set()

    native.Pool(2).parallel_for(num_items, 1, part)
    assert done == {driver: num_items - 1, 0: 1}


def test_sleeping_threads_are_woken_for_every_loop() -> None:
    pool = native.Pool(3)
    meeting = threading.Barrier(3)
    for pause_s in (0.0, 0.05, 0.001, 0.05):
        threading.Event().wait(pause_s)
        pool.parallel_for(3, 1, lambda _begin, _end: meeting.wait(DEADLINE_S))


@pytest.mark.parametrize(("num_threads", "num_held"), [(9, 0), (16, 7), (17, 0), (40, 32)])
def test_as_many_parts_as_threads_run_at_the_same_time(num_threads: int, num_held: int) -> None:
    pool = native.Pool(num_threads)
    pool.hold(num_held)
    num_active = num_threads - num_held
    meeting = threading.Barrier(num_active)
    pool.parallel_for(num_active, 1, lambda _begin, _end: meeting.wait(DEADLINE_S))


def test_an_error_in_a_loop_is_raised_when_all_items_are_done() -> None:
    done: list[int] = []

    def part(begin: int, _end: int) -> None:
        done.append(begin)
        if begin == 3:
            raise KeyError("three")

    with pytest.raises(KeyError, match="three"):
        native.Pool(3).parallel_for(8, 1, part)
    assert sorted(done) == list(range(8))


@pytest.mark.parametrize("num_threads", [0, 5000])
def test_a_pool_of_no_or_too_many_threads_is_refused(num_threads: int) -> None:
    with pytest.raises(ValueError, match=f"a pool of {num_threads} threads was asked for"):
        native.Pool(num_threads)


def test_a_run_lets_other_python_threads_work() -> None:
    rig, _ = busy_card()
    counts = [0]
    running = threading.Event()
    running.set()

    def count() -> None:
        while running.is_set():
            counts[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = counts[0]
        rig.run(64)
        assert counts[0] > before
    finally:
        running.clear()
        thread.join()


def test_an_interrupt_ends_a_run_in_progress() -> None:
    rig, _ = busy_card()
    started_s = time.monotonic()
    rig.run(64)
    whole_s = time.monotonic() - started_s
    timer = threading.Timer(whole_s / 10, rig.program.interrupt)
    timer.start()
    with pytest.raises(native.Interrupted):
        rig.run(64)
    timer.join()
    rig.run(1)


def test_memory_is_counted_by_use_and_given_back() -> None:
    card = native.HostCard(native.Pool(1), "portable")
    first, second = card.allocate("slots", 1000), card.allocate("slots", 24)
    other = card.allocate("tables", 7)
    assert card.bytes_by_use() == {"slots": 1024, "tables": 7}
    del first, other
    assert card.bytes_by_use() == {"slots": 24}
    assert (second.bytes() == 0).all()


def test_memory_outlives_its_card_while_it_is_looked_at() -> None:
    card = native.HostCard(native.Pool(1), "portable")
    data = card.allocate("anything", 64).bytes()
    data[:] = 7
    del card
    assert (data == 7).all()


def test_a_copy_waits_for_the_command_it_comes_after() -> None:
    card = native.HostCard(native.Pool(1), "portable")
    source, target = card.allocate("source", 4096), card.allocate("target", 4096)
    source.bytes()[:] = 3
    table = native.ExpertTable(1, 1, card.allocate("table", 4), card.allocate("uses", 4))
    table.set_layer(0, source, 4096)
    slot = table.add_slot(target)
    ticket = card.copy(target, source, card.update(table, []))
    card.wait_copied(ticket)
    assert card.copied(ticket)
    assert (target.bytes() == 3).all()
    card.wait(card.update(table, [(0, 0, slot)]))
    assert table.entry(0, 0) == slot


def test_a_slot_of_another_size_cannot_enter_the_table() -> None:
    card = native.HostCard(native.Pool(1), "portable")
    table = native.ExpertTable(1, 2, card.allocate("table", 8), card.allocate("uses", 8))
    table.set_layer(0, card.allocate("blobs", 512), 256)
    slot = table.add_slot(card.allocate("slot", 128))
    with pytest.raises(ValueError, match=f"slot {slot} has 128 bytes, a blob of layer 0 has 256"):
        card.wait(card.update(table, [(0, 1, slot)]))
    with pytest.raises(ValueError, match="there is no expert 2 in layer 0"):
        card.wait(card.update(table, [(0, 2, slot)]))
    assert table.entry(0, 1) == -1


def test_copies_of_different_sizes_are_refused() -> None:
    card = native.HostCard(native.Pool(1), "portable")
    with pytest.raises(ValueError, match="cannot copy 8 bytes to a place of 16"):
        card.copy(card.allocate("a", 16), card.allocate("b", 8), 0)


def test_views_beyond_their_memory_are_refused() -> None:
    card = native.HostCard(native.Pool(1), "portable")
    with pytest.raises(ValueError, match="larger than the view"):
        card.allocate("a", 16).part(8, 9)


def test_two_cards_on_two_threads_do_not_disturb_each_other() -> None:
    results: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = []

    def work() -> None:
        rig = OpRig(8, num_threads=2)
        out = native.RowsMemory(rig.take(8 * 256 * 4), None, 256)
        x = np.random.default_rng(1).standard_normal((8, 256)).astype(np.float32)
        rig.recorder.norm(rig.give(x), rig.give(np.ones(256, np.float32)), 1e-6, native.Rows.all, out)
        for _ in range(50):
            rig.run(8)
        results.append(floats(out.values, 8, 256))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same_bits(*results)


def test_an_instruction_set_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown instruction set 'sse9'"):
        native.HostCard(native.Pool(1), "sse9")


def test_threads_may_be_held_and_let_go_while_runs_go_on() -> None:
    rig = OpRig(8, num_threads=4)
    out = native.RowsMemory(rig.take(8 * 256 * 4), None, 256)
    x = np.random.default_rng(2).standard_normal((8, 256)).astype(np.float32)
    rig.recorder.norm(rig.give(x), rig.give(np.ones(256, np.float32)), 1e-6, native.Rows.all, out)
    rig.run(8)
    expected = floats(out.values, 8, 256)
    going = threading.Event()
    going.set()

    def toggle() -> None:
        held = 0
        while going.is_set():
            held = (held + 1) % 4
            rig.pool.hold(held)

    thread = threading.Thread(target=toggle)
    thread.start()
    try:
        for _ in range(200):
            out.values.bytes()[:] = 0
            rig.run(8)
            assert same_bits(floats(out.values, 8, 256), expected)
    finally:
        going.clear()
        thread.join()


def test_discarded_memory_goes_back_to_the_system() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    num_bytes = 64 << 20
    memory = native.HostCard(native.Pool(1), "portable").allocate("slots", num_bytes)
    whole = resident_bytes()
    memory.discard()
    assert whole - resident_bytes() > 0.9 * num_bytes
    memory.touch()
    assert resident_bytes() > whole - 0.1 * num_bytes
