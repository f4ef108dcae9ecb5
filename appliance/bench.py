"""`tandem bench`: how fast this machine answers with this model, through the real desk and engines.

One request alone, then two at once on two lanes. Prompts are random token ids, so nothing is reused between runs; the
numbers are medians of the engines' own clocks.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from appliance.desk.desk import Desk
from appliance.desk.status import Phase
from appliance.desk.ticket import Ticket
from appliance.errors import EngineError, SettingsError
from appliance.log import configure_logging
from appliance.protocol import Finished, FinishReason, Generate, Timings
from appliance.settings import Settings
from appliance.web.appliance import read_appliance

_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second: the median request's prompt and decode, and decode of all lanes together."""

    prompt: float
    decode: float
    together: float


@dataclass(frozen=True, slots=True)
class BenchResult:
    model: str
    cards: tuple[str, ...]
    isa: str
    threads_per_lane: int
    prompt_tokens: int
    new_tokens: int
    repeat: int
    load_s: float
    """From the start of loader and engines to the first lane that takes requests."""
    alone: Speed
    two_at_once: Speed | None
    """None with one card."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(settings: Settings, *, prompt_tokens: int, new_tokens: int, repeat: int) -> BenchResult:
    """Runs the benchmark. SettingsError if the lengths do not fit the context."""
    configure_logging("warning", settings.log_format)
    appliance = read_appliance(settings)
    model = appliance.model
    if prompt_tokens + new_tokens > model.context:
        raise SettingsError(
            f"--prompt {prompt_tokens} and --tokens {new_tokens} do not fit the context of {model.context} tokens; lower them, or raise "
            "--context where the model has more",
            param="context",
        )
    rng = random.Random(0)

    def request(name: str) -> Generate:
        prompt = [rng.randrange(model.vocab) for _ in range(prompt_tokens)]
        return Generate(id=name, prompt=prompt, max_tokens=new_tokens, ignore_eos=True)

    start = time.monotonic()
    with _running(Desk(appliance.desk)) as desk:
        load_s = time.monotonic() - start
        _run(desk, [request("warm-up")])
        alone = [_run(desk, [request(f"alone-{i}")]) for i in range(repeat)]
        pairs = [_run(desk, [request(f"left-{i}"), request(f"right-{i}")]) for i in range(repeat)] if model.lanes > 1 else []
        stats = next(lane.stats for lane in desk.status().lanes if lane.stats)
        return BenchResult(
            model=model.name,
            cards=tuple(lane.card for lane in appliance.desk.lanes),
            isa=stats.isa,
            threads_per_lane=stats.pool_threads,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            repeat=repeat,
            load_s=load_s,
            alone=_speed(alone),
            two_at_once=_speed(pairs) if pairs else None,
        )


def render_bench(result: BenchResult) -> Table:
    """The table that the command prints."""
    title = f"{result.model} on {', '.join(result.cards)} ({result.isa}, {result.threads_per_lane} threads per lane)"
    caption = (
        f"{result.prompt_tokens} prompt tokens, {result.new_tokens} new ones, medians of {result.repeat}; "
        f"ready {result.load_s:.1f} s after the start"
    )
    table = Table(title=title, caption=caption)
    for name in ("requests", "prompt tok/s", "decode tok/s", "decode, all lanes"):
        table.add_column(name, justify="left" if name == "requests" else "right")
    for name, speed in (("one alone", result.alone), ("two at once", result.two_at_once)):
        if speed is not None:
            table.add_row(name, f"{speed.prompt:.1f}", f"{speed.decode:.1f}", f"{speed.together:.1f}")
    return table


@contextmanager
def _running(desk: Desk) -> Iterator[Desk]:
    desk.start()
    try:
        while (status := desk.status()).phase is Phase.LOADING or any(lane.state.value == "starting" for lane in status.lanes):
            time.sleep(_LOOK_S)
        if status.phase is not Phase.READY:
            raise EngineError(status.reason or "the model could not be loaded")
        yield desk
    finally:
        desk.stop(0.0)


def _run(desk: Desk, requests: list[Generate]) -> list[Timings]:
    tickets = [desk.submit(request) for request in requests]
    return [_finish(ticket) for ticket in tickets]


def _finish(ticket: Ticket) -> Timings:
    with ticket:
        while not isinstance(event := ticket.next_event(), Finished):
            pass
    if event.reason is not FinishReason.LENGTH:
        raise EngineError(f"a benchmark request ended early ({event.reason}): {event.error_text or 'no reason given'}")
    return event.timings


def _speed(runs: list[list[Timings]]) -> Speed:
    each = [timings for run in runs for timings in run]
    return Speed(
        prompt=statistics.median(t.prompt_tokens * 1e3 / max(t.prompt_ms, 1e-3) for t in each),
        decode=statistics.median(_decode_rate(t) for t in each),
        together=statistics.median(sum(_decode_rate(t) for t in run) for run in runs),
    )


def _decode_rate(timings: Timings) -> float:
    """The first token comes with the prompt; decode makes the others."""
    return max(0, timings.generated_tokens - 1) * 1e3 / max(timings.decode_ms, 1e-3)
