"""Bytes for people: 1,610,612,736 <-> "1.50 GiB"."""

from __future__ import annotations

import re

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_UNITS = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
_FACTORS = {
    "": 1,
    "b": 1,
    **{letter: 1 << 10 * power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": int(1000**power) for power, letter in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def format_bytes(num_bytes: int) -> str:
    """A binary unit and at least three significant digits: "1.50 GiB", "372 KiB", "17 B"."""
    for unit, size in _UNITS:
        if abs(num_bytes) >= size:
            value = num_bytes / size
            digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{num_bytes} B"


def parse_bytes(text: str) -> int:
    """ "16GiB", "16 G" (binary too), "16GB" (decimal) or "17179869184". ValueError with a sentence otherwise."""
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size; write bytes or a number with KiB, MiB, GiB, TiB (binary) or KB, MB, GB, TB (decimal)")
    whole, _, fraction = match[1].partition(".")
    digits = int(whole + fraction)
    return digits * factor // int(10 ** len(fraction))
