"""The conversation whose key/value state a runner holds: which tokens, and how far the next prompt can reuse them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Session:
    """The tokens at positions 0, 1, ... whose state is valid in the runner. Confined to the engine loop.

    The runner overwrites state by position, so the only thing to get right is the order: `truncate` before a run that
    writes at a position, `extend` after it succeeded. What lies between is then never trusted, even if the run fails.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []

    @property
    def tokens(self) -> Sequence[int]:
        """The valid tokens. Not to be changed."""
        return self._tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def reusable(self, prompt: Sequence[int]) -> int:
        """How many tokens of `prompt` need not be computed again.

        The longest common prefix, but never the whole prompt: its last token is computed again, because its logits are needed.
        """
        return min(common_prefix(self._tokens, prompt), len(prompt) - 1)

    def truncate(self, position: int) -> None:
        """Forgets the state at `position` and after it. ValueError if there is a gap before it."""
        if position > len(self._tokens):
            raise ValueError(f"position {position} leaves a gap: only {len(self._tokens)} tokens have been computed")
        del self._tokens[position:]

    def extend(self, tokens: Sequence[int]) -> None:
        """The state of `tokens` has been computed at the positions after the last valid one."""
        self._tokens.extend(tokens)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of leading tokens that two sequences share."""
    shorter = min(len(left), len(right))
    differs = np.asarray(left[:shorter], dtype=np.int64) != np.asarray(right[:shorter], dtype=np.int64)
    return int(np.argmax(differs)) if differs.any() else shorter
