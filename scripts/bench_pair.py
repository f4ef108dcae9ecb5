"""The pair in numbers, on whatever two cards there are.

    python -m scripts.bench_pair [MODEL.gguf] [--set cards=cuda:0,cuda:1 ...] [--slots 0.35,0.46] [--limit-s 300] --out FOLDER

    alone        one request: on one card, on a pair whose helper sleeps, on the plain peer tier (no link)
    wake         the first stream before, while the helper wakes, while both run and afterwards, each with its longest gap, and the
                 parts of the time to the second's first token
    two          two requests at once with the link, without it, and on two lanes that know nothing of each other; and one after
                 the other
    fits         the same model with all experts on each card: one request, and two on lanes apart (--fits)
    halves       half of the experts on each card, so that none is missing: what the other card costs by itself (--fits)

Each variant is a server's desk of its own with real engines, no HTTP. Prompts are random token ids, so that nothing is reused. Tokens
are timed where the desk hands them out. Writes pair.json after every row, and pair.svg; medians of --repeat runs. What the time
does not allow, or what fails, stands under `not_measured` with its reason.

--slots caps the cards: a count, or a share of the experts, for both or for each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.demo import with_model
from appliance.desk.status import PairPhase
from appliance.errors import TandemError
from appliance.log import configure_logging
from appliance.memory.limits import usable_cores
from appliance.memory.plan import chosen_cards, plan_for
from appliance.settings import Settings, load_settings
from scripts.pair_bench.plot import plot
from scripts.pair_bench.record import Deadline, NotMeasuredError, Record
from scripts.pair_bench.rows import Row, Sizes, measure_alone, measure_one_after_the_other, measure_two, measure_wake
from scripts.pair_bench.streams import Bench, bench_of

LEAST_S = 15.0
"""Less time than this starts no desk."""
Measure = Callable[[Bench], Row]


@dataclass(frozen=True)
class Variant:
    """A desk and its rows."""

    settings: Settings
    slots: tuple[int | None, ...]
    rows: dict[str, Measure]


class PairBench:
    def __init__(self, settings: Settings, slots: tuple[int | None, ...], num_experts: int, options: argparse.Namespace) -> None:
        self._settings = settings
        self._slots = slots
        self._num_experts = num_experts
        self._sizes = Sizes(options.tokens, options.repeat)
        self._prompt = options.prompt
        self._out: Path = options.out
        self._deadline = Deadline(options.limit_s)
        self._hold_s = options.hold_s
        self._measures_fits = options.fits

    def run(self) -> Record:
        variants = self._variants()
        names = [name for variant in variants for name in variant.rows]
        record = Record(self._out / "pair.json", self._about(), names)
        for variant in variants:
            self._measure(variant, record)
        return record

    def _variants(self) -> list[Variant]:
        """What says most comes first."""
        plain = with_elastic(self._settings, enabled=False)
        pair = with_elastic(self._settings, enabled=True, hold_s=self._hold_s)
        awake = with_elastic(pair, hold_s=3600.0)
        one_card = plain.model_copy(update={"cards": chosen_cards(self._settings.cards)[0]})
        sizes, slots = self._sizes, self._slots
        asleep: dict[str, Measure] = {
            "alone, helper asleep": lambda bench: measure_alone(bench, sizes),
            "wake": self._wake,
            "one after the other": lambda bench: measure_one_after_the_other(bench, sizes),
        }
        with_link: dict[str, Measure] = {"two, with link": self._two_awake}
        without: dict[str, Measure] = {
            "alone, plain peer tier": lambda bench: measure_alone(bench, sizes),
            "two, without link": self._two_awake,
        }
        variants = [
            Variant(pair, slots, asleep),
            Variant(awake, slots, with_link),
            Variant(with_elastic(awake, link=False), slots, without),
            Variant(one_card, slots, {"alone, one card": lambda bench: measure_alone(bench, sizes)}),
            Variant(plain, slots, {"two, lanes apart": lambda bench: measure_two(bench, sizes, PairPhase.ASLEEP)}),
        ]
        if self._measures_fits:
            fits: dict[str, Measure] = {
                "fits: alone, one card": lambda bench: measure_alone(bench, sizes),
                "fits: two, lanes apart": lambda bench: measure_two(bench, sizes, PairPhase.ASLEEP),
            }
            halves: dict[str, Measure] = {
                "halves: alone, helper asleep": lambda bench: measure_alone(bench, sizes),
                "halves: two, with link": self._two_awake,
            }
            half = self._num_experts // 2
            variants[4:4] = [
                Variant(plain, (self._num_experts, self._num_experts), fits),
                Variant(awake, (half, self._num_experts - half), halves),
            ]
        return variants

    def _measure(self, variant: Variant, record: Record) -> None:
        names = list(variant.rows)
        if self._deadline.left_s < LEAST_S:
            record.miss(names, "no time was left")
            return
        try:
            with bench_of(variant.settings, variant.slots, self._prompt, self._deadline) as bench:
                for name, measure in variant.rows.items():
                    record.measure(name, lambda measure=measure: measure(bench))  # type: ignore[misc]
        except (NotMeasuredError, TandemError) as error:
            record.miss(names, str(error))

    def _wake(self, bench: Bench) -> Row:
        wake = measure_wake(bench, self._sizes)
        (self._out / "pair.svg").write_text(plot(wake.first, wake.second))
        return wake.row

    def _two_awake(self, bench: Bench) -> Row:
        bench.wait_for(PairPhase.ASLEEP)
        for underway in [bench.start(self._sizes.tokens) for _ in range(2)]:  # wakes the helper
            underway.finish()
        return measure_two(bench, self._sizes, PairPhase.AWAKE)

    def _about(self) -> dict[str, Any]:
        return {
            "cards": chosen_cards(self._settings.cards),
            "cores": usable_cores(),
            "model": str(self._settings.model),
            "experts": self._num_experts,
            "slots": self._slots,
            "prompt_tokens": self._prompt,
            "new_tokens": self._sizes.tokens,
            "repeat": self._sizes.repeat,
            "hold_s": self._hold_s,
        }


def with_elastic(settings: Settings, **values: object) -> Settings:
    return settings.model_copy(update={"elastic": settings.elastic.model_copy(update=values)})


def parse_slots(text: str | None, num_experts: int) -> tuple[int | None, ...]:
    """`300`, `0.4` or one of them for each card: counts for both cards. ValueError if it is neither."""
    if text is None:
        return (None, None)
    numbers = [round(float(part) * num_experts) if "." in part else int(part) for part in text.split(",")]
    if len(numbers) not in (1, 2) or min(numbers) < 1:
        raise ValueError(f"{text!r} is not a number of slots for one or two cards")
    return (numbers[0], numbers[-1])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any setting, such as context=4096")
    parser.add_argument("--slots", help="of each card: counts or shares of the experts, such as 0.35,0.46")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--hold-s", type=float, default=1.0)
    parser.add_argument("--limit-s", type=float, default=1800.0, help="for everything together")
    parser.add_argument("--fits", action="store_true", help="also with room for all experts")
    parser.add_argument("--out", type=Path, default=Path())
    return parser.parse_args()


def main() -> int:
    options = parse()
    settings = with_model(load_settings({"model": options.model, **dict(pair.split("=", 1) for pair in options.set)}))
    configure_logging("warning", "console")
    num_experts = plan_for(settings.model_copy(update={"slots": 0})).num_experts
    slots = parse_slots(options.slots, num_experts)
    options.out.mkdir(parents=True, exist_ok=True)
    record = PairBench(settings, slots, num_experts, options).run()
    return 0 if record.rows else 1


if __name__ == "__main__":
    sys.exit(main())
