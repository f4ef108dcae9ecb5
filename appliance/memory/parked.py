"""Parked conversations: key/value state of token prefixes in shared memory, which any engine of the same model picks up.

    <shm_dir>/tandem-<16 digits of the content id>-<server>.parked/       one folder per server
        lock                        one writer at a time, across processes
        <writer>-<number>.state     one conversation, complete: written beside as .new and renamed
        <writer>-<number>.new       half-written; never read, swept when its writer is gone

    byte 0        8       12        16            80           88            96      100    4096
    | magic       | version| zeros  | state id    | num_tokens | state_bytes | crc32 | zeros | tokens | padding | state
      "TANDEMPK"    u32      u32      hex, 64       u64          u64           u32             int32    to 4096

Nothing of a conversation is trusted but its own tokens: a prompt reuses exactly the positions before the first token that
differs, and only if `state_id` (model, shapes, type of the cache) is the reader's own. Entries never change, so a reader that
has one open is not disturbed by its eviction. When the byte budget is full the entry that was not used for longest goes.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

MAGIC = b"TANDEMPK"
VERSION = 1
HEADER_BYTES = 4096
MIN_TOKENS = 32
"""Shorter prefixes are computed again sooner than they are found."""
_FIELDS = struct.Struct("<8sII64sQQ")
_CHECKSUM = struct.Struct("<I")
_PAGE = 4096
_FOLDER_SUFFIX = ".parked"

Bytes = NDArray[np.uint8]
Tokens = NDArray[np.int32]

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Parked:
    """One complete entry."""

    path: Path
    tokens: Tokens
    state_bytes: int

    @property
    def file_bytes(self) -> int:
        return _state_offset(len(self.tokens)) + self.state_bytes


def parked_folder(shm_dir: Path, content_id: str, server: str) -> Path:
    """Where one server's conversations lie. `server`: what tells it from others on this machine, such as its process id."""
    return shm_dir / f"tandem-{content_id[:16]}-{server}{_FOLDER_SUFFIX}"


