"""Model files in the shape of Qwen3-30B-A3B with fewer layers, their experts of any type.

Weights are random valid blocks under sane scales: a few rows per tensor are drawn and dealt out, so that a file is written at the
speed of the disk or, by several threads, of the memory. What they say means nothing; how long it takes does not depend on it, but for
the experts that are chosen: with a `Routing` their use is known (and layers add so little to a row that it is known in all of them).
"""

from __future__ import annotations

import os
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.gguf_types import GgmlType
from scripts.host_bench.routing import Routing, router_rows
from tests.gguf_writing import TYPES_BY_NAME, ModelShape, encode_key, plain_tokenizer_keys, random_rows

ALIGNMENT = 32
NUM_DRAWN = 64
"""Rows that are drawn for each tensor."""
NUM_EMBEDDINGS = 4096
RESIDUAL_GAIN = 1e-4
"""With a routing: distinct rows of the embedding, and how much of what layers would add to a row they add. Blocks of most types
have a mean when they are drawn, so products add up in step: up to 400 times a row, the same for every token."""
ROUTER_GAIN = 4.0
DENSE_TYPE, HEAD_TYPE = "Q8_0", "Q6_K"
NUM_WRITERS = min(16, os.cpu_count() or 1)


def qwen3_shape(num_layers: int, context: int) -> ModelShape:
    return ModelShape(
        layers=num_layers,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        experts=128,
        top_k=8,
        width=768,
        vocab=151936,
        context=context,
    )


@dataclass(frozen=True)
class BenchModel:
    """A file and how many of its bytes a token needs."""

    path: Path
    shape: ModelShape
    expert_type: str
    dense_type: str = DENSE_TYPE
    routing: Routing | None = None
    down_type: str | None = None
    """Of the experts' down projections. None: as the others."""
    counts: bool = False
    """The likeliest token after t is t + 1: greedy text never comes round to the same experts. Needs a routing."""

    def kind_of(self, name: str) -> GgmlType:
        """Of the tensor of that name."""
        if "_exps." in name:
            return TYPES_BY_NAME[self.down_type if self.down_type and "ffn_down" in name else self.expert_type]
        if name.endswith("norm.weight") or "ffn_gate_inp" in name:
            return TYPES_BY_NAME["F32"]
        is_head = name == "output.weight" or (self.counts and name == "token_embd.weight")
        return TYPES_BY_NAME[HEAD_TYPE if is_head else self.dense_type]

    @property
    def bytes_per_token(self) -> int:
        """Of weights that one decoded token reads: all but the other experts and the other tokens' embeddings."""
        return sum(
            int(_tensor_bytes(self.kind_of(name), dims) / self._tokens_per_read(name)) for name, dims in self.shape.tensors().items()
        )

    @property
    def values_per_token(self) -> int:
        """Weights that one row is multiplied with."""
        tensors = self.shape.tensors().items()
        return sum(int(np.prod(dims) / self._tokens_per_read(name)) for name, dims in tensors if name != "token_embd.weight")

    @property
    def expert_bytes(self) -> int:
        return sum(_tensor_bytes(self.kind_of(name), dims) for name, dims in self.shape.tensors().items() if "_exps." in name)

    @property
    def expert_bytes_per_token(self) -> int:
        return self.expert_bytes * self.shape.top_k // self.shape.experts

    def _tokens_per_read(self, name: str) -> float:
        """How many tokens it takes, on average, to read as much as the whole tensor."""
        if name == "token_embd.weight":
            return self.shape.vocab
        return self.shape.experts / self.shape.top_k if "_exps." in name else 1

    @property
    def file_bytes(self) -> int:
        return sum(_tensor_bytes(self.kind_of(name), dims) for name, dims in self.shape.tensors().items())


