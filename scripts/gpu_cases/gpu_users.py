"""Which engine has memory on which GPU, by process, as the driver tells. Where it names none of ours, nothing is judged.

The lead keeps a context on the second card while the helper is awake, and may not have more there than that: the slots are gone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from appliance.desk.status import PairPhase
from appliance.memory.gpus import VISIBLE
from appliance.units import MIB
from scripts.gpu_cases.findings import Findings
from scripts.gpu_cases.pair_desk import PairDesk

LEAST_SLOTS_BYTES = 4 * MIB
"""A part of the second card's slots that is more than what a context grows by itself."""


@dataclass(frozen=True)
class _Look:
    phase: PairPhase | None
    lead: list[int | None]
    """Bytes on each card."""
    helper: list[int | None]


class GpuUsers:
    """Confined to one thread."""

    def __init__(self, cards: Sequence[str]) -> None:
        self._cards = cards
        self._looks: list[_Look] = []

    def look(self, desk: PairDesk) -> None:
        """While the pair is at rest."""
        by_card = [process_bytes(card) for card in self._cards]
        lead, helper = ([users.get(desk.lane(name).pid or 0) for users in by_card] for name in ("lead", "helper"))
        if any(lead):
            self._looks.append(_Look(desk.phase, lead, helper))

    def judge(self, found: Findings) -> None:
        if not self._cards[0].startswith("cuda:"):
            return
        if not self._looks:
            found.notes["memory by process"] = "not judged: the driver names no process of ours"
            return
        found.notes["MiB of lead and helper on both cards"] = [
            [str(look.phase), _mib(look.lead), _mib(look.helper)] for look in self._looks
        ]
        for look in self._looks:
            found.expect(not look.helper[0], f"the helper has {(look.helper[0] or 0) / MIB:.0f} MiB on the first card")
        for before, after in pairwise(self._looks):
            if (before.phase, after.phase) == (PairPhase.AWAKE, PairPhase.ASLEEP):
                taken = (after.lead[1] or 0) - (before.lead[1] or 0)
                found.expect(
                    taken >= LEAST_SLOTS_BYTES,
                    f"the lead had its slots on the second card beside the helper: it took {taken / MIB:.1f} MiB later",
                )


def process_bytes(card: str) -> dict[int, int]:
    """Memory of a GPU by process. Empty for a host card, and where the driver does not tell."""
    if not card.startswith("cuda:") or os.environ.get(VISIBLE):
        return {}
    import pynvml

    with _nvml() as is_there:
        if not is_there:
            return {}
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(card.partition(":")[2]))
        return {one.pid: one.usedGpuMemory or 0 for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}


@contextlib.contextmanager
def _nvml() -> Iterator[bool]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def _mib(sizes: Sequence[int | None]) -> list[int]:
    return [round((nbytes or 0) / MIB) for nbytes in sizes]
