"""Memory nodes: which ones are used, by machines and containers that this one is not, and what becomes of a refusal."""

from __future__ import annotations

import errno
import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from appliance.gguf_file import open_gguf
from appliance.memory import loader, nodes
from appliance.memory.arena import Arena
from appliance.memory.loader import Loader
from appliance.memory.nodes import spread_over_nodes, usable_nodes
from tests.arena_rig import assert_holds_model, model_place, shm_folder
from tests.gguf_writing import write_model

CORES = {0: "0-3,8", 1: "4-7", 2: "", 3: "9"}
"""Node 2 has no cores."""


class Kernel:
    """Takes policies, or refuses them with `errno`."""

    def __init__(self, refusal: int = 0) -> None:
        self.refusal = refusal
        self.policies: list[tuple[int, ...]] = []

    def set_policy(self, chosen: Sequence[int]) -> int:
        self.policies.append(tuple(chosen))
        return self.refusal


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "system"
    folder = root / "sys/devices/system/node"
    for node, cores in CORES.items():
        (folder / f"node{node}").mkdir(parents=True)
        (folder / f"node{node}/cpulist").write_text(cores + "\n")
    (folder / "has_memory").write_text("0-2\n")
    (root / "proc/self").mkdir(parents=True)
    allow(root, "0-3")
    return root


def allow(root: Path, allowed: str) -> None:
    (root / "proc/self/status").write_text(f"Name:\tpython\nMems_allowed:\t00000000,0000000f\nMems_allowed_list:\t{allowed}\n")


def test_nodes_need_memory_and_cores_that_this_process_may_use(root: Path) -> None:
    everywhere = set(range(10))
    assert usable_nodes(root, everywhere) == (0, 1)
    assert usable_nodes(root, {8, 9}) == (0,)
    allow(root, "1,3")
    assert usable_nodes(root, everywhere) == (1,)


def test_a_kernel_without_nodes_has_none(tmp_path: Path) -> None:
    assert usable_nodes(tmp_path, {0}) == ()


def test_the_policy_lasts_as_long_as_the_block(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(nodes.os, "sched_getaffinity", lambda _: set(range(8)))
    with spread_over_nodes(root, kernel.set_policy) as used:
        assert (used, kernel.policies) == ((0, 1), [(0, 1)])
    assert kernel.policies == [(0, 1), ()]


def test_one_node_is_left_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(nodes.os, "sched_getaffinity", lambda _: {4})
    with capture_logs() as logs, spread_over_nodes(root, kernel.set_policy) as used:
        assert used == ()
    assert (kernel.policies, logs) == ([], [])


def test_a_refusal_is_said_once_and_the_arena_is_filled_all_the_same(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(refusal=errno.EPERM)
    monkeypatch.setattr(nodes.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(loader, "spread_over_nodes", lambda: spread_over_nodes(root, kernel.set_policy))
    model = write_model(tmp_path / "model.gguf")
    with shm_folder() as folder:
        with capture_logs() as logs:
            Loader(open_gguf(model), folder, io.StringIO()).fill()
        with Arena.open(model_place(model, folder)) as arena:
            assert_holds_model(arena, [model])
    assert kernel.policies == [(0, 1)]
    assert [entry["reason"] for entry in logs if "memory nodes" in entry["event"]] == ["Operation not permitted"]


def test_the_space_is_taken_under_the_policy(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(nodes.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(loader, "spread_over_nodes", lambda: spread_over_nodes(root, kernel.set_policy))
    held: list[list[tuple[int, ...]]] = []
    take = nodes.os.posix_fallocate

    def fallocate(descriptor: int, start: int, length: int) -> None:
        held.append(list(kernel.policies))
        take(descriptor, start, length)

    monkeypatch.setattr("appliance.memory.arena_file.os.posix_fallocate", fallocate)
    with shm_folder() as folder:
        Loader(open_gguf(write_model(tmp_path / "model.gguf")), folder, io.StringIO()).fill()
    assert held == [[(0, 1)]]
    assert kernel.policies == [(0, 1), ()]


def test_this_kernel_understands_the_call() -> None:
    """Its own node by itself is a policy too; a container may forbid it, which is an answer as well."""
    own = usable_nodes() or (0,)
    try:
        answer = nodes._set_policy(own[:1])
        assert answer in (0, errno.EPERM, errno.ENOSYS)
        maps = Path("/proc/self/numa_maps")
        if answer == 0 and maps.exists():
            assert f" interleave:{own[0]} " in maps.read_text()
        assert nodes._set_policy((1023,)) in (errno.EINVAL, errno.EPERM, errno.ENOSYS)
    finally:
        nodes._set_policy(())