def remove_unused_folders(shm_dir: Path) -> None:
    """Removes the folders of servers that are gone: those of this user that no engine holds."""
    for folder in shm_dir.glob(f"tandem-*{_FOLDER_SUFFIX}"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.geteuid() and _is_unused(folder):
                shutil.rmtree(folder, ignore_errors=True)


class ParkedStore:
    """The conversations of one folder, for one kind of state. Confined to one thread; several processes may share the folder."""

    def __init__(self, folder: Path, state_id: str, budget_bytes: int) -> None:
        """Makes the folder. `state_id`: 64 hexadecimal digits; entries with another are left alone. Raises OSError."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self._state_id = state_id
        self._budget_bytes = budget_bytes
        self._held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._held, fcntl.LOCK_SH)
        self._known: dict[Path, Parked] = {}
        self._num_written = 0

    def close(self) -> None:
        """Lets the folder go; the entries stay. Idempotent."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    @property
    def num_stored(self) -> int:
        """Complete conversations, those of other kinds of state included."""
        return sum(1 for _ in self._folder.glob("*.state"))

    @property
    def total_bytes(self) -> int:
        """What all entries take, those of other kinds of state and half-written ones included."""
        return sum(_size(path) for path in self._folder.glob("*") if path.suffix in (".state", ".new"))

    def entries(self) -> list[Parked]:
        """The complete entries of this kind of state, now."""
        paths = set(self._folder.glob("*.state"))
        self._known = {path: parked for path, parked in self._known.items() if path in paths}
        for path in paths - self._known.keys():
            parked = _read_entry(path, self._state_id)
            if parked is not None:
                self._known[path] = parked
        return list(self._known.values())

    def longest(self, prompt: Sequence[int]) -> tuple[Parked, int] | None:
        """The entry that shares the longest prefix with `prompt` and how many tokens that is; None below `MIN_TOKENS`."""
        wanted = np.asarray(prompt, dtype=np.int64)
        found = [(shared_tokens(parked.tokens, wanted), parked) for parked in self.entries()]
        shared, best = max(found, key=lambda item: item[0], default=(0, None))
        return None if best is None or shared < MIN_TOKENS else (best, shared)

    def park(self, tokens: Sequence[int], state_bytes: int, write: Callable[[Bytes], None]) -> bool:
        """Keeps a conversation; `write` fills `state_bytes` bytes. Returns whether it is kept now, by this call or before.

        False, with a line in the log, when it is larger than the budget. OSError when shared memory is full; that, and what `write`
        raises, passes through, and nothing is kept then.
        """
        held = np.asarray(tokens, dtype=np.int32)
        if len(held) < MIN_TOKENS:
            return False
        with self._writing():
            covered = [parked for parked in self.entries() if shared_tokens(parked.tokens, held) == len(held)]
            if covered:
                _touch(covered[0].path)
                return True
            nbytes = _state_offset(len(held)) + state_bytes
            if not self._make_room(nbytes, held):
                return False
            self._write(held, state_bytes, write)
            return True

    def restore(self, parked: Parked, read: Callable[[Bytes], None]) -> bool:
        """Gives the state's bytes to `read` and notes the use. False if the entry is gone by now."""
        try:
            descriptor = os.open(parked.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            memory = mmap.mmap(descriptor, parked.file_bytes, prot=mmap.PROT_READ)  # unmapped with the last view of it
            read(np.frombuffer(memory, np.uint8, parked.state_bytes, _state_offset(len(parked.tokens))))
        finally:
            os.close(descriptor)
        _touch(parked.path)
        return True

    def note_use(self, parked: Parked) -> None:
        """The entry is wanted: others are evicted before it."""
        _touch(parked.path)

    def _make_room(self, nbytes: int, tokens: Tokens) -> bool:
        """Removes what the new entry makes useless, what dead writers left, and then the longest unused entries."""
        if nbytes > self._budget_bytes:
            _log.info("a conversation is too large to be parked", tokens=len(tokens), nbytes=nbytes, budget=self._budget_bytes)
            return False
        for parked in self.entries():
            if shared_tokens(parked.tokens, tokens) == len(parked.tokens):
                parked.path.unlink(missing_ok=True)
        for path in self._folder.glob("*.new"):  # under the lock nobody else writes
            path.unlink(missing_ok=True)
        oldest = sorted(self._folder.glob("*.state"), key=_used_at)
        total_bytes = sum(_size(path) for path in oldest)
        for path in oldest:
            if total_bytes + nbytes <= self._budget_bytes:
                break
            total_bytes -= _size(path)
            path.unlink(missing_ok=True)
        return True

    def _write(self, tokens: Tokens, state_bytes: int, write: Callable[[Bytes], None]) -> None:
        self._num_written += 1
        new = self._folder / f"{os.getpid()}-{self._num_written}.new"
        try:
            with new.open("x+b") as file:
                file_bytes = _state_offset(len(tokens)) + state_bytes
                os.posix_fallocate(file.fileno(), 0, file_bytes)
                memory = mmap.mmap(file.fileno(), file_bytes)  # unmapped with the last view of it
                write(np.frombuffer(memory, np.uint8, state_bytes, _state_offset(len(tokens))))
                memory[HEADER_BYTES : HEADER_BYTES + tokens.nbytes] = tokens.tobytes()
                memory[:HEADER_BYTES] = _encode_header(self._state_id, len(tokens), state_bytes)
            new.rename(new.with_suffix(".state"))
        except BaseException:
            new.unlink(missing_ok=True)
            raise

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def shared_tokens(left: NDArray[np.integer], right: NDArray[np.integer]) -> int:
    """Number of leading tokens that two sequences share."""
    shorter = min(len(left), len(right))
    differs = left[:shorter] != right[:shorter]
    return int(np.argmax(differs)) if differs.any() else shorter


def _encode_header(state_id: str, num_tokens: int, state_bytes: int) -> bytes:
    fields = _FIELDS.pack(MAGIC, VERSION, 0, state_id.encode(), num_tokens, state_bytes)
    return (fields + _CHECKSUM.pack(zlib.crc32(fields))).ljust(HEADER_BYTES, b"\0")


def _read_entry(path: Path, state_id: str) -> Parked | None:
    """None if it is gone, damaged, or of another kind of state."""
    try:
        with path.open("rb") as file:
            page = file.read(HEADER_BYTES)
            if len(page) < HEADER_BYTES:
                return None
            magic, version, _, found_id, num_tokens, state_bytes = _FIELDS.unpack_from(page)
            (checksum,) = _CHECKSUM.unpack_from(page, _FIELDS.size)
            if magic != MAGIC or version != VERSION or checksum != zlib.crc32(page[: _FIELDS.size]) or found_id != state_id.encode():
                return None
            if os.fstat(file.fileno()).st_size != _state_offset(num_tokens) + state_bytes:
                return None
            tokens = np.frombuffer(file.read(4 * num_tokens), np.int32)
    except FileNotFoundError:
        return None
    return Parked(path, tokens, state_bytes)


def _state_offset(num_tokens: int) -> int:
    return HEADER_BYTES + -(-4 * num_tokens // _PAGE) * _PAGE


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _used_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _touch(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.utime(path)


def _is_unused(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
