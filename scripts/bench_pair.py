"""The pair in numbers, on whatever two cards there are: python scripts/bench_pair.py [MODEL.gguf] [--set slots=300 ...] --out FOLDER

    alone        one request: on one card, and on a pair whose helper sleeps
    wake         the first stream before, while and after the second request wakes the helper, with its longest gap, and the parts
                 of the time to the second's first token
    two          two requests at once with the link, without it, and on two lanes that know nothing of each other; and one after
                 the other

Each variant is a server's desk of its own with real engines, no HTTP. Prompts are random token ids, so that nothing is reused. Tokens
are timed where the desk hands them out. Writes pair.json and pair.svg; medians of --repeat runs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.demo import with_model
from appliance.desk.desk import Desk
from appliance.desk.status import PairPhase, Phase
from appliance.log import configure_logging
from appliance.memory.limits import usable_cores
from appliance.protocol import Finished, FinishReason, Generate, Tokens
from appliance.settings import Settings, load_settings
from appliance.web.appliance import read_appliance

LIMIT_S = 600.0
LOOK_S = 0.02
LEAD_TOKENS = 0.4
"""Share of the first stream's tokens that are there before the second request comes."""


@dataclass
class Stream:
    """One request: when its tokens came, in seconds of one clock."""

    sent_s: float
    token_s: list[float] = field(default_factory=list)
    prompt_ms: float = 0.0

    def rate(self, first_s: float = 0.0, last_s: float = float("inf")) -> float | None:
        """Tokens per second of those that came between two times."""
        times = [when for when in self.token_s if first_s <= when <= last_s]
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else None

    def longest_gap_s(self, first_s: float, last_s: float) -> float:
        """The longest silence that begins or ends between two times."""
        gaps = [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False) if b >= first_s and a <= last_s]
        return max(gaps, default=0.0)


