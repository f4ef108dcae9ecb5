"""Says why something does not fit, and what would help. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from appliance.errors import MemoryBudgetError
from appliance.units import format_bytes

SHOWN_CONSUMERS = 3


@dataclass(frozen=True, slots=True)
class Shortage:
    """A place that must hold more than it can."""

    place: str
    """What must hold it: a card, host memory, the folder of the arena."""
    limit_source: str
    """Who sets the limit, as a clause that takes "allows"."""
    limit_bytes: int
    consumers: Mapping[str, int]
    """Bytes by consumer; together they are what is needed."""
    remedy: str | None = None
    """What helps beside changing a setting, as a command."""

    @property
    def needed_bytes(self) -> int:
        return sum(self.consumers.values())


@dataclass(frozen=True, slots=True)
class Change:
    """Another value of one setting, and what is still short with it."""

    setting: str
    value: str
    shortages: tuple[Shortage, ...]
    needed_bytes: int
    """In the place that was short, with this value."""


def shortage_error(shortage: Shortage, changes: Sequence[Change]) -> MemoryBudgetError:
    """One sentence: the sizes, the largest consumers, and the change that frees most in that place."""
    largest = sorted(shortage.consumers.items(), key=lambda item: -item[1])[:SHOWN_CONSUMERS]
    consumers = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in largest if nbytes)
    most = "its largest consumers are" if len(shortage.consumers) > 1 else "for"
    sentence = (
        f"the model does not fit: {shortage.place} must hold {format_bytes(shortage.needed_bytes)}, but {shortage.limit_source} "
        f"allows {format_bytes(shortage.limit_bytes)}; {most} {consumers}; {_advice(shortage, changes)}"
    )
    best = _best(shortage, changes)
    return MemoryBudgetError(sentence, param=best.setting if best else None)


def _advice(shortage: Shortage, changes: Sequence[Change]) -> str:
    best = _best(shortage, changes)
    if best is None:
        lacking = format_bytes(shortage.needed_bytes - shortage.limit_bytes)
        return shortage.remedy or f"no setting frees anything there, so give it {lacking} more or take a smaller quantisation of the model"
    freed = format_bytes(shortage.needed_bytes - best.needed_bytes)
    sentence = f"{best.setting} = {best.value} frees the most there ({freed})"
    if not best.shortages:
        sentence += " and is enough"
    else:
        still = max(short.needed_bytes - short.limit_bytes for short in best.shortages)
        sentence += f" but {format_bytes(still)} are still lacking, so a smaller quantisation of the model is needed too"
    return f"{sentence}, or {shortage.remedy}" if shortage.remedy else sentence


def _best(shortage: Shortage, changes: Sequence[Change]) -> Change | None:
    """The change that makes everything fit, or else the one that comes nearest; of equals, the one that frees most."""
    helping = [change for change in changes if change.needed_bytes < shortage.needed_bytes]
    return min(helping, key=lambda change: (bool(change.shortages), change.needed_bytes), default=None)
