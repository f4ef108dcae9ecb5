"""From one row of logits to the next token.

The order, each step on the result of the one before:

1. `logit_bias` is added.
2. Repetition penalty over the prompt and the answer: a positive logit is divided by it, a negative one multiplied
   (Keskar et al., CTRL, 2019; the definition of Hugging Face).
3. Presence and frequency penalties over the answer alone: `logit -= presence * (count > 0) + frequency * count` (OpenAI).
4. Temperature 0 ends here: the largest logit, of equal ones the lowest id. Otherwise the logits are divided by it.
5. `top_k` keeps the k largest; of equal ones the lower ids.
6. `top_p` keeps the fewest of the likeliest whose probabilities among those left by step 5 add up to at least `top_p`.
7. `min_p` keeps those that are at least `min_p` times as likely as the likeliest. One token always stays.
8. One of the rest is drawn by its probability, with a number that depends on `(seed, position)` alone: Philox4x64-10
   (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011) with the seed as key and the token's absolute position
   plus one as counter. So the same seed gives the same text, however the tokens are spread over windows.

Probabilities are whole numbers (docs/arithmetic.md), so a GPU, which goes these steps at the end of its window, and the native module,
which does it for everybody else, choose the same token.

Log-probabilities are those of the logits before step 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from appliance.engine.logits import Logits, LogitsRow
from appliance.errors import EngineError, RequestError
from appliance.protocol import Sampling, TokenLogprobs
from cuda_ext import _native as native

TokenIds = NDArray[np.int64]

_LARGEST_LOGIT = 1e30
_LARGEST_BIAS = 1e9
_LOWEST_TEMPERATURE = 1e-30
"""Below it float32 would divide by zero; it is far on the greedy side already."""
_NUMBERS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Choice:
    token: int
    logprobs: TokenLogprobs | None
    """Given if they were asked for."""


class Sampler:
    """Chooses the tokens of one answer and remembers what its penalties need. Confined to the engine loop."""

    def __init__(self, sampling: Sampling, vocab: int, prompt: Sequence[int], top_logprobs: int | None = None) -> None:
        """Raises RequestError if `logit_bias` names no token or has no sensible value.

        `top_logprobs` as in `Generate`. The ids of `prompt` must be below `vocab`.
        """
        self._sampling = sampling
        self._top_logprobs = top_logprobs
        self._numbers = RandomNumbers(sampling.seed)
        self._bias = _checked_bias(sampling.logit_bias, vocab)
        self._repeats = sampling.repetition_penalty != 1.0
        self._penalises = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        self._counts: Counter[int] = Counter()
        self._seen: set[int] = set(prompt) if self._repeats else set()
        self._chooser = _chooser(sampling, vocab)
        for token in self._seen | self._bias.keys():
            self._change(token)
        self._is_plain = sampling.temperature == 0.0 and not (self._bias or self._repeats or self._penalises)

    def chooser(self, position: int) -> native.Chooser | None:
        """How a card chooses the token for the absolute `position`; None: it is the likeliest. Valid until the next call."""
        if self._is_plain:
            return None
        self._chooser.set_fraction(self._numbers.at(position))
        return self._chooser

    def choose(self, row: LogitsRow, position: int) -> Choice:
        """The token for the absolute `position`, which is the row's own choice if it made one.

        Raises EngineError if one of the logits is not a number or beyond all reason.
        """
        lowest, peak = row.lowest, row.peak
        if not (lowest > -_LARGEST_LOGIT and peak < _LARGEST_LOGIT):  # written so that a NaN fails it
            raise EngineError(
                f"the model computed logits from {lowest} to {peak} for position {position}; its weights or state are damaged"
            )
        token = self._choose(row, position)
        return Choice(token, None if self._top_logprobs is None else _logprobs(row.values(), peak, token, self._top_logprobs))

    def _choose(self, row: LogitsRow, position: int) -> int:
        if row.chosen is not None:
            return row.chosen
        chooser = self.chooser(position)
        return row.likeliest if chooser is None else chooser.choose(row.values())

    def accept(self, token: int) -> None:
        """`token` has become part of the answer; the penalties of later choices count it."""
        self._counts[token] += 1
        if self._repeats:
            self._seen.add(token)
        if self._repeats or self._penalises:
            self._change(token)

    def _change(self, token: int) -> None:
        """Tells steps 1 to 3 for a token."""
        sampling, count = self._sampling, self._counts[token]
        repetition = sampling.repetition_penalty if token in self._seen else 1.0
        penalty = sampling.presence_penalty + sampling.frequency_penalty * count if count else 0.0
        self._chooser.change(token, self._bias.get(token, 0.0), repetition, penalty)


class RandomNumbers:
    """The numbers that decide an answer's tokens, by position."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._first = 0
        self._numbers: list[int] = []

    def at(self, position: int) -> int:
        """In units of 2^-53: 0 to less than 2^53."""
        index = position - self._first
        if not 0 <= index < len(self._numbers):
            raw = np.random.Philox(key=self._seed, counter=position).random_raw(4 * _NUMBERS_AT_ONCE)
            self._first, self._numbers, index = position, (raw[::4] >> np.uint64(11)).tolist(), 0
        return self._numbers[index]


def _chooser(sampling: Sampling, vocab: int) -> native.Chooser:
    """Steps 4 to 8."""
    temperature = max(sampling.temperature, _LOWEST_TEMPERATURE) if sampling.temperature > 0.0 else 0.0
    min_offset = temperature * math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    return native.Chooser(temperature, sampling.top_k if sampling.top_k < vocab else 0, sampling.top_p, min_offset)


def largest(values: Logits, count: int) -> TokenIds:
    """Indices of the `count` largest of `values`, ascending; of equal values the lower indices are taken."""
    if count >= len(values):
        return np.arange(len(values))
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    indices = np.flatnonzero(values >= threshold)
    num_surplus = len(indices) - count
    if num_surplus:
        equal = indices[values[indices] == threshold]
        indices = np.setdiff1d(indices, equal[len(equal) - num_surplus :], assume_unique=True)
    return indices


def _checked_bias(logit_bias: dict[int, float], vocab: int) -> dict[int, float]:
    for token, bias in logit_bias.items():
        if not 0 <= token < vocab:
            raise RequestError(f"logit_bias names token {token}, but the vocabulary has ids 0 to {vocab - 1}", param="logit_bias")
        if not abs(bias) <= _LARGEST_BIAS:
            raise RequestError(f"logit_bias of token {token} is {bias}; give a number up to {_LARGEST_BIAS:g}", param="logit_bias")
    return logit_bias


def _logprobs(logits: Logits, peak: float, token: int, num_top: int) -> TokenLogprobs:
    with np.errstate(under="ignore"):
        log_total = math.log(float(np.sum(np.exp(logits - np.float32(peak)), dtype=np.float64)))
    ids = largest(logits, num_top) if num_top else np.empty(0, dtype=np.int64)
    likeliest_first = ids[np.argsort(-logits[ids], kind="stable")]
    top = [(int(index), float(logits[index]) - peak - log_total) for index in likeliest_first]
    return TokenLogprobs(logprob=float(logits[token]) - peak - log_total, top=top)
