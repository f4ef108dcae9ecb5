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
8. One of the rest is drawn by its probability, with a number that depends on `(seed, position)` alone: Philox4x64 with the
   seed as key and the token's absolute position as counter. So the same seed gives the same text, however the tokens are
   spread over windows.

Log-probabilities are those of the logits before step 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from appliance.errors import EngineError, RequestError
from appliance.protocol import Sampling, TokenLogprobs

Logits = NDArray[np.float32]
TokenIds = NDArray[np.int64]

_LARGEST_LOGIT = 1e30
_LARGEST_BIAS = 1e9
_FIRST_NUCLEUS = 512
"""Candidates of the first try to find a top-p nucleus without sorting the vocabulary."""


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
        self._vocab = vocab
        self._top_logprobs = top_logprobs
        self._bias_ids, self._bias = _bias_arrays(sampling.logit_bias, vocab)
        self._counts: NDArray[np.int32] = np.zeros(vocab, dtype=np.int32)
        self._generated = _IdSet(vocab)
        self._seen = _IdSet(vocab)
        if sampling.repetition_penalty != 1.0:
            self._seen.add_all(np.unique(np.asarray(prompt, dtype=np.int64)))

    def choose(self, logits: Logits, position: int) -> Choice:
        """The token for the absolute `position`, from `logits`: [vocab] float32, which are left as they are.

        Raises EngineError if one of the logits is not a number or beyond all reason.
        """
        lowest, peak = float(np.min(logits)), float(np.max(logits))
        if not (lowest > -_LARGEST_LOGIT and peak < _LARGEST_LOGIT):  # written so that a NaN fails it
            raise EngineError(
                f"the model computed logits from {lowest} to {peak} for position {position}; its weights or state are damaged"
            )
        token = self._draw(self._adjusted(logits), position)
        return Choice(token, None if self._top_logprobs is None else _logprobs(logits, peak, token, self._top_logprobs))

    def accept(self, token: int) -> None:
        """`token` has become part of the answer; the penalties of later choices count it."""
        self._counts[token] += 1
        self._generated.add(token)
        if self._sampling.repetition_penalty != 1.0:
            self._seen.add(token)

    def _adjusted(self, logits: Logits) -> Logits:
        """Steps 1 to 3, on a copy if there is anything to do."""
        sampling = self._sampling
        penalises_count = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        if not (self._bias_ids.size or sampling.repetition_penalty != 1.0 or penalises_count):
            return logits
        result = logits.copy()
        result[self._bias_ids] += self._bias
        if sampling.repetition_penalty != 1.0:
            seen = self._seen.ids
            values = result[seen]
            penalty = np.float32(sampling.repetition_penalty)
            result[seen] = np.where(values < 0, values * penalty, values / penalty)
        if penalises_count:
            generated = self._generated.ids
            counts = self._counts[generated].astype(np.float32)
            result[generated] -= np.float32(sampling.presence_penalty) + np.float32(sampling.frequency_penalty) * counts
        return result

    def _draw(self, logits: Logits, position: int) -> int:
        """Steps 4 to 8."""
        best = int(np.argmax(logits))
        if self._sampling.temperature == 0.0:
            return best
        ids, weights = self._candidates(logits, float(logits[best]))
        cumulative = np.cumsum(weights)
        target = uniform(self._sampling.seed, position) * cumulative[-1]
        index = min(int(np.searchsorted(cumulative, target, side="right")), len(weights) - 1)
        return index if ids is None else int(ids[index])

    def _candidates(self, logits: Logits, peak: float) -> tuple[TokenIds | None, NDArray[np.float64]]:
        """The tokens left by steps 5 to 7, likeliest first, and their weights relative to the likeliest.

        Ids of None mean all tokens, in the order of their ids.
        """
        sampling = self._sampling
        has_top_k = 0 < sampling.top_k < self._vocab
        if has_top_k:
            ids = largest(logits, sampling.top_k)
        elif sampling.top_p < 1.0:
            ids = self._nucleus(logits, peak)
        elif sampling.min_p > 0.0:
            ids = np.flatnonzero(self._weights(logits, peak) >= sampling.min_p)
        else:
            return None, self._weights(logits, peak)
        weights = self._weights(logits[ids], peak)
        if has_top_k and sampling.top_p < 1.0:
            kept = _nucleus_size(weights, sampling.top_p, float(weights.sum()))
            ids, weights = ids[:kept], weights[:kept]
        if sampling.min_p > 0.0:
            is_kept = weights >= sampling.min_p
            ids, weights = ids[is_kept], weights[is_kept]
        return ids, weights

    def _nucleus(self, logits: Logits, peak: float) -> TokenIds:
        """The ids that `top_p` keeps of the whole vocabulary, likeliest first."""
        total = float(self._weights(logits, peak).sum())
        size = _FIRST_NUCLEUS
        while True:
            ids = largest(logits, min(size, self._vocab))
            weights = self._weights(logits[ids], peak)
            if len(ids) == self._vocab or float(weights.sum()) > self._sampling.top_p * total:
                return ids[: _nucleus_size(weights, self._sampling.top_p, total)]
            size *= 8

    def _weights(self, logits: Logits, peak: float) -> NDArray[np.float64]:
        """Probabilities after the temperature, relative to that of the likeliest token."""
        with np.errstate(over="ignore", under="ignore"):  # a tiny temperature sends all but the likeliest to -inf, then 0
            return np.exp((logits.astype(np.float64) - peak) / self._sampling.temperature)


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at `position`."""
    raw = int(np.random.Philox(key=seed, counter=position).random_raw())
    return (raw >> 11) * 2.0**-53


def largest(values: Logits, count: int) -> TokenIds:
    """Indices of the `count` largest of `values`, largest first; of equal ones the lower index first and kept."""
    if count < len(values):
        threshold = np.partition(values, len(values) - count)[len(values) - count]
        above = np.flatnonzero(values > threshold)
        equal = np.flatnonzero(values == threshold)[: count - len(above)]
        indices = np.concatenate([above, equal])
    else:
        indices = np.arange(len(values))
    return indices[np.lexsort((indices, -values[indices]))]


def _nucleus_size(weights: NDArray[np.float64], top_p: float, total: float) -> int:
    """How many of the descending `weights` it takes to reach `top_p * total`; at least one."""
    return min(int(np.searchsorted(np.cumsum(weights), top_p * total, side="left")) + 1, len(weights))


def _bias_arrays(logit_bias: dict[int, float], vocab: int) -> tuple[TokenIds, Logits]:
    for token, bias in logit_bias.items():
        if not 0 <= token < vocab:
            raise RequestError(f"logit_bias names token {token}, but the vocabulary has ids 0 to {vocab - 1}", param="logit_bias")
        if not abs(bias) <= _LARGEST_BIAS:
            raise RequestError(f"logit_bias of token {token} is {bias}; give a number up to {_LARGEST_BIAS:g}", param="logit_bias")
    return np.array(list(logit_bias), dtype=np.int64), np.array(list(logit_bias.values()), dtype=np.float32)


def _logprobs(logits: Logits, peak: float, token: int, num_top: int) -> TokenLogprobs:
    log_total = math.log(float(np.sum(np.exp(logits - np.float32(peak)), dtype=np.float64)))
    top = [(int(index), float(logits[index]) - peak - log_total) for index in (largest(logits, num_top) if num_top else ())]
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
