"""Model files in the shape of Qwen3-30B-A3B with fewer layers, their experts of any type.

Weights are random valid blocks under sane scales: a few rows per tensor are drawn and dealt out, so that a file is written at the
speed of the disk. What they say means nothing; how long it takes does not depend on it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.gguf_types import GgmlType
from tests.gguf_writing import ARRAY, BOOL, I32, STRING, TYPES_BY_NAME, U32, ModelShape, encode_key, random_rows

ALIGNMENT = 32
NUM_DRAWN = 64
"""Rows that are drawn for each tensor."""
ROUTER_GAIN = 4.0
DENSE_TYPE, HEAD_TYPE = "Q8_0", "Q6_K"


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

    def kind_of(self, name: str) -> GgmlType:
        """Of the tensor of that name."""
        if "_exps." in name:
            return TYPES_BY_NAME[self.expert_type]
        if name.endswith("norm.weight") or "ffn_gate_inp" in name:
            return TYPES_BY_NAME["F32"]
        return TYPES_BY_NAME[HEAD_TYPE if name == "output.weight" else self.dense_type]

    @property
    def bytes_per_token(self) -> int:
        """Of weights that one decoded token reads: all but the other experts and the other tokens' embeddings."""
        total = 0
        for name, dims in self.shape.tensors().items():
            nbytes = _tensor_bytes(self.kind_of(name), dims)
            if name == "token_embd.weight":
                nbytes //= self.shape.vocab
            elif "_exps." in name:
                nbytes = nbytes * self.shape.top_k // self.shape.experts
            total += nbytes
        return total

    @property
    def file_bytes(self) -> int:
        return sum(_tensor_bytes(self.kind_of(name), dims) for name, dims in self.shape.tensors().items())


def write_model(model: BenchModel) -> None:
    """Writes the file; one that stands there in full is kept."""
    kinds = {name: model.kind_of(name) for name in model.shape.tensors()}
    head = _head(model, kinds)
    if model.path.exists() and model.path.stat().st_size == len(head) + _data_bytes(model, kinds):
        return
    unfinished = model.path.with_suffix(".part")
    with unfinished.open("wb") as file:
        file.write(head)
        rng = np.random.default_rng(0)
        for name, dims in model.shape.tensors().items():
            rows = _rows(name, dims, kinds[name], rng)
            rows.tofile(file)
            file.write(bytes(-rows.nbytes % ALIGNMENT))
    unfinished.rename(model.path)


def _tensor_bytes(kind: GgmlType, dims: tuple[int, ...]) -> int:
    return int(np.prod(dims)) // kind.block_values * kind.block_bytes


def _padded(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT


def _data_bytes(model: BenchModel, kinds: dict[str, GgmlType]) -> int:
    return sum(_padded(_tensor_bytes(kinds[name], dims)) for name, dims in model.shape.tensors().items())


def _head(model: BenchModel, kinds: dict[str, GgmlType]) -> bytes:
    keys = model.shape.keys() | _tokenizer_keys(model.shape.vocab)
    tensors = model.shape.tensors()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    head += b"".join(encode_key(name, value_type, value) for name, (value_type, value) in keys.items())
    offset = 0
    for name, dims in tensors.items():
        head += struct.pack("<Q", len(name)) + name.encode()
        head += struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kinds[name].type_id, offset)
        offset += _padded(_tensor_bytes(kinds[name], dims))
    return head + bytes(-len(head) % ALIGNMENT)


def _rows(name: str, dims: tuple[int, ...], kind: GgmlType, rng: np.random.Generator) -> NDArray[np.uint8]:
    """[rows, row bytes]"""
    if name.endswith("norm.weight"):
        return np.ones((1, dims[0]), np.float32).view(np.uint8)
    num_rows = int(np.prod(dims[1:]))
    gain = ROUTER_GAIN if "ffn_gate_inp" in name else dims[0] ** 0.5 if name == "token_embd.weight" else 1.0
    num_drawn = num_rows if "ffn_gate_inp" in name else min(NUM_DRAWN, num_rows)
    drawn = random_rows(kind, num_drawn * dims[0], rng, gain / dims[0] ** 0.5)
    rows = np.frombuffer(drawn, np.uint8).reshape(num_drawn, -1)
    return rows if num_drawn == num_rows else rows[rng.integers(0, num_drawn, num_rows)]


def _tokenizer_keys(vocab: int) -> dict[str, tuple[int, object]]:
    """As much of a tokenizer as llama.cpp wants to see."""
    tokens = [*map(chr, range(33, 127)), "Ġ", "Ċ", *(f"<pad{index}>" for index in range(vocab))][:vocab]
    return {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "qwen2"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, [1] * vocab)),
        "tokenizer.ggml.merges": (ARRAY, (STRING, ["a b"])),
        "tokenizer.ggml.eos_token_id": (U32, vocab - 1),
        "tokenizer.ggml.add_bos_token": (BOOL, False),
    }
