"""What a case has seen: sentences about what is wrong, and numbers worth keeping."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Findings:
    failures: list[str] = field(default_factory=list)
    notes: dict[str, object] = field(default_factory=dict)

    def expect(self, holds: bool, sentence: str) -> None:
        if not holds:
            self.failures.append(sentence)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Keeps the seconds of a block as a note."""
        start = time.perf_counter()
        yield
        self.notes[name] = round(time.perf_counter() - start, 4)


@dataclass(frozen=True)
class Part:
    """One row of a case that has several."""

    name: str
    seconds: float
    findings: Findings
