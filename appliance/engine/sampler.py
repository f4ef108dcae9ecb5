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

Log-probabilities are those of the logits before step 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from appliance.engine.logits import Logits, LogitsRow
from appliance.errors import EngineError, RequestError
from appliance.protocol import Sampling, TokenLogprobs

TokenIds = NDArray[np.int64]

_LARGEST_LOGIT = 1e30
_LARGEST_BIAS = 1e9
_LOWEST_TEMPERATURE = 1e-30
"""Below it float32 would divide by zero; it is far on the greedy side already."""


@dataclass(frozen=True, slots=True)
class Choice:
    token: int
    logprobs: TokenLogprobs | None
    """Given if they were asked for."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """The tokens that can be drawn, in the order of their ids, and how likely they are relative to each other."""

    ids: TokenIds
    weights: Logits

    def at(self, fraction: float) -> int:
        """The token that lies at `fraction`, 0 to less than 1, of the cumulated weights."""
        cumulative = np.cumsum(self.weights, dtype=np.float64)
        index = int(np.searchsorted(cumulative, fraction * cumulative[-1], side="right"))
        return int(self.ids[min(index, len(self.ids) - 1)])


class Sampler:
    """Chooses the tokens of one answer and remembers what its penalties need. Confined to the engine loop."""

    def __init__(self, sampling: Sampling, vocab: int, prompt: Sequence[int], top_logprobs: int | None = None) -> None:
        """Raises RequestError if `logit_bias` names no token or has no sensible value.

        `top_logprobs` as in `Generate`. The ids of `prompt` must be below `vocab`.
        """
        self._sampling = sampling
        self._temperature = max(sampling.temperature, _LOWEST_TEMPERATURE)
        self._all_ids: TokenIds = np.arange(vocab)
        self._top_logprobs = top_logprobs
        self._bias_ids, self._bias = _bias_arrays(sampling.logit_bias, vocab)
        self._penalises_count = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        self._adjusts = bool(self._bias_ids.size) or sampling.repetition_penalty != 1.0 or self._penalises_count
        self._counts: NDArray[np.int32] = np.zeros(vocab, dtype=np.int32)
        self._generated = _IdSet(vocab)
        self._seen = _IdSet(vocab)
        if sampling.repetition_penalty != 1.0:
            self._seen.add_all(np.unique(np.asarray(prompt, dtype=np.int64)))

    def choose(self, row: LogitsRow, position: int) -> Choice:
        """The token for the absolute `position`.

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
        if self._sampling.temperature == 0.0 and not self._adjusts:
            return row.likeliest
        adjusted = self._adjusted(row.values())
        if self._sampling.temperature == 0.0:
            return int(np.argmax(adjusted))
        return self._filtered(adjusted).at(uniform(self._sampling.seed, position))

    def accept(self, token: int) -> None:
        """`token` has become part of the answer; the penalties of later choices count it."""
        self._counts[token] += 1
        self._generated.add(token)
        if self._sampling.repetition_penalty != 1.0:
            self._seen.add(token)

    def distribution(self, logits: Logits) -> Distribution:
        """What a token is drawn from at a temperature above 0, by steps 1 to 7."""
        return self._filtered(self._adjusted(logits))

    def _adjusted(self, logits: Logits) -> Logits:
        """Steps 1 to 3, on a copy if there is anything to do."""
        if not self._adjusts:
            return logits
        sampling = self._sampling
        result = logits.copy()
        result[self._bias_ids] += self._bias
        if sampling.repetition_penalty != 1.0:
            seen = self._seen.ids
            values = result[seen]
            penalty = np.float32(sampling.repetition_penalty)
            result[seen] = np.where(values < 0, values * penalty, values / penalty)
        if self._penalises_count:
            generated = self._generated.ids
            counts = self._counts[generated].astype(np.float32)
            result[generated] -= np.float32(sampling.presence_penalty) + np.float32(sampling.frequency_penalty) * counts
        return result

    def _filtered(self, logits: Logits) -> Distribution:
        """Steps 4 to 7."""
        sampling = self._sampling
        peak = float(np.max(logits))
        ids, values = self._all_ids, logits
        if 0 < sampling.top_k < len(values):
            kept = largest(values, sampling.top_k)
            ids, values = ids[kept], values[kept]
        if sampling.top_p < 1.0:
            kept = largest(values, self._nucleus_size(values, peak))
            ids, values = ids[kept], values[kept]
        if sampling.min_p > 0.0:
            kept = np.flatnonzero(values >= peak + self._temperature * math.log(sampling.min_p))
            ids, values = ids[kept], values[kept]
        return Distribution(ids, self._weights(values, peak))

    def _nucleus_size(self, logits: Logits, peak: float) -> int:
        """How many of the likeliest tokens it takes to reach `top_p`; at least one."""
        cumulative = np.cumsum(self._weights(np.sort(logits)[::-1], peak), dtype=np.float64)
        target = self._sampling.top_p * cumulative[-1]
        return min(int(np.searchsorted(cumulative, target, side="left")) + 1, len(cumulative))

    def _weights(self, logits: Logits, peak: float) -> Logits:
        """Probabilities after the temperature, relative to that of a token with the logit `peak`."""
        with np.errstate(over="ignore", under="ignore"):  # a tiny temperature sends all but the likeliest to -inf, then 0
            weights: Logits = np.exp((logits - np.float32(peak)) / np.float32(self._temperature))
        return weights


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at `position`."""
    raw = int(np.random.Philox(key=seed, counter=position).random_raw())
    return (raw >> 11) * 2.0**-53


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


def _bias_arrays(logit_bias: dict[int, float], vocab: int) -> tuple[TokenIds, Logits]:
    for token, bias in logit_bias.items():
        if not 0 <= token < vocab:
            raise RequestError(f"logit_bias names token {token}, but the vocabulary has ids 0 to {vocab - 1}", param="logit_bias")
        if not abs(bias) <= _LARGEST_BIAS:
            raise RequestError(f"logit_bias of token {token} is {bias}; give a number up to {_LARGEST_BIAS:g}", param="logit_bias")
    return np.array(list(logit_bias), dtype=np.int64), np.array(list(logit_bias.values()), dtype=np.float32)


def _logprobs(logits: Logits, peak: float, token: int, num_top: int) -> TokenLogprobs:
    with np.errstate(under="ignore"):
        log_total = math.log(float(np.sum(np.exp(logits - np.float32(peak)), dtype=np.float64)))
    ids = largest(logits, num_top) if num_top else np.empty(0, dtype=np.int64)
    likeliest_first = ids[np.argsort(-logits[ids], kind="stable")]
    top = [(int(index), float(logits[index]) - peak - log_total) for index in likeliest_first]
    return TokenLogprobs(logprob=float(logits[token]) - peak - log_total, top=top)


class _IdSet:
    """Token ids without repetition, as one array."""

    def __init__(self, vocab: int) -> None:
        self._is_member = np.zeros(vocab, dtype=np.bool_)
        self._ids: TokenIds = np.empty(vocab, dtype=np.int64)
        self._size = 0

    @property
    def ids(self) -> TokenIds:
        return self._ids[: self._size]

    def add(self, token: int) -> None:
        if not self._is_member[token]:
            self._is_member[token] = True
            self._ids[self._size] = token
            self._size += 1

    def add_all(self, tokens: TokenIds) -> None:
        """Adds ids that are not members yet and do not repeat."""
        self._is_member[tokens] = True
        self._ids[: len(tokens)] = tokens
        self._size = len(tokens)
