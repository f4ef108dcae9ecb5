"""Writes GGUF files byte by byte, valid and broken ones, for every test that needs a model file.

    write_model(tmp_path / "m.gguf")                                a small valid qwen3moe
    write_model(path, ModelShape(experts=8), types={"ffn_down_exps": "Q8_0"}, shards=3)
    content = model_content(); content.set_key("qwen3moe.expert_count", U32, 0); content.write(path)

Written without gguf-py, so that it can write what gguf-py refuses to; a test reads its files back with gguf-py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.gguf_types import KNOWN_TYPES, GgmlType

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_LETTERS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
TYPES_BY_NAME = {kind.name: kind for kind in KNOWN_TYPES.values()}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a small qwen3moe. Every row is a multiple of 256, so that every type can be used."""

    layers: int = 2
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 4
    top_k: int = 2
    width: int = 256
    vocab: int = 32
    context: int = 64

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name to shape in GGUF's order."""
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (self.hidden, self.vocab),
            "output_norm.weight": (self.hidden,),
            "output.weight": (self.hidden, self.vocab),
        }
        for layer in range(self.layers):
            shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in self.layer_tensors().items()}
        return shapes

    def layer_tensors(self) -> dict[str, tuple[int, ...]]:
        q_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "attn_norm": (self.hidden,),
            "attn_q": (self.hidden, q_width),
            "attn_k": (self.hidden, kv_width),
            "attn_v": (self.hidden, kv_width),
            "attn_q_norm": (self.head_dim,),
            "attn_k_norm": (self.head_dim,),
            "attn_output": (q_width, self.hidden),
            "ffn_norm": (self.hidden,),
            "ffn_gate_inp": (self.hidden, self.experts),
            "ffn_gate_exps": (self.hidden, self.width, self.experts),
            "ffn_up_exps": (self.hidden, self.width, self.experts),
            "ffn_down_exps": (self.width, self.hidden, self.experts),
        }

    def keys(self) -> dict[str, tuple[int, object]]:
        """Metadata: key to (value type, value)."""
        return {
            "general.architecture": (STRING, "qwen3moe"),
            "general.name": (STRING, "a small test model"),
            "qwen3moe.block_count": (U32, self.layers),
            "qwen3moe.context_length": (U32, self.context),
            "qwen3moe.embedding_length": (U32, self.hidden),
            "qwen3moe.attention.head_count": (U32, self.heads),
            "qwen3moe.attention.head_count_kv": (U32, self.kv_heads),
            "qwen3moe.attention.key_length": (U32, self.head_dim),
            "qwen3moe.attention.value_length": (U32, self.head_dim),
            "qwen3moe.attention.layer_norm_rms_epsilon": (F32, 1e-6),
            "qwen3moe.rope.freq_base": (F32, 1e6),
            "qwen3moe.expert_count": (U32, self.experts),
            "qwen3moe.expert_used_count": (U32, self.top_k),
            "qwen3moe.expert_feed_forward_length": (U32, self.width),
        }


@dataclass
class Tensor:
    """What stands in the index; `data` is written whatever the index says."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    data: bytes
    offset: int | None = None
    """None: behind the tensor before, aligned."""


@dataclass
class GgufContent:
    """One file's content, free to be wrong. Counts are those of `keys` and `tensors` unless given."""

    keys: dict[str, tuple[int, object]] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    version: int = 3
    magic: bytes = b"GGUF"
    alignment: int = 32
    num_tensors: int | None = None
    num_keys: int | None = None

    def set_key(self, name: str, value_type: int, value: object) -> None:
        self.keys[name] = (value_type, value)

    def tensor(self, name: str) -> Tensor:
        return next(tensor for tensor in self.tensors if tensor.name == name)

    def encode(self) -> bytes:
        counts = (
            len(self.tensors) if self.num_tensors is None else self.num_tensors,
            len(self.keys) if self.num_keys is None else self.num_keys,
        )
        head = self.magic + struct.pack("<IQQ", self.version, *counts)
        head += b"".join(encode_key(name, value_type, value) for name, (value_type, value) in self.keys.items())
        data = b""
        for tensor in self.tensors:
            offset = len(data) if tensor.offset is None else tensor.offset
            head += _string(tensor.name) + struct.pack(
                f"<I{len(tensor.shape)}QIQ", len(tensor.shape), *tensor.shape, tensor.type_id, offset
            )
            data += _padded(tensor.data, self.alignment)
        return _padded(head, self.alignment) + data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.encode())
        return path


