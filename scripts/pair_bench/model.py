"""A model in the shape of the original pair's: 512 experts, ten of them per token, 59 GB with 48 layers. Its text never repeats.

Routing depends on the token alone and is even; greedy text counts through the whole vocabulary, so neighbouring tokens share no
experts but by chance, and a cache holds what its size says.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.gguf_file import GgufFile, open_gguf
from scripts.host_bench.model import BenchModel
from scripts.host_bench.routing import Routing
from tests.gguf_writing import ModelShape

CONTEXT = 8192
GATE_UP_TYPE, DOWN_TYPE = "IQ3_S", "IQ4_NL"
SAMPLED_TOKENS = 8192
HOTTEST = 0.405
"""Share of the experts whose uses are added up: as many as one card holds when both together hold 81 %."""


def pair_shape(num_layers: int, num_experts: int = 512) -> ModelShape:
    return ModelShape(
        layers=num_layers,
        hidden=2560,
        heads=32,
        kv_heads=4,
        head_dim=128,
        experts=num_experts,
        top_k=10,
        width=640,
        vocab=151936,
        context=CONTEXT,
    )


def pair_model(path: Path, shape: ModelShape) -> BenchModel:
    return BenchModel(path, shape, GATE_UP_TYPE, routing=Routing(), down_type=DOWN_TYPE, counts=True)


def evenness(path: Path, layer: int, top_k: int) -> dict[str, float]:
    """How evenly random tokens would use a layer's experts: least and most used over the average, and the share of the hottest.

    Computed from embedding and router alone; the last is `HOTTEST` where all are used alike, and a little more by chance.
    """
    gguf = open_gguf(path)
    tokens = np.random.default_rng(1).integers(0, gguf.tensors["token_embd.weight"].shape[1], SAMPLED_TOKENS)
    rows = _values(gguf, "token_embd.weight", tokens)
    rows /= np.sqrt((rows**2).mean(axis=1, keepdims=True))
    router = _values(gguf, f"blk.{layer}.ffn_gate_inp.weight", np.arange(gguf.tensors[f"blk.{layer}.ffn_gate_inp.weight"].shape[1]))
    chosen = np.argpartition(-(rows @ router.T), top_k, axis=1)[:, :top_k]
    uses = np.sort(np.bincount(chosen.ravel(), minlength=len(router)))[::-1]
    hottest = uses[: round(HOTTEST * len(uses))].sum() / uses.sum()
    average = uses.mean()
    return {"least": float(uses[-1] / average), "most": float(uses[0] / average), f"hottest {HOTTEST:.1%}": float(hottest)}


def _values(gguf: GgufFile, name: str, picked: NDArray[np.int64]) -> NDArray[np.float32]:
    """Rows of a tensor, dequantised."""
    from gguf import GGMLQuantizationType, quants

    tensor = gguf.tensors[name]
    num_rows = tensor.shape[1]
    raw = np.memmap(gguf.paths[tensor.shard], np.uint8, "r", tensor.offset, (num_rows, tensor.nbytes // num_rows))
    values: NDArray[np.float32] = quants.dequantize(raw[picked], GGMLQuantizationType(tensor.type_id))
    return np.array(values.reshape(len(picked), -1), np.float32)
