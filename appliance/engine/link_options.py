"""How one engine takes part in a link. Without native code: the command line is read before any is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Where the other engine is met."""

    path: Path
    role: int
    """0: the lead, 1: the helper."""
    num_threads: int = 1
    """That compute the other engine's rows."""
    stuck_after_s: float = 3.0
    """An engine that makes no progress for so long is given up until it does again."""
