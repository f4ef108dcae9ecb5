"""Engines as child processes: each says when it is ready, then answers one measurement after the other.

A line in is `prompt N` or `decode N`; the line out is `RESULT {"seconds": ..., "resident_bytes": ...}`. Only one of them works at
a time. Two builds of ggml never share a process.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scripts.host_bench.model import BenchModel

ROOT = Path(__file__).resolve().parents[2]
DECODE_PROMPT = 128
"""Tokens in the conversation when decoding begins."""
CHUNK = 512
"""Prompt rows of one run; llama.cpp's default too."""


@dataclass(frozen=True)
class Measured:
    seconds: float
    resident_bytes: int


class Contestant(ABC):
    """Confined to one thread."""

    @abstractmethod
    def measure(self, task: str, num_tokens: int) -> Measured:
        """`prompt`: time to the first token of a new prompt. `decode`: time of so many tokens after `DECODE_PROMPT` others."""


class Child(Contestant):
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._result()

    def measure(self, task: str, num_tokens: int) -> Measured:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{task} {num_tokens}\n")
        self._process.stdin.flush()
        return Measured(**json.loads(self._result()))

    def _result(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return line.removeprefix("RESULT ")
        raise SystemExit(f"{self._process.args!r} ended with code {self._process.wait()} before it answered")


@contextmanager
def child(role: str, model: BenchModel, num_threads: int, shm_dir: Path) -> Iterator[Contestant]:
    """`role`: "ours" or "llama"."""
    shape = model.shape
    sizes = [str(model.path), model.expert_type, str(shape.layers), str(shape.context), str(num_threads), str(shm_dir)]
    argv = [sys.executable, "-m", "scripts.host_bench.contestants", role, *sizes]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield Child(process)
        finally:
            process.kill()


class LlamaBench(Contestant):
    """A llama.cpp of one's own build: `llama-bench` is started for every measurement."""

    def __init__(self, folder: Path, model: BenchModel, num_threads: int) -> None:
        self._argv = [str(folder / "llama-bench"), "-m", str(model.path), "-t", str(num_threads), "-r", "1", "--repack", "0", "-o", "json"]

    def measure(self, task: str, num_tokens: int) -> Measured:
        sizes = ["-p", str(num_tokens), "-n", "0"] if task == "prompt" else ["-p", "0", "-n", str(num_tokens), "-d", str(DECODE_PROMPT)]
        done = subprocess.run([*self._argv, *sizes], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
        resident = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # no other child has ended yet
        return Measured(json.loads(done.stdout)[0]["avg_ns"] / 1e9, resident)


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")))


def _tokens(model: BenchModel, num: int) -> list[int]:
    """Fresh ones each time, so that no cache of prompts can help."""
    return [int(token) for token in np.random.default_rng(time.time_ns()).integers(0, model.shape.vocab - 1, num)]


@contextmanager
def _ours(model: BenchModel, num_threads: int, shm_dir: Path) -> Iterator[Callable[[str, int], float]]:
    from tests.random_models import RandomModel, open_runner

    sizes = {"slots": 0, "chunk": CHUNK, "max_logits": 1, "context": model.shape.context, "kv_type": "f16"}
    with open_runner(RandomModel(model.path, model.shape), shm_dir, num_threads=num_threads, **sizes) as runner:  # type: ignore[arg-type]

        def prefill(num_tokens: int) -> None:
            tokens = _tokens(model, num_tokens)
            for first in range(0, num_tokens, CHUNK):
                runner.run(tokens[first : first + CHUNK], first, 1)
                runner.between_windows()

        def run(task: str, num_tokens: int) -> float:
            if task == "prompt":
                start = time.perf_counter()
                prefill(num_tokens)
                return time.perf_counter() - start
            prefill(DECODE_PROMPT)
            start, token = time.perf_counter(), 1
            for step in range(num_tokens):
                token = int(runner.run([token], DECODE_PROMPT + step, 1)[-1].values().argmax())
                runner.between_windows()
            return time.perf_counter() - start

        yield run


@contextmanager
def _llama(model: BenchModel, num_threads: int, _shm_dir: Path) -> Iterator[Callable[[str, int], float]]:
    import xllamacpp  # type: ignore[import-untyped]

    params = xllamacpp.CommonParams()
    params.model.path = str(model.path)
    params.n_ctx, params.n_parallel, params.warmup = model.shape.context, 1, True
    params.no_extra_bufts = True  # its --repack 0: less memory and quicker prompts than its default
    params.cache_ram_mib = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
    server = xllamacpp.Server(params)

    def run(task: str, num_tokens: int) -> float:
        prompt, predict = (num_tokens, 1) if task == "prompt" else (DECODE_PROMPT, num_tokens + 1)
        request = {"prompt": _tokens(model, prompt), "n_predict": predict, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        timings = server.handle_completions(request)["timings"]
        milliseconds: float = timings["prompt_ms"] if task == "prompt" else timings["predicted_ms"] * num_tokens / timings["predicted_n"]
        return milliseconds / 1e3

    yield run


def main() -> None:
    """One contestant, driven by lines."""
    role, path, expert_type, num_layers, context, num_threads, shm_dir = sys.argv[1:]
    from scripts.host_bench.model import qwen3_shape

    model = BenchModel(Path(path), qwen3_shape(int(num_layers), int(context)), expert_type)
    with {"ours": _ours, "llama": _llama}[role](model, int(num_threads), Path(shm_dir)) as run:
        print("RESULT ready", flush=True)
        for line in sys.stdin:
            task, num_tokens = line.split()
            seconds = run(task, int(num_tokens))
            print("RESULT " + json.dumps({"seconds": seconds, "resident_bytes": resident_bytes()}), flush=True)


if __name__ == "__main__":
    main()
