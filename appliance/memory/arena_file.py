"""The writer's side of the arena: claim the file, take its space, write blobs, seal it.

Nothing here maps the file, so a full file system is an error of a system call and never a SIGBUS. The space is taken before
the first blob is written: what is too large is refused at once, with both sizes. Room is made only by removing arenas of
other models that nobody has mapped; no other file is ever touched.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from types import TracebackType

import structlog

from appliance.errors import MemoryBudgetError, SettingsError
from appliance.memory.arena import HEADER_BYTES, MAGIC, ArenaHeader, ArenaPlace, ArenaState, is_linked, read_header, try_lock
from appliance.memory.limits import MemoryLimit, memory_limit, shm_space
from appliance.units import format_bytes

RESERVE_STEP_BYTES = 256 << 20
"""Space is taken in steps, so that progress is seen and a signal ends it soon (2 GiB per second were measured)."""
POLL_S = 0.1
_ARENA_NAME = re.compile(r"tandem-[0-9a-f]+-[0-9a-f]+\.arena")

log = structlog.get_logger()


def claim_arena(place: ArenaPlace, on_wait: Callable[[ArenaHeader | None], None]) -> ArenaFile | None:
    """Takes the owner lock of an arena that has to be filled; None if it is sealed already.

    While another loader has the lock, `on_wait` is called about every `POLL_S` with what its header says, and may raise.
    Raises SettingsError if the file cannot be created, or is not ours.
    """
    while True:
        descriptor = _open_own(place.path)
        try:
            seems_sealed = _is_sealed(place, descriptor)
            if not try_lock(descriptor, fcntl.LOCK_SH if seems_sealed else fcntl.LOCK_EX):
                on_wait(read_header(descriptor))
                time.sleep(POLL_S)
            elif is_linked(descriptor, place.path):
                if _is_sealed(place, descriptor):
                    return None
                if not seems_sealed:
                    return ArenaFile(place, os.fdopen(os.dup(descriptor), "r+b", buffering=0))
        finally:
            os.close(descriptor)


def _is_sealed(place: ArenaPlace, descriptor: int) -> bool:
    """A file that something has cut is not, whatever its header says."""
    return place.is_sealed(read_header(descriptor)) and os.fstat(descriptor).st_size == place.file_bytes


def obtainable_bytes(place: ArenaPlace) -> int:
    """What lies in the folder already and is to be had for this arena: its own pages, and other models' unused arenas."""
    try:
        num_bytes = place.path.stat().st_blocks * 512
    except OSError:
        num_bytes = 0
    if num_bytes >= place.file_bytes:
        return num_bytes
    for path in _unused_arenas(place):
        with _unused(path) as unused_bytes:
            num_bytes += unused_bytes or 0
    return num_bytes


