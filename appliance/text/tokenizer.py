"""The tokenizer of a model file: byte-level byte-pair encoding, built from `tokenizer.ggml.*`.

    text ── special tokens cut out ── pieces by regex ── bytes ── merges ──> ids
                (ours)               └──────── the tokenizers library ─────┘

Special tokens are found here and not by the library, since whether they count is decided per call: a user's text must not
be able to forge the tokens that frame a conversation.
"""

from __future__ import annotations

import bisect
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence

import tokenizers
from tokenizers import models, pre_tokenizers

from appliance.errors import ContextLengthError, CorruptModelError, ModelError, RequestError
from appliance.gguf_file import GgufFile
from appliance.text.byte_level import BYTE_OF, spelled_bytes
from appliance.text.pretokenizers import PreTokenizer, pre_tokenizer
from appliance.text.special_tokens import SpecialTokenFinder
from appliance.text.vocabulary import TokenKind, Vocabulary, read_vocabulary

# The library's batch call is the one that releases the GIL. It must not start threads of its own for that: they would
# take the engines' cores and outlive every request. This variable is its only switch.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_LONG = 1 << 20
"""Texts of more characters are refused by their beginning where that does not fit, since reading all of it takes long."""
_CHARACTERS_PER_TOKEN = 16
"""A beginning of so many times the context is looked at: more than words have on average."""
_UNSURE_WORDS = 3
_SILENT_KINDS = (TokenKind.UNUSED, TokenKind.UNDEFINED)


class Tokenizer:
    """Text to token ids and back, exactly, byte for byte. Thread-safe: nothing in it changes."""

    def __init__(self, vocabulary: Vocabulary, context: int | None = None) -> None:
        """Raises UnsupportedModelError if the vocabulary's pre-tokenizer is unknown, CorruptModelError if it cannot be built.

        `context`: texts that cannot have fewer tokens are refused unread, since reading takes a hundred times their memory.
        """
        pre = pre_tokenizer(vocabulary.pre)
        self.vocabulary = vocabulary
        self.eos_ids = vocabulary.eos_ids
        self.control_ids = frozenset(_ids_of(vocabulary, TokenKind.CONTROL, TokenKind.UNKNOWN))
        """Tokens that steer the model and are no text."""
        texts = vocabulary.texts
        self._longest = max(map(len, texts), default=1)
        """No token stands for more characters."""
        self._context = context
        # In conversations plain words are never control tokens: `role` and the like must reach the template as they are.
        self._control = SpecialTokenFinder({texts[i]: i for i in self.control_ids if not texts[i].isidentifier()})
        user_defined = {texts[i]: i for i in _ids_of(vocabulary, TokenKind.USER_DEFINED)}
        self._user_defined = SpecialTokenFinder(user_defined)
        self._special = SpecialTokenFinder({texts[i]: i for i in self.control_ids} | user_defined)
        self._bos = _bos(vocabulary, pre)
        self._eos = (vocabulary.eos_id,) if vocabulary.adds_eos and vocabulary.eos_id is not None else ()
        self._pairs = _byte_pair_encoder(vocabulary, pre)

    @classmethod
    def from_gguf(cls, gguf: GgufFile, context: int | None = None) -> Tokenizer:
        """Builds the tokenizer of a model file. Raises CorruptModelError or UnsupportedModelError with one sentence."""
        vocabulary = read_vocabulary(gguf)
        try:
            return cls(vocabulary, context)
        except ModelError as error:
            raise type(error)(f"{gguf.paths[0]}: {error.message}") from None

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False, *, param: str | None = None) -> list[int]:
        """The token ids of `text`. Releases the GIL while it merges. ContextLengthError as the constructor says.

        Args:
            text: Any text; a lone surrogate is read as U+FFFD.
            add_special: Put BOS before and EOS behind, where the model wants them.
            parse_special: Read control tokens that are spelled out in the text as those tokens. Without it they are plain text.
            param: The request's field that the text comes from, for the error.
        """
        self._check_length(text, param)
        finder = self._special if parse_special else self._user_defined
        ids = self._encode_pieces(list(_cut(finder, _mended(text))), param)
        return [*self._bos, *ids, *self._eos] if add_special else ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """The token ids of `text` with control tokens read as such, except where a `mark` breaks them; marks are no text.

        `mark` is one character. See `protect`. Control tokens whose text is a plain word are never read from text here.
        """
        self._check_length(text, "messages")
        pieces: list[str | int] = []
        for piece in _cut(self._control, _mended(text)):
            if isinstance(piece, int):
                pieces.append(piece)
            else:
                pieces.extend(_cut(self._user_defined, piece.replace(mark, "")))
        return self._encode_pieces(pieces, "messages")

    def protect(self, text: str, mark: str) -> str:
        """`text` with a `mark` in every control token spelled out in it, and behind a beginning of one at its end.

        `encode_marked` finds no control token in the result, nor in it and text behind it. Most texts come back as they are.
        """
        starts = self._control.starts(text)
        if starts:
            cuts = [0, *(start + 1 for start in starts), len(text)]
            text = mark.join(text[begin:end] for begin, end in itertools.pairwise(cuts))
        return text + mark if self._control.ends_in_part(text) else text

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD. RequestError for an id outside the vocabulary.

        Args:
            ids: Token ids.
            skip_special: Leave control tokens out, as the text of an answer does.
        """
        if skip_special:
            ids = [token_id for token_id in ids if token_id not in self.control_ids]
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, which need not be whole characters. RequestError for an id outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"token id {token_id} is not in the vocabulary, which has the ids 0 to {self.vocab_size - 1}")
        return _bytes_of(self.vocabulary.texts[token_id], self.vocabulary.kinds[token_id])

    def least_tokens(self, texts: Sequence[str]) -> int:
        """How many tokens any texts have at least of which the last begins with the last of these, and the others are these.

        Text is cut into words from left to right, so what follows can only change the last of them.
        """
        encoded = self._pairs.encode_batch(texts, add_special_tokens=False)
        words = [word for word in encoded[-1].word_ids if word is not None]
        unsure = len(words) - bisect.bisect_left(words, words[-1] - _UNSURE_WORDS + 1)
        return sum(map(len, encoded)) - unsure

    def _check_length(self, text: str, param: str | None) -> None:
        least = len(text) // self._longest
        if self._context is not None and least >= self._context:
            raise ContextLengthError.of_prompt(f"at least {least}", self._context, param)

    def _check_beginning(self, texts: Sequence[str], param: str | None) -> None:
        """A cheap look at long texts."""
        size = _CHARACTERS_PER_TOKEN * (self._context or 0)
        if self._context is None or sum(map(len, texts)) <= max(size, _LONG):
            return
        beginning: list[str] = []
        for text in texts:
            beginning.append(text[:size])
            size -= len(text)
            if size <= 0:
                break
        least = self.least_tokens(beginning)
        if least >= self._context:
            raise ContextLengthError.of_prompt(f"at least {least}", self._context, param)

    def _encode_pieces(self, pieces: Sequence[str | int], param: str | None) -> list[int]:
        texts = [piece for piece in pieces if isinstance(piece, str)]
        self._check_beginning(texts, param)
        encoded = iter(self._pairs.encode_batch_fast(texts, add_special_tokens=False))
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(next(encoded).ids)
        return ids


def _mended(text: str) -> str:
    """Without lone surrogates. Encoding tells sooner than a search that there are none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _LONE_SURROGATE.sub("\ufffd", text)
    return text


