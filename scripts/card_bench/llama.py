"""llama-bench on the same file: experts of whole layers on the CPU where we keep as many off the card."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.host_bench.model import BenchModel

REPEATS = 3
MICRO_BATCH = 2048


@dataclass(frozen=True)
class LlamaFigures:
    """Tokens per second."""

    decode: float
    prompts: dict[int, float]
    build: str


def llama_figures(
    folder: Path, model: BenchModel, resident_ratio: float, num_threads: int, decode: int, prompts: Sequence[int]
) -> LlamaFigures:
    """Raises SystemExit with the end of its log if it fails."""
    off_card = round(model.shape.layers * (1 - resident_ratio))
    argv = [str(folder / "llama-bench"), "-m", str(model.path), "-ngl", "99", "-ncmoe", str(off_card), "-fa", "1", "-t", str(num_threads)]
    argv += ["-lm", "none"]  # experts on the CPU in memory of its own, which it pins, instead of the file's pages
    argv += ["-p", ",".join(map(str, prompts)), "-n", str(decode), "-ub", str(MICRO_BATCH), "-b", str(MICRO_BATCH)]
    done = subprocess.run([*argv, "-r", str(REPEATS), "-o", "json"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"llama-bench ended with code {done.returncode}: {done.stderr[-2000:]}")
    results = json.loads(done.stdout)
    return LlamaFigures(
        decode=next(float(result["avg_ts"]) for result in results if result["n_gen"]),
        prompts={int(result["n_prompt"]): float(result["avg_ts"]) for result in results if result["n_prompt"]},
        build=f"{results[0].get('build_commit', '')} {results[0].get('build_number', '')}".strip(),
    )
