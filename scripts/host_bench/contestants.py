"""Engines as child processes: each says when it is ready, then answers one measurement after the other.

A line in is `prompt N` or `decode N`; the line out is `RESULT {"seconds": ..., "resident_bytes": ...}`. Only one of them works at
a time, and flash attention is on in both. Two builds of ggml never share a process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from appliance.memory.plan import HOST_CHUNK
from scripts.host_bench.model import BenchModel

ROOT = Path(__file__).resolve().parents[2]
LOOK_S = 0.05
DECODE_PROMPT = 128
"""Tokens in the conversation when decoding begins."""


WARM_UP_PROMPT = 256
"""Enough tokens for every expert to be read once."""


@dataclass(frozen=True)
class Task:
    """`prompt`: the first token of a new prompt. `decode`: so many tokens after `DECODE_PROMPT` others."""

    name: str
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.name} {self.num_tokens}"


@dataclass(frozen=True)
class Measured:
    seconds: float
    resident_bytes: int


Clock = Callable[[], float]


class Contestant(ABC):
    """Warm when it is there. Confined to one thread."""

    process_ids: tuple[int, ...]
    """Of what runs between two measurements."""

    @abstractmethod
    def measure(self, task: Task) -> Measured: ...


class Child(Contestant):
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.process_ids = (process.pid,)
        self._result()

    def measure(self, task: Task) -> Measured:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{task}\n")
        self._process.stdin.flush()
        return Measured(**json.loads(self._result()))

    def _result(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return line.removeprefix("RESULT ")
        raise SystemExit(f"{self._process.args!r} ended with code {self._process.wait()} before it answered")


CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "processor": time.process_time}
"""Processor time counts that of all threads."""


@contextmanager
def child(role: str, model: BenchModel, num_threads: int, clock: str, shm_dir: Path) -> Iterator[Contestant]:
    """`role`: "ours" or "llama". `clock`: of CLOCKS."""
    shape = model.shape
    sizes = [str(model.path), model.expert_type, str(shape.layers), str(shape.context), str(num_threads), clock, str(shm_dir)]
    argv = [sys.executable, "-m", "scripts.host_bench.contestants", role, *sizes]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield Child(process)
        finally:
            process.kill()


class LlamaBench(Contestant):
    """A llama.cpp of one's own build: `llama-bench` is started for every measurement.

    Of two repetitions the second counts: in the first one, which takes the place of its warm-up, the file is mapped anew.
    """

    process_ids = ()

    def __init__(self, folder: Path, model: BenchModel, num_threads: int) -> None:
        argv = [str(folder / "llama-bench"), "-m", str(model.path), "-t", str(num_threads), "-r", "2", "--no-warmup", "-o", "json"]
        self._argv = [*argv, "--repack", "0", "-fa", "on", "-ngl", "0", "-nopo", "1"]

    def measure(self, task: Task) -> Measured:
        num = str(task.num_tokens)
        sizes = ["-p", num, "-n", "0"] if task.name == "prompt" else ["-p", "0", "-n", num, "-d", str(DECODE_PROMPT)]
        with subprocess.Popen([*self._argv, *sizes], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            peak_bytes = 0
            while process.poll() is None:
                peak_bytes = max(peak_bytes, resident_bytes(process.pid))
                time.sleep(LOOK_S)
            assert process.stdout is not None
            output = process.stdout.read()
        if process.returncode != 0:
            raise SystemExit(f"{process.args!r} ended with code {process.returncode}")
        return Measured(json.loads(output)[0]["samples_ns"][-1] / 1e9, peak_bytes)


def resident_bytes(process: int | str = "self") -> int:
    """0 for a process that has ended. (The peak that the system tells of a child begins with its parent's.)"""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0)


def _tokens(model: BenchModel, num: int) -> list[int]:
    """Fresh ones each time, so that no cache of prompts can help."""
    return [int(token) for token in np.random.default_rng(time.time_ns()).integers(0, model.shape.vocab - 1, num)]


@contextmanager
def _ours(model: BenchModel, num_threads: int, clock: Clock, shm_dir: Path) -> Iterator[Callable[[str, int], float]]:
    from tests.random_models import RandomModel, open_runner

    sizes = {"slots": 0, "chunk": HOST_CHUNK, "max_logits": 1, "context": model.shape.context, "kv_type": "f16"}
    with open_runner(RandomModel(model.path, model.shape), shm_dir, num_threads=num_threads, **sizes) as runner:  # type: ignore[arg-type]

        def prefill(num_tokens: int) -> None:
            tokens = _tokens(model, num_tokens)
            for first in range(0, num_tokens, HOST_CHUNK):
                runner.run(tokens[first : first + HOST_CHUNK], first, 1)
                runner.between_windows()

        def run(task: str, num_tokens: int) -> float:
            if task == "prompt":
                start = clock()
                prefill(num_tokens)
                return clock() - start
            prefill(DECODE_PROMPT)
            start, token = clock(), 1
            for step in range(num_tokens):
                token = int(runner.run([token], DECODE_PROMPT + step, 1)[-1].values().argmax())
                runner.between_windows()
            return clock() - start

        yield run


@contextmanager
def _llama(model: BenchModel, num_threads: int, clock: Clock, _shm_dir: Path) -> Iterator[Callable[[str, int], float]]:
    import xllamacpp  # type: ignore[import-untyped]

    params = xllamacpp.CommonParams()
    params.model.path = str(model.path)
    params.n_ctx, params.n_parallel, params.warmup = model.shape.context, 1, True
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.no_extra_bufts = True  # its --repack 0: less memory and quicker prompts than its default
    params.cache_ram_mib = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
    server = xllamacpp.Server(params)

    def seconds(tokens: list[int], num_predicted: int) -> float:
        request = {"prompt": tokens, "n_predict": num_predicted, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
        start = clock()
        server.handle_completions(request)
        return clock() - start

    def run(task: str, num_tokens: int) -> float:
        if task == "prompt":
            return seconds(_tokens(model, num_tokens), 1)
        conversation = _tokens(model, DECODE_PROMPT)
        seconds(conversation, 1)
        return seconds(conversation, num_tokens)  # as many steps: of what is known already only the last token is computed again

    yield run


def main() -> None:
    """One contestant, driven by lines."""
    role, path, expert_type, num_layers, context, num_threads, clock, shm_dir = sys.argv[1:]
    from scripts.host_bench.model import qwen3_shape

    model = BenchModel(Path(path), qwen3_shape(int(num_layers), int(context)), expert_type)
    with {"ours": _ours, "llama": _llama}[role](model, int(num_threads), CLOCKS[clock], Path(shm_dir)) as run:
        run("prompt", min(WARM_UP_PROMPT, model.shape.context))
        print("RESULT ready", flush=True)
        for line in sys.stdin:
            task, num_tokens = line.split()
            seconds = run(task, int(num_tokens))
            print("RESULT " + json.dumps({"seconds": seconds, "resident_bytes": resident_bytes()}), flush=True)


if __name__ == "__main__":
    main()
