"""Key/value state of a host card in the form in which it is parked: only the tiles that the first tokens fill.

    cache, by layer    keys [heads, tiles of the context, tile] and then values alike
    parked             [layers, keys and values, heads, tiles in use, tile]

A tile holds 64 positions of one head, so the parked form does not depend on the size of the context.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from appliance.memory.workspace import KV_TILE, KvType
from appliance.models.config import ModelConfig

Bytes = NDArray[np.uint8]


def kv_state_id(content_id: str, config: ModelConfig, kv_type: KvType) -> str:
    """Equal exactly for states that can be exchanged."""
    shape = (config.layers, config.kv_heads, config.head_dim, KV_TILE)
    return hashlib.sha256(f"key/value state 1: {content_id} {shape} {kv_type}".encode()).hexdigest()


class KvState:
    """Confined to the engine loop; no run may be in progress."""

    def __init__(self, layers: Sequence[Bytes], config: ModelConfig, kv_type: KvType) -> None:
        """`layers`: the cache of each layer."""
        tile_bytes = KV_TILE * config.head_dim * (2 if kv_type == "f16" else 4)
        self._layers = [layer.reshape(2, config.kv_heads, -1, tile_bytes) for layer in layers]
        self._tile_shape = (len(layers), 2, config.kv_heads, tile_bytes)

    def nbytes(self, num_tokens: int) -> int:
        """Size of the parked state of so many positions."""
        layers, halves, heads, tile_bytes = self._tile_shape
        return layers * halves * heads * tile_bytes * _tiles(num_tokens)

    def save(self, num_tokens: int, out: Bytes) -> None:
        """Copies the state of the first positions into `out`, of `nbytes(num_tokens)` bytes."""
        tiles = _tiles(num_tokens)
        for layer, parked in zip(self._layers, self._parked(out, tiles), strict=True):
            parked[...] = layer[:, :, :tiles]

    def load(self, num_tokens: int, saved_tokens: int, state: Bytes) -> None:
        """Copies the first `num_tokens` positions of a state with `saved_tokens` positions into the cache."""
        tiles = _tiles(num_tokens)
        for layer, parked in zip(self._layers, self._parked(state, _tiles(saved_tokens)), strict=True):
            layer[:, :, :tiles] = parked[:, :, :tiles]

    def _parked(self, state: Bytes, tiles: int) -> Bytes:
        layers, halves, heads, tile_bytes = self._tile_shape
        return state.reshape(layers, halves, heads, tiles, tile_bytes)


def _tiles(num_tokens: int) -> int:
    return -(-num_tokens // KV_TILE)
