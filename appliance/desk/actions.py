"""What `DeskState` wants done. The desk thread does it; the state itself touches neither processes nor tickets."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.protocol import Event


@dataclass(frozen=True, slots=True)
class StartLoader:
    """Run the loader, which fills and seals the arena."""


@dataclass(frozen=True, slots=True)
class StopLoader:
    """End the loader at once; a half-filled arena is recognised at the next start."""


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Start the lane's engine process. The last one has ended."""

    lane: str


@dataclass(frozen=True, slots=True)
class SendLine:
    """Write one protocol line, newline included, to the lane's engine."""

    lane: str
    text: str


@dataclass(frozen=True, slots=True)
class StopEngine:
    """Let the engine leave: end of file, then SIGTERM, then SIGKILL."""

    lane: str


@dataclass(frozen=True, slots=True)
class KillEngine:
    """SIGKILL at once."""

    lane: str


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand the event to the ticket that `event.id` names. A `Finished` is the last one for it."""

    event: Event


Action = StartLoader | StopLoader | StartEngine | SendLine | StopEngine | KillEngine | Deliver
