"""The share of missing experts that a GPU streams: the fastest one is found, for each state of the pair, and trying costs little."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
import pytest

from appliance.engine.streaming import FIRST_PAUSE, FIRST_RATIO, NUM_ROUNDS, RATIOS, ROUND_WINDOWS, StreamedShare

Window = Callable[[float], float]
"""Seconds of a window by its ratio."""


def pool_beside_bus(pool_s: float, bus_s: float) -> Window:
    """Both work at once; the slower one is waited for."""
    return lambda ratio: 1e-3 + max((1 - ratio) * pool_s, ratio * bus_s)


def run(share: StreamedShare, window: Window, num: int, situation: Hashable = "alone", noise: float = 0.0, seed: int = 0) -> list[float]:
    """The seconds of so many windows."""
    dice = np.random.default_rng(seed)
    seconds = []
    for _ in range(num):
        took_s = window(share.begin_window(situation)) * (1 + noise * dice.standard_normal())
        share.end_window(took_s)
        seconds.append(took_s)
    return seconds


@pytest.mark.parametrize(
    ("pool_s", "bus_s", "best"),
    [(1e-2, 1e-2, 0.5), (1e-2, 1.8e-2, 0.35), (1e-2, 1.0, 0.0), (1.0, 1e-2, 1.0), (3e-2, 1e-2, 0.75)],
)
def test_the_share_whose_windows_are_fastest_is_used(pool_s: float, bus_s: float, best: float) -> None:
    share = StreamedShare()
    run(share, pool_beside_bus(pool_s, bus_s), 200)
    assert share.begin_window("alone") == best
    assert share.usual == best


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_a_tenth_does_not_hide_a_share_that_is_much_better(seed: int) -> None:
    share, window = StreamedShare(), pool_beside_bus(2e-2, 2e-2)
    run(share, window, 2000, noise=0.1, seed=seed)
    assert window(share.usual) < 1.35 * window(0.5)


def test_every_state_of_the_pair_has_a_share_of_its_own() -> None:
    share = StreamedShare()
    fast_pool, slow_pool = pool_beside_bus(1e-3, 1e-1), pool_beside_bus(1e-1, 1e-1)
    run(share, fast_pool, 200, situation="all threads")
    run(share, slow_pool, 200, situation="half of them")
    assert [share.begin_window(situation) for situation in ("all threads", "half of them", "all threads")] == [0.0, 0.5, 0.0]


def test_a_new_state_begins_with_what_the_last_one_found() -> None:
    share = StreamedShare()
    run(share, pool_beside_bus(1.0, 1e-2), 200, situation="before")
    assert share.begin_window("after") == 1.0


def test_what_was_the_fastest_is_left_when_it_is_no_more() -> None:
    share = StreamedShare()
    run(share, pool_beside_bus(1e-3, 1e-1), 1000)
    assert share.usual == 0.0
    run(share, pool_beside_bus(1e-1, 1e-3), 5000)
    assert share.usual == 1.0


def test_trying_becomes_rare() -> None:
    share, window = StreamedShare(), pool_beside_bus(1e-2, 1e-2)
    seconds = run(share, window, 50_000)
    assert seconds[0] == window(FIRST_RATIO)
    assert sum(seconds[-20_000:]) < 1.02 * 20_000 * window(0.5)


def test_a_survey_with_void_windows_changes_nothing_and_is_made_again() -> None:
    share, window = StreamedShare(), pool_beside_bus(1.0, 1e-3)
    for _ in range(100):
        share.begin_window("alone")  # and no end
    assert share.usual == FIRST_RATIO
    run(share, window, 1000)
    assert share.usual == 1.0


def test_a_wanted_share_is_never_left() -> None:
    share = StreamedShare(0.4)
    assert {share.begin_window("alone") for _ in range(500)} == {0.4}
    assert share.usual == 0.4


def test_a_survey_tries_what_is_next_to_the_share_in_use() -> None:
    share = StreamedShare()
    tried = {share.begin_window("alone") for _ in range(100)}
    place = RATIOS.index(FIRST_RATIO)
    assert tried == set(RATIOS[place - 1 : place + 2])


@pytest.mark.parametrize("bus_s", [2e-2, 3e-2, 6e-2])
def test_the_first_answer_is_hardly_slower_for_what_is_tried_in_it(bus_s: float) -> None:
    window = pool_beside_bus(1e-2, bus_s)
    seconds = run(StreamedShare(), window, 160)
    assert sum(seconds) < 1.15 * 160 * min(window(ratio) for ratio in RATIOS)


@pytest.mark.parametrize("step", range(1, 25))
@pytest.mark.parametrize("factor", [0.5, 0.8, 1.25, 2.0])
def test_windows_that_become_faster_or_slower_within_a_survey_do_not_make_another_share_win(step: int, factor: float) -> None:
    share, window = StreamedShare(), pool_beside_bus(1e-2, 4e-2)
    run(share, window, FIRST_PAUSE)
    run(share, window, step)
    run(share, lambda ratio: factor * window(ratio), 30 - step)
    assert share.usual == FIRST_RATIO


@pytest.mark.parametrize("begun", range(1, 24))
def test_a_survey_that_another_state_interrupts_is_forgotten(begun: int) -> None:
    share, window = StreamedShare(), pool_beside_bus(1e-2, 4e-2)
    run(share, window, FIRST_PAUSE)
    run(share, lambda ratio: 3 * window(ratio), begun)
    run(share, window, 5, situation="with another")
    run(share, window, FIRST_PAUSE + 3 * NUM_ROUNDS * ROUND_WINDOWS)
    assert share.begin_window("alone") == FIRST_RATIO


def test_a_share_behind_others_that_are_no_better_is_found_in_the_end() -> None:
    share = StreamedShare()
    run(share, lambda ratio: {0.0: 0.7, 0.2: 1.0, 0.35: 1.0}.get(ratio, 1.1), 3000)
    assert share.usual == 0.0


def test_a_window_that_is_left_out_is_not_counted() -> None:
    share, window = StreamedShare(), pool_beside_bus(1.0, 1e-3)
    for _ in range(100):
        ratio = share.begin_window("alone")
        share.leave_out()
        share.end_window(window(ratio))
    assert share.usual == FIRST_RATIO
