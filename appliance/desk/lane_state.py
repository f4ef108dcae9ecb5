"""The states of a lane and the ways between them."""

from __future__ import annotations

from enum import StrEnum


class LaneState(StrEnum):
    WAITING = "waiting"
    """For the arena; no engine yet."""
    STARTING = "starting"
    """The engine runs and has not said READY."""
    IDLE = "idle"
    """Takes the next request."""
    BUSY = "busy"
    CANCELLING = "cancelling"
    """CANCEL is written, the engine has not ended the request yet."""
    STOPPING = "stopping"
    """The engine was killed or told to leave; its process has not ended yet."""
    DEAD = "dead"
    """The engine ended; it will be started again."""
    FAILED = "failed"
    """It will not be started again."""
    STOPPED = "stopped"
    """The desk shuts down and the process has ended."""


HAS_REQUEST = frozenset({LaneState.BUSY, LaneState.CANCELLING})
TAKES_REQUESTS = frozenset({LaneState.IDLE, LaneState.BUSY, LaneState.CANCELLING})
HAS_ENDED = frozenset({LaneState.FAILED, LaneState.STOPPED})

_AFTER_DEATH = frozenset({LaneState.DEAD, LaneState.FAILED, LaneState.STOPPED})

_NEXT: dict[LaneState, frozenset[LaneState]] = {
    LaneState.WAITING: frozenset({LaneState.STARTING, LaneState.FAILED, LaneState.STOPPED}),
    LaneState.STARTING: frozenset({LaneState.IDLE, LaneState.STOPPING}) | _AFTER_DEATH,
    LaneState.IDLE: frozenset({LaneState.BUSY, LaneState.STOPPING}) | _AFTER_DEATH,
    LaneState.BUSY: frozenset({LaneState.IDLE, LaneState.CANCELLING, LaneState.STOPPING}) | _AFTER_DEATH,
    LaneState.CANCELLING: frozenset({LaneState.IDLE, LaneState.STOPPING}) | _AFTER_DEATH,
    LaneState.STOPPING: _AFTER_DEATH,
    LaneState.DEAD: frozenset({LaneState.STARTING, LaneState.STOPPED}),
    LaneState.FAILED: frozenset(),
    LaneState.STOPPED: frozenset(),
}


def check_step(old: LaneState, new: LaneState) -> None:
    """Raises RuntimeError for a step that the table above does not have: a bug of the desk."""
    if new not in _NEXT[old]:
        raise RuntimeError(f"a lane cannot go from {old} to {new}")
