"""The demo model's byte-level BPE, trained on its own corpus."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 4096
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""What `tokenizer.ggml.pre` = qwen2 stands for."""


def train(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_all(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """All documents one after another: uint16 [tokens]."""
    ids: list[int] = []
    for start in range(0, len(documents), 4096):
        for encoding in tokenizer.encode_batch(documents[start : start + 4096]):
            ids.extend(encoding.ids)
    return np.array(ids, dtype=np.uint16)


def save(tokenizer: Tokenizer, folder: Path, train_ids: np.ndarray, held_out_ids: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    np.save(folder / "train.npy", train_ids)
    np.save(folder / "held_out.npy", held_out_ids)
