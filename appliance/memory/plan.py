"""What goes where, in bytes, decided before anything is loaded; the engine allocates exactly this.

    card     dense weights + key/value cache + workspace + tables + expert slots     <= its budget, if it has one
    host     arena + processes + host cards                                          <= what this container leaves
    shm_dir  arena                                                                   <= what is free there

`make_plan` is pure; `plan_for` asks the file and the machine. A host card lies in host memory, so its slots hold copies of
blobs that the arena holds too: by default it gets slots for a quarter of the experts, where memory allows. A GPU's slots take
all that its own memory has left, each card by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from appliance.errors import MemoryBudgetError, SettingsError, UnsupportedModelError
from appliance.gguf_file import TensorInfo, open_gguf
from appliance.memory.arena import HEADER_BYTES, ArenaPlace
from appliance.memory.arena_file import obtainable_bytes
from appliance.memory.budget import Change, Shortage, shortage_error
from appliance.memory.gpus import free_gpu_bytes, is_built_for_gpus
from appliance.memory.layout import ArenaLayout, arena_layout, becomes_float32, is_expert_tensor
from appliance.memory.limits import memory_limit, shm_space
from appliance.memory.link_file import link_bytes
from appliance.memory.slots import SlotClass, deal_slots, slot_order, slots_that_fit
from appliance.memory.workspace import KvType, cuda_tables_bytes, cuda_workspace_bytes, kv_bytes, residency_bytes, workspace_bytes
from appliance.models.config import ModelConfig, read_config
from appliance.settings import MAX_CARDS, Settings, parse_cards
from appliance.units import MIB, format_bytes

DEFAULT_CONTEXT = 8192
MIN_CONTEXT = 512
MIN_CHUNK = 32
"""Advice does not go below these."""
HOST_CARD_EXPERTS_RATIO = 0.25
"""Share of the experts that a host card has slots for, unless it is told otherwise."""
HOST_CHUNK = 512
CUDA_CHUNK = 2048
"""Prompt tokens in one go, unless it is told otherwise."""
CUDA_RESERVE_BYTES = 768 * MIB
"""Left free on a GPU, for each process on it, for context, kernels and captured graphs: 568 MiB on an H200 (docs/benchmarks/gpu.md)."""
PARKED_CONTEXTS = 4
"""Full contexts that a pair may park, unless it is told otherwise."""
WEB_BYTES = 256 * MIB
ENGINE_BYTES = 128 * MIB
"""What the web server's processes together, and each engine, hold beside the cards: interpreter, libraries, vocabulary.

With a vocabulary of 152,000 tokens 195 and 65 MiB were measured; the rest is for requests.
"""
MAX_GPU_EXPERTS, MAX_GPU_TOP_K, GPU_WIDTH_UNIT = 512, 16, 32
"""What the kernels of windows are made for (cuda_ext/src/cuda_ops/experts_window.h)."""
DENSE_ALIGNMENT = 64
SMALLER_KV_TYPES: Mapping[KvType, tuple[KvType, ...]] = {"f32": ("f16", "int8"), "f16": ("int8",), "int8": ()}


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is wanted; `None` leaves the choice to the plan."""

    cards: tuple[str, ...]
    context: int | None
    chunk: int
    kv_type: KvType
    slots: int | None
    """Per card."""
    card_bytes: int | None
    """Budget of each card. None: an equal share of what the arena and the processes leave."""
    is_elastic: bool = False
    """The engines share their cards."""
    has_peer: bool = False
    """The lead uses the second card too while the helper sleeps."""
    peer_reserve_bytes: int = 0
    """Left free on the second card for others."""
    parked_bytes: int | None = 0
    """For conversations that lanes had to leave. None: a few contexts of a pair, else nothing."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to be planned with."""

    memory_bytes: int
    """Host memory that may still be taken, an arena that lies there already included."""
    memory_source: str
    shm_bytes: int | None
    """The same for the folder of the arena. None: it has no limit of its own."""
    shm_dir: str
    gpu_bytes: Mapping[str, int] = field(default_factory=dict)
    """Free memory by GPU, such as {"cuda:0": ...}."""


