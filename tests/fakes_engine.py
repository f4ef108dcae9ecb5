"""A tiny language model with real behaviour, and an engine process around it, for the tests of engine, desk and web.

As a process it speaks the whole protocol through the real engine loop, at any speed and with any misfortune:

    python -m tests.fakes_engine [options]          (in the root of the tree; `fake_engine_argv` writes the command)

    --vocab N              size of the vocabulary (default 320); ids 0 to N-1
    --context N            tokens of prompt and answer together (default 4096)
    --max-rows N           tokens per chunk (default 32)
    --slots N              expert slots it pretends to have (default 8)
    --answer 5,6,7         distinct ids: the greedy answer is 5 6 7 5 6 7 ..., entered at 5 unless the prompt ends in one of
                           them. Without it the answer is a pseudo-random function of every token before it.
    --window-ms X          time of one decode window (default 0)
    --chunk-ms X           time of one prompt chunk (default 0)
    --load-s X             time to load, with LOAD lines (default 0)
    --load-error TEXT      loading ends in a FATAL line with this text
    --fail-at N            the run that computes position N raises EngineError
    --reject-at N          the run that computes position N raises RequestError
    --die-at N             the run that computes position N kills the process with SIGKILL
    --hang-at N            the run that computes position N never returns (the process has to be killed)
    --refuse-peer          PEER_ATTACH fails
    --ignore-end           goes on when stdin is closed (so that the desk has to kill it)
    --print TEXT           prints TEXT to stdout once the protocol owns it (it must come out on stderr)

The options of the real engine are accepted; only --card, --asleep, --parked and --parked-mib are used.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.engine import process
from appliance.engine.generation import RunnerStats, WindowInterruptedError
from appliance.engine.logits import ArrayRow, LogitsRow
from appliance.engine.loop import CardMemory
from appliance.errors import EngineError, MemoryBudgetError, RequestError
from appliance.protocol import LoadProgress
from cuda_ext import _native as native

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class FakeModel:
    """What a `FakeRunner` computes, and when it fails. Positions of None never come."""

    vocab: int = 320
    context: int = 4096
    max_rows: int = 32
    slots: int = 8
    answer: tuple[int, ...] = ()
    window_s: float = 0.0
    chunk_s: float = 0.0
    fail_at: int | None = None
    reject_at: int | None = None
    die_at: int | None = None
    hang_at: int | None = None
    nan_at: int | None = None
    refuse_peer: bool = False
    """The second card is never to be had."""


@dataclass(frozen=True, slots=True)
class Run:
    """One call of `FakeRunner.run`."""

    tokens: tuple[int, ...]
    position: int
    num_logits: int


@dataclass
class FakeRunner:
    """A `Runner`. Its key/value state is a hash of every token so far, so a wrongly reused prefix changes the logits."""

    model: FakeModel = field(default_factory=FakeModel)
    on_run: Callable[[int], object] = lambda _position: None
    """Called with the position at the start of each run."""
    on_boundary: Callable[[int], object] = lambda _number: None
    """Called with the number of each boundary, 1 and up."""
    runs: list[Run] = field(default_factory=list)
    num_boundaries: int = 0
    is_closed: bool = False
    held_threads: int = 0
    has_peer: bool = True
    has_link: bool = True
    peer_experts: int = 0
    peer_parts: int = 1
    """In which the second card is given back."""
    link_serving: bool = False

    def __post_init__(self) -> None:
        self._states: list[int] = []
        self._slots = self.model.slots
        self._rows = 0
        self._interrupted = threading.Event()

    @property
    def max_rows(self) -> int:
        return self.model.max_rows

    @property
    def context(self) -> int:
        return self.model.context

    @property
    def vocab(self) -> int:
        return self.model.vocab

    @property
    def plan_bytes(self) -> Mapping[str, int]:
        return {"dense weights": 3 * MIB, "key/value cache": 2 * MIB, "workspace": MIB, "expert slots": self.model.slots * MIB}

    def run(self, tokens: Sequence[int], position: int, num_logits: int, chooser: native.Chooser | None = None) -> Sequence[LogitsRow]:
        self._check(tokens, position, num_logits)
        self.on_run(position)
        self.runs.append(Run(tuple(tokens), position, num_logits))
        self._suffer(range(position, position + len(tokens)))
        del self._states[position:]
        if self._interrupted.wait(self.model.window_s if len(tokens) == 1 else self.model.chunk_s):
            self._interrupted.clear()
            raise WindowInterruptedError
        for token in tokens:
            self._states.append(next_state(self._states[-1] if self._states else 0, token))
        self._rows += len(tokens)
        first = len(tokens) - num_logits
        rows = [self._logits(self._states[position + row], tokens[row], position + row) for row in range(first, len(tokens))]
        return [ArrayRow(row, None if chooser is None else chooser.choose(row)) for row in rows]

    def between_windows(self) -> None:
        self.num_boundaries += 1
        self.on_boundary(self.num_boundaries)

    def stats(self) -> RunnerStats:
        return RunnerStats(
            rows_by_tier={"own": self._rows * 2, "host": self._rows},
            swaps=self.num_boundaries // 4,
            resident_experts=self._slots,
            slots=self._slots,
            isa="portable",
            pool_threads=2,
            pool_held=self.held_threads,
            peer_experts=self.peer_experts,
            link_serving=self.link_serving,
        )

    def interrupt(self) -> None:
        self._interrupted.set()

    def hold_threads(self, num_threads: int) -> int:
        self.held_threads = min(num_threads, 1)
        return self.held_threads

    def free_memory(self, free_mib: int) -> CardMemory:
        if free_mib > self.model.slots:
            raise MemoryBudgetError(f"{free_mib} MiB cannot be freed; all slots together have {self.model.slots} MiB")
        self._slots = self.model.slots - free_mib
        return self._memory()

    def take_memory(self) -> CardMemory:
        self._slots = self.model.slots
        return self._memory()

    def attaching_peer(self) -> Iterator[None]:
        for _ in range(self.peer_parts):
            yield
        if self.model.refuse_peer:
            raise MemoryBudgetError("the fake second card is taken")
        self.peer_experts = self.model.slots

    def detaching_peer(self) -> Iterator[None]:
        self.peer_experts = 0
        for _ in range(self.peer_parts):
            yield

    def serve_link(self, serving: bool) -> None:
        self.link_serving = serving

    @property
    def state_id(self) -> str:
        return f"{self.model.vocab:064x}"

    def state_bytes(self, num_tokens: int) -> int:
        return 8 * num_tokens

    def save_state(self, num_tokens: int, out: NDArray[np.uint8]) -> None:
        out[:] = np.array(self._states[:num_tokens], dtype=np.uint64).view(np.uint8)

    def load_state(self, num_tokens: int, saved_tokens: int, state: NDArray[np.uint8]) -> None:
        assert state.size == 8 * saved_tokens
        self._states = [int(one) for one in state.view(np.uint64)[:num_tokens]]

    def close(self) -> None:
        self.is_closed = True

    def _memory(self) -> CardMemory:
        return CardMemory(used_mib=6 + self._slots, free_mib=self.model.slots - self._slots)

    def _logits(self, state: int, token: int, position: int) -> NDArray[np.float32]:
        logits = np.random.Generator(np.random.Philox(key=state)).standard_normal(self.vocab).astype(np.float32)
        if position == self.model.nan_at:
            logits[self.vocab // 2] = np.nan
        answer = self.model.answer
        if answer:
            follower = answer[(answer.index(token) + 1) % len(answer)] if token in answer else answer[0]
            logits[follower] += 20
        return logits

    def _check(self, tokens: Sequence[int], position: int, num_logits: int) -> None:
        """A runner is entitled to a loop that keeps its promises."""
        if self.is_closed:
            raise EngineError("run after close")
        if not 1 <= len(tokens) <= self.max_rows or not 0 <= num_logits <= len(tokens):
            raise EngineError(f"{len(tokens)} tokens and {num_logits} logits do not fit a chunk of {self.max_rows}")
        if not 0 <= position <= len(self._states) or position + len(tokens) > self.context:
            raise EngineError(f"{len(tokens)} tokens at position {position}: {len(self._states)} are computed, context {self.context}")
        if not all(0 <= token < self.vocab for token in tokens):
            raise EngineError(f"a token of {tokens} is outside the vocabulary of {self.vocab}")

    def _suffer(self, positions: range) -> None:
        if self.model.die_at in positions:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.model.hang_at in positions:
            threading.Event().wait()
        if self.model.reject_at in positions:
            raise RequestError("the fake model rejects this request")
        if self.model.fail_at in positions:
            raise EngineError("the fake card failed")


def next_state(state: int, token: int) -> int:
    """Hash of a token sequence from the hash of all but its last token."""
    return (state * 6364136223846793005 + token * 1442695040888963407 + 1) % 2**64


def greedy_answer(model: FakeModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What an engine with this model must answer at temperature 0, computed without any of its code."""
    runner = FakeRunner(
        FakeModel(vocab=model.vocab, context=len(prompt) + num_tokens, max_rows=len(prompt) + num_tokens, answer=model.answer)
    )
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(runner.run(tokens, 0, 1)[0].likeliest)
    return tokens[len(prompt) :]


