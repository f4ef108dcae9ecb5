"""Products of a window on the card: several matrices, norms, residuals, cards of every size; and how the work is cut."""

from __future__ import annotations

import numpy as np
import pytest

from cuda_ext import _native as native
from tests.op_rig import Floats, OpRig, floats, same_bits
from tests.quant_rig import Bytes, Rng, kind_named, random_blocks, rows_of

EPS = 1e-6
H200 = (132, 227 * 1024, 228 * 1024)  # multiprocessors, shared memory of a block, of a multiprocessor
SMALL = (4, 99 * 1024, 100 * 1024)
CARDS = (H200, SMALL)
GROUP_BYTES = 320


@pytest.fixture
def rng() -> Rng:
    return np.random.default_rng(12)


def normal(rng: Rng, *shape: int) -> Floats:
    return rng.standard_normal(shape).astype(np.float32)


def matrices(rng: Rng, names: tuple[str, ...], rows: tuple[int, ...], columns: int) -> tuple[list[int], list[Bytes]]:
    kinds = [kind_named(name) for name in names]
    weights = [rows_of(random_blocks, kind, num, columns, rng) for kind, num in zip(kinds, rows, strict=True)]
    return [kind.type_id for kind in kinds], weights


def rows_memory(rig: OpRig, num_rows: int, width: int) -> native.RowsMemory:
    groups = -(-width // 256) * GROUP_BYTES
    return native.RowsMemory(rig.take(4 * num_rows * width), rig.take(num_rows * groups) if width % 32 == 0 else None, width)


def on_host(types: list[int], weights: list[Bytes], x: Floats, gamma: Floats | None, residuals: list[Floats | None]) -> list[Floats]:
    """By ops/norm.h and ops/matmul.h."""
    num_rows, width = x.shape
    rig = OpRig(num_rows)
    memory = rows_memory(rig, num_rows, width)
    if gamma is None:
        memory.values.bytes()[: x.nbytes] = x.view(np.uint8).reshape(-1)
        rig.recorder.quantise(memory)
    else:
        rig.recorder.norm(rig.give(x), rig.give(gamma), EPS, native.Rows.all, memory)
    outs = [rig.take(4 * num_rows * len(rows)) for rows in weights]
    products = [
        native.Product(native.Matrix.at(rig.give(rows), type_id, len(rows), width), out, None if residual is None else rig.give(residual))
        for type_id, rows, out, residual in zip(types, weights, outs, residuals, strict=True)
    ]
    rig.recorder.matmul(products, memory, native.Rows.all)
    rig.run(num_rows)
    return [floats(out, num_rows, len(rows)) for out, rows in zip(outs, weights, strict=True)]


def check(card: list[Floats], host: list[Floats]) -> None:
    assert all(np.isfinite(out).all() for out in host)
    assert [same_bits(a, b) for a, b in zip(card, host, strict=True)] == [True] * len(host)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 8])
@pytest.mark.parametrize(
    ("names", "rows", "columns"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), (160, 33, 32), 2048),
        (("IQ3_S", "IQ2_S", "IQ3_S"), (40, 8, 8), 768),
        (("Q8_0", "F16"), (50, 17), 640),
        (("F32",), (128,), 1024),
        (("Q4_0", "IQ1_S"), (3, 2), 256),
        (("IQ2_S", "BF16", "IQ2_XXS"), (9, 5, 7), 768),
        (("IQ1_M",), (70,), 2304),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_products_of_a_norm(
    card: tuple[int, int, int], num_rows: int, names: tuple[str, ...], rows: tuple[int, ...], columns: int, rng: Rng
) -> None:
    types, weights = matrices(rng, names, rows, columns)
    x, gamma = normal(rng, num_rows, columns) * np.float32(3), 1 + normal(rng, columns) / np.float32(4)
    x[0, :32] = 0
    host = on_host(types, weights, x, gamma, [None] * len(types))
    check(native.card_norm_matmul_window(types, weights, x, gamma, EPS, card), host)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("num_rows", [1, 3, 8])
@pytest.mark.parametrize(("name", "columns"), [("Q4_K", 4096), ("Q5_0", 640), ("MXFP4", 2880), ("BF16", 544)])
def test_residuals_are_added_last(card: tuple[int, int, int], num_rows: int, name: str, columns: int, rng: Rng) -> None:
    types, weights = matrices(rng, (name, name), (70, 35), columns)
    x, residual = normal(rng, num_rows, columns), normal(rng, num_rows, 70) * np.float32(100)
    host = on_host(types, weights, x, None, [residual, None])
    check(native.card_matmul_window(types, weights, x, [residual, None], card), host)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(
    ("name", "rows", "columns", "experts"),
    [("Q4_K", 256, 512, 128), ("Q8_0", 2112, 64, 33), ("IQ3_S", 96, 256, 512), ("F16", 16, 64, 7), ("Q6_K", 4256, 256, 8)],
)
def test_a_product_goes_on_to_a_router(card: tuple[int, int, int], name: str, rows: int, columns: int, experts: int, rng: Rng) -> None:
    """Whole groups lie in a block, whether there are fewer of them than blocks or many."""
    [type_id], [weights] = matrices(rng, (name,), (rows,), columns)
    x, residual, gamma = normal(rng, 1, columns), normal(rng, 1, rows) * np.float32(10), normal(rng, rows)
    router = normal(rng, rows, experts)
    hidden = on_host([type_id], [weights], x, None, [residual])[0]
    rig = OpRig(1)
    sums = rig.take(8 * experts)
    matrix = native.Matrix.at(rig.give(router), 0, rows, experts)
    rig.recorder.router(rig.give(hidden), rig.give(gamma), matrix, sums)
    rig.run(1)
    got, card_sums = native.card_matmul_router(type_id, weights, x, residual, gamma, router, card)
    assert same_bits(got, hidden)
    assert (card_sums == sums.bytes().view(np.int64)).all()


