"""A prompt's chunk on a card: half precision, tensor-core products, routing, experts. A row's bits depend on nothing but the row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from appliance.gguf_types import KNOWN_TYPES, GgmlType
from cuda_ext import _native as native
from cuda_ext import reference
from tests.card.experts_rig import Layer, Shape, random_layer, type_named
from tests.gguf_writing import random_rows
from tests.op_rig import Floats, router_sums, same_bits

Bytes = NDArray[np.uint8]
Rng = np.random.Generator

EPS = 1e-6
TOLERANCE = 2e-3
"""Of a product: the error's norm over the norm of the row."""
ROUNDED = 2.0**-11
"""Relative error of a number in half precision."""
TYPES = tuple(sorted(kind.name for kind in KNOWN_TYPES.values() if kind.name in native.quant_types()))


@pytest.fixture
def rng() -> Rng:
    return np.random.default_rng(11)


def normal(rng: Rng, *shape: int, scale: float = 1.0) -> Floats:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def weight_rows(kind: GgmlType, rows: int, columns: int, rng: Rng, scale: float = 0.05) -> Bytes:
    data = np.frombuffer(random_rows(kind, rows * columns, rng, scale), np.uint8)
    return np.ascontiguousarray(data.reshape(rows, -1))


def dequantised(kind: GgmlType, rows: Bytes) -> NDArray[np.float64]:
    return native.dequantise(kind.type_id, rows.reshape(-1)).astype(np.float64).reshape(len(rows), -1)


def product(x: Floats, kind: GgmlType, weights: Bytes, residual: Floats | None = None) -> Floats:
    out: Floats = native.matmul_prompt(x, [(kind.type_id, weights, residual)])[0]
    return out


def worst_row(got: Floats, expected: NDArray[np.float64]) -> float:
    """The largest relative error of a row."""
    errors = np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return float(errors.max())


# ---- half precision ----


@pytest.mark.parametrize("width", [32, 96, 640])
def test_norm_has_the_bits_of_the_host(width: int, rng: Rng) -> None:
    x, gamma = normal(rng, 6, width, scale=3.0), normal(rng, width)
    x[2] *= 1e15
    x[3] *= 1e-30
    (halves, scale), inverse = native.norm_prompt(x, gamma, EPS)
    values = reference.norm(x, gamma, EPS)
    assert same_bits(inverse, np.array([reference.inverse_rms(row, EPS) for row in x]))
    assert (halves.view(np.float16) == (values / scale[:, None]).astype(np.float16)).all()


def test_halves_of_a_row_have_a_power_of_two_for_their_scale(rng: Rng) -> None:
    x = normal(rng, 9, 64) * 10.0 ** np.arange(-24, 30, 6, dtype=np.float32)[:, None]
    halves, scale = native.halve_prompt(x.astype(np.float32))
    mantissa, _ = np.frexp(scale)
    assert (mantissa == 0.5).all()
    largest = np.abs(halves.view(np.float16).astype(np.float32)).max(1)
    assert ((largest >= 2**14) & (largest <= 2**15)).all()
    assert (halves.view(np.float16) == (x / scale[:, None]).astype(np.float16)).all()


def test_rows_that_are_zero_or_not_finite(rng: Rng) -> None:
    x = normal(rng, 4, 32)
    x[0] = 0
    x[1] *= 1e-33
    x[2, 5] = np.inf
    x[3, 31] = np.nan
    halves, scale = native.halve_prompt(x)
    assert (halves == 0).all()
    assert (scale[:2] == 0).all()
    assert np.isnan(scale[2:]).all()


# ---- products ----


