"""The engine on one card: decode, prompts, times, memory, and what its cache held."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from appliance.engine.model_runner import ModelRunner
from appliance.engine.sampler import Sampler
from appliance.memory.gpus import free_gpu_bytes
from appliance.memory.policy import SwapPolicy, blob_bytes_table
from appliance.protocol import Sampling
from appliance.units import MIB
from scripts.card_bench.hits import RecordingPolicy, clairvoyant_hits, lru_hits
from scripts.card_bench.limits import Bandwidths, decode_limit, prompt_limit
from scripts.card_bench.llama import LlamaFigures
from scripts.host_bench.model import BenchModel
from tests.random_models import RandomModel, fill, open_arena, open_runner

MAX_SWAPS = 4
SHORT_PROMPT = 32
WINDOWS, WINDOW_REPEATS = (1, 2, 3, 4, 6, 8), 40
SAMPLINGS = {
    "likeliest": Sampling(),
    "temperature 1": Sampling(temperature=1.0),
    "0.7, top_k 20, top_p 0.8": Sampling(temperature=0.7, top_k=20, top_p=0.8),
    "0.8, top_p 0.95, penalties": Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.5),
}


@dataclass(frozen=True)
class Sizes:
    chunk: int = 2048
    """Also the usual prompt."""
    decode_after: int = 128
    decode: int = 128
    """Tokens that are decoded behind so many others."""
    repeats: int = 5
    context: int = 4096
    kv_type: str = "f16"


@dataclass
class Hits:
    """Shares of the uses of decoded tokens that were, or would have been, in a cache of this size."""

    ours: float
    lru: float
    clairvoyant: float
    num_slots: int
    num_uses: int
    swaps: int


@dataclass
class Memory:
    """Bytes, and seconds of giving all slots back, taking them again, and filling them."""

    planned_by_use: dict[str, int]
    planned: int
    taken: int | None
    """What the driver says less is free. None: there is no driver."""
    give_back_s: float = 0.0
    take_again_s: float = 0.0
    fill_s: float = 0.0

    def line(self) -> str:
        taken = "" if self.taken is None else f", taken {self.taken / MIB:.0f}"
        times = f"back {self.give_back_s:.3f} s, again {self.take_again_s:.3f} s, full {self.fill_s:.2f} s"
        return f"MiB planned {self.planned / MIB:.0f}{taken}; {times}"


@dataclass
class Sampled:
    """Tokens per second, and how many of the tokens the card left to the host."""

    decode: float
    left_to_host: int


@dataclass
class Figures:
    """What one card does with one model: tokens per second, milliseconds, bytes."""

    expert_type: str
    resident_ratio: float
    zipf: float
    kv_type: str = Sizes.kv_type
    decode_after: int = Sizes.decode_after
    decode: float = 0.0
    decode_limit: float = 0.0
    decode_runs: list[float] = field(default_factory=list)
    prompts: dict[int, float] = field(default_factory=dict)
    """Tokens per second by length."""
    prompt_limits: dict[int, float] = field(default_factory=dict)
    first_token_ms: dict[int, float] = field(default_factory=dict)
    arena_s: float = 0.0
    """Loading the experts from the file into shared memory, once for all engines."""
    open_s: float = 0.0
    """From a loaded arena to READY: dense weights, cache, warm-up."""
    distinct_experts: float = 0.0
    """Used in a layer by a prompt of one chunk, on average over layers."""
    rows_by_tier: dict[str, int] = field(default_factory=dict)
    """Of decoded tokens."""
    hits: Hits | None = None
    memory: Memory | None = None
    steps_ms: dict[str, float] = field(default_factory=dict)
    """Of one window, each kind of step alone."""
    windows_ms: dict[int, float] = field(default_factory=dict)
    """Of windows by their rows, bookkeeping included."""
    sampled: dict[str, Sampled] = field(default_factory=dict)
    """Decoding by how tokens are chosen, taken in turns."""
    llama: LlamaFigures | None = None
    bytes_per_token: int = 0

    def lines(self) -> list[str]:
        """For the terminal."""
        rows = sum(self.rows_by_tier.values()) or 1
        tiers = ", ".join(f"{tier} {num / rows:.0%}" for tier, num in self.rows_by_tier.items() if num)
        llama = self.llama
        lines = [
            f"{self.expert_type:8} {self.resident_ratio:4.0%}  decode {self.decode:7.1f}{_beside(self.decode, llama and llama.decode)}, "
            f"{self.decode / self.decode_limit:.0%} of {self.decode_limit:.0f}; {tiers}; open {self.open_s:.1f} s"
        ]
        for num, rate in self.prompts.items():
            beside, limit = _beside(rate, llama and llama.prompts.get(num)), self.prompt_limits[num]
            lines.append(
                f"    prompt {num:6} {rate:8.0f}{beside}, {rate / limit:.0%} of {limit:.0f}; first token {self.first_token_ms[num]:.1f} ms"
            )
        lines.append(f"    a prompt of one chunk uses {self.distinct_experts:.1f} experts per layer")
        if self.hits:
            lines.append(f"    hits: ours {self.hits.ours:.1%}, LRU {self.hits.lru:.1%}, clairvoyant {self.hits.clairvoyant:.1%}")
        if self.memory:
            lines.append("    " + self.memory.line())
        if self.steps_ms:
            lines.append("    alone, ms: " + ", ".join(f"{name} {ms:.3f}" for name, ms in self.steps_ms.items()))
        if self.sampled:
            rates = (f"{name}: {sampled.decode:.1f} ({sampled.left_to_host} by the host)" for name, sampled in self.sampled.items())
            lines.append("    sampled: " + ", ".join(rates))
        if self.windows_ms:
            lines.append("    windows, ms by rows: " + ", ".join(f"{num}: {ms:.3f}" for num, ms in self.windows_ms.items()))
        return lines


def _beside(ours: float, theirs: float | None) -> str:
    return f" ({ours / theirs:.2f} x {theirs:.0f})" if theirs else ""


@dataclass(frozen=True)
class CardBench:
    card: str
    num_threads: int
    shm_dir: Path
    sizes: Sizes
    more_prompts: tuple[int, ...]
    bandwidths: Bandwidths

    @property
    def prompt_sizes(self) -> tuple[int, ...]:
        return tuple(sorted({self.sizes.chunk, *self.more_prompts}))

    def figures(self, model: BenchModel, ratio: float) -> Figures:
        found = Figures(model.expert_type, ratio, model.routing.zipf if model.routing else 0.0, bytes_per_token=model.bytes_per_token)
        found.kv_type, found.decode_after = self.sizes.kv_type, self.sizes.decode_after
        found.decode_limit = decode_limit(model, ratio, self.bandwidths)
        before = free_gpu_bytes().get(self.card)
        policy = self._policy(model)
        start = time.perf_counter()
        with self._runner(model, ratio, policy) as runner:
            found.open_s = time.perf_counter() - start
            planned = dict(runner.plan_bytes)
            taken = None if before is None else before - free_gpu_bytes()[self.card]
            found.memory = Memory(planned, sum(planned.values()), taken)
            run = _Run(runner, model, self.sizes)
            self._measure_prompts(run, policy, found)
            self._measure_decode(run, policy, found)
            if ratio == 1 and self.card.startswith("cuda:"):
                found.steps_ms = runner.profile(1, self.sizes.decode_after + self.sizes.decode, 20)
            found.sampled = run.sampled()
            found.windows_ms = {num: run.window_ms(num) for num in WINDOWS}
            if planned.get("expert slots"):
                _round_trip(runner, found.memory)
        return found

    def _policy(self, model: BenchModel) -> RecordingPolicy:
        with open_arena(RandomModel(model.path, model.shape), self.shm_dir) as arena:
            blob_bytes = blob_bytes_table(arena.layout)
        usual = SwapPolicy(blob_bytes, np.zeros(blob_bytes.shape), experts_per_row=model.shape.top_k)
        return RecordingPolicy(usual, model.shape.experts)

    @contextmanager
    def _runner(self, model: BenchModel, ratio: float, policy: RecordingPolicy) -> Iterator[ModelRunner]:
        slots = round(model.shape.layers * model.shape.experts * ratio)
        sizes = {"slots": slots, "chunk": self.sizes.chunk, "context": self.sizes.context, "max_logits": 1, "kv_type": self.sizes.kv_type}
        with open_runner(
            RandomModel(model.path, model.shape),
            self.shm_dir,
            num_threads=self.num_threads,
            card=self.card,
            max_swaps=MAX_SWAPS,
            policy=policy,
            streamed_ratio=None,
            **sizes,  # type: ignore[arg-type]
        ) as runner:
            yield runner

    def _measure_prompts(self, run: _Run, policy: RecordingPolicy, found: Figures) -> None:
        for num in (SHORT_PROMPT, *self.prompt_sizes):
            repeats = self.sizes.repeats if num <= self.sizes.chunk else 1
            seconds = _median(lambda num=num: run.prefill(num), repeats)  # type: ignore[misc]
            found.first_token_ms[num] = 1e3 * seconds
            found.prompts[num] = num / seconds
            found.prompt_limits[num] = prompt_limit(run.model, found.resident_ratio, min(num, self.sizes.chunk), self.bandwidths)
            if num == self.sizes.chunk:
                found.distinct_experts = policy.windows[-1].size / run.model.shape.layers

    def _measure_decode(self, run: _Run, policy: RecordingPolicy, found: Figures) -> None:
        run.prefill(self.sizes.decode_after)
        run.decode()
        before, swaps = run.runner.stats()["rows_by_tier"], run.runner.stats()["swaps"]
        held = np.flatnonzero(run.runner.cache.resident).tolist()
        policy.windows.clear()
        found.decode_runs = [self.sizes.decode / run.decode() for _ in range(self.sizes.repeats)]
        found.decode = statistics.median(found.decode_runs)
        after = run.runner.stats()
        found.rows_by_tier = {tier: num - before.get(tier, 0) for tier, num in after["rows_by_tier"].items()}
        if not policy.windows:  # a full card is asked rarely
            return
        uses = np.concatenate(policy.windows).tolist()
        slots = int(after["slots"])
        ours = found.rows_by_tier.get("own", 0) / max(sum(found.rows_by_tier.values()), 1)
        hits = lru_hits(uses, slots, held), clairvoyant_hits(uses, slots, held)
        found.hits = Hits(ours, *hits, slots, len(uses), after["swaps"] - swaps)


@dataclass(frozen=True)
class _Run:
    """A runner and what is asked of it, always with random tokens."""

    runner: ModelRunner
    model: BenchModel
    sizes: Sizes

    def prefill(self, num_tokens: int) -> float:
        """Seconds to the first token of a fresh prompt."""
        tokens = self._tokens(num_tokens)
        likeliest = -1
        start = time.perf_counter()
        for first in range(0, num_tokens, self.sizes.chunk):
            likeliest = self.runner.run(tokens[first : first + self.sizes.chunk], first, 1)[-1].likeliest
            self.runner.between_windows()
        seconds = time.perf_counter() - start
        assert likeliest >= 0
        return seconds

    def decode(self) -> float:
        """Seconds of so many windows, sampling and policy included. What is sampled is not what comes next: experts are to differ."""
        tokens = self._tokens(self.sizes.decode)
        start = time.perf_counter()
        for step, token in enumerate(tokens):
            assert self.runner.run([token], self.sizes.decode_after + step, 1)[-1].likeliest >= 0
            self.runner.between_windows()
        return time.perf_counter() - start

    def sampled(self) -> dict[str, Sampled]:
        """All ways to choose a token, as often as decoding is repeated."""
        rounds = [{name: self._decode_sampled(sampling) for name, sampling in SAMPLINGS.items()} for _ in range(self.sizes.repeats)]
        return {
            name: Sampled(statistics.median(each[name][0] for each in rounds), sum(each[name][1] for each in rounds)) for name in SAMPLINGS
        }

    def _decode_sampled(self, sampling: Sampling) -> tuple[float, int]:
        """Tokens per second, and how many the card left to the host."""
        tokens, left = self._tokens(self.sizes.decode), 0
        sampler = Sampler(sampling, self.model.shape.vocab, tokens)
        start = time.perf_counter()
        for step, token in enumerate(tokens):
            position = self.sizes.decode_after + step
            chooser = sampler.chooser(position + 1)
            row = self.runner.run([token], position, 1, chooser)[-1]
            left += chooser is not None and row.chosen is None
            sampler.accept(sampler.choose(row, position + 1).token)
            self.runner.between_windows()
        return self.sizes.decode / (time.perf_counter() - start), left

    def window_ms(self, num_rows: int) -> float:
        """Median of windows of so many fresh tokens behind those that are there."""

        def seconds() -> float:
            tokens = self._tokens(num_rows)
            start = time.perf_counter()
            assert self.runner.run(tokens, self.sizes.decode_after, 1)[-1].likeliest >= 0
            self.runner.between_windows()
            return time.perf_counter() - start

        return 1e3 * _median(seconds, WINDOW_REPEATS)

    def _tokens(self, num: int) -> list[int]:
        tokens: list[int] = np.random.default_rng(time.time_ns()).integers(0, self.model.shape.vocab - 1, num).tolist()
        return tokens


def _median(run: Callable[[], float], repeats: int) -> float:
    run()
    return statistics.median(run() for _ in range(repeats))


def _round_trip(runner: ModelRunner, memory: Memory) -> None:
    start = time.perf_counter()
    runner.free_memory(runner.slots_bytes // MIB)
    memory.give_back_s = time.perf_counter() - start
    start = time.perf_counter()
    runner.take_memory()
    memory.take_again_s = time.perf_counter() - start
    start = time.perf_counter()
    fill(runner)
    memory.fill_s = time.perf_counter() - start
