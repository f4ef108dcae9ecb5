"""Bytes for people: 1,610,612,736 is "1.50 GiB"."""

from __future__ import annotations

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_UNITS = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))


def format_bytes(num_bytes: int) -> str:
    """A binary unit and at least three significant digits: "1.50 GiB", "372 KiB", "17 B"."""
    for unit, size in _UNITS:
        if abs(num_bytes) >= size:
            value = num_bytes / size
            digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{num_bytes} B"
