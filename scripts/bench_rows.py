"""Speed of the row kernels on one thread: GB/s of weights per type and instruction set, beside ggml's matrix product.

    python scripts/bench_rows.py [--types Q4_K,IQ3_S] [--inputs 1,8,64] [--mebibytes 64] [--repeats 5]

Weights are random blocks, read once for all input rows of a product. ggml comes from the wheel `libggml-python` where it is installed,
and multiplies the same bytes in the same run; both quantise the input rows in the time measured. It is processor time, in pieces of
a mebibyte, each's best of the repeats. Ratios are of the last instruction set.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cuda_ext import _native

ROW_VALUES = 2048
PIECE_BYTES = 1 << 20
"""Of weights that are timed together."""


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Ggml:
    """ggml's matrix product on the CPU through ctypes."""

    def __init__(self, folder: Path) -> None:
        self._base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        self._cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"))
        self._cpu.ggml_cpu_init()
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        for name, arguments in {
            "ggml_init": (_InitParams,),
            "ggml_new_tensor_2d": (pointer, ctypes.c_int, size, size),
            "ggml_get_data": (pointer,),
            "ggml_mul_mat": (pointer, pointer, pointer),
            "ggml_new_graph": (pointer,),
            "ggml_build_forward_expand": (pointer, pointer),
            "ggml_free": (pointer,),
        }.items():
            function = getattr(self._base, name)
            function.argtypes, function.restype = arguments, pointer
        self._cpu.ggml_graph_compute_with_ctx.argtypes = (pointer, pointer, ctypes.c_int)

    @contextmanager
    def product(self, type_id: int, weights: NDArray[np.uint8], x: NDArray[np.float32]) -> Iterator[Callable[[], None]]:
        """weights: [rows, row bytes], x: [inputs, values]. On one thread, the caller's."""
        memory = weights.nbytes + 8 * x.nbytes + 4 * len(weights) * len(x) + (1 << 20)
        context = self._base.ggml_init(_InitParams(memory, None, False))
        left = self._base.ggml_new_tensor_2d(context, type_id, x.shape[1], len(weights))
        right = self._base.ggml_new_tensor_2d(context, 0, x.shape[1], len(x))
        ctypes.memmove(self._base.ggml_get_data(left), weights.ctypes.data, weights.nbytes)
        ctypes.memmove(self._base.ggml_get_data(right), x.ctypes.data, x.nbytes)
        graph = self._base.ggml_new_graph(context)
        self._base.ggml_build_forward_expand(graph, self._base.ggml_mul_mat(context, left, right))
        try:
            yield lambda: self._cpu.ggml_graph_compute_with_ctx(context, graph, 1)
        finally:
            self._base.ggml_free(context)


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


def inputs_of(num: int) -> NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal((num, ROW_VALUES)).astype(np.float32)


def rate(work: Workload, num_inputs: int, isa: str, repeats: int) -> float:
    """GB/s of weights, each read once for all input rows."""
    x = inputs_of(num_inputs)

    def dot(weights: NDArray[np.uint8]) -> Callable[[], None]:
        out = np.empty((num_inputs, len(weights)), np.float32)
        return lambda: _native.dot(work.type_id, weights, x, out, isa)

    return work.weights.nbytes / best_seconds([dot(piece) for piece in pieces(work.weights)], repeats) / 1e9


def ggml_rate(ggml: Ggml, work: Workload, num_inputs: int, repeats: int) -> float:
    """As `rate`."""
    with ExitStack() as stack:
        x = inputs_of(num_inputs)
        products = [stack.enter_context(ggml.product(work.type_id, piece, x)) for piece in pieces(work.weights)]
        return work.weights.nbytes / best_seconds(products, repeats) / 1e9


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
    peers = [] if ggml is None else inputs
    names = [f"{isa} x{n}" for isa, n in columns] + [f"ggml x{n}" for n in peers] + [f"ratio x{n}" for n in peers]
    print(f"{'type':8}" + "".join(f"{name:>13}" for name in names))
    for name in options.types.split(","):
        work = Workload.random(name, options.mebibytes)
        rates = {(isa, n): rate(work, n, isa, options.repeats if isa != "portable" else 1) for isa, n in columns}
        theirs = {n: ggml_rate(ggml, work, n, options.repeats) for n in peers} if ggml is not None else {}
        figures = [*rates.values(), *theirs.values(), *(rates[isas[-1], n] / theirs[n] for n in peers)]
        print(f"{name:8}" + "".join(f"{figure:13.2f}" for figure in figures), flush=True)


if __name__ == "__main__":
    main()