@dataclass(frozen=True, slots=True)
class CardPlan:
    """One card's memory. The engine allocates exactly these bytes."""

    card: str
    dense_bytes: int
    kv_bytes: int
    workspace_bytes: int
    tables_bytes: int
    slot_classes: tuple[SlotClass, ...]
    budget_bytes: int | None
    """None: bounded by host memory alone."""
    reserve_bytes: int = 0
    """Left free beside the budget: CUDA's own memory, the lead's tables on the second card, and what the settings leave to others."""

    @property
    def slots(self) -> int:
        return sum(dealt.slots for dealt in self.slot_classes)

    @property
    def slots_bytes(self) -> int:
        return sum(dealt.nbytes for dealt in self.slot_classes)

    @property
    def total_bytes(self) -> int:
        return sum(self.consumers().values())

    def consumers(self) -> dict[str, int]:
        """Bytes by consumer, in the glossary's words."""
        return {
            "dense weights": self.dense_bytes,
            "key/value cache": self.kv_bytes,
            "workspace": self.workspace_bytes,
            "tables": self.tables_bytes,
            "expert slots": self.slots_bytes,
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "card": self.card,
            "dense_bytes": self.dense_bytes,
            "kv_bytes": self.kv_bytes,
            "workspace_bytes": self.workspace_bytes,
            "tables_bytes": self.tables_bytes,
            "slots_bytes": self.slots_bytes,
            "total_bytes": self.total_bytes,
            "budget_bytes": self.budget_bytes,
            "reserve_bytes": self.reserve_bytes,
            "slots": self.slots,
            "slot_classes": [asdict(dealt) for dealt in self.slot_classes],
        }


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Host memory, of which the arena lies in shared memory."""

    arena_bytes: int
    processes_bytes: int
    cards_bytes: int
    machine: Machine
    parked_bytes: int = 0
    """Most that parked conversations may take, in shared memory."""
    link_bytes: int = 0
    """The file through which the engines of a pair meet, in shared memory."""

    @property
    def total_bytes(self) -> int:
        return self.arena_bytes + self.parked_bytes + self.link_bytes + self.processes_bytes + self.cards_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan that fits, with every choice made."""

    config: ModelConfig
    num_experts: int
    """Of all layers together."""
    context: int
    chunk: int
    kv_type: KvType
    cards: tuple[CardPlan, ...]
    host: HostPlan

    def card(self, name: str) -> CardPlan:
        """KeyError if the plan has no such card."""
        for plan in self.cards:
            if plan.card == name:
                return plan
        raise KeyError(name)

    def settings_for_engine(self, settings: Settings, card: str) -> Settings:
        """`settings` with the plan's choices for one card written in, so that its engine comes to the same plan without looking around."""
        return settings.model_copy(update={"context": self.context, "chunk": self.chunk, "slots": self.card(card).slots})

    def to_json(self) -> dict[str, Any]:
        """Sizes in bytes, as `tandem plan --json` prints them."""
        machine = self.host.machine
        return {
            "model": {
                "name": self.config.name,
                "architecture": self.config.arch,
                "layers": self.config.layers,
                "experts": self.num_experts,
            },
            "context": self.context,
            "chunk": self.chunk,
            "kv_type": self.kv_type,
            "cards": [card.to_json() for card in self.cards],
            "host": {
                "arena_bytes": self.host.arena_bytes,
                "processes_bytes": self.host.processes_bytes,
                "cards_bytes": self.host.cards_bytes,
                "parked_bytes": self.host.parked_bytes,
                "link_bytes": self.host.link_bytes,
                "total_bytes": self.host.total_bytes,
                "limit_bytes": machine.memory_bytes,
                "limit_source": machine.memory_source,
                "shm_dir": machine.shm_dir,
                "shm_limit_bytes": machine.shm_bytes,
            },
        }


