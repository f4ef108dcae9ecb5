"""Damaged files end in an error of ours, whatever byte is wrong: no crash, no hang, no memory for what is not there."""

from __future__ import annotations

import contextlib
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.errors import TandemError
from appliance.gguf_file import open_gguf
from appliance.memory.layout import arena_layout, part_sources
from appliance.models.config import read_config
from tests.gguf_writing import ARRAY, I32, STRING, ModelShape, model_content

SHAPE = ModelShape(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, experts=2, top_k=1, width=32, vocab=8)
FUZZ = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def valid_file() -> bytes:
    content = model_content(SHAPE)
    content.set_key("tokenizer.ggml.tokens", ARRAY, (STRING, [f"t{index}" for index in range(SHAPE.vocab)]))
    content.set_key("tokenizer.ggml.token_type", ARRAY, (I32, [1] * SHAPE.vocab))
    return content.encode()


VALID = valid_file()
HEADER_BYTES = VALID.index(b"blk.0.ffn_down_exps.weight") + 100


def read_all(path: Path) -> None:
    model = open_gguf(path)
    config = read_config(model)
    layout = arena_layout(model, config)
    for source in part_sources(model, layout):
        end = source.first + (config.experts - 1) * source.stride + source.part.nbytes
        assert (
            end == model.tensors[source.tensor].nbytes
            or source.first + source.stride * config.experts == model.tensors[source.tensor].nbytes
        )
    for name in model.tensors:
        model.read(name).sum()
    assert model.fingerprint


def test_the_undamaged_file_is_fine(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(VALID)
    read_all(tmp_path / "m.gguf")


@FUZZ
@given(st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(VALID)
    for place, value in changes:
        damaged[place] = value
    (tmp_path / "m.gguf").write_bytes(damaged)
    with contextlib.suppress(TandemError):
        read_all(tmp_path / "m.gguf")


@FUZZ
@given(st.integers(0, HEADER_BYTES - 8), st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]), st.sampled_from([4, 8]))
def test_changed_numbers(tmp_path: Path, place: int, value: int, width: int) -> None:
    damaged = bytearray(VALID)
    damaged[place : place + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
    (tmp_path / "m.gguf").write_bytes(damaged)
    with contextlib.suppress(TandemError):
        read_all(tmp_path / "m.gguf")


@FUZZ
@given(st.integers(0, HEADER_BYTES), st.integers(0, 64), st.binary(max_size=64))
def test_bytes_taken_out_and_put_in(tmp_path: Path, place: int, taken: int, put: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(VALID[:place] + put + VALID[place + taken :])
    with contextlib.suppress(TandemError):
        read_all(tmp_path / "m.gguf")


@pytest.mark.parametrize("place", range(8, 24))
def test_huge_counts_take_no_memory(tmp_path: Path, place: int) -> None:
    damaged = bytearray(VALID)
    damaged[place] = 0x7F
    (tmp_path / "m.gguf").write_bytes(damaged)
    tracemalloc.start()
    try:
        with contextlib.suppress(TandemError):
            read_all(tmp_path / "m.gguf")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
