"""Parses the header of one GGUF file, trusting nothing in it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

    "GGUF"  version u32  num_tensors u64  num_keys u64
    num_keys    x  name string, type u32, value
    num_tensors x  name string, num_dims u32, dims u64[num_dims] (fastest first), type u32, offset u64
    padding to `general.alignment`
    data: every tensor at its offset from here

Every count and length is held against the bytes that are left before anything is allocated for it.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import CorruptModelError, UnsupportedModelError
from appliance.gguf_types import KNOWN_TYPES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_ELEMENTS = 1 << 24
"""Array elements in the metadata of one file, all arrays together."""
MAX_NAME_BYTES = 1 << 10
MAX_SHOWN = 80
MAX_DIMS = 4
MAX_TENSOR_VALUES = (1 << 63) - 1

Scalar = int | float | bool | str
Value = Scalar | tuple[int, ...] | tuple[float, ...] | tuple[bool, ...] | tuple[str, ...]

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_COUNTS = struct.Struct("<QQ")
_STRING = 8
_ARRAY = 9
_BOOL = 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
"""Value type to its struct letter."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of one file; `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    metadata: dict[str, Value]
    tensors: list[TensorEntry]
    """In the order of their place in the file."""
    nbytes: int
    """Where the tensor index ends; the padding and the data follow."""


def describe(value: object) -> str:
    """A metadata value for an error message: short and on one line, whatever the file holds."""
    if isinstance(value, tuple):
        return f"an array of {len(value)} elements"
    shown = repr(value[:MAX_SHOWN]) if isinstance(value, str) else repr(value)
    return shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "..."


