"""Every instruction set gives the bits of the portable kernels, whatever the sizes, scales, activations and company of a row."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cuda_ext import _native as native
from cuda_ext import reference
from tests.op_rig import same_bits
from tests.quant_rig import BLOCK_KINDS, KINDS, Floats, Kind, MakeBlocks, Rng, dot, hostile_blocks, random_blocks, rows_of

ROOT = Path(__file__).parents[1]
PORTABLE = "portable"
SENTINEL = np.float32(-12345.5)


def needs(isa: str) -> object:
    return pytest.param(isa, marks=pytest.mark.skipif(isa not in native.isas(), reason=f"this CPU or build does not run {isa}"))


every_fast_isa = pytest.mark.parametrize("isa", [needs("avx2"), needs("avx512")])
every_isa = pytest.mark.parametrize("isa", [PORTABLE, needs("avx2"), needs("avx512")])
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
every_block_kind = pytest.mark.parametrize("kind", BLOCK_KINDS, ids=lambda kind: kind.name)


@pytest.fixture
def rng() -> Rng:
    return np.random.default_rng(5)


def normal(rng: Rng, *shape: int) -> Floats:
    return rng.standard_normal(shape).astype(np.float32)


def hostile_inputs(rng: Rng, num_values: int) -> Floats:
    """Zeros of both signs, tiny, subnormal, huge, one spike, exact ties, one block of nothing in the middle."""
    x = np.zeros((8, num_values), np.float32)
    x[1] = -0.0
    x[2] = normal(rng, num_values) * np.float32(1e-30)
    x[3] = normal(rng, num_values) * np.float32(1e30)
    x[4] = normal(rng, num_values)
    x[4, rng.integers(num_values)] = 1e6
    x[5] = normal(rng, num_values) * np.float32(1e-41)
    x[6] = rng.integers(-254, 255, num_values).astype(np.float32) / np.float32(2)
    x[6, ::32] = 127.0
    x[7] = normal(rng, num_values)
    x[7, : num_values // 2 // 32 * 32] = 0
    return x


@every_fast_isa
@every_kind
def test_rows_have_the_portable_bits_in_every_size_and_company(kind: Kind, isa: str, rng: Rng) -> None:
    for num_values in kind.sizes:
        weights = rows_of(random_blocks, kind, 2, num_values, rng)
        x = normal(rng, 9, num_values)
        expected = dot(kind, weights, x, PORTABLE)
        for num_x in range(1, 10):
            assert same_bits(dot(kind, weights, x[:num_x], isa), expected[:num_x]), (num_values, num_x)


@every_fast_isa
@every_block_kind
def test_very_long_rows_have_the_portable_bits(kind: Kind, isa: str, rng: Rng) -> None:
    """Activations are turned up to 16,384 values."""
    for num_values in (16384, 16640):
        weights, x = rows_of(random_blocks, kind, 1, num_values, rng), normal(rng, 3, num_values)
        assert same_bits(dot(kind, weights, x, isa), dot(kind, weights, x, PORTABLE)), num_values


@every_fast_isa
@every_kind
def test_rows_have_the_portable_bits_under_hostile_scales_and_inputs(kind: Kind, isa: str, rng: Rng) -> None:
    for num_values in (kind.sizes[0], kind.sizes[-2]):
        weights = rows_of(hostile_blocks, kind, 5, num_values, rng)
        x = hostile_inputs(rng, num_values)
        assert same_bits(dot(kind, weights, x, isa), dot(kind, weights, x, PORTABLE)), num_values


@every_fast_isa
@every_block_kind
def test_tiles_have_the_portable_bits(kind: Kind, isa: str, rng: Rng) -> None:
    """Enough weight rows for tiles and a rest, input rows for every width of the multiplication and for a second turn of the tile."""
    for num_values, num_inputs in ((kind.sizes[0], 67), (kind.sizes[-2], 21), (kind.sizes[-1], 7)):
        make = hostile_blocks if num_inputs == 21 else random_blocks
        weights = rows_of(make, kind, 35, num_values, rng)
        x = np.concatenate([hostile_inputs(rng, num_values), normal(rng, 60, num_values)])[:num_inputs]
        expected = dot(kind, weights, x, PORTABLE)
        for num_x in (3, 4, 7, num_inputs):
            assert same_bits(dot(kind, weights, x[:num_x], isa), expected[:num_x]), (num_values, num_x)


@every_fast_isa
def test_many_rows_and_inputs_have_the_portable_bits(isa: str, rng: Rng) -> None:
    """More weight rows than fit the cache part, more inputs than one tile."""
    kind = next(kind for kind in KINDS if kind.name == "Q8_0")
    weights, x = rows_of(random_blocks, kind, 300, 640, rng), normal(rng, 19, 640)
    assert same_bits(dot(kind, weights, x, isa), dot(kind, weights, x, PORTABLE))


@every_isa
@every_kind
def test_a_row_does_not_depend_on_its_company(kind: Kind, isa: str, rng: Rng) -> None:
    num_values = kind.sizes[-1]
    weights, x = rows_of(random_blocks, kind, 2, num_values, rng), normal(rng, 11, num_values)
    together = dot(kind, weights, x, isa)
    for i in range(len(x)):
        assert same_bits(dot(kind, weights, x[i : i + 1], isa), together[i : i + 1])
    assert same_bits(dot(kind, weights[1:], x, isa), np.ascontiguousarray(together[:, 1:]))


@every_isa
@pytest.mark.parametrize("make", [random_blocks, hostile_blocks], ids=["random", "hostile"])
@every_kind
def test_rows_are_their_slow_twin(kind: Kind, make: MakeBlocks, isa: str, rng: Rng) -> None:
    for num_values in (kind.sizes[0], kind.sizes[-2]):
        weights = rows_of(make, kind, 3, num_values, rng)
        x = normal(rng, 1, num_values)
        assert same_bits(dot(kind, weights, x, isa)[0], reference.dot_rows(kind.type_id, weights, x[0]))


@every_kind
def test_rows_are_close_to_the_exact_product(kind: Kind, rng: Rng) -> None:
    """Float64 over dequantised weights and dequantised activations; what is left is a dozen roundings."""
    num_values = kind.sizes[-1]
    weights, x = rows_of(random_blocks, kind, 4, num_values, rng), normal(rng, 3, num_values)
    values = native.dequantise(kind.type_id, weights.reshape(-1)).reshape(4, num_values).astype(np.float64)
    for i in range(len(x)):
        if kind.is_float:
            inputs = x[i].astype(np.float64)
        else:
            q, d, _ = native.quantise(x[i])
            inputs = (q.reshape(-1, 32) * d.reshape(-1, 1).astype(np.float64)).reshape(-1)[:num_values]
        exact = values @ inputs
        largest = np.abs(values).reshape(4, -1, 32).max(-1).repeat(32, -1)  # minima and scaled weights may cancel in a value
        bound = 2.0**-20 * (largest @ np.abs(inputs))
        assert (np.abs(dot(kind, weights, x[i : i + 1], PORTABLE)[0] - exact) <= bound).all()


@every_isa
@every_kind
def test_nothing_is_written_beside_the_results(kind: Kind, isa: str, rng: Rng) -> None:
    num_values = kind.sizes[0]
    weights, x = rows_of(random_blocks, kind, 3, num_values, rng), normal(rng, 9, num_values)
    frame = np.full((11, 8), SENTINEL, np.float32)
    native.dot(kind.type_id, weights, x, frame[1:-1, 2:5], isa)
    written = np.zeros(frame.shape, bool)
    written[1:-1, 2:5] = True
    assert (frame[~written] == SENTINEL).all()
    assert (frame[written] != SENTINEL).all()


def dot_before_a_forbidden_page() -> None:
    """Rows whose last byte is the last one of a page; the next page cannot be read."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = 64 * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    everything = np.frombuffer(memory, np.uint8)
    address = everything.ctypes.data + size
    assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    rng = np.random.default_rng(0)
    for kind in KINDS:
        for num_values in (kind.sizes[0], kind.sizes[4]):
            weights = rows_of(random_blocks, kind, 32, num_values, rng)
            at_the_end = everything[size - weights.size : size].reshape(weights.shape)
            at_the_end[:] = weights
            x = normal(rng, 5, num_values)
            for isa in native.isas():
                for num_x in (1, len(x)):
                    assert same_bits(dot(kind, at_the_end, x[:num_x], isa), dot(kind, weights, x[:num_x], isa)), (kind.name, isa)
                native.dequantise(kind.type_id, at_the_end.reshape(-1))
                assert native.first_bad_block(kind.type_id, at_the_end.reshape(-1)) is None


