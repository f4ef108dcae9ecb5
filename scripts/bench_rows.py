"""Speed of the row kernels: GB/s of weights per type and instruction set on one thread, beside ggml's vec_dot.

    python scripts/bench_rows.py [--types Q4_K,IQ3_S] [--inputs 1,8,64] [--mebibytes 64] [--repeats 5]

The weights are random blocks, more than the caches hold. ggml's kernels come from the wheel `libggml-python` where it is
installed; they are timed on the same bytes in the same run, with activations in the form they want. One thread and its processor
time, in pieces of a mebibyte, each's best of the repeats. The last columns are ours (the best instruction set) against ggml, by the
number of input rows; ggml's kernels take the rows one after the other.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cuda_ext import _native

ROW_VALUES = 2048
GGML_ROWS = 8
PIECE_BYTES = 1 << 20
"""Of weights that are timed together."""


class _CpuTraits(ctypes.Structure):
    _fields_ = (
        ("from_float", ctypes.c_void_p),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    )


_VEC_DOT = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
)
_FROM_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class Ggml:
    """ggml's CPU row kernels through ctypes."""

    def __init__(self, folder: Path) -> None:
        ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        self._cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"))
        self._cpu.ggml_cpu_init()
        self._cpu.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_CpuTraits)

    def row_dot(self, type_id: int, weights: NDArray[np.uint8], x: NDArray[np.float32]) -> Callable[[], None]:
        """One pass over the weights, in rows of x's length, with one input row. Each row is a call from Python."""
        traits = self._cpu.ggml_get_type_traits_cpu(type_id).contents
        act_traits = self._cpu.ggml_get_type_traits_cpu(traits.vec_dot_type).contents
        act = np.zeros(x.nbytes + 4096, np.uint8)
        if act_traits.from_float:
            _FROM_FLOAT(act_traits.from_float)(x.ctypes.data, act.ctypes.data, x.size)
        else:
            act[: x.nbytes] = x.view(np.uint8)
        vec_dot, out = _VEC_DOT(traits.vec_dot), ctypes.c_float()
        address, stride, rows = weights.ctypes.data, weights.shape[1], range(weights.shape[0])

        def run() -> None:
            for row in rows:
                vec_dot(x.size, ctypes.addressof(out), 0, address + row * stride, 0, act.ctypes.data, 0, 1)

        return run


def find_ggml() -> Ggml | None:
    spec = importlib.util.find_spec("libggml")
    if spec is None or spec.origin is None:
        return None
    return Ggml(Path(spec.origin).parent / "lib64")


@dataclass(frozen=True)
class Workload:
    type_id: int
    weights: NDArray[np.uint8]

    @classmethod
    def random(cls, name: str, mebibytes: int) -> Workload:
        """Rows of finite blocks: a few hundred random ones, repeated."""
        type_id, block_values, block_bytes = _native.quant_types()[name]
        rng = np.random.default_rng(0)
        pool = rng.integers(0, 256, (512, block_bytes), dtype=np.uint8)
        finite = [block for block in pool if _native.first_bad_block(type_id, block) is None]
        row_bytes = ROW_VALUES // block_values * block_bytes
        num_rows = (mebibytes << 20) // row_bytes
        picks = rng.integers(0, len(finite), num_rows * (ROW_VALUES // block_values))
        return cls(type_id, np.stack(finite)[picks].reshape(num_rows, row_bytes))


def best_seconds(runs: Sequence[Callable[[], None]], repeats: int) -> float:
    """The sum of each run's best processor time: what else goes on on the machine rarely disturbs a short run every time."""
    best = [math.inf] * len(runs)
    for _ in range(repeats):
        for index, run in enumerate(runs):
            start = time.thread_time()
            run()
            best[index] = min(best[index], time.thread_time() - start)
    return sum(best)


def pieces(weights: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    return np.array_split(weights, max(1, weights.nbytes // PIECE_BYTES))


def rate(work: Workload, num_inputs: int, isa: str, repeats: int) -> float:
    """GB/s of weights, each read once for all input rows."""
    x = np.random.default_rng(1).standard_normal((num_inputs, ROW_VALUES)).astype(np.float32)

    def dot(weights: NDArray[np.uint8]) -> Callable[[], None]:
        out = np.empty((num_inputs, len(weights)), np.float32)
        return lambda: _native.dot(work.type_id, weights, x, out, isa)

    return work.weights.nbytes / best_seconds([dot(piece) for piece in pieces(work.weights)], repeats) / 1e9


def ggml_rate(ggml: Ggml, work: Workload, repeats: int) -> float:
    """As `rate` for one input row. Eight rows are joined to one, and what the calls cost (on empty rows) is taken off."""
    num_rows = work.weights.shape[0] // GGML_ROWS
    weights = work.weights[: num_rows * GGML_ROWS].reshape(num_rows, -1)
    x = np.random.default_rng(1).standard_normal(ROW_VALUES * GGML_ROWS).astype(np.float32)
    seconds = best_seconds([ggml.row_dot(work.type_id, piece, x) for piece in pieces(weights)], repeats)
    calls = best_seconds([ggml.row_dot(0, np.zeros((len(piece), 0), np.uint8), x[:0]) for piece in pieces(weights)], repeats)
    return weights.nbytes / (seconds - calls) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=",".join(_native.quant_types()), help="names, comma-separated (default: all)")
    parser.add_argument("--isas", default=",".join(_native.isas()), help="instruction sets (default: all that run here)")
    parser.add_argument("--inputs", default="1,8,64", help="numbers of input rows (default: 1,8,64)")
    parser.add_argument("--mebibytes", type=int, default=32, help="of weights (default: 32)")
    parser.add_argument("--repeats", type=int, default=5, help="of which the best counts (default: 5)")
    options = parser.parse_args()
    inputs, isas = [int(n) for n in options.inputs.split(",")], options.isas.split(",")
    columns = [(isa, n) for isa in isas for n in inputs if isa != "portable" or n == inputs[0] or isas == [isa]]
    ggml = find_ggml()
    print(
        f"{'type':8}"
        + "".join(f"{isa + ' x' + str(n):>14}" for isa, n in columns)
        + f"{'ggml x1':>10}"
        + "".join(f"{'ratio x' + str(n):>11}" for n in inputs)
    )
    print("GB/s of weights, each read once for all inputs")
    for name in options.types.split(","):
        work = Workload.random(name, options.mebibytes)
        rates = {(isa, n): rate(work, n, isa, options.repeats if isa != "portable" else 1) for isa, n in columns}
        line = f"{name:8}" + "".join(f"{rates[column]:14.2f}" for column in columns)
        if ggml is not None:
            theirs = ggml_rate(ggml, work, options.repeats)
            line += f"{theirs:10.2f}" + "".join(f"{n * rates[isas[-1], n] / theirs:11.2f}" for n in inputs)
        print(line, flush=True)


if __name__ == "__main__":
    main()
