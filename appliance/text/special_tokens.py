"""Finding the special tokens that stand in a text as a whole."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

_PREFIX = 2
"""Special tokens are looked for where their first characters stand; shorter ones are never taken from text."""


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A special token in a text: `text[start:end]`."""

    token_id: int
    start: int
    end: int


class SpecialTokenFinder:
    """Finds tokens of a fixed set in texts: the leftmost first, of several there the longest. Immutable, thread-safe."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._ids = {text: token_id for text, token_id in tokens.items() if len(text) >= _PREFIX}
        self._lengths = _lengths_by_prefix(self._ids)
        self._longest = max(map(len, self._ids), default=0)
        self._sorted = sorted(self._ids)
        self._prefix = re.compile("|".join(map(re.escape, self._lengths)) or r"(?!)")

    def find_all(self, text: str) -> Iterator[SpecialToken]:
        """The tokens of `text` from left to right, none overlapping another."""
        position = 0
        while (token := self._next(text, position)) is not None:
            yield token
            position = token.end

    def starts(self, text: str) -> list[int]:
        """Every position at which a token begins, overlapping ones too."""
        starts: list[int] = []
        token = self._next(text, 0)
        while token is not None:
            starts.append(token.start)
            token = self._next(text, token.start + 1)
        return starts

    def ends_in_part(self, text: str) -> bool:
        """Whether `text` ends with the beginning of a token, so that text after it could complete one.

        Beginnings with a letter or digit do not count: half of all words end in one.
        """
        tails = (text[-length:] for length in range(1, min(self._longest, len(text) + 1)))
        return any(self._begins_one(tail) for tail in tails if not tail[0].isalnum())

    def _begins_one(self, text: str) -> bool:
        place = bisect.bisect_right(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)

    def _next(self, text: str, position: int) -> SpecialToken | None:
        while (match := self._prefix.search(text, position)) is not None:
            start = match.start()
            for length in self._lengths[match.group()]:
                token_id = self._ids.get(text[start : start + length])
                if token_id is not None:
                    return SpecialToken(token_id, start, start + length)
            position = start + 1
        return None


def _lengths_by_prefix(texts: Iterable[str]) -> dict[str, list[int]]:
    """The lengths of the texts that begin with each prefix, longest first."""
    lengths: dict[str, set[int]] = {}
    for text in texts:
        lengths.setdefault(text[:_PREFIX], set()).add(len(text))
    return {prefix: sorted(of_prefix, reverse=True) for prefix, of_prefix in lengths.items()}