def write_model(model: BenchModel) -> None:
    """Writes the file; one that stands there in full is kept."""
    kinds = {name: model.kind_of(name) for name in model.shape.tensors()}
    head = _head(model, kinds)
    if model.path.exists() and model.path.stat().st_size == len(head) + _data_bytes(model, kinds):
        return
    model.path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = model.path.with_suffix(".part")
    with unfinished.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + _data_bytes(model, kinds))
    data = np.memmap(unfinished, np.uint8, "r+")
    places = _places(model, kinds, data[len(head) :])
    embedding = places.pop("token_embd.weight")
    _write(model, "token_embd.weight", embedding, 0.0, np.random.default_rng(0))
    mean = _mean_of_normed(embedding[:NUM_EMBEDDINGS], kinds["token_embd.weight"]) if model.routing else 0.0
    if model.counts:
        head_rows = places.pop("output.weight")
        head_rows[1:], head_rows[0] = embedding[:-1], embedding[-1]
    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        seeded = enumerate(places.items(), 1)
        writes = [pool.submit(_write, model, name, rows, mean, np.random.default_rng(seed)) for seed, (name, rows) in seeded]
    for write in writes:
        write.result()
    del data, places, embedding
    unfinished.rename(model.path)


def _places(model: BenchModel, kinds: dict[str, GgmlType], data: NDArray[np.uint8]) -> dict[str, NDArray[np.uint8]]:
    """[rows, row bytes] of each tensor in the file."""
    places = {}
    offset = 0
    for name, dims in model.shape.tensors().items():
        nbytes = _tensor_bytes(kinds[name], dims)
        places[name] = data[offset : offset + nbytes].reshape(int(np.prod(dims[1:])), -1)
        offset += _padded(nbytes)
    return places


def _tensor_bytes(kind: GgmlType, dims: tuple[int, ...]) -> int:
    return int(np.prod(dims)) // kind.block_values * kind.block_bytes


def _padded(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT


def _data_bytes(model: BenchModel, kinds: dict[str, GgmlType]) -> int:
    return sum(_padded(_tensor_bytes(kinds[name], dims)) for name, dims in model.shape.tensors().items())


def _head(model: BenchModel, kinds: dict[str, GgmlType]) -> bytes:
    keys = model.shape.keys() | plain_tokenizer_keys(model.shape.vocab)
    tensors = model.shape.tensors()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    head += b"".join(encode_key(name, value_type, value) for name, (value_type, value) in keys.items())
    offset = 0
    for name, dims in tensors.items():
        head += struct.pack("<Q", len(name)) + name.encode()
        head += struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kinds[name].type_id, offset)
        offset += _padded(_tensor_bytes(kinds[name], dims))
    return head + bytes(-len(head) % ALIGNMENT)


def _write(model: BenchModel, name: str, rows: NDArray[np.uint8], mean: float, rng: np.random.Generator) -> None:
    """Draws `rows`, [rows, row bytes]. `mean`: of the values of normed embeddings."""
    dims = model.shape.tensors()[name]
    num_rows = len(rows)
    if name.endswith("norm.weight"):
        rows[:] = np.ones(dims, np.float32).view(np.uint8)
        return
    is_router = "ffn_gate_inp" in name
    num_drawn = num_rows if is_router else min(_most_drawn(model, name), num_rows)
    drawn = random_rows(model.kind_of(name), num_drawn * dims[0], rng, _gain(model, name, dims) / dims[0] ** 0.5)
    if is_router and model.routing:
        values = np.frombuffer(drawn, np.float32).reshape(num_drawn, -1)
        rows[:] = router_rows(values, model.shape.top_k, model.routing, mean, rng).view(np.uint8)
        return
    pool = np.frombuffer(drawn, np.uint8).reshape(num_drawn, -1)
    if num_drawn == num_rows:
        rows[:] = pool
    else:
        np.take(pool, rng.integers(0, num_drawn, num_rows), axis=0, out=rows, mode="clip")  # "raise" would go through a copy


def _most_drawn(model: BenchModel, name: str) -> int:
    if model.counts and name == "token_embd.weight":
        return model.shape.vocab
    return NUM_EMBEDDINGS if model.routing and name == "token_embd.weight" else NUM_DRAWN


def _gain(model: BenchModel, name: str, dims: tuple[int, ...]) -> float:
    """Root mean square of a product with a row of ones, more or less."""
    if "ffn_gate_inp" in name:
        return ROUTER_GAIN
    if name == "token_embd.weight":
        return float(dims[0] ** 0.5)
    is_residual = "attn_output" in name or "ffn_down" in name
    return RESIDUAL_GAIN if model.routing and is_residual else 1.0


def _mean_of_normed(rows: NDArray[np.uint8], kind: GgmlType) -> float:
    """Of the values of embeddings after RMSNorm."""
    import gguf

    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(kind.type_id))
    return float(np.mean(values.mean(axis=1) / np.sqrt((values**2).mean(axis=1))))
