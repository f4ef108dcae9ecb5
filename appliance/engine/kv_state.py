"""Key/value state of a card in the form in which it is parked: only the tiles that the first tokens fill.

    cache, by layer    keys [heads, tiles of the context, tile] and then values alike
    parked             [layers, keys and values, heads, tiles in use, tile]

A tile holds 64 positions of one head, so the parked form does not depend on the size of the context. Host cards and GPUs lay
their caches out alike; what a prompt leaves in them differs in the last bits, so states stay with one kind of card.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from appliance.engine.cards import Card, GpuCard
from appliance.memory.workspace import KV_TILE, KvType, kv_tile_bytes
from appliance.models.config import ModelConfig
from cuda_ext import _native as native

Bytes = NDArray[np.uint8]


def kv_state_id(content_id: str, config: ModelConfig, kv_type: KvType, card: str) -> str:
    """Equal exactly for states that can be exchanged. `card`: `host:N` or `cuda:N`, of which only the kind counts."""
    shape = (config.layers, config.kv_heads, config.head_dim, KV_TILE)
    return hashlib.sha256(f"key/value state 2: {content_id} {shape} {kv_type} {card.partition(':')[0]}".encode()).hexdigest()


class KvState:
    """Confined to the engine loop; no run may be in progress."""

    def __init__(self, card: Card, cache: Sequence[native.KvMemory], config: ModelConfig, kv_type: KvType) -> None:
        """`cache`: that of each layer, on `card`."""
        self._layers = [_layer_memory(card, layer.memory, 2 * config.kv_heads) for layer in cache]
        self._num_rows = 2 * config.kv_heads
        self._tile_bytes = kv_tile_bytes(config.head_dim, kv_type)

    def nbytes(self, num_tokens: int) -> int:
        """Size of the parked state of so many positions."""
        return len(self._layers) * self._num_rows * self._row_bytes(num_tokens)

    def save(self, num_tokens: int, out: Bytes) -> None:
        """Copies the state of the first positions into `out`, of `nbytes(num_tokens)` bytes."""
        for layer, parked in zip(self._layers, self._parked(out, num_tokens), strict=True):
            layer.read(parked)

    def load(self, num_tokens: int, saved_tokens: int, state: Bytes) -> None:
        """Copies the first `num_tokens` positions of a state with `saved_tokens` positions into the cache."""
        row_bytes = self._row_bytes(num_tokens)
        for layer, parked in zip(self._layers, self._parked(state, saved_tokens), strict=True):
            layer.write(parked[:, :row_bytes])

    def _row_bytes(self, num_tokens: int) -> int:
        """Of the tiles that so many positions of one head fill."""
        return -(-num_tokens // KV_TILE) * self._tile_bytes

    def _parked(self, state: Bytes, num_tokens: int) -> Bytes:
        return state.reshape(len(self._layers), self._num_rows, self._row_bytes(num_tokens))


class _LayerMemory(Protocol):
    """One layer's cache as rows, the keys of each head and then the values of each, of which the beginnings are copied."""

    def read(self, out: Bytes) -> None:
        """`out`: [rows, bytes]."""

    def write(self, parked: Bytes) -> None:
        """`parked`: [rows, bytes]."""


def _layer_memory(card: Card, memory: native.View, num_rows: int) -> _LayerMemory:
    if isinstance(card, GpuCard):
        return _GpuLayer(card, memory, memory.nbytes // num_rows)
    return _HostLayer(memory.bytes().reshape(num_rows, -1))


class _HostLayer:
    def __init__(self, rows: Bytes) -> None:
        self._rows = rows

    def read(self, out: Bytes) -> None:
        out[...] = self._rows[:, : out.shape[1]]

    def write(self, parked: Bytes) -> None:
        self._rows[:, : parked.shape[1]] = parked


class _GpuLayer:
    def __init__(self, card: GpuCard, memory: native.View, pitch: int) -> None:
        self._card = card
        self._memory = memory
        self._pitch = pitch

    def read(self, out: Bytes) -> None:
        self._card.read_rows(self._memory, self._pitch, out)

    def write(self, parked: Bytes) -> None:
        self._card.write_rows(self._memory, self._pitch, parked)
