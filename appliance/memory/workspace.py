"""What the forward pass of a host card needs beside weights and slots, in bytes, buffer by buffer.

Pure: the plan adds these numbers up, and the engine allocates exactly these buffers (`appliance.models.ops`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from appliance.models.config import ModelConfig

WINDOW_ROWS = 8
"""Most rows of a window, and most rows whose logits one run gives."""
KV_TILE = 64
"""Positions per tile of the key/value cache; the context is rounded up to whole tiles."""
KV_GROUP = 64
"""Values of one head and position that share a scale where the cache is int8."""
ATTENTION_SPAN = 256
"""Positions whose attention is one unit of work while decoding."""
ALIGNMENT = 64
CUDA_ALIGNMENT = 256
RING_EXPERTS = 16
RING_BUFFERS = 3
"""A GPU streams the experts that a prompt misses through so many buffers of so many experts each."""

KvType = Literal["f16", "f32", "int8"]

_KV_VALUE_BYTES: Mapping[KvType, int] = {"f16": 2, "f32": 4, "int8": 1}
_KV_SCALE_BYTES = 2
_TILE_ROWS = 128
"""Pairs of one expert that a GPU multiplies at once in a prompt."""
_GROUP_VALUES = 256
_GROUP_BYTES = 320
"""Bytes of 256 quantised activations: values, eight scales, sixteen sums (`ActGroup`)."""


def kv_bytes(config: ModelConfig, context: int, kv_type: KvType) -> int:
    """Keys and values of `context` positions in all layers."""
    return config.layers * kv_layer_bytes(config, context, kv_type)


def kv_layer_bytes(config: ModelConfig, context: int, kv_type: KvType) -> int:
    """Keys and values of `context` positions in one layer."""
    return 2 * config.kv_heads * -(-context // KV_TILE) * kv_tile_bytes(config.head_dim, kv_type)


def kv_tile_bytes(head_dim: int, kv_type: KvType) -> int:
    """Keys or values of one head at `KV_TILE` positions, with their scales if they have some."""
    scales_bytes = -(-head_dim // KV_GROUP) * _KV_SCALE_BYTES if kv_type == "int8" else 0
    return KV_TILE * (head_dim * _KV_VALUE_BYTES[kv_type] + scales_bytes)


def workspace_bytes(config: ModelConfig, max_rows: int, context: int, max_logits: int = WINDOW_ROWS) -> dict[str, int]:
    """Buffer name -> bytes for runs of up to `max_rows` rows, `max_logits` of which give logits.

    The names are those of the buffers in `appliance.models.ops.Workspace`.
    """
    rows, pairs = max_rows, max_rows * config.top_k
    spans = -(-context // ATTENTION_SPAN)
    sizes = {
        "tokens": rows * 4,
        "angles": rows * config.head_dim * 4,
        "hidden": rows * config.hidden * 4,
        "normed": rows * config.hidden * 4,
        "normed_groups": rows * _groups(config.hidden),
        "normed_inverse": rows * 4,
        "query": rows * config.q_width * 4,
        "key": rows * config.kv_width * 4,
        "value": rows * config.kv_width * 4,
        "attended": rows * config.q_width * 4,
        "attended_groups": rows * _groups(config.q_width),
        "attention_spans": min(rows, WINDOW_ROWS) * config.heads * spans * (config.head_dim + 2) * 4,
        "router_sums": rows * config.experts * 8,
        "routed": routed_bytes(rows, config.top_k, config.experts),
        "expert_hidden": pairs * config.expert_width * 4,
        "expert_hidden_groups": pairs * _groups(config.expert_width),
        "expert_rows": pairs * config.hidden * 4,
        "logits": max_logits * config.vocab * 4,
    }
    return {name: _up(nbytes, ALIGNMENT) for name, nbytes in sizes.items()}


def cuda_workspace_bytes(
    config: ModelConfig, max_rows: int, context: int, blob_bytes: int, max_logits: int = WINDOW_ROWS
) -> dict[str, int]:
    """The same for a GPU, whose prompt path keeps activations in half precision and streams missing experts through a ring.

    `blob_bytes`: of the largest expert.
    """
    rows, pairs = max(max_rows, WINDOW_ROWS), max_rows * config.top_k
    sizes = workspace_bytes(config, rows, context, max_logits) | {
        "angles": context * config.head_dim * 4,
        "normed": WINDOW_ROWS * config.hidden * 4,  # of windows of several rows, where a matrix wants floats
        "normed_groups": _half_rows_bytes(rows, config.hidden),
        "attended_groups": _half_rows_bytes(rows, config.q_width),
        "expert_hidden_groups": _half_rows_bytes(pairs, config.expert_width),
        "routed": cuda_routed_bytes(max_rows, config.top_k, config.experts),
        "expert_ring": RING_BUFFERS * min(config.experts, RING_EXPERTS) * blob_bytes,
    }
    return {name: _up(nbytes, CUDA_ALIGNMENT) for name, nbytes in sizes.items()}


def cuda_routed_bytes(rows: int, top_k: int, experts: int) -> int:
    """The routed list of a prompt on a GPU: ids and weights by row, their order by expert, and the list of experts with its tiles.

    The native side carves the same parts out of it (`CudaRecorder::routed_memory`).
    """
    pairs = rows * top_k
    tiles = pairs // _TILE_ROWS + min(pairs, experts)
    parts = [pairs * 4, pairs * 4, pairs * 4, pairs * 4, experts * 4, experts * 4, experts * 32, 4, tiles * 8, 4]
    return sum(_up(part, CUDA_ALIGNMENT) for part in parts)


def _half_rows_bytes(rows: int, width: int) -> int:
    """Halves with a scale per row in a prompt; up to eight rows of quantised groups in a window."""
    return max(_up(rows * width * 2, CUDA_ALIGNMENT) + _up(rows * 4, CUDA_ALIGNMENT), WINDOW_ROWS * _groups(width))


def cuda_tables_bytes(config: ModelConfig) -> int:
    """Residency table, use counters and rows by tier of one GPU."""
    return residency_bytes(config) + ALIGNMENT


def residency_bytes(config: ModelConfig) -> int:
    """Residency table and use counters of one card: an int32 and a uint32 per (layer, expert)."""
    return 2 * _up(config.layers * config.experts * 4, ALIGNMENT)


def routed_bytes(rows: int, top_k: int, experts: int) -> int:
    """The routed list of one layer: ids and weights by token, their order by expert, and one entry per expert in use.

    The native side carves the same parts out of it (`ops/routed.h`).
    """
    pairs = rows * top_k
    parts = [4, pairs * 4, pairs * 4, pairs * 4, pairs * 4, experts * 4, min(experts, pairs) * 32]
    return sum(_up(part, ALIGNMENT) for part in parts)


def _groups(width: int) -> int:
    return -(-width // _GROUP_VALUES) * _GROUP_BYTES


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
