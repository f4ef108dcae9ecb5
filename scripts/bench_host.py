"""The host engine beside llama.cpp: decode and prompts by expert type, with the share of the memory's bandwidth.

    python -m scripts.bench_host --folder DIR                  measures everything, writes docs/benchmarks/host-ISA.json and host.md
    python -m scripts.bench_host --folder DIR --limit-s 200    as much of it as fits in 200 s, and says what did not
    python -m scripts.bench_host --table                       writes host.md anew from the JSON files beside it

For each type a synthetic model of twelve layers is written into DIR (3 to 8 GB; its experts lie in /dev/shm once more while it is
measured). Both engines read the same file with the same threads in the same run, by turns, flash attention on; medians of seven.
llama.cpp is the wheel `xllamacpp`, in a process of its own, or with --llama the `llama-bench` of a build of yours (`scripts.llama_source`);
without repacking in both cases.

On a machine that others keep busy, --threads 1 --clock processor compares processor time, which they disturb less.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from appliance.memory.limits import usable_cores
from appliance.units import GIB
from cuda_ext import _native
from scripts.host_bench.contestants import CLOCKS, Contestant, LlamaBench, Measured, Task, child
from scripts.host_bench.memory import read_bandwidth
from scripts.host_bench.model import BenchModel, qwen3_shape, write_model
from scripts.host_bench.others import CpuTime, wait_for_quiet
from scripts.host_bench.page import FOLDER, PAGE, stored_runs, table, write_tables
from scripts.host_bench.results import Figure, HostRun, TypeResult
from scripts.host_bench.routing import Routing
from scripts.result_file import read_result

TYPES = "Q4_K,Q5_K,Q6_K,Q8_0,Q5_1,IQ4_XS,IQ4_NL,IQ3_S,IQ3_XXS,IQ2_XS,MXFP4"
PROMPTS = "128,512,2048"
LAYERS, ROUNDS, DECODE = 12, 7, 32
QUIET_CORES = 0.2


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    tasks: tuple[Task, ...]
    rounds: int
    num_threads: int
    clock: str
    llama: Path | None
    quiet_s: float
    """How long each measurement waits at most for others to be quiet."""

    @property
    def longest_prompt(self) -> int:
        return max(task.num_tokens for task in self.tasks)


class Rounds:
    """Measures one type by turns until all rounds are made or the next measurement would end too late."""

    def __init__(self, plan: Plan, ours: Contestant, theirs: Contestant) -> None:
        self._plan = plan
        self._ours, self._theirs = ours, theirs
        self._pairs: dict[Task, list[tuple[Measured, Measured]]] = {task: [] for task in plan.tasks}
        self._busy_cores: list[float] = []
        self._longest_s: dict[Task, float] = {}

    def run(self, share_end: float, end: float) -> None:
        """The first round may take more than the type's share of the time."""
        for index in range(self._plan.rounds):
            for task in self._plan.tasks:
                if time.monotonic() + self._expected_s(task) > (share_end if index else end):
                    return
                self._measure(task)

    def result(self, model: BenchModel) -> TypeResult:
        measured = [measured for pairs in self._pairs.values() for measured in pairs]
        ours, theirs = (max((pair[side].resident_bytes for pair in measured), default=0) for side in (0, 1))
        figures = tuple(Figure.of(task, *zip(*pairs, strict=True)) for task, pairs in self._pairs.items() if pairs)
        busy = statistics.median(self._busy_cores) if self._busy_cores else 0.0
        return TypeResult(model.expert_type, figures, ours, theirs, model.bytes_per_token, busy)

    def _measure(self, task: Task) -> None:
        start = time.monotonic()
        self._pairs[task].append((self._turn(self._ours, task), self._turn(self._theirs, task)))
        self._longest_s[task] = max(self._longest_s.get(task, 0.0), time.monotonic() - start)

    def _turn(self, contestant: Contestant, task: Task) -> Measured:
        wait_for_quiet(self._plan.quiet_s, QUIET_CORES)
        own = [os.getpid(), *self._ours.process_ids, *self._theirs.process_ids]
        before = CpuTime.now(own)
        measured = contestant.measure(task)
        self._busy_cores.append(CpuTime.now(own).others_since(before))
        return measured

    def _expected_s(self, task: Task) -> float:
        """As long as ever before, or in proportion to what was measured last; nothing is known of the first one."""
        if task in self._longest_s or not self._longest_s:
            return self._longest_s.get(task, 0.0)
        known, seconds = list(self._longest_s.items())[-1]
        return seconds * max(1.0, task.num_tokens / known.num_tokens) if known.name == task.name else seconds


def measure_type(model: BenchModel, plan: Plan, share_end: float, end: float) -> TypeResult:
    shm_dir = Path(tempfile.mkdtemp(prefix="tandem-bench-", dir="/dev/shm"))
    try:
        with (
            child("ours", model, plan.num_threads, plan.clock, shm_dir) as ours,
            _llama(model, plan, shm_dir) as theirs,
        ):
            rounds = Rounds(plan, ours, theirs)
            rounds.run(share_end, end)
            return rounds.result(model)
    finally:
        shutil.rmtree(shm_dir)


@contextmanager
def _llama(model: BenchModel, plan: Plan, shm_dir: Path) -> Iterator[Contestant]:
    if plan.llama is not None:
        yield LlamaBench(plan.llama, model, plan.num_threads)
        return
    with child("llama", model, plan.num_threads, plan.clock, shm_dir) as contestant:
        yield contestant


