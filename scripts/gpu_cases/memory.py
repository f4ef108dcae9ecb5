"""A card's memory: what the plan says against what the driver sees, and slots given back and taken again while it serves."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.engine.model_runner import ModelRunner
from appliance.memory.gpus import free_gpu_bytes
from appliance.memory.plan import CUDA_RESERVE_BYTES
from appliance.units import MIB
from scripts.gpu_cases.findings import Findings
from scripts.host_bench.model import BenchModel, qwen3_shape, write_model
from tests.gguf_writing import ModelShape
from tests.random_models import RandomModel, fill, open_runner

CONTEXT = 4096
QUICK_SHAPE = ModelShape(layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, experts=8, top_k=3, width=256, vocab=320, context=512)
NUM_TOKENS = 16
SEGMENT_BYTES = 64 * MIB
"""Memory is given back in pieces of this size."""


def run(card: str, *, quick: bool) -> Findings:
    found = Findings()
    shape = QUICK_SHAPE if quick else qwen3_shape(8, CONTEXT)
    with tempfile.TemporaryDirectory(prefix="tandem-check-", dir="/dev/shm") as folder:
        model = BenchModel(Path(folder) / "m.gguf", shape, "Q4_K", "Q4_K")
        write_model(model)
        random = RandomModel(model.path, shape)
        sizes = {"kv_type": "f16", "max_logits": 1, "chunk": 32 if quick else 2048, "num_threads": 4}
        before = free_gpu_bytes().get(card)
        slots = shape.layers * shape.experts
        with open_runner(random, Path(folder), slots=slots, card=card, **sizes) as runner:  # type: ignore[arg-type]
            _compare_plan(runner, card, before, found)
            _round_trip(runner, card, shape.vocab, found)
    return found


def _compare_plan(runner: ModelRunner, card: str, before: int | None, found: Findings) -> None:
    planned = sum(runner.plan_bytes.values())
    found.notes["planned MiB by use"] = {use: round(nbytes / MIB, 1) for use, nbytes in runner.plan_bytes.items()}
    if before is None:
        found.notes["driver"] = "not asked: there is none"
        return
    taken = before - free_gpu_bytes()[card]
    found.notes |= {"planned MiB": round(planned / MIB), "taken MiB": round(taken / MIB)}
    found.expect(
        planned <= taken <= planned + CUDA_RESERVE_BYTES,
        f"{taken / MIB:.0f} MiB of the card are taken, {planned / MIB:.0f} MiB were planned and {CUDA_RESERVE_BYTES / MIB:.0f} reserved",
    )


def _round_trip(runner: ModelRunner, card: str, vocab: int, found: Findings) -> None:
    expected = _decode(runner, vocab)
    slots_bytes = runner.plan_bytes["expert slots"]
    before = free_gpu_bytes().get(card)
    with found.timed("give back s"):
        memory = runner.free_memory(runner.slots_bytes // MIB)
    found.notes["given back MiB"] = memory.free_mib
    if before is not None:
        freed = free_gpu_bytes()[card] - before
        found.expect(freed >= slots_bytes - SEGMENT_BYTES, f"only {freed / MIB:.0f} of {slots_bytes / MIB:.0f} MiB were given back")
    found.expect(runner.stats()["slots"] == 0, f"{runner.stats()['slots']} slots kept their memory")
    found.expect(np.array_equal(_decode(runner, vocab), expected), "other logits without the slots")
    with found.timed("take again s"):
        runner.take_memory()
    with found.timed("fill again s"):
        fill(runner)
    found.expect(runner.stats()["resident_experts"] == runner.stats()["slots"] > 0, "not all slots were filled again")
    found.expect(np.array_equal(_decode(runner, vocab), expected), "other logits after the slots were taken again")
    if before is not None:
        kept = abs(free_gpu_bytes()[card] - before)
        found.expect(kept <= SEGMENT_BYTES, f"{kept / MIB:.0f} MiB more or less are free after the round trip")


def _decode(runner: ModelRunner, vocab: int) -> NDArray[np.uint32]:
    """Bits of the logits of some windows. [tokens, vocab]"""
    rows = []
    for position, token in enumerate(np.random.default_rng(2).integers(0, vocab, NUM_TOKENS)):
        rows.append(runner.run([int(token)], position, 1)[-1].values().copy())
        runner.between_windows()
    return np.stack(rows).view(np.uint32)
