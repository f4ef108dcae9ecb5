"""Real loader processes: killed, started twice, short of room, left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from appliance.memory.arena import Arena, ArenaState, read_header
from tests.arena_rig import DEADLINE_S, assert_holds_model, ending_of, model_place, run_loader, shm_folder, start_loader, used_bytes
from tests.eventually import eventually
from tests.gguf_writing import ModelShape, write_model

SLOW_BYTES_PER_S = 5 << 20
"""The expert tensors of the model take more than a second at that rate."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    types = {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q8_0"}
    return write_model(tmp_path_factory.mktemp("loader") / "model.gguf", ModelShape(layers=3, experts=16), types=types)


@pytest.fixture
def folder() -> Iterator[Path]:
    with shm_folder() as path:
        yield path


def test_a_loader_leaves_a_sealed_arena_and_says_how_far_it_is(model: Path, folder: Path) -> None:
    ending = run_loader(model, folder)
    assert (ending.exit_code, ending.fatal) == (0, None)
    assert {progress.stage for progress in ending.loads} == {"reserve", "arena"}
    assert ending.loads[-1].done_bytes == ending.loads[-1].total_bytes
    with Arena.open(model_place(model, folder)) as arena:
        assert_holds_model(arena, [model])


def test_progress_of_a_slow_load_grows_and_names_rate_and_time_left(model: Path, folder: Path) -> None:
    ending = ending_of(start_loader(model, folder, bytes_per_s=SLOW_BYTES_PER_S))
    loads = [progress for progress in ending.loads if progress.stage == "arena"]
    assert 3 <= len(loads) <= 30
    assert [progress.done_bytes for progress in loads] == sorted({progress.done_bytes for progress in loads})
    assert all(progress.bytes_per_s > 0 and progress.left_s is not None for progress in loads)


def test_five_kills_at_any_moment_take_no_more_memory_and_the_sixth_start_works(model: Path, folder: Path) -> None:
    place = model_place(model, folder)
    chance = random.Random(6)
    for _ in range(5):
        loader = start_loader(model, folder, bytes_per_s=SLOW_BYTES_PER_S)
        eventually(place.path.exists, "a file")
        time.sleep(chance.uniform(0.0, 1.0))  # not to wait for anything: the kill is to land anywhere
        loader.kill()
        assert ending_of(loader).exit_code == -signal.SIGKILL
        assert [path.name for path in folder.iterdir()] == [place.path.name]
        assert used_bytes(folder) <= -(-place.file_bytes // 4096) * 4096
    assert run_loader(model, folder).exit_code == 0
    with Arena.open(place) as arena:
        assert_holds_model(arena, [model])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_loader_at_once_and_the_next_one_fills_anew(model: Path, folder: Path, number: signal.Signals) -> None:
    loader = start_loader(model, folder, bytes_per_s=SLOW_BYTES_PER_S)
    eventually(lambda: state_of(model, folder) is ArenaState.FILLING, "filling")
    loader.send_signal(number)
    assert ending_of(loader).exit_code == -number
    assert run_loader(model, folder).exit_code == 0


def test_of_two_loaders_one_waits_and_finds_the_arena_sealed(model: Path, folder: Path) -> None:
    first = start_loader(model, folder, bytes_per_s=SLOW_BYTES_PER_S)
    eventually(lambda: state_of(model, folder) is ArenaState.FILLING, "filling")
    second = ending_of(start_loader(model, folder))
    assert ending_of(first).exit_code == second.exit_code == 0
    assert f'"pid": {first.pid}' in second.log
    assert "waiting for it" in second.log
    assert any(0 < progress.done_bytes < progress.total_bytes for progress in second.loads)


def test_a_second_start_maps_the_arena_in_well_under_a_second(model: Path, folder: Path) -> None:
    run_loader(model, folder)
    place = model_place(model, folder)
    before = place.path.stat()
    assert run_loader(model, folder).exit_code == 0
    after = place.path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    began = time.perf_counter()
    Arena.open(place).close()
    assert time.perf_counter() - began < 0.5


def test_a_loader_whose_output_nobody_reads_ends_and_gives_the_memory_back(model: Path, folder: Path) -> None:
    loader = start_loader(model, folder, bytes_per_s=SLOW_BYTES_PER_S)
    eventually(lambda: state_of(model, folder) is ArenaState.FILLING, "filling")
    assert loader.stdout is not None
    assert loader.stderr is not None
    loader.stdout.close()
    assert loader.wait(DEADLINE_S) == 1
    assert "Traceback" not in loader.stderr.read()
    loader.stderr.close()
    assert not list(folder.iterdir())


def test_a_model_that_cannot_be_read_ends_with_a_fatal_line(tmp_path: Path, folder: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    ending = run_loader(model, folder)
    assert ending.exit_code == 1
    assert ending.fatal is not None
    assert ending.fatal.code == "corrupt_model"
    assert str(model) in ending.fatal.text


def test_a_folder_that_is_not_there_ends_with_a_fatal_line(model: Path, tmp_path: Path) -> None:
    ending = run_loader(model, tmp_path / "nowhere")
    assert ending.exit_code == 1
    assert ending.fatal is not None
    assert ending.fatal.code == "bad_setting"
    assert "nowhere" in ending.fatal.text


def test_too_small_a_tmpfs_is_a_sentence_with_both_sizes(model: Path, tmp_path: Path) -> None:
    ending = run_in_small_tmpfs(model, tmp_path, 4 << 20)
    assert ending.returncode == 1
    assert '"code":"does_not_fit"' in ending.stdout
    assert "the arena needs 6.57 MiB" in ending.stdout
    assert "4.00 MiB free of 4.00 MiB" in ending.stdout


def test_a_tmpfs_that_just_fits_is_enough(model: Path, tmp_path: Path) -> None:
    place = model_place(model, tmp_path)
    ending = run_in_small_tmpfs(model, tmp_path, -(-place.file_bytes // 4096) * 4096)
    assert ending.returncode == 0, ending.stdout


def test_a_loader_never_maps_the_arena(model: Path, folder: Path) -> None:
    loader = start_loader(model, folder, bytes_per_s=SLOW_BYTES_PER_S)
    eventually(lambda: state_of(model, folder) is ArenaState.FILLING, "filling")
    mapped = [region.path for region in psutil.Process(loader.pid).memory_maps(grouped=True)]
    assert not [path for path in mapped if path.endswith(".arena")]
    loader.kill()
    ending_of(loader)


def run_in_small_tmpfs(model: Path, folder: Path, num_bytes: int) -> subprocess.CompletedProcess[str]:
    """A loader whose folder is a tmpfs of that size, in a mount namespace of its own."""
    mounted = [
        *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c"),
        'mount -t tmpfs -o size="$1" none "$2" && shift 2 && exec "$@"',
        *("sh", str(num_bytes), str(folder)),
    ]
    if subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine lets no one make a mount namespace")
    loader = [sys.executable, "-m", "appliance.memory.loader", "--model", str(model), "--shm-dir", str(folder)]
    return subprocess.run([*mounted, *loader], capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def state_of(model: Path, folder: Path) -> ArenaState | None:
    path = model_place(model, folder).path
    if not path.exists():
        return None
    descriptor = os.open(path, os.O_RDONLY)
    try:
        header = read_header(descriptor)
    finally:
        os.close(descriptor)
    return header and header.state
