"""2,000 tokens with swaps in every window and every tier at work: ids and bits of all logits are those of a card that holds all
experts, of one that holds none, and of a host card; windows of eight rows and prompts agree as well.

Tokens are drawn from the logits with noise of a fixed seed, so one wrong bit sooner or later becomes another text.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.engine.model_runner import ModelRunner
from appliance.memory.policy import AlwaysSwap, blob_bytes_table
from scripts.gpu_cases.findings import Findings
from scripts.gpu_cases.weight_types import USUAL
from tests.gguf_writing import ModelShape
from tests.random_models import RandomModel, open_arena, open_runner, prefill, write_random_model

Logits = NDArray[np.float32]
SHAPE = ModelShape(layers=4, hidden=512, heads=8, kv_heads=2, head_dim=64, experts=32, top_k=8, width=256, vocab=2048, context=2304)
QUICK_SHAPE = ModelShape(layers=3, hidden=256, heads=4, kv_heads=2, head_dim=64, experts=16, top_k=6, width=256, vocab=320, context=512)
TYPES = USUAL | {
    "blk.1.ffn_gate_exps.weight": "IQ3_S",
    "blk.1.ffn_up_exps.weight": "IQ3_XXS",
    "blk.1.ffn_down_exps.weight": "IQ4_NL",
    "blk.2.ffn_gate_exps.weight": "MXFP4",
    "blk.2.ffn_up_exps.weight": "MXFP4",
    "blk.2.ffn_down_exps.weight": "MXFP4",
}
NUM_THREADS = 4
MAX_SWAPS = 4
WINDOW_ROWS = 8
BEGINNING = list(range(16))
PROMPT_TOKENS = 300
CHUNK = 128


@dataclass(frozen=True)
class Size:
    shape: ModelShape
    num_tokens: int
    num_prompt: int


@dataclass(frozen=True)
class Text:
    ids: list[int]
    logits: Logits
    """[decoded tokens, vocab]"""
    seconds: float


def run(card: str, *, quick: bool) -> Findings:
    found = Findings()
    size = Size(QUICK_SHAPE, 6, 40) if quick else Size(SHAPE, 2000, PROMPT_TOKENS)
    with tempfile.TemporaryDirectory(prefix="tandem-check-", dir="/dev/shm") as folder:
        model = write_random_model(Path(folder) / "m.gguf", size.shape, types=TYPES)
        _Check(model, Path(folder), card, size, found).all_placements()
    return found


class _Check:
    def __init__(self, model: RandomModel, shm_dir: Path, card: str, size: Size, found: Findings) -> None:
        self._model = model
        self._shm_dir = shm_dir
        self._card = card
        self._num_tokens = size.num_tokens
        self._vocab = size.shape.vocab
        self._num_experts = size.shape.layers * size.shape.experts
        self._prompt = np.random.default_rng(1).integers(0, size.shape.vocab, size.num_prompt).tolist()
        self._found = found

    def all_placements(self) -> None:
        num_experts = self._num_experts
        with self._runner(self._card, num_experts) as runner:
            everything, prompt = self._decode(runner, "all in VRAM"), self._logits_of_prompt(runner)
            self._expect_tiers(runner, "all in VRAM", used=("own",), unused=("streamed", "host"))
        self._found.notes["different tokens"] = len(set(everything.ids))
        with self._runner(self._card, 0) as runner:
            self._expect_same(self._decode(runner, "nothing in VRAM"), everything, "nothing in VRAM")
            self._expect_same_prompt(self._logits_of_prompt(runner), prompt, "nothing in VRAM")
            self._expect_tiers(runner, "nothing in VRAM", used=("streamed", "host"), unused=("own",))
        with open_arena(self._model, self._shm_dir) as arena:
            policy = AlwaysSwap(blob_bytes_table(arena.layout))
        with self._runner(self._card, num_experts // 2, policy=policy, max_swaps=MAX_SWAPS) as runner:
            self._expect_same(self._decode(runner, "swaps"), everything, "swaps")
            swaps = runner.stats()["swaps"]
            self._found.notes["swaps"] = swaps
            self._found.expect(swaps >= self._num_tokens, f"only {swaps} swaps in {self._num_tokens} windows")
            self._expect_tiers(runner, "swaps", used=("own", "streamed", "host"), unused=())
            self._expect_same_prompt(self._logits_of_prompt(runner), prompt, "swaps")
        with self._runner(self._card, num_experts // 2) as runner:
            self._expect_same(self._in_windows(runner, everything), everything, f"windows of {WINDOW_ROWS} rows")
        with self._runner("host:0", num_experts // 2) as runner:
            self._expect_same(self._decode(runner, "host card"), everything, "a host card")

    @contextmanager
    def _runner(self, card: str, slots: int, **options: object) -> Iterator[ModelRunner]:
        sizes = {"kv_type": "f16", "max_logits": WINDOW_ROWS, "chunk": CHUNK, "num_threads": NUM_THREADS}
        with open_runner(self._model, self._shm_dir, slots=slots, card=card, **sizes, **options) as runner:  # type: ignore[arg-type]
            yield runner

    def _decode(self, runner: ModelRunner, name: str) -> Text:
        """Draws every token from the logits before it."""
        start = time.perf_counter()
        row = prefill(runner, BEGINNING, num_logits=1, chunk=WINDOW_ROWS)[-1]
        ids: list[int] = []
        logits = np.empty((self._num_tokens, self._vocab), np.float32)
        for step in range(self._num_tokens):
            logits[step] = row
            ids.append(int((row + np.random.default_rng(step).gumbel(size=row.size)).argmax()))
            row = runner.run([ids[-1]], len(BEGINNING) + step, 1)[-1].values()
            runner.between_windows()
        seconds = time.perf_counter() - start
        self._found.notes[f"tokens per second, {name}"] = round(self._num_tokens / seconds)
        return Text(ids, logits, seconds)

    def _in_windows(self, runner: ModelRunner, text: Text) -> Text:
        """The same text in windows of several rows."""
        prefill(runner, BEGINNING[:-1], num_logits=1, chunk=WINDOW_ROWS)
        tokens = [BEGINNING[-1], *text.ids[:-1]]
        logits = prefill(runner, tokens, num_logits=WINDOW_ROWS, position=len(BEGINNING) - 1, chunk=WINDOW_ROWS)
        return Text(text.ids, logits, 0.0)

    def _logits_of_prompt(self, runner: ModelRunner) -> Logits:
        return prefill(runner, self._prompt, num_logits=WINDOW_ROWS)

    def _expect_same(self, text: Text, expected: Text, name: str) -> None:
        differing = np.flatnonzero((text.logits.view(np.uint32) != expected.logits.view(np.uint32)).any(axis=1))
        self._found.expect(text.ids == expected.ids, f"{name}: another text than with all in VRAM")
        if differing.size:
            self._found.failures.append(f"{name}: logits of {differing.size} tokens differ, the first at token {differing[0]}")

    def _expect_same_prompt(self, logits: Logits, expected: Logits, name: str) -> None:
        self._found.expect(np.array_equal(logits.view(np.uint32), expected.view(np.uint32)), f"{name}: logits of a prompt differ")

    def _expect_tiers(self, runner: ModelRunner, name: str, used: Sequence[str], unused: Sequence[str]) -> None:
        rows = runner.stats()["rows_by_tier"]
        self._found.notes[f"rows by tier, {name}"] = dict(rows)
        for tier in used:
            self._found.expect(rows.get(tier, 0) > 0, f"{name}: no row was computed in tier {tier}")
        for tier in unused:
            self._found.expect(rows.get(tier, 0) == 0, f"{name}: rows were computed in tier {tier}")
