"""The vocabulary of a model file: `tokenizer.ggml.*` metadata, checked and put into one object."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from appliance.errors import CorruptModelError, UnsupportedModelError
from appliance.gguf_file import GgufFile
from appliance.gguf_metadata import MetadataReader

_KEY = "tokenizer.ggml."


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type`, with GGUF's numbers."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    """Steers the model; never made from a user's text unless asked."""
    USER_DEFINED = 4
    """Matched as a whole in any text, before anything else."""
    UNUSED = 5
    BYTE = 6


END_OF_TURN_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
        *("<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "<eos>", "</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
        *("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "[e~["),
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    )
)
"""Texts of tokens that end an answer in some family of models, whether or not the file says so."""

_MESSAGE_FRAME_TEXTS = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))
"""Harmony's frame inside one answer: marked as control, but part of the text."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id, and the ids with a meaning. Immutable, thread-safe."""

    texts: tuple[str, ...]
    """As in the file: byte-level spelling for normal tokens, plain text for the special ones."""
    kinds: tuple[TokenKind, ...]
    merges: tuple[tuple[str, str], ...]
    """Pairs of token texts, the most important first, each pair once."""
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    unknown_id: int | None
    eos_ids: frozenset[int]
    """All tokens after which an answer is over."""
    pre: str
    """Name of the pre-tokenizer."""
    adds_bos: bool | None
    """None: the file does not say."""
    adds_eos: bool

    def __len__(self) -> int:
        return len(self.texts)

    def find(self, text: str) -> int | None:
        """The id of the token with that text in the file's spelling. Linear; for a few look-ups at start."""
        try:
            return self.texts.index(text)
        except ValueError:
            return None


def read_vocabulary(gguf: GgufFile) -> Vocabulary:
    """Reads and checks the vocabulary.

    Raises CorruptModelError for missing, mistyped or contradicting keys, UnsupportedModelError for another kind of tokenizer.
    """
    reader = MetadataReader(gguf)
    _require_byte_level(reader)
    texts = _read_texts(reader)
    index = {text: token_id for token_id, text in enumerate(texts)}
    if len(index) != len(texts):
        raise _duplicate(reader, texts, index)
    kinds = _read_kinds(reader, texts)
    ids = {name: _read_id(reader, f"{name}_token_id", len(texts)) for name in ("bos", "eos", "eot", "eom", "padding", "unknown")}
    adds_bos = reader.flag(_KEY + "add_bos_token") if reader.has(_KEY + "add_bos_token") else None
    adds_eos = reader.flag(_KEY + "add_eos_token", False)
    for adds, name in ((adds_bos, "bos"), (adds_eos, "eos")):
        if adds and ids[name] is None:
            raise reader.error(f"key {_KEY}add_{name}_token is true, but {_KEY}{name}_token_id is missing")
    eos_ids = _end_of_turn_ids(index, [ids["eos"], ids["eot"], ids["eom"]])
    return Vocabulary(
        texts=texts,
        kinds=_corrected(kinds, texts, index, eos_ids),
        merges=_read_merges(reader, index),
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        pad_id=ids["padding"],
        unknown_id=ids["unknown"],
        eos_ids=eos_ids,
        pre=_read_pre(reader),
        adds_bos=adds_bos,
        adds_eos=adds_eos,
    )


def _require_byte_level(reader: MetadataReader) -> None:
    model = reader.text(_KEY + "model")
    if model != "gpt2":
        raise UnsupportedModelError(
            reader.sentence(f"tokenizer model {model!r} is not supported yet; only 'gpt2' (byte-level byte-pair encoding) is")
        )


def _read_pre(reader: MetadataReader) -> str:
    key = _KEY + "pre"
    if not reader.has(key):
        raise UnsupportedModelError(
            reader.sentence(f"key {key} is missing, so nobody knows how text is to be split; convert the model again")
        )
    return reader.text(key)


