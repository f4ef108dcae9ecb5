"""Memory nodes: spreads what this process takes over all nodes whose cores it may use.

Without, the arena would lie on the node on which the loader happened to run, and every engine would read all of it from there.
The kernel asks for the policy of whoever takes a page of a tmpfs, so the loader's own policy is enough; it ends with the block.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path

import structlog

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call; the C library has no function for it."""
_MPOL_DEFAULT, _MPOL_INTERLEAVE = 0, 3
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

SetPolicy = Callable[[Sequence[int]], int]
"""(nodes to take pages from by turns; none: as usual) -> 0 or an errno."""

log = structlog.get_logger()


@contextmanager
def spread_over_nodes(root: Path = Path("/"), set_policy: SetPolicy | None = None) -> Iterator[tuple[int, ...]]:
    """While it lasts, pages that this thread takes come from the usable nodes by turns. Gives these nodes: none where there is
    only one, or where the system does not allow it, as in many containers.

    `root` is where `/proc` and `/sys` lie; tests give another, and another system call.
    """
    set_policy = set_policy or _set_policy
    nodes = usable_nodes(root)
    if len(nodes) < 2:
        yield ()
        return
    refused = set_policy(nodes)
    if refused:
        log.info("the arena is not spread over the memory nodes", nodes=list(nodes), reason=os.strerror(refused))
        yield ()
        return
    log.info("the arena is spread over the memory nodes", nodes=list(nodes))
    try:
        yield nodes
    finally:
        set_policy(())


def usable_nodes(root: Path = Path("/"), cores: Set[int] | None = None) -> tuple[int, ...]:
    """Nodes with memory that this process may take and with cores that it may use (`cores`; default: its affinity)."""
    cores = os.sched_getaffinity(0) if cores is None else cores
    nodes = root / "sys/devices/system/node"
    try:
        with_memory = _numbers((nodes / "has_memory").read_text()) & _allowed_nodes(root)
        return tuple(node for node in sorted(with_memory) if _numbers((nodes / f"node{node}/cpulist").read_text()) & cores)
    except OSError:
        return ()  # a kernel without nodes


def _allowed_nodes(root: Path) -> Set[int]:
    """Those of the process's cpuset."""
    for line in (root / "proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            return _numbers(value)
    return frozenset()


def _numbers(text: str) -> Set[int]:
    """`0-2,5` as the kernel writes lists."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def _set_policy(nodes: Sequence[int]) -> int:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    words = max(nodes, default=0) // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    mode = _MPOL_INTERLEAVE if nodes else _MPOL_DEFAULT
    # The kernel takes one bit less than it is told.
    bits = ctypes.c_ulong(words * _WORD_BITS + 1 if nodes else 0)
    failed = libc.syscall(ctypes.c_long(number), ctypes.c_int(mode), mask if nodes else None, bits)
    return ctypes.get_errno() if failed else 0
