"""Checks everything on a machine with a GPU, in one command within ten minutes: builds, tests, sanitizers, memory.

    python3 -m scripts.gpu_check [--out FILE.json] [--only build,kernels,engine,placement,memory,sanitizers] [--native FILE]
    python3 -m scripts.gpu_check --only pair_ids,pair_kills,freeze --native FILE [--card cuda:0,cuda:1]
    python3 -m scripts.gpu_check --only link_cost --native FILE

Prints one line per case while it runs and one table at the end. The exit code is 1 if anything failed or was not run for want of
time; what this machine lacks a tool for is skipped, and the table says so. Needs CMake 3.26, ninja, nvcc, a C++20 compiler and the
Python packages of pyproject.toml's `dev` that tests/card imports; docs/benchmarks/gpu.md names them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("build", "kernels", "engine", "placement", "memory", "sanitizers")
PAIR_STAGES = ("pair_ids", "pair_kills", "freeze")
"""With both cards, and only by `--only`. They start servers, so they need the packages of those."""
MORE_STAGES = ("link_cost",)
"""With one card, and only by `--only`: 30 GB in /dev/shm, and nothing that could be wrong with a card."""
QUICK_IS_SLOW = 2
"""Machines that are asked for less have fewer cores, and get more time."""
SANITIZERS = ("memcheck", "racecheck", "synccheck")
SANITIZER_FAILED = 86
SHOWN_LINES = 30


@dataclass
class Row:
    """A case: `ok`, `FAILED`, `skipped` or `NOT RUN`."""

    case: str
    result: str
    seconds: float
    note: str = ""
    details: dict[str, object] = field(default_factory=dict)

    @property
    def is_bad(self) -> bool:
        return self.result in ("FAILED", "NOT RUN")

    def line(self) -> str:
        return f"{self.case:24} {self.result:8} {self.seconds:7.1f} s  {self.note}"


@dataclass(frozen=True)
class Done:
    """A child process that has ended; `code` is None if it was stopped at its limit."""

    code: int | None
    output: str
    seconds: float


class Check:
    """Confined to one thread, but for the sanitizers."""

    def __init__(self, native: Path | None, build: Path, cards: Sequence[str], limit_s: float, *, quick: bool) -> None:
        """`quick`: fewer tokens and rounds for the pair's stages."""
        self._native = native
        self._build = build
        self._cards = cards
        self._quick = quick
        self._deadline = time.monotonic() + limit_s
        self.rows: list[Row] = []

    def run(self, stages: Sequence[str]) -> None:
        steps: dict[str, Callable[[], list[Row]]] = {
            "build": lambda: [self._built()],
            "kernels": lambda: [self._tests("kernels", ["--ignore", "tests/card/test_engine.py", *_workers()], 240)],
            "engine": lambda: [self._tests("engine", [], 120, "tests/card/test_engine.py")],
            "placement": lambda: [self._case("placement", 150)],
            "memory": lambda: [self._case("memory", 90)],
            "sanitizers": self._sanitizers,
            "link_cost": lambda: [self._case("link_cost", 150)],
            "pair_ids": lambda: self._parts("pair_ids", 240),
            "pair_kills": lambda: self._parts("pair_kills", 300),
            "freeze": lambda: self._parts("freeze", 120),
        }
        for stage in stages:
            if stage == "build" and self._native:
                continue
            if stage != "build" and self._native is None and self._needs_module(stage):
                self._note(Row(stage, "NOT RUN", 0.0, "there is no native module"))
                continue
            for row in steps[stage]():
                self._note(row)

    def _note(self, row: Row) -> None:
        print(row.line(), flush=True)
        self.rows.append(row)

    def _needs_module(self, stage: str) -> bool:
        """Host cards have the installed one."""
        return stage not in PAIR_STAGES or self._cards[0].startswith("cuda:")

    # ---- stages ----

    def _built(self) -> Row:
        architecture = present_architecture()
        if architecture is None:
            return Row("build", "FAILED", 0.0, "nvidia-smi names no GPU")
        nanobind = subprocess.run([sys.executable, "-m", "nanobind", "--cmake_dir"], check=True, capture_output=True, text=True)
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "TANDEM_CUDA": "ON",
            "TANDEM_STRICT": "OFF",
            "CMAKE_CUDA_ARCHITECTURES": f"{architecture}-real",
            "Python_EXECUTABLE": sys.executable,
            "nanobind_DIR": nanobind.stdout.strip(),
        }
        configure = ["cmake", "-S", str(ROOT / "cuda_ext"), "-B", str(self._build), "-G", "Ninja", "--log-level=WARNING"]
        configured = self._child([*configure, *(f"-D{name}={value}" for name, value in options.items())], 60)
        built = self._child(["cmake", "--build", str(self._build)], 420) if configured.code == 0 else configured
        seconds = configured.seconds + (built.seconds if built is not configured else 0.0)
        modules = sorted(self._build.glob("_native*.so"))
        if built.code != 0 or not modules:
            _show(built, "error")
            return Row("build", *_ended(built), seconds, f"compute capability {architecture}")
        self._native = modules[0]
        return Row("build", "ok", seconds, f"compute capability {architecture}, {self._native.stat().st_size / 1e6:.0f} MB")

    def _tests(self, name: str, options: Sequence[str], limit_s: float, tests: str = "tests/card") -> Row:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            argv = [sys.executable, "-m", "pytest", tests, "-q", "-p", "no:cacheprovider", "--native", str(self._native)]
            done = self._child([*argv, f"--junitxml={report}", *options], limit_s)
            counts = _counts(report)
        if done.code != 0:
            _show(done, "FAILED", "Error")
        result = "ok" if done.code == 0 and counts.get("tests", 0) > counts.get("skipped", 0) else _ended(done)[0]
        note = ", ".join(f"{number} {what}" for what, number in counts.items()) or "no report"
        return Row(f"tests: {name}", result, done.seconds, note, dict(counts))

    def _case(self, name: str, limit_s: float) -> Row:
        return self._read_case(name, self._child(self._case_argv(name, self._cards[0]), limit_s))

    def _parts(self, name: str, limit_s: float) -> list[Row]:
        """One row for each of its parts, and one more if it did not come to its end."""
        options = ["--quick"] if self._quick else []
        limit_s *= QUICK_IS_SLOW if self._quick else 1
        done = self._child(self._case_argv(name, ",".join(self._cards), *options), limit_s)
        rows = []
        for found in _results(done):
            failures = [str(sentence) for sentence in found.get("failures", [])]
            note = "; ".join(failures) or _brief(found)
            rows.append(Row(f"{name}: {found['part']}", "FAILED" if failures else "ok", float(found["seconds"]), note, found))
        if done.code != 0 and not any(row.is_bad for row in rows):
            rows.append(Row(name, *_ended(done)[:1], done.seconds, _ended(done)[1]))
        if any(row.is_bad for row in rows):
            _show(done, "Error")
        return rows

    def _sanitizers(self) -> list[Row]:
        tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        if not Path(tool).exists():
            missing = "THERE IS NO compute-sanitizer ON THIS MACHINE"
            return [Row(f"compute-sanitizer: {name}", "skipped", 0.0, missing) for name in SANITIZERS]
        with ThreadPoolExecutor(len(SANITIZERS)) as pool:
            return list(pool.map(lambda name: self._sanitized(tool, name), SANITIZERS))

    def _sanitized(self, tool: str, name: str) -> Row:
        options = ["--tool", name, "--error-exitcode", str(SANITIZER_FAILED), "--print-limit", "20"]
        if name == "memcheck":
            options += ["--report-api-errors", "no"]  # what the driver refuses, such as pinning a file's pages, the engine answers itself
        argv = [tool, *options, *self._case_argv("small", self._cards[0])]
        done = self._child(argv, 240)
        row = self._read_case("small", done)
        row.case = f"compute-sanitizer: {name}"
        summary = [line.removeprefix("========= ") for line in done.output.splitlines() if "SUMMARY" in line]
        if not summary and not row.is_bad:
            row.result, row.note = "FAILED", "the tool gave no summary"
            _show(done, "=========")
        elif summary:
            row.note = "; ".join(summary + ([row.note] if row.is_bad else []))
            if row.is_bad:
                _show(done, "=========")
        return row

    # ---- children ----

    def _case_argv(self, name: str, card: str, *options: str) -> list[str]:
        native = ["--native", str(self._native)] if self._native else []
        return [sys.executable, "-m", "scripts.gpu_cases", name, *native, "--card", card, *options]

    def _read_case(self, name: str, done: Done) -> Row:
        found = next(iter(_results(done)), {})
        failures = [str(sentence) for sentence in found.get("failures", [])]
        if done.code == 0 and found and not failures:
            return Row(name, "ok", done.seconds, _brief(found), found)
        _show(done, "=========", "Error")
        result, note = _ended(done)
        return Row(name, result, done.seconds, "; ".join(failures) or note, found)

    def _child(self, argv: Sequence[str], limit_s: float) -> Done:
        """Runs it from the root of the tree, at most until its limit or the end of the time for all."""
        limit_s = min(limit_s, self._deadline - time.monotonic())
        if limit_s < 5:
            return Done(None, "", 0.0)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
        start = time.monotonic()
        try:
            child = subprocess.Popen(
                argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
        except OSError as error:
            return Done(127, str(error), time.monotonic() - start)
        try:
            output, _ = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # its own children too: they hold the card
            output, _ = child.communicate()
            return Done(None, output, time.monotonic() - start)
        return Done(child.returncode, output, time.monotonic() - start)


def present_architecture() -> str | None:
    """That of the first GPU, as CMake writes it: 90 for 9.0."""
    lines = _ask_driver("compute_cap")
    return lines[0].replace(".", "") if lines else None


def _ask_driver(query: str) -> list[str]:
    """One line per GPU; none without a driver."""
    try:
        asked = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return asked.stdout.strip().splitlines()


def _workers() -> list[str]:
    """Several processes share the card where pytest can start them."""
    return ["-n", str(min(8, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []


def _counts(report: Path) -> dict[str, int]:
    if not report.exists():
        return {}
    suite = next(xml.etree.ElementTree.parse(report).iter("testsuite"))
    return {what: int(suite.get(what, 0)) for what in ("tests", "failures", "errors", "skipped")}


def _results(done: Done) -> list[dict[str, Any]]:
    lines = (line for line in done.output.splitlines() if line.startswith("RESULT "))
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def _ended(done: Done) -> tuple[str, str]:
    """(result, note) of a child that did not do what it should."""
    if done.code is None and done.seconds == 0:
        return "NOT RUN", "no time was left"
    return "FAILED", "stopped at its limit" if done.code is None else f"ended with code {done.code}"


def _brief(found: dict[str, object]) -> str:
    notes = found.get("notes")
    assert isinstance(notes, dict)
    return ", ".join(f"{name} {value}" for name, value in notes.items() if not isinstance(value, dict))


def _show(done: Done, *words: str) -> None:
    """The lines of its output that say most, and its end."""
    lines = done.output.splitlines()
    telling = [line for line in lines if any(word in line for word in words)][:SHOWN_LINES]
    for line in [*telling, "...", *lines[-SHOWN_LINES:]]:
        print("    " + line[:300], flush=True)


def _machine() -> dict[str, object]:
    return {"gpus": _ask_driver("name,driver_version,memory.total"), "cores": os.cpu_count(), "python": platform.python_version()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the table as JSON")
    parser.add_argument(
        "--only", default=",".join(STAGES), help="stages, comma-separated; link_cost, pair_ids, pair_kills and freeze beside the usual ones"
    )
    parser.add_argument("--native", type=Path, help="a native module that is built already")
    parser.add_argument("--build", type=Path, default=Path(tempfile.gettempdir()) / "tandem-gpu-check", help="folder of the build")
    parser.add_argument("--card", default="cuda:0,cuda:1", help="the first one; both for the pair's stages, host:0,host:1 for example")
    parser.add_argument("--quick", action="store_true", help="the pair's stages with fewer tokens and rounds")
    parser.add_argument("--limit-s", type=float, default=570.0, help="for everything together")
    options = parser.parse_args()
    stages = options.only.split(",")
    if unknown := set(stages) - {*STAGES, *MORE_STAGES, *PAIR_STAGES}:
        parser.error(f"unknown stages: {', '.join(sorted(unknown))}; there are {', '.join(STAGES + MORE_STAGES + PAIR_STAGES)}")
    check = Check(options.native, options.build, options.card.split(","), options.limit_s, quick=options.quick)
    start = time.monotonic()
    check.run(stages)
    seconds = time.monotonic() - start
    print("\n" + "\n".join(row.line() for row in check.rows))
    num_bad = sum(row.is_bad for row in check.rows)
    num_ok = sum(row.result == "ok" for row in check.rows)
    print(f"{num_ok} ok, {len(check.rows) - num_ok - num_bad} skipped, {num_bad} failed or not run; {seconds:.0f} s")
    if options.out:
        found = {"machine": _machine(), "seconds": seconds, "cases": [asdict(row) for row in check.rows]}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
