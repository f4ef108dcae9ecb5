"""What bytes and bandwidth, or tensor cores, allow at best: nothing here depends on an engine."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.host_bench.model import BenchModel


@dataclass(frozen=True)
class Bandwidths:
    """Bytes per second, and operations per second of tensor cores. The defaults were measured on an H200 with 16 cores."""

    card: float = 4.25e12
    pcie: float = 55e9
    host: float = 87e9
    tensor: float = 790e12


def decode_limit(model: BenchModel, resident_ratio: float, at: Bandwidths) -> float:
    """Tokens per second: what is on the card at its bandwidth, beside it the rest over bus and host memory together."""
    experts = model.expert_bytes_per_token
    on_card = model.bytes_per_token - experts * (1 - resident_ratio)
    missing = experts * (1 - resident_ratio)
    return 1 / max(on_card / at.card, missing / (at.pcie + at.host))


def prompt_limit(model: BenchModel, resident_ratio: float, num_tokens: int, at: Bandwidths) -> float:
    """Tokens per second of a prompt in one chunk that needs every expert: missing ones come over the bus once."""
    all_bytes = model.file_bytes
    missing = model.expert_bytes * (1 - resident_ratio)
    arithmetic = 2 * model.values_per_token * num_tokens / at.tensor
    return num_tokens / max((all_bytes - missing) / at.card, missing / at.pcie, arithmetic)