def _read_texts(reader: MetadataReader) -> tuple[str, ...]:
    texts = reader.strings(_KEY + "tokens")
    if not texts:
        raise reader.error(f"key {_KEY}tokens is empty")
    # An empty text would match everywhere; like the file's other placeholders it gets a name of its own.
    return tuple(text or f"[EMPTY_{token_id}]" for token_id, text in enumerate(texts)) if "" in texts else texts


def _duplicate(reader: MetadataReader, texts: Sequence[str], index: Mapping[str, int]) -> CorruptModelError:
    first = next(token_id for token_id, text in enumerate(texts) if index[text] != token_id)
    text = texts[first]
    return reader.error(f"key {_KEY}tokens has {text!r} twice, as ids {first} and {index[text]}")


def _read_kinds(reader: MetadataReader, texts: Sequence[str]) -> list[TokenKind]:
    key = _KEY + "token_type"
    if not reader.has(key):
        return [TokenKind.NORMAL] * len(texts)
    numbers = reader.integers(key)
    if len(numbers) != len(texts):
        raise reader.error(f"key {key} has {len(numbers)} entries for {len(texts)} tokens")
    known = {kind.value: kind for kind in TokenKind}
    try:
        return [known[number] for number in numbers]
    except KeyError as error:
        raise reader.error(f"key {key} holds {error.args[0]}; token types go from 0 to {max(known)}") from None


def _read_id(reader: MetadataReader, name: str, num_tokens: int) -> int | None:
    return reader.integer(_KEY + name, 0, num_tokens - 1) if reader.has(_KEY + name) else None


def _read_merges(reader: MetadataReader, index: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    key = _KEY + "merges"
    merges = reader.strings(key)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    if not all(map(index.__contains__, itertools.chain(itertools.chain.from_iterable(pairs), map("".join, pairs)))):
        rank, fault = next((rank, fault) for rank, pair in enumerate(pairs) if (fault := _merge_fault(pair, index)))
        raise reader.error(f"key {key}, entry {rank}: {merges[rank]!r} {fault}")
    return tuple(dict.fromkeys(pairs))


def _merge_fault(pair: tuple[str, str], index: Mapping[str, int]) -> str | None:
    if "" in pair:
        return "is not two tokens with a space between"
    missing = next((text for text in (*pair, "".join(pair)) if text not in index), None)
    return None if missing is None else f"needs the token {missing!r}, which the vocabulary does not have"


def _end_of_turn_ids(index: Mapping[str, int], named: Sequence[int | None]) -> frozenset[int]:
    ids = {index[text] for text in END_OF_TURN_TEXTS if text in index}
    if _has_all(index, "<|end|>", "<|return|>", "<|call|>") or _has_all(index, "<|end|>", "<|flush|>", "<|calls|>"):
        ids.discard(index["<|end|>"])  # there it ends a message inside the answer, not the answer
    if "</s>" in index and ("<|tool_response>" in index or "<|plamo:eos|>" in index):
        ids.discard(index["</s>"])  # there it is ordinary text
    return frozenset(ids | {token_id for token_id in named if token_id is not None})


def _has_all(index: Mapping[str, int], *texts: str) -> bool:
    return all(text in index for text in texts)


def _corrected(kinds: list[TokenKind], texts: Sequence[str], index: Mapping[str, int], eos_ids: frozenset[int]) -> tuple[TokenKind, ...]:
    """End-of-turn tokens are control tokens even where the file calls them normal: their text is for nobody."""
    for token_id in eos_ids:
        if texts[token_id] in END_OF_TURN_TEXTS:
            kinds[token_id] = TokenKind.CONTROL
    for text in _MESSAGE_FRAME_TEXTS & index.keys():
        kinds[index[text]] = TokenKind.USER_DEFINED
    if "<|end|>" in index and index["<|end|>"] not in eos_ids:
        kinds[index["<|end|>"]] = TokenKind.USER_DEFINED
    return tuple(kinds)
