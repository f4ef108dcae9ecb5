"""What is drawn from a row of logits, written as docs/arithmetic.md says it: every token weighed, all of them put in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from appliance.engine.logits import Logits
from appliance.engine.sampler import TokenIds
from cuda_ext import _native as native
from cuda_ext import reference

F32 = np.float32
ONE = 2**40
REACH = 28
"""Units of the temperature below the greatest logit, in which tokens can be drawn."""
MOST = F32(3e38)


@dataclass(frozen=True)
class Rule:
    """What `native.Chooser` is told, as plain numbers."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_offset: float = -np.inf
    changes: Mapping[int, tuple[float, float, float]] = field(default_factory=dict)
    """Token to (bias, repetition, penalty)."""

    def chooser(self, fraction: int = 0) -> native.Chooser:
        chooser = native.Chooser(self.temperature, self.top_k, self.top_p, self.min_offset)
        for token, change in self.changes.items():
            chooser.change(token, *change)
        chooser.set_fraction(fraction)
        return chooser


@dataclass(frozen=True)
class Kept:
    """The tokens that can be drawn, likeliest first, and their weights."""

    ids: TokenIds
    weights: list[int]

    def drawn(self, fraction: int) -> int:
        place = fraction * sum(self.weights) >> 53
        for token, weight in zip(self.ids.tolist(), self.weights, strict=True):
            if place < weight:
                return int(token)
            place -= weight
        raise AssertionError("a place lies within the mass")

    def edges(self) -> list[int]:
        """The fractions at which a token begins, and those just before."""
        total, before, fractions = sum(self.weights), 0, {0, 2**53 - 1}
        for weight in self.weights[:-1]:
            before += weight
            first = -(-(before << 53) // total)
            fractions |= {first, first - 1}
        return sorted(fraction for fraction in fractions if 0 <= fraction < 2**53)


def changed(logits: Logits, rule: Rule) -> Logits:
    row = logits.copy()
    with np.errstate(all="ignore"):
        for token, (bias, repetition, penalty) in rule.changes.items():
            value = row[token] + F32(bias)
            value = value * F32(repetition) if value < 0 else value / F32(repetition)
            value -= F32(penalty)
            row[token] = MOST if np.isnan(value) else np.clip(value, -MOST, MOST)
    return row


def kept(logits: Logits, rule: Rule) -> Kept:
    """At a temperature above 0."""
    row = changed(logits, rule)
    peak = row.max()
    with np.errstate(over="ignore"):
        depths = (peak - row) / F32(rule.temperature)
    order = np.lexsort((np.arange(len(row)), -row))
    order = order[depths[order] <= REACH]
    if rule.top_k:
        order = order[: rule.top_k]
    weights = [int(value) for value in reference.exp(-depths[order]).astype(np.float64) * ONE]
    total, before, count = sum(weights), 0, 0
    while count < len(order):
        by_mass = count == 0 or rule.top_p >= 1 or float(before) < rule.top_p * float(total)
        if not (by_mass and row[order[count]] >= peak + F32(rule.min_offset)):
            break
        before += weights[count]
        count += 1
    return Kept(order[:count], weights[:count])