@pytest.mark.parametrize("name", TYPES)
def test_weights_of_every_type_decode_to_halves(name: str, rng: Rng) -> None:
    """Products with unit vectors are the decoded weights themselves: scale, minimum and weight are rounded once each."""
    kind, columns = type_named(name), 256
    weights = weight_rows(kind, 8, columns, rng)
    decoded = product(np.eye(columns, dtype=np.float32), kind, weights).T
    exact = dequantised(kind, weights)
    blocks = exact.reshape(8, -1, 32)
    bound = ROUNDED * (blocks.max(2) - blocks.min(2) + 2 * np.abs(blocks).max(2))
    assert (np.abs(decoded - exact) <= bound.repeat(32, 1)).all()
    assert (decoded != 0).any()


@pytest.mark.parametrize(
    ("name", "rows", "weight_count", "columns"),
    [
        ("Q4_K", 9, 136, 768),
        ("Q4_K", 131, 8, 256),
        ("Q6_K", 33, 72, 512),
        ("Q5_K", 16, 64, 256),
        ("IQ3_S", 17, 128, 768),
        ("IQ2_XS", 12, 24, 512),
        ("Q8_0", 40, 200, 288),
        ("Q5_1", 64, 40, 96),
        ("IQ4_NL", 65, 16, 640),
        ("MXFP4", 10, 128, 160),
        ("NVFP4", 9, 16, 192),
        ("Q1_0", 9, 16, 384),
        ("F16", 11, 24, 224),
        ("BF16", 11, 24, 32),
        ("F32", 11, 24, 160),
    ],
)
def test_product_is_near_the_dequantised_one(name: str, rows: int, weight_count: int, columns: int, rng: Rng) -> None:
    kind, x = type_named(name), normal(rng, rows, columns)
    weights = weight_rows(kind, weight_count, columns, rng)
    assert worst_row(product(x, kind, weights), x.astype(np.float64) @ dequantised(kind, weights).T) < TOLERANCE


def test_large_activations_do_not_overflow(rng: Rng) -> None:
    kind, x = type_named("Q4_K"), normal(rng, 9, 256, scale=1e9)
    weights = weight_rows(kind, 8, 256, rng)
    assert worst_row(product(x, kind, weights), x.astype(np.float64) @ dequantised(kind, weights).T) < TOLERANCE


def test_three_matrices_of_different_types_and_a_residual(rng: Rng) -> None:
    kinds, counts, columns = [type_named(name) for name in ("Q4_K", "Q8_0", "IQ4_XS")], (136, 8, 64), 256
    x, residual = normal(rng, 20, columns), normal(rng, 20, 8)
    weights = [weight_rows(kind, count, columns, rng) for kind, count in zip(kinds, counts, strict=True)]
    parts = [(kind.type_id, rows, None) for kind, rows in zip(kinds, weights, strict=True)]
    parts[1] = (*parts[1][:2], residual)
    together = native.matmul_prompt(x, parts)
    for i, (kind, rows) in enumerate(zip(kinds, weights, strict=True)):
        alone = product(x, kind, rows)
        assert same_bits(together[i], alone + residual if i == 1 else alone)


@pytest.mark.parametrize("name", ["Q4_K", "IQ4_NL"])
def test_bits_of_a_row_do_not_depend_on_the_others(name: str, rng: Rng) -> None:
    kind, columns = type_named(name), 256
    weights, x = weight_rows(kind, 72, columns, rng), normal(rng, 150, columns)
    whole = product(x, kind, weights)
    for first, count in ((0, 9), (20, 33), (63, 65), (120, 30)):
        assert same_bits(product(x[first : first + count], kind, weights), whole[first : first + count])
    other = normal(rng, 150, columns, scale=1e6)
    other[77] = x[77]
    assert same_bits(product(other, kind, weights)[77:78], whole[77:78])


@pytest.mark.parametrize(("columns", "weight_count"), [(64, 12), (96, 8)])
def test_matrices_that_do_not_fit_are_refused(columns: int, weight_count: int, rng: Rng) -> None:
    kind = type_named("Q8_0")
    with pytest.raises(ValueError, match="does not go with rows of 64 values"):
        product(normal(rng, 9, 64), kind, weight_rows(kind, weight_count, columns, rng))


