"""Bytes for people and back."""

from __future__ import annotations

import pytest

from appliance.units import GIB, KIB, MIB, TIB, format_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (372 * KIB, "372 KiB"),
        (GIB + GIB // 2, "1.50 GiB"),
        (10 * MIB - 1, "10.0 MiB"),
        (MIB - 1, "1024 KiB"),
        (5000 * TIB, "5000 TiB"),
        (-2 * MIB, "-2.00 MiB"),
    ],
)
def test_sizes_are_written_with_three_digits(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
