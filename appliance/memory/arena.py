"""The arena: every expert of a model once, in one file in shared memory, sealed before anyone reads it.

    <shm_dir>/tandem-<16 digits of the content id>-<8 of the layout's digest>.arena

    byte 0        8        12      16           80             144          152           160  168      176    180    4096
    | magic       | version| state | content id  | layout digest | total_bytes | filled_bytes | pid | started | crc32 | zeros | blobs
      "TANDEMAR"    u32      u32     hex, 64       hex, 64         u64           u64            u64   u64       u32

    EMPTY ──space taken──> FILLING ──all blobs written──> SEALED      (dead loader: the next one begins again at EMPTY)

Numbers are little endian. `total_bytes` counts the blobs, which lie behind the header page as `ArenaLayout` says; `pid` and
`started` (Unix seconds) name the loader for people. Whether a loader lives is told by the lock alone:

* a loader holds `flock` exclusively from before EMPTY until after SEALED (`appliance.memory.arena_file`);
* an engine holds it shared as long as the arena is mapped, so nobody rewrites or removes a file in use.

The kernel drops both with the process, whatever ends it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from appliance.errors import EngineError
from appliance.memory.layout import ArenaLayout

MAGIC = b"TANDEMAR"
VERSION = 1
HEADER_BYTES = 4096
_FIELDS = struct.Struct("<8sII64s64sQQQQ")
_CHECKSUM = struct.Struct("<I")


class ArenaState(IntEnum):
    EMPTY = 0
    """Created; its space is not taken yet."""
    FILLING = 1
    """Space is taken, blobs are being written."""
    SEALED = 2
    """Complete; it never changes again."""


@dataclass(frozen=True, slots=True)
class ArenaHeader:
    state: ArenaState
    content_id: str
    layout_digest: str
    total_bytes: int
    filled_bytes: int
    loader_pid: int
    loader_started: int

    def encode(self) -> bytes:
        """The header page."""
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            self.state,
            self.content_id.encode(),
            self.layout_digest.encode(),
            self.total_bytes,
            self.filled_bytes,
            self.loader_pid,
            self.loader_started,
        )
        return (fields + _CHECKSUM.pack(zlib.crc32(fields))).ljust(HEADER_BYTES, b"\0")


def read_header(descriptor: int) -> ArenaHeader | None:
    """The header of an open file; None if it is not one, is damaged, or is of another version."""
    page = os.pread(descriptor, HEADER_BYTES, 0)
    if len(page) < HEADER_BYTES:
        return None
    magic, version, state, content_id, digest, total, filled, pid, started = _FIELDS.unpack_from(page)
    (checksum,) = _CHECKSUM.unpack_from(page, _FIELDS.size)
    if magic != MAGIC or version != VERSION or checksum != zlib.crc32(page[: _FIELDS.size]):
        return None
    return ArenaHeader(ArenaState(state), _text(content_id), _text(digest), total, filled, pid, started)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("ascii")


@dataclass(frozen=True, slots=True)
class ArenaPlace:
    """Which arena: the model's and layout's, in this folder. Nothing need be there yet."""

    shm_dir: Path
    content_id: str
    layout: ArenaLayout

    @property
    def path(self) -> Path:
        return self.shm_dir / f"tandem-{self.content_id[:16]}-{self.layout.digest()[:8]}.arena"

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.layout.total_bytes

    def header(self, state: ArenaState, *, filled_bytes: int, loader_started: int) -> ArenaHeader:
        """The header that this process writes as the arena's loader."""
        digest, total_bytes = self.layout.digest(), self.layout.total_bytes
        return ArenaHeader(state, self.content_id, digest, total_bytes, filled_bytes, os.getpid(), loader_started)

    def is_sealed(self, header: ArenaHeader | None) -> bool:
        """Whether this header promises every blob of just this model in just this layout."""
        return (
            header is not None
            and header.state is ArenaState.SEALED
            and header.content_id == self.content_id
            and header.layout_digest == self.layout.digest()
            and header.total_bytes == self.layout.total_bytes
        )


