"""One case with one build of the native module; the last line is `RESULT {"failures": [...], "notes": {...}}`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from tests.card.native_module import load_native

NAMES = ("placement", "small", "memory")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--native", type=Path, help="the native module; default: the installed one")
    parser.add_argument("--card", default="cuda:0")
    parser.add_argument("--quick", action="store_true", help="sizes for emulated cards")
    options = parser.parse_args()
    if options.native:
        load_native(options.native.resolve())
    case = importlib.import_module(f"scripts.gpu_cases.{options.name}")  # it imports the native module
    findings = case.run(options.card, quick=options.quick)
    print("RESULT " + json.dumps({"failures": findings.failures, "notes": findings.notes}), flush=True)
    return 1 if findings.failures else 0


if __name__ == "__main__":
    sys.exit(main())
