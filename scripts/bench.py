"""A synthetic model on one card, beside llama.cpp: decode, prompts, memory and the expert cache, by expert type and share of experts.

    python -m scripts.bench --folder DIR --out FILE.json [--types Q4_K,IQ3_S,MXFP4] [--resident 1,0.5,0] [--llama DIR]
    python -m scripts.bench --folder DIR --out FILE.json --zipf 1 --resident 0.75,0.5,0.25,0.125     the cache under a skewed router
    python -m scripts.bench --folder DIR --out FILE.json --resident 1 --prompts 1024,8192,32768      times to the first token
    python -m scripts.bench --table FILE.json...                                                     docs/benchmarks/gpu.md from results

Writes the model file into DIR (17 GB for Q4_K with 48 layers; a folder in memory is quickest), its experts into /dev/shm once more.
Tokens are random, so that experts are used evenly (or as --zipf says). llama.cpp is `llama-bench` in a folder of yours
(scripts/llama_source.py builds one); it keeps the experts of as many layers on the CPU as we keep experts off the card. Medians of
five. Every figure stands beside the limit by bytes and bandwidth. --quick is for trying the script: two layers, on a host card too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from appliance.memory.gpus import free_gpu_bytes
from scripts.card_bench.engine import CardBench, Figures, Sizes
from scripts.card_bench.limits import Bandwidths
from scripts.card_bench.llama import llama_figures
from scripts.card_bench.page import PAGE, read_run, write_tables
from scripts.host_bench.model import BenchModel, qwen3_shape, write_model
from scripts.host_bench.routing import Routing
from scripts.result_file import read_result
from tests.random_models import RandomModel, open_arena

QUICK = Sizes(chunk=256, decode_after=16, decode=16, repeats=1)


@dataclass(frozen=True)
class Wanted:
    """What is measured of each type."""

    card: str
    sizes: Sizes
    ratios: tuple[float, ...]
    prompts: tuple[int, ...]
    num_threads: int
    llama: Path | None
    bandwidths: Bandwidths


def measure_type(model: BenchModel, wanted: Wanted) -> list[Figures]:
    """Prints each result when it is there."""
    write_model(model)
    results = []
    with tempfile.TemporaryDirectory(prefix="tandem-bench-", dir="/dev/shm") as shm_dir:
        start = time.perf_counter()
        with open_arena(RandomModel(model.path, model.shape), Path(shm_dir)):
            arena_s = time.perf_counter() - start
        print(
            f"{model.expert_type}: {model.file_bytes / 1e9:.1f} GB, {model.bytes_per_token / 1e6:.0f} MB per token; arena {arena_s:.1f} s",
            flush=True,
        )
        bench = CardBench(wanted.card, wanted.num_threads, Path(shm_dir), wanted.sizes, wanted.prompts, wanted.bandwidths)
        for ratio in wanted.ratios:
            found = bench.figures(model, ratio)
            found.arena_s = arena_s
            if wanted.llama:
                found.llama = llama_figures(wanted.llama, model, ratio, wanted.num_threads, wanted.sizes.decode, bench.prompt_sizes)
            print("\n".join(found.lines()), flush=True)
            results.append(found)
    model.path.unlink()
    return results


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="for the model files")
    parser.add_argument("--card", default="cuda:0")
    parser.add_argument("--types", default="Q4_K,IQ3_S,MXFP4", help="of the experts")
    parser.add_argument("--dense-type", default="Q4_K", help="of attention and embedding")
    parser.add_argument("--resident", default="1,0.5,0", help="shares of the experts that the card has slots for")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--prompts", default="", help="lengths of more prompts, such as 1024,8192,32768")
    parser.add_argument("--context", type=int, default=4096, help="at least; more where a prompt needs it")
    parser.add_argument("--kv-type", choices=("f16", "f32", "int8"), default=Sizes.kv_type, help="of the key/value cache")
    parser.add_argument("--decode-after", type=int, help=f"how many tokens the decoded ones follow (default: {Sizes.decode_after})")
    parser.add_argument("--zipf", type=float, default=0.0, help="use of an expert falls with its rank to the power of this; 0 is even")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--llama", type=Path, help="folder with llama-bench")
    parser.add_argument("--out", type=Path, help="results as JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE.json", help=f"write the tables of {PAGE.name} from these results")
    for name, unit, usual in (("card", "TB/s", 4.25), ("pcie", "GB/s", 55.0), ("host", "GB/s", 87.0)):
        parser.add_argument(f"--{name}-bandwidth", type=float, default=usual, help=f"{unit}, default {usual}")
    options = parser.parse_args()
    if not options.table and not options.folder:
        parser.error("--folder is missing")
    if options.decode_after is not None and options.decode_after < 1:
        parser.error("--decode-after is at least 1")
    if options.llama and (options.kv_type != Sizes.kv_type or options.decode_after is not None):
        parser.error("--llama measures with f16 and behind nothing; leave out --kv-type and --decode-after")
    return options


def wanted_of(options: argparse.Namespace) -> Wanted:
    prompts = tuple(int(number) for number in options.prompts.split(",") if number)
    usual = QUICK if options.quick else Sizes()
    decode_after = usual.decode_after if options.decode_after is None else options.decode_after
    context = max(options.context, *(num + 1 for num in prompts), usual.chunk + 1, decode_after + usual.decode + 1)
    sizes = replace(usual, decode_after=decode_after, context=context, kv_type=options.kv_type)
    at = Bandwidths(options.card_bandwidth * 1e12, options.pcie_bandwidth * 1e9, options.host_bandwidth * 1e9)
    ratios = tuple(float(ratio) for ratio in options.resident.split(","))
    return Wanted(options.card, sizes, ratios, prompts, options.threads, options.llama, at)


def main() -> int:
    options = parse()
    if options.table:
        write_tables([read_result(path, read_run, "scripts.bench") for path in options.table])
        return 0
    wanted = wanted_of(options)
    layers = 2 if options.quick else options.layers
    results: list[Figures] = []
    for expert_type in options.types.split(","):
        name = f"{expert_type}-{options.dense_type}-{layers}-{wanted.sizes.context}-{options.zipf}"
        path = options.folder / f"{name}.gguf"
        shape = qwen3_shape(layers, wanted.sizes.context)
        results += measure_type(BenchModel(path, shape, expert_type, options.dense_type, Routing(options.zipf)), wanted)
        if options.out:  # what is there stays if the next type fails
            described = {"card": options.card, "gpus": sorted(free_gpu_bytes()), "threads": wanted.num_threads, "layers": layers}
            described |= {"zipf": options.zipf, "bandwidths": asdict(wanted.bandwidths), "command": sys.argv[1:]}
            options.out.write_text(json.dumps(described | {"results": [asdict(found) for found in results]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
