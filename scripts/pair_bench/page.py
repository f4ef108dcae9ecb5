"""The results of two cards as Markdown: every row, the ratios that matter beside what they should be, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.card_bench.limits import Bandwidths
from scripts.pair_bench.limits import TokenBytes, one_limit, two_limit

Found = Mapping[str, Any]

TIERS = ("own", "peer", "linked", "fetched", "streamed", "host")


@dataclass(frozen=True)
class Aim:
    """A figure and what it should be. None: it was not measured."""

    what: str
    value: float | None
    wanted: float
    is_least: bool = True

    @property
    def is_met(self) -> bool:
        return self.value is not None and (self.value >= self.wanted if self.is_least else self.value <= self.wanted)

    def cells(self) -> list[str]:
        sign = ">=" if self.is_least else "<="
        met = "not measured" if self.value is None else "yes" if self.is_met else "NO"
        return [self.what, "-" if self.value is None else f"{self.value:.3g}", f"{sign} {self.wanted:g}", met]


def page(found: Found) -> str:
    parts = [
        ("Stages", _stages(found)),
        ("Ratios", table(["what", "measured", "wanted", "met"], [aim.cells() for aim in aims(found)])),
        ("One request and two", _rows(found)),
        ("The first stream, while a second comes and goes", _wake(found)),
        ("llama.cpp, layers split over both cards", _llama(found)),
        ("Between the cards", _wires(found)),
        ("Not measured", _missing(found)),
    ]
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in parts if text) + "\n"


def aims(found: Found) -> list[Aim]:
    rows = _pair_rows(found)
    alone = _at(rows, "alone, helper asleep", "tokens_per_s")
    linked = _at(rows, "two, with link", "together_tokens_per_s")
    apart = _at(rows, "two, without link", "together_tokens_per_s")
    fits = _at(rows, "fits: two, lanes apart", "together_tokens_per_s")
    first = _at(rows, "wake", "first") or {}
    gaps = [first[name]["longest_gap_s"] for name in first]
    capped, everything = llama_runs(found)
    layers = _at(found, "model", "layers")
    own = _at(rows, "fits: alone, one card", "tokens_per_s")
    each_own = _at(rows, "fits: two, lanes apart", "each_tokens_per_s")
    return [
        Aim("one request: pair / plain peer tier", _ratio(alone, _at(rows, "alone, plain peer tier", "tokens_per_s")), 1.0),
        Aim("two at once / one after the other", _ratio(linked, _at(rows, "one after the other", "together_tokens_per_s")), 1.57),
        Aim("two at once: with / without link", _ratio(linked, apart), 1.14),
        Aim("first stream while both run / before", _at(first, "while both run", "of_before"), 0.82),
        Aim("first stream while the helper wakes / before", _at(first, "while the helper wakes", "of_before"), 0.70),
        Aim("longest gap in the first stream, s", max(gaps, default=None), 0.07, is_least=False),
        Aim("rows of the host pool: with / without link", _host_ratio(rows), 0.4, is_least=False),
        Aim("two at once / llama.cpp's two, caps on", _ratio(linked, _at(capped, "two_tokens_per_s")), 3.0),
        Aim("one request / llama.cpp's one, caps on", _ratio(alone, _at(capped, "one_tokens_per_s")), 2.5),
        Aim("two at once / llama.cpp's two, everything on cards", _ratio(fits, _at(everything, "two_tokens_per_s")), 1.5),
        Aim("link, us per layer", _cost_us(each_own, _at(rows, "halves: two, with link", "each_tokens_per_s"), layers), 20, is_least=False),
        Aim(
            "peer tier, us per layer", _cost_us(own, _at(rows, "halves: alone, helper asleep", "tokens_per_s"), layers), 20, is_least=False
        ),
    ]


def llama_runs(found: Found) -> tuple[Found, Found]:
    """Those with most and with fewest experts on the CPU; empty where there is none."""
    runs = {int(name.split()[2]): run for name, run in found.get("llama", {}).items()}
    return (runs[max(runs)] if runs and max(runs) else {}), runs.get(0, {})


def _cost_us(without: float | None, with_it: float | None, layers: int | None) -> float | None:
    """What a layer takes longer when no expert is missing in either case."""
    return None if not without or not with_it or not layers else (1 / with_it - 1 / without) / layers * 1e6


def _host_ratio(rows: Found) -> float | None:
    """Per routed row."""
    shares = []
    for name in ("two, with link", "two, without link"):
        counters = _at(rows, name, "counters") or {}
        routed = sum(counters.get(tier, 0) for tier in TIERS)
        shares.append((counters.get("host", 0) + counters.get("streamed", 0)) / routed if routed else None)
    return _ratio(shares[0], shares[1])


def _rows(found: Found) -> str:
    cells = []
    for name, row in _pair_rows(found).items():
        if name == "wake":
            continue
        rate = row.get("tokens_per_s") or row.get("together_tokens_per_s")
        limit = _limit(found, name)
        share = _ratio(rate, limit)
        runs = ", ".join(f"{run:.1f}" for run in row.get("runs", []) if run is not None)
        limits = ["-" if limit is None else f"{limit:.0f}", "-" if share is None else f"{share:.0%}"]
        cells.append([name, "-" if rate is None else f"{rate:.1f}", runs, *limits, _tiers(row.get("counters", {}))])
    return table(["", "tok/s", "runs", "limit", "of it", "rows, prompts' too"], cells)


def _limit(found: Found, name: str) -> float | None:
    model, about = found.get("model", {}), found.get("pair", {}).get("about", {})
    if "bytes_per_token" not in model or not about.get("experts") or None in about.get("slots", [None]):
        return None
    experts = model["expert_bytes_per_token"]
    token = TokenBytes(model["bytes_per_token"] - experts, experts)
    own, peer = (min(num / about["experts"], 1.0) for num in about["slots"])
    kind, _, rest = name.rpartition(": ")
    own, peer = {"fits": (1.0, 0.0), "halves": (0.5, 0.5)}.get(kind, (own, peer))
    if rest == "two, lanes apart":
        return 2 * one_limit(token, own, 0.0, Bandwidths())
    if rest == "alone, one card":
        return one_limit(token, own, 0.0, Bandwidths())
    return (two_limit if rest.startswith("two") else one_limit)(token, own, peer, Bandwidths())


def _wake(found: Found) -> str:
    wake = _pair_rows(found).get("wake")
    if not wake:
        return ""
    cells = []
    for name, span in wake["first"].items():
        rate, ratio = span["tokens_per_s"], span["of_before"]
        shown = ["-" if number is None else f"{number:.2f}" for number in (rate, ratio)]
        cells.append([name, f"{span['seconds']:.2f}", *shown, f"{span['longest_gap_s']:.3f}"])
    parts = ", ".join(f"{name.removesuffix('_s')} {seconds} s" for name, seconds in wake["of_which"].items())
    spans = table(["", "seconds", "tok/s", "of before", "longest gap, s"], cells)
    return f"{spans}\n\nThe second's first token after {wake['second_first_token_s']} s, of which {parts}."


def _llama(found: Found) -> str:
    runs = found.get("llama", {})
    cells = [[name, *(str(run.get(key, "-")) for key in ("one_tokens_per_s", "two_tokens_per_s"))] for name, run in runs.items()]
    return table(["", "one, tok/s", "two together, tok/s"], cells)


def _wires(found: Found) -> str:
    topology = found.get("topology", {})
    numbers = [[name, f"{value:g}"] for name, value in topology.items() if isinstance(value, int | float)]
    texts = [f"{name}: {topology[name]}" for name in ("peer_check",) if name in topology]
    return "\n\n".join(filter(None, [table(["what", "measured"], numbers), *texts]))


def _stages(found: Found) -> str:
    cells = [[name, stage["result"], f"{stage['seconds']:.0f}", stage["note"]] for name, stage in found.get("stages", {}).items()]
    return table(["stage", "result", "s", "note"], cells)


def _missing(found: Found) -> str:
    missing = found.get("pair", {}).get("not_measured", {})
    return "\n".join(f"* {name}: {reason}" for name, reason in missing.items())


def _pair_rows(found: Found) -> dict[str, Any]:
    rows: dict[str, Any] = found.get("pair", {}).get("rows", {})
    return rows


def _at(found: Found, *names: str) -> Any:
    """What stands there, or None."""
    value: Any = found
    for name in names:
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _tiers(counters: Mapping[str, int]) -> str:
    rows = {tier: counters[tier] for tier in TIERS if counters.get(tier)}
    total = sum(rows.values()) or 1
    return ", ".join(f"{tier} {num / total:.0%}" for tier, num in rows.items())


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Empty without rows."""
    if not rows:
        return ""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
