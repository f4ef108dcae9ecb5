"""Limits of the container, read from files like those of real machines and containers."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from appliance.errors import SettingsError
from appliance.memory.limits import memory_limit, shm_space, usable_cores, visible_gpus
from appliance.units import GIB, MIB

V1_NO_LIMIT = "9223372036854771712"
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/{name} rw,relatime - cgroup cgroup rw,{name}\n"


class FakeSystem:
    """`/proc` and `/sys` of a machine with 64 GiB, 48 of them free."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(
            "proc/meminfo", "MemTotal:       67108864 kB\nMemFree:        1000 kB\nMemAvailable:   50331648 kB\nHugePages_Total:       0\n"
        )

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def own_group(self, lines: str, mounts: str) -> None:
        self.write("proc/self/cgroup", lines)
        self.write("proc/self/mountinfo", "22 1 0:21 / / rw - overlay overlay rw\n" + mounts)

    def group_v2(self, path: str, limit: str, current: int, inactive: int = 0, cpu: str = "max 100000") -> None:
        folder = f"sys/fs/cgroup{path}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{current}\n")
        self.write(f"{folder}/memory.stat", f"anon 5\nfile 7\ninactive_file {inactive}\n")
        self.write(f"{folder}/cpu.max", f"{cpu}\n")

    def group_v1(self, path: str, limit: str, usage: int, inactive: int = 0) -> None:
        folder = f"sys/fs/cgroup/memory{path}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{usage}\n")
        self.write(f"{folder}/memory.stat", f"cache 1\ninactive_file 3\ntotal_inactive_file {inactive}\n")


@pytest.fixture
def system(tmp_path: Path) -> FakeSystem:
    return FakeSystem(tmp_path)


def test_without_cgroups_the_machine_decides(system: FakeSystem) -> None:
    limit = memory_limit(system.root)
    assert (limit.limit_bytes, limit.available_bytes, limit.source) == (64 * GIB, 48 * GIB, "the machine's memory")


def test_version_2_in_a_container_with_a_namespace_of_its_own(system: FakeSystem) -> None:
    system.own_group("0::/\n", V2_MOUNT.format(root="/"))
    system.group_v2("", str(8 * GIB), current=3 * GIB, inactive=1 * GIB)
    limit = memory_limit(system.root)
    assert (limit.limit_bytes, limit.available_bytes) == (8 * GIB, 6 * GIB)
    assert "the container's memory limit (memory.max" in limit.source


def test_version_2_the_tightest_group_above_decides(system: FakeSystem) -> None:
    system.own_group("0::/pod/container/inner\n", V2_MOUNT.format(root="/"))
    system.group_v2("/pod/container/inner", "max", current=0)
    system.group_v2("/pod/container", str(16 * GIB), current=1 * GIB)
    system.group_v2("/pod", str(20 * GIB), current=14 * GIB)
    limit = memory_limit(system.root)
    assert (limit.limit_bytes, limit.available_bytes) == (20 * GIB, 6 * GIB)


def test_a_limit_above_the_machines_memory_does_not_help(system: FakeSystem) -> None:
    system.own_group("0::/\n", V2_MOUNT.format(root="/"))
    system.group_v2("", str(256 * GIB), current=0)
    assert memory_limit(system.root).available_bytes == 48 * GIB


def test_version_1_where_the_mount_shows_the_containers_group_as_its_root(system: FakeSystem) -> None:
    system.own_group("4:memory:/docker/abc\n0::/\n", V1_MOUNT.format(root="/docker/abc", name="memory"))
    system.group_v1("", str(4 * GIB), usage=2 * GIB, inactive=512 * MIB)
    limit = memory_limit(system.root)
    assert (limit.limit_bytes, limit.available_bytes) == (4 * GIB, 2 * GIB + 512 * MIB)


def test_version_1_without_a_limit_leaves_the_machine(system: FakeSystem) -> None:
    system.own_group("4:memory:/a\n", V1_MOUNT.format(root="/", name="memory"))
    system.group_v1("/a", V1_NO_LIMIT, usage=1)
    system.group_v1("", V1_NO_LIMIT, usage=1)
    assert memory_limit(system.root).source == "the machine's memory"


def test_version_1_and_2_side_by_side_are_both_read(system: FakeSystem) -> None:
    unified = "40 31 0:40 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    system.own_group("4:memory:/a\n0::/\n", V1_MOUNT.format(root="/", name="memory") + unified)
    system.write("sys/fs/cgroup/unified/cgroup.procs", "")
    system.group_v1("/a", str(5 * GIB), usage=0)
    assert memory_limit(system.root).limit_bytes == 5 * GIB


def test_a_group_that_the_mount_does_not_show_falls_back_to_the_mount(system: FakeSystem) -> None:
    system.own_group("0::/../elsewhere\n", V2_MOUNT.format(root="/"))
    system.group_v2("", str(2 * GIB), current=0)
    assert memory_limit(system.root).limit_bytes == 2 * GIB


def test_a_group_that_is_over_its_limit_has_nothing_left(system: FakeSystem) -> None:
    system.own_group("0::/\n", V2_MOUNT.format(root="/"))
    system.group_v2("", str(1 * GIB), current=2 * GIB)
    assert memory_limit(system.root).available_bytes == 0


def test_garbage_in_the_files_is_no_limit(system: FakeSystem) -> None:
    system.own_group("nonsense\n\n", "short\n1 2 3 4 5 - cgroup2\n")
    assert memory_limit(system.root).limit_bytes == 64 * GIB


def test_the_real_machine_has_what_psutil_sees() -> None:
    limit = memory_limit()
    assert 0 < limit.available_bytes <= limit.limit_bytes <= psutil.virtual_memory().total


def test_cores_are_bounded_by_affinity() -> None:
    assert 1 <= usable_cores() <= len(psutil.Process().cpu_affinity())


@pytest.mark.parametrize(("quota", "cores"), [("50000 100000", 1), ("100000 100000", 1), ("max 100000", None)])
def test_cores_are_bounded_by_the_quota_of_version_2(system: FakeSystem, quota: str, cores: int | None) -> None:
    system.own_group("0::/\n", V2_MOUNT.format(root="/"))
    system.group_v2("", "max", current=0, cpu=quota)
    assert usable_cores(system.root) == (cores or usable_cores(Path("/nowhere")))


def test_cores_are_bounded_by_the_quota_of_version_1(system: FakeSystem) -> None:
    system.own_group("5:cpu,cpuacct:/a\n", V1_MOUNT.format(root="/", name="cpu"))
    system.write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "150000\n")
    system.write("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n")
    assert usable_cores(system.root) == 1


def test_shared_memory_is_that_of_its_file_system(tmp_path: Path) -> None:
    space, usage = shm_space(tmp_path), psutil.disk_usage(str(tmp_path))
    assert space.total_bytes == usage.total
    assert abs(space.free_bytes - usage.free) < GIB


def test_shared_memory_of_a_folder_that_is_not_there_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be used: No such file or directory"):
        shm_space(tmp_path / "nothing")


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / "dev" / name).touch()
    assert visible_gpus(tmp_path) == 2
    assert visible_gpus(tmp_path / "nothing") == 0


def test_a_file_is_no_folder_for_shared_memory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SettingsError, match="not a folder"):
        shm_space(file)
