"""The host engine beside llama.cpp: decode and prompts by expert type, with the share of the memory's bandwidth.

    python -m scripts.bench_host --folder DIR [--types Q4_K,IQ3_S] [--threads N] [--llama BUILD_DIR] [--quick]

For each type a synthetic model of twelve layers is written into DIR (4 to 8 GB; its experts lie in /dev/shm once more while it is
measured). Both engines read the same file with the same threads in the same run, by turns; medians. llama.cpp is the wheel
`xllamacpp`, in a process of its own, or `llama-bench` of a build of yours; `--repack 0` in both cases. Writes
docs/benchmarks/host.md and host.json; `--quick` (two layers, three repeats) only prints.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from scripts.host_bench.contestants import ROOT, Contestant, LlamaBench, Measured, child
from scripts.host_bench.memory import read_bandwidth
from scripts.host_bench.model import DENSE_TYPE, HEAD_TYPE, BenchModel, qwen3_shape, write_model

TYPES = "Q4_K,Q5_K,Q6_K,Q8_0,Q5_1,IQ4_XS,IQ4_NL,IQ3_S,IQ3_XXS,IQ2_XS,MXFP4"
PAGE = ROOT / "docs" / "benchmarks" / "host.md"
CONTEXT = 4096
GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    num_layers: int
    repeats: int
    decode: int
    prompts: tuple[int, ...]

    @property
    def tasks(self) -> list[tuple[str, int]]:
        return [("decode", self.decode), *(("prompt", num) for num in self.prompts)]


FULL = Plan(num_layers=12, repeats=7, decode=32, prompts=(128, 512, 2048))
QUICK = Plan(num_layers=2, repeats=3, decode=16, prompts=(128, 512))


@dataclass(frozen=True)
class Figure:
    """One task of one type: tokens per second (medians) of both, and their spread as (slowest, fastest)."""

    task: str
    num_tokens: int
    ours: float
    theirs: float
    ours_range: tuple[float, float]
    theirs_range: tuple[float, float]

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


@dataclass(frozen=True)
class TypeResult:
    expert_type: str
    figures: list[Figure]
    ours_resident_bytes: int
    theirs_resident_bytes: int
    bytes_per_token: int

    def bandwidth_share(self, bandwidth: float) -> float:
        return self.figures[0].ours * self.bytes_per_token / bandwidth


def measure_type(model: BenchModel, plan: Plan, num_threads: int, llama: Path | None) -> TypeResult:
    shm_dir = Path(tempfile.mkdtemp(prefix="tandem-bench-", dir="/dev/shm"))
    runs: dict[tuple[str, int], tuple[list[Measured], list[Measured]]] = {task: ([], []) for task in plan.tasks}
    try:
        with child("ours", model, num_threads, shm_dir) as ours, _llama(model, num_threads, llama, shm_dir) as theirs:
            for repeat in range(plan.repeats + 1):
                for task in plan.tasks:
                    pair = ours.measure(*task), theirs.measure(*task)
                    if repeat == 0:  # pages are read in
                        continue
                    for measured, into in zip(pair, runs[task], strict=True):
                        into.append(measured)
    finally:
        shutil.rmtree(shm_dir)
    figures = [_figure(*task, *pair) for task, pair in runs.items()]
    ours_resident, theirs_resident = (max(m.resident_bytes for pair in runs.values() for m in pair[side]) for side in (0, 1))
    return TypeResult(model.expert_type, figures, ours_resident, theirs_resident, model.bytes_per_token)


@contextmanager
def _llama(model: BenchModel, num_threads: int, folder: Path | None, shm_dir: Path) -> Iterator[Contestant]:
    if folder is not None:
        yield LlamaBench(folder, model, num_threads)
        return
    with child("llama", model, num_threads, shm_dir) as contestant:
        yield contestant


def _figure(task: str, num_tokens: int, ours: list[Measured], theirs: list[Measured]) -> Figure:
    def rates(measured: list[Measured]) -> list[float]:
        return [num_tokens / m.seconds for m in measured]

    mine, yours = rates(ours), rates(theirs)
    return Figure(task, num_tokens, statistics.median(mine), statistics.median(yours), (min(mine), max(mine)), (min(yours), max(yours)))


def table(results: list[TypeResult], bandwidth: float) -> str:
    """Markdown: tokens per second of both, their ratio, memory and bandwidth."""
    tasks = [f"{figure.task} {figure.num_tokens}" for figure in results[0].figures]
    head = ["experts", *(f"{task}: ours / llama.cpp" for task in tasks), "resident GiB: ours / llama.cpp", "share of bandwidth"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for result in results:
        cells = [f"{figure.ours:.1f} / {figure.theirs:.1f} = **{figure.ratio:.2f}**" for figure in result.figures]
        memory = f"{result.ours_resident_bytes / GIB:.2f} / {result.theirs_resident_bytes / GIB:.2f}"
        lines.append("| " + " | ".join([result.expert_type, *cells, memory, f"{result.bandwidth_share(bandwidth):.0%}"]) + " |")
    return "\n".join(lines)


def cpu_name() -> str:
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _llama_name(folder: Path | None) -> str:
    if folder is not None:
        return "llama-bench"
    return f"the wheel xllamacpp {version('xllamacpp')}"


def page(results: list[TypeResult], bandwidth: float, num_threads: int, llama: Path | None) -> str:
    return f"""# The host engine beside llama.cpp

