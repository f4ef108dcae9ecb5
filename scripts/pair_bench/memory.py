"""Memory of a virtual machine that begins small and grows as it is used: takes some, so that it is there, and gives it back.

    python -m scripts.pair_bench.memory GIB

A plan of memory goes by what there is now. Ends at once where the machine has that much; never run it where memory does not grow.
"""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path

import numpy as np

from appliance.units import GIB

PAGE_BYTES = 4096
PLENTY_BYTES, LEAST_BYTES = 8 * GIB, GIB
"""Free memory under which it waits for the machine to grow, for others' sake and for its own."""
PAUSE_S, PATIENCE_S = 1.0, 10.0
"""How long it waits for either."""


def main() -> int:
    wanted = int(sys.argv[1]) * GIB
    Path("/proc/self/oom_score_adj").write_text("1000")  # if someone must go, then this process
    held: list[mmap.mmap] = []
    while (total := _sizes()["MemTotal"]) < wanted:
        if not _wait_for_room():
            break
        held.append(mmap.mmap(-1, GIB))
        np.frombuffer(held[-1], np.uint8)[::PAGE_BYTES] = 1
    print(f"the machine has {total / GIB:.0f} GiB now")
    return 0 if total >= wanted else 1


def _wait_for_room() -> bool:
    """False if the machine stopped growing."""
    start = time.monotonic()
    while (waited := time.monotonic() - start) < PATIENCE_S:
        if _sizes()["MemAvailable"] >= (PLENTY_BYTES if waited < PAUSE_S else LEAST_BYTES):
            return True
        time.sleep(0.05)
    return False


def _sizes() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}


if __name__ == "__main__":
    sys.exit(main())
