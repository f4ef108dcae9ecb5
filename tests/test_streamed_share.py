"""The share of missing experts that a GPU streams: the fastest one is found, for each state of the pair, and trying costs little."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
import pytest

from appliance.engine.streaming import FIRST_RATIO, RATIOS, StreamedShare

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
    run(share, pool_beside_bus(pool_s, bus_s), 100)
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
    run(share, fast_pool, 100, situation="all threads")
    run(share, slow_pool, 100, situation="half of them")
    assert [share.begin_window(situation) for situation in ("all threads", "half of them", "all threads")] == [0.0, 0.5, 0.0]


def test_a_new_state_begins_with_what_the_last_one_found() -> None:
    share = StreamedShare()
    run(share, pool_beside_bus(1.0, 1e-2), 100, situation="before")
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


def test_surveys_try_every_share() -> None:
    share = StreamedShare()
    tried = {share.begin_window("alone") for _ in range(100)}
    assert tried == set(RATIOS)