@pytest.mark.parametrize("name", TYPES)
def test_tiles_fit_every_card_and_two_of_them_a_large_one(name: str) -> None:
    """A block has at most 99 KiB on the smallest cards; the largest have 228 KiB, of which each block costs one."""
    type_id, small, large = type_named(name).type_id, 99 * 1024, 227 * 1024
    assert native.prompt_shared_bytes(type_id, small) <= small
    assert 2 * (native.prompt_shared_bytes(type_id, large) + 1024) <= 228 * 1024


# ---- routing ----


@pytest.mark.parametrize("is_window", [False, True])
@pytest.mark.parametrize(("rows", "experts", "width"), [(1, 8, 160), (8, 37, 32), (21, 128, 416), (3, 300, 40)])
def test_router_has_the_sums_of_the_host(rows: int, experts: int, width: int, is_window: bool, rng: Rng) -> None:
    x, gamma, weights = normal(rng, rows, width, scale=30.0), normal(rng, width), normal(rng, width, experts)
    x[0, 3] = np.inf
    sums = native.card_router(x, gamma, weights, is_window)
    with np.errstate(invalid="ignore"):
        assert (sums == reference.router(x, gamma, weights)).all()


@dataclass(frozen=True)
class Routing:
    sums: NDArray[np.int64]
    top_k: int
    sigmoid: bool = False
    renormalise: bool = True
    scale: float = 1.0

    def case(self, slots: Sequence[int], blob_bytes: int) -> native.RoutePromptCase:
        return native.RoutePromptCase(
            sums=self.sums,
            inverse=self.inverse,
            slots=np.array(slots, np.int32),
            blob_bytes=blob_bytes,
            top_k=self.top_k,
            gating=native.Gating.sigmoid if self.sigmoid else native.Gating.softmax,
            renormalise=self.renormalise,
            scale=self.scale,
        )

    @property
    def inverse(self) -> Floats:
        return np.linspace(0.5, 2.0, len(self.sums), dtype=np.float32)

    def expected(self) -> tuple[NDArray[np.int64], Floats]:
        how = {"sigmoid": self.sigmoid, "renormalise": self.renormalise, "scale": self.scale}
        ids, weights = reference.route(self.sums, self.inverse, self.top_k, **how)  # type: ignore[arg-type]
        return ids.astype(np.int64), weights


@pytest.mark.parametrize(("rows", "experts", "top_k"), [(9, 8, 8), (40, 37, 4), (70, 130, 8), (12, 600, 10)])
@pytest.mark.parametrize(("sigmoid", "renormalise"), [(False, True), (False, False), (True, False)])
def test_routed_lists_have_the_bits_of_the_host(rows: int, experts: int, top_k: int, sigmoid: bool, renormalise: bool, rng: Rng) -> None:
    sums = router_sums(normal(rng, rows, experts, scale=3.0))
    sums[1, 5] = sums[1, 2] = sums[1].max() + 2**28  # a tie goes to the lower id,
    sums[2] = 2**40 + np.arange(experts)  # and so do sums whose floats are equal
    routing = Routing(sums, top_k, sigmoid, renormalise, 1.5)
    routed, (ids, weights) = native.route_prompt(routing.case([-1] * experts, 256)), routing.expected()
    assert (routed["ids"] == ids).all()
    assert same_bits(routed["weights"], weights)


def test_pairs_are_sorted_by_expert_and_row(rng: Rng) -> None:
    experts, top_k = 20, 3
    routing = Routing(router_sums(normal(rng, 150, experts, scale=3.0)), top_k)
    routed, flat = native.route_prompt(routing.case([-1] * experts, 256)), routing.expected()[0].reshape(-1)
    assert (routed["order"] == np.argsort(flat, kind="stable")).all()
    assert (routed["order"][routed["places"]] == np.arange(150 * top_k)).all()
    counts = np.bincount(flat, minlength=experts)
    assert (routed["counts"] == counts).all()
    assert (routed["firsts"] == np.cumsum(counts) - counts).all()
    assert (routed["uses"] == counts + 7).all()


