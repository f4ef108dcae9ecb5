"""Speed of the row kernels on one thread: GB/s of weights per type, beside ggml's matrix product on the same bytes.

    python -m scripts.bench_rows [--isa avx2] [--ggml DIR] [--types Q4_K,IQ3_S] [--inputs 1,8,64] [--mebibytes 32] [--repeats 5]
    python -m scripts.bench_rows ... --out docs/benchmarks/rows-avx2.json    keeps the figures, and writes the tables
    python -m scripts.bench_rows --table                                          writes the tables of docs/benchmarks/host-rows.md anew

Weights are random blocks, read once for all input rows of a product. ggml is the wheel `libggml-python` where it is installed, or
with --ggml a build of one's own: the folder of its libggml-base.so and libggml-cpu.so. Both sides multiply the same bytes by turns, and
quantise the input rows in the time measured. It is processor time, in pieces of a mebibyte, each's best of the repeats.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cuda_ext import _native
from scripts.result_file import read_result

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
PAGE = FOLDER / "host-rows.md"
BEGIN, END = "<!-- tables: python -m scripts.bench_rows --table -->", "<!-- end of tables -->"
ROW_VALUES = 2048
LEAST_VALUE = 1e-12
PIECE_BYTES = 1 << 20
"""Of weights that are timed together."""


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _Plan(ctypes.Structure):
    """ggml_cplan; the last fields are not read by every version."""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
    )


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
        self._cpu.ggml_graph_plan.argtypes, self._cpu.ggml_graph_plan.restype = (pointer, ctypes.c_int, pointer), _Plan
        self._cpu.ggml_graph_compute.argtypes = (pointer, ctypes.POINTER(_Plan))

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
        plan = self._cpu.ggml_graph_plan(graph, 1, None)
        work = ctypes.create_string_buffer(plan.work_size + 64)
        plan.work_data = (ctypes.addressof(work) + 63) & ~63
        try:
            yield lambda: self._cpu.ggml_graph_compute(graph, ctypes.byref(plan))
        finally:
            self._base.ggml_free(context)


def find_ggml(folder: Path | None) -> Ggml:
    """Raises SystemExit if there is none."""
    if folder is None:
        spec = importlib.util.find_spec("libggml")
        if spec is None or spec.origin is None:
            raise SystemExit("there is no ggml: install libggml-python, or name the folder of a build with --ggml")
        folder = Path(spec.origin).parent / "lib64"
    return Ggml(folder)


@dataclass(frozen=True)
class Workload:
    type_id: int
    weights: NDArray[np.uint8]

    @classmethod
    def random(cls, name: str, mebibytes: int) -> Workload:
        """Rows of a few hundred random blocks, repeated, whose values are of a size that weights have: arithmetic with subnormal numbers
        takes many times as long."""
        type_id, block_values, block_bytes = _native.quant_types()[name]
        rng = np.random.default_rng(0)
        pool = rng.integers(0, 256, (512, block_bytes), dtype=np.uint8)
        usual = [block for block in pool if has_usual_values(type_id, block)]
        row_bytes = ROW_VALUES // block_values * block_bytes
        num_rows = (mebibytes << 20) // row_bytes
        picks = rng.integers(0, len(usual), num_rows * (ROW_VALUES // block_values))
        return cls(type_id, np.stack(usual)[picks].reshape(num_rows, row_bytes))


def has_usual_values(type_id: int, block: NDArray[np.uint8]) -> bool:
    sizes = np.abs(_native.dequantise(type_id, block))
    return bool(np.all((sizes == 0) | (sizes > LEAST_VALUE) & (sizes < 1 / LEAST_VALUE)))


def pieces(weights: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    return np.array_split(weights, max(1, weights.nbytes // PIECE_BYTES))


def inputs_of(num: int) -> NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal((num, ROW_VALUES)).astype(np.float32)


Run = Callable[[], None]


def best_seconds(sides: Sequence[Sequence[Run]], repeats: int) -> list[float]:
    """Of each side the sum of its runs' best processor times, the sides by turns: what else goes on on the machine rarely disturbs
    a short run every time, and hits both sides."""
    best = [[math.inf] * len(runs) for runs in sides]
    for _ in range(repeats):
        for index in range(len(sides[0])):
            for side, runs in zip(best, sides, strict=True):
                start = time.thread_time()
                runs[index]()
                side[index] = min(side[index], time.thread_time() - start)
    return [sum(times) for times in best]


@dataclass(frozen=True)
class Rates:
    """GB/s of weights, each read once for all input rows; by number of input rows."""

    type_name: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...]


@dataclass(frozen=True)
class RowsRun:
    date: str
    cpu: str
    isa: str
    ggml: str
    command: str
    load: float
    """The machine's load average when it ended."""
    inputs: tuple[int, ...]
    rates: tuple[Rates, ...]

    @classmethod
    def read(cls, path: Path) -> RowsRun:
        fields = json.loads(path.read_text())
        rates = tuple(Rates(each["type_name"], tuple(each["ours"]), tuple(each["theirs"])) for each in fields.pop("rates"))
        return cls(**{**fields, "inputs": tuple(fields["inputs"])}, rates=rates)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def rates(ggml: Ggml, work: Workload, name: str, inputs: Sequence[int], isa: str, repeats: int) -> Rates:
    figures = []
    parts = [np.ascontiguousarray(piece) for piece in pieces(work.weights)]
    for num_inputs in inputs:
        x = inputs_of(num_inputs)

        def dot(weights: NDArray[np.uint8], x: NDArray[np.float32] = x) -> Run:
            out = np.empty((len(x), len(weights)), np.float32)
            return lambda: _native.dot(work.type_id, weights, x, out, isa)

        with ExitStack() as stack:
            theirs = [stack.enter_context(ggml.product(work.type_id, part, x)) for part in parts]
            seconds = best_seconds([[dot(part) for part in parts], theirs], repeats)
        figures.append([work.weights.nbytes / each / 1e9 for each in seconds])
    return Rates(name, tuple(ours for ours, _ in figures), tuple(other for _, other in figures))


