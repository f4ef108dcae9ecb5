"""The operations of a forward pass, as an architecture's page calls them: each call records one step into the card's program.

Rows of activations live in the card's workspace, one buffer per purpose and all layers alike, so what a call returns holds
until the same call is recorded again. The arithmetic is the native module's (`cuda_ext/src/ops`, one header per operation);
`cuda_ext.reference` says it slowly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from appliance.errors import UnsupportedModelError
from appliance.memory.layout import ArenaLayout, BlobPart
from appliance.models.config import ModelConfig
from appliance.models.recording import Recorder, Table
from appliance.models.rope import Rotation
from cuda_ext import _native as native

QUANTISED_BLOCK = 32
"""Rows whose width is a multiple of this have a quantised form."""


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What a forward pass works on: memory of one card, filled by the engine."""

    matrices: Mapping[str, native.Matrix]
    """Dense weights by tensor name; routers turned: [hidden, experts]."""
    vectors: Mapping[str, native.View]
    """Norms by tensor name, float32."""
    kv: Sequence[native.KvMemory]
    """By layer."""
    workspace: Mapping[str, native.View]
    """By the names of `appliance.memory.workspace`."""
    table: Table
    layout: ArenaLayout


@dataclass(frozen=True, slots=True)
class Heads:
    """Projected rows before norm and rotation."""

    query: native.View
    key: native.View
    value: native.View


class Ops:
    """Records one program. Used once, while the engine starts."""

    def __init__(self, recorder: Recorder, config: ModelConfig, memory: ModelMemory) -> None:
        self._recorder = recorder
        self._config = config
        self._memory = memory
        self._hidden = memory.workspace["hidden"]

    def angles(self, rotation: Rotation) -> None:
        """Cosines and sines of this run's positions, used by every layer."""
        self._recorder.angles(rotation.frequencies.tolist(), rotation.magnitude, self._memory.workspace["angles"])

    def embed(self, table: str) -> None:
        """Starts the hidden state from the rows of the tokens."""
        self._recorder.embed(self._memory.matrices[table], self._hidden)

    def norm(self, gamma: str) -> native.RowsMemory:
        """RMS norm of the hidden state, as floats and quantised."""
        return self._norm(gamma, native.Rows.all)

    def project_heads(self, x: native.RowsMemory, query: str, key: str, value: str) -> Heads:
        """Query, key and value of every row, in one pass over the three matrices."""
        workspace, matrices = self._memory.workspace, self._memory.matrices
        heads = Heads(workspace["query"], workspace["key"], workspace["value"])
        products = [
            native.Product(matrices[query], heads.query),
            native.Product(matrices[key], heads.key),
            native.Product(matrices[value], heads.value),
        ]
        self._recorder.matmul(products, x, native.Rows.all)
        return heads

    def rotate_and_store(self, layer: int, heads: Heads, query_norm: str, key_norm: str) -> None:
        """Norms the heads, turns query and key to their positions, puts keys and values into the cache."""
        vectors = self._memory.vectors
        native_heads = native.Heads(
            query=heads.query,
            key=heads.key,
            value=heads.value,
            query_heads=self._config.heads,
            query_gamma=vectors[query_norm],
            key_gamma=vectors[key_norm],
            eps=self._config.rms_eps,
            angles=self._memory.workspace["angles"],
        )
        self._recorder.rotary(native_heads, self._memory.kv[layer])

    def attend(self, layer: int, heads: Heads) -> native.RowsMemory:
        """Causal attention of every row over the layer's cache."""
        config = self._config
        attended = self._rows("attended", config.q_width)
        scale = 1.0 / math.sqrt(config.head_dim)
        spans = self._memory.workspace["attention_spans"]
        self._recorder.attention(heads.query, config.heads, self._memory.kv[layer], scale, spans, attended.values)
        if attended.width % QUANTISED_BLOCK == 0:
            self._recorder.quantise(attended)
        return attended

    def project_and_add(self, x: native.RowsMemory, matrix: str) -> None:
        """Adds the product to the hidden state."""
        product = native.Product(self._memory.matrices[matrix], self._hidden, self._hidden)
        self._recorder.matmul([product], x, native.Rows.all)

    def route(self, layer: int, x: native.RowsMemory, gamma: str, router: str, *, renormalise: bool) -> None:
        """Softmax gating: chooses the top-k experts of every row and finds out where their bytes are. `x`: the norm by `gamma`."""
        config, memory = self._config, self._memory
        sums = memory.workspace["router_sums"]
        self._recorder.router(self._hidden, memory.vectors[gamma], memory.matrices[router], sums)
        gate = native.Gate(native.Gating.softmax, renormalise, config.expert_weights_scale, config.top_k)
        self._recorder.route(sums, x, gate, memory.table, layer, memory.workspace["routed"])

    def add_experts(self, layer: int, x: native.RowsMemory) -> None:
        """Adds the routed experts' weighted rows to the hidden state; follows `route` of the same layer."""
        config, workspace = self._config, self._memory.workspace
        blob = self._memory.layout.layers[layer].blob
        expert = native.Expert(*(_blob_matrix(blob.part(name)) for name in ("gate", "up", "down")))
        self._recorder.experts(
            expert,
            self._memory.table,
            layer,
            config.top_k,
            workspace["routed"],
            x,
            self._rows("expert_hidden", config.expert_width),
            workspace["expert_rows"],
            self._hidden,
        )

    def logits(self, gamma: str, matrix: str) -> None:
        """Final norm and head, for the rows whose logits were asked for."""
        normed = self._norm(gamma, native.Rows.logits)
        product = native.Product(self._memory.matrices[matrix], self._memory.workspace["logits"])
        self._recorder.matmul([product], normed, native.Rows.logits)

    def _norm(self, gamma: str, rows: native.Rows) -> native.RowsMemory:
        normed = self._rows("normed", self._config.hidden)
        self._recorder.norm(self._hidden, self._memory.vectors[gamma], self._config.rms_eps, rows, normed)
        return normed

    def _rows(self, name: str, width: int) -> native.RowsMemory:
        workspace = self._memory.workspace
        groups = workspace[f"{name}_groups"] if width % QUANTISED_BLOCK == 0 else None
        return native.RowsMemory(workspace[name], groups, width, workspace.get(f"{name}_inverse"))


def _blob_matrix(part: BlobPart) -> native.BlobMatrix:
    return native.BlobMatrix.at(part.type_id, part.offset, part.rows, part.columns)


def unsupported(error: ValueError, config: ModelConfig) -> UnsupportedModelError:
    """What the native side refused while recording, as a sentence for the user."""
    return UnsupportedModelError(f"{config.name}: {error}")