def test_resident_experts_in_use_are_listed_with_their_tiles(rng: Rng) -> None:
    """One expert has more rows than a tile, one none."""
    experts, rows = 40, 300
    sums = router_sums(normal(rng, rows, experts, scale=3.0))
    sums[:, 3], sums[:, 7] = 50 * 2**28, -50 * 2**28
    slots = [expert // 2 if expert % 2 else -1 for expert in range(experts)]
    routed = native.route_prompt(Routing(sums, 2).case(slots, 512))
    counts, firsts = routed["counts"], routed["firsts"]
    listed = [expert for expert in range(experts) if slots[expert] >= 0 and counts[expert] > 0]
    assert (counts[3], counts[7]) == (rows, 0)
    assert routed["resident"] == [(512 * slots[e], e, firsts[e], counts[e]) for e in listed]
    assert routed["tiles"] == [(i, first) for i, e in enumerate(listed) for first in range(0, counts[e], 128)]
    assert len(routed["tiles"]) <= routed["max_tiles"]
    own = int(counts[listed].sum())
    assert routed["tier_rows"][:2].tolist() == [1000 + own, 1000 + 2 * rows - own]
    assert (routed["tier_rows"][2:] == 1000).all()


@pytest.mark.parametrize(("experts", "top_k"), [(8, 9), (1025, 8), (64, 33), (8, 0)])
def test_lists_that_cannot_be_are_refused(experts: int, top_k: int, rng: Rng) -> None:
    with pytest.raises(ValueError, match=f"cannot route to {top_k} of {experts} experts"):
        native.route_prompt(Routing(router_sums(normal(rng, 9, experts, scale=3.0)), top_k).case([-1] * experts, 256))


# ---- experts ----


@dataclass(frozen=True)
class ChunkResult:
    hidden: Floats
    products: Floats
    expert_rows: Floats
    places: NDArray[np.int32]


def run_experts(layer: Layer, x: Floats, hidden: Floats, routing: Routing, resident: Sequence[int], batch: int = 3) -> ChunkResult:
    """Resident experts from slots in some order, the others in batches from a buffer."""
    slots = np.full(layer.shape.experts, -1, np.int32)
    slots[list(resident)] = np.arange(len(resident))
    missing = np.flatnonzero(slots < 0).tolist()
    blobs = layer.blobs[list(resident)] if resident else np.zeros((1, layer.blobs.shape[1]), np.uint8)
    return ChunkResult(
        **native.experts_prompt(
            routing.case(slots.tolist(), layer.blobs.shape[1]),
            x=x,
            hidden=hidden,
            blobs=layer.blobs,
            slot_blobs=np.ascontiguousarray(blobs),
            gate=layer.gate,
            up=layer.up,
            down=layer.down,
            batches=[missing[i : i + batch] for i in range(0, len(missing), batch)],
        )
    )


def expected_experts(layer: Layer, x: Floats, hidden: Floats, routing: Routing) -> NDArray[np.float64]:
    """In double precision with the dequantised weights."""
    out, (ids, weights) = hidden.astype(np.float64), routing.expected()
    for expert in range(layer.shape.experts):
        gate, up, down = matrices(layer.shape, layer.blobs[expert])
        for row, place in np.argwhere(ids == expert):
            g = gate @ x[row].astype(np.float64)
            out[row] += float(weights[row, place]) * (down @ (g / (1 + np.exp(-g)) * (up @ x[row])))
    return out


def matrices(shape: Shape, blob: Bytes) -> list[NDArray[np.float64]]:
    """Gate, up and down, dequantised; each begins at a multiple of 32 bytes."""
    found, offset = [], 0
    sizes = [(shape.gate, shape.width, shape.hidden), (shape.up, shape.width, shape.hidden), (shape.down, shape.hidden, shape.width)]
    for name, rows, columns in sizes:
        kind = type_named(name)
        nbytes = rows * columns // kind.block_values * kind.block_bytes
        found.append(dequantised(kind, blob[offset : offset + nbytes].reshape(rows, -1)))
        offset += nbytes + -nbytes % 32
    return found


SHAPES = (
    Shape(experts=6, top_k=2, hidden=256, width=256, gate="Q4_K", up="Q4_K", down="Q6_K"),
    Shape(experts=5, top_k=3, hidden=256, width=96, gate="IQ3_S", up="Q8_0", down="IQ4_NL"),
    Shape(experts=4, top_k=1, hidden=64, width=32, gate="MXFP4", up="F16", down="MXFP4"),
)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.gate}-{shape.up}-{shape.down}")
def test_experts_are_near_the_dequantised_ones(shape: Shape, rng: Rng) -> None:
    layer, rows = random_layer(shape), 21
    x, hidden = normal(rng, rows, shape.hidden), normal(rng, rows, shape.hidden, scale=0.1)
    routing = Routing(router_sums(normal(rng, rows, shape.experts, scale=3.0)), shape.top_k)
    got = run_experts(layer, x, hidden, routing, range(shape.experts))
    expected = expected_experts(layer, x, hidden, routing)
    assert worst_row(got.hidden - hidden, expected - hidden) < TOLERANCE


