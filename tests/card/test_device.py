"""Each device primitive against a plain formula."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from cuda_ext import _native as native

checks = native.device_checks
emulated_only = pytest.mark.skipif(native.cuda_build != "emulated", reason="undefined on a real card")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def test_int8_tensor_cores_multiply_matrices_in_the_documented_layout(rng: np.random.Generator) -> None:
    a = rng.integers(-128, 128, (16, 32), dtype=np.int8)
    b = rng.integers(-128, 128, (32, 8), dtype=np.int8)
    assert np.array_equal(checks.multiply_s8(a, b), a.astype(np.int32) @ b.astype(np.int32))


def test_half_tensor_cores_and_matrix_loads_agree_with_a_plain_product(rng: np.random.Generator) -> None:
    # Small integers: every sum is exact, whatever the order.
    a = rng.integers(-30, 31, (16, 16)).astype(np.float16)
    b = rng.integers(-30, 31, (16, 16)).astype(np.float16)
    got = checks.multiply_f16(a.view(np.uint16), b.view(np.uint16))
    assert np.array_equal(got, a.astype(np.float32) @ b.astype(np.float32))


def test_warp_operations_give_each_lane_the_value_that_cuda_defines(rng: np.random.Generator) -> None:
    values = rng.integers(-(2**31), 2**31, 32, dtype=np.int32)
    lanes = np.arange(32)
    xor, segment, down, up, total, smallest, largest, ballot = checks.warp_operations(values)
    assert np.array_equal(xor, values[lanes ^ 5])
    assert np.array_equal(segment, values[lanes // 8 * 8 + 3])
    assert np.array_equal(down, values[np.where(lanes + 3 < 32, lanes + 3, lanes)])
    assert np.array_equal(up, values[np.where(lanes >= 3, lanes - 3, lanes)])
    assert set(total) == {values.sum(dtype=np.int32)}
    assert (set(smallest), set(largest)) == ({values.min()}, {values.max()})
    assert set(ballot.view(np.uint32)) == {np.uint32(0xAAAAAAAA)}


@pytest.mark.parametrize("row_bytes", [16, 110, 432, 1000])
@pytest.mark.parametrize("skip", [0, 2, 15])
def test_staged_copies_bring_rows_of_any_size_and_alignment(rng: np.random.Generator, row_bytes: int, skip: int) -> None:
    rows = rng.integers(0, 256, (21, row_bytes), dtype=np.uint8)  # several rounds of both stages, and warps with one row less
    assert np.array_equal(checks.copy_staged(rows, skip), rows)


def test_one_staged_row_leaves_the_other_warps_idle(rng: np.random.Generator) -> None:
    rows = rng.integers(0, 256, (1, 300), dtype=np.uint8)
    assert np.array_equal(checks.copy_staged(rows, 3), rows)


def test_grouped_copies_arrive_one_group_after_the_other(rng: np.random.Generator) -> None:
    rows = rng.integers(0, 256, (9, 32 * 16 + 64), dtype=np.uint8)
    assert np.array_equal(checks.copy_grouped(rows), rows)


@pytest.mark.parametrize("num", [1, 1000])
def test_a_dependent_kernel_sees_what_its_predecessor_wrote(num: int) -> None:
    expected: NDArray[np.int32] = 2 * (5 + (np.arange(num, dtype=np.int32) + 1) % num)
    assert np.array_equal(checks.chain(5, num), expected)


def test_a_captured_graph_with_a_fork_runs_all_its_kernels_at_every_replay() -> None:
    assert list(checks.replay(7)) == [14, 7]


def test_a_kernel_of_a_graph_waits_for_the_answer_of_a_host_thread() -> None:
    assert list(checks.ask_host(77, 3)) == [3 * 77 + 1]


@pytest.mark.parametrize("nbytes", [3 << 20, 99 << 20], ids=["one_segment", "two_segments"])
def test_slots_that_are_given_back_leave_nothing_on_the_card(nbytes: int) -> None:
    card = native.CudaCard(0, native.Pool(1), "portable")
    slots = card.allocate_slots(nbytes, present=False)
    before = card.free_bytes
    slots.touch()
    assert card.free_bytes <= before - nbytes
    slots.discard()
    assert card.free_bytes == before


MISTAKES = {
    "lane_missing": ["lanes of its warp have returned|returned while other lanes", "__shfl_xor_sync"],
    "different_operations": [
        "different operations",
        "threads 0-15 in __reduce_add_sync|threads 0-15 in __shfl_xor_sync",
        "__reduce_add_sync",
    ],
    "barrier_missing": ["no thread can go on", "threads 0-39 in __syncthreads", "threads 40-63 in __shfl_xor_sync"],
    "shared_overrun": ["byte 64 of dynamic shared memory was written"],
    "copy_not_awaited": ["never waited for"],
    "no_prerequisites": ["wait_prerequisites"],
}


@emulated_only
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_a_kernel_is_told_and_does_not_hang(mistake: str) -> None:
    said = checks.make_mistake(mistake)
    for pattern in MISTAKES[mistake]:
        assert any(part in said for part in pattern.split("|")), said


@emulated_only
def test_a_write_to_freed_memory_is_told() -> None:
    assert "something wrote to 256 bytes of card 0 memory after it was freed" in checks.write_after_free()


@emulated_only
def test_an_emulated_card_works_again_after_a_mistake_and_a_reset() -> None:
    assert "shared memory" in checks.make_mistake("shared_overrun")
    assert list(checks.replay(1)) == [2, 1]
