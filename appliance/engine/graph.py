"""A model on one card: memory for its dense weights, key/value cache and workspace, and the forward pass recorded over them.

Allocates exactly what the plan says, consumer by consumer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from appliance.engine.cards import Card, GpuProgram, GpuTable, rows_of
from appliance.engine.generation import WindowInterruptedError
from appliance.engine.logits import LogitsRow
from appliance.errors import CorruptModelError, EngineError
from appliance.gguf_file import GgufFile, TensorInfo
from appliance.memory.arena import Arena
from appliance.memory.layout import ArenaLayout, becomes_float32, is_expert_tensor, is_router_tensor
from appliance.memory.plan import DENSE_ALIGNMENT, dense_bytes, dense_tensor_bytes
from appliance.memory.workspace import (
    WINDOW_ROWS,
    KvType,
    cuda_tables_bytes,
    cuda_workspace_bytes,
    kv_layer_bytes,
    residency_bytes,
    workspace_bytes,
)
from appliance.models import qwen3moe
from appliance.models.config import ModelConfig
from appliance.models.ops import ModelMemory, Ops, unsupported
from appliance.models.recording import Table
from appliance.units import format_bytes
from cuda_ext import _native as native

Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes)."""

_FORWARD_PASSES: Mapping[str, Callable[[Ops, ModelConfig], None]] = {"qwen3moe": qwen3moe.record}
_F32 = 0
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """What a recorded forward pass can take."""

    max_rows: int
    max_logits: int
    context: int
    kv_type: KvType

    @classmethod
    def planned(cls, max_rows: int, context: int, kv_type: KvType) -> GraphSizes:
        return cls(max_rows, min(WINDOW_ROWS, max_rows), context, kv_type)


@dataclass(frozen=True, slots=True)
class PromptBytes:
    """Experts' bytes that were copied to a GPU for prompts so far, by where they lay. None are for a host card's."""

    from_arena: int = 0
    from_peer: int = 0


class Graph:
    """Confined to the engine loop, but `interrupt` is thread-safe."""

    def __init__(self, card: Card, gguf: GgufFile, config: ModelConfig, arena: Arena, sizes: GraphSizes, *, is_gpu: bool = False) -> None:
        """Allocates and records; nothing is loaded yet. Raises UnsupportedModelError, MemoryError."""
        self.card = card
        self.is_gpu = is_gpu
        self.sizes = sizes
        self._config = config
        self._dense = DenseWeights(card, gguf)
        self._workspace = _allocate_workspace(card, _workspace_parts(config, sizes, arena.layout, is_gpu=is_gpu))
        tables_bytes = cuda_tables_bytes(config) if is_gpu else residency_bytes(config)
        blobs = native.wrap_memory(arena.address, arena.nbytes)
        self.unpinned_bytes = pin_arena(card, blobs) if is_gpu else 0
        """Of the arena, on a GPU."""
        self.table = _allocate_table(card, config, arena, blobs, tables_bytes)
        limits = (sizes.max_rows, sizes.max_logits, sizes.context, config.vocab)
        self.program = card.new_program(*limits, self._workspace["tokens"], config.top_k, config.hidden)
        self.kv = _allocate_kv(card, config, sizes)
        memory = ModelMemory(
            matrices=self._dense.matrices,
            vectors=self._dense.vectors,
            kv=self.kv,
            workspace=self._workspace,
            table=self.table,
            layout=arena.layout,
        )
        try:
            recorder = card.new_recorder(self.program, self._workspace.get("expert_ring"))
            _FORWARD_PASSES[config.arch](Ops(recorder, config, memory), config)
        except ValueError as error:
            raise unsupported(error, config) from None

    @property
    def prompt_bytes(self) -> PromptBytes:
        if isinstance(self.table, native.ExpertTable):
            return PromptBytes()
        gpu: GpuTable = self.table  # type: ignore[assignment]
        return PromptBytes(gpu.bytes_from_arena, gpu.bytes_from_peer)

    def load_dense(self, progress: Progress) -> None:
        """Reads the dense weights from the file. Raises CorruptModelError for one with a value that is not finite."""
        self._dense.load(progress)

    def run(self, tokens: Sequence[int], position: int, num_logits: int, chooser: native.Chooser | None = None) -> Sequence[LogitsRow]:
        """Logits of the last `num_logits` rows, valid until the next run. A GPU takes the next token by `chooser`.

        Raises WindowInterruptedError, or EngineError for rows beyond the graph's sizes.
        """
        chooses = () if chooser is None or not self.is_gpu else (chooser,)
        try:
            self.card.run(self.program, np.asarray(tokens, dtype=np.int32), position, num_logits, *chooses)
        except native.Interrupted:
            raise WindowInterruptedError("the run was interrupted; run it again if it is still wanted") from None
        except ValueError as error:
            raise EngineError(f"the engine was asked for a run that it cannot do: {error}") from None
        return rows_of(self.program, self._workspace["logits"], num_logits, self._config.vocab)

    def prepare_windows(self) -> None:
        """Makes what a GPU's windows of one row are launched as, with and without the others, so that none of them waits for it."""
        if self.is_gpu:
            gpu: GpuProgram = self.program  # type: ignore[assignment]
            gpu.prepare_windows()

    def profile(self, token: int, position: int, repeats: int) -> dict[str, float]:
        """Milliseconds by kind of step; EngineError on a host card, which has no such clock."""
        if isinstance(self.program, native.Program):
            raise EngineError("only the steps of a GPU can be timed")
        gpu: GpuProgram = self.program  # type: ignore[assignment]
        return gpu.profile(token, position, repeats)

    def interrupt(self) -> None:
        """Ends the run in progress, or else the next one, after its current operation. Thread-safe."""
        self.program.interrupt()


