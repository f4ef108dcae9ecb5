"""The model of the pair's cases: small, of quantised types, a quarter of a layer's experts in use for every token."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.settings import Settings
from scripts.gpu_cases.weight_types import USUAL
from tests.gguf_writing import ModelShape
from tests.random_models import RandomModel, write_random_model

SHAPE = ModelShape(layers=3, hidden=256, heads=4, kv_heads=2, head_dim=64, experts=24, top_k=6, width=256, vocab=512, context=1024)
TYPES = USUAL | {
    "blk.1.ffn_gate_exps.weight": "IQ3_S",
    "blk.1.ffn_up_exps.weight": "IQ3_S",
    "blk.1.ffn_down_exps.weight": "IQ4_NL",
}
CHUNK = 64
POOL_THREADS = 4


@dataclass(frozen=True)
class Place:
    """A model and where its servers put what they share."""

    model: RandomModel
    shm_dir: Path
    state_dir: Path
    cards: tuple[str, ...]
    threads: int = POOL_THREADS

    @property
    def num_experts(self) -> int:
        return self.model.shape.layers * self.model.shape.experts

    def settings(self, *, cards: Sequence[str] = (), **elastic: Any) -> Settings:
        """Of a server on those cards, both by default. With `elastic` settings it is a pair."""
        return Settings.model_validate(self.options(cards=cards) | ({"elastic": {"enabled": True} | elastic} if elastic else {}))

    def options(self, *, cards: Sequence[str] = ()) -> dict[str, Any]:
        return {
            "model": str(self.model.path),
            "cards": ",".join(cards or self.cards),
            "chunk": CHUNK,
            "pool_threads": self.threads,
            "shm_dir": str(self.shm_dir),
            "state_dir": str(self.state_dir),
            "log_level": "warning",
        }


@contextmanager
def place_of(cards: tuple[str, ...], *, threads: int = POOL_THREADS, shape: ModelShape = SHAPE) -> Iterator[Place]:
    with (
        tempfile.TemporaryDirectory(prefix="tandem-check-", dir="/dev/shm") as shm,
        tempfile.TemporaryDirectory(prefix="tandem-check-") as state,
    ):
        model = write_random_model(Path(state) / "m.gguf", shape, types=TYPES)
        yield Place(model, Path(shm), Path(state), cards, threads)