def table(run: RowsRun) -> str:
    cells = [f"{rows} row{'s' if rows > 1 else ''}" for rows in run.inputs]
    lines = [
        f"### {run.cpu} ({run.isa})",
        "",
        f"{run.date}, ggml: {run.ggml}, load {run.load:.0f}. GB/s, ours / ggml's = ratio.",
        "",
        f"    {run.command}",
        "",
        "| type | " + " | ".join(cells) + " |",
        "|---" * (1 + len(cells)) + "|",
    ]
    for each in run.rates:
        pairs = zip(each.ours, each.theirs, strict=True)
        lines.append(f"| {each.type_name} | " + " | ".join(f"{a:#.3g} / {b:#.3g} = **{a / b:.2f}**" for a, b in pairs) + " |")
    return "\n".join(lines)


def write_tables() -> None:
    head, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    tables = [table(read_result(path, RowsRun.read, "scripts.bench_rows")) for path in sorted(FOLDER.glob("rows-*.json"))]
    PAGE.write_text("\n\n".join([head + BEGIN, *tables, END + tail]))


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=",".join(_native.quant_types()), help="names, comma-separated (default: all)")
    parser.add_argument("--isa", default=_native.isas()[-1], choices=_native.isas(), help="instruction set (default: the best)")
    parser.add_argument("--ggml", type=Path, help="folder of the libraries of a ggml (default: the wheel libggml-python)")
    parser.add_argument("--ggml-name", default="the wheel libggml-python", help="what the table calls it")
    parser.add_argument("--inputs", default="1,8,64", help="numbers of input rows (default: 1,8,64)")
    parser.add_argument("--mebibytes", type=int, default=32, help="of weights (default: 32)")
    parser.add_argument("--repeats", type=int, default=5, help="of which the best counts (default: 5)")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--table", action="store_true", help="only write the tables of the page anew")
    options = parser.parse_args()
    if options.table:
        write_tables()
        return
    ggml, inputs = find_ggml(options.ggml), tuple(int(num) for num in options.inputs.split(","))
    print(f"{'type':8}" + "".join(f"{f'{side} x{num}':>11}" for num in inputs for side in ("ours", "ggml", "ratio")))
    found = []
    for name in options.types.split(","):
        each = rates(ggml, Workload.random(name, options.mebibytes), name, inputs, options.isa, options.repeats)
        found.append(each)
        figures = [(ours, theirs, ours / theirs) for ours, theirs in zip(each.ours, each.theirs, strict=True)]
        print(f"{name:8}" + "".join(f"{figure:11.2f}" for group in figures for figure in group), flush=True)
    if options.out is not None:
        asked = [f"--isa {options.isa}", f"--inputs {options.inputs}", f"--mebibytes {options.mebibytes}", f"--repeats {options.repeats}"]
        command = " ".join(["python -m scripts.bench_rows", *(["--ggml DIR"] if options.ggml else []), *asked])
        date = datetime.now(UTC).strftime("%-d %B %Y")
        run = RowsRun(date, cpu_name(), options.isa, options.ggml_name, command, os.getloadavg()[0], inputs, tuple(found))
        run.write(options.out)
        if options.out.resolve().parent == FOLDER:
            write_tables()


if __name__ == "__main__":
    main()