class Bench:
    """One desk and the requests to it."""

    def __init__(self, desk: Desk, vocab: int, prompt_tokens: int, new_tokens: int) -> None:
        self._desk = desk
        self._dice = random.Random(0)
        self._vocab = vocab
        self._prompt_tokens = prompt_tokens
        self._new_tokens = new_tokens
        self._count = 0

    def one(self) -> Stream:
        stream, thread = self.start()
        thread.join()
        return stream

    def start(self) -> tuple[Stream, threading.Thread]:
        """A request under way."""
        self._count += 1
        prompt = [self._dice.randrange(self._vocab) for _ in range(self._prompt_tokens)]
        request = Generate(id=f"bench-{self._count}", prompt=prompt, max_tokens=self._new_tokens, ignore_eos=True)
        stream = Stream(time.monotonic())
        thread = threading.Thread(target=self._follow, args=(request, stream))
        thread.start()
        return stream, thread

    def wait_for(self, phase: PairPhase) -> None:
        """Both lanes idle, and the pair in that phase if there is one."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            status = self._desk.status()
            is_idle = all(lane.state == "idle" for lane in status.lanes)
            is_full = all(lane.stats is None or not lane.stats.is_filling for lane in status.lanes)
            if is_idle and is_full and (status.pair is None or status.pair.phase is phase):
                return
            time.sleep(LOOK_S)
        raise SystemExit(f"the pair did not come to rest: {self._desk.status()}")

    def wake_parts(self) -> dict[str, float | None]:
        pair = self._desk.status().pair
        return {} if pair is None else {"detach_s": pair.detach_s, "wake_s": pair.wake_s}

    def rows(self) -> dict[str, int]:
        """Routed rows by tier, of both engines together."""
        together: dict[str, int] = {}
        for lane in self._desk.status().lanes:
            for tier, count in (lane.stats.rows_by_tier if lane.stats else {}).items():
                together[tier] = together.get(tier, 0) + count
        return together

    def _follow(self, request: Generate, stream: Stream) -> None:
        with self._desk.submit(request) as ticket:
            while not isinstance(event := ticket.next_event(LIMIT_S), Finished):
                if isinstance(event, Tokens):
                    stream.token_s += [time.monotonic()] * len(event.ids)
            if event.reason is FinishReason.ERROR:
                raise SystemExit(f"{request.id} failed: {event.error_text}")
            stream.prompt_ms = event.timings.prompt_ms


@contextmanager
def bench_of(settings: Settings, options: argparse.Namespace) -> Iterator[Bench]:
    appliance = read_appliance(settings)
    desk = Desk(appliance.desk).start()
    try:
        bench = Bench(desk, appliance.model.vocab, options.prompt, options.tokens)
        while desk.status().phase is Phase.LOADING:
            time.sleep(LOOK_S)
        bench.wait_for(PairPhase.ASLEEP)
        bench.one()  # caches warm, as after some minutes of service
        bench.wait_for(PairPhase.ASLEEP)
        yield bench
    finally:
        desk.stop(0)


def measure_alone(bench: Bench, repeat: int) -> dict[str, Any]:
    streams = []
    for _ in range(repeat):
        bench.wait_for(PairPhase.ASLEEP)
        streams.append(bench.one())
    return {"tokens_per_s": median([stream.rate() for stream in streams]), "rows": bench.rows()}


def measure_wake(bench: Bench, tokens: int) -> tuple[dict[str, Any], Stream, Stream]:
    """One wake, since each of its numbers is of interest by itself."""
    first, first_thread = bench.start()
    while len(first.token_s) < tokens * LEAD_TOKENS:
        time.sleep(LOOK_S / 4)
    second, second_thread = bench.start()
    first_thread.join()
    second_thread.join()
    asked, began = second.sent_s, second.token_s[0]
    result = {
        "first_before_tokens_per_s": first.rate(last_s=asked),
        "first_during_tokens_per_s": first.rate(asked, began),
        "first_after_tokens_per_s": first.rate(began),
        "first_longest_gap_s": {
            "before": first.longest_gap_s(0.0, asked),
            "while the helper wakes": first.longest_gap_s(asked, began),
            "after": first.longest_gap_s(began, float("inf")),
        },
        "second_first_token_s": began - asked,
        "of_which": {**bench.wake_parts(), "prompt_s": second.prompt_ms / 1000},
    }
    return result, first, second


def measure_two(bench: Bench, repeat: int, phase: PairPhase) -> dict[str, Any]:
    rates = []
    for _ in range(repeat):
        bench.wait_for(phase)
        begun = [bench.start() for _ in range(2)]
        for _, thread in begun:
            thread.join()
        streams = [stream for stream, _ in begun]
        first_s = min(stream.token_s[0] for stream in streams)
        last_s = max(stream.token_s[-1] for stream in streams)
        rates.append(sum(len(stream.token_s) for stream in streams) / (last_s - first_s))
    return {"together_tokens_per_s": median(rates), "rows": bench.rows()}


def measure_one_after_the_other(bench: Bench, repeat: int) -> dict[str, Any]:
    rates = []
    for _ in range(repeat):
        bench.wait_for(PairPhase.ASLEEP)
        streams = [bench.one(), bench.one()]
        rates.append(sum(len(stream.token_s) for stream in streams) / sum(stream.token_s[-1] - stream.token_s[0] for stream in streams))
    return {"together_tokens_per_s": median(rates)}


def median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 3) if known else None


def with_elastic(settings: Settings, **values: object) -> Settings:
    return settings.model_copy(update={"elastic": settings.elastic.model_copy(update=values)})


def run(settings: Settings, options: argparse.Namespace) -> tuple[dict[str, Any], Stream, Stream]:
    plain = with_elastic(settings, enabled=False)
    pair = with_elastic(settings, enabled=True, hold_s=options.hold_s)
    first_card = "host:0" if settings.cards == "auto" else settings.cards.split(",")[0]
    result: dict[str, Any] = {
        "cores": usable_cores(),
        "prompt_tokens": options.prompt,
        "new_tokens": options.tokens,
        "repeat": options.repeat,
    }
    with bench_of(plain.model_copy(update={"cards": first_card}), options) as bench:
        result["alone, one card"] = measure_alone(bench, options.repeat)
    with bench_of(pair, options) as bench:
        result["alone, helper asleep"] = measure_alone(bench, options.repeat)
        result["one after the other"] = measure_one_after_the_other(bench, options.repeat)
        bench.wait_for(PairPhase.ASLEEP)
        result["wake"], first, second = measure_wake(bench, options.tokens)
    awake = with_elastic(pair, hold_s=LIMIT_S)
    with bench_of(awake, options) as bench:
        measure_wake(bench, options.tokens)
        result["two, with link"] = measure_two(bench, options.repeat, PairPhase.AWAKE)
    with bench_of(with_elastic(awake, link=False), options) as bench:
        measure_wake(bench, options.tokens)
        result["two, without link"] = measure_two(bench, options.repeat, PairPhase.AWAKE)
    with bench_of(plain, options) as bench:
        result["two, lanes apart"] = measure_two(bench, options.repeat, PairPhase.ASLEEP)
    return result, first, second


def plot(first: Stream, second: Stream) -> str:
    """Tokens per second of both streams over time, as an SVG."""
    start_s = first.token_s[0]
    end_s = max(first.token_s[-1], second.token_s[-1])
    width, height, step_s = 900, 300, max((end_s - start_s) / 90, 1e-3)
    curves = []
    peak = 1e-9
    for stream in (first, second):
        counts = [0] * (int((end_s - start_s) / step_s) + 1)
        for when in stream.token_s:
            counts[int((when - start_s) / step_s)] += 1
        curves.append([count / step_s for count in counts])
        peak = max(peak, *curves[-1])
    lines = []
    for curve, colour in zip(curves, ("#1f6feb", "#d4731e"), strict=True):
        points = " ".join(
            f"{60 + i * (width - 80) / len(curve):.1f},{height - 30 - rate / peak * (height - 60):.1f}" for i, rate in enumerate(curve)
        )
        lines.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{points}"/>')
    mark = 60 + (second.sent_s - start_s) / (end_s - start_s) * (width - 80)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            f'<text x="8" y="20">{peak:.0f} tok/s</text><text x="8" y="{height - 30}">0</text>',
            f'<text x="{width - 70}" y="{height - 8}">{end_s - start_s:.1f} s</text>',
            f'<line x1="{mark:.1f}" x2="{mark:.1f}" y1="25" y2="{height - 30}" stroke="#888" stroke-dasharray="4"/>',
            f'<text x="{mark + 4:.1f}" y="36">second request</text>',
            '<text x="60" y="14" fill="#1f6feb">first stream</text><text x="160" y="14" fill="#d4731e">second stream</text>',
            *lines,
            "</svg>\n",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any setting, such as slots=300")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--hold-s", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    settings = with_model(load_settings({"model": options.model, **dict(pair.split("=", 1) for pair in options.set)}))
    configure_logging("warning", "console")
    result, first, second = run(settings, options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "pair.json").write_text(json.dumps(result, indent=2) + "\n")
    (options.out / "pair.svg").write_text(plot(first, second))
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
