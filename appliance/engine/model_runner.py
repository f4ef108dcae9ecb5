"""The model on its card, as the engine loop sees it: rows of tokens in, logits out, swaps between windows.

`ModelRunner.open` takes everything that will ever be needed, and runs the largest chunk once: what can run out of memory does so
before the engine says that it is ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import structlog

from appliance.engine.experts import ExpertCache
from appliance.engine.generation import RunnerStats
from appliance.engine.graph import Graph, GraphSizes
from appliance.engine.logits import LogitsRow
from appliance.engine.loop import CardMemory
from appliance.errors import EngineError, MemoryBudgetError, SettingsError
from appliance.gguf_file import GgufFile, open_gguf
from appliance.memory.arena import Arena, ArenaPlace
from appliance.memory.layout import ArenaLayout, arena_layout
from appliance.memory.plan import CardPlan, Machine, make_plan, request_from
from appliance.memory.policy import Policy, SwapPolicy, blob_bytes_table, fill_order
from appliance.memory.profile import Profile, learn, load_profile, profile_path, read_profile
from appliance.models.config import ModelConfig, read_config
from appliance.protocol import LoadProgress
from appliance.settings import Settings
from appliance.units import MIB, format_bytes
from cuda_ext import _native as native

REPORT_INTERVAL_S = 0.2
Report = Callable[[LoadProgress], None]

_ANY_MACHINE = Machine(memory_bytes=1 << 62, memory_source="the plan of the desk", shm_bytes=None, shm_dir="")
"""The desk has planned with the real one, and written its choices into the settings."""
_log = structlog.get_logger()


class LanePlace(Protocol):
    """Which card an engine has and how many threads."""

    @property
    def card(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def share_index(self) -> int: ...
    @property
    def share_count(self) -> int: ...


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How a model is run, beside its plan."""

    sizes: GraphSizes
    num_threads: int
    isa: str
    max_swaps: int
    share: tuple[int, int] = (0, 1)
    """Which part of the profile the cache takes: (index, count)."""
    learned_profile: Path | None = None
    """Where the uses of this run are merged into when it ends. None: nowhere."""


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model's file, what it says about itself, and its experts in shared memory."""

    gguf: GgufFile
    config: ModelConfig
    arena: Arena


