"""What the memory gives: bytes per second that so many threads read together."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

PART_BYTES = 256 << 20
REPEATS = 5


def read_bandwidth(num_threads: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second; the best of some passes of the C library's search for a byte that is not there."""
    search = ctypes.CDLL(None).memchr
    search.argtypes, search.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    parts = [np.ones(PART_BYTES, np.uint8) for _ in range(num_threads)]
    return max(_pass(search, parts, clock) for _ in range(REPEATS))


def _pass(search: Callable[[int, int, int], object], parts: list[NDArray[np.uint8]], clock: Callable[[], float]) -> float:
    threads = [threading.Thread(target=search, args=(part.ctypes.data, 0, part.nbytes)) for part in parts]
    start = clock()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(parts) * PART_BYTES / (clock() - start)