def test_bits_do_not_depend_on_where_experts_lie(rng: Rng) -> None:
    shape, rows = SHAPES[1], 30
    layer, x, hidden = random_layer(shape), normal(rng, rows, shape.hidden), normal(rng, rows, shape.hidden)
    routing = Routing(router_sums(normal(rng, rows, shape.experts, scale=3.0)), shape.top_k)
    results = [run_experts(layer, x, hidden, routing, resident, batch) for resident, batch in (([4, 2, 0, 1, 3], 1), ([], 2), ([3, 1], 3))]
    for other in results[1:]:
        assert same_bits(other.expert_rows, results[0].expert_rows)
        assert same_bits(other.hidden, results[0].hidden)


def test_bits_of_a_routed_row_do_not_depend_on_the_chunk(rng: Rng) -> None:
    """Among many rows an expert's pairs fill more than a tile."""
    shape, rows = SHAPES[2], 290
    layer, x, hidden = random_layer(shape), normal(rng, rows, shape.hidden), normal(rng, rows, shape.hidden)
    logits = normal(rng, rows, shape.experts)
    logits[:140, 2] = 9
    sums = router_sums(logits)
    whole = run_experts(layer, x, hidden, Routing(sums, shape.top_k), [0, 2])
    for first, count in ((0, 9), (125, 40), (281, 9)):
        part = slice(first, first + count)
        alone = run_experts(layer, x[part], hidden[part], Routing(sums[part], shape.top_k), [1])
        assert same_bits(alone.hidden, whole.hidden[part])


def test_rows_are_combined_in_the_order_of_their_list(rng: Rng) -> None:
    shape, rows = SHAPES[1], 9
    layer, x, hidden = random_layer(shape), normal(rng, rows, shape.hidden), normal(rng, rows, shape.hidden)
    routing = Routing(router_sums(normal(rng, rows, shape.experts, scale=3.0)), shape.top_k)
    got, (_, weights) = run_experts(layer, x, hidden, routing, range(shape.experts)), routing.expected()
    for row in range(rows):
        total = np.zeros(shape.hidden, np.float32)
        for place in range(shape.top_k):
            total = reference.fmaf(np.float32(weights[row, place]), got.expert_rows[got.places[row * shape.top_k + place]], total)
        assert same_bits(got.hidden[row], hidden[row] + total)
