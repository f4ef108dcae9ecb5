"""The whole engine on a CUDA card: decode windows have the bits of a host card wherever the experts lie; prompts are as close as
their arithmetic allows, and do not depend on placement either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from appliance.engine.model_runner import ModelRunner
from appliance.engine.streaming import FIRST_PAUSE, NUM_ROUNDS, ROUND_WINDOWS
from appliance.memory.policy import AlwaysSwap, blob_bytes_table
from appliance.memory.workspace import KvType
from cuda_ext import _native as native
from tests.arena_rig import shm_folder
from tests.gguf_writing import ModelShape
from tests.random_models import RandomModel, open_arena, open_runner, prefill, write_random_model

Logits = NDArray[np.float32]
SHAPE = ModelShape(layers=3, hidden=256, heads=4, kv_heads=2, head_dim=64, experts=8, top_k=3, width=96, vocab=320, context=768)
TYPES = {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q8_0", "attn_q": "Q4_K", "attn_v": "Q6_K"}
NUM_EXPERTS = SHAPE.layers * SHAPE.experts
RNG = np.random.default_rng(7)
PROMPT = RNG.integers(0, SHAPE.vocab, 40).tolist()
DECODED = RNG.integers(0, SHAPE.vocab, 24).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return write_random_model(tmp_path_factory.mktemp("model") / "m.gguf", SHAPE, types=TYPES)


@pytest.fixture(scope="module")
def arena_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("arena")


def one_by_one(runner: ModelRunner, ids: list[int], position: int = 0) -> Logits:
    """Logits of windows of one row each."""
    rows = []
    for offset, token in enumerate(ids):
        rows.append(runner.run([token], position + offset, 1)[-1].values().copy())
        runner.between_windows()
    return np.stack(rows)


@pytest.fixture(scope="module")
def expected(model: RandomModel, arena_dir: Path) -> Logits:
    """Of a host card, every token a window."""
    with open_runner(model, arena_dir, kv_type="f16", max_logits=8) as runner:
        return one_by_one(runner, DECODED)


def open_gpu(model: RandomModel, arena_dir: Path, slots: int, **options: object) -> Iterator[ModelRunner]:
    sizes: dict[str, object] = {"kv_type": "f16", "max_logits": 8, "chunk": 64}
    return open_runner(model, arena_dir, slots=slots, card="cuda:0", **sizes | options)  # type: ignore


@pytest.mark.parametrize("slots", [NUM_EXPERTS, 0, NUM_EXPERTS // 2])
def test_windows_have_the_bits_of_a_host_card(model: RandomModel, arena_dir: Path, expected: Logits, slots: int) -> None:
    with open_gpu(model, arena_dir, slots) as runner:
        assert np.array_equal(one_by_one(runner, DECODED), expected)


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_windows_of_several_rows_have_the_same_bits(model: RandomModel, arena_dir: Path, expected: Logits, rows: int) -> None:
    with open_gpu(model, arena_dir, NUM_EXPERTS // 2) as runner:
        assert np.array_equal(prefill(runner, DECODED, num_logits=rows, chunk=rows), expected)


def test_uses_are_counted_although_nothing_is_swapped(model: RandomModel, arena_dir: Path) -> None:
    """With every expert in a slot they are read once in many windows."""
    with open_gpu(model, arena_dir, NUM_EXPERTS) as runner:
        one_by_one(runner, DECODED)
        prefill(runner, DECODED, num_logits=1)
        runner.close()
        assert runner.cache.total_uses.sum() == 2 * len(DECODED) * SHAPE.layers * SHAPE.top_k


@pytest.mark.parametrize("kv_type", ["f32", "int8"])
def test_every_type_of_cache_has_the_bits_of_a_host_card(model: RandomModel, arena_dir: Path, kv_type: KvType) -> None:
    with open_runner(model, arena_dir, kv_type=kv_type, max_logits=8) as runner:
        expected = one_by_one(runner, DECODED)
    with open_gpu(model, arena_dir, NUM_EXPERTS // 2, kv_type=kv_type) as runner:
        assert np.array_equal(one_by_one(runner, DECODED), expected)
        assert np.array_equal(prefill(runner, DECODED, num_logits=5, chunk=5), expected)


def test_swaps_in_every_window_change_nothing(model: RandomModel, arena_dir: Path, expected: Logits) -> None:
    with open_arena(model, arena_dir) as arena:
        policy = AlwaysSwap(blob_bytes_table(arena.layout))
    with open_gpu(model, arena_dir, NUM_EXPERTS // 2, policy=policy, max_swaps=3) as runner:
        assert np.array_equal(one_by_one(runner, DECODED), expected)
        assert runner.stats()["swaps"] > 0


def test_a_survey_of_streamed_shares_changes_no_bit_and_streams_more_and_less(model: RandomModel, expected: Logits) -> None:
    num_windows = FIRST_PAUSE + 3 * NUM_ROUNDS * ROUND_WINDOWS
    streamed = []
    with shm_folder() as folder, open_gpu(model, folder, 0, streamed_ratio=None) as runner:  # what lies on a disk is not pinned
        for window in range(num_windows):
            before = runner.stats()["rows_by_tier"].get("streamed", 0)
            position = window % len(DECODED)
            assert np.array_equal(one_by_one(runner, [DECODED[position]], position)[0], expected[position])
            streamed.append(runner.stats()["rows_by_tier"].get("streamed", 0) - before)
    assert len(set(streamed)) > 1


def test_a_prompt_does_not_depend_on_where_experts_lie(model: RandomModel, arena_dir: Path) -> None:
    results = []
    for slots in (NUM_EXPERTS, 0, NUM_EXPERTS // 2):
        with open_gpu(model, arena_dir, slots) as runner:
            results.append(prefill(runner, PROMPT, num_logits=8))
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


@pytest.mark.parametrize("kv_type", ["f16", "int8"])
def test_a_prompt_is_close_to_windows(model: RandomModel, arena_dir: Path, kv_type: KvType) -> None:
    with open_runner(model, arena_dir, kv_type=kv_type, max_logits=8) as runner:
        exact = one_by_one(runner, PROMPT)[-8:]
    with open_gpu(model, arena_dir, NUM_EXPERTS, kv_type=kv_type) as runner:
        logits = prefill(runner, PROMPT, num_logits=8)
    assert np.abs(logits - exact).mean() < 0.03 * exact.std()


def test_extremes_of_a_row_are_those_of_its_values(model: RandomModel, arena_dir: Path) -> None:
    with open_gpu(model, arena_dir, 0) as runner:
        row = runner.run(PROMPT, 0, 1)[0]
        values = row.values()
        assert (row.likeliest, row.peak, row.lowest) == (int(values.argmax()), float(values.max()), float(values.min()))


@pytest.mark.parametrize("slots", [0, NUM_EXPERTS])
def test_prompts_and_windows_choose_by_what_they_are_given(model: RandomModel, arena_dir: Path, slots: int) -> None:
    chooser, other = native.Chooser(0.8, 30, 0.9, -8.0), native.Chooser(0.0, 0, 1.0, -np.inf)
    for token in DECODED:
        chooser.change(token, 0.5, 1.2, 0.25)
    with open_gpu(model, arena_dir, slots) as runner:
        row = runner.run(PROMPT, 0, 1, chooser)[0]
        assert row.chosen == chooser.choose(row.values())
        for step, token in enumerate(DECODED[:6]):
            chooser.set_fraction(2**53 * step // 6)
            other.change(token, -100.0, 1.0, 0.0)
            for asked in (chooser, None, other):
                row = runner.run([token], len(PROMPT) + step, 1, asked)[0]
                assert row.chosen == (None if asked is None else asked.choose(row.values()))
            runner.between_windows()


def test_tiers_are_counted(model: RandomModel, arena_dir: Path) -> None:
    with open_gpu(model, arena_dir, 0) as runner:
        one_by_one(runner, DECODED)
        rows = runner.stats()["rows_by_tier"]
        assert rows.get("own", 0) == 0
        assert sum(rows.values()) == len(DECODED) * SHAPE.layers * SHAPE.top_k
