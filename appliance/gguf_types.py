"""The tensor types of GGUF: number, name, and how many bytes hold how many values.

Our own table, because importing gguf-py costs a quarter of a second in every process; tests hold it against gguf-py and the native module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One tensor type; values are stored in blocks of `block_values`, each `block_bytes` long."""

    type_id: int
    name: str
    block_values: int
    block_bytes: int

    def row_bytes(self, num_values: int) -> int:
        """Bytes of a row. ValueError unless the row is a whole number of blocks."""
        if num_values % self.block_values:
            raise ValueError(f"a {self.name} row of {num_values} values is no multiple of its block of {self.block_values}")
        return num_values // self.block_values * self.block_bytes


_WEIGHTS = (
    GgmlType(0, "F32", 1, 4),
    GgmlType(1, "F16", 1, 2),
    GgmlType(30, "BF16", 1, 2),
    GgmlType(2, "Q4_0", 32, 18),
    GgmlType(3, "Q4_1", 32, 20),
    GgmlType(6, "Q5_0", 32, 22),
    GgmlType(7, "Q5_1", 32, 24),
    GgmlType(8, "Q8_0", 32, 34),
    GgmlType(10, "Q2_K", 256, 84),
    GgmlType(11, "Q3_K", 256, 110),
    GgmlType(12, "Q4_K", 256, 144),
    GgmlType(13, "Q5_K", 256, 176),
    GgmlType(14, "Q6_K", 256, 210),
    GgmlType(19, "IQ1_S", 256, 50),
    GgmlType(29, "IQ1_M", 256, 56),
    GgmlType(16, "IQ2_XXS", 256, 66),
    GgmlType(17, "IQ2_XS", 256, 74),
    GgmlType(22, "IQ2_S", 256, 82),
    GgmlType(18, "IQ3_XXS", 256, 98),
    GgmlType(21, "IQ3_S", 256, 110),
    GgmlType(20, "IQ4_NL", 32, 18),
    GgmlType(23, "IQ4_XS", 256, 136),
    GgmlType(39, "MXFP4", 32, 17),
    GgmlType(40, "NVFP4", 64, 36),
    GgmlType(34, "TQ1_0", 256, 54),
    GgmlType(35, "TQ2_0", 256, 66),
    GgmlType(41, "Q1_0", 128, 18),
    GgmlType(42, "Q2_0", 64, 18),
)
_OTHERS = (
    GgmlType(9, "Q8_1", 32, 40),
    GgmlType(15, "Q8_K", 256, 292),
    GgmlType(24, "I8", 1, 1),
    GgmlType(25, "I16", 1, 2),
    GgmlType(26, "I32", 1, 4),
    GgmlType(27, "I64", 1, 8),
    GgmlType(28, "F64", 1, 8),
)

WEIGHT_TYPES: Mapping[int, GgmlType] = MappingProxyType({kind.type_id: kind for kind in _WEIGHTS})
"""Types that a weight matrix may have."""

KNOWN_TYPES: Mapping[int, GgmlType] = MappingProxyType({kind.type_id: kind for kind in (*_WEIGHTS, *_OTHERS)})
"""Types whose size is known, so that a file holding them can be indexed."""