class ModelRunner:
    """Confined to the engine loop, but `interrupt` and `hold_threads` may be called from any thread."""

    def __init__(
        self,
        model: OpenModel,
        plan: CardPlan,
        options: RunnerOptions,
        *,
        profile: Profile,
        policy: Policy | None = None,
        report: Report | None = None,
    ) -> None:
        """Loads, fills the cache and warms up. `policy`: None is the usual one. The runner owns the arena from here on.

        Raises CorruptModelError, UnsupportedModelError or MemoryBudgetError.
        """
        self._model = model
        self._plan = plan
        self._options = options
        self._profile = profile
        self._given_bytes = 0
        self._is_closed = False
        self._rows_since_boundary = 0
        self._num_rows = 0
        self._pool = native.Pool(options.num_threads)
        card = native.HostCard(self._pool, options.isa)
        classes = blob_bytes_table(model.arena.layout)
        try:
            self._graph = Graph(card, model.gguf, model.config, model.arena, options.sizes)
            policy = policy or SwapPolicy(classes, profile.uses, experts_per_row=model.config.top_k)
            table, uses = self._graph.table, self._graph.uses
            self._cache = ExpertCache(card, table, uses, model.arena.layout, policy, options.max_swaps)
            self._cache.add_slots(plan.slot_classes)
        except MemoryError:
            raise MemoryBudgetError(
                f"card {plan.card} needs {plan.total_bytes} bytes, but the system does not give them; lower slots or context"
            ) from None
        self._graph.load_dense(_reporter(report, "dense"))
        slots = {slots.blob_bytes: slots.slots for slots in plan.slot_classes}
        self._cache.fill(fill_order(profile.uses, classes, slots, options.share), _reporter(report, "cache"))
        self._warm_rows = self._warm_up(_reporter(report, "warmup"))

    @classmethod
    def open(cls, settings: Settings, lane: LanePlace, report: Report) -> ModelRunner:
        """The runner of one engine process: `settings` with the desk's plan written in; the arena must be sealed.

        Raises TandemError with the reason why the model cannot be run.
        """
        if settings.model is None:
            raise SettingsError("no model is named; give a GGUF file", param="model")
        if not lane.card.startswith("host:"):
            raise SettingsError(f"card {lane.card}: this version runs host cards only; use host:0", param="cards")
        gguf = open_gguf(settings.model)
        config = read_config(gguf)
        layout = arena_layout(gguf, config)
        plan = make_plan(config, gguf.tensors, layout, replace(request_from(settings), cards=(lane.card,)), _ANY_MACHINE)
        learned = profile_path(settings.state_dir or _default_state_dir(), gguf.fingerprint)
        options = RunnerOptions(
            sizes=GraphSizes.planned(plan.chunk, plan.context, plan.kv_type),
            num_threads=lane.num_threads,
            isa=choose_isa(settings.isa),
            max_swaps=settings.max_swaps,
            share=(lane.share_index, lane.share_count),
            learned_profile=learned,
        )
        profile = _profile(settings.profile, learned, layout, gguf.fingerprint)
        arena = Arena.open(ArenaPlace(settings.shm_dir, gguf.content_id, layout))
        return cls(OpenModel(gguf, config, arena), plan.card(lane.card), options, profile=profile, report=report)

    @property
    def max_rows(self) -> int:
        return self._options.sizes.max_rows

    @property
    def context(self) -> int:
        return self._options.sizes.context

    @property
    def vocab(self) -> int:
        return self._model.config.vocab

    @property
    def plan_bytes(self) -> Mapping[str, int]:
        """Bytes allocated on the card, by consumer."""
        return self._graph.card.bytes_by_use()

    @property
    def cache(self) -> ExpertCache:
        return self._cache

    def run(self, tokens: Sequence[int], position: int, num_logits: int) -> Sequence[LogitsRow]:
        """Computes `tokens` at the positions from `position` on; what was there is overwritten.

        Returns the logits of the last `num_logits` tokens, valid until the next run. Raises
        WindowInterruptedError, or EngineError for rows beyond `max_rows` or `context`.
        """
        if self._is_closed:
            raise EngineError("the model was closed; start the engine again")
        logits = self._graph.run(tokens, position, num_logits)
        self._rows_since_boundary += len(tokens)
        return logits

    def between_windows(self) -> None:
        """Puts landed swaps into the residency table and starts new ones."""
        self._cache.between_windows(self._rows_since_boundary)
        self._num_rows += self._rows_since_boundary
        self._rows_since_boundary = 0

    def interrupt(self) -> None:
        """The run in progress, or else the next one, raises WindowInterruptedError within one operation. Thread-safe."""
        self._graph.interrupt()

    def hold_threads(self, num_threads: int) -> int:
        """Lets the last `num_threads` threads of the pool sit out. Returns how many do: one always works."""
        self._pool.hold(min(max(num_threads, 0), self._pool.num_threads - 1))
        return self._pool.num_held

    def free_memory(self, free_mib: int) -> CardMemory:
        """Gives slots back until `free_mib` MiB of the card's planned memory are free.

        Raises MemoryBudgetError, having given nothing back, if all slots together are smaller than that.
        """
        missing_bytes = free_mib * MIB - self._given_bytes
        if free_mib * MIB > self._plan.slots_bytes:
            raise MemoryBudgetError(
                f"{free_mib} MiB cannot be freed on card {self._plan.card}: its expert slots hold {format_bytes(self._plan.slots_bytes)}"
            )
        if missing_bytes > 0:
            self._given_bytes += self._cache.give_back(missing_bytes)
        return self._memory()

    def take_memory(self) -> CardMemory:
        """Takes the planned slots again and fills them."""
        self._cache.take_again()
        self._given_bytes = 0
        return self._memory()

    def stats(self) -> RunnerStats:
        table = self._graph.table
        return RunnerStats(
            rows_by_tier={"own": table.own_rows - self._warm_rows[0], "host": table.host_rows - self._warm_rows[1]},
            swaps=self._cache.num_swaps,
            resident_experts=self._cache.num_resident,
            slots=self._cache.num_slots,
            isa=self._options.isa,
            pool_threads=self._pool.num_threads,
            pool_held=self._pool.num_held,
        )

    def close(self) -> None:
        """Merges the uses of this run into the learned profile and gives the arena back. Idempotent; no run follows it."""
        if self._is_closed:
            return
        self._is_closed = True
        self._learn()
        self._cache.settle()  # copies under way read the arena
        self._model.arena.close()

    def _learn(self) -> None:
        learned = self._options.learned_profile
        if learned is None or self._num_rows == 0:
            return
        try:
            learn(learned, self._model.arena.layout, self._profile.fingerprint, self._cache.total_uses, self._num_rows)
        except OSError as error:
            _log.warning("the profile could not be written", path=str(learned), reason=error.strerror)

    def _memory(self) -> CardMemory:
        return CardMemory((self._plan.total_bytes - self._given_bytes) // MIB, self._given_bytes // MIB)

    def _warm_up(self, progress: Callable[[int, int], None]) -> tuple[int, int]:
        """Runs the largest chunk with the most logits; what it leaves in the key/value cache is overwritten.

        Returns how many routed rows it took in slots and in the arena, which are nobody's.
        """
        sizes = self._options.sizes
        try:
            self._graph.run([0] * sizes.max_rows, 0, sizes.max_logits)
        except EngineError as error:
            raise EngineError(f"the warm-up failed: {error.message}") from None
        self._cache.forget_uses()
        progress(sizes.max_rows, sizes.max_rows)
        return self._graph.table.own_rows, self._graph.table.host_rows


def choose_isa(wanted: str) -> str:
    """`auto` is the best that this machine runs. Raises SettingsError for one that it does not."""
    runnable = native.isas()
    if wanted == "auto":
        return runnable[-1]
    if wanted not in runnable:
        raise SettingsError(f"isa = {wanted}: this CPU runs {', '.join(runnable)}; use auto", param="isa")
    return wanted


def _profile(named: Path | None, learned: Path, layout: ArenaLayout, fingerprint: str) -> Profile:
    """The profile that the settings name, which must be right, or else the one learned here, if there is one."""
    return load_profile(learned, layout, fingerprint) if named is None else read_profile(named, layout, fingerprint)


def _default_state_dir() -> Path:
    return Path.home() / ".local" / "state" / "tandem"


def _reporter(report: Report | None, stage: str) -> Callable[[int, int], None]:
    """Passes progress on, at most once in `REPORT_INTERVAL_S` and at the end."""
    last_s = time.monotonic()

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal last_s
        if report is None or (done_bytes < total_bytes and time.monotonic() < last_s + REPORT_INTERVAL_S):
            return
        last_s = time.monotonic()
        report(LoadProgress(stage=stage, done_bytes=done_bytes, total_bytes=total_bytes))

    return progress
