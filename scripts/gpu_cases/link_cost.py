"""What a layer costs whose missing experts another engine computes. Two engines of one process share a card, so that no time slices of
processes come between them; each holds half of the experts, and nothing is left to the host.

Beside it: everything on the card of one engine, and the other half as slots of a second card, which is the same card here. Times are
medians of windows of one row, by layer; of both engines at once the slower one's.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from appliance.engine.model_runner import ModelRunner
from scripts.gpu_cases.findings import Findings
from scripts.host_bench.model import write_model
from scripts.pair_bench.model import pair_model, pair_shape
from tests.gguf_writing import ModelShape
from tests.random_models import RandomModel, fill, linked_runners, open_runner, write_random_model

LAYERS = 12
QUICK_SHAPE = ModelShape(layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, experts=8, top_k=3, width=64, vocab=320, context=512)
WINDOWS, QUICK_WINDOWS = 200, 3
WARM_WINDOWS = 2
SIZES: dict[str, object] = {"kv_type": "f16", "max_logits": 1, "chunk": 64, "context": 512, "num_threads": 4}


def run(card: str, *, quick: bool) -> Findings:
    found = Findings()
    with tempfile.TemporaryDirectory(prefix="tandem-check-", dir="/dev/shm") as folder:
        _Check(_model(Path(folder), quick=quick), Path(folder), card, QUICK_WINDOWS if quick else WINDOWS, found).all()
    return found


def _model(folder: Path, *, quick: bool) -> RandomModel:
    if quick:
        return write_random_model(folder / "m.gguf", QUICK_SHAPE)
    shape = pair_shape(LAYERS)
    model = pair_model(folder / "m.gguf", shape)
    write_model(model)
    return RandomModel(model.path, shape)


class _Check:
    def __init__(self, model: RandomModel, shm_dir: Path, card: str, num_windows: int, found: Findings) -> None:
        self._model = model
        self._shm_dir = shm_dir
        self._card = card
        self._num_windows = num_windows
        self._num_experts = model.shape.layers * model.shape.experts
        self._found = found

    def all(self) -> None:
        half = self._num_experts // 2
        with self._runner(self._num_experts) as runner:
            alone_us = self._note("everything on the card, us per layer", self._layer_us(runner))
        with self._runner(half, share=(0, 2), peer_slots=half, peer_is_own=True) as runner:
            runner.attach_peer()
            fill(runner)
            self._note("peer tier, us more", self._layer_us(runner) - alone_us)
            self._expect_tier(runner, "peer")
        with linked_runners(self._model, self._shm_dir, (self._card, self._card), slots=half, **SIZES) as engines:
            self._note("link, the other idle, us more", self._layer_us(engines[0]) - alone_us)
            with ThreadPoolExecutor(len(engines)) as pool:
                self._note("link, both busy, us more", max(pool.map(self._layer_us, engines)) - alone_us)
            for engine in engines:
                self._expect_tier(engine, "linked")

    @contextmanager
    def _runner(self, slots: int, **options: object) -> Iterator[ModelRunner]:
        with open_runner(self._model, self._shm_dir, slots=slots, card=self._card, **SIZES, **options) as runner:  # type: ignore[arg-type]
            yield runner

    def _layer_us(self, runner: ModelRunner) -> float:
        seconds = []
        for position in range(WARM_WINDOWS + self._num_windows):
            start = time.perf_counter()
            runner.run([position], position, 1)
            seconds.append(time.perf_counter() - start)
            runner.between_windows()
        return 1e6 * statistics.median(seconds[WARM_WINDOWS:]) / self._model.shape.layers

    def _note(self, name: str, layer_us: float) -> float:
        self._found.notes[name] = round(layer_us, 1)
        return layer_us

    def _expect_tier(self, runner: ModelRunner, tier: str) -> None:
        rows = runner.stats()["rows_by_tier"]
        elsewhere = sum(rows.values()) - rows.get("own", 0) - rows.get(tier, 0)
        self._found.expect(rows.get(tier, 0) > 0, f"no row was computed in tier {tier}")
        self._found.expect(elsewhere == 0, f"of the rows in tier {tier} some were computed elsewhere: {dict(rows)}")
