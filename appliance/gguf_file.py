"""Metadata and tensor index of a model: one GGUF file, or all shards of a split one, checked before anyone reads a weight.

A model is named by its file, by any of its shards, or by a folder that holds one model. A tensor may lie in any shard; who
reads weights asks by name.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from appliance.errors import CorruptModelError, ModelError
from appliance.gguf_header import Header, Value, describe, parse_header
from appliance.gguf_types import KNOWN_TYPES

MAX_SHARDS = 10_000
FINGERPRINT_SAMPLES = 64
FINGERPRINT_SAMPLE_BYTES = 4096

_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SPLIT_NO, _SPLIT_COUNT, _SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. `shape` is in GGUF's order: the length of a row first."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    shard: int
    """Index into `GgufFile.paths`."""
    offset: int
    """From the start of that file, in bytes."""
    nbytes: int


class GgufFile:
    """The checked index of a model, with its files mapped read-only.

    Thread-safe: nothing in it changes. The maps are freed when the object and all views that `read` gave out are gone.
    """

    def __init__(self, shards: list[_Shard]) -> None:
        first = shards[0]
        self.paths: tuple[Path, ...] = tuple(shard.path for shard in shards)
        self.metadata: Mapping[str, Value] = MappingProxyType(first.header.metadata)
        """Of the first shard. Arrays are tuples."""
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(_merge_tensors(shards))
        """In file order, shard after shard."""
        self.total_bytes: int = sum(len(shard.data) for shard in shards)
        self._shards = shards

    @property
    def architecture(self) -> str:
        """`general.architecture`. Raises CorruptModelError if it is missing or no text."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            found = "is missing" if value is None else f"is {describe(value)}"
            raise CorruptModelError(f"{self.paths[0]}: key general.architecture {found}; it must name the model's architecture")
        return value

    def read(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes, mapped, not copied: reading them may wait for the disk. KeyError if there is no such tensor."""
        tensor = self.tensors[name]
        return np.frombuffer(self._shards[tensor.shard].data, np.uint8, tensor.nbytes, tensor.offset)

    def release_pages(self) -> None:
        """Takes what was read out of this process's resident memory. Views stay valid: what is read again is mapped again."""
        for shard in self._shards:
            shard.data.madvise(mmap.MADV_DONTNEED)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of what identifies the model: headers, file sizes, and a few pages of weights from all over the file.

        The samples tell models apart that differ only in their weights, such as two fine-tunes. At most
        `FINGERPRINT_SAMPLES` pages are read, so it is quick for any size; it does not prove that the weights are undamaged.
        """
        digest = hashlib.sha256(b"tandem model 1\0")
        for shard in self._shards:
            digest.update(len(shard.data).to_bytes(8, "little") + shard.header.nbytes.to_bytes(8, "little"))
            digest.update(memoryview(shard.data)[: shard.header.nbytes])
        tensors = list(self.tensors.values())
        step = -(-len(tensors) // FINGERPRINT_SAMPLES) or 1
        for tensor in tensors[::step]:
            middle = tensor.offset + tensor.nbytes // 2
            end = min(middle + FINGERPRINT_SAMPLE_BYTES, tensor.offset + tensor.nbytes)
            digest.update(memoryview(self._shards[tensor.shard].data)[middle:end])
        return digest.hexdigest()

    @cached_property
    def content_id(self) -> str:
        """Hex digest of what identifies these very bytes without reading them: the fingerprint and when each shard was last written.

        A copy has the fingerprint of its original, and another content id unless its times were kept.
        """
        digest = hashlib.sha256(b"tandem content 1\0" + bytes.fromhex(self.fingerprint))
        for shard in self._shards:
            digest.update(shard.modified_ns.to_bytes(16, "little", signed=True))
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Shard:
    path: Path
    modified_ns: int
    data: mmap.mmap
    header: Header


def open_gguf(path: Path) -> GgufFile:
    """Opens a model given by file, shard or folder, and checks metadata and index of every shard.

    Raises ModelError (no such model), CorruptModelError or UnsupportedModelError with one sentence that names file, tensor or key.
    """
    given = _open_shard(_pick_from_folder(path) if _is_folder(path) else path)
    count = _split_number(given, _SPLIT_COUNT)
    if count is None or count == 1:
        _check_not_split(given)
        return GgufFile([given])
    paths = _shard_paths(given.path, count)
    shards = [given if shard_path == given.path else _open_shard(shard_path) for shard_path in paths]
    for number, shard in enumerate(shards):
        _check_shard(shard, number, count)
    model = GgufFile(shards)
    _check_total(model, shards[0])
    return model


def _is_folder(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ModelError(f"model = {path}: there is no such file; name a GGUF file, one of its shards or their folder") from None
    except OSError as error:
        raise ModelError(f"model = {path}: it cannot be looked at: {error.strerror}") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ModelError(f"model = {path} is neither a file nor a folder; name a GGUF file, one of its shards or their folder")
    return stat.S_ISDIR(mode)


def _open_shard(path: Path) -> _Shard:
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise CorruptModelError(f"{path}: the file is empty; download it again")
            modified_ns = os.fstat(file.fileno()).st_mtime_ns
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"cannot open {path}: {error.strerror}") from None
    return _Shard(path, modified_ns, data, parse_header(data, path))


def _pick_from_folder(folder: Path) -> Path:
    """The only model in a folder. `mmproj*` files are image encoders that lie beside a model, not models."""
    files = sorted(path for path in folder.glob("*.gguf") if not path.name.startswith("mmproj"))
    models: dict[str, Path] = {}
    for file in files:
        match = _SHARD_NAME.fullmatch(file.name)
        models.setdefault(f"{match['stem']}-of-{match['count']}" if match else file.name, file)
    if not models:
        raise ModelError(f"there is no GGUF file in the folder {folder}")
    if len(models) > 1:
        names = ", ".join(path.name for path in models.values())
        raise ModelError(f"the folder {folder} holds {len(models)} models ({names}); name one of the files")
    return files[0]


def _shard_paths(path: Path, count: int) -> list[Path]:
    if not 1 <= count <= MAX_SHARDS:
        raise CorruptModelError(f"{path}: key {_SPLIT_COUNT} is {count}; 1 to {MAX_SHARDS} shards are possible")
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise CorruptModelError(
            f"{path}: the file is one of {count} shards, so its name must end in -00001-of-{count:05d}.gguf or the like; "
            "rename the shards back, or merge them"
        )
    paths = [path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    missing = [shard for shard in paths if not shard.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CorruptModelError(f"shard {missing[0]}{more} of {count} is missing; put all shards into one folder")
    return paths


def _split_number(shard: _Shard, key: str) -> int | None:
    value = shard.header.metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise CorruptModelError(f"{shard.path}: key {key} is {describe(value)}; it must be one whole number")
    return value


def _check_not_split(shard: _Shard) -> None:
    match = _SHARD_NAME.fullmatch(shard.path.name)
    if match and int(match["count"]) > 1 and _split_number(shard, _SPLIT_COUNT) is None:
        raise CorruptModelError(
            f"{shard.path}: its name says that it is one of {int(match['count'])} shards, but key {_SPLIT_COUNT} is missing; "
            "rename it if it is a whole model"
        )


def _check_shard(shard: _Shard, number: int, count: int) -> None:
    """`split.no` counts from 0, the file names from 1."""
    for key, expected in ((_SPLIT_NO, number), (_SPLIT_COUNT, count)):
        value = _split_number(shard, key)
        if value != expected:
            found = "missing" if value is None else value
            raise CorruptModelError(f"{shard.path}: key {key} is {found}, but by its name it must be {expected}; the shards are mixed up")


def _check_total(model: GgufFile, first: _Shard) -> None:
    expected, found = _split_number(first, _SPLIT_TENSORS), len(model.tensors)
    if expected is not None and expected != found:
        raise CorruptModelError(
            f"{first.path}: key {_SPLIT_TENSORS} is {expected}, but the {len(model.paths)} shards hold {found} tensors; "
            "they do not belong together"
        )


def _merge_tensors(shards: list[_Shard]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for index, shard in enumerate(shards):
        for entry in shard.header.tensors:
            if entry.name in tensors:
                raise CorruptModelError(f"{shard.path}: tensor {entry.name} is in shard {shards[tensors[entry.name].shard].path.name} too")
            type_name = KNOWN_TYPES[entry.type_id].name
            tensors[entry.name] = TensorInfo(entry.name, entry.shape, entry.type_id, type_name, index, entry.offset, entry.nbytes)
    return tensors