def parse_header(data: mmap.mmap, path: Path) -> Header:
    """Reads metadata and tensor index of one file and checks that all tensor data lies inside it.

    Raises CorruptModelError or UnsupportedModelError with a sentence that names the file and the key or tensor.
    """
    cursor = _Cursor(data, path)
    num_tensors, num_keys = _read_counts(cursor)
    metadata = _read_metadata(cursor, num_keys)
    alignment = _alignment(metadata, path)
    raw = [_read_tensor(cursor) for _ in range(num_tensors)]
    start = -(-cursor.at // alignment) * alignment
    tensors = [_place_tensor(entry, start, alignment, len(data), path) for entry in raw]
    tensors.sort(key=lambda tensor: tensor.offset)
    _check_apart(tensors, path)
    return Header(metadata, tensors, cursor.at)


class _Cursor:
    """A reading position in a mapped file. Confined to one call of `parse_header`."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0
        self.end = len(data)
        self.elements_left = MAX_ELEMENTS

    def corrupt(self, what: str) -> CorruptModelError:
        return CorruptModelError(f"{self.path}: {what}")

    def need(self, nbytes: int, what: str) -> None:
        if nbytes > self.end - self.at:
            left = self.end - self.at
            raise self.corrupt(
                f"the file ends inside {what} ({nbytes} bytes needed at byte {self.at}, {left} are left); it is truncated or damaged"
            )

    def u32(self, what: str) -> int:
        self.need(4, what)
        (value,) = _U32.unpack_from(self.data, self.at)
        self.at += 4
        return int(value)

    def u64(self, what: str) -> int:
        self.need(8, what)
        (value,) = _U64.unpack_from(self.data, self.at)
        self.at += 8
        return int(value)

    def string(self, what: str) -> str:
        length = self.u64(what)
        self.need(length, what)
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.corrupt(f"{what} is not valid UTF-8") from None

    def name(self, what: str) -> str:
        length = self.u64(what)
        if not 0 < length <= MAX_NAME_BYTES:
            raise self.corrupt(f"{what} is {length} bytes long; names have 1 to {MAX_NAME_BYTES}")
        self.at -= 8
        name = self.string(what)
        if not name.isprintable():
            raise self.corrupt(f"{what} is {describe(name)}, which is not printable text")
        return name

    def numbers(self, letter: str, count: int, what: str) -> tuple[int | float | bool, ...]:
        layout = struct.Struct(f"<{count}{letter}")
        self.need(layout.size, what)
        values = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return values

    def strings(self, count: int, what: str) -> tuple[str, ...]:
        """The hot loop of large vocabularies: the checks of `string`, written out."""
        self.need(8 * count, what)
        data, at, end, unpack = self.data, self.at, self.end, _U64.unpack_from
        values: list[str] = []
        try:
            for _ in range(count):
                (length,) = unpack(data, at) if at + 8 <= end else (end,)
                stop = at + 8 + length
                if stop > end:
                    self.at = at
                    self.need(stop - at, what)
                values.append(data[at + 8 : stop].decode())
                at = stop
        except UnicodeDecodeError:
            raise self.corrupt(f"{what}: element {len(values)} is not valid UTF-8") from None
        self.at = at
        return tuple(values)


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    path = cursor.path
    if cursor.data[:4] != MAGIC:
        raise cursor.corrupt(f"not a GGUF file: it begins with {bytes(cursor.data[:4])!r}, not {MAGIC!r}")
    cursor.at = 4
    version = cursor.u32("the version")
    if version not in VERSIONS:
        if version & 0xFFFF == 0 and version >> 24 in (1, *VERSIONS):
            raise UnsupportedModelError(f"{path}: the file is big endian; convert it to a little-endian GGUF")
        raise UnsupportedModelError(f"{path}: GGUF version {version} is not supported; versions 2 and 3 are, so convert the model anew")
    cursor.need(_COUNTS.size, "the counts of tensors and keys")
    num_tensors, num_keys = _COUNTS.unpack_from(cursor.data, cursor.at)
    cursor.at += _COUNTS.size
    for count, limit, what in ((num_tensors, MAX_TENSORS, "tensors"), (num_keys, MAX_KEYS, "metadata keys")):
        if count > limit:
            raise cursor.corrupt(f"the header announces {count} {what}; more than {limit} cannot be right")
    return num_tensors, num_keys


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for index in range(num_keys):
        key = cursor.name(f"the name of metadata key {index + 1} of {num_keys}")
        if key in metadata:
            raise cursor.corrupt(f"metadata key {key} stands in the file twice")
        metadata[key] = _read_value(cursor, cursor.u32(f"key {key}"), f"key {key}")
    return metadata


def _read_value(cursor: _Cursor, value_type: int, what: str) -> Value:
    if value_type == _STRING:
        return cursor.string(what)
    if value_type == _ARRAY:
        return _read_array(cursor, what)
    if value_type not in _NUMBERS:
        raise cursor.corrupt(f"{what} has the unknown value type {value_type}")
    _check_bools(cursor, value_type, 1, what)
    return cursor.numbers(_NUMBERS[value_type], 1, what)[0]


def _read_array(cursor: _Cursor, what: str) -> Value:
    element_type = cursor.u32(what)
    count = cursor.u64(what)
    if element_type == _ARRAY:
        raise cursor.corrupt(f"{what} is an array of arrays, which no model uses")
    if element_type != _STRING and element_type not in _NUMBERS:
        raise cursor.corrupt(f"{what} is an array of the unknown value type {element_type}")
    if count > cursor.elements_left:
        raise cursor.corrupt(f"{what} is an array of {count} elements; more than {MAX_ELEMENTS} in all cannot be right")
    cursor.elements_left -= count
    if element_type == _STRING:
        return cursor.strings(count, what)
    _check_bools(cursor, element_type, count, what)
    return cursor.numbers(_NUMBERS[element_type], count, what)


def _check_bools(cursor: _Cursor, value_type: int, count: int, what: str) -> None:
    if value_type != _BOOL:
        return
    cursor.need(count, what)
    if cursor.data[cursor.at : cursor.at + count].strip(b"\x00\x01"):
        raise cursor.corrupt(f"{what} is a truth value that is neither 0 nor 1")


def _alignment(metadata: dict[str, Value], path: Path) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise CorruptModelError(f"{path}: general.alignment is {describe(alignment)}; it must be a power of two up to {1 << 20}")
    return alignment


def _read_tensor(cursor: _Cursor) -> TensorEntry:
    """As written: `offset` counts from the start of the data."""
    name = cursor.name("the name of a tensor")
    what = f"the index entry of tensor {name}"
    num_dims = cursor.u32(what)
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.corrupt(f"tensor {name} has {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
    shape = tuple(cursor.u64(what) for _ in range(num_dims))
    type_id = cursor.u32(what)
    return TensorEntry(name, shape, type_id, cursor.u64(what), _tensor_bytes(name, shape, type_id, cursor.path))


def _tensor_bytes(name: str, shape: tuple[int, ...], type_id: int, path: Path) -> int:
    if 0 in shape:
        raise CorruptModelError(f"{path}: tensor {name} has a dimension of zero in its shape {list(shape)}")
    kind = KNOWN_TYPES.get(type_id)
    if kind is None:
        raise UnsupportedModelError(f"{path}: tensor {name} has the unknown type {type_id}; known types are {_known_names()}")
    num_values = 1
    for dim in shape:
        num_values *= dim
    if num_values > MAX_TENSOR_VALUES:
        raise CorruptModelError(f"{path}: tensor {name} of shape {list(shape)} has {num_values} values, more than 64 bits can count")
    if shape[0] % kind.block_values:
        raise CorruptModelError(
            f"{path}: tensor {name} has rows of {shape[0]} values, no multiple of the {kind.block_values} that a block of {kind.name} holds"
        )
    return num_values // kind.block_values * kind.block_bytes


def _known_names() -> str:
    return ", ".join(kind.name for kind in KNOWN_TYPES.values())


def _place_tensor(entry: TensorEntry, start: int, alignment: int, file_bytes: int, path: Path) -> TensorEntry:
    if entry.offset % alignment:
        raise CorruptModelError(f"{path}: tensor {entry.name} lies at offset {entry.offset}, no multiple of the alignment {alignment}")
    offset = start + entry.offset
    if offset + entry.nbytes > file_bytes:
        raise CorruptModelError(
            f"{path}: tensor {entry.name} ends at byte {offset + entry.nbytes}, but the file has {file_bytes}; "
            "it is truncated or damaged, so download it again"
        )
    return TensorEntry(entry.name, entry.shape, entry.type_id, offset, entry.nbytes)


def _check_apart(tensors: list[TensorEntry], path: Path) -> None:
    """`tensors` are sorted by offset."""
    names: set[str] = set()
    end = 0
    previous = ""
    for tensor in tensors:
        if tensor.name in names:
            raise CorruptModelError(f"{path}: tensor {tensor.name} stands in the index twice")
        if tensor.offset < end:
            raise CorruptModelError(f"{path}: tensors {previous} and {tensor.name} overlap at byte {tensor.offset}")
        names.add(tensor.name)
        end, previous = tensor.offset + tensor.nbytes, tensor.name
