"""Routed experts of one window: random layers, what the host operations make of them, and the card's kernels on the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from appliance.gguf_types import KNOWN_TYPES, GgmlType
from appliance.memory.workspace import routed_bytes
from cuda_ext import _native as native
from tests.gguf_writing import random_rows
from tests.op_rig import Floats, OpRig, floats, router_sums

Bytes = NDArray[np.uint8]
Ids = NDArray[np.int32]

EPS = 1e-6
GROUP_BYTES = 320
GROUP_VALUES = 256
BLOB_ALIGNMENT = 256


def type_named(name: str) -> GgmlType:
    return next(kind for kind in KNOWN_TYPES.values() if kind.name == name)


@dataclass(frozen=True)
class Shape:
    experts: int
    top_k: int
    hidden: int
    width: int
    gate: str
    up: str
    down: str
    fused: bool = False
    """Gate and up in one matrix, gate rows first."""


@dataclass(frozen=True)
class Layer:
    shape: Shape
    blobs: Bytes
    """[experts, blob bytes]"""
    gate: native.BlobMatrix
    up: native.BlobMatrix
    down: native.BlobMatrix
    gamma: Floats


@cache
def random_layer(shape: Shape, seed: int = 1) -> Layer:
    rng = np.random.default_rng(seed)
    sizes = ((shape.gate, shape.width, shape.hidden), (shape.up, shape.width, shape.hidden), (shape.down, shape.hidden, shape.width))
    offset, matrices, columns = 0, [], []
    for name, rows, values in sizes:
        kind = type_named(name)
        data = np.frombuffer(random_rows(kind, shape.experts * rows * values, rng, 0.1), np.uint8).reshape(shape.experts, -1)
        padding = -data.shape[1] % (1 if shape.fused and not matrices else 32)
        matrices.append(native.BlobMatrix.at(kind.type_id, offset, rows, values))
        columns += [data, np.zeros((shape.experts, padding), np.uint8)]
        offset += data.shape[1] + padding
    columns.append(np.zeros((shape.experts, -offset % BLOB_ALIGNMENT), np.uint8))
    gamma = (1.0 + 0.2 * rng.standard_normal(shape.hidden)).astype(np.float32)
    return Layer(shape, np.ascontiguousarray(np.concatenate(columns, 1)), *matrices, gamma)


@dataclass(frozen=True)
class Routing:
    logits: Floats
    """[rows, experts], before the norm's factor"""
    gating: native.Gating = native.Gating.softmax
    renormalise: bool = True
    scale: float = 1.0

    @property
    def sums(self) -> NDArray[np.int64]:
        return router_sums(self.logits)


@dataclass(frozen=True)
class Placement:
    resident: frozenset[int]
    streamed_ratio: float = 0.0
    arena_on_card: bool = True
    every_block_polls: bool = False
    answered: bool = True
    held: int = 0
    """Threads of the pool that sit out."""
    num_threads: int = 2


@dataclass(frozen=True)
class HostResult:
    hidden: Floats
    ids: Ids


def on_host(layer: Layer, hidden: Floats, routing: Routing, num_layers: int = 1) -> HostResult:
    """The same by ops/norm.h, route.h and experts.h, `num_layers` times."""
    shape, (rows, width) = layer.shape, hidden.shape
    rig = OpRig(rows)
    uses, slots = rig.card.allocate("uses", 4 * shape.experts), rig.card.allocate("slots", 4 * shape.experts)
    table = native.ExpertTable(1, shape.experts, slots, uses)
    table.set_layer(0, rig.give(layer.blobs), layer.blobs.shape[1])
    routed = rig.take(routed_bytes(rows, shape.top_k, shape.experts))
    out, pairs = rig.give(hidden), rows * shape.top_k
    groups = rig.take(rows * _groups(width) * GROUP_BYTES)
    normed = native.RowsMemory(rig.take(4 * rows * width), groups, width, rig.take(4 * rows))
    inner = native.RowsMemory(rig.take(4 * pairs * shape.width), rig.take(pairs * _groups(shape.width) * GROUP_BYTES), shape.width)
    gate = native.Gate(routing.gating, routing.renormalise, routing.scale, shape.top_k)
    expert = native.Expert(layer.gate, layer.up, layer.down)
    gamma, expert_rows = rig.give(layer.gamma), rig.take(4 * pairs * width)
    for _ in range(num_layers):
        rig.recorder.norm(out, gamma, EPS, native.Rows.all, normed)
        rig.recorder.route(rig.give(routing.sums), normed, gate, table, 0, routed)
        rig.recorder.experts(expert, table, 0, shape.top_k, routed, normed, inner, expert_rows, out)
    rig.run(rows)
    ids = routed.bytes()[64 : 64 + 4 * pairs].view(np.int32).reshape(rows, shape.top_k).copy()
    return HostResult(floats(out, rows, width), ids)


@dataclass(frozen=True)
class CardResult:
    hidden: Floats
    uses: NDArray[np.uint32]
    tier_rows: NDArray[np.uint64]
    voided: bool
    posted: int
    host_posts: int
    host_rows: int


def on_card(layer: Layer, hidden: Floats, routing: Routing, placement: Placement, num_layers: int = 1) -> CardResult:
    """By gate_up_window and down_window, with a host tier."""
    experts = layer.shape.experts
    slots = np.full(experts, -1, np.int32)
    order = np.random.default_rng(7).permutation(sorted(placement.resident)).astype(int).tolist()
    for slot, expert in enumerate(order):
        slots[expert] = slot
    blobs = layer.blobs[order] if order else np.zeros((1, layer.blobs.shape[1]), np.uint8)
    pool = native.Pool(placement.num_threads)
    pool.hold(placement.held)
    window = native.ExpertsWindowCase(
        hidden=hidden,
        gamma=layer.gamma,
        sums=routing.sums,
        slots=slots,
        slot_blobs=blobs,
        arena=layer.blobs,
        gate=layer.gate,
        up=layer.up,
        down=layer.down,
        top_k=layer.shape.top_k,
        gating=routing.gating,
        renormalise=routing.renormalise,
        scale=routing.scale,
        streamed_ratio=placement.streamed_ratio,
        arena_on_card=placement.arena_on_card,
        every_block_polls=placement.every_block_polls,
        num_layers=num_layers,
        answered=placement.answered,
    )
    return CardResult(**native.experts_window(window, native.HostCard(pool, native.isas()[-1])))


@dataclass(frozen=True)
class Tiers:
    """How the rows of a window's ids divide among tiers, counted slowly."""

    own: int = 0
    streamed: int = 0
    host: int = 0
    host_experts: frozenset[int] = field(default_factory=frozenset)


def tiers_of(ids: Ids, placement: Placement) -> Tiers:
    """The rule of cuda_ops/experts_window.h."""
    missed = list(dict.fromkeys(int(expert) for expert in ids.reshape(-1) if int(expert) not in placement.resident))
    ratio = np.float32(placement.streamed_ratio) if placement.arena_on_card else np.float32(0)
    streamed = missed[: int(np.floor(np.float32(len(missed)) * ratio + np.float32(0.5)))]
    host = frozenset(missed) - frozenset(streamed)
    flat = [int(expert) for expert in ids.reshape(-1)]
    return Tiers(
        own=sum(expert in placement.resident for expert in flat),
        streamed=sum(expert in streamed for expert in flat),
        host=sum(expert in host for expert in flat),
        host_experts=host,
    )


def _groups(width: int) -> int:
    return -(-width // GROUP_VALUES)
