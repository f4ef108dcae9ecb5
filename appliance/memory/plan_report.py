"""A plan as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.memory.plan import Plan
from appliance.units import format_bytes


def render_plan(plan: Plan) -> str:
    """Plain text of several lines, without a line end at the end."""
    config = plan.config
    lines = [
        f"{config.name} ({config.arch}): {config.layers} layers, {config.experts} experts per layer of which {config.top_k} per token",
        f"context {plan.context} tokens, prompt chunks of {plan.chunk}, key/value cache in {plan.kv_type}",
        "",
        *_cards(plan),
        "",
        *_host(plan),
    ]
    return "\n".join(lines)


def render_pair(plan: Plan) -> str:
    """Both states of an elastic pair: what the second card holds, and how much of the model lies in slots."""
    lead, helper = plan.cards
    rest = format_bytes(helper.total_bytes - helper.slots_bytes)
    held = f"{(lead.slots + helper.slots) / plan.num_experts:.0%} of the experts in slots, if they are as different as they can be"
    rows = [
        ("requests", lead.card, helper.card),
        ("one at a time", "the lead's slots", f"the lead's too, {format_bytes(helper.slots_bytes)}; of the sleeping helper {rest}"),
        ("two at a time", "the lead's slots", f"the helper's, {format_bytes(helper.slots_bytes)}, and {rest}"),
    ]
    lines = [*(line.rstrip() for line in _table(rows)), held]
    if helper.reserve_bytes > lead.reserve_bytes:
        lines.append(f"{format_bytes(helper.reserve_bytes)} of {helper.card} are left free: both engines' part of CUDA is there")
    return "\n".join(lines)


def _cards(plan: Plan) -> list[str]:
    consumers = [card.consumers() for card in plan.cards]
    rows = [("card", *(card.card for card in plan.cards))]
    rows += [(name, *(format_bytes(of_card[name]) for of_card in consumers)) for name in consumers[0]]
    rows += [("together", *(format_bytes(card.total_bytes) for card in plan.cards))]
    if any(card.budget_bytes is not None for card in plan.cards):
        rows += [("budget", *("-" if card.budget_bytes is None else format_bytes(card.budget_bytes) for card in plan.cards))]
    if any(card.reserve_bytes for card in plan.cards):
        rows += [("left free", *(format_bytes(card.reserve_bytes) for card in plan.cards))]
    slots = [f"{card.card} has {card.slots} expert slots: {_classes(plan, index)}" for index, card in enumerate(plan.cards)]
    return [*_table(rows), "", *slots]


def _classes(plan: Plan, index: int) -> str:
    card = plan.cards[index]
    ratio = card.slots / plan.num_experts
    sizes = ", ".join(f"{dealt.slots} of {format_bytes(dealt.blob_bytes)}" for dealt in card.slot_classes if dealt.slots)
    return f"{ratio:.0%} of {plan.num_experts} experts" + (f" ({sizes})" if sizes else "")


def _host(plan: Plan) -> list[str]:
    host, machine = plan.host, plan.host.machine
    shm = "no limit of its own" if machine.shm_bytes is None else f"{format_bytes(machine.shm_bytes)} there"
    rows = [
        ("host memory", "", ""),
        ("arena", format_bytes(host.arena_bytes), f"in {machine.shm_dir}, {shm}"),
        ("host cards", format_bytes(host.cards_bytes), ""),
        *([("parked conversations", format_bytes(host.parked_bytes), "at most")] if host.parked_bytes else []),
        *([("link", format_bytes(host.link_bytes), "")] if host.link_bytes else []),
        ("processes", format_bytes(host.processes_bytes), "estimated"),
        ("together", format_bytes(host.total_bytes), f"of {format_bytes(machine.memory_bytes)} that {machine.memory_source} leaves"),
    ]
    return [line.rstrip() for line in _table(rows)]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *_cells(row, widths)]) for row in rows]


def _cells(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Sizes to the right; remarks, which are longer than any size, to the left."""
    return [cell.rjust(width) if width < 16 else cell.ljust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