class ArenaFile:
    """An arena under this process's owner lock, not sealed yet. Confined to the loader's thread.

    Closed without `seal` it stays half-written, which the next loader recognises; `discard` gives its space back.
    """

    def __init__(self, place: ArenaPlace, file: FileIO) -> None:
        self._place = place
        self._file = file
        self._descriptor = file.fileno()
        self._started = int(time.time())

    def reserve(self, on_progress: Callable[[int], object], memory: Callable[[], MemoryLimit] = memory_limit) -> None:
        """Takes the whole file's space; pages that a dead loader left are used again.

        `on_progress` is called with the bytes taken so far. Raises MemoryBudgetError if the file system or the memory limit is
        too small, with other models' unused arenas gone.
        """
        self._make_room(memory)
        self._write_header(ArenaState.EMPTY, 0)
        if os.fstat(self._descriptor).st_size > self._place.file_bytes:
            os.ftruncate(self._descriptor, self._place.file_bytes)
        for start in range(0, self._place.file_bytes, RESERVE_STEP_BYTES):
            length = min(RESERVE_STEP_BYTES, self._place.file_bytes - start)
            try:
                os.posix_fallocate(self._descriptor, start, length)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise self._too_small() from None
            on_progress(start + length)
        self._write_header(ArenaState.FILLING, 0)

    def write(self, offset: int, buffers: Sequence[memoryview | bytes]) -> None:
        """Writes the buffers one after the other at `offset` behind the header page."""
        position = HEADER_BYTES + offset
        expected = sum(len(buffer) for buffer in buffers)
        written = os.pwritev(self._descriptor, buffers, position)
        if written != expected:
            raise OSError(errno.EIO, f"{written} of {expected} bytes written at {position}", str(self._place.path))

    def report(self, filled_bytes: int) -> None:
        """Tells loaders that wait how far this one is."""
        self._write_header(ArenaState.FILLING, filled_bytes)

    def seal(self) -> None:
        """The last write: from now on engines map the arena, and nobody writes to it."""
        self._write_header(ArenaState.SEALED, self._place.layout.total_bytes)

    def discard(self) -> None:
        """Removes the file; its space is free when this object is closed."""
        if is_linked(self._descriptor, self._place.path):
            self._place.path.unlink()

    def close(self) -> None:
        """Gives the lock up. Idempotent."""
        self._file.close()

    def __enter__(self) -> ArenaFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _write_header(self, state: ArenaState, filled_bytes: int) -> None:
        header = self._place.header(state, filled_bytes=filled_bytes, loader_started=self._started)
        try:
            os.pwrite(self._descriptor, header.encode(), 0)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise self._too_small() from None

    def _make_room(self, memory: Callable[[], MemoryLimit]) -> None:
        others = _unused_arenas(self._place)
        while (shortage := self._shortage(memory())) is not None:
            if not _remove_next(others):
                raise shortage

    def _shortage(self, memory: MemoryLimit) -> MemoryBudgetError | None:
        missing = self._place.file_bytes - self._held_bytes()
        space = shm_space(self._place.shm_dir)
        if space.total_bytes and missing > space.free_bytes:  # a tmpfs with total 0 has no limit of its own
            return self._too_small()
        if missing > memory.available_bytes:
            return MemoryBudgetError(
                f"the arena needs {format_bytes(self._place.file_bytes)} of memory and {format_bytes(memory.available_bytes)} of "
                f"{format_bytes(memory.limit_bytes)} are free ({memory.source}); raise that limit or use a smaller model"
            )
        return None

    def _too_small(self) -> MemoryBudgetError:
        space = shm_space(self._place.shm_dir)
        free_bytes = space.free_bytes + self._held_bytes()
        return MemoryBudgetError(
            f"the arena needs {format_bytes(self._place.file_bytes)} and {self._place.shm_dir} has {format_bytes(free_bytes)} free of "
            f"{format_bytes(space.total_bytes)}; make it larger (docker run --shm-size, the chart's shared memory size) or set shm_dir",
            param="shm_dir",
        )

    def _held_bytes(self) -> int:
        return os.fstat(self._descriptor).st_blocks * 512


def _open_own(path: Path) -> int:
    """Opens or creates the file, and refuses one that another user could have put there."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise SettingsError(
            f"cannot open or create the arena {path}: {error.strerror}; mend that or set shm_dir", param="shm_dir"
        ) from None
    if not _is_ours(descriptor):
        os.close(descriptor)
        raise SettingsError(f"{path} is not a plain file of this user alone; remove it or set shm_dir", param="shm_dir")
    return descriptor


def _is_ours(descriptor: int) -> bool:
    status = os.fstat(descriptor)
    others_may_write = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not others_may_write


@contextmanager
def _unused(path: Path) -> Iterator[int | None]:
    """The bytes of an arena of this user that nobody has mapped, under the owner lock meanwhile; None if it is not one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    try:
        is_arena = _is_ours(descriptor) and os.pread(descriptor, len(MAGIC), 0) == MAGIC
        is_unused = is_arena and try_lock(descriptor, fcntl.LOCK_EX) and is_linked(descriptor, path)
        yield os.fstat(descriptor).st_blocks * 512 if is_unused else None
    finally:
        os.close(descriptor)


def _unused_arenas(place: ArenaPlace) -> Iterator[Path]:
    """Arenas of other models and layouts, oldest first."""
    found = [path for path in place.shm_dir.iterdir() if _ARENA_NAME.fullmatch(path.name) and path != place.path]
    yield from sorted(found, key=_modified)


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def _remove_next(candidates: Iterator[Path]) -> bool:
    """Removes the next candidate that is an arena of this user and that nobody has mapped; False if there is none."""
    return any(_remove_if_unused(path) for path in candidates)


def _remove_if_unused(path: Path) -> bool:
    with _unused(path) as num_bytes:
        if num_bytes is None:
            return False
        path.unlink()
    log.warning("removed an arena that nobody had mapped, to make room", path=str(path), freed=format_bytes(num_bytes))
    return True
