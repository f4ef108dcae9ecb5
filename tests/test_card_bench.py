"""The benchmark of a card: caches are simulated rightly, routers are used as they are meant to be, and tables hold every result."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.card_bench.hits import clairvoyant_hits, lru_hits
from scripts.card_bench.limits import Bandwidths, decode_limit, prompt_limit
from scripts.card_bench.page import BEGIN, END, write_tables
from scripts.host_bench.model import BenchModel, qwen3_shape
from scripts.host_bench.routing import Routing, expected_uses, router_rows

USES = st.lists(st.integers(0, 5), max_size=12)


def most_hits(uses: list[int], num_slots: int, held: list[int]) -> int:
    """The best of all ways to keep or not to keep, tried one after the other."""

    @cache
    def best(index: int, kept: frozenset[int]) -> int:
        if index == len(uses):
            return 0
        use = uses[index]
        if use in kept:
            return 1 + best(index + 1, kept)
        after = best(index + 1, kept)
        if len(kept) < num_slots:
            return max(after, best(index + 1, kept | {use}))
        return max([after, *(best(index + 1, kept - {victim} | {use}) for victim in kept)])

    return best(0, frozenset(held[:num_slots]))


@given(USES, st.integers(0, 3), st.permutations(range(6)))
def test_the_clairvoyant_cache_is_the_best_there_is(uses: list[int], num_slots: int, held: list[int]) -> None:
    assert clairvoyant_hits(uses, num_slots, held) * len(uses) == pytest.approx(most_hits(uses, num_slots, held))


@given(USES, st.integers(0, 3))
def test_lru_keeps_what_was_used_last(uses: list[int], num_slots: int) -> None:
    hits = 0
    for index, use in enumerate(uses):
        latest = list(dict.fromkeys(reversed(uses[:index])))[:num_slots]
        hits += use in latest
    assert lru_hits(uses, num_slots) * len(uses) == pytest.approx(hits)


@pytest.mark.parametrize("zipf", [0.0, 0.5, 1.0, 2.0])
def test_expected_uses_add_up_to_the_experts_of_a_token(zipf: float) -> None:
    uses = expected_uses(128, 8, zipf)
    assert uses.sum() == pytest.approx(8)
    assert (uses <= 0.95 + 1e-9).all()
    assert (np.diff(uses) <= 1e-12).all()


@pytest.mark.parametrize(("zipf", "mean"), [(0.0, 0.0), (0.0, 0.7), (1.0, 0.7), (1.0, -0.5)])
def test_routers_are_used_as_expected(zipf: float, mean: float) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((4000, 512)) * np.sqrt(1 - mean**2) + mean
    router = router_rows(rng.standard_normal((64, 512)).astype(np.float32), 8, Routing(zipf), mean, rng)
    chosen = np.argsort(-(rows @ router.T), axis=1)[:, :8]
    found = np.sort(np.bincount(chosen.ravel(), minlength=64) / len(rows))[::-1]
    assert np.abs(found - expected_uses(64, 8, zipf)).max() < 0.08


def test_a_skew_that_the_embedding_cannot_carry_is_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(SystemExit, match=r"mean of 0\.01"):
        router_rows(np.ones((8, 16), np.float32), 2, Routing(1.0), 0.01, rng)


def test_limits_are_those_of_the_slowest_way() -> None:
    model = BenchModel(Path("m.gguf"), qwen3_shape(48, 4096), "Q4_K", "Q4_K")
    at = Bandwidths()
    assert decode_limit(model, 1, at) == pytest.approx(at.card / model.bytes_per_token)
    assert decode_limit(model, 0, at) == pytest.approx((at.pcie + at.host) / model.expert_bytes_per_token)
    assert prompt_limit(model, 0, 2048, at) == pytest.approx(2048 * at.pcie / model.expert_bytes)


def result(expert_type: str, **others: object) -> dict[str, object]:
    memory = {"planned_by_use": {"expert slots": 1 << 30}, "planned": 2 << 30, "taken": None}
    memory |= {"give_back_s": 0.1, "take_again_s": 0.2, "fill_s": 0.3}
    figures = {"decode": 200.0, "decode_limit": 400.0, "prompts": {"2048": 1000.0}, "prompt_limits": {"2048": 4000.0}}
    times = {"first_token_ms": {"2048": 9.0}, "arena_s": 1.0, "open_s": 2.0, "steps_ms": {"experts": 0.5}}
    hits = {"ours": 0.5, "lru": 0.4, "clairvoyant": 0.6, "swaps": 7}
    names = {"expert_type": expert_type, "resident_ratio": 0.5, "zipf": 0.0, "rows_by_tier": {"own": 3, "host": 1}}
    return names | figures | times | {"memory": memory, "hits": hits, "llama": {"decode": 100.0, "prompts": {"2048": 500.0}}} | others


def test_tables_hold_every_result_and_leave_the_rest_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    even = {"layers": 48, "threads": 16, "zipf": 0.0, "results": [result("Q4_K"), result("IQ3_S", llama=None, steps_ms={})]}
    skewed = {"layers": 48, "threads": 16, "zipf": 1.0, "results": [result("MXFP4", zipf=1.0)]}
    write_tables([even, skewed], page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| Q4_K | 48 | 50% | 200 | 100 | **2.00** | 400 | 50% | own 75%, host 25% |" in text
    assert "| IQ3_S | 48 | 50% | 200 | - | - | 400 |" in text
    assert "| MXFP4 | 48 | 1 | 50.0% | 50.0% | 40.0% | 60.0% | 7 |" in text


def test_tables_tell_other_caches_and_places_apart(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    usual = result("Q4_K", kv_type="f16", decode_after=128, windows_ms={"1": 1.9, "8": 22.6})
    other = result("Q4_K", kv_type="int8", decode_after=16000, hits=None, steps_ms={"router": 0.5})
    write_tables([{"layers": 48, "threads": 16, "zipf": 0.0, "results": [usual, other]}], page)
    text = page.read_text()
    assert "| Q4_K | 48 | 50% | 200 |" in text
    assert "| Q4_K, cache int8, behind 16000 | 48 | 50% | 200 |" in text
    assert "| ms by rows | layers | on the card | 1 | 8 |" in text
    assert "| Q4_K | 48 | 50% | 1.90 | 22.60 |" in text


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    page.write_text("text")
    with pytest.raises(SystemExit, match="lacks the marks"):
        write_tables([], page)
