"""What a forward pass is recorded with: the recorders of both kinds of card, and the tables they look experts up in.

Memory, matrices and heads are the native module's own types, the same for both kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cuda_ext import _native as native


class Table(Protocol):
    """A residency table; the recorder of its own kind of card knows it."""

    @property
    def num_slots(self) -> int: ...
    @property
    def uses(self) -> native.View:
        """What was used, readable by the host: [layers, experts] uint32, and maybe more behind it."""

    def set_layer(self, layer: int, blobs: native.View, blob_bytes: int) -> None: ...
    def add_slot(self, slot: native.View) -> int: ...
    def slot(self, slot: int) -> native.View: ...
    def blob(self, layer: int, expert: int) -> native.View: ...
    def layer_blobs(self, layer: int) -> native.View: ...
    @property
    def rows_by_tier(self) -> dict[str, int]: ...


class Recorder(Protocol):
    """Each call records one operation; ValueError for what the card cannot do. Shapes: `cuda_ext/src/cards/recorder.h`."""

    def angles(self, frequencies: Sequence[float], magnitude: float, out: native.View) -> None: ...
    def embed(self, table: native.Matrix, out: native.View) -> None: ...
    def norm(self, x: native.View, gamma: native.View, eps: float, rows: native.Rows, out: native.RowsMemory) -> None: ...
    def quantise(self, rows: native.RowsMemory) -> None: ...
    def matmul(self, products: Sequence[native.Product], x: native.RowsMemory, rows: native.Rows) -> None: ...
    def rotary(self, heads: native.Heads, kv: native.KvMemory) -> None: ...
    def attention(
        self, query: native.View, query_heads: int, kv: native.KvMemory, scale: float, spans: native.View, out: native.View
    ) -> None: ...
    def router(self, x: native.View, gamma: native.View, weights: native.Matrix, sums: native.View) -> None: ...
    def route(self, sums: native.View, x: native.RowsMemory, gate: native.Gate, table: Table, layer: int, routed: native.View) -> None: ...
    def experts(
        self,
        expert: native.Expert,
        table: Table,
        layer: int,
        top_k: int,
        routed: native.View,
        x: native.RowsMemory,
        hidden: native.RowsMemory,
        expert_rows: native.View,
        out: native.View,
    ) -> None: ...
