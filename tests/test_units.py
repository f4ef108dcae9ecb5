"""Bytes for people and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.units import GIB, KIB, MIB, TIB, format_bytes, parse_bytes


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


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("17", 17),
        ("17 B", 17),
        ("1.5GiB", GIB + GIB // 2),
        ("16 g", 16 * GIB),
        ("1GB", 10**9),
        ("2 kb", 2000),
        (" 3MiB ", 3 * MIB),
        ("0.1k", 102),
    ],
)
def test_sizes_are_read_with_binary_and_decimal_units(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XiB", "1,5 GiB", "1e9", "1 GiB 2", "²GiB"])
def test_what_is_no_size_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write bytes or a number with KiB"):
        parse_bytes(text)


@given(st.integers(0, 1 << 60))
def test_a_written_size_reads_back_within_one_percent(num_bytes: int) -> None:
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= num_bytes / 100
