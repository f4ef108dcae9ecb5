"""Runs single native operations: arrays in, arrays out, every output surrounded by sentinels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cuda_ext import _native as native

GUARD_BYTES = 256
SENTINEL = 0xA5

Floats = NDArray[np.float32]


class OpRig:
    """One host card and one program. `give` puts arrays into its memory, `take` reserves outputs, `run` runs what was recorded."""

    def __init__(
        self, max_rows: int, *, isa: str = "auto", num_threads: int = 1, context: int = 2048, vocab: int = 64, max_logits: int | None = None
    ) -> None:
        self._guarded: list[native.View] = []
        self.pool = native.Pool(num_threads)
        self.card = native.HostCard(self.pool, native.isas()[-1] if isa == "auto" else isa)
        self.program = native.Program(max_rows, max_logits or max_rows, context, vocab, tokens=self.take(max_rows * 4))
        self.recorder = native.Recorder(self.program, self.card)

    def give(self, array: NDArray[np.generic]) -> native.View:
        """Card memory holding the array's bytes."""
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        view = self.card.allocate("given", data.size)
        view.bytes()[:] = data
        return view

    def take(self, nbytes: int) -> native.View:
        """Output memory between guards; `check_guards` tells whether anything was written beyond it."""
        whole = self.card.allocate("taken", -(-nbytes // 64) * 64 + 2 * GUARD_BYTES)
        whole.bytes()[:] = SENTINEL
        tail = GUARD_BYTES + nbytes
        self._guarded += [whole.part(0, GUARD_BYTES), whole.part(tail, whole.nbytes - tail)]
        return whole.part(GUARD_BYTES, nbytes)

    def run(self, num_rows: int, *, position: int = 0, num_logits: int = 0, tokens: Sequence[int] | None = None) -> None:
        ids = np.zeros(num_rows, np.int32) if tokens is None else np.array(tokens, np.int32)
        self.card.run(self.program, ids, position, num_logits)
        assert all((guard.bytes() == SENTINEL).all() for guard in self._guarded), "an operation wrote beyond its output"


def floats(view: native.View, *shape: int) -> Floats:
    """The memory as float32 of a shape, copied."""
    return view.bytes()[: 4 * int(np.prod(shape))].view(np.float32).reshape(shape).copy()


def router_sums(scores: Floats) -> NDArray[np.int64]:
    """Scores [rows, experts] in the router's fixed point (ops/router_sum.h)."""
    return np.rint(scores.astype(np.float64) * 2.0**28).astype(np.int64)


def same_bits(a: Floats, b: Floats) -> bool:
    """Equality of every bit; a NaN equals the same NaN, +0 does not equal -0."""
    return a.shape == b.shape and bool((np.ascontiguousarray(a).view(np.uint32) == np.ascontiguousarray(b).view(np.uint32)).all())


def every_isa() -> list[str]:
    """The instruction sets that run here."""
    return list(native.isas())
