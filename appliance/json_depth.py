"""How deep objects and lists lie in each other, and how many values there are."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

MAX_DEPTH = 200
"""Of what a request brings. Whoever walks through a value, templates too, calls itself for every level."""


def depth_of(value: Any) -> int:
    """Of a JSON value; 0 for one without objects and lists."""
    return sum(1 for _ in values_by_level(value)) - 1


def values_by_level(value: Any) -> Iterator[int]:
    """How many values there are on each level of a JSON value, from the outside. Other threads get their turn between two levels, and
    nobody calls himself."""
    level: list[Collection[Any]] = [[value]]
    while level:
        yield sum(map(len, level))
        inner = [item for items in level for item in items if isinstance(item, (dict, list))]
        level = [item.values() if isinstance(item, dict) else item for item in inner]
