"""Blocks of every weight type for the tests of quantised rows: random, hostile, and really quantised by ggml."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cuda_ext import _native as native

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Rng = np.random.Generator

SIZES = (32, 64, 96, 128, 256, 640, 768, 992, 2048, 2080, 2560, 4352)
HOSTILE_F16 = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF], np.uint16)
"""Zeros, subnormals, the smallest normal number, ones, the largest."""
BAD_F16 = (0x7C00, 0xFC00, 0x7E00, 0x7C01)
"""Infinities and NaN."""

F16_FIELDS = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "Q1_0", "Q2_0", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"), (0,)),
    **dict.fromkeys(("IQ3_S", "IQ1_S", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Offsets of f16 scales and minima in a block. IQ1_M, MXFP4 and NVFP4 keep theirs otherwise."""


@dataclass(frozen=True)
class Kind:
    name: str
    type_id: int
    block_values: int
    block_bytes: int

    @property
    def is_float(self) -> bool:
        return self.block_values == 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for size in SIZES if size % self.block_values == 0)


MakeBlocks = Callable[[Kind, int, Rng], Bytes]
KINDS = tuple(Kind(name, *numbers) for name, numbers in native.quant_types().items())
BLOCK_KINDS = tuple(kind for kind in KINDS if not kind.is_float)


def kind_named(name: str) -> Kind:
    return next(kind for kind in KINDS if kind.name == name)


def set_f16(kind: Kind, blocks: Bytes, field: int, values: NDArray[np.uint16]) -> None:
    """Writes the f16 scale or minimum number `field` of every block."""
    if kind.name == "IQ1_M":  # a nibble on top of each of four words
        words = blocks[:, 48:].copy().view(np.uint16)
        for i in range(4):
            words[:, i] = (words[:, i] & 0x0FFF) | ((values >> 4 * i & 15) << 12)
        blocks[:, 48:] = words.view(np.uint8)
        return
    offset = F16_FIELDS[kind.name][field]
    blocks[:, offset : offset + 2] = values.astype(np.uint16).reshape(-1, 1).view(np.uint8)


def num_f16(kind: Kind) -> int:
    return 1 if kind.name == "IQ1_M" else len(F16_FIELDS.get(kind.name, ()))


def random_blocks(kind: Kind, num_blocks: int, rng: Rng) -> Bytes:
    """Any bytes under finite scales [blocks, block bytes]."""
    if kind.is_float:
        return _float_blocks(kind, (rng.standard_normal(num_blocks) * 2.0 ** rng.integers(-8, 8, num_blocks)).astype(np.float32))
    blocks = rng.integers(0, 256, (num_blocks, kind.block_bytes), dtype=np.uint8)
    for field in range(num_f16(kind)):
        bits = rng.integers(0, 1 << 16, num_blocks, dtype=np.uint16)
        set_f16(kind, blocks, field, np.where(bits & 0x7C00 == 0x7C00, bits ^ 0x4000, bits).astype(np.uint16))
    if kind.name == "MXFP4":  # up to 2^96: values that float32 holds
        blocks[:, 0] = rng.integers(0, 224, num_blocks)
    if kind.name == "NVFP4":
        blocks[:, :4] = rng.integers(0, 0x7F, (num_blocks, 4))
    return blocks


def hostile_blocks(kind: Kind, num_blocks: int, rng: Rng) -> Bytes:
    """Random quants under scales at the edges of their format."""
    if kind.is_float:
        edges = np.array([0.0, -0.0, 1e-38, -6e-8, 6e4, -6e4, 1.0, 1e-41 if kind.name == "F32" else 1e-7], np.float32)
        return _float_blocks(kind, rng.choice(edges, num_blocks))
    blocks = random_blocks(kind, num_blocks, rng)
    for field in range(num_f16(kind)):
        set_f16(kind, blocks, field, rng.choice(HOSTILE_F16, num_blocks))
    if kind.name == "MXFP4":
        blocks[:, 0] = rng.choice(np.array([0, 1, 2, 127, 128, 223], np.uint8), num_blocks)
    if kind.name == "NVFP4":
        blocks[:, :4] = rng.choice(np.array([0, 1, 7, 8, 0x38, 0x7E, 0x80], np.uint8), (num_blocks, 4))
    return blocks


def _float_blocks(kind: Kind, values: Floats) -> Bytes:
    if kind.name == "F16":
        return values.astype(np.float16).view(np.uint8).reshape(-1, 2)
    if kind.name == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1, 2)
    return values.view(np.uint8).reshape(-1, 4)


def rows_of(blocks: MakeBlocks, kind: Kind, num_rows: int, num_values: int, rng: Rng) -> Bytes:
    """Weight rows [rows, row bytes]."""
    return blocks(kind, num_rows * num_values // kind.block_values, rng).reshape(num_rows, -1)


def dot(kind: Kind, weights: Bytes, x: Floats, isa: str) -> Floats:
    """[inputs, rows]"""
    out = np.empty((len(x), len(weights)), np.float32)
    native.dot(kind.type_id, weights, x, out, isa)
    return out


class _Traits(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("block_values", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("block_bytes", ctypes.c_size_t),
        ("is_quantised", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
        ("from_float", ctypes.c_void_p),
    )


class Ggml:
    """ggml's own quantisers and dequantisers, from the wheel `libggml-python`."""

    def __init__(self, library: Path) -> None:
        self._lib = ctypes.CDLL(str(library))
        self._lib.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
        self._lib.ggml_quantize_chunk.restype = ctypes.c_size_t
        self._lib.ggml_quantize_chunk.argtypes = (
            *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
            *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
        )

    def quantise(self, kind: Kind, values: Floats) -> Bytes:
        """Rows [rows, values] -> [rows, row bytes], every value equally important."""
        rows, width = values.shape
        out = np.zeros((rows, width // kind.block_values * kind.block_bytes), np.uint8)
        importance = np.ones(width, np.float32)
        written = self._lib.ggml_quantize_chunk(kind.type_id, values.ctypes.data, out.ctypes.data, 0, rows, width, importance.ctypes.data)
        assert written == out.nbytes
        return out

    def dequantise(self, kind: Kind, blocks: Bytes) -> Floats:
        traits = self._lib.ggml_get_type_traits(kind.type_id).contents
        assert (traits.block_values, traits.block_bytes) == (kind.block_values, kind.block_bytes)
        out = np.zeros(len(blocks) * kind.block_values, np.float32)
        to_float = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(traits.to_float)
        to_float(blocks.ctypes.data, out.ctypes.data, out.size)
        return out


@cache
def ggml() -> Ggml:
    spec = importlib.util.find_spec("libggml")
    assert spec is not None, "libggml-python is a development dependency"
    assert spec.origin is not None
    return Ggml(Path(spec.origin).parent / "lib64" / "libggml-base.so")
