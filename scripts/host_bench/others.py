"""What else keeps the machine busy: a figure beside a noisy neighbour says little, so the neighbour stands beside the figure."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
IDLE_COLUMNS = (3, 4)
"""Of the line `cpu` in /proc/stat: idle, and waiting for a disk."""
GUEST_COLUMN = 8
"""From here on time is counted that earlier columns hold already."""


@dataclass(frozen=True)
class CpuTime:
    """Seconds of processor time that were spent up to one moment: by all, and by some processes of ours."""

    moment: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls, own: Sequence[int]) -> CpuTime:
        return cls(time.monotonic(), _all_seconds(), sum(map(_own_seconds, own)))

    def others_since(self, earlier: CpuTime) -> float:
        """Cores that others kept busy in between, on average."""
        wall = max(self.moment - earlier.moment, 1 / TICKS)
        return max(0.0, (self.all_s - earlier.all_s - (self.own_s - earlier.own_s)) / wall)


def wait_for_quiet(limit_s: float, busy_cores: float) -> None:
    """Returns once others keep less than `busy_cores` busy, or after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        before = CpuTime.now([])
        time.sleep(min(0.5, limit_s))
        if CpuTime.now([]).others_since(before) < busy_cores:
            return


def _all_seconds() -> float:
    columns = Path("/proc/stat").read_text().splitlines()[0].split()[1 : 1 + GUEST_COLUMN]
    return sum(int(ticks) for column, ticks in enumerate(columns) if column not in IDLE_COLUMNS) / TICKS


def _own_seconds(process_id: int) -> float:
    """With the children that it has waited for."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS
