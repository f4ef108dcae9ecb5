"""Copies every expert from the model's files into the arena, or compares the two.

The files are read front to back in large pieces, not through page faults; one tensor holds one matrix of every expert of a
layer (or gate and up of each, one after the other), so a piece is a run of experts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.errors import CorruptModelError, EngineError
from appliance.gguf_file import GgufFile, TensorInfo
from appliance.gguf_types import KNOWN_TYPES
from appliance.memory.arena import Arena
from appliance.memory.arena_file import ArenaFile
from appliance.memory.layout import ArenaLayout, BlobPart, LayerBlobs, part_sources

PIECE_BYTES = 8 << 20
"""What is read at once, unless one expert's matrix is larger."""
READ_AHEAD_BYTES = 4 * PIECE_BYTES
DROP_CACHE_OVER_BYTES = 4 << 30
"""Of models with more expert bytes than this the page cache is emptied behind the loader: the arena holds them now."""

ReadAt = Callable[[int, memoryview, int], int]
"""(descriptor, buffer, offset) -> bytes read, 0 at the end of the file."""
FirstBadBlock = Callable[[int, NDArray[np.uint8]], int | None]
"""(type id, blocks) -> index of the first block whose scale is not finite, or None: `cuda_ext._native.first_bad_block`."""


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One tensor with the same part, or parts, of every expert of a layer."""

    info: TensorInfo
    path: Path
    blobs: LayerBlobs
    parts: tuple[BlobPart, ...]
    """In the order in which the bytes of one expert lie in the tensor."""

    @property
    def expert_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of `num_experts` experts of a tensor. `data` is valid until the next piece is read."""

    tensor: ExpertTensor
    first_expert: int
    num_experts: int
    data: memoryview

    def matrices(self) -> Iterator[tuple[int, BlobPart, memoryview]]:
        """(expert, part, bytes) of each matrix."""
        position = 0
        for expert in range(self.first_expert, self.first_expert + self.num_experts):
            for part in self.tensor.parts:
                yield expert, part, self.data[position : position + part.nbytes]
                position += part.nbytes


def read_at(descriptor: int, buffer: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [buffer], offset)


def tensors_in_file_order(gguf: GgufFile, layout: ArenaLayout) -> list[ExpertTensor]:
    """Every expert tensor once. Raises CorruptModelError if a tensor is not as long as the layout says."""
    parts: dict[str, list[tuple[int, BlobPart]]] = {}
    layers: dict[str, LayerBlobs] = {}
    by_layer = {blobs.layer: blobs for blobs in layout.layers}
    for source in part_sources(gguf, layout):
        parts.setdefault(source.tensor, []).append((source.first, source.part))
        layers[source.tensor] = by_layer[source.layer]
    tensors = []
    for name, placed in parts.items():
        info = gguf.tensors[name]
        ordered = tuple(part for _, part in sorted(placed, key=lambda item: item[0]))
        tensor = ExpertTensor(info, gguf.paths[info.shard], layers[name], ordered)
        expected = tensor.blobs.num_experts * tensor.expert_bytes
        if info.nbytes != expected:
            raise CorruptModelError(
                f"{tensor.path}: tensor {name} has {info.nbytes} bytes; its {tensor.blobs.num_experts} experts take {expected}"
            )
        tensors.append(tensor)
    return sorted(tensors, key=lambda tensor: (tensor.info.shard, tensor.info.offset))


def expert_bytes(tensors: list[ExpertTensor]) -> int:
    """What is read from the files: the arena without its padding."""
    return sum(tensor.info.nbytes for tensor in tensors)


def fill_arena(
    file: ArenaFile, layout: ArenaLayout, pieces: Iterator[Piece], first_bad_block: FirstBadBlock, on_progress: Callable[[int], object]
) -> None:
    """Writes all pieces to their places. `on_progress` is called with the bytes of the files that are done.

    Raises CorruptModelError at the first scale that is not a finite number: results with NaN would depend on the placement.
    """
    done_bytes = 0
    for piece in pieces:
        _check_scales(piece, first_bad_block)
        blob = piece.tensor.blobs.blob
        for expert, part, data in piece.matrices():
            padding = bytes(_end_of_part(blob.nbytes, blob.parts, part) - part.offset - part.nbytes)
            file.write(layout.offset(piece.tensor.blobs.layer, expert) + part.offset, [data, padding])
        done_bytes += len(piece.data)
        on_progress(done_bytes)


