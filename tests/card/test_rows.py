"""Dot products of quantised rows on the card: the bits of the host's kernels for every type, width and number of input rows."""

from __future__ import annotations

import numpy as np
import pytest

from cuda_ext import _native as native
from tests.op_rig import same_bits
from tests.quant_rig import BLOCK_KINDS, KINDS, Bytes, Floats, Kind, MakeBlocks, Rng, dot, hostile_blocks, random_blocks, rows_of

WIDTHS = (32, 256, 288, 512, 640, 768, 992, 2048, 2304, 4096)
NUM_INPUTS = (1, 2, 3, 5, 8)
CARD = (1, 227 * 1024, 228 * 1024)  # multiprocessors, shared memory of a block, of a multiprocessor


@pytest.fixture
def rng() -> Rng:
    return np.random.default_rng(9)


def inputs(rng: Rng, num: int, width: int) -> Floats:
    """Ordinary rows with a zero block, a spike and values of many magnitudes."""
    x = (rng.standard_normal((num, width)) * 2.0 ** rng.integers(-12, 12, (num, 1))).astype(np.float32)
    x[0, :32] = 0
    x[-1, width // 2] = 1e6
    return x


def on_card(kind: Kind, weights: Bytes, x: Floats) -> Floats:
    return native.card_matmul_window([kind.type_id], [weights], x, [None], CARD)[0]


def same_numbers(a: Floats, b: Floats) -> bool:
    """Equal bits but for the sign and payload of NaN, which the arithmetic leaves open."""
    return bool((np.isnan(a) == np.isnan(b)).all()) and same_bits(np.where(np.isnan(a), 0, a), np.where(np.isnan(b), 0, b))


def widths_of(kind: Kind) -> list[int]:
    return [width for width in WIDTHS if width % kind.block_values == 0]


CASES = [pytest.param(kind, width, id=f"{kind.name}-{width}") for kind in KINDS for width in widths_of(kind)]


@pytest.mark.parametrize(("kind", "width"), CASES)
def test_every_type_and_width_has_the_hosts_bits(kind: Kind, width: int, rng: Rng) -> None:
    for num in NUM_INPUTS:
        num_rows = int(rng.integers(8, 40))  # of 8 warps: whole stages and remainders
        weights, x = rows_of(random_blocks, kind, num_rows, width, rng), inputs(rng, num, width)
        assert same_bits(on_card(kind, weights, x), dot(kind, weights, x, "portable")), (num, num_rows)


@pytest.mark.parametrize("blocks", [random_blocks, hostile_blocks])
@pytest.mark.parametrize("kind", BLOCK_KINDS, ids=lambda kind: kind.name)
def test_edges_of_scales_and_activations(kind: Kind, blocks: MakeBlocks, rng: Rng) -> None:
    width = 512
    x = np.zeros((8, width), np.float32)
    x[1] = -0.0
    x[2] = rng.standard_normal(width) * 1e-30
    x[3] = rng.standard_normal(width) * 1e20
    x[4] = rng.integers(-254, 255, width) / 2
    x[4, ::32] = 127.0
    x[5] = 127.0
    x[6] = -127.0
    x[7] = rng.standard_normal(width)
    weights = rows_of(blocks, kind, 20, width, rng)
    expected = dot(kind, weights, x, "portable")
    several = on_card(kind, weights, x)
    assert same_numbers(several, expected)
    assert all(same_numbers(on_card(kind, weights, x[i : i + 1]), expected[i : i + 1]) for i in (1, 4, 6, 7))


@pytest.mark.parametrize("kind", BLOCK_KINDS, ids=lambda kind: kind.name)
def test_every_code_of_a_type_is_unpacked_as_the_host_does(kind: Kind, rng: Rng) -> None:
    """Two thousand rows of one super-block have every pattern of the largest code book in some place."""
    width = max(256, kind.block_values)
    weights, x = rows_of(random_blocks, kind, 2000, width, rng), inputs(rng, 1, width)
    x[:] = rng.standard_normal(width)
    assert same_bits(on_card(kind, weights, x), dot(kind, weights, x, "portable"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name in ("F32", "F16", "BF16")], ids=lambda kind: kind.name)
@pytest.mark.parametrize("width", [4, 36, 100, 516])
def test_float_rows_of_any_width(kind: Kind, width: int, rng: Rng) -> None:
    weights, x = rows_of(random_blocks, kind, 11, width, rng), rng.standard_normal((3, width)).astype(np.float32)
    assert same_bits(on_card(kind, weights, x), dot(kind, weights, x, "portable"))


@pytest.mark.parametrize("name", ["Q4_K", "IQ3_S", "MXFP4", "NVFP4", "F16"])
def test_an_inputs_bits_do_not_depend_on_its_company(name: str, rng: Rng) -> None:
    kind = next(kind for kind in KINDS if kind.name == name)
    weights, x = rows_of(random_blocks, kind, 9, 768, rng), inputs(rng, 8, 768)
    together = on_card(kind, weights, x)
    assert all(same_bits(on_card(kind, weights, x[i : i + n]), together[i : i + n]) for i, n in ((0, 1), (3, 1), (2, 4), (5, 3)))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_embeddings_are_the_tables_values(kind: Kind, rng: Rng) -> None:
    for width in (max(32, kind.block_values), 2304):
        table = rows_of(hostile_blocks, kind, 7, width, rng)
        tokens = [6, 0, 3, 3, 1]
        expected = native.dequantise(kind.type_id, table.reshape(-1)).reshape(7, width)[tokens]
        assert same_bits(native.card_embed(kind.type_id, table, width, tokens), expected)
