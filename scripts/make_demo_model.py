"""Writes a small Mixture-of-Experts model with random weights, so that the server can be tried without a download.

    python scripts/make_demo_model.py OUT.gguf

It is a real `qwen3moe` in every respect (types, tokenizer, chat template) but for its weights: what it writes means nothing,
and the key `tandem.random_weights` says so. Needs only the run-time dependencies; the same Python writes the same bytes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 20_26
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ROUTER_SHARPNESS = 3.0
"""Standard deviation of the router's logits: a few experts of each token weigh most."""
LOGIT_SIZE = 2.0
END_OF_TURN_SIZE = 3.2
"""Larger than `LOGIT_SIZE`, so that answers end by themselves, after a hundred tokens or so."""


@dataclass(frozen=True)
class Demo:
    """Sizes. The width is no multiple of 256, so `down` needs a type with blocks of 32, as in some large models."""

    layers: int = 8
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 32
    top_k: int = 4
    width: int = 128
    vocab: int = 4096
    context: int = 2048


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: make_demo_model.py OUT.gguf")
    out = Path(sys.argv[1])
    unfinished = out.with_name(out.name + ".part")
    write_model(unfinished, Demo())
    unfinished.replace(out)
    print(f"wrote {out}: {out.stat().st_size / 1e6:.1f} MB, random weights")


