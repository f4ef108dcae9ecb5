"""What this process may really use: memory, cores and shared memory, as the container allows, not as the machine has.

`/proc/meminfo` shows the whole machine inside a container, and pages of `/dev/shm` count against the container's memory
limit like any others. So the limits of the process's own cgroup and of every group above it are read, version 1 or 2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import SettingsError

_NO_LIMIT = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of a page."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The tightest bound on this process's memory."""

    limit_bytes: int
    """What it and its neighbours under the same bound may hold together."""
    available_bytes: int
    """What can still be taken now; page cache that can be dropped counts as free."""
    source: str
    """Who sets the bound, for people."""


@dataclass(frozen=True, slots=True)
class ShmSpace:
    """Size and free bytes of the file system in which the arena is to lie."""

    total_bytes: int
    free_bytes: int


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The bound that leaves least. `root` is where `/proc` and `/sys` lie; tests give another."""
    bounds = [_machine(root), *_cgroup_bounds(root)]
    return min(bounds, key=lambda bound: bound.available_bytes)


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may keep busy: its affinity, less if the cgroup has a quota of CPU time; at least 1."""
    cores = len(os.sched_getaffinity(0))
    for quota in _cgroup_quotas(root):
        cores = min(cores, int(quota))
    return max(1, cores)


def shm_space(folder: Path) -> ShmSpace:
    """Raises SettingsError if there is no such folder, or none that can be written."""
    try:
        stat = os.statvfs(folder)
    except OSError as error:
        raise _unusable(folder, str(error.strerror)) from None
    if not folder.is_dir():
        raise _unusable(folder, "it is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unusable(folder, "it cannot be written")
    return ShmSpace(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)


def _unusable(folder: Path, reason: str) -> SettingsError:
    return SettingsError(f"shm_dir {folder} cannot be used: {reason}; name a folder in shared memory", param="shm_dir")


def _machine(root: Path) -> MemoryLimit:
    sizes: dict[str, int] = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) * 1024
    return MemoryLimit(sizes["MemTotal"], sizes["MemAvailable"], "the machine's memory")


def _cgroup_bounds(root: Path) -> Iterator[MemoryLimit]:
    for group in _groups(root, "cgroup2", None):
        yield from _bound(group, "memory.max", "memory.current", "inactive_file")
    for group in _groups(root, "cgroup", "memory"):
        yield from _bound(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _bound(group: Path, limit_file: str, usage_file: str, cache_key: str) -> Iterator[MemoryLimit]:
    limit, usage = _number(group / limit_file), _number(group / usage_file)
    if limit is None or limit >= _NO_LIMIT:
        return
    held = max(0, (usage or 0) - _stat(group / "memory.stat").get(cache_key, 0))
    yield MemoryLimit(limit, max(0, limit - held), f"the container's memory limit ({limit_file} of its cgroup)")


def _cgroup_quotas(root: Path) -> Iterator[float]:
    for group in _groups(root, "cgroup2", None):
        words = _text(group / "cpu.max").split()
        if len(words) == 2 and words[0].isdecimal() and int(words[1]) > 0:
            yield int(words[0]) / int(words[1])
    for group in _groups(root, "cgroup", "cpu"):
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            yield quota / period


def _groups(root: Path, file_system: str, controller: str | None) -> Iterator[Path]:
    """Folders of the process's own group and of all groups above it that this mount shows, innermost first."""
    for mount, mounted_group in _mounts(root, file_system, controller):
        own = _own_group(root, controller)
        if own is None:
            continue
        inside = own.removeprefix(mounted_group.rstrip("/")) if own.startswith(mounted_group) else ""
        folder = root / mount.lstrip("/")
        path = folder / inside.strip("/")
        if not path.is_dir():
            path = folder
        yield path
        while path != folder:
            path = path.parent
            yield path


def _mounts(root: Path, file_system: str, controller: str | None) -> Iterator[tuple[str, str]]:
    """(mount point, group that is mounted there) from mountinfo; see proc_pid_mountinfo(5)."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, options = left.split(), right.split()
        if len(fields) < 5 or len(options) < 3 or options[0] != file_system:
            continue
        if controller is None or controller in options[2].split(","):
            yield fields[4], fields[3]


def _own_group(root: Path, controller: str | None) -> str | None:
    """From lines such as `0::/a/b` (version 2) and `4:memory:/a/b` (version 1)."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (controller is None and controllers == "") or (controller is not None and controller in controllers.split(",")):
            return path
    return None


def _stat(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: Path) -> int | None:
    try:
        return int(_text(path))
    except ValueError:
        return None


def _text(path: Path) -> str:
    """Empty if the file is not there: which of them exist depends on the kernel and the container."""
    try:
        return path.read_text()
    except OSError:
        return ""


def visible_gpus(root: Path = Path("/")) -> int:
    """NVIDIA GPUs that the system shows this process, without waking a driver."""
    return sum(path.name.removeprefix("nvidia").isdecimal() for path in (root / "dev").glob("nvidia[0-9]*"))
