"""What a model is: its sizes from the metadata, checked against each other and against every tensor of the file.

Unknown architectures and unknown tensors are refused: leaving something out would give wrong answers, not an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from appliance.errors import CorruptModelError, UnsupportedModelError
from appliance.gguf_file import GgufFile
from appliance.gguf_header import describe
from appliance.gguf_metadata import MetadataReader
from appliance.gguf_types import WEIGHT_TYPES

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_HIDDEN = 1 << 16
MAX_EXPERTS = 4096
MAX_VOCAB = 1 << 24
MAX_CONTEXT = 1 << 24
MAX_HEAD_DIM = 1024
MAX_NAME_CHARS = 200


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How positions beyond the trained context are mapped; the last four fields matter only for YaRN (arXiv 2309.00071)."""

    kind: Literal["linear", "yarn"]
    factor: float
    original_context: int
    attn_factor: float = 1.0
    ext_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of one model. Every relation between them, and every tensor's shape, has been checked."""

    arch: str
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_width: int
    vocab: int
    context: int
    """Tokens that the model was made for."""
    rms_eps: float
    rope_base: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    """The output matrix is the embedding matrix; there is no tensor `output.weight`."""
    expert_weights_scale: float = 1.0
    """Multiplies the renormalised weights of the routed experts."""

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


def read_config(gguf: GgufFile) -> ModelConfig:
    """Raises UnsupportedModelError or CorruptModelError with a sentence that names key or tensor and both sides of the mismatch."""
    arch = gguf.architecture
    if arch not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{gguf.paths[0]}: architecture {describe(arch)} is not supported; supported are {', '.join(supported_architectures())}"
        )
    return _ARCHITECTURES[arch](gguf)


def supported_architectures() -> tuple[str, ...]:
    """In GGUF's names, sorted."""
    return tuple(sorted(_ARCHITECTURES))


def layer_tensor(layer: int, name: str) -> str:
    """GGUF's full name of a layer's weight: (3, "attn_q") -> "blk.3.attn_q.weight"."""
    return f"blk.{layer}.{name}.weight"


