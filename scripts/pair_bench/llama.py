"""llama.cpp with its layers split over all cards: one sequence, and two together, by how many layers' experts are on the CPU.

    python -m scripts.pair_bench.llama --bin DIR --model FILE --off-card 9,0 [--threads N] [--limit-s 200]

`llama-batched-bench` on random tokens: 128 tokens after 512, flash attention on, experts on the CPU in pinned memory. It measures one
sequence and two by turns, three times; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from scripts.pair_bench.children import say
from scripts.pair_bench.record import Deadline

PROMPT, NEW = 512, 128
REPEATS = 3
LEAST_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="folder of llama-batched-bench")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--off-card", default="9,0", help="for each run, how many layers' experts are on the CPU")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--gpu-layers", type=int, default=99)
    parser.add_argument("--limit-s", type=float, default=240.0, help="for all runs together")
    options = parser.parse_args()
    deadline = Deadline(options.limit_s)
    failures = 0
    for off_card in [int(number) for number in options.off_card.split(",")]:
        if deadline.left_s < LEAST_S:
            found: dict[str, object] = {"not_measured": "no time was left"}
        else:
            found = measure(options, off_card, deadline.left_s)
        failures += "not_measured" in found
        say({f"experts of {off_card} layers on the CPU": found})
    return 1 if failures else 0


def measure(options: argparse.Namespace, off_card: int, limit_s: float) -> dict[str, object]:
    argv = [str(options.bin / "llama-batched-bench"), "-m", str(options.model), "-ngl", str(options.gpu_layers), "-sm", "layer"]
    argv += ["-ncmoe", str(off_card), "-fa", "on", "-lm", "none", "-t", str(options.threads), "-c", "4096", "-b", "2048", "-ub", "2048"]
    argv += ["-npp", str(PROMPT), "-ntg", str(NEW), "-npl", ",".join(["1,2"] * REPEATS), "--output-format", "jsonl"]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"not_measured": f"it was stopped after {limit_s:.0f} s"}
    except OSError as error:
        return {"not_measured": str(error)}
    print(done.stderr[-3000:], flush=True)
    if done.returncode != 0:
        return {"not_measured": f"it ended with code {done.returncode}: {done.stderr.strip()[-300:]}"}
    return read_rates(done.stdout.splitlines())


def read_rates(lines: Iterable[str]) -> dict[str, object]:
    """Tokens per second of each number of sequences, from lines of JSON among others."""
    decode: dict[int, list[float]] = {}
    prompt: dict[int, list[float]] = {}
    for line in lines:
        if line.startswith("{"):
            row = json.loads(line)
            decode.setdefault(row["pl"], []).append(row["speed_tg"])
            prompt.setdefault(row["pl"], []).append(row["speed_pp"])
    if not decode:
        return {"not_measured": "it printed no results"}
    names = {1: "one", 2: "two"}
    medians: dict[str, object] = {f"{names[num]}_tokens_per_s": round(statistics.median(rates), 1) for num, rates in decode.items()}
    return medians | {f"{names[num]}_prompt_tokens_per_s": round(statistics.median(rates), 1) for num, rates in prompt.items()}


if __name__ == "__main__":
    sys.exit(main())
