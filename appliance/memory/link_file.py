"""Opens the file through which two engines compute each other's rows (`cuda_ext/src/link/layout.h` has its parts).

    exclusive lock on the file    it is being written anew: nobody else may be using it, so whatever it held is stale
    shared lock                   held by every engine that has it mapped
    lock on byte `role`           one engine per role

The kernel drops all of them with the process, whatever ends it. The space is taken before the file is mapped.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.errors import EngineError, MemoryBudgetError
from appliance.memory.arena import try_lock
from appliance.models.config import ModelConfig

SUFFIX = ".link"
MAX_ROWS = 256
"""Longer chunks are not sent over the link."""
_LINE, _PAGE = 64, 4096
_WAIT_S = 10.0
_POLL_S = 0.01


def link_path(shm_dir: Path, content_id: str, server: str) -> Path:
    """Where one server's two engines meet. `server` tells it from others on this machine."""
    return shm_dir / f"tandem-{content_id[:16]}-{server}{SUFFIX}"


def link_bytes(config: ModelConfig, chunk: int) -> int:
    """Size of the file for chunks of so many rows: the parts of `layout.h`, one after the other."""
    rows = min(chunk, MAX_ROWS)
    pairs = rows * config.top_k
    residency = _up(config.layers * config.experts, _LINE)
    groups = -(-config.hidden // 256) * 320
    channel = [
        2 * _LINE,
        _LINE,
        min(config.experts, pairs) * 12,
        pairs * 4,
        rows * config.hidden * 4,
        rows * groups,
        pairs * config.hidden * 4,
    ]
    return _up(_PAGE + 2 * (3 * _LINE + residency + sum(_up(part, _LINE) for part in channel)), _PAGE)


class LinkFile:
    """The mapped file, for one role. Close it after everything that uses the memory."""

    def __init__(self, path: Path, role: int, nbytes: int, write_new: Callable[[NDArray[np.uint8]], None]) -> None:
        """Maps the file. The engine that comes first, or finds what dead ones left, makes it and calls `write_new` with its memory.

        Raises MemoryBudgetError without space, EngineError if the role is taken or the file has another size.
        """
        self._memory: NDArray[np.uint8] | None = None
        self._descriptor = _claim(path, nbytes, write_new)
        try:
            _take_role(self._descriptor, path, role)
            if os.fstat(self._descriptor).st_size != nbytes:
                raise EngineError(f"the link file {path} is of another model or of other sizes; both engines need the same settings")
            self._memory = _map(self._descriptor, nbytes)
        except BaseException:
            self.close()
            raise

    @property
    def memory(self) -> NDArray[np.uint8]:
        if self._memory is None:
            raise EngineError("the link file was closed")
        return self._memory

    def close(self) -> None:
        """Lets the file go; the memory stays mapped as long as somebody has a view of it. Idempotent."""
        self._memory = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def remove_unused_links(shm_dir: Path) -> None:
    """Removes the link files of servers that are gone: those of this user that no engine holds."""
    for path in shm_dir.glob(f"tandem-*{SUFFIX}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def _claim(path: Path, nbytes: int, write_new: Callable[[NDArray[np.uint8]], None]) -> int:
    """An open descriptor with the shared lock, of a file that is complete."""
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if try_lock(descriptor, fcntl.LOCK_EX) and _is_linked(descriptor, path):
            try:
                _write_new(descriptor, path, nbytes, write_new)
            except BaseException:
                os.close(descriptor)
                raise
            # From exclusive to shared is not one step: another engine may come between, write it anew, and then wait for nobody.
        if try_lock(descriptor, fcntl.LOCK_SH) and _is_linked(descriptor, path) and os.fstat(descriptor).st_size > 0:
            return descriptor
        os.close(descriptor)
        time.sleep(_POLL_S)
    raise EngineError(f"the link file {path} was not to be had within {_WAIT_S:g} s")


def _write_new(descriptor: int, path: Path, nbytes: int, write_new: Callable[[NDArray[np.uint8]], None]) -> None:
    os.ftruncate(descriptor, 0)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        raise MemoryBudgetError(f"the link file {path} needs {nbytes} bytes: {error.strerror}; make shared memory larger") from None
    write_new(_map(descriptor, nbytes))


def _map(descriptor: int, nbytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)


def _take_role(descriptor: int, path: Path, role: int) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, role)
    except OSError:
        raise EngineError(f"another engine has role {role} of the link {path}") from None


def _is_linked(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
