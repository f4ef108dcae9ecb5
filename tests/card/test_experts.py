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


def test_a_window_of_eight_rows_uses_up_to_eighty_experts(rng: np.random.Generator) -> None:
    shape = Shape(512, 10, 64, 32, "Q4_0", "Q4_0", "Q4_0")
    routing = Routing(normal(rng, 8, 512))
    check(random_layer(shape), normal(rng, 8, 64), routing, Placement(half(512), streamed_ratio=0.5))
    assert len(np.unique(on_host(random_layer(shape), normal(rng, 8, 64), routing).ids)) > 64


@pytest.mark.parametrize("resident", ["all", "half"])
def test_rows_beyond_shared_memory_are_taken_in_passes(resident: str, rng: np.random.Generator) -> None:
    shape = Shape(8, 8, 64, 1024, "Q8_0", "Q8_0", "F16")
    layer = random_layer(shape)
    _, down = plans_of(layer, 8, "H200")
    assert down["held_pairs"] < 64
    check(layer, normal(rng, 8, 64), Routing(normal(rng, 8, 8)), Placement({"all": frozenset(range(8)), "half": half(8)}[resident]))


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
def test_several_layers_post_one_after_the_other(every_block_polls: bool, rng: np.random.Generator) -> None:
    placement = Placement(frozenset({1}), every_block_polls=every_block_polls)
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
    assert (card.posted, card.host_posts) == (1, 0), "a void window asks nobody any more"


def test_a_window_without_a_miss_does_not_need_the_host(rng: np.random.Generator) -> None:
    hidden, routing = normal(rng, 2, 256), Routing(normal(rng, 2, 8))
    placement = Placement(frozenset(), streamed_ratio=1.0)
    card = check(random_layer(SMALL), hidden, routing, placement, num_layers=2)
    assert card.posted == 0


CARDS = {"H200": (132, 232448, 233472), "3090": (82, 101376, 102400), "A100": (108, 166912, 167936)}


def plans_of(layer: Layer, rows: int, card: str) -> tuple[dict[str, int], dict[str, int]]:
    multiprocessors, block_bytes, card_bytes = CARDS[card]
    first, second = native.plan_experts_window(
        num_rows=rows,
        num_experts=layer.shape.experts,
        top_k=layer.shape.top_k,
        gate=layer.gate,
        up=layer.up,
        down=layer.down,
        num_multiprocessors=multiprocessors,
        block_shared_bytes=block_bytes,
        card_shared_bytes=card_bytes,
    )
    return first, second


def matrices_of(shape: Shape) -> Layer:
    """A layer without blobs."""
    kinds = [native.quant_types()[name][0] for name in (shape.gate, shape.up, shape.down)]
    gate = native.BlobMatrix.at(kinds[0], 0, shape.width, shape.hidden)
    up = native.BlobMatrix.at(kinds[1], 1 << 26, shape.width, shape.hidden)
    down = native.BlobMatrix.at(kinds[2], 1 << 27, shape.hidden, shape.width)
    return Layer(shape, np.empty((0, 0), np.uint8), gate, up, down, np.empty(0, np.float32))


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(128, 8, 2048, 768, "Q4_K", "Q4_K", "Q6_K"),
        Shape(512, 10, 2560, 640, "IQ3_S", "IQ3_S", "IQ4_NL"),
        Shape(128, 4, 2880, 2880, "MXFP4", "MXFP4", "MXFP4"),
        Shape(128, 8, 2048, 768, "F16", "F16", "F16"),
    ],
    ids=lambda shape: shape.gate,
)
def test_a_plan_fits_the_card(card: str, rows: int, shape: Shape) -> None:
    multiprocessors, block_bytes, _ = CARDS[card]
    plans = plans_of(matrices_of(shape), rows, card)
    for plan in plans:
        assert plan["rings"] + plan["nbytes"] <= plan["shared_bytes"] <= block_bytes
        assert plan["num_stages"] >= 1 <= plan["num_warps"] <= 16
        assert plan["num_blocks"] <= multiprocessors
    assert plans[1]["held_pairs"] >= rows
    assert plans[1]["block_columns"] * plans[1]["num_blocks"] >= shape.hidden


def test_the_two_kernels_of_a_token_fit_side_by_side() -> None:
    first, second = plans_of(matrices_of(Shape(128, 8, 2048, 768, "Q4_K", "Q4_K", "Q4_K")), 1, "H200")
    assert first["shared_bytes"] + second["shared_bytes"] + 2048 <= CARDS["H200"][2]
    assert (first["num_warps"], second["num_warps"]) == (16, 16)
    assert first["num_stages"] * first["stage_rows"] >= 3, "all that a warp has is under way at once"
    assert second["block_columns"] == 16
