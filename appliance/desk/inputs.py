"""What happens to the desk: everything that `DeskState.handle` takes."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from appliance.desk.lines import EngineLine
from appliance.protocol import Fatal, Generate, LoadProgress


@dataclass(frozen=True, slots=True)
class Ending:
    """How a child process ended: by an exit code of its own, or by a signal."""

    exit_code: int | None = None
    signal: int | None = None
    last_words: str | None = None
    """What it complained of last, or what the desk found wrong with it."""
    is_logged: bool = False
    """The child has logged that itself, as an error."""

    def sentence(self, who: str) -> str:
        """`engine lead ended with exit code 1: last words`."""
        if self.signal is not None:
            how = f"was killed by {_signal_name(self.signal)}"
            if self.signal == signal.SIGKILL and self.last_words is None:
                how += ", which is also what the kernel does when memory is full"
        elif self.exit_code is not None:
            how = f"ended with exit code {self.exit_code}"
        else:
            how = "could not be started"
        return f"{who} {how}" + (f": {self.last_words}" if self.last_words else "")


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request. The only input that can be refused."""

    request: Generate


@dataclass(frozen=True, slots=True)
class Cancel:
    """Somebody wants no more of the answer. Unknown and ended requests are fine."""

    request_id: str
    is_complete: bool = False
    """What there is of the answer is all of it, as after a stop string; it counts as finished."""


@dataclass(frozen=True, slots=True)
class LoaderSaid:
    line: LoadProgress | Fatal


@dataclass(frozen=True, slots=True)
class LoaderEnded:
    ending: Ending


@dataclass(frozen=True, slots=True)
class EngineSaid:
    lane: str
    line: EngineLine


@dataclass(frozen=True, slots=True)
class EngineEnded:
    lane: str
    ending: Ending


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no more requests, let running ones go on for `drain_s`, then end."""

    drain_s: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing but time has passed."""


Input = Submit | Cancel | LoaderSaid | LoaderEnded | EngineSaid | EngineEnded | Drain | Tick


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