def plan_for(settings: Settings) -> Plan:
    """The plan of a model on this machine. Reads metadata and tensor index, never weights.

    Raises ModelError, SettingsError or MemoryBudgetError with one sentence.
    """
    gguf = open_gguf(settings.model_path)
    config = read_config(gguf)
    layout = arena_layout(gguf, config)
    machine = _this_machine(settings, ArenaPlace(settings.shm_dir, gguf.content_id, layout))
    return make_plan(config, gguf.tensors, layout, request_from(settings), machine)


def request_from(settings: Settings) -> PlanRequest:
    """The part of the settings that a plan depends on. Raises SettingsError for cards that cannot be planned here."""
    cards = chosen_cards(settings.cards)
    card_bytes = None if settings.card_memory_mib is None else settings.card_memory_mib * MIB
    parked_bytes = None if settings.parked_mib is None else settings.parked_mib * MIB
    elastic = settings.elastic
    if elastic.enabled and len(cards) < MAX_CARDS:
        raise SettingsError(
            f"elastic_enabled needs two cards of one kind, and there is {', '.join(cards)} alone; name two, or switch it off",
            param="elastic_enabled",
        )
    if elastic.enabled and elastic.peer_reserve_mib and not is_gpu(cards[-1]):
        raise SettingsError(
            f"elastic_peer_reserve_mib leaves memory of a second GPU to others, and {cards[-1]} lies in host memory; leave it out, "
            "or lower card_memory_mib",
            param="elastic_peer_reserve_mib",
        )
    return PlanRequest(
        cards=cards,
        context=settings.context,
        chunk=settings.chunk or (CUDA_CHUNK if is_gpu(cards[0]) else HOST_CHUNK),
        kv_type=settings.kv_type,
        slots=settings.slots,
        card_bytes=card_bytes,
        is_elastic=elastic.enabled,
        has_peer=elastic.enabled and elastic.peer,
        peer_reserve_bytes=elastic.peer_reserve_mib * MIB if elastic.enabled else 0,
        parked_bytes=parked_bytes,
    )


def chosen_cards(wanted: str) -> tuple[str, ...]:
    """`auto` is the first two GPUs where this build and this machine have some, else two host cards."""
    if wanted != "auto":
        return parse_cards(wanted)
    gpus = tuple(free_gpu_bytes()) if is_built_for_gpus() else ()
    return gpus[:MAX_CARDS] or ("host:0", "host:1")


def is_gpu(card: str) -> bool:
    return card.startswith("cuda:")


def make_plan(config: ModelConfig, tensors: Mapping[str, TensorInfo], layout: ArenaLayout, request: PlanRequest, machine: Machine) -> Plan:
    """Decides everything that `request` leaves open, as large as fits.

    Raises SettingsError for a context or slots that the model has no use for, and MemoryBudgetError, which names the three largest
    consumers and the setting that frees most, when it does not fit.
    """
    planner = _Planner(config, layout, dense_bytes(tensors), machine)
    plan = planner.draft(request)
    shortages = _shortages(plan)
    if shortages:
        _check_peer_reserve(planner, request, shortages[0])
        changes = [planner.change(setting, requests, shortages[0].place) for setting, requests in _alternatives(request, plan)]
        raise shortage_error(shortages[0], changes)
    return plan


def _check_peer_reserve(planner: _Planner, request: PlanRequest, shortage: Shortage) -> None:
    """Names the setting whose fault a shortage is. Raises MemoryBudgetError."""
    plan = planner.draft(replace(request, peer_reserve_bytes=0))
    second = plan.cards[-1]
    if request.peer_reserve_bytes == 0 or shortage.place != f"card {second.card}" or _shortages(plan):
        return
    least_bytes = second.total_bytes - (second.slots_bytes if request.slots is None else 0)
    free_bytes = planner.machine.gpu_bytes[second.card] - second.reserve_bytes
    raise MemoryBudgetError(
        f"the model does not fit: elastic_peer_reserve_mib = {request.peer_reserve_bytes // MIB} leaves card {second.card} "
        f"{format_bytes(shortage.limit_bytes)} of the {format_bytes(free_bytes)} that are free for the engines, and it must hold at least "
        f"{format_bytes(least_bytes)}; lower elastic_peer_reserve_mib to {(free_bytes - least_bytes) // MIB} or less",
        param="elastic_peer_reserve_mib",
    )


