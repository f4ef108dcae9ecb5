"""The benchmark of the host engine: its model files are read by others, and its engine does what it is asked."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from scripts.bench_host import Figure, TypeResult, table
from scripts.host_bench.contestants import _ours, resident_bytes
from scripts.host_bench.memory import read_bandwidth
from scripts.host_bench.model import BenchModel, write_model
from tests.arena_rig import shm_folder
from tests.gguf_writing import ModelShape

SMALL = ModelShape(layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, experts=4, top_k=2, width=256, vocab=300, context=256)


@pytest.fixture
def model(tmp_path: Path) -> BenchModel:
    written = BenchModel(tmp_path / "m.gguf", SMALL, "IQ3_S")
    write_model(written)
    return written


def test_a_model_file_holds_the_tensors_that_gguf_py_expects(model: BenchModel) -> None:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(model.path).tensors}
    assert {name: tuple(map(int, tensor.shape)) for name, tensor in tensors.items()} == SMALL.tensors()
    assert tensors["blk.1.ffn_down_exps.weight"].tensor_type == gguf.GGMLQuantizationType.IQ3_S
    assert sum(tensor.n_bytes for tensor in tensors.values()) == model.file_bytes
    assert np.isfinite(gguf.quants.dequantize(tensors["output.weight"].data, tensors["output.weight"].tensor_type)).all()


def test_a_token_needs_its_own_experts_and_embedding_only(model: BenchModel) -> None:
    tensors = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(model.path).tensors}
    unused = sum(nbytes for name, nbytes in tensors.items() if "_exps." in name) // 2 + tensors["token_embd.weight"] * 299 // 300
    assert abs(model.bytes_per_token - (model.file_bytes - unused)) <= 2


def test_a_file_that_is_there_in_full_is_kept(model: BenchModel) -> None:
    before = model.path.stat().st_mtime_ns
    write_model(model)
    assert model.path.stat().st_mtime_ns == before


def test_the_engine_answers_prompts_and_decodes(model: BenchModel) -> None:
    with shm_folder() as shm_dir, _ours(model, 1, shm_dir) as run:
        assert run("prompt", 70) > 0
        assert run("decode", 3) > 0
    assert resident_bytes() > 1 << 20


def test_the_table_says_both_rates_and_their_ratio() -> None:
    figure = Figure("decode", 32, 30.0, 20.0, (29.0, 31.0), (19.0, 21.0))
    result = TypeResult("Q4_K", [figure], 3 << 30, 2 << 30, 10**9)
    assert table([result], 60e9).splitlines()[-1] == "| Q4_K | 30.0 / 20.0 = **1.50** | 3.00 / 2.00 | 50% |"


def test_some_memory_bandwidth_is_measured() -> None:
    assert read_bandwidth(1) > 1e8