def write_model(path: Path, demo: Demo) -> None:
    writer = gguf.GGUFWriter(path, "qwen3moe")
    add_metadata(writer, demo)
    tokens = add_tokenizer(writer, demo)
    add_weights(writer, demo, end_of_turn=tokens.index("<|im_end|>"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: gguf.GGUFWriter, demo: Demo) -> None:
    writer.add_name("Tandem random demo")
    writer.add_bool("tandem.random_weights", True)
    writer.add_block_count(demo.layers)
    writer.add_context_length(demo.context)
    writer.add_embedding_length(demo.hidden)
    writer.add_feed_forward_length(demo.width * demo.top_k)
    writer.add_head_count(demo.heads)
    writer.add_head_count_kv(demo.kv_heads)
    writer.add_key_length(demo.head_dim)
    writer.add_value_length(demo.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(demo.experts)
    writer.add_expert_used_count(demo.top_k)
    writer.add_expert_feed_forward_length(demo.width)
    writer.add_vocab_size(demo.vocab)


def add_tokenizer(writer: gguf.GGUFWriter, demo: Demo) -> list[str]:
    """A byte-level BPE; returns the token texts by id."""
    tokenizer = train_tokenizer(demo.vocab)
    tokens = [str(tokenizer.id_to_token(token_id)) for token_id in range(tokenizer.get_vocab_size())]
    if len(tokens) != demo.vocab:
        sys.exit(f"the training text gives only {len(tokens)} of {demo.vocab} tokens; this Python lacks its documentation topics")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges(merges_of(tokenizer))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    return tokens


def train_tokenizer(vocab: int) -> Tokenizer:
    """Trained on the language reference that every Python carries for `help()`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)], trainer)
    return tokenizer


def merges_of(tokenizer: Tokenizer) -> list[str]:
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def add_weights(writer: gguf.GGUFWriter, demo: Demo, end_of_turn: int) -> None:
    rng = np.random.default_rng(SEED)
    head = rng.normal(0.0, LOGIT_SIZE, (demo.vocab, demo.hidden)).astype(np.float32)
    head[: len(SPECIAL_TOKENS)] = 0.0
    head[end_of_turn] = rng.normal(0.0, END_OF_TURN_SIZE, demo.hidden)
    add(writer, "output", gguf.quants.quantize(head / np.sqrt(demo.hidden), Type.Q8_0), Type.Q8_0)
    add(writer, "token_embd", random_blocks(rng, Type.Q6_K, (demo.vocab, demo.hidden), 1.0), Type.Q6_K)
    writer.add_tensor("output_norm.weight", np.ones(demo.hidden, np.float32))
    for layer in range(demo.layers):
        add_layer(writer, demo, layer, rng)


def add_layer(writer: gguf.GGUFWriter, demo: Demo, layer: int, rng: np.random.Generator) -> None:
    hidden, q_width, kv_width = demo.hidden, demo.heads * demo.head_dim, demo.kv_heads * demo.head_dim
    for name, size in (("attn_norm", hidden), ("ffn_norm", hidden), ("attn_q_norm", demo.head_dim), ("attn_k_norm", demo.head_dim)):
        writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(size, np.float32))
    for name, rows, columns in (("q", q_width, hidden), ("k", kv_width, hidden), ("v", kv_width, hidden), ("output", hidden, q_width)):
        add_random(writer, rng, f"blk.{layer}.attn_{name}", (rows, columns), Type.Q8_0)
    router = rng.normal(0.0, ROUTER_SHARPNESS / np.sqrt(hidden), (demo.experts, hidden)).astype(np.float32)
    writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
    gate, up, down = expert_types(layer)
    add_random(writer, rng, f"blk.{layer}.ffn_gate_exps", (demo.experts, demo.width, hidden), gate)
    add_random(writer, rng, f"blk.{layer}.ffn_up_exps", (demo.experts, demo.width, hidden), up)
    add_random(writer, rng, f"blk.{layer}.ffn_down_exps", (demo.experts, hidden, demo.width), down)


def expert_types(layer: int) -> tuple[Type, Type, Type]:
    """Gate, up, down: like the mixed files that people use, where some layers are kept finer."""
    if layer == 0:
        return Type.Q8_0, Type.Q8_0, Type.Q8_0
    if layer % 3 == 2:
        return Type.Q6_K, Type.Q4_K, Type.IQ4_NL
    return Type.Q4_K, Type.Q4_K, Type.IQ4_NL


def add_random(writer: gguf.GGUFWriter, rng: np.random.Generator, name: str, shape: tuple[int, ...], kind: Type) -> None:
    """Independent weights under which a vector keeps its size."""
    add(writer, name, random_blocks(rng, kind, shape, 1.0 / np.sqrt(shape[-1])), kind)


def add(writer: gguf.GGUFWriter, name: str, blocks: NDArray[np.uint8], kind: Type) -> None:
    writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)


def random_blocks(rng: np.random.Generator, kind: Type, shape: tuple[int, ...], size: float) -> NDArray[np.uint8]:
    """Valid blocks of random weights with mean 0 and standard deviation `size`: bytes [..., row bytes]."""
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_blocks = int(np.prod(shape)) // block_values
    blocks = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    PACKERS[kind](blocks, rng, size)
    return blocks.reshape(*shape[:-1], -1)


def pack_q8_0(blocks: NDArray[np.uint8], _: np.random.Generator, size: float) -> None:
    """Scale, then 32 signed bytes, here uniform ones."""
    blocks[:, :2] = half(size / 73.9)


def pack_iq4_nl(blocks: NDArray[np.uint8], rng: np.random.Generator, size: float) -> None:
    """Scale, then 32 indices into a table that leans to one side; scales of either sign set it upright."""
    blocks[:, :2] = half(size / 72.3)
    blocks[:, 1] |= rng.integers(0, 2, len(blocks), dtype=np.uint8) << 7


def pack_q6_k(blocks: NDArray[np.uint8], rng: np.random.Generator, size: float) -> None:
    """192 bytes of quants, 16 scales of eight bits and either sign, scale of the scales."""
    scales = rng.integers(64, 128, (len(blocks), 16)) * rng.choice((-1, 1), (len(blocks), 16))
    blocks[:, 192:208] = scales.astype(np.int8).view(np.uint8)
    blocks[:, 208:] = half(size / (18.5 * 97.3))


def pack_q4_k(blocks: NDArray[np.uint8], rng: np.random.Generator, size: float) -> None:
    """Scale and minimum of the scales, eight scales and minima of six bits packed into 12 bytes, quants of four bits.

    Minima like the scales, times 7.5, make the weights lie evenly around zero.
    """
    six = rng.integers(32, 64, (len(blocks), 8)).astype(np.uint8)
    low, high = six[:, :4], six[:, 4:]
    blocks[:, 0:2] = half(size / (4.61 * 48.4))
    blocks[:, 2:4] = half(7.5 * size / (4.61 * 48.4))
    blocks[:, 4:8] = low | (high >> 4 << 6)
    blocks[:, 8:12] = low | (high >> 4 << 6)
    blocks[:, 12:16] = (high & 0xF) | (high << 4)


def half(value: float) -> NDArray[np.uint8]:
    """The two bytes of a float16."""
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)


PACKERS = {Type.Q8_0: pack_q8_0, Type.IQ4_NL: pack_iq4_nl, Type.Q6_K: pack_q6_k, Type.Q4_K: pack_q4_k}


if __name__ == "__main__":
    main()