def fake_engine_argv(*options: str) -> list[str]:
    """Command of a fake engine process, to be started with the root of the tree as working directory."""
    return [sys.executable, "-m", "tests.fakes_engine", *options]


def main() -> int:
    options = _parse()
    if options.ignore_end:
        process.END_GRACE_S = float(threading.TIMEOUT_MAX)

    def open_runner(report: process.Report) -> FakeRunner:
        if options.print:
            print(options.print, flush=True)
        _load(options.load_s, report)
        if options.load_error:
            raise EngineError(options.load_error)
        runner = FakeRunner(_model(options))
        if options.asleep:
            runner.free_memory(options.slots)
        return runner

    parked = Path(options.parked) if options.parked else None
    exit_code = process.run_engine(open_runner, options.card, parked=parked, parked_mib=options.parked_mib)
    if options.ignore_end:
        threading.Event().wait()
    return exit_code


def _load(load_s: float, report: process.Report) -> None:
    num_steps = max(1, int(load_s / 0.05)) if load_s else 0
    for step in range(num_steps + 1):
        left_s = load_s * (1 - step / num_steps) if num_steps else 0.0
        done_bytes = step * MIB if num_steps else MIB
        report(
            LoadProgress(stage="dense", done_bytes=done_bytes, total_bytes=max(num_steps, 1) * MIB, bytes_per_s=20.0 * MIB, left_s=left_s)
        )
        if step < num_steps:
            time.sleep(load_s / num_steps)


def _model(options: argparse.Namespace) -> FakeModel:
    return FakeModel(
        vocab=options.vocab,
        context=options.context,
        max_rows=options.max_rows,
        slots=options.slots,
        answer=tuple(int(part) for part in options.answer.split(",")) if options.answer else (),
        window_s=options.window_ms / 1000,
        chunk_s=options.chunk_ms / 1000,
        fail_at=options.fail_at,
        reject_at=options.reject_at,
        die_at=options.die_at,
        hang_at=options.hang_at,
        refuse_peer=options.refuse_peer,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fakes_engine")
    for name in ("settings", "lane", "threads", "share", "answer", "load-error", "print", "peer-device", "peer-link", "peer-link-role"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--peer-slots", type=int)
    parser.add_argument("--peer-hot", type=float)
    parser.add_argument("--card", default="host:0")
    for name, default in (("vocab", 320), ("context", 4096), ("max-rows", 32), ("slots", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("window-ms", "chunk-ms", "load-s"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    for name in ("fail-at", "reject-at", "die-at", "hang-at"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--link-threads")
    parser.add_argument("--parked")
    parser.add_argument("--parked-mib", type=int, default=0)
    for name in ("ignore-end", "asleep", "refuse-peer"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
