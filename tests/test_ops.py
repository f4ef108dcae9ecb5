"""Every native operation against its slow twin, bit for bit, for every instruction set and several thread counts."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from appliance.memory.workspace import routed_bytes
from cuda_ext import _native as native
from cuda_ext import reference
from tests.gguf_writing import TYPES_BY_NAME, random_rows
from tests.op_rig import OpRig, every_isa, floats, router_sums, same_bits

F32_TYPE = 0
EPS = 1e-6
KV_KINDS = {np.float32: "f32", np.float16: "f16", np.int8: "int8"}


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_every_operation_has_a_slow_twin() -> None:
    operations = [name for name in dir(native.Recorder) if not name.startswith("_")]
    assert operations
    assert [name for name in operations if not callable(getattr(reference, name, None))] == []


def test_fmaf_of_the_reference_rounds_once(rng: np.random.Generator) -> None:
    from fractions import Fraction

    for _ in range(2000):
        a, b = (np.float32(x) for x in normal(rng, 2))
        c = np.float32(-float(a) * float(b)) * np.float32(1 + rng.integers(-3, 4) * 2.0**-23) + np.float32(rng.standard_normal() * 1e-9)
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        nearest = np.float32(float(exact))
        near = [np.nextafter(nearest, np.float32(-np.inf)), nearest, np.nextafter(nearest, np.float32(np.inf))]
        best = min(abs(Fraction(float(x)) - exact) for x in near)
        assert abs(Fraction(float(reference.fmaf(a, b, c))) - exact) == best


@pytest.mark.parametrize("isa", every_isa())
@pytest.mark.parametrize("width", [1, 31, 32, 96, 640, 2080])
def test_norm_is_its_twin(isa: str, width: int, rng: np.random.Generator) -> None:
    rig = OpRig(3, isa=isa, num_threads=2)
    x, gamma = normal(rng, 3, width, scale=3.0), normal(rng, width)
    inverse = rig.take(3 * 4)
    out = native.RowsMemory(rig.take(3 * width * 4), None, width, inverse)
    rig.recorder.norm(rig.give(x), rig.give(gamma), EPS, native.Rows.all, out)
    rig.run(3)
    assert same_bits(floats(out.values, 3, width), reference.norm(x, gamma, EPS))
    assert same_bits(floats(inverse, 3), np.array([reference.inverse_rms(row, EPS) for row in x]))


def test_norm_quantises_before_the_scale(rng: np.random.Generator) -> None:
    width = 320
    rig = OpRig(1)
    x, gamma = normal(rng, 1, width), normal(rng, width)
    out = native.RowsMemory(rig.take(width * 4), rig.take(2 * 320), width)
    rig.recorder.norm(rig.give(x), rig.give(gamma), EPS, native.Rows.all, out)
    rig.run(1)
    q, d, _ = native.quantise(x[0] * gamma, float(reference.inverse_rms(x[0], EPS)))
    groups = out.groups.bytes().reshape(2, 320)
    assert (groups[:, :256].view(np.int8) == q).all()
    assert (groups[:, 256:288].copy().view(np.float32) == d).all()


def test_norm_of_the_logits_rows_takes_the_last_rows(rng: np.random.Generator) -> None:
    rig = OpRig(5, max_logits=2)
    x, gamma = normal(rng, 5, 32), normal(rng, 32)
    out = native.RowsMemory(rig.take(2 * 32 * 4), None, 32)
    rig.recorder.norm(rig.give(x), rig.give(gamma), EPS, native.Rows.logits, out)
    rig.run(4, num_logits=2)
    assert same_bits(floats(out.values, 2, 32), reference.norm(x[2:4], gamma, EPS))


def test_embed_is_its_twin(rng: np.random.Generator) -> None:
    table = normal(rng, 64, 96)
    rig = OpRig(4)
    out = rig.take(4 * 96 * 4)
    rig.recorder.embed(native.Matrix.at(rig.give(table), F32_TYPE, 64, 96), out)
    rig.run(4, tokens=[5, 63, 0, 5])
    assert same_bits(floats(out, 4, 96), reference.embed(table, [5, 63, 0, 5]))


def test_angles_are_their_twin() -> None:
    frequencies = [1.0, 0.1, 1e-6]
    rig = OpRig(3)
    out = rig.take(3 * 6 * 4)
    rig.recorder.angles(frequencies, 1.25, out)
    rig.run(3, position=1000)
    assert same_bits(floats(out, 3, 6), reference.angles(frequencies, 1.25, 1000, 3))


@pytest.mark.parametrize("isa", every_isa())
@pytest.mark.parametrize("kind", KV_KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 3, 6), (8, 1, 40), (2, 1, 150)])
def test_rotary_and_attention_are_their_twins(isa: str, kind: type, heads: int, kv_heads: int, dim: int, rng: np.random.Generator) -> None:
    """Positions run over tiles and over a span's end, with chunks of many rows and windows of few."""
    rows_at = [(0, 70), (70, 3), (73, 1), (74, 200)]
    total = 274
    rig = OpRig(200, isa=isa, num_threads=2, context=300)
    query, key, value = normal(rng, total, heads, dim), normal(rng, total, kv_heads, dim), normal(rng, total, kv_heads, dim)
    gammas = normal(rng, dim), normal(rng, dim)
    frequencies = [10.0 ** (-i / 4) for i in range(dim // 2)]
    inputs = [rig.take(200 * n * dim * 4) for n in (heads, kv_heads, kv_heads)]
    row_bytes = dim * np.dtype(kind).itemsize + (2 * -(-dim // reference.KV_GROUP) if kind is np.int8 else 0)
    cache = rig.card.allocate("kv", 2 * kv_heads * 320 * row_bytes)
    kv = native.KvMemory.at(cache, native.KvType[KV_KINDS[kind]], kv_heads, dim, 300)
    turned, out = rig.take(200 * dim * 4), rig.take(200 * heads * dim * 4)
    rig.recorder.angles(frequencies, 1.0, turned)
    rig.recorder.rotary(native.Heads(*inputs, heads, rig.give(gammas[0]), rig.give(gammas[1]), EPS, turned), kv)
    rig.recorder.attention(inputs[0], heads, kv, dim**-0.5, rig.take(8 * heads * 2 * (dim + 2) * 4), out)
    got = []
    for position, rows in rows_at:
        for view, array in zip(inputs, (query, key, value), strict=True):
            data = np.ascontiguousarray(array[position : position + rows]).view(np.uint8).reshape(-1)
            view.bytes()[: data.size] = data
        rig.run(rows, position=position)
        got.append(floats(out, rows, heads, dim))

    expected_angles = reference.angles(frequencies, 1.0, 0, total)
    rotated, keys = reference.rotary(query, key, *gammas, EPS, expected_angles, kind)
    values = reference.stored(value, kind)
    some = [0, 1, 63, 64, 69, 70, 72, 73, 74, 127, 255, 256, 257, 273]
    expected = np.stack([reference.attention(rotated[row : row + 1], keys, values, row, dim**-0.5)[0] for row in some])
    assert same_bits(np.concatenate(got)[some], expected)


def test_int8_values_at_the_extremes_are_rounded_as_their_twin_has_it(rng: np.random.Generator) -> None:
    """Scales that are subnormal halves or would overflow, blocks that are zero or nearly so, and what is not finite."""
    dim, group = 150, reference.KV_GROUP
    magnitudes = [1.0, 0.0, 2.0**-101, 2.0**-99, 1e-30, 1e-7, 127 * 2.0**-25, 3e-4, 127 * 2.0**-14, 8.3e6, 8.4e6, 3e38]
    value = np.concatenate([normal(rng, len(magnitudes) + 2, 1, dim).clip(-1, 1) * np.array([[[1.0]]], np.float32)])
    value[: len(magnitudes)] *= np.array(magnitudes, np.float32)[:, None, None]
    value[-2, 0, 3], value[-1, 0, -1] = np.nan, -np.inf
    rig = OpRig(len(value))
    cache = rig.card.allocate("kv", 2 * 64 * (dim + 2 * 3))
    kv = native.KvMemory.at(cache, native.KvType.int8, 1, dim, 64)
    flat = rig.give(np.zeros((len(value), dim), np.float32))
    rig.recorder.rotary(native.Heads(flat, flat, rig.give(value), 1, None, None, EPS, flat), kv)
    rig.run(len(value))
    values = cache.bytes()[64 * (dim + 2 * 3) :]
    stored = values[: 64 * dim].view(np.int8).reshape(64, dim)
    scales = values[64 * dim :].view(np.float16).reshape(3, 64)
    for number, first in enumerate(range(0, dim, group)):
        exact = value[:, 0, first : first + group]
        q, scale = reference.quantise_kv(exact)
        assert (stored[: len(value), first : first + group] == q).all()
        assert (scales[number, : len(value)].view(np.uint16) == scale[:, 0].view(np.uint16)).all()
        within = slice(0, magnitudes.index(8.4e6))
        error = np.abs(q[within] * scale[within].astype(np.float64) - exact[within])
        assert (error <= scale[within].astype(np.float64) * (0.5 + 1e-6) + 2.0**-100).all()


@pytest.mark.parametrize("isa", every_isa())
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("renormalise", [False, True])
def test_route_is_its_twin(isa: str, sigmoid: bool, renormalise: bool, rng: np.random.Generator) -> None:
    rows, experts, top_k = 5, 37, 4
    sums, inverse = router_sums(normal(rng, rows, experts, scale=3.0)), np.abs(normal(rng, rows)) + np.float32(0.5)
    sums[1, 5] = sums[1, 30] = sums[1].max() + 2**28  # a tie goes to the lower id
    rig = RoutedRig(rows, experts, top_k, isa=isa)
    gating = native.Gating.sigmoid if sigmoid else native.Gating.softmax
    rig.record_route(sums, inverse, native.Gate(gating, renormalise, 1.5, top_k))
    rig.run(rows)
    ids, weights = reference.route(sums, inverse, top_k, sigmoid=sigmoid, renormalise=renormalise, scale=1.5)
    assert (rig.routed_ids(rows) == ids).all()
    assert same_bits(rig.routed_weights(rows), weights)


@pytest.mark.parametrize("isa", every_isa())
@pytest.mark.parametrize(("width", "experts"), [(32, 128), (96, 33), (40, 7), (640, 72)])
def test_router_is_its_twin(isa: str, width: int, experts: int, rng: np.random.Generator) -> None:
    rows = 7
    x, gamma, weights = normal(rng, rows, width, scale=30.0), normal(rng, width), normal(rng, width, experts)
    x[1] *= 1e-12
    x[2] *= 1e9  # sums beyond the bound, of both signs
    x[3, 5], x[4, 0], x[5, :16] = np.nan, np.inf, 0.0
    rig = OpRig(rows, isa=isa, num_threads=2)
    sums = rig.take(rows * experts * 8)
    rig.recorder.router(rig.give(x), rig.give(gamma), native.Matrix.at(rig.give(weights), F32_TYPE, width, experts), sums)
    rig.run(rows)
    got = sums.bytes().view(np.int64).reshape(rows, experts)
    with np.errstate(invalid="ignore", over="ignore"):
        assert (got == reference.router(x, gamma, weights)).all()
    exact = (x[0].astype(np.float64) * gamma) @ weights.astype(np.float64)
    assert np.allclose(got[0] / 2.0**28, exact, rtol=1e-5, atol=1e-3)


def test_a_router_of_another_type_is_refused(rng: np.random.Generator) -> None:
    rig = OpRig(1)
    weights = native.Matrix.at(rig.give(np.zeros((32, 8), np.float16)), 1, 32, 8)
    with pytest.raises(ValueError, match="a router of type F16 over 32 values; float32 and up to 65536 are possible"):
        rig.recorder.router(rig.give(normal(rng, 1, 32)), rig.give(normal(rng, 32)), weights, rig.take(64))


@pytest.mark.parametrize("width", [32, 96, 640])
def test_quantise_is_its_twin(width: int, rng: np.random.Generator) -> None:
    rig = OpRig(3, num_threads=2)
    x = normal(rng, 3, width)
    x[1, :32], x[2, 7] = 0.0, 1e20
    num_groups = -(-width // 256)
    groups = rig.take(3 * num_groups * 320)
    rig.recorder.quantise(native.RowsMemory(rig.give(x), groups, width))
    rig.run(3)
    q, d = reference.quantise(x)
    got = groups.bytes().reshape(3, num_groups, 320)
    assert (got[:, :, :256].reshape(3, -1)[:, :width].view(np.int8) == q).all()
    assert same_bits(got[:, :, 256:288].reshape(3, -1).copy().view(np.float32)[:, : width // 32], d)


@pytest.mark.parametrize("isa", every_isa())
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (33, 40), (100, 288)])
def test_matmul_is_its_twin(isa: str, rows: int, columns: int, rng: np.random.Generator) -> None:
    """Two matrices over one input, one of them added to what is there."""
    num_x = 70
    rig = OpRig(num_x, isa=isa, num_threads=2)
    x, first, second, residual = normal(rng, num_x, columns), normal(rng, rows, columns), normal(rng, 5, columns), normal(rng, num_x, 5)
    out, added = rig.take(num_x * rows * 4), rig.take(num_x * 5 * 4)
    added.bytes()[:] = residual.view(np.uint8).reshape(-1)
    products = [
        native.Product(native.Matrix.at(rig.give(first), F32_TYPE, rows, columns), out),
        native.Product(native.Matrix.at(rig.give(second), F32_TYPE, 5, columns), added, added),
    ]
    rig.recorder.matmul(products, native.RowsMemory(rig.give(x), None, columns), native.Rows.all)
    rig.run(num_x)
    assert same_bits(floats(out, num_x, rows), reference.matmul(x, first))
    assert same_bits(floats(added, num_x, 5), reference.matmul(x, second, residual))


@pytest.mark.parametrize("type_name", sorted(native.quant_types().keys() & TYPES_BY_NAME.keys()))
def test_matmul_of_every_type_is_the_row_kernels_dot(type_name: str, rng: np.random.Generator) -> None:
    kind = TYPES_BY_NAME[type_name]
    rows, columns, num_x = 37, 512, 9
    weights = np.frombuffer(random_rows(kind, rows * columns, rng, 0.05), np.uint8).reshape(rows, -1)
    x = normal(rng, num_x, columns)
    rig = OpRig(num_x, num_threads=2)
    memory = native.RowsMemory(rig.give(x), rig.take(num_x * 2 * 320), columns)
    out = rig.take(num_x * rows * 4)
    rig.recorder.quantise(memory)
    rig.recorder.matmul([native.Product(native.Matrix.at(rig.give(weights), kind.type_id, rows, columns), out)], memory, native.Rows.all)
    rig.run(num_x)
    expected = np.empty((num_x, rows), np.float32)
    native.dot(kind.type_id, weights, x, expected)
    assert same_bits(floats(out, num_x, rows), expected)


@pytest.mark.parametrize("isa", every_isa())
@pytest.mark.parametrize("resident", [False, True])
def test_experts_are_their_twin(isa: str, resident: bool, rng: np.random.Generator) -> None:
    rows, num_experts, top_k = 70, 5, 3
    rig = RoutedRig(rows, num_experts, top_k, isa=isa)
    width, hidden = rig.WIDTH, rig.HIDDEN
    if resident:
        rig.make_resident(1)
        rig.make_resident(4)
    sums, x, residual = router_sums(normal(rng, rows, num_experts, scale=3.0)), normal(rng, rows, hidden), normal(rng, rows, hidden)
    inverse = np.ones(rows, np.float32)
    out = rig.take(rows * hidden * 4)
    out.bytes()[:] = residual.view(np.uint8).reshape(-1)
    matrices = [native.BlobMatrix.at(F32_TYPE, 4 * width * hidden * i, *shape) for i, shape in enumerate([(width, hidden)] * 2)]
    down = native.BlobMatrix.at(F32_TYPE, 8 * width * hidden, hidden, width)
    rig.record_route(sums, inverse, native.Gate(native.Gating.softmax, True, 1.0, top_k))
    rig.recorder.experts(
        native.Expert(*matrices, down),
        rig.table,
        0,
        top_k,
        rig.routed,
        native.RowsMemory(rig.give(x), None, hidden),
        native.RowsMemory(rig.take(rows * top_k * width * 4), None, width),
        rig.take(rows * top_k * hidden * 4),
        out,
    )
    rig.run(rows)
    ids, weights = reference.route(sums, inverse, top_k, sigmoid=False, renormalise=True, scale=1.0)
    blobs = [
        reference.ExpertWeights(*(part.reshape(width, hidden) for part in (gate, up)), down.reshape(hidden, width))
        for gate, up, down in rig.blobs.reshape(num_experts, 3, -1)
    ]
    assert same_bits(floats(out, rows, hidden), reference.experts(x, ids, weights, blobs, residual))


def test_route_counts_uses_and_rows_by_tier(rng: np.random.Generator) -> None:
    rows, experts, top_k = 6, 8, 3
    sums, inverse = router_sums(normal(rng, rows, experts, scale=3.0)), np.ones(rows, np.float32)
    rig = RoutedRig(rows, experts, top_k)
    rig.make_resident(expert=2)
    rig.record_route(sums, inverse, native.Gate(native.Gating.softmax, True, 1.0, top_k))
    rig.run(rows)
    ids = reference.route(sums, inverse, top_k, sigmoid=False, renormalise=True, scale=1.0)[0]
    expected = np.bincount(ids.reshape(-1), minlength=experts)
    assert (rig.uses.bytes()[: 4 * experts].view(np.uint32) == expected).all()
    counted = rig.table.rows_by_tier
    assert (counted["own"], counted["host"]) == (expected[2], rows * top_k - expected[2])


class RoutedRig(OpRig):
    """With a residency table of one layer, whose blobs are float32 gate, up and down of small experts."""

    WIDTH, HIDDEN = 40, 96

    def __init__(self, max_rows: int, experts: int, top_k: int, *, isa: str = "auto", num_threads: int = 2, seed: int = 3) -> None:
        super().__init__(max_rows, isa=isa, num_threads=num_threads)
        self.max_rows = max_rows
        self.top_k = top_k
        blob_floats = 3 * self.WIDTH * self.HIDDEN
        self.blobs = normal(np.random.default_rng(seed), experts, blob_floats, scale=0.1)
        self.uses = self.card.allocate("uses", 4 * experts)
        self.table = native.ExpertTable(1, experts, self.card.allocate("table", 4 * experts), self.uses)
        self.table.set_layer(0, self.give(self.blobs), 4 * blob_floats)
        self.routed = self.take(routed_bytes(max_rows, top_k, experts))

    def record_route(self, sums: NDArray[np.int64], inverse: NDArray[np.float32], gate: native.Gate) -> None:
        x = native.RowsMemory(self.take(0), None, 0, self.give(inverse))
        self.recorder.route(self.give(sums), x, gate, self.table, 0, self.routed)

    def make_resident(self, expert: int) -> None:
        slot = self.table.add_slot(self.card.allocate("slot", self.blobs[0].nbytes))
        self.card.wait_copied(self.card.copy(self.table.slot(slot), self.table.blob(0, expert), 0))
        self.card.wait(self.card.update(self.table, [(0, expert, slot)]))

    def routed_ids(self, rows: int) -> NDArray[np.int32]:
        return self.routed.bytes()[64 : 64 + rows * self.top_k * 4].view(np.int32).reshape(rows, self.top_k).copy()

    def routed_weights(self, rows: int) -> NDArray[np.float32]:
        first = 64 + -(-self.max_rows * self.top_k * 4 // 64) * 64
        return self.routed.bytes()[first : first + rows * self.top_k * 4].view(np.float32).reshape(rows, self.top_k).copy()


def test_a_window_beyond_the_limits_is_refused() -> None:
    rig = OpRig(4, context=10, vocab=64)
    with pytest.raises(ValueError, match="5 rows were given; a run has 1 to 4"):
        rig.run(5)
    with pytest.raises(ValueError, match="do not fit the context of 10"):
        rig.run(4, position=7)
    with pytest.raises(ValueError, match="token 64 is not in the vocabulary of 64"):
        rig.run(1, tokens=[64])
    with pytest.raises(ValueError, match="logits of 3 rows"):
        rig.run(2, num_logits=3)


def test_memory_that_is_too_small_is_refused_when_recording(rng: np.random.Generator) -> None:
    rig = OpRig(4)
    out = native.RowsMemory(rig.take(3 * 32 * 4), None, 32)
    with pytest.raises(ValueError, match="norm: output: 512 bytes are needed, but there are 384"):
        rig.recorder.norm(rig.give(normal(rng, 4, 32)), rig.give(normal(rng, 32)), EPS, native.Rows.all, out)


def test_an_interrupted_run_can_be_run_again(rng: np.random.Generator) -> None:
    rig = OpRig(2)
    x, gamma = normal(rng, 2, 32), normal(rng, 32)
    out = native.RowsMemory(rig.take(2 * 32 * 4), None, 32)
    rig.recorder.norm(rig.give(x), rig.give(gamma), EPS, native.Rows.all, out)
    rig.program.interrupt()
    with pytest.raises(native.Interrupted):
        rig.run(2)
    rig.run(2)
    assert same_bits(floats(out.values, 2, 32), reference.norm(x, gamma, EPS))