def measure(models: list[BenchModel], plan: Plan, limit_s: float, keep: bool) -> Iterator[HostRun]:
    """Every type gets an equal share of the time that is left when its turn comes; one that could not be opened in time is left out.

    Yields what is there after every type.
    """
    end = time.monotonic() + limit_s
    results: list[TypeResult] = []
    left_out: list[str] = []
    bandwidth = opening_s = 0.0
    for index, model in enumerate(models):
        start = time.monotonic()
        if start + opening_s > end:
            left_out.append(model.expert_type)
            continue
        write_model(model)
        bandwidth = max(bandwidth, read_bandwidth(plan.num_threads, CLOCKS[plan.clock]))
        result = measure_type(model, plan, start + (end - start) / (len(models) - index), end)
        if not keep:
            model.path.unlink()
        if not result.figures:
            left_out.append(model.expert_type)
            continue
        measured_s = sum(_seconds_of(result))
        opening_s = max(opening_s, time.monotonic() - start - measured_s)
        results.append(result)
        print(table(_run(models, plan, bandwidth, results[-1:], [])), flush=True)
        yield _run(models, plan, bandwidth, results, [*left_out, *(later.expert_type for later in models[index + 1 :])])
    yield _run(models, plan, bandwidth, results, left_out)


def _seconds_of(result: TypeResult) -> Iterator[float]:
    """What the measurements themselves took."""
    for figure in result.figures:
        for rate in (*figure.ours, *figure.theirs):
            yield figure.task.num_tokens / rate


def _run(models: list[BenchModel], plan: Plan, bandwidth: float, results: list[TypeResult], left_out: list[str]) -> HostRun:
    return HostRun(
        date=time.strftime("%d %B %Y").lstrip("0"),
        cpu=cpu_name(),
        isa=best_isa(),
        num_threads=plan.num_threads,
        clock=plan.clock,
        bandwidth=bandwidth,
        llama=_llama_name(plan.llama),
        num_layers=models[0].shape.layers,
        tasks=plan.tasks,
        rounds=plan.rounds,
        results=tuple(results),
        left_out=tuple(left_out),
    )


def cpu_name() -> str:
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def best_isa() -> str:
    return _native.isas()[-1]


def _llama_name(folder: Path | None) -> str:
    return f"the wheel xllamacpp {version('xllamacpp')}" if folder is None else "`llama-bench` built for this machine"


def check_space(folder: Path, models: list[BenchModel]) -> None:
    """Files are removed one after the other, so the largest one counts. Raises SystemExit."""
    largest = max(model.file_bytes for model in models)
    needed = {folder: largest, Path("/dev/shm"): largest}
    if os.stat(folder).st_dev == os.stat("/dev/shm").st_dev:
        needed = {folder: 2 * largest}
    for place, nbytes in needed.items():
        free = shutil.disk_usage(place).free
        if free < nbytes * 1.05:
            raise SystemExit(f"{place} has {free / GIB:.1f} GiB free, but the largest model needs {nbytes / GIB:.1f} GiB there")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="for the model files")
    parser.add_argument("--types", default=TYPES, help=f"of the experts, comma-separated (default: {TYPES})")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of both engines (default: usable cores)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what is measured (default: wall)")
    parser.add_argument("--prompts", default=PROMPTS, help=f"their lengths (default: {PROMPTS})")
    parser.add_argument("--decode", type=int, default=DECODE, help=f"tokens (default: {DECODE}; 0: none)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"measurements of each figure (default: {ROUNDS})")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"of the model (default: {LAYERS})")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="of the whole run (default: none)")
    parser.add_argument("--quiet-s", type=float, default=0.0, help="how long a measurement waits at most for others to be quiet")
    parser.add_argument("--llama", type=Path, help="folder with a llama-bench (default: the wheel xllamacpp)")
    parser.add_argument("--out", type=Path, help="JSON file (default: docs/benchmarks/host-ISA.json, and its table in host.md)")
    parser.add_argument("--keep", action="store_true", help="leave the model files in the folder")
    parser.add_argument("--table", action="store_true", help="measure nothing, only write host.md")
    options = parser.parse_args()
    if not options.table and options.folder is None:
        parser.error("--folder is needed")
    if options.clock == "processor" and (options.threads > 1 or options.llama):
        parser.error("--clock processor is for --threads 1 and the wheel: threads that wait for each other take processor time, too")
    return options


def main() -> None:
    options = parse_options()
    if not options.table:
        decode = (Task("decode", options.decode),) if options.decode else ()
        tasks = (*decode, *(Task("prompt", int(num)) for num in options.prompts.split(",") if num))
        plan = Plan(tasks, options.rounds, options.threads, options.clock, options.llama, options.quiet_s)
        shape = qwen3_shape(options.layers, max(4096, plan.longest_prompt))
        models = [
            BenchModel(options.folder / f"bench-{options.layers}-{name}.gguf", shape, name, routing=Routing(0.0))
            for name in options.types.split(",")
        ]
        check_space(options.folder, models)
        for run in measure(models, plan, options.limit_s, options.keep):
            run.write(options.out or FOLDER / f"host-{best_isa()}.json")
    if options.table or options.out is None:
        write_tables([read_result(path, HostRun.read, "scripts.bench_host") for path in stored_runs()], PAGE)


if __name__ == "__main__":
    main()
