"""Small vocabularies in real GGUF files, and llama.cpp as the one who knows better.

gguf = open_gguf(write_vocabulary(tmp_path / "v.gguf", pre="qwen2"))
ids = llama_cpp_ids(write_vocabulary(path, pre="qwen2", runnable=True), ["some text"])
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from tests.gguf_writing import ARRAY, I32, STRING, U32, GgufContent, ModelShape, model_content

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPECIAL = (
    ("<|im_start|>", CONTROL),
    ("<|im_end|>", CONTROL),
    ("<|endoftext|>", CONTROL),
    ("<|im", CONTROL),  # the beginning of another one
    ("stop", CONTROL),  # a whole piece of ordinary text
    ("<think>", USER_DEFINED),
    ("</think>", USER_DEFINED),
    ("[PAD7]", UNUSED),
)
ROOT = Path(__file__).parent.parent
TEXT = """The quick brown fox doesn't jump; it's 12345 times over. He'll say they've I'M "fine"... <|im_start|> <|im_end|>
Äpfel, Größe, naïve café — нещо на Български. 你好，世界！ こんにちは 안녕하세요 한국어 កាន់តែពិសេស हिन्दी में ไทย عربي ١٢٣
    def f(x):\r\n\t\treturn x**2 + 0xFF != 1_000_000  # comment // path/to/file.py\n\n\n   3.14159   \u3000 \u00a0🦙🚀😶‍🌫️ ½ ² Ⅷ
"""


@functools.cache
def trained_merges() -> tuple[str, ...]:
    """Merges learned from a text that does not change."""
    page = (ROOT / "LICENSE").read_text(encoding="utf-8")
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner.train_from_iterator([page, TEXT * 9], trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False))
    merges = json.loads(learner.to_str())["model"]["merges"]
    return tuple(f"{left} {right}" for left, right in merges)


@functools.cache
def trained_tokens() -> tuple[str, ...]:
    merged = dict.fromkeys(merge.replace(" ", "") for merge in trained_merges())
    return (*sorted(pre_tokenizers.ByteLevel.alphabet()), *merged)


def tokenizer_keys(pre: str, special: Sequence[tuple[str, int]] = SPECIAL) -> dict[str, tuple[int, object]]:
    """Metadata of a vocabulary of all bytes, about 900 merged tokens, and the special ones behind."""
    tokens = [*trained_tokens(), *(text for text, _ in special)]
    return {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, pre),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, [NORMAL] * len(trained_tokens()) + [kind for _, kind in special])),
        "tokenizer.ggml.merges": (ARRAY, (STRING, list(trained_merges()))),
        "tokenizer.ggml.eos_token_id": (U32, tokens.index("<|im_end|>")),
        "tokenizer.ggml.bos_token_id": (U32, tokens.index("<|endoftext|>")),
    }


def write_vocabulary(path: Path, pre: str | None = "qwen2", *, runnable: bool = False, **changes: tuple[int, object] | None) -> Path:
    """A GGUF file with a vocabulary; `pre` None leaves the key out.

    `runnable`: with the weights of a tiny model too, since llama.cpp's server wants them. `changes`: keys by the last part
    of their name, `add_bos_token=(BOOL, True)`; None takes the key away.
    """
    keys = tokenizer_keys(pre or "")
    if pre is None:
        del keys["tokenizer.ggml.pre"]
    for name, value in changes.items():
        key = f"tokenizer.{name}" if name.startswith("chat_template") else f"tokenizer.ggml.{name}"
        keys.pop(key, None)
        if value is not None:
            keys[key] = value
    content = GgufContent(keys={"general.architecture": (STRING, "qwen3moe")})
    if runnable:
        vocab = len(trained_tokens()) + len(SPECIAL)
        content = model_content(ModelShape(layers=1, hidden=64, heads=1, kv_heads=1, experts=2, top_k=1, width=64, vocab=vocab))
    content.keys |= keys
    return content.write(path)


def llama_cpp_ids(model: Path, texts: Sequence[str], *, parse_special: bool = False) -> list[list[int]]:
    """What llama.cpp makes of the texts, without BOS. It runs in a process of its own."""
    request = json.dumps({"texts": texts, "parse_special": parse_special})
    command = [sys.executable, str(Path(__file__).with_name("llama_tokenize.py")), str(model)]
    done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return answer
