"""Everything about a pair on two GPUs in one command, within a time: stages in order of value, each a child with a limit of its own.

    python -m scripts.bench_two_cards --out FOLDER [--limit-s 560] [--stages topology,model,pair,llama] [--layers 48]

    build      llama.cpp for these GPUs, beside the first two stages (scripts/llama_source.py; --llama DIR: one that is built)
    topology   how the cards are linked, copy rates, latencies
    model      the model file and its arena, 59 and 57 GB with 48 layers, in --shm
    pair       scripts/bench_pair.py, cards capped to 35 % and 46 % of the experts
    llama      llama.cpp with its layers split over both cards, with 81 % of the experts on cards and with all

Writes two_cards.json, two_cards.md and log.txt after every stage, and what the stages write. What a stage that is stopped had
found till then stays. --grow-gib is for virtual machines whose memory grows as it is used.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.pair_bench.children import Child, Ended, run_child
from scripts.pair_bench.page import page
from scripts.pair_bench.prepare import MODEL
from scripts.pair_bench.record import Deadline

STAGES = ("topology", "model", "pair", "llama")
TOPOLOGY_S, MODEL_S, BUILD_S, LLAMA_S, GROW_S = 90.0, 200.0, 330.0, 110.0, 100.0
ON_CARDS = 0.81
PAIR_FILE = "pair.json"


class TwoCards:
    """Confined to one thread."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._out: Path = options.out
        self._out.mkdir(parents=True, exist_ok=True)
        self._log = self._out / "log.txt"
        self._build = Path(tempfile.gettempdir()) / "tandem-two-cards"
        self._model: Path = options.model or options.shm / MODEL
        self._deadline = Deadline(options.limit_s)
        self._beside: dict[str, Child] = {}
        self._found: dict[str, Any] = {
            "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "command": sys.argv[1:]},
            "stages": {},
        }

    def run(self, stages: list[str]) -> bool:
        """True if every stage went well."""
        if "llama" in stages and self._options.llama is None:
            self._start("build", *self._build_argv(), niceness=10)
        if self._options.grow_gib:
            self._start("memory", "-m", "scripts.pair_bench.memory", str(self._options.grow_gib))
        if "topology" in stages:
            self._stage("topology", TOPOLOGY_S, "-m", "scripts.pair_bench.topology", "--build", str(self._build))
        self._finish("memory", GROW_S)
        if "model" in stages:
            sizes = ["--layers", str(self._options.layers), "--experts", str(self._options.experts)]
            self._stage("model", MODEL_S, "-m", "scripts.pair_bench.prepare", "--folder", str(self._options.shm), *sizes)
        self._finish("build", BUILD_S)  # it would disturb the pair
        has_llama = self._options.llama is not None or self._stage_went_well("build")
        if "pair" in stages:
            reserve_s = LLAMA_S if "llama" in stages and has_llama else 0.0
            self._pair(self._deadline.left_s - reserve_s)
        if "llama" in stages and has_llama:
            self._llama()
        elif "llama" in stages:
            self._keep("llama", Ended("not started", 0.0, {}, "it was not built"))
        return all(stage["result"] == "ok" for stage in self._found["stages"].values())

    def close(self) -> None:
        """Ends what still runs beside the stages."""
        for child in self._beside.values():
            child.finish(0)

    def _pair(self, limit_s: float) -> None:
        options = self._options
        argv = ["-m", "scripts.bench_pair", str(self._model), "--set", f"cards={options.cards}", "--set", f"shm_dir={options.shm}"]
        argv += ["--set", f"state_dir={self._build / 'state'}", "--slots", options.slots, "--fits", "--out", str(self._out)]
        argv += [word for setting in options.set for word in ("--set", setting)]
        argv += ["--prompt", str(options.prompt), "--tokens", str(options.tokens), "--repeat", str(options.repeat)]
        argv += ["--limit-s", f"{max(limit_s - 10, 1):.0f}"]
        (self._out / PAIR_FILE).unlink(missing_ok=True)
        self._stage("pair", limit_s, *argv)

    def _llama(self) -> None:
        options = self._options
        off_card = f"{round(options.layers * (1 - ON_CARDS))},0"
        limit_s = self._deadline.left_s
        folder = options.llama or self._build / "llama" / "bin"
        argv = ["-m", "scripts.pair_bench.llama", "--bin", str(folder), "--model", str(self._model), "--off-card", off_card]
        self._stage("llama", limit_s, *argv, "--limit-s", f"{max(limit_s - 5, 1):.0f}")

    def _build_argv(self) -> list[str]:
        argv = ["-m", "scripts.llama_source", "build", str(self._build / "llama"), "--tool", "llama-batched-bench"]
        return [*argv, "--cuda", self._options.cuda] if self._options.cuda else argv

    def _start(self, name: str, *arguments: str, niceness: int = 0) -> None:
        """Beside the stages."""
        self._beside[name] = Child(name, [sys.executable, *arguments], self._log, is_shown=False, niceness=niceness)

    def _finish(self, name: str, limit_s: float) -> None:
        if name in self._beside:
            self._keep(name, self._beside.pop(name).finish(min(limit_s, self._deadline.left_s)))

    def _stage(self, name: str, limit_s: float, *arguments: str) -> None:
        ended = run_child(name, [sys.executable, *arguments], self._log, min(limit_s, self._deadline.left_s))
        self._keep(name, ended)

    def _stage_went_well(self, name: str) -> bool:
        stage = self._found["stages"].get(name)
        return stage is not None and stage["result"] == "ok"

    def _keep(self, name: str, ended: Ended) -> None:
        print(f"==== {name}: {ended.result}, {ended.seconds:.0f} s, {self._deadline.left_s:.0f} s are left", flush=True)
        self._found["stages"][name] = {"result": ended.result, "seconds": ended.seconds, "note": ended.note}
        pair = self._out / PAIR_FILE
        if name == "pair" and pair.exists():
            self._found["pair"] = json.loads(pair.read_text())
        elif ended.found:
            self._found[name] = ended.found
        (self._out / "two_cards.json").write_text(json.dumps(self._found, indent=1) + "\n")
        (self._out / "two_cards.md").write_text(page(self._found))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated")
    parser.add_argument("--limit-s", type=float, default=560.0, help="for everything together")
    parser.add_argument("--shm", type=Path, default=Path("/dev/shm/tandem-pair"), help="folder in memory for model and arena")
    parser.add_argument("--keep", action="store_true", help="leave that folder: the next run finds model and arena")
    parser.add_argument("--model", type=Path, help="another model than the synthetic one")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=512, help="per layer")
    parser.add_argument("--cards", default="cuda:0,cuda:1")
    parser.add_argument("--slots", default="0.35,0.46", help="as bench_pair takes them")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any setting of the pair")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--llama", type=Path, help="folder with a llama-batched-bench that is built already")
    parser.add_argument("--cuda", default="90", help="compute capability that llama.cpp is built for; empty: for the CPU")
    parser.add_argument("--grow-gib", type=int, default=0, help="memory that the machine is made to have first")
    options = parser.parse_args()
    if unknown := set(options.stages.split(",")) - set(STAGES):
        parser.error(f"unknown stages: {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    return options


def main() -> int:
    options = parse()
    is_ours = not options.shm.exists()
    bench = TwoCards(options)
    try:
        went_well = bench.run(options.stages.split(","))
    finally:
        bench.close()
        if is_ours and not options.keep:
            shutil.rmtree(options.shm, ignore_errors=True)
    print("\n" + (options.out / "two_cards.md").read_text())
    return 0 if went_well else 1


if __name__ == "__main__":
    sys.exit(main())
