"""Writes the trained weights as GGUF: F16 for comparison, and the quantised file that the package holds."""

from __future__ import annotations

import ctypes
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from scripts.demo_model.model import DemoConfig
from scripts.demo_model.tokenizer import SPECIAL

NAME = "Tandem pocket dictionary"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Tensors = dict[str, np.ndarray]
TypeOf = Callable[[str], Type]


def export(work: Path, out: Path) -> None:
    """`out`: the quantised file; the F16 file lies beside the checkpoint, in `work`."""
    weights = torch.load(work / "weights.f16.pt", weights_only=True)
    tensors = {name: tensor.float().numpy() for name, tensor in weights.items()}
    write(work / "demo.f16.gguf", tensors, work / "tokenizer.json", f16_type)
    out.parent.mkdir(parents=True, exist_ok=True)
    write(out, tensors, work / "tokenizer.json", small_type)
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")


def f16_type(name: str) -> Type:
    return Type.F32 if is_small(name) else Type.F16


def small_type(name: str) -> Type:
    """Mixed on purpose: a demo file that exercises several types, 24 MB in all."""
    if is_small(name):
        return Type.F32
    if "_exps" not in name:
        return Type.Q8_0
    layer = int(name.split(".")[1])
    if "down" in name:
        return (Type.Q4_K, Type.IQ4_NL, Type.Q5_K)[layer // 2]
    return Type.IQ4_XS if layer < 4 else Type.Q4_K


def is_small(name: str) -> bool:
    return "norm" in name or "ffn_gate_inp" in name


def write(path: Path, tensors: Tensors, tokenizer: Path, type_of: TypeOf) -> None:
    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    add_metadata(writer, DemoConfig())
    add_tokenizer(writer, json.loads(tokenizer.read_text(encoding="utf-8")))
    for name, values in tensors.items():
        kind = type_of(name)
        writer.add_tensor(name, quantise(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: gguf.GGUFWriter, c: DemoConfig) -> None:
    writer.add_name(NAME)
    writer.add_description("A pocket dictionary for demonstration, trained on WordNet's glosses and plain documentation.")
    writer.add_license("see MODEL_CARD.md")
    writer.add_block_count(c.layers)
    writer.add_context_length(c.context)
    writer.add_embedding_length(c.hidden)
    writer.add_feed_forward_length(c.width * c.top_k)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_freq_base(c.rope_base)
    writer.add_layer_norm_rms_eps(c.rms_eps)
    writer.add_expert_count(c.experts)
    writer.add_expert_used_count(c.top_k)
    writer.add_expert_feed_forward_length(c.width)
    writer.add_vocab_size(c.vocab)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, dict[str, object]]) -> None:
    model = tokenizer["model"]
    vocabulary: dict[str, int] = model["vocab"]  # type: ignore[assignment]
    merges: list[str | list[str]] = model["merges"]  # type: ignore[assignment]
    tokens = [token for token, _ in sorted(vocabulary.items(), key=lambda item: item[1])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(vocabulary["<|im_end|>"])
    writer.add_pad_token_id(vocabulary["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def quantise(values: np.ndarray, kind: Type) -> np.ndarray:
    """ggml's own quantiser, through the wheel `libggml-python`: [..., bytes of a row] uint8."""
    if kind == Type.F32:
        return values.astype(np.float32)
    if kind == Type.F16:
        return values.astype(np.float16)
    source = np.ascontiguousarray(values, np.float32)
    columns = source.shape[-1]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    out = np.zeros((*source.shape[:-1], columns // block * size), np.uint8)
    written = ggml().ggml_quantize_chunk(int(kind), source.ctypes.data, out.ctypes.data, 0, source.size // columns, columns, None)
    if written != out.nbytes:
        raise RuntimeError(f"ggml wrote {written} bytes of type {kind.name}, expected {out.nbytes}")
    return out


def ggml() -> ctypes.CDLL:
    spec = importlib.util.find_spec("libggml")
    if spec is None or spec.origin is None:
        raise RuntimeError("quantising needs the package libggml-python")
    library = ctypes.CDLL(str(Path(spec.origin).parent / "lib64" / "libggml-base.so"))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    return library