def test_no_byte_behind_a_row_is_read() -> None:
    code = "from tests.test_quant_bits import dot_before_a_forbidden_page as run; run()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr or f"exit code {done.returncode}"


def quantise_inputs(rng: Rng) -> list[Floats]:
    inputs = [row for size in (32, 64, 96, 256, 288, 2080) for row in hostile_inputs(rng, size)]
    inputs.append((normal(rng, 4096) * 10.0 ** rng.uniform(-38, 38, 4096)).astype(np.float32))
    spoilt = normal(rng, 320)
    spoilt[[3, 70, 140]] = (np.inf, -np.inf, np.nan)
    edge = np.zeros(64, np.float32)
    edge[0], edge[33] = 2.0**-100, np.nextafter(np.float32(2.0**-100), np.float32(0))
    return [*inputs, spoilt, edge]


@every_isa
@pytest.mark.parametrize("row_scale", [1.0, 0.37, 3e-20])
def test_activations_are_quantised_as_their_slow_twin(isa: str, row_scale: float, rng: Rng) -> None:
    for x in quantise_inputs(rng):
        q, d, sum16 = native.quantise(x, row_scale, isa)
        expected = reference.quantise_row(x, row_scale)
        assert (q == expected.q).all()
        assert same_bits(d, expected.d)
        assert (sum16 == expected.sum16).all()


