"""One case with one build of the native module. Every line `RESULT {"failures": [...], "notes": {...}}` is a row of it; with `part` and
`seconds` where there are several."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from appliance.log import configure_logging
from scripts.gpu_cases.findings import Findings, Part
from scripts.gpu_cases.tree import tree_with
from tests.card.native_module import load_native

NAMES = ("placement", "small", "memory", "link_cost")
PAIR_NAMES = ("pair_ids", "pair_kills", "freeze")
"""With two cards and processes of their own."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=NAMES + PAIR_NAMES)
    parser.add_argument("--native", type=Path, help="the native module; default: the installed one")
    parser.add_argument("--card", default="cuda:0", help="the pair's cases: both, such as cuda:0,cuda:1")
    parser.add_argument("--quick", action="store_true", help="sizes for emulated cards; fewer tokens and rounds on host cards")
    options = parser.parse_args()
    return _say(_pair_parts(options) if options.name in PAIR_NAMES else [_one_card(options)])


def _one_card(options: argparse.Namespace) -> Findings:
    if options.native:
        load_native(options.native.resolve())
    found: Findings = _module(options.name).run(options.card, quick=options.quick)
    return found


def _pair_parts(options: argparse.Namespace) -> Iterable[Part]:
    """Its processes import the module, this one does not."""
    configure_logging("error", "console")
    with tree_with(options.native):
        yield from _module(options.name).run(tuple(options.card.split(",")), quick=options.quick)


def _module(name: str) -> Any:
    return importlib.import_module(f"scripts.gpu_cases.{name}")  # it imports the native module


def _say(results: Iterable[Findings | Part]) -> int:
    num_failures = 0
    for result in results:
        findings = result.findings if isinstance(result, Part) else result
        line: dict[str, object] = {"failures": findings.failures, "notes": findings.notes}
        if isinstance(result, Part):
            line |= {"part": result.name, "seconds": round(result.seconds, 1)}
        print("RESULT " + json.dumps(line), flush=True)
        num_failures += len(findings.failures)
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
