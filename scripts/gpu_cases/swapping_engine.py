"""The real engine with a policy that swaps in every window, useful or not: python -m scripts.gpu_cases.swapping_engine OPTIONS"""

from __future__ import annotations

import sys

from appliance.engine import model_runner, process
from appliance.memory.policy import AlwaysSwap, FloatTable, IntTable


def _always(blob_bytes: IntTable, uses: FloatTable, *, experts_per_row: int) -> AlwaysSwap:
    del uses, experts_per_row
    return AlwaysSwap(blob_bytes)


if __name__ == "__main__":
    model_runner.SwapPolicy = _always  # type: ignore[assignment, misc]
    sys.exit(process.main())
