"""The tables of docs/benchmarks/gpu.md, from the JSON that the benchmark leaves. Everything else on that page is written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from appliance.units import MIB
from scripts.card_bench.engine import Sizes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "gpu.md"
BEGIN, END = "<!-- tables: python -m scripts.bench --table -->", "<!-- end of tables -->"
Result = Mapping[str, Any]


def read_run(path: Path) -> Mapping[str, Any]:
    """A run from its file. Raises whatever its tables stumble over if it is none."""
    run: Mapping[str, Any] = json.loads(path.read_text())
    tables([run])
    return run


def write_tables(runs: Sequence[Mapping[str, Any]], page: Path = PAGE) -> None:
    """Puts the tables of some runs between the two marks. Raises SystemExit if the page lacks them."""
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} lacks the marks between which tables stand: {BEGIN} and {END}")
    page.write_text(before + BEGIN + "\n\n" + tables(runs) + "\n\n" + END + after)


def tables(runs: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: speed, the cache under a skewed router, memory, and where the time of a token goes."""
    results = [{**result, "layers": run["layers"]} for run in runs for result in run["results"]]
    even = [result for result in results if not result["zipf"]]
    skewed = [result for result in results if result["zipf"]]
    parts = [
        ("Decode", _decode(even)),
        ("Decode by how tokens are chosen", _sampled(even)),
        ("Prompts", _prompts(even)),
        ("The expert cache, routers skewed after Zipf", _hits(skewed)),
        ("Memory and times", _memory([*even, *skewed])),
        ("One token, step by step, each kind of step alone", _steps(even)),
        ("Windows of several rows", _windows(even)),
    ]
    threads = {run["threads"] for run in runs}
    head = f"Threads: {', '.join(map(str, sorted(threads)))}."
    return "\n\n".join([head, *(f"### {title}\n\n{table}" for title, table in parts if table)])


def _decode(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        llama = result["llama"]
        rows.append(
            [
                _name(result),
                result["layers"],
                f"{result['resident_ratio']:.0%}",
                f"{result['decode']:.0f}",
                *([f"{llama['decode']:.0f}", f"**{result['decode'] / llama['decode']:.2f}**"] if llama else ["-", "-"]),
                f"{result['decode_limit']:.0f}",
                f"{result['decode'] / result['decode_limit']:.0%}",
                _tiers(result["rows_by_tier"]),
            ]
        )
    return _table(["experts", "layers", "on the card", "tok/s", "llama.cpp", "ratio", "limit", "of it", "tiers"], rows)


def _sampled(results: Sequence[Result]) -> str:
    measured = [result for result in results if result.get("sampled")]
    if not measured:
        return ""
    names = list(measured[0]["sampled"])
    rows = []
    for result in measured:
        usual, *others = (result["sampled"][name] for name in names)
        cells = [f"{each['decode']:.0f} ({each['decode'] / usual['decode']:.0%}; {each['left_to_host']} by the host)" for each in others]
        rows.append([_name(result), result["layers"], f"{result['resident_ratio']:.0%}", f"{usual['decode']:.0f}", *cells])
    return _table(["experts, tok/s", "layers", "on the card", *names], rows)


def _prompts(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        for num, rate in result["prompts"].items():
            theirs = (result["llama"] or {"prompts": {}})["prompts"].get(num)
            limit = result["prompt_limits"][num]
            rows.append(
                [
                    _name(result),
                    result["layers"],
                    f"{result['resident_ratio']:.0%}",
                    num,
                    f"{result['first_token_ms'][num]:.1f}",
                    f"{rate:.0f}",
                    *([f"{theirs:.0f}", f"**{rate / theirs:.2f}**"] if theirs else ["-", "-"]),
                    f"{limit:.0f}",
                    f"{rate / limit:.0%}",
                ]
            )
    head = ["experts", "layers", "on the card", "tokens", "first token, ms", "tok/s", "llama.cpp", "ratio", "limit", "of it"]
    return _table(head, rows)


def _name(result: Result) -> str:
    """The experts' type, and what of the measurement is not as usual; older results do not tell."""
    kv_type, decode_after = result.get("kv_type", Sizes.kv_type), result.get("decode_after", Sizes.decode_after)
    more = [f"cache {kv_type}"] if kv_type != Sizes.kv_type else []
    more += [f"behind {decode_after}"] if decode_after != Sizes.decode_after else []
    return ", ".join([result["expert_type"], *more])


def _hits(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        hits = result["hits"]
        if hits is None:
            continue
        shares = [f"{hits[name]:.1%}" for name in ("ours", "lru", "clairvoyant")]
        cells = [_name(result), result["layers"], f"{result['zipf']:g}", f"{result['resident_ratio']:.1%}", *shares]
        rows.append([*cells, hits["swaps"], f"{result['decode']:.0f}", f"{result['decode_limit']:.0f}"])
    return _table(["experts", "layers", "Zipf", "slots for", "hits", "LRU", "clairvoyant", "swaps", "tok/s", "limit at even use"], rows)


def _memory(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        memory = result["memory"]
        taken = "-" if memory["taken"] is None else f"{memory['taken'] / MIB:.0f}"
        slots = memory["planned_by_use"].get("expert slots", 0)
        sizes = [f"{(memory['planned'] - slots) / MIB:.0f}", f"{slots / MIB:.0f}", f"{memory['planned'] / MIB:.0f}", taken]
        times = [f"{result['arena_s']:.1f}", f"{result['open_s']:.1f}"]
        times += [f"{memory[name]:.3f}" for name in ("give_back_s", "take_again_s", "fill_s")] if slots else ["-", "-", "-"]
        rows.append([_name(result), result["layers"], f"{result['resident_ratio']:.0%}", *sizes, *times])
    head = [
        "experts",
        "layers",
        "on the card",
        "MiB but slots",
        "slots",
        "planned",
        "taken",
        "arena, s",
        "READY, s",
        "give back, s",
        "take, s",
        "fill, s",
    ]
    return _table(head, rows)


def _steps(results: Sequence[Result]) -> str:
    timed = [result for result in results if result["steps_ms"]]
    names = sorted({name for result in timed for name in result["steps_ms"]})

    def us(steps_ms: Mapping[str, float], name: str) -> str:
        return f"{1e3 * steps_ms[name]:.0f}" if name in steps_ms else "-"

    rows = [[_name(result), result["layers"], *(us(result["steps_ms"], name) for name in names)] for result in timed]
    return _table(["us, all layers", "layers", *names], rows)


def _windows(results: Sequence[Result]) -> str:
    timed = [result for result in results if result.get("windows_ms")]
    numbers = sorted({num for result in timed for num in result["windows_ms"]}, key=int)
    rows = [
        [_name(result), result["layers"], f"{result['resident_ratio']:.0%}"]
        + [f"{result['windows_ms'][num]:.2f}" if num in result["windows_ms"] else "-" for num in numbers]
        for result in timed
    ]
    return _table(["ms by rows", "layers", "on the card", *numbers], rows)


def _tiers(rows_by_tier: Mapping[str, int]) -> str:
    total = sum(rows_by_tier.values()) or 1
    return ", ".join(f"{tier} {num / total:.0%}" for tier, num in rows_by_tier.items() if num)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Empty without rows."""
    if not rows:
        return ""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])