def compare_arena(arena: Arena, pieces: Iterator[Piece], on_progress: Callable[[int], object]) -> None:
    """Raises EngineError at the first matrix of the arena that is not, byte for byte, the model's."""
    done_bytes = 0
    for piece in pieces:
        layer = piece.tensor.blobs.layer
        for expert, part, data in piece.matrices():
            blob = arena.view(layer, expert)
            if not np.array_equal(blob[part.offset : part.offset + part.nbytes], np.frombuffer(data, np.uint8)):
                raise EngineError(
                    f"the arena {arena.path} differs from the model in {part.name} of layer {layer}, expert {expert}; "
                    "stop the servers that use it, remove the file and start again"
                )
        done_bytes += len(piece.data)
        on_progress(done_bytes)


def read_pieces(tensors: list[ExpertTensor], read: ReadAt = read_at) -> Iterator[Piece]:
    """All bytes of the tensors, in the order given. Raises CorruptModelError if a file ends early or cannot be read."""
    buffer = memoryview(bytearray(max([PIECE_BYTES, *(tensor.expert_bytes for tensor in tensors)])))
    drops_cache = expert_bytes(tensors) > DROP_CACHE_OVER_BYTES
    for tensor in tensors:
        descriptor = _open(tensor.path)
        try:
            yield from _read_tensor(tensor, descriptor, buffer, read)
            if drops_cache:
                os.posix_fadvise(descriptor, tensor.info.offset, tensor.info.nbytes, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _read_tensor(tensor: ExpertTensor, descriptor: int, buffer: memoryview, read: ReadAt) -> Iterator[Piece]:
    at_once = len(buffer) // tensor.expert_bytes
    for first in range(0, tensor.blobs.num_experts, at_once):
        num_experts = min(at_once, tensor.blobs.num_experts - first)
        offset = tensor.info.offset + first * tensor.expert_bytes
        data = buffer[: num_experts * tensor.expert_bytes]
        os.posix_fadvise(descriptor, offset + len(data), READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        _read_exactly(tensor, descriptor, data, offset, read)
        yield Piece(tensor, first, num_experts, data)


def _read_exactly(tensor: ExpertTensor, descriptor: int, data: memoryview, offset: int, read: ReadAt) -> None:
    done = 0
    while done < len(data):
        try:
            count = read(descriptor, data[done:], offset + done)
        except OSError as error:
            raise CorruptModelError(f"{tensor.path}: tensor {tensor.info.name} cannot be read: {error.strerror}; check the disk") from None
        if count == 0:
            raise CorruptModelError(
                f"{tensor.path}: the file ends at byte {offset + done}, inside tensor {tensor.info.name}; download it again"
            )
        done += count


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CorruptModelError(f"cannot open {path}: {error.strerror}") from None


def _check_scales(piece: Piece, first_bad_block: FirstBadBlock) -> None:
    tensor = piece.tensor
    blocks = np.frombuffer(piece.data, np.uint8)
    bad = first_bad_block(tensor.info.type_id, blocks)
    if bad is None:
        return
    block_bytes = KNOWN_TYPES[tensor.info.type_id].block_bytes
    expert = piece.first_expert + bad * block_bytes // tensor.expert_bytes
    raise CorruptModelError(
        f"{tensor.path}: tensor {tensor.info.name} ({tensor.info.type_name}) has a scale that is not a finite number in expert {expert}; "
        "download the file again or use another quantisation"
    )


def _end_of_part(blob_bytes: int, parts: tuple[BlobPart, ...], part: BlobPart) -> int:
    """Where the padding behind a part ends."""
    return min((other.offset for other in parts if other.offset > part.offset), default=blob_bytes)