def _cut(finder: SpecialTokenFinder, text: str) -> Iterator[str | int]:
    """`text` as special token ids and the non-empty texts between them."""
    position = 0
    for token in finder.find_all(text):
        if token.start > position:
            yield text[position : token.start]
        yield token.token_id
        position = token.end
    if position < len(text):
        yield text[position:]


def _ids_of(vocabulary: Vocabulary, *kinds: TokenKind) -> list[int]:
    return [token_id for token_id, kind in enumerate(vocabulary.kinds) if kind in kinds]


def _bos(vocabulary: Vocabulary, pre: PreTokenizer) -> tuple[int, ...]:
    adds = pre.adds_bos if vocabulary.adds_bos is None else vocabulary.adds_bos
    return (vocabulary.bos_id,) if adds and vocabulary.bos_id is not None else ()


def _bytes_of(text: str, kind: TokenKind) -> bytes:
    if kind is TokenKind.NORMAL:
        return spelled_bytes(text)
    if kind is TokenKind.BYTE:
        return _byte_token(text)
    return b"" if kind in _SILENT_KINDS else text.encode("utf-8")


def _byte_token(text: str) -> bytes:
    """`<0x0A>` is the byte 10; a byte token of another form is spelled like a normal one."""
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
    return bytes.fromhex(match[1]) if match else spelled_bytes(text)


def _byte_pair_encoder(vocabulary: Vocabulary, pre: PreTokenizer) -> tokenizers.Tokenizer:
    merges = list(vocabulary.merges)
    try:
        model = models.BPE(_mergeable(vocabulary), merges, ignore_merges=pre.whole_pieces)
    except Exception as error:  # the library raises bare Exception
        raise CorruptModelError(f"the vocabulary of {len(vocabulary)} tokens and {len(merges)} merges cannot be used: {error}") from error
    encoder = tokenizers.Tokenizer(model)
    splits = [pre_tokenizers.Split(tokenizers.Regex(regex), "isolated") for regex in pre.regexes]
    encoder.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return encoder


def _mergeable(vocabulary: Vocabulary) -> dict[str, int]:
    """Token text to id, as the merging step may see it.

    Special tokens that no merge names are renamed to something with a space, which no byte is spelled as: plain text that
    happens to be a whole piece must not turn into them.
    """
    special = {text for text, kind in zip(vocabulary.texts, vocabulary.kinds, strict=True) if kind is not TokenKind.NORMAL}
    special.difference_update(BYTE_OF, itertools.chain.from_iterable(vocabulary.merges), map("".join, vocabulary.merges))
    ids = dict(zip(vocabulary.texts, range(len(vocabulary)), strict=True))
    for text in special:
        token_id = ids.pop(text)
        ids[f" {token_id}"] = token_id
    return ids