def dense_bytes(tensors: Mapping[str, TensorInfo]) -> int:
    """Everything but the experts, each tensor aligned: as it stands in the file, but vectors and routers as float32."""
    return sum(_aligned(dense_tensor_bytes(tensor)) for tensor in tensors.values() if not is_expert_tensor(tensor.name))


def dense_tensor_bytes(tensor: TensorInfo) -> int:
    """Of one tensor on a card, not aligned."""
    return 4 * math.prod(tensor.shape) if becomes_float32(tensor) else tensor.nbytes


@dataclass(frozen=True, slots=True)
class _Planner:
    config: ModelConfig
    layout: ArenaLayout
    dense_bytes: int
    machine: Machine

    def draft(self, request: PlanRequest) -> Plan:
        """A plan with every choice made, whether it fits or not."""
        context = self._context(request)
        self._check_slots(request)
        chunk = min(request.chunk, context)
        arena_bytes = HEADER_BYTES + self.layout.total_bytes
        processes_bytes = WEB_BYTES + len(request.cards) * ENGINE_BYTES
        parked_bytes = PARKED_CONTEXTS * kv_bytes(self.config, context, request.kv_type) if request.is_elastic else 0
        parked_bytes = parked_bytes if request.parked_bytes is None else request.parked_bytes
        pair_bytes = link_bytes(self.config, chunk) if request.is_elastic else 0
        taken_bytes = arena_bytes + processes_bytes + parked_bytes + pair_bytes
        share = (self.machine.memory_bytes - taken_bytes) // len(request.cards)
        cards = tuple(self._card(card, request, context, chunk, share) for card in request.cards)
        host_bytes = sum(card.total_bytes for card in cards if not is_gpu(card.card))
        host = HostPlan(arena_bytes, processes_bytes, host_bytes, self.machine, parked_bytes, pair_bytes)
        return Plan(self.config, self.layout.num_experts, context, chunk, request.kv_type, cards, host)

    def change(self, setting: str, requests: Sequence[tuple[str, PlanRequest]], place: str) -> Change:
        """The first of `requests` (value, request) that fits, or the last."""
        for value, request in requests:
            plan = self.draft(request)
            change = Change(setting, value, _shortages(plan), _needed_bytes(plan, place))
            if not change.shortages:
                break
        return change

    def _context(self, request: PlanRequest) -> int:
        if request.context is None:
            return min(self.config.context, DEFAULT_CONTEXT)
        if request.context > self.config.context:
            raise SettingsError(
                f"context = {request.context} is more than the {self.config.context} tokens that {self.config.name} was made for; lower it",
                param="context",
            )
        return request.context

    def _check_slots(self, request: PlanRequest) -> None:
        if request.slots is not None and request.slots > self.layout.num_experts:
            raise SettingsError(
                f"slots = {request.slots} is more than the {self.layout.num_experts} experts of {self.config.name}; lower it", param="slots"
            )

    def _card(self, card: str, request: PlanRequest, context: int, chunk: int, share: int) -> CardPlan:
        return self._gpu(card, request, context, chunk) if is_gpu(card) else self._host_card(card, request, context, chunk, share)

    def _gpu(self, card: str, request: PlanRequest, context: int, chunk: int) -> CardPlan:
        """All that is left of the GPU's memory becomes slots."""
        free_bytes = self.machine.gpu_bytes.get(card)
        if free_bytes is None:
            there = ", ".join(self.machine.gpu_bytes) or "no GPU"
            raise SettingsError(f"cards = {','.join(request.cards)} names {card}, but this machine shows {there}", param="cards")
        self._check_gpu(card)
        reserve_bytes = self._reserve_bytes(card, request)
        budget = max(0, min(free_bytes - reserve_bytes, request.card_bytes or free_bytes))
        empty = CardPlan(
            card=card,
            dense_bytes=self.dense_bytes,
            kv_bytes=kv_bytes(self.config, context, request.kv_type),
            workspace_bytes=sum(cuda_workspace_bytes(self.config, chunk, context, self.layout.largest_blob_bytes).values()),
            tables_bytes=cuda_tables_bytes(self.config),
            slot_classes=(),
            budget_bytes=budget,
            reserve_bytes=reserve_bytes,
        )
        slots = slots_that_fit(slot_order(self.layout), budget - empty.total_bytes) if request.slots is None else request.slots
        return replace(empty, slot_classes=deal_slots(self.layout, slots))

    def _check_gpu(self, card: str) -> None:
        """Raises UnsupportedModelError for shapes that the kernels of windows do not have."""
        config = self.config
        if config.top_k > MAX_GPU_TOP_K or config.experts > MAX_GPU_EXPERTS:
            raise UnsupportedModelError(
                f"{config.name}: {config.top_k} of {config.experts} experts per token; card {card} can choose up to {MAX_GPU_TOP_K} "
                f"of {MAX_GPU_EXPERTS}, host cards any number"
            )
        if config.hidden % GPU_WIDTH_UNIT or config.q_width % GPU_WIDTH_UNIT:
            raise UnsupportedModelError(
                f"{config.name}: rows of {config.hidden} and {config.q_width} values; card {card} takes multiples of {GPU_WIDTH_UNIT}, "
                "host cards any"
            )

    def _reserve_bytes(self, card: str, request: PlanRequest) -> int:
        """The lead's process keeps its part of CUDA and a residency table on the second card while the helper is awake."""
        if card == request.cards[0]:
            return CUDA_RESERVE_BYTES
        lead_bytes = CUDA_RESERVE_BYTES + cuda_tables_bytes(self.config) if request.has_peer else 0
        return CUDA_RESERVE_BYTES + lead_bytes + request.peer_reserve_bytes

    def _host_card(self, card: str, request: PlanRequest, context: int, chunk: int, share: int) -> CardPlan:
        empty = CardPlan(
            card=card,
            dense_bytes=self.dense_bytes,
            kv_bytes=kv_bytes(self.config, context, request.kv_type),
            workspace_bytes=sum(workspace_bytes(self.config, chunk, context).values()),
            tables_bytes=residency_bytes(self.config),
            slot_classes=(),
            budget_bytes=request.card_bytes,
        )
        budget = share if request.card_bytes is None else min(share, request.card_bytes)
        slots = self._slots(budget - empty.total_bytes) if request.slots is None else request.slots
        return replace(empty, slot_classes=deal_slots(self.layout, slots))

    def _slots(self, free_bytes: int) -> int:
        wanted = int(self.layout.num_experts * HOST_CARD_EXPERTS_RATIO)
        return slots_that_fit(slot_order(self.layout)[:wanted], free_bytes)


