"""The weight types: their values against gguf-py and ggml, their list, and the search for blocks that cannot be used."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest

from appliance.gguf_types import WEIGHT_TYPES
from cuda_ext import _native as native
from tests.op_rig import same_bits
from tests.quant_rig import (
    BAD_F16,
    BLOCK_KINDS,
    KINDS,
    Bytes,
    Floats,
    Kind,
    MakeBlocks,
    ggml,
    hostile_blocks,
    kind_named,
    num_f16,
    random_blocks,
    set_f16,
)

PAGE = Path(__file__).parents[1] / "docs" / "quants.md"
NOT_IN_GGUF_PY = {"Q1_0", "Q2_0"}
SLOW_TO_QUANTISE = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"}


def by_name(kind: Kind) -> str:
    return kind.name


every_make = pytest.mark.parametrize("make", [random_blocks, hostile_blocks], ids=["random", "hostile"])
every_kind = pytest.mark.parametrize("kind", KINDS, ids=by_name)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def gguf_values(kind: Kind, blocks: Bytes) -> Floats:
    with np.errstate(over="ignore"):
        values: Floats = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind.type_id)).reshape(-1).astype(np.float32)
    return values


@every_make
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name not in NOT_IN_GGUF_PY], ids=by_name)
def test_values_are_those_of_gguf_py(kind: Kind, make: MakeBlocks, rng: np.random.Generator) -> None:
    blocks = make(kind, 300, rng)
    assert same_bits(native.dequantise(kind.type_id, blocks.reshape(-1)), gguf_values(kind, blocks))


@every_make
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name != "F32"], ids=by_name)
def test_values_are_those_of_ggml(kind: Kind, make: MakeBlocks, rng: np.random.Generator) -> None:
    blocks = make(kind, 300, rng)
    assert same_bits(native.dequantise(kind.type_id, blocks.reshape(-1)), ggml().dequantise(kind, blocks))


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind.name in SLOW_TO_QUANTISE else (), id=kind.name) for kind in BLOCK_KINDS],
)
def test_what_ggml_quantises_reads_back_close_to_the_original(kind: Kind, rng: np.random.Generator) -> None:
    values = rng.standard_normal((1 if kind.name in SLOW_TO_QUANTISE else 16, 512)).astype(np.float32)
    blocks = ggml().quantise(kind, values).reshape(-1, kind.block_bytes)
    ours = native.dequantise(kind.type_id, blocks.reshape(-1))
    assert same_bits(ours, ggml().dequantise(kind, blocks))
    assert np.corrcoef(ours, values.reshape(-1))[0, 1] > 0.7


@every_kind
def test_no_block_with_finite_scales_is_called_bad(kind: Kind, rng: np.random.Generator) -> None:
    for make in (random_blocks, hostile_blocks):
        assert native.first_bad_block(kind.type_id, make(kind, 1000, rng).reshape(-1)) is None


def _spoilt(kind: Kind, blocks: Bytes, field: int, bits: int, index: int) -> Bytes:
    spoilt = blocks.copy()
    one = spoilt[index : index + 1]
    set_f16(kind, one, field, np.array([bits], np.uint16))
    return spoilt


@pytest.mark.parametrize("kind", [kind for kind in BLOCK_KINDS if num_f16(kind)], ids=by_name)
def test_a_scale_or_minimum_that_is_not_finite_is_found(kind: Kind, rng: np.random.Generator) -> None:
    blocks = random_blocks(kind, 700, rng)
    for field in range(num_f16(kind)):
        for bits in BAD_F16:
            for index in (0, 255, 256, 699):
                spoilt = _spoilt(kind, blocks, field, bits, index)
                assert native.first_bad_block(kind.type_id, spoilt.reshape(-1)) == index


def test_nan_scales_of_the_fp4_types_are_found(rng: np.random.Generator) -> None:
    mxfp4, nvfp4 = kind_named("MXFP4"), kind_named("NVFP4")
    blocks = random_blocks(mxfp4, 300, rng)
    blocks[270, 0] = 255
    assert native.first_bad_block(mxfp4.type_id, blocks.reshape(-1)) == 270
    for byte in range(4):
        for bits in (0x7F, 0xFF):
            blocks = random_blocks(nvfp4, 300, rng)
            blocks[299, byte] = bits
            assert native.first_bad_block(nvfp4.type_id, blocks.reshape(-1)) == 299


@pytest.mark.parametrize(("name", "bits"), [("F32", "<u4"), ("F16", "<u2"), ("BF16", "<u2")])
def test_the_first_value_that_is_not_finite_is_found(name: str, bits: str, rng: np.random.Generator) -> None:
    kind = kind_named(name)
    patterns = {"F32": (0x7F800000, 0xFF800000, 0x7FC00000), "F16": BAD_F16, "BF16": (0x7F80, 0xFF80, 0x7FC0)}[name]
    for pattern in patterns:
        for index in (0, 511, 999):
            values = random_blocks(kind, 1000, rng).copy()
            values.view(bits)[index:] = pattern
            assert native.first_bad_block(kind.type_id, values.reshape(-1)) == index


def test_the_file_reader_and_the_kernels_know_the_same_types() -> None:
    ours = {kind.name: (kind.type_id, kind.block_values, kind.block_bytes) for kind in KINDS}
    assert ours == {kind.name: (number, kind.block_values, kind.block_bytes) for number, kind in WEIGHT_TYPES.items()}


def test_sizes_are_those_of_gguf_py() -> None:
    for kind in KINDS:
        if kind.type_id in {int(number) for number in gguf.GGML_QUANT_SIZES}:
            assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind.type_id)] == (kind.block_values, kind.block_bytes)


def test_the_page_lists_every_type_with_its_numbers() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted((kind.name, *map(str, (kind.type_id, kind.block_values, kind.block_bytes))) for kind in KINDS)


def test_arrays_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown weight type 999"):
        native.dequantise(999, np.zeros(18, np.uint8))
    with pytest.raises(ValueError, match="17 bytes are not whole blocks of Q4_0"):
        native.dequantise(2, np.zeros(17, np.uint8))
    with pytest.raises(ValueError, match="not whole blocks of 32"):
        native.quantise(np.zeros(33, np.float32))
    with pytest.raises(ValueError, match="unknown instruction set 'mmx'"):
        native.quantise(np.zeros(32, np.float32), 1.0, "mmx")
    with pytest.raises(ValueError, match="does not take 20 bytes of Q4_0"):
        native.dot(2, np.zeros((1, 20), np.uint8), np.zeros((1, 32), np.float32), np.zeros((1, 1), np.float32))
    with pytest.raises(ValueError, match="out must have one row per input row"):
        native.dot(2, np.zeros((1, 18), np.uint8), np.zeros((1, 32), np.float32), np.zeros((2, 1), np.float32))
    with pytest.raises(ValueError, match="differ in length"):
        native.swiglu(np.zeros(8, np.float32), np.zeros(8, np.float32), np.zeros(7, np.float32))
