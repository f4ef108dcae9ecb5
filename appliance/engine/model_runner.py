"""The model on its card, as the engine loop sees it: rows of tokens in, logits out, swaps between windows.

`ModelRunner.open` takes everything that will ever be needed, and runs the largest chunk once: what can run out of memory does so
before the engine says that it is ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import structlog

from appliance.engine.cards import Card, open_card
from appliance.engine.experts import ExpertCache, Uses
from appliance.engine.generation import RunnerStats, WindowInterruptedError
from appliance.engine.graph import Graph, GraphSizes, PromptBytes
from appliance.engine.kv_state import Bytes, KvState, kv_state_id
from appliance.engine.link import LinkEnd
from appliance.engine.link_options import LinkOptions
from appliance.engine.logits import LogitsRow
from appliance.engine.loop import CardMemory
from appliance.engine.pair import Pair
from appliance.engine.peer import PeerPlan, PeerRows, PeerTier, reaches
from appliance.engine.streaming import StreamedShare
from appliance.errors import EngineError, MemoryBudgetError, SettingsError
from appliance.gguf_file import GgufFile, open_gguf
from appliance.memory.arena import Arena, ArenaPlace
from appliance.memory.layout import ArenaLayout, arena_layout
from appliance.memory.plan import CardPlan, Machine, is_gpu, make_plan, request_from
from appliance.memory.policy import WHOLE, ExpertId, Policy, Share, SwapPolicy, blob_bytes_table, fill_ranks
from appliance.memory.profile import Profile, learn, load_profile, profile_path, read_profile
from appliance.memory.slots import deal_slots
from appliance.memory.workspace import WINDOW_ROWS
from appliance.models.config import ModelConfig, read_config
from appliance.models.recording import Table
from appliance.protocol import LoadProgress
from appliance.settings import Settings
from appliance.units import MIB, format_bytes
from cuda_ext import _native as native

REPORT_INTERVAL_S = 0.2

MOST_ROWS_UNREAD = 64
"""While nothing can be swapped, what rows used is read after so many: a GPU would wait for it."""

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
    def share(self) -> Share: ...
    @property
    def peer_card(self) -> str | None: ...
    @property
    def peer_slots(self) -> int | None:
        """None: as many as the own card."""

    @property
    def link(self) -> LinkOptions | None: ...
    @property
    def starts_asleep(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How a model is run, beside its plan."""

    sizes: GraphSizes
    num_threads: int
    isa: str
    max_swaps: int
    share: Share = WHOLE
    """Which part of the profile the cache takes."""
    learned_profile: Path | None = None
    """Where the uses of this run are merged into when it ends. None: nowhere."""
    peer: PeerPlan | None = None
    """A second card as more expert cache."""
    link: LinkOptions | None = None
    """Another engine that computes rows for this one, and the other way round."""
    starts_asleep: bool = False
    """The expert cache has no memory until it is told to take it."""
    streamed_ratio: float | None = None
    """Share of what a GPU misses that it reads from the arena itself. None: found out while windows run."""


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
        self._streamed = StreamedShare(options.streamed_ratio)
        self._pool = native.Pool(options.num_threads)
        card = open_card(plan.card, self._pool, options.isa)
        classes = blob_bytes_table(model.arena.layout)
        try:
            self._graph = Graph(card, model.gguf, model.config, model.arena, options.sizes, is_gpu=is_gpu(plan.card))
            policy = policy or SwapPolicy(classes, profile.uses, experts_per_row=model.config.top_k)
            self._cache = ExpertCache(card, self._graph.table, model.arena.layout, policy, options.max_swaps)
            self._cache.add_slots(plan.slot_classes, present=not options.starts_asleep)
            self._pair = Pair(self._open_peer(card), self._open_link())
        except MemoryError:
            raise MemoryBudgetError(
                f"card {plan.card} needs {plan.total_bytes} bytes, but the system does not give them; lower slots or context"
            ) from None
        self._graph.load_dense(_reporter(report, "dense"))
        if options.starts_asleep:
            self._given_bytes = plan.slots_bytes
        else:
            self._cache.fill([ExpertId(*divmod(flat, model.config.experts)) for flat in self._share_of_ranks()], _reporter(report, "cache"))
        self._warm_rows, self._warm_bytes = self._warm_up(_reporter(report, "warmup"))
        self._kv_state = KvState(card, self._graph.kv, model.config, options.sizes.kv_type)

    @classmethod
    def open(cls, settings: Settings, lane: LanePlace, report: Report) -> ModelRunner:
        """The runner of one engine process: `settings` with the desk's plan written in; the arena must be sealed.

        Raises TandemError with the reason why the model cannot be run.
        """
        gguf = open_gguf(settings.model_path)
        config = read_config(gguf)
        layout = arena_layout(gguf, config)
        machine = replace(_ANY_MACHINE, gpu_bytes={lane.card: _ANY_MACHINE.memory_bytes})
        plan = make_plan(config, gguf.tensors, layout, replace(request_from(settings), cards=(lane.card,)), machine)
        learned = profile_path(settings.state_dir or _default_state_dir(), gguf.fingerprint)
        options = RunnerOptions(
            sizes=GraphSizes.planned(plan.chunk, plan.context, plan.kv_type),
            num_threads=lane.num_threads,
            isa=choose_isa(settings.isa),
            max_swaps=settings.max_swaps,
            share=lane.share,
            learned_profile=learned,
            peer=_peer_plan(lane, layout, plan.cards[0].slots),
            link=lane.link,
            starts_asleep=lane.starts_asleep,
        )
        profile = _profile(settings.profile, learned, layout, gguf.fingerprint)
        arena = Arena.open(ArenaPlace(settings.shm_dir, gguf.content_id, layout), for_gpu=is_gpu(lane.card))
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
    def slots_bytes(self) -> int:
        """Of all planned slots."""
        return self._plan.slots_bytes

    @property
    def cache(self) -> ExpertCache:
        return self._cache

    @property
    def peer(self) -> PeerTier | None:
        return self._pair.peer

    def run(self, tokens: Sequence[int], position: int, num_logits: int, chooser: native.Chooser | None = None) -> Sequence[LogitsRow]:
        """Computes `tokens` at the positions from `position` on; what was there is overwritten.

        Returns the logits of the last `num_logits` tokens, valid until the next run; with a `chooser`, which needs one of them, a GPU's
        row says what was chosen. Raises WindowInterruptedError, or EngineError for rows beyond `max_rows` or `context`.
        """
        if self._is_closed:
            raise EngineError("the model was closed; start the engine again")
        if self._graph.is_gpu and len(tokens) > WINDOW_ROWS:
            logits = self._run_prompt(tokens, position, num_logits, chooser)
        elif self._graph.is_gpu and not self._cache.holds_all:
            logits = self._run_with_misses(tokens, position, num_logits, chooser)
        else:
            logits = self._run_until_answered(tokens, position, num_logits, chooser)
        self._rows_since_boundary += len(tokens)
        return logits

    def between_windows(self) -> None:
        """Puts landed swaps into the residency table and starts new ones."""
        if self._cache.holds_all and not self._pair.is_filling and self._rows_since_boundary < MOST_ROWS_UNREAD:
            return
        uses = self._read_uses()
        self._cache.between_windows(uses, self._pair.held_elsewhere())
        self._pair.between_windows(uses, self._cache.held)

    def _read_uses(self) -> Uses:
        uses = self._cache.read_uses(self._rows_since_boundary)
        self._num_rows += self._rows_since_boundary
        self._rows_since_boundary = 0
        return uses

    def _note_uses(self) -> None:
        """What was put off for lack of anything to swap."""
        self._cache.note(self._read_uses())

    def _learned_profile(self) -> Profile:
        """The profile and what was used since."""
        self._note_uses()
        return self._profile.learned(self._cache.total_uses, self._num_rows)

    def _run_prompt(self, tokens: Sequence[int], position: int, num_logits: int, chooser: native.Chooser | None) -> Sequence[LogitsRow]:
        """A chunk on a GPU.

        Its kernels hold every multiprocessor for milliseconds, so the other engine, whose windows would wait so long in every layer,
        is offered nothing meanwhile.
        """
        with self._pair.drained():
            return self._run_until_answered(tokens, position, num_logits, chooser)

    def interrupt(self) -> None:
        """The run in progress, or else the next one, raises WindowInterruptedError within one operation. Thread-safe."""
        self._graph.interrupt()

    def profile(self, token: int, position: int, repeats: int) -> dict[str, float]:
        """Milliseconds by kind of step of one window of one row on a GPU, each alone. For benchmarks."""
        return self._graph.profile(token, position, repeats)

    def hold_threads(self, num_threads: int) -> int:
        """Lets the last `num_threads` threads of the pool sit out. Returns how many do: one always works."""
        self._pool.hold(min(max(num_threads, 0), self._pool.num_threads - 1))
        return self._pool.num_held

    def free_memory(self, free_mib: int) -> CardMemory:
        """Gives slots back until `free_mib` MiB of the card's planned memory are free.

        Raises MemoryBudgetError, having given nothing back, if all slots together are smaller than that.
        """
        missing_bytes = free_mib * MIB - self._given_bytes
        if free_mib > -(-max(self._plan.slots_bytes, self.plan_bytes.get("expert slots", 0)) // MIB):  # a GPU's memory comes in segments
            raise MemoryBudgetError(
                f"{free_mib} MiB cannot be freed on card {self._plan.card}: its expert slots hold {format_bytes(self._plan.slots_bytes)}"
            )
        if missing_bytes > 0:
            with self._pair.drained():
                self._given_bytes += self._cache.give_back(missing_bytes)
        return self._memory()

    def take_memory(self) -> CardMemory:
        """Takes the planned slots again; the next boundaries fill them, hottest first. Raises MemoryBudgetError."""
        if self._given_bytes:
            try:
                self._cache.take_again(self._ranks() if self.has_link else self._share_of_ranks())
            except MemoryError:
                raise MemoryBudgetError(f"card {self._plan.card} does not have the memory of its slots any more; free some") from None
        self._given_bytes = 0
        return self._memory()

    @property
    def is_filling(self) -> bool:
        """Slots that were taken again are not full yet."""
        return self._cache.is_filling or self._pair.is_filling

    def fills_before(self, num_rows: int) -> bool:
        """Whether a run of so many rows should wait until the own slots are full: a GPU's prompt streams what they do not hold, which is
        about everything, so what is to fill them goes the same way first, and stays."""
        return self._graph.is_gpu and num_rows > WINDOW_ROWS and self._cache.is_filling

    @property
    def has_peer(self) -> bool:
        return self._pair.peer is not None

    def attach_peer(self) -> None:
        """All steps of `attaching_peer` at once."""
        for _ in self.attaching_peer():
            pass

    def attaching_peer(self) -> Iterator[None]:
        """Takes the peer card's slots, a part at every step; windows may run between two steps, and the boundaries after the last one fill
        them. Raises MemoryBudgetError."""
        if self._pair.peer is not None:
            yield from self._pair.peer.attaching(self._ranks())

    def detach_peer(self) -> None:
        """All steps of `detaching_peer` at once."""
        for _ in self.detaching_peer():
            pass

    def detaching_peer(self) -> Iterator[None]:
        """Gives the peer card's slots back, a part at every step; windows may run between two steps."""
        if self._pair.peer is not None:
            yield from self._pair.peer.detaching()

    @property
    def has_link(self) -> bool:
        return self._pair.link is not None

    def serve_link(self, serving: bool) -> None:
        """Offers this card's experts to the other engine, or no longer."""
        if self._pair.link is not None:
            self._pair.link.serve(serving)

    @property
    def state_id(self) -> str:
        return kv_state_id(self._model.gguf.content_id, self._model.config, self._options.sizes.kv_type, self._plan.card)

    def state_bytes(self, num_tokens: int) -> int:
        return self._kv_state.nbytes(num_tokens)

    def save_state(self, num_tokens: int, out: Bytes) -> None:
        self._kv_state.save(num_tokens, out)

    def load_state(self, num_tokens: int, saved_tokens: int, state: Bytes) -> None:
        self._kv_state.load(num_tokens, saved_tokens, state)

    def stats(self) -> RunnerStats:
        rows = {tier: count - self._warm_rows[tier] for tier, count in self._graph.table.rows_by_tier.items()}
        copied = self._graph.prompt_bytes
        return RunnerStats(
            rows_by_tier={tier: count for tier, count in rows.items() if count or tier in ("own", "host")},
            swaps=self._cache.num_swaps + self._pair.num_swaps,
            resident_experts=self._cache.num_resident,
            slots=self._cache.num_slots,
            isa=self._options.isa,
            pool_threads=self._pool.num_threads,
            pool_held=self._pool.num_held,
            is_filling=self.is_filling,
            prompt_bytes_from_arena=copied.from_arena - self._warm_bytes.from_arena,
            prompt_bytes_from_peer=copied.from_peer - self._warm_bytes.from_peer,
            unpinned_bytes=self._graph.unpinned_bytes,
            **self._pair.stats(),
        )

    def close(self) -> None:
        """Merges the uses of this run into the learned profile and gives the arena back. Idempotent; no run follows it."""
        if self._is_closed:
            return
        self._is_closed = True
        self._learn()
        self._pair.close()
        self._cache.settle()  # copies under way read the arena
        self._graph.card.unpin()
        self._model.arena.close()

    def _learn(self) -> None:
        learned = self._options.learned_profile
        self._note_uses()
        if learned is None or self._num_rows == 0:
            return
        try:
            learn(learned, self._model.arena.layout, self._profile.fingerprint, self._cache.total_uses, self._num_rows)
        except OSError as error:
            _log.warning("the profile could not be written", path=str(learned), reason=error.strerror)

    def _memory(self) -> CardMemory:
        return CardMemory((self._plan.total_bytes - self._given_bytes) // MIB, self._given_bytes // MIB)

    def _run_with_misses(
        self, tokens: Sequence[int], position: int, num_logits: int, chooser: native.Chooser | None
    ) -> Sequence[LogitsRow]:
        """A window on a GPU, with a share of what it misses streamed."""
        if len(tokens) > 1:
            self._stream(self._streamed.usual)
            return self._run_until_answered(tokens, position, num_logits, chooser)
        self._stream(self._streamed.begin_window((self._pair.has_peer_now, self._pool.num_held > 0)))
        start = time.perf_counter()
        logits = self._run_until_answered(tokens, position, num_logits, chooser)
        self._streamed.end_window(time.perf_counter() - start)
        return logits

    def _stream(self, ratio: float) -> None:
        """The share of windows to come. Where it pays for the own GPU to read missing experts from the arena, it pays for the second."""
        self._graph.card.streamed_ratio = ratio  # type: ignore[attr-defined]
        if self._pair.peer is not None:
            self._pair.peer.set_streamed_ratio(ratio)

    def _run_until_answered(
        self, tokens: Sequence[int], position: int, num_logits: int, chooser: native.Chooser | None
    ) -> Sequence[LogitsRow]:
        """A run that is void because the other engine did not answer is done again, without it."""
        while True:
            self._pair.begin_window(len(tokens))
            try:
                return self._graph.run(tokens, position, num_logits, chooser)
            except WindowInterruptedError:
                if not self._pair.take_loss():
                    raise
                self._streamed.leave_out()
                _log.warning("the other engine did not answer; going on alone", position=position, rows=len(tokens))

    def _ranks(self) -> Iterable[int]:
        """All experts as flat indices, hottest first, by the profile and what was used since."""
        ranks: list[int] = self._learned_profile().ranks(self._model.arena.layout).tolist()
        return ranks

    def _share_of_ranks(self) -> Iterable[int]:
        """Those that fill the own slots where nobody tells what the other card has."""
        slots = {slots.blob_bytes: slots.slots for slots in self._plan.slot_classes}
        uses = self._learned_profile().uses
        ranks: list[int] = fill_ranks(uses, blob_bytes_table(self._model.arena.layout), slots, self._options.share).tolist()
        return ranks

    def _open_peer(self, card: Card) -> PeerTier | None:
        plan, layout, graph = self._options.peer, self._model.arena.layout, self._graph
        if plan is None:
            return None
        if is_gpu(plan.card) != graph.is_gpu:
            raise SettingsError(f"card {self._plan.card}: card {plan.card} is of another kind and cannot help it", param="cards")
        policy = SwapPolicy(blob_bytes_table(layout), self._profile.uses, experts_per_row=self._model.config.top_k)
        peer_card = open_card(plan.card, self._pool, self._options.isa, is_own=False)
        open_rows = self._peer_rows(plan, card, peer_card) if graph.is_gpu else None
        return PeerTier(plan, card, peer_card, graph.table, layout, policy, self._options.max_swaps, open_rows)

    def _peer_rows(self, plan: PeerPlan, card: Card, peer_card: Card) -> Callable[[Table], PeerRows]:
        """Two GPUs use each other's memory only after a trial. Called before the peer's slots are allocated."""
        wanted = reaches(self._plan.card, plan.card) if plan.is_direct is None else plan.is_direct
        is_direct = wanted and card.reach(peer_card)  # type: ignore[attr-defined]
        graph = self._graph

        def open_rows(table: Table) -> PeerRows:
            try:
                rows: PeerRows = native.CudaPeer(graph.program, graph.table, peer_card, table, is_direct)  # type: ignore[attr-defined]
            except ValueError as error:
                raise SettingsError(f"card {plan.card} cannot help card {self._plan.card}: {error}", param="cards") from None
            return rows

        return open_rows

    def _open_link(self) -> LinkEnd | None:
        options, model = self._options.link, self._model
        if options is None:
            return None
        return LinkEnd(options, model.config, model.arena.layout, model.gguf.content_id, self._options.isa, self._graph)

    def _warm_up(self, progress: Callable[[int, int], None]) -> tuple[dict[str, int], PromptBytes]:
        """Runs the largest chunk with the most logits, and one window; what they leave in the key/value cache is overwritten.

        Returns how many routed rows of each tier and how many bytes it took, which are nobody's.
        """
        sizes = self._options.sizes
        try:
            if self._graph.is_gpu:
                self._stream(self._streamed.usual)
            self._graph.run([0] * sizes.max_rows, 0, sizes.max_logits)
            self._graph.run([0], 0, 1)
            self._graph.prepare_windows()
        except EngineError as error:
            raise EngineError(f"the warm-up failed: {error.message}") from None
        self._cache.forget_uses()
        progress(sizes.max_rows, sizes.max_rows)
        return dict(self._graph.table.rows_by_tier), self._graph.prompt_bytes


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


def _peer_plan(lane: LanePlace, layout: ArenaLayout, own_slots: int) -> PeerPlan | None:
    if lane.peer_card is None:
        return None
    return PeerPlan(lane.peer_card, deal_slots(layout, own_slots if lane.peer_slots is None else lane.peer_slots))


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
