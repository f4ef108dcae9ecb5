"""The benchmark of the host engine: its model files are read by others, and its engine does what it is asked."""

from __future__ import annotations

import os
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from scripts.bench_host import Plan, Rounds
from scripts.host_bench.contestants import Contestant, Measured, Task, _ours, resident_bytes
from scripts.host_bench.memory import read_bandwidth
from scripts.host_bench.model import BenchModel, write_model
from scripts.host_bench.others import CpuTime
from scripts.host_bench.page import BEGIN, END, section, table, write_tables
from scripts.host_bench.results import Figure, HostRun, TypeResult
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
    with shm_folder() as shm_dir, _ours(model, 1, time.perf_counter, shm_dir) as run:
        assert run("prompt", 70) > 0
        assert run("decode", 3) > 0
    assert resident_bytes() > 1 << 20


DECODE, PROMPT = Task("decode", 32), Task("prompt", 128)


class Clockwork(Contestant):
    """Takes so long for a token, without taking that long."""

    process_ids = (os.getpid(),)

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s

    def measure(self, task: Task) -> Measured:
        return Measured(self._token_s * task.num_tokens, 3 << 30)


def a_run(*results: TypeResult, left_out: tuple[str, ...] = (), rounds: int = 1) -> HostRun:
    return HostRun(
        date="1 May 2026",
        cpu="A CPU",
        isa="avx2",
        num_threads=2,
        clock="wall",
        bandwidth=60e9,
        llama="llama",
        num_layers=12,
        tasks=(DECODE, PROMPT),
        rounds=rounds,
        results=results,
        left_out=left_out,
    )


Q4_K = TypeResult("Q4_K", (Figure(DECODE, (30.0, 29.0, 31.0), (20.0, 19.0, 21.0)),), 3 << 30, 2 << 30, 10**9, 0.04)


def measured(model: BenchModel, rounds: int, *, share_end: float, end: float) -> TypeResult:
    made = Rounds(Plan((DECODE, PROMPT), rounds, 1, "wall", None, 0.0), Clockwork(0.01), Clockwork(0.02))
    made.run(share_end, end)
    return made.result(model)


def test_every_round_measures_both_sides_of_every_task(model: BenchModel) -> None:
    later = time.monotonic() + 600
    result = measured(model, 3, share_end=later, end=later)
    assert [(figure.task, figure.rounds, round(figure.ratio, 6)) for figure in result.figures] == [(DECODE, 3, 2.0), (PROMPT, 3, 2.0)]
    assert result.our_resident_bytes == 3 << 30


def test_a_type_whose_share_is_over_makes_one_round(model: BenchModel) -> None:
    now = time.monotonic()
    assert {figure.rounds for figure in measured(model, 3, share_end=now, end=now + 600).figures} == {1}


def test_nothing_is_measured_when_time_is_up(model: BenchModel) -> None:
    now = time.monotonic()
    assert measured(model, 3, share_end=now, end=now).figures == ()


def test_the_table_says_both_rates_and_their_ratio() -> None:
    assert table(a_run(Q4_K)).splitlines()[-1] == "| Q4_K | 30.0 / 20.0 = **1.50** | - | 3.00 / 2.00 | 50% | 0.0 |"


def test_the_page_says_what_was_not_measured() -> None:
    text = section(a_run(Q4_K, left_out=("IQ3_S",), rounds=7))
    assert "Medians of 3 rounds (7 were asked for)." in text
    assert "Not measured, for want of time: Q4_K: prompt 128; IQ3_S: everything." in text


def test_tables_go_between_the_marks_and_leave_the_log_alone(tmp_path: Path) -> None:
    page = tmp_path / "host.md"
    page.write_text(f"method\n\n{BEGIN}\nold\n{END}\n\nlog\n")
    write_tables([a_run(Q4_K)], page)
    text = page.read_text()
    assert text.startswith(f"method\n\n{BEGIN}\n\n### A CPU (avx2)")
    assert text.endswith(f"| 0.0 |\n\nNot measured, for want of time: Q4_K: prompt 128.\n\n{END}\n\nlog\n")
    assert "old" not in text


def test_a_run_comes_back_from_its_file(tmp_path: Path) -> None:
    run = a_run(Q4_K, left_out=("IQ3_S",))
    run.write(tmp_path / "host-avx2.json")
    assert HostRun.read(tmp_path / "host-avx2.json") == run


def test_work_of_this_process_is_not_that_of_others() -> None:
    before = CpuTime(0.0, all_s=100.0, own_s=10.0)
    assert CpuTime(10.0, all_s=125.0, own_s=20.0).others_since(before) == 1.5


def test_some_memory_bandwidth_is_measured() -> None:
    assert read_bandwidth(1) > 1e8