Tokens per second of the whole engine on the CPU, medians of {FULL.repeats}, both by turns in one run: {cpu_name()}, {num_threads}
threads, which together read {bandwidth / 1e9:.1f} GB/s. The model is synthetic: {FULL.num_layers} layers in the shape of Qwen3-30B-A3B,
experts of the named type, {DENSE_TYPE} attention and embedding, {HEAD_TYPE} head. llama.cpp: {_llama_name(llama)}, `--repack 0`. Written by

    python -m scripts.bench_host --folder DIR

{table(results, bandwidth)}

*Share of bandwidth*: bytes of weights that a decoded token reads, times tokens per second, over what the memory gives. Spreads
stand in `host.json`.
"""


def check_space(folder: Path, models: list[BenchModel]) -> None:
    """Files are removed one after the other, so the largest one counts. Raises SystemExit."""
    largest = max(model.file_bytes for model in models)
    for place, needed in ((folder, largest), (Path("/dev/shm"), largest)):
        free = shutil.disk_usage(place).free
        if free < needed * 1.05:
            raise SystemExit(f"{place} has {free / GIB:.1f} GiB free, but the largest model needs {needed / GIB:.1f} GiB there")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for the model files")
    parser.add_argument("--types", default=TYPES, help=f"of the experts, comma-separated (default: {TYPES})")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of both engines (default: usable cores)")
    parser.add_argument("--llama", type=Path, help="folder with a llama-bench (default: the wheel xllamacpp)")
    parser.add_argument("--quick", action="store_true", help="two layers, three repeats, nothing written")
    parser.add_argument("--keep", action="store_true", help="leave the model files in the folder")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    shape = qwen3_shape(plan.num_layers, CONTEXT)
    models = [BenchModel(options.folder / f"bench-{plan.num_layers}-{name}.gguf", shape, name) for name in options.types.split(",")]
    check_space(options.folder, models)
    bandwidth = read_bandwidth(options.threads)
    print(f"{cpu_name()}, {options.threads} threads: {bandwidth / 1e9:.1f} GB/s")
    results: list[TypeResult] = []
    for model in models:
        write_model(model)
        results.append(measure_type(model, plan, options.threads, options.llama))
        print(table(results[-1:], bandwidth), flush=True)
        if not options.keep:
            model.path.unlink()
    if not options.quick:
        PAGE.write_text(page(results, bandwidth, options.threads, options.llama))
        figures = {"cpu": cpu_name(), "threads": options.threads, "bandwidth": bandwidth, "types": [asdict(result) for result in results]}
        PAGE.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
