"""A few windows and prompts on a very small model, for runs under a sanitizer: all tiers, swaps, several rows, both kinds of run."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from appliance.engine.generation import WindowInterruptedError
from appliance.engine.model_runner import ModelRunner
from appliance.memory.policy import AlwaysSwap, blob_bytes_table
from scripts.gpu_cases.findings import Findings
from tests.gguf_writing import ModelShape
from tests.random_models import open_arena, open_runner, write_random_model

SHAPE = ModelShape(layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, experts=8, top_k=3, width=64, vocab=320, context=512)
TYPES = {
    "attn_q": "Q4_K",
    "attn_k": "Q4_K",
    "attn_v": "Q6_K",
    "attn_output": "Q8_0",
    "output.weight": "Q6_K",
    "ffn_gate_exps": "Q4_K",
    "ffn_up_exps": "Q4_K",
    "ffn_down_exps": "Q8_0",
    "blk.1.ffn_gate_exps.weight": "IQ3_S",
    "blk.1.ffn_up_exps.weight": "IQ3_S",
    "blk.1.ffn_down_exps.weight": "IQ4_NL",
}
ATTEMPTS = 10
"""A sanitizer prepares kernels when they are first launched, and a window may wait only so long."""


def run(card: str, *, quick: bool) -> Findings:
    found = Findings()
    num_experts = SHAPE.layers * SHAPE.experts
    with tempfile.TemporaryDirectory(prefix="tandem-check-", dir="/dev/shm") as folder:
        model = write_random_model(Path(folder) / "m.gguf", SHAPE, types=TYPES)
        with open_arena(model, Path(folder)) as arena:
            policy = AlwaysSwap(blob_bytes_table(arena.layout))
        for slots in (num_experts // 2,) if quick else (num_experts, 0, num_experts // 2):
            options = {"kv_type": "f16", "max_logits": 8, "chunk": 64, "num_threads": 2, "max_swaps": 2, "policy": policy}
            with open_runner(model, Path(folder), slots=slots, card=card, **options) as runner:  # type: ignore[arg-type]
                _few_runs(runner, found)
                found.notes[f"rows by tier, {slots} slots"] = dict(runner.stats()["rows_by_tier"])
    return found


def _few_runs(runner: ModelRunner, found: Findings) -> None:
    tokens = np.random.default_rng(0).integers(0, SHAPE.vocab, 48).tolist()
    position = 0
    for num_rows in (40, 1, 1, 5, 1):
        _run(runner, tokens[:num_rows], position, found)
        position += num_rows


def _run(runner: ModelRunner, tokens: Sequence[int], position: int, found: Findings) -> None:
    for _ in range(ATTEMPTS):
        try:
            row = runner.run(tokens, position, 1)[-1]
        except WindowInterruptedError:
            found.notes["windows done again"] = int(str(found.notes.get("windows done again", 0))) + 1
            continue
        found.expect(bool(np.isfinite(row.values()).all()), f"logits at position {position} are not finite")
        runner.between_windows()
        return
    found.failures.append(f"the run of {len(tokens)} rows at position {position} was given up {ATTEMPTS} times")
