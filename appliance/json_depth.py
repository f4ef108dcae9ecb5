"""How deep objects and lists lie in each other."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 200
"""Of what a request brings. Whoever walks through a value, templates too, calls itself for every level."""


def depth_of(value: Any) -> int:
    """Of a JSON value; 0 for one without objects and lists. Level by level: other threads get their turn in between, and nobody calls
    himself."""
    depth, level = -1, [iter([value])]
    while level:
        depth += 1
        inner = [item for items in level for item in items if isinstance(item, (dict, list))]
        level = [iter(item.values() if isinstance(item, dict) else item) for item in inner]
    return depth
