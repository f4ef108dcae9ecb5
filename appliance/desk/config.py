"""What the desk needs to know to run: the lanes, the line, the time limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

LANE_NAMES = ("lead", "helper")


@dataclass(frozen=True, slots=True)
class LaneConfig:
    """One engine process and its card."""

    name: str
    card: str
    argv: tuple[str, ...]
    """Command line of the engine."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long the desk waits for what, in seconds. Tests shorten them; users have no need to."""

    cancel_s: float = 5.0
    """From CANCEL to the terminal event; then the engine is killed. Longer than a chunk, shorter than a restart is worth."""
    start_silence_s: float = 300.0
    """Longest silence of a starting engine."""
    answer_s: float = 180.0
    """From STATS to its answer, which waits for a chunk of the prompt at most; then the engine is stuck and is killed."""
    overdue_s: float = 15.0
    """How much later than a request's own deadline its engine may end it."""
    stats_period_s: float = 1.0
    """Between two STATS to a busy lane."""
    restart_delays_s: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
    """Before each restart in a row. One more death is a crash loop, and the lane has failed."""
    stable_s: float = 60.0
    """An engine that was ready for so long, or ended a request properly, begins a new row of deaths."""
    term_after_s: float = 3.0
    """From end of file to SIGTERM."""
    kill_after_s: float = 5.0
    """From end of file to SIGKILL."""


@dataclass(frozen=True, slots=True)
class ElasticConfig:
    """How two lanes share two cards: the helper sleeps while there is one request at a time."""

    hold_s: float = 60.0
    """The helper falls asleep when for so long there were no two requests at once."""
    wake_limit_s: float = 30.0
    """A wake that takes longer has failed."""
    bar_s: float = 60.0
    """After a failed wake the helper is left alone for so long."""
    hold_threads: int = 0
    """Threads of the lead's pool that sit out while the helper's compute: its cores."""
    prompts_take_threads: bool = True
    """A GPU computes prompts without them."""
    peer: bool = True
    """The lead uses the second card while the helper sleeps."""
    link: bool = True
    """Both compute the other's rows while both are awake."""


@dataclass(frozen=True, slots=True)
class DeskConfig:
    """Immutable; made once and passed to `Desk`."""

    lanes: tuple[LaneConfig, ...]
    """One or two, the lead first."""
    loader_argv: tuple[str, ...]
    """Command line of the loader, which exits with 0 when the arena is sealed."""
    max_queue: int = 64
    """Requests that may wait."""
    limits: Limits = field(default_factory=Limits)
    elastic: ElasticConfig | None = None
    """None: both lanes are always awake, and know nothing of each other."""
    leftovers: tuple[Path, ...] = ()
    """Files and folders that engines make in shared memory; removed when all of them have ended."""