def _shortages(plan: Plan) -> tuple[Shortage, ...]:
    """Every place that must hold more than it can, the worst first."""
    short = [place for place in _places(plan) if place.needed_bytes > place.limit_bytes]
    return tuple(sorted(short, key=lambda place: place.limit_bytes - place.needed_bytes))


def _needed_bytes(plan: Plan, place: str) -> int:
    """What the place of that name must hold; 0 if the plan has no such place."""
    return next((candidate.needed_bytes for candidate in _places(plan) if candidate.place == place), 0)


def _places(plan: Plan) -> list[Shortage]:
    machine = plan.host.machine
    cards = [
        Shortage(f"card {card.card}", *_budget_source(card), card.consumers(), _budget_remedy(card))
        for card in plan.cards
        if card.budget_bytes is not None
    ]
    if machine.shm_bytes is None:
        return [*cards, _host_place(plan)]
    remedy = "make it larger (docker run --shm-size, the chart's shared memory size) or set shm_dir to a larger folder in memory"
    shm = Shortage(machine.shm_dir, "its size", machine.shm_bytes, _shared(plan), remedy)
    return [shm, *cards, _host_place(plan)]


def _host_place(plan: Plan) -> Shortage:
    machine = plan.host.machine
    consumers = _shared(plan) | {"the processes": plan.host.processes_bytes}
    of_cards = "" if len(plan.cards) == 1 else f" of {len(plan.cards)} cards"
    for card in plan.cards:
        for name, nbytes in {} if is_gpu(card.card) else card.consumers().items():
            consumers[name + of_cards] = consumers.get(name + of_cards, 0) + nbytes
    return Shortage("host memory", machine.memory_source, machine.memory_bytes, consumers)