class Arena:
    """A sealed arena, mapped read-only. Thread-safe: nothing in it changes.

    The map, and with it the shared lock, goes when the object is closed and the last view is gone. Whoever passes `address`
    to native code keeps the object open meanwhile.
    """

    def __init__(self, place: ArenaPlace, mapping: mmap.mmap) -> None:
        self._place = place
        self._blobs: NDArray[np.uint8] | None = np.frombuffer(mapping, np.uint8, offset=HEADER_BYTES)

    @classmethod
    def open(cls, place: ArenaPlace, *, for_gpu: bool = False) -> Arena:
        """Maps the arena; takes well under a millisecond per GiB, since no byte is read.

        `for_gpu`: CUDA pins only memory that could be written, so the map allows it; nobody does.
        Raises EngineError if it is missing, being written, unfinished, or of another model or layout.
        """
        descriptor = _open(place.path, os.O_RDWR if for_gpu else os.O_RDONLY)
        try:
            _share(descriptor, place.path)
            _check(descriptor, place)
            mapping = mmap.mmap(descriptor, place.file_bytes, access=mmap.ACCESS_WRITE if for_gpu else mmap.ACCESS_READ)
        finally:
            os.close(descriptor)  # the map keeps a descriptor of its own, which holds the lock
        _advise(mapping)
        return cls(place, mapping)

    @property
    def path(self) -> Path:
        return self._place.path

    @property
    def layout(self) -> ArenaLayout:
        return self._place.layout

    @property
    def address(self) -> int:
        """Of the first blob in this process; 4096-byte aligned. Offsets of the layout count from here."""
        return int(self._mapped().ctypes.data)

    @property
    def nbytes(self) -> int:
        """Of all blobs."""
        return int(self._mapped().nbytes)

    def view(self, layer: int, expert: int) -> NDArray[np.uint8]:
        """One blob: [blob bytes] uint8, read-only, not copied. IndexError if there is no such expert."""
        offset = self.layout.offset(layer, expert)
        return self._mapped()[offset : offset + self.layout.layers[layer].blob.nbytes]

    def close(self) -> None:
        """Gives the map back, as soon as no view is left. Idempotent."""
        self._blobs = None

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _mapped(self) -> NDArray[np.uint8]:
        if self._blobs is None:
            raise EngineError(f"the arena {self._place.path} was used after it was closed")
        return self._blobs


def _open(path: Path, access: int) -> int:
    try:
        return os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise EngineError(f"the arena {path} is missing; start the server again, its loader writes it") from None
    except OSError as error:
        raise EngineError(f"cannot open the arena {path}: {error.strerror}") from None


def _share(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        header = read_header(descriptor)
        loader = f" by process {header.loader_pid}" if header else ""
        raise EngineError(f"the arena {path} is being written{loader}; wait until the loader has ended") from None


def _check(descriptor: int, place: ArenaPlace) -> None:
    """That this file is the sealed arena of `place`, complete and still the one that bears the name."""
    header = read_header(descriptor)
    if not place.is_sealed(header):
        found = "has no valid header" if header is None else f"is {header.state.name.lower()} or of another model"
        raise EngineError(f"the arena {place.path} {found}; start the server again, its loader refills it")
    status = os.fstat(descriptor)
    if status.st_size != place.file_bytes:
        raise EngineError(f"the arena {place.path} has {status.st_size} bytes instead of {place.file_bytes}; remove it and start again")
    if not is_linked(descriptor, place.path):
        raise EngineError(f"the arena {place.path} was removed to make room for another model; start the server again")


def try_lock(descriptor: int, operation: int) -> bool:
    """Whether the lock (`fcntl.LOCK_SH` or `LOCK_EX`) was free; never waits for it."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_linked(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one that bears this name now."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _advise(mapping: mmap.mmap) -> None:
    """Huge pages where the system gives them to shared memory on request; and an engine's core dump leaves the arena out."""
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP):
        try:
            mapping.madvise(advice)
        except OSError:  # a kernel without it; nothing depends on it
            continue
