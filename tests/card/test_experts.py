"""gate_up_window and down_window against the host operations: every bit, wherever an expert is computed."""

from __future__ import annotations

import numpy as np
import pytest

from cuda_ext import _native as native
from tests.card.experts_rig import CardResult, Layer, Placement, Routing, Shape, on_card, on_host, random_layer, tiers_of
from tests.op_rig import Floats, same_bits

TIERS = ("own", "streamed", "host")
SMALL = Shape(8, 4, 256, 256, "Q4_K", "Q4_K", "Q6_K")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def normal(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape).astype(np.float32)


def check(layer: Layer, hidden: Floats, routing: Routing, placement: Placement, num_layers: int = 1) -> CardResult:
    """Bits, uses and tiers of a window on the card."""
    host, card = on_host(layer, hidden, routing, num_layers), on_card(layer, hidden, routing, placement, num_layers)
    tiers = tiers_of(host.ids, placement)
    assert np.isfinite(host.hidden).all()
    assert same_bits(card.hidden, host.hidden)
    assert (card.uses == num_layers * np.bincount(host.ids.reshape(-1), minlength=layer.shape.experts)).all()
    assert card.tier_rows[: len(TIERS)].tolist() == [num_layers * getattr(tiers, tier) for tier in TIERS]
    assert card.posted == card.host_posts == (num_layers if tiers.host else 0)
    assert card.host_rows == num_layers * tiers.host
    assert not card.voided
    return card


def half(experts: int) -> frozenset[int]:
    return frozenset(np.random.default_rng(3).permutation(experts)[: experts // 2].tolist())


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("resident", ["all", "half", "none"])
def test_a_window_has_the_hosts_bits_wherever_its_experts_are(rows: int, resident: str, rng: np.random.Generator) -> None:
    experts = {"all": frozenset(range(8)), "half": half(8), "none": frozenset()}[resident]
    layer = random_layer(SMALL)
    check(layer, normal(rng, rows, 256), Routing(normal(rng, rows, 8)), Placement(frozenset(map(int, experts))))


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("arena_on_card", [True, False])
def test_a_streamed_share_is_read_from_the_arena(rows: int, ratio: float, arena_on_card: bool, rng: np.random.Generator) -> None:
    placement = Placement(frozenset({2, 5}), streamed_ratio=ratio, arena_on_card=arena_on_card)
    check(random_layer(SMALL), normal(rng, rows, 256), Routing(normal(rng, rows, 8)), placement)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(8, 1, 256, 640, "IQ3_S", "IQ3_S", "IQ4_NL"),
        Shape(8, 4, 256, 768, "Q4_K", "Q4_K", "Q6_K", fused=True),
        Shape(8, 2, 288, 96, "MXFP4", "MXFP4", "MXFP4"),
        Shape(8, 3, 64, 96, "F16", "F16", "F16"),
        Shape(8, 3, 256, 64, "F32", "Q4_K", "Q8_0"),
        Shape(8, 3, 256, 64, "Q6_K", "IQ3_XXS", "BF16"),
        Shape(128, 8, 64, 32, "Q8_0", "Q8_0", "Q8_0"),
        Shape(512, 10, 64, 32, "Q4_0", "Q4_0", "Q4_0"),
        Shape(33, 5, 96, 32, "Q5_0", "Q5_1", "Q8_0"),
        Shape(1, 1, 64, 32, "Q8_0", "Q8_0", "Q8_0"),
    ],
    ids=lambda shape: f"{shape.gate}-{shape.up}-{shape.down}-{shape.experts}x{shape.width}",
)
@pytest.mark.parametrize("rows", [1, 5])
def test_a_window_of_any_shape_has_the_hosts_bits(shape: Shape, rows: int, rng: np.random.Generator) -> None:
    placement = Placement(half(shape.experts), streamed_ratio=0.5)
    check(random_layer(shape), normal(rng, rows, shape.hidden), Routing(normal(rng, rows, shape.experts)), placement)


@pytest.mark.parametrize("gating", [native.Gating.softmax, native.Gating.sigmoid])
@pytest.mark.parametrize("renormalise", [True, False])
def test_weights_follow_the_gating(gating: native.Gating, renormalise: bool, rng: np.random.Generator) -> None:
    routing = Routing(3.0 * normal(rng, 2, 8), gating, renormalise, scale=1.5)
    check(random_layer(SMALL), normal(rng, 2, 256), routing, Placement(half(8)))


def test_equal_logits_go_to_the_lower_expert(rng: np.random.Generator) -> None:
    shape = Shape(128, 8, 64, 32, "Q8_0", "Q8_0", "Q8_0")
    logits = rng.choice(np.array([0.0, -0.0, 1.0, -3.0, 1e-42], np.float32), (3, 128))
    check(random_layer(shape), normal(rng, 3, 64), Routing(logits), Placement(half(128)))