def _budget_source(card: CardPlan) -> tuple[str, int]:
    return ("what is free there" if is_gpu(card.card) else "card_memory_mib"), card.budget_bytes or 0


def _budget_remedy(card: CardPlan) -> str:
    return f"use a card with {_needed_mib(card)} MiB free" if is_gpu(card.card) else f"raise card_memory_mib to {_needed_mib(card)}"


def _shared(plan: Plan) -> dict[str, int]:
    """What lies in the folder of the arena."""
    shared = {"the arena": plan.host.arena_bytes, "parked conversations": plan.host.parked_bytes, "the link": plan.host.link_bytes}
    return {name: nbytes for name, nbytes in shared.items() if nbytes or name == "the arena"}


def _needed_mib(card: CardPlan) -> int:
    return -(-(card.total_bytes + card.reserve_bytes) // MIB)


def _alternatives(request: PlanRequest, plan: Plan) -> Iterator[tuple[str, list[tuple[str, PlanRequest]]]]:
    """Settings that could be lowered, each with ever smaller values."""
    contexts = list(_halves(plan.context, MIN_CONTEXT))
    if contexts:
        smaller = [(context, min(request.chunk, context)) for context in contexts]
        yield "context", [(str(context), replace(request, context=context, chunk=chunk)) for context, chunk in smaller]
    chunks = list(_halves(plan.chunk, MIN_CHUNK))
    if chunks:
        yield "chunk", [(str(chunk), replace(request, chunk=chunk)) for chunk in chunks]
    if smaller_types := SMALLER_KV_TYPES[request.kv_type]:
        yield "kv_type", [(kv_type, replace(request, kv_type=kv_type)) for kv_type in smaller_types]
    if request.slots:
        yield "slots", [(str(slots), replace(request, slots=slots)) for slots in (*_halves(request.slots, 1), 0)]
    if parked_mib := plan.host.parked_bytes // MIB:
        yield "parked_mib", [(str(mib), replace(request, parked_bytes=mib * MIB)) for mib in (*_halves(parked_mib, 1), 0)]
    if len(request.cards) > 1 and not request.is_elastic:
        yield "cards", [(request.cards[0], replace(request, cards=request.cards[:1]))]


def _halves(value: int, least: int) -> Iterator[int]:
    while value // 2 >= least:
        value //= 2
        yield value


def _aligned(nbytes: int) -> int:
    return -(-nbytes // DENSE_ALIGNMENT) * DENSE_ALIGNMENT


def _this_machine(settings: Settings, place: ArenaPlace) -> Machine:
    """What is free, with the pages of arenas that are used again or make room."""
    limit, space = memory_limit(), shm_space(settings.shm_dir)
    held_bytes = obtainable_bytes(place)
    return Machine(
        memory_bytes=limit.available_bytes + held_bytes,
        memory_source=limit.source,
        shm_bytes=space.free_bytes + held_bytes if space.total_bytes else None,
        shm_dir=str(settings.shm_dir),
        gpu_bytes=free_gpu_bytes() if is_gpu(chosen_cards(settings.cards)[0]) else {},
    )