class DenseWeights:
    """Everything of a model but its experts, in one piece of card memory. Vectors and routers are float32 there, and routers are
    turned: a row per value of the hidden state, a column per expert."""

    def __init__(self, card: Card, gguf: GgufFile) -> None:
        self._card = card
        self._gguf = gguf
        self._tensors = [tensor for tensor in gguf.tensors.values() if not is_expert_tensor(tensor.name)]
        self._memory = card.allocate("dense weights", dense_bytes(gguf.tensors))
        self._places: dict[str, native.View] = {}
        self.matrices: dict[str, native.Matrix] = {}
        self.vectors: dict[str, native.View] = {}
        offset = 0
        for tensor in self._tensors:
            offset = self._place(tensor, offset)

    def load(self, progress: Progress) -> None:
        """Copies every tensor from the file. Raises CorruptModelError naming the tensor with a value that is not finite."""
        total_bytes = sum(tensor.nbytes for tensor in self._tensors)
        done_bytes = 0
        for tensor in self._tensors:
            data = self._gguf.read(tensor.name)
            bad_block = native.first_bad_block(tensor.type_id, data)
            if bad_block is not None:
                path = self._gguf.paths[tensor.shard]
                raise CorruptModelError(
                    f"{path}: tensor {tensor.name} has a value that is not finite in block {bad_block}; download the file again"
                )
            self._card.write(self._places[tensor.name], _as_on_card(tensor, data))
            done_bytes += tensor.nbytes
            progress(done_bytes, total_bytes)
        self._gguf.release_pages()

    def _place(self, tensor: TensorInfo, offset: int) -> int:
        """Gives a tensor its place; returns the next free offset."""
        columns, rows = tensor.shape[0], tensor.shape[1] if len(tensor.shape) > 1 else 1
        nbytes = dense_tensor_bytes(tensor)
        view = self._memory.part(offset, nbytes)
        self._places[tensor.name] = view
        if len(tensor.shape) == 1:
            self.vectors[tensor.name] = view
        else:
            shape = (columns, rows) if is_router_tensor(tensor.name) else (rows, columns)
            type_id = _F32 if becomes_float32(tensor) else tensor.type_id
            self.matrices[tensor.name] = native.Matrix.at(view, type_id, *shape)
        return offset + -(-nbytes // DENSE_ALIGNMENT) * DENSE_ALIGNMENT


def _as_on_card(tensor: TensorInfo, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    if not becomes_float32(tensor):
        return data
    values = native.dequantise(tensor.type_id, data)
    if is_router_tensor(tensor.name):
        values = np.ascontiguousarray(values.reshape(tensor.shape[1], tensor.shape[0]).T)
    return values.reshape(-1).view(np.uint8)


def _workspace_parts(config: ModelConfig, sizes: GraphSizes, layout: ArenaLayout, *, is_gpu: bool) -> dict[str, int]:
    if is_gpu:
        return cuda_workspace_bytes(config, sizes.max_rows, sizes.context, layout.largest_blob_bytes, sizes.max_logits)
    return workspace_bytes(config, sizes.max_rows, sizes.context, sizes.max_logits)


def _allocate_workspace(card: Card, parts: Mapping[str, int]) -> dict[str, native.View]:
    """One buffer, carved into the workspace's parts."""
    memory = card.allocate("workspace", sum(parts.values()))
    views: dict[str, native.View] = {}
    offset = 0
    for name, nbytes in parts.items():
        views[name] = memory.part(offset, nbytes)
        offset += nbytes
    return views


def _allocate_kv(card: Card, config: ModelConfig, sizes: GraphSizes) -> list[native.KvMemory]:
    layer_bytes = kv_layer_bytes(config, sizes.context, sizes.kv_type)
    memory = card.allocate("key/value cache", config.layers * layer_bytes)
    kind = native.KvType[sizes.kv_type]
    shape = (config.kv_heads, config.head_dim, sizes.context)
    try:
        return [native.KvMemory.at(memory.part(layer * layer_bytes, layer_bytes), kind, *shape) for layer in range(config.layers)]
    except ValueError as error:
        raise unsupported(error, config) from None


class Pinner(Protocol):
    def pin(self, arena: native.View) -> int:
        """As `Card.pin`."""


def pin_arena(card: Pinner, blobs: native.View) -> int:
    """Pins what the system allows. Returns, and says once, how many bytes stay pageable: a GPU cannot read those in place, and copies
    them more slowly."""
    unpinned_bytes = max(0, blobs.nbytes - card.pin(blobs))
    if unpinned_bytes > 0:
        _log.warning(
            "a part of the arena could not be pinned; its experts are not streamed, and copied more slowly",
            unpinned=format_bytes(unpinned_bytes),
            arena=format_bytes(blobs.nbytes),
        )
    return unpinned_bytes


def _allocate_table(card: Card, config: ModelConfig, arena: Arena, blobs: native.View, nbytes: int) -> Table:
    """The residency table with every layer's place in the arena."""
    table = card.new_table(config.layers, config.experts, card.allocate("tables", nbytes))
    for layer in arena.layout.layers:
        table.set_layer(layer.layer, blobs.part(layer.offset, layer.nbytes), layer.blob.nbytes)
    return table
