"""What is measured of a desk: one stream, a wake with its stream before, meanwhile and afterwards, two streams at once."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from appliance.desk.status import PairPhase
from scripts.pair_bench.streams import Bench, Stream

Row = dict[str, Any]
LONG = 6
"""The stream during which the helper wakes has so many times the tokens of others; the second comes after a sixth of them."""
SILENCE_S = 0.015
"""Shorter ones are of no interest."""


@dataclass(frozen=True)
class Sizes:
    tokens: int
    repeat: int


@dataclass(frozen=True)
class Wake:
    row: Row
    first: Stream
    second: Stream


def measure_alone(bench: Bench, sizes: Sizes) -> Row:
    before = bench.counters()
    streams = []
    for _ in range(sizes.repeat):
        bench.wait_for(PairPhase.ASLEEP)
        streams.append(bench.start(sizes.tokens).finish())
    bench.wait_for(PairPhase.ASLEEP)
    prompts = [round(stream.token_s[0] - stream.sent_s, 4) for stream in streams]
    rates = {"tokens_per_s": median([stream.rate() for stream in streams]), "first_token_s": median(prompts)}
    return rates | {"runs": [_rounded(stream.rate()) for stream in streams], "counters": dict(bench.counters() - before)}


def measure_one_after_the_other(bench: Bench, sizes: Sizes) -> Row:
    rates = []
    for _ in range(sizes.repeat):
        bench.wait_for(PairPhase.ASLEEP)
        streams = [bench.start(sizes.tokens).finish() for _ in range(2)]
        rates.append(sum(len(stream.token_s) for stream in streams) / sum(stream.token_s[-1] - stream.token_s[0] for stream in streams))
    return {"together_tokens_per_s": median(rates)}


def measure_wake(bench: Bench, sizes: Sizes) -> Wake:
    """One wake, since each of its numbers is of interest by itself. The second stream is short: the first outlives it."""
    bench.wait_for(PairPhase.ASLEEP)
    one = bench.start(LONG * sizes.tokens)
    one.wait_for_tokens(sizes.tokens)
    two = bench.start(sizes.tokens)
    second = two.finish()
    first = one.finish()
    asked, began, ended = second.sent_s, second.token_s[0], second.token_s[-1]
    spans = {
        "before": (first.token_s[0], asked),
        "while the helper wakes": (asked, began),
        "while both run": (began, ended),
        "afterwards": (ended, first.token_s[-1]),
    }
    usual = first.rate(*spans["before"])
    row = {
        "first": {name: _span(first, usual, *span) for name, span in spans.items()},
        "second_tokens_per_s": _rounded(second.rate()),
        "second_first_token_s": round(began - asked, 4),
        "of_which": {**bench.wake_parts(), "prompt_s": round(second.prompt_ms / 1000, 4)},
        "silences_s": [[round(at_s - asked, 3), round(gap_s, 4)] for at_s, gap_s in first.silences(SILENCE_S)],
    }
    return Wake(row, first, second)


def measure_two(bench: Bench, sizes: Sizes, phase: PairPhase) -> Row:
    before = bench.counters()
    rates, singles = [], []
    for _ in range(sizes.repeat):
        bench.wait_for(phase)
        begun = [bench.start(sizes.tokens) for _ in range(2)]
        streams = [underway.finish() for underway in begun]
        first_s = min(stream.token_s[0] for stream in streams)
        last_s = max(stream.token_s[-1] for stream in streams)
        rates.append(sum(len(stream.token_s) for stream in streams) / (last_s - first_s))
        singles += [stream.rate() for stream in streams]
    bench.wait_for(phase)
    both = {"together_tokens_per_s": median(rates), "each_tokens_per_s": median(singles)}
    return both | {"runs": [_rounded(rate) for rate in rates], "counters": dict(bench.counters() - before)}


def median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 4) if known else None


def _span(stream: Stream, usual: float | None, first_s: float, last_s: float) -> Row:
    rate = stream.rate(first_s, last_s)
    ratio = None if rate is None or usual is None else round(rate / usual, 3)
    gap_s = round(stream.longest_gap_s(first_s, last_s), 4)
    return {"seconds": round(max(last_s - first_s, 0), 3), "tokens_per_s": _rounded(rate), "of_before": ratio, "longest_gap_s": gap_s}


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 2)
