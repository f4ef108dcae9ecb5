"""Writes the model and its arena, so that every engine finds both: the first stage of a run on two cards.

    python -m scripts.pair_bench.prepare --folder /dev/shm/pair [--layers 48] [--experts 512]

With 48 layers the file has 59 GB and the arena 57 more; both lie in the folder.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from appliance.memory.limits import shm_space
from appliance.units import GIB
from scripts.host_bench.model import BenchModel, write_model
from scripts.pair_bench.arena import write_arena
from scripts.pair_bench.children import say
from scripts.pair_bench.model import evenness, pair_model, pair_shape

MODEL = "pair.gguf"
LEAST_SPARE_RATIO = 0.03
"""Room beside file and arena: link, parked conversations."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=512, help="per layer")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    model = pair_model(options.folder / MODEL, pair_shape(options.layers, options.experts))
    say({"layers": options.layers, "experts": options.layers * options.experts, **_sizes(model)})
    _check_room(options.folder, model)
    start = time.perf_counter()
    write_model(model)
    say({"write_s": round(time.perf_counter() - start, 1)})
    start = time.perf_counter()
    write_arena(model.path, options.folder)
    say({"arena_s": round(time.perf_counter() - start, 1)})
    layers = sorted({0, options.layers // 2, options.layers - 1})
    say({"use_of_experts": {f"layer {layer}": evenness(model.path, layer, model.shape.top_k) for layer in layers}})
    return 0


def _sizes(model: BenchModel) -> dict[str, int]:
    return {
        "file_bytes": model.file_bytes,
        "expert_bytes": model.expert_bytes,
        "bytes_per_token": model.bytes_per_token,
        "expert_bytes_per_token": model.expert_bytes_per_token,
    }


def _check_room(folder: Path, model: BenchModel) -> None:
    """What is there already counts as room."""
    held = sum(path.stat().st_blocks * 512 for path in folder.iterdir() if path.is_file())
    needed = (model.file_bytes + model.expert_bytes) * (1 + LEAST_SPARE_RATIO)
    room = shm_space(folder).free_bytes + held
    if needed > room:
        raise SystemExit(
            f"file and arena need {needed / GIB:.0f} GiB, and {folder} has {room / GIB:.0f}: mount -o remount,size=200g /dev/shm"
        )


if __name__ == "__main__":
    sys.exit(main())