def test_rows_that_agree_share_an_expert(rng: np.random.Generator) -> None:
    logits = np.repeat(normal(rng, 1, 8), 8, 0)
    card = check(random_layer(SMALL), normal(rng, 8, 256), Routing(logits), Placement(half(8)))
    assert sorted(card.uses.tolist()) == [0] * 4 + [8] * 4


@pytest.mark.parametrize("every_block_polls", [False, True])
@pytest.mark.parametrize("hidden_is_fresh", [False, True])
def test_several_layers_post_one_after_the_other(every_block_polls: bool, hidden_is_fresh: bool, rng: np.random.Generator) -> None:
    placement = Placement(frozenset({1}), every_block_polls=every_block_polls, hidden_is_fresh=hidden_is_fresh)
    check(random_layer(SMALL), normal(rng, 3, 256), Routing(normal(rng, 3, 8)), placement, num_layers=4)


@pytest.mark.parametrize(("num_threads", "held"), [(1, 0), (3, 0), (3, 2)])
def test_any_number_of_host_threads_answers(num_threads: int, held: int, rng: np.random.Generator) -> None:
    placement = Placement(frozenset(), num_threads=num_threads, held=held)
    check(random_layer(SMALL), normal(rng, 2, 256), Routing(normal(rng, 2, 8)), placement, num_layers=2)


@pytest.mark.parametrize("every_block_polls", [False, True])
def test_an_aborted_window_ends_and_is_void(every_block_polls: bool, rng: np.random.Generator) -> None:
    placement = Placement(frozenset(), every_block_polls=every_block_polls, answered=False)
    card = on_card(random_layer(SMALL), normal(rng, 2, 256), Routing(normal(rng, 2, 8)), placement, num_layers=3)
    assert card.voided
    assert (card.posted, card.host_posts) == (3, 0)


def test_a_window_without_a_miss_does_not_need_the_host(rng: np.random.Generator) -> None:
    hidden, routing = normal(rng, 2, 256), Routing(normal(rng, 2, 8))
    placement = Placement(frozenset(), streamed_ratio=1.0)
    card = check(random_layer(SMALL), hidden, routing, placement, num_layers=2)
    assert card.posted == 0


CARDS = {"H200": (132, 232448, 233472), "3090": (82, 101376, 102400), "A100": (108, 166912, 167936)}


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize(
    ("hidden", "width", "top_k", "kind"), [(2048, 768, 8, "Q4_K"), (2560, 640, 10, "Q8_0"), (2880, 2880, 4, "MXFP4"), (2048, 768, 8, "F16")]
)
def test_a_plan_fits_the_card(card: str, rows: int, hidden: int, width: int, top_k: int, kind: str) -> None:
    multiprocessors, block_bytes, card_bytes = CARDS[card]
    type_id = native.quant_types()[kind][0]
    gate = native.BlobMatrix.at(type_id, 0, width, hidden)
    up = native.BlobMatrix.at(type_id, 1 << 26, width, hidden)
    down = native.BlobMatrix.at(native.quant_types()["Q8_0"][0], 1 << 27, hidden, width)
    plans = native.plan_experts_window(
        num_rows=rows,
        num_experts=128,
        top_k=top_k,
        gate=gate,
        up=up,
        down=down,
        num_multiprocessors=multiprocessors,
        block_shared_bytes=block_bytes,
        card_shared_bytes=card_bytes,
    )
    for plan in plans:
        assert plan["shared_bytes"] <= block_bytes
        assert plan["shared_bytes"] >= plan["rings"] + plan["nbytes"]
        assert plan["num_stages"] >= 1 <= plan["num_warps"] <= 8
        assert plan["num_blocks"] <= multiprocessors
    assert plans[1]["held_pairs"] >= rows
    assert plans[1]["block_columns"] * plans[1]["num_blocks"] >= hidden


def test_the_two_kernels_of_a_token_fit_side_by_side() -> None:
    multiprocessors, block_bytes, card_bytes = CARDS["H200"]
    type_id = native.quant_types()["Q4_K"][0]
    first, second = native.plan_experts_window(
        num_rows=1,
        num_experts=128,
        top_k=8,
        gate=native.BlobMatrix.at(type_id, 0, 768, 2048),
        up=native.BlobMatrix.at(type_id, 1 << 21, 768, 2048),
        down=native.BlobMatrix.at(type_id, 1 << 22, 2048, 768),
        num_multiprocessors=multiprocessors,
        block_shared_bytes=block_bytes,
        card_shared_bytes=card_bytes,
    )
    assert first["shared_bytes"] + second["shared_bytes"] + 2048 <= card_bytes
    assert (first["num_warps"], second["num_warps"]) == (8, 8)
    assert first["num_stages"] * first["stage_rows"] >= 4
    assert second["block_columns"] == 16
