"""A real engine with a fault: told to give the second card back, it says that it has, and goes on to use it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from appliance.engine import process
from appliance.engine.peer import PeerTier


def _keeps(_tier: PeerTier) -> Iterator[None]:
    yield from ()


if __name__ == "__main__":
    PeerTier.detaching = _keeps  # type: ignore[method-assign]
    sys.exit(process.main())