def _read_qwen3moe(gguf: GgufFile) -> ModelConfig:
    keys = MetadataReader(gguf)
    hidden = keys.integer("qwen3moe.embedding_length", 1, MAX_HIDDEN)
    heads = keys.integer("qwen3moe.attention.head_count", 1, MAX_WIDTH)
    config = ModelConfig(
        arch="qwen3moe",
        name=_display_name(keys.text("general.name", gguf.paths[0].stem)),
        layers=keys.integer("qwen3moe.block_count", 1, MAX_LAYERS),
        hidden=hidden,
        heads=heads,
        kv_heads=keys.integer("qwen3moe.attention.head_count_kv", 1, MAX_WIDTH),
        head_dim=keys.integer("qwen3moe.attention.key_length", 2, MAX_HEAD_DIM, default=hidden // heads),
        experts=keys.integer("qwen3moe.expert_count", 1, MAX_EXPERTS),
        top_k=keys.integer("qwen3moe.expert_used_count", 1, MAX_EXPERTS),
        expert_width=keys.integer("qwen3moe.expert_feed_forward_length", 1, MAX_WIDTH),
        vocab=_vocab(gguf, keys),
        context=keys.integer("qwen3moe.context_length", 1, MAX_CONTEXT),
        rms_eps=keys.number("qwen3moe.attention.layer_norm_rms_epsilon", above=0.0, at_most=1.0),
        rope_base=keys.number("qwen3moe.rope.freq_base", above=1.0, at_most=1e12, default=10_000.0),
        rope_scaling=_rope_scaling(keys, "qwen3moe"),
        tied_embeddings="output.weight" not in gguf.tensors,
        expert_weights_scale=keys.number("qwen3moe.expert_weights_scale", above=0.0, at_most=1e6, default=1.0),
    )
    _check_qwen3moe(config, keys)
    _check_tensors(gguf, config, _qwen3moe_tensors(config), _qwen3moe_layer_tensors(config))
    return config


_ARCHITECTURES: Mapping[str, Callable[[GgufFile], ModelConfig]] = {"qwen3moe": _read_qwen3moe}


def _check_qwen3moe(config: ModelConfig, keys: MetadataReader) -> None:
    if config.heads % config.kv_heads:
        raise keys.error(f"{config.heads} query heads cannot share {config.kv_heads} key/value heads evenly")
    if config.head_dim % 2:
        raise keys.error(f"qwen3moe.attention.key_length is {config.head_dim}; rotary positions need an even head length")
    if config.top_k > config.experts:
        raise keys.error(f"qwen3moe.expert_used_count is {config.top_k}, more than the {config.experts} of qwen3moe.expert_count")
    for key in ("qwen3moe.attention.value_length", "qwen3moe.rope.dimension_count"):
        value = keys.integer(key, 0, MAX_WIDTH, default=config.head_dim)
        if value != config.head_dim:
            raise UnsupportedModelError(
                keys.sentence(f"{key} is {value}, but qwen3moe.attention.key_length is {config.head_dim}; they must be equal")
            )
    vocab = keys.integer("qwen3moe.vocab_size", 0, MAX_VOCAB, default=config.vocab)
    if vocab != config.vocab:
        raise keys.error(f"qwen3moe.vocab_size is {vocab}, but token_embd.weight has {config.vocab} rows")
    if keys.integer("qwen3moe.expert_gating_func", 0, 100, default=1) not in (0, 1):
        raise UnsupportedModelError(
            keys.sentence("qwen3moe.expert_gating_func is not 1; this architecture is run with softmax gating only")
        )


def _display_name(text: str) -> str:
    """On one line, and without anything that a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in text[:MAX_NAME_CHARS]).strip() or "unnamed"


def _vocab(gguf: GgufFile, keys: MetadataReader) -> int:
    """Rows of the embedding matrix; as many as the tokenizer has tokens, where the file has a tokenizer."""
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise keys.error("tensor token_embd.weight is missing")
    vocab = embedding.shape[1] if len(embedding.shape) > 1 else 1
    if vocab > MAX_VOCAB:
        raise keys.error(f"token_embd.weight has {vocab} rows; more than {MAX_VOCAB} tokens cannot be right")
    if keys.has("tokenizer.ggml.tokens") and len(keys.strings("tokenizer.ggml.tokens")) != vocab:
        tokens = len(keys.strings("tokenizer.ggml.tokens"))
        raise keys.error(f"tokenizer.ggml.tokens has {tokens} tokens, but token_embd.weight has {vocab} rows")
    return vocab


def _rope_scaling(keys: MetadataReader, arch: str) -> RopeScaling | None:
    prefix = f"{arch}.rope.scaling."
    kind = keys.text(prefix + "type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(keys.sentence(f"{prefix}type is {kind!r}; none, linear and yarn are supported"))
    factor = keys.number(prefix + "factor", above=0.0, at_most=1e6)
    context = keys.integer(f"{arch}.context_length", 1, MAX_CONTEXT)
    return RopeScaling(
        kind="linear" if kind == "linear" else "yarn",
        factor=factor,
        original_context=keys.integer(prefix + "original_context_length", 1, MAX_CONTEXT, default=context),
        attn_factor=keys.number(prefix + "attn_factor", above=0.0, at_most=1e6, default=1.0),
        ext_factor=keys.number(prefix + "yarn_ext_factor", above=-1e6, at_most=1e6, default=1.0),
        beta_fast=keys.number(prefix + "yarn_beta_fast", above=0.0, at_most=1e6, default=32.0),
        beta_slow=keys.number(prefix + "yarn_beta_slow", above=0.0, at_most=1e6, default=1.0),
    )


def _qwen3moe_tensors(config: ModelConfig) -> dict[str, _Expected]:
    tensors = {
        "token_embd.weight": _Expected((config.hidden, config.vocab)),
        "output_norm.weight": _Expected((config.hidden,), floats_only=True),
    }
    if not config.tied_embeddings:
        tensors["output.weight"] = _Expected((config.hidden, config.vocab))
    return tensors


def _qwen3moe_layer_tensors(config: ModelConfig) -> dict[str, _Expected]:
    hidden, width, experts = config.hidden, config.expert_width, config.experts
    return {
        "attn_norm": _Expected((hidden,), floats_only=True),
        "attn_q": _Expected((hidden, config.q_width)),
        "attn_k": _Expected((hidden, config.kv_width)),
        "attn_v": _Expected((hidden, config.kv_width)),
        "attn_q_norm": _Expected((config.head_dim,), floats_only=True),
        "attn_k_norm": _Expected((config.head_dim,), floats_only=True),
        "attn_output": _Expected((config.q_width, hidden)),
        "ffn_norm": _Expected((hidden,), floats_only=True),
        "ffn_gate_inp": _Expected((hidden, experts), floats_only=True),
        "ffn_gate_exps": _Expected((hidden, width, experts)),
        "ffn_up_exps": _Expected((hidden, width, experts)),
        "ffn_down_exps": _Expected((width, hidden, experts)),
    }


@dataclass(frozen=True, slots=True)
class _Expected:
    shape: tuple[int, ...]
    floats_only: bool = False
    """Norms and routers: F32, F16 or BF16."""


def _check_tensors(gguf: GgufFile, config: ModelConfig, whole: dict[str, _Expected], per_layer: dict[str, _Expected]) -> None:
    """Every expected tensor is there with its shape, and there is no other."""
    expected = dict(whole)
    for layer in range(config.layers):
        expected |= {layer_tensor(layer, name): tensor for name, tensor in _layer_as_stored(gguf, layer, per_layer).items()}
    for name, wanted in expected.items():
        _check_tensor(gguf, name, wanted)
    unknown = next((name for name in gguf.tensors if name not in expected), None)
    if unknown is not None:
        raise UnsupportedModelError(
            f"{_shard_of(gguf, unknown)}: tensor {unknown} is unknown to architecture {config.arch} with {config.layers} layers; "
            "running without it would give wrong answers"
        )


def _layer_as_stored(gguf: GgufFile, layer: int, per_layer: dict[str, _Expected]) -> dict[str, _Expected]:
    """Some converters write gate and up as one tensor, gate rows first."""
    if layer_tensor(layer, "ffn_gate_up_exps") not in gguf.tensors:
        return per_layer
    hidden, width, experts = per_layer["ffn_gate_exps"].shape
    separate = {name: tensor for name, tensor in per_layer.items() if name not in ("ffn_gate_exps", "ffn_up_exps")}
    return separate | {"ffn_gate_up_exps": _Expected((hidden, 2 * width, experts))}


def _check_tensor(gguf: GgufFile, name: str, wanted: _Expected) -> None:
    tensor = gguf.tensors.get(name)
    if tensor is None:
        raise CorruptModelError(f"{gguf.paths[0]}: tensor {name} is missing")
    if _trim(tensor.shape) != _trim(wanted.shape):
        raise CorruptModelError(
            f"{_shard_of(gguf, name)}: tensor {name} has the shape {list(tensor.shape)}, but by the metadata it must be "
            f"{list(wanted.shape)}"
        )
    allowed = _FLOAT_TYPES if wanted.floats_only else tuple(kind.name for kind in WEIGHT_TYPES.values())
    if tensor.type_name not in allowed:
        raise UnsupportedModelError(
            f"{_shard_of(gguf, name)}: tensor {name} has the type {tensor.type_name}, which is not supported for it; "
            f"supported are {', '.join(allowed)}"
        )


_FLOAT_TYPES = ("F32", "F16", "BF16")


def _shard_of(gguf: GgufFile, name: str) -> Path:
    return gguf.paths[gguf.tensors[name].shard]


def _trim(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without trailing ones, which writers may leave out."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
