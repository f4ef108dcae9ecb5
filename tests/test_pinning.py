"""What a GPU's system does not pin of the arena is said, once."""

from __future__ import annotations

import numpy as np
import pytest
from structlog.testing import capture_logs

from appliance.engine.graph import pin_arena
from cuda_ext import _native as native


class FakeCard:
    """Pins so many bytes, whatever is asked."""

    def __init__(self, pinned_bytes: int) -> None:
        self._pinned_bytes = pinned_bytes

    def pin(self, arena: native.View) -> int:
        return self._pinned_bytes if arena.nbytes else 0


@pytest.mark.parametrize(("pinned_bytes", "left_bytes"), [(0, 1000), (600, 400), (1000, 0), (4096, 0)])
def test_what_stays_pageable_is_counted_and_said(pinned_bytes: int, left_bytes: int) -> None:
    memory = np.zeros(1000, np.uint8)
    with capture_logs() as logs:
        assert pin_arena(FakeCard(pinned_bytes), native.wrap_memory(memory.ctypes.data, memory.nbytes)) == left_bytes
    assert [line["log_level"] for line in logs] == (["warning"] if left_bytes else [])
