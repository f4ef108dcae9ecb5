"""Rows of logits as the sampler sees them: the extremes first, the numbers themselves only for who needs them all."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


class LogitsRow(Protocol):
    """One row, valid until the next run of its runner. `lowest` or `peak` are NaN where a logit is."""

    @property
    def lowest(self) -> float: ...
    @property
    def peak(self) -> float: ...
    @property
    def likeliest(self) -> int:
        """The token with the largest logit, of equal ones the lowest id."""

    @property
    def chosen(self) -> int | None:
        """The token that the card chose by the run's `Chooser`; None if the sampler is to do it."""

    def values(self) -> Logits:
        """[vocab] float32. On a card this is a copy across the bus."""


class ArrayRow:
    """A row that lies in host memory."""

    def __init__(self, values: Logits, chosen: int | None = None) -> None:
        self._values = values
        self.chosen = chosen

    @cached_property
    def lowest(self) -> float:
        return float(np.min(self._values))

    @cached_property
    def peak(self) -> float:
        return float(np.max(self._values))

    @cached_property
    def likeliest(self) -> int:
        return int(np.argmax(self._values))

    def values(self) -> Logits:
        return self._values