def encode_key(name: str, value_type: int, value: object) -> bytes:
    """`value` of an array is (element type, elements); of raw `bytes`, they are written as they are."""
    return _string(name) + struct.pack("<I", value_type) + _value(value_type, value)


def _value(value_type: int, value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if value_type == STRING:
        return _string(str(value))
    if value_type == ARRAY:
        assert isinstance(value, tuple)
        element_type, elements = value
        return struct.pack("<IQ", element_type, len(elements)) + b"".join(_value(element_type, element) for element in elements)
    return struct.pack(f"<{_LETTERS[value_type]}", value)


def model_content(
    shape: ModelShape = ModelShape(),
    *,
    types: Mapping[str, str] | None = None,
    fused: bool = False,
    seed: int = 0,
    scale: float = 0.02,
) -> GgufContent:
    """A valid qwen3moe. `types`: name of a tensor, or of a layer's weight ("ffn_down_exps"), to its type; F32 otherwise.

    `fused`: gate and up as one tensor. Weights are random with about `scale` as their standard deviation, norms are 1.
    """
    rng = np.random.default_rng(seed)
    content = GgufContent(keys=shape.keys())
    for name, dims in shape.tensors().items():
        kind = TYPES_BY_NAME[_type_of(name, types or {})]
        content.tensors.append(Tensor(name, dims, kind.type_id, _weights(name, dims, kind, rng, scale)))
    if fused:
        for layer in range(shape.layers):
            _fuse(content, layer, shape)
    return content


def write_model(path: Path, shape: ModelShape = ModelShape(), *, shards: int = 1, **options: object) -> Path:
    """Writes `model_content(shape, **options)`; with several shards, as the files llama-gguf-split would write.

    Returns the path of the file, or of the first shard.
    """
    content = model_content(shape, **options)  # type: ignore[arg-type]
    return content.write(path) if shards == 1 else write_shards(path, content, shards)[0]


def write_shards(path: Path, content: GgufContent, count: int) -> list[Path]:
    """Deals the tensors out in order; the first shard has all keys, the others only those of the split."""
    per_shard = -(-len(content.tensors) // count)
    paths: list[Path] = []
    for number in range(count):
        split = {"split.no": (U16, number), "split.count": (U16, count), "split.tensors.count": (I32, len(content.tensors))}
        shard = replace(
            content, keys=(content.keys | split) if number == 0 else split, tensors=content.tensors[number * per_shard :][:per_shard]
        )
        paths.append(shard.write(path.with_name(f"{path.stem}-{number + 1:05d}-of-{count:05d}.gguf")))
    return paths


def random_rows(kind: GgmlType, num_values: int, rng: np.random.Generator, scale: float) -> bytes:
    """Valid weights of any type: random quants under finite scales, with a root mean square of about `scale`."""
    if kind.name in _FLOATS:
        return _FLOATS[kind.name](rng.normal(0.0, scale, num_values).astype(np.float32))
    blocks = rng.integers(0, 256, (num_values // kind.block_values, kind.block_bytes), dtype=np.uint8)
    _SCALES[kind.name](blocks, scale)
    return blocks.tobytes()


def _weights(name: str, shape: tuple[int, ...], kind: GgmlType, rng: np.random.Generator, scale: float) -> bytes:
    num_values = int(np.prod(shape))
    if name.endswith("norm.weight"):
        return _FLOATS[kind.name](np.ones(num_values, np.float32))
    return random_rows(kind, num_values, rng, scale)


def _type_of(name: str, types: Mapping[str, str]) -> str:
    if name in types:
        return types[name]
    return types.get(name.split(".")[2], "F32") if name.startswith("blk.") else "F32"


def _fuse(content: GgufContent, layer: int, shape: ModelShape) -> None:
    gate, up = (content.tensor(f"blk.{layer}.ffn_{name}_exps.weight") for name in ("gate", "up"))
    both = np.concatenate([np.frombuffer(tensor.data, np.uint8).reshape(shape.experts, -1) for tensor in (gate, up)], axis=1)
    dims = (shape.hidden, 2 * shape.width, shape.experts)
    content.tensors[content.tensors.index(gate)] = Tensor(f"blk.{layer}.ffn_gate_up_exps.weight", dims, gate.type_id, both.tobytes())
    content.tensors.remove(up)


def _bf16(values: NDArray[np.float32]) -> bytes:
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


_FLOATS: dict[str, Callable[[NDArray[np.float32]], bytes]] = {
    "F32": lambda values: values.tobytes(),
    "F16": lambda values: values.astype(np.float16).tobytes(),
    "BF16": _bf16,
}


def _halves(typical: float, *places: int) -> Callable[[NDArray[np.uint8], float], None]:
    """float16 scales at these bytes of a block; `typical` is the root mean square of the values when they are 1."""

    def write(blocks: NDArray[np.uint8], scale: float) -> None:
        half = np.frombuffer(np.float16(scale / typical).tobytes(), np.uint8)
        for place in places:
            blocks[:, place : place + 2] = half

    return write


def _iq1_m(blocks: NDArray[np.uint8], scale: float) -> None:
    """The float16 scale lies in the top four bits of the four last 16-bit words."""
    bits = int(np.float16(scale / 7.2).view(np.uint16))
    for index in range(4):
        high = 49 + 2 * index
        blocks[:, high] = (blocks[:, high] & 0x0F) | ((bits >> 4 * index & 0xF) << 4)


def _mxfp4(blocks: NDArray[np.uint8], scale: float) -> None:
    blocks[:, 0] = 127 + round(float(np.log2(scale / 2.9)))


def _nvfp4(blocks: NDArray[np.uint8], scale: float) -> None:
    """Four unsigned E4M3 scales per block; the smallest normal number is 2^-6."""
    exponent = min(max(round(float(np.log2(scale / 2.9))), -6), 8)
    blocks[:, :4] = (exponent + 7) << 3


_SCALES: dict[str, Callable[[NDArray[np.uint8], float], None]] = {
    "Q4_0": _halves(4.6, 0),
    "Q4_1": _halves(9.6, 0, 2),
    "Q5_0": _halves(9.3, 0),
    "Q5_1": _halves(19, 0, 2),
    "Q8_0": _halves(74, 0),
    "Q2_K": _halves(13, 80, 82),
    "Q3_K": _halves(43, 108),
    "Q4_K": _halves(300, 0, 2),
    "Q5_K": _halves(630, 0, 2),
    "Q6_K": _halves(1400, 208),
    "IQ1_S": _halves(7.2, 0),
    "IQ2_XXS": _halves(53, 0),
    "IQ2_XS": _halves(56, 0),
    "IQ2_S": _halves(56, 0),
    "IQ3_XXS": _halves(140, 0),
    "IQ3_S": _halves(140, 0),
    "IQ4_NL": _halves(67, 0),
    "IQ4_XS": _halves(1200, 0),
    "TQ1_0": _halves(0.82, 52),
    "TQ2_0": _halves(1.2, 64),
    "Q1_0": _halves(1, 0),
    "Q2_0": _halves(1.2, 0),
    "IQ1_M": _iq1_m,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _padded(data: bytes, alignment: int) -> bytes:
    return data + bytes(-len(data) % alignment)


def plain_tokenizer_keys(vocab: int) -> dict[str, tuple[int, object]]:
    """As much of a tokenizer as llama.cpp and a server want to see. Every token is whole characters, so that each is reported by itself."""
    tokens = [*map(chr, range(33, 127)), "Ġ", "Ċ", "ab", *(f"<pad{index}>" for index in range(vocab))][:vocab]
    return {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "qwen2"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, [1] * vocab)),
        "tokenizer.ggml.merges": (ARRAY, (STRING, ["a b"])),
        "tokenizer.ggml.eos_token_id": (U32, vocab - 1),
        "tokenizer.ggml.add_bos_token": (BOOL, False),
    }