def test_rows_with_nothing_in_them_stay_finite(rng: Rng) -> None:
    types, weights = matrices(rng, ("Q4_K",), (24,), 512)
    x = np.zeros((2, 512), np.float32)
    x[1, 5] = 1e-38
    gamma = np.ones(512, np.float32)
    check(native.card_norm_matmul_window(types, weights, x, gamma, EPS, SMALL), on_host(types, weights, x, gamma, [None]))


def test_a_head_longer_than_its_ring_goes_round_it(rng: Rng) -> None:
    types, weights = matrices(rng, ("Q6_K",), (900,), 1024)
    x, gamma = normal(rng, 2, 1024), np.ones(1024, np.float32)
    check(
        native.card_norm_matmul_window(types, weights, x, gamma, EPS, (2, 64 * 1024, 100 * 1024)), on_host(types, weights, x, gamma, [None])
    )


def test_windows_too_wide_for_shared_memory_take_several_launches(rng: Rng) -> None:
    types, weights = matrices(rng, ("F32",), (40,), 4096)
    x, gamma = normal(rng, 8, 4096), np.ones(4096, np.float32)
    plan = native.plan_products(types, [40], 4096, 8, False, SMALL)
    assert 1 <= plan["launch_rows"] < 8
    check(native.card_norm_matmul_window(types, weights, x, gamma, EPS, SMALL), on_host(types, weights, x, gamma, [None]))


PLANS = [
    ((("Q4_K", 4096), ("Q4_K", 512), ("Q6_K", 512)), 2048),
    ((("F32", 128),), 2048),
    ((("Q6_K", 151_936),), 2048),
    ((("Q8_0", 201_088),), 2880),
    ((("Q4_K", 2048),), 4096),
    ((("IQ3_S", 7168),), 16_384),
    ((("F16", 7168),), 16_384),
    ((("MXFP4", 33),), 32),
]


@pytest.mark.parametrize("card", [*CARDS, (108, 163 * 1024, 164 * 1024)])
@pytest.mark.parametrize("num_rows", [1, 4, 8])
@pytest.mark.parametrize(("parts", "columns"), PLANS, ids=str)
def test_plans_fit_the_card(card: tuple[int, int, int], num_rows: int, parts: tuple[tuple[str, int], ...], columns: int) -> None:
    kinds = [kind_named(name) for name, _ in parts]
    plan = native.plan_products([kind.type_id for kind in kinds], [rows for _, rows in parts], columns, num_rows, num_rows == 1, card)
    longest = max(columns // kind.block_values * kind.block_bytes for kind in kinds)
    assert plan["shared_bytes"] <= card[1]
    assert plan["num_blocks"] == card[0]
    assert 1 <= plan["launch_rows"] <= num_rows
    assert plan["num_stages"] >= 1
    assert plan["stage_rows"] * longest < plan["stage_bytes"]


def test_one_row_keeps_an_h200_busy() -> None:
    """About 22 KB have to be under way per multiprocessor: all of a warp's rows, or the half of its ring that is not computed."""
    for parts, columns in PLANS[:5]:
        kinds, rows = [kind_named(name) for name, _ in parts], [rows for _, rows in parts]
        plan = native.plan_products([kind.type_id for kind in kinds], rows, columns, 1, True, H200)
        warps = plan["num_warps"]
        assert warps == min(16, -(-sum(rows) // H200[0])), "each block has some rows, each warp of a large product"
        warp_rows = -(-sum(rows) // (H200[0] * warps))
        assert warp_rows > 16 or plan["shared_bytes"] <= 0.48 * H200[2], "the next kernel's blocks need room"
        if plan["num_stages"] * plan["stage_rows"] < warp_rows:
            shortest = min(columns // kind.block_values * kind.block_bytes for kind in kinds)
            assert warps * plan["num_stages"] // 2 * plan["stage_rows"] * shortest >= 22 * 1024


def test_products_that_do_not_fit_are_refused() -> None:
    q4_k, q8_0 = kind_named("Q4_K").type_id, kind_named("Q8_0").type_id
    with pytest.raises(ValueError, match="a window of 9 rows"):
        native.plan_products([q4_k], [32], 256, 9, True, H200)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        native.plan_products([q8_0], [32], 65_536, 1, True, SMALL)