@every_isa
def test_a_block_with_a_value_that_is_not_finite_makes_the_product_nan(isa: str, rng: Rng) -> None:
    kind = next(kind for kind in KINDS if kind.name == "Q4_K")
    weights, x = rows_of(random_blocks, kind, 2, 512, rng), normal(rng, 2, 512)
    x[1, 300] = np.nan
    out = dot(kind, weights, x, isa)
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()


@every_isa
@pytest.mark.parametrize("size", [1, 7, 8, 640, 1003])
def test_swiglu_is_its_slow_twin(isa: str, size: int, rng: Rng) -> None:
    gate = normal(rng, size) * rng.choice(np.array([1, 40, 1e-20], np.float32), size)
    gate[: min(6, size)] = np.array([0.0, -0.0, 88.5, -88.5, 1e30, -1e30], np.float32)[: min(6, size)]
    up = normal(rng, size)
    frame = np.full(size + 16, SENTINEL, np.float32)
    native.swiglu(gate, up, frame[8:-8], isa)
    assert same_bits(frame[8:-8], reference.silu_times(gate, up))
    assert (frame[:8] == SENTINEL).all()
    assert (frame[-8:] == SENTINEL).all()


def test_silu_is_close_to_the_exact_function() -> None:
    gate = np.linspace(-80, 80, 20001, dtype=np.float32)
    out = np.empty_like(gate)
    native.swiglu(gate, np.ones_like(gate), out)
    exact = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64)))
    assert np.max(np.abs(out - exact) / np.maximum(np.abs(exact), 1e-30)) < 6e-7
