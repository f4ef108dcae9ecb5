"""Where every blob lies in the arena, and where its three matrices come from in the file.

    arena:  layer 0: blob of expert 0 | blob of expert 1 | ...   layer 1: ...
    blob:   gate rows | pad | up rows | pad | down rows | pad        every part begins at a multiple of 256 bytes

Layers may differ in types, and so in blob size; within a layer all blobs are alike.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from appliance.errors import CorruptModelError
from appliance.gguf_file import GgufFile, TensorInfo
from appliance.gguf_types import KNOWN_TYPES
from appliance.models.config import ModelConfig, layer_tensor

ALIGNMENT = 256
FORMAT = 1
"""Counts changes of the layout's meaning; part of the digest."""

PartName = Literal["gate", "up", "down"]

_EXPERT_SUFFIXES = tuple(f".ffn_{name}_exps.weight" for name in ("gate", "up", "gate_up", "down"))


@dataclass(frozen=True, slots=True)
class BlobPart:
    """One matrix of an expert: `rows` rows of `columns` values. `offset` counts from the start of the blob."""

    name: PartName
    type_id: int
    rows: int
    columns: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BlobLayout:
    """How one expert's bytes lie: gate, up, down. `nbytes` is a multiple of 256 and includes the padding."""

    parts: tuple[BlobPart, ...]
    nbytes: int

    def part(self, name: PartName) -> BlobPart:
        return next(part for part in self.parts if part.name == name)


@dataclass(frozen=True, slots=True)
class LayerBlobs:
    """The blobs of one layer, one behind the other from `offset` in the arena."""

    layer: int
    num_experts: int
    blob: BlobLayout
    offset: int

    @property
    def nbytes(self) -> int:
        return self.num_experts * self.blob.nbytes


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """All blobs of a model. Offsets count from the first blob, not from the start of the arena's file."""

    layers: tuple[LayerBlobs, ...]
    total_bytes: int

    @property
    def num_experts(self) -> int:
        """Of all layers together."""
        return sum(blobs.num_experts for blobs in self.layers)

    @property
    def largest_blob_bytes(self) -> int:
        return max(blobs.blob.nbytes for blobs in self.layers)

    def offset(self, layer: int, expert: int) -> int:
        """Of one blob. IndexError if there is no such expert."""
        blobs = self.layers[layer]
        if layer < 0 or not 0 <= expert < blobs.num_experts:
            raise IndexError(f"there is no expert {expert} in layer {layer}")
        return blobs.offset + expert * blobs.blob.nbytes

    def digest(self) -> str:
        """Hex digest that changes when anything here changes: two processes with one digest agree on every byte's place."""
        return hashlib.sha256(f"tandem layout {FORMAT}: {self!r}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class PartSource:
    """Where one part of a layer's experts lies in the file: expert `e` has `part.nbytes` bytes at `first + e * stride` of the tensor."""

    layer: int
    part: BlobPart
    tensor: str
    first: int
    stride: int


def arena_layout(gguf: GgufFile, config: ModelConfig) -> ArenaLayout:
    """The layout of a model that `read_config` accepted."""
    layers: list[LayerBlobs] = []
    offset = 0
    for layer in range(config.layers):
        blobs = LayerBlobs(layer, config.experts, _blob_layout(gguf, config, layer), offset)
        layers.append(blobs)
        offset += blobs.nbytes
    return ArenaLayout(tuple(layers), offset)


def is_router_tensor(name: str) -> bool:
    return name.endswith(".ffn_gate_inp.weight")


def becomes_float32(tensor: TensorInfo) -> bool:
    """Whether a dense tensor is float32 on a card, whatever it is in the file."""
    return len(tensor.shape) == 1 or is_router_tensor(tensor.name)


def is_expert_tensor(name: str) -> bool:
    """Whether a tensor of the file goes into the arena; all others are dense weights."""
    return name.endswith(_EXPERT_SUFFIXES)


def part_sources(gguf: GgufFile, layout: ArenaLayout) -> tuple[PartSource, ...]:
    """The origin of every part of every layer, layer by layer; gate and up may share one tensor, gate rows first."""
    return tuple(_part_source(gguf, blobs, part) for blobs in layout.layers for part in blobs.blob.parts)


def _part_source(gguf: GgufFile, blobs: LayerBlobs, part: BlobPart) -> PartSource:
    fused = layer_tensor(blobs.layer, "ffn_gate_up_exps")
    if part.name == "down" or fused not in gguf.tensors:
        return PartSource(blobs.layer, part, layer_tensor(blobs.layer, f"ffn_{part.name}_exps"), 0, part.nbytes)
    return PartSource(blobs.layer, part, fused, 0 if part.name == "gate" else part.nbytes, 2 * part.nbytes)


def _blob_layout(gguf: GgufFile, config: ModelConfig, layer: int) -> BlobLayout:
    parts: list[BlobPart] = []
    offset = 0
    shapes: tuple[tuple[PartName, int, int], ...] = (
        ("gate", config.expert_width, config.hidden),
        ("up", config.expert_width, config.hidden),
        ("down", config.hidden, config.expert_width),
    )
    for name, rows, columns in shapes:
        kind = KNOWN_TYPES[_expert_tensor(gguf, layer, name).type_id]
        part = BlobPart(name, kind.type_id, rows, columns, offset, rows * kind.row_bytes(columns))
        parts.append(part)
        offset = _aligned(offset + part.nbytes)
    return BlobLayout(tuple(parts), offset)


def _expert_tensor(gguf: GgufFile, layer: int, name: PartName) -> TensorInfo:
    fused = gguf.tensors.get(layer_tensor(layer, "ffn_gate_up_exps"))
    tensor = fused if fused and name != "down" else gguf.tensors.get(layer_tensor(layer, f"ffn_{name}_exps"))
    if tensor is None:
        raise CorruptModelError(f"{gguf.paths[0]}: tensor {layer_tensor(layer, f'ffn_{name}_exps')} is missing")
    return tensor


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
