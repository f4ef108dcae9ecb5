"""The text of an answer, token by token: never half a character, never any of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from appliance.errors import RequestError
from appliance.text.tokenizer import Tokenizer


class TextStream:
    """Turns token ids into text that may be shown at once.

    The deltas put together are the decoded text without control tokens, cut before the first stop string. The first one is
    the one that is complete first; of several complete at the same character, the longest. How the text is spread over
    tokens makes no difference. Confined to the thread of its request.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()) -> None:
        """Raises RequestError for an empty stop string."""
        if "" in stop_strings:
            raise RequestError("a stop string is empty; every one needs at least one character", param="stop")
        self._tokenizer = tokenizer
        self._stops = tuple(dict.fromkeys(stop_strings))
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stop: str | None = None
        """The stop string that ended the text."""

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    def feed(self, ids: Iterable[int]) -> str:
        """The text that has become certain with these tokens; nothing after a stop string. RequestError for an unknown id."""
        silent = self._tokenizer.control_ids
        raw = b"".join(self._tokenizer.token_bytes(token_id) for token_id in ids if token_id not in silent)
        return self._take(self._characters.decode(raw))

    def finish(self) -> str:
        """The rest, at the end of the tokens: what was held back for a stop string, and U+FFFD for half a character."""
        text = self._take(self._characters.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text + rest

    def _take(self, new: str) -> str:
        if self.stopped or not new:
            return ""
        text = self._held + new
        end = self._cut_at_stop(text)
        if end is None:
            end = len(text) - self._num_held(text)
            self._held = text[end:]
        return text[:end]

    def _cut_at_stop(self, text: str) -> int | None:
        """Where the text ends for a stop string in it, which is noted."""
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, self.stop = min(found)
        self._held = ""
        return start

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = max(map(len, self._stops), default=0)
        for length in range(min(longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
