"""Rotary positions: how fast each pair of dimensions turns, with the ways of stretching the context."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from appliance.models.config import ModelConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class Rotation:
    """`frequencies`: [head_dim / 2] float64, radians per position. `magnitude` multiplies cosine and sine (YaRN; else 1)."""

    frequencies: NDArray[np.float64]
    magnitude: float


def rotation(config: ModelConfig) -> Rotation:
    """Linear scaling divides all frequencies; YaRN (arXiv 2309.00071) leaves the fast ones alone."""
    plain = config.rope_base ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return Rotation(plain, 1.0)
    stretched = plain / scaling.factor
    if scaling.kind == "linear":
        return Rotation(stretched, 1.0)
    keep = _kept_share(config, scaling) * scaling.ext_factor
    magnitude = scaling.attn_factor * (1.0 + 0.1 * math.log(scaling.factor)) if scaling.ext_factor else scaling.attn_factor
    return Rotation(stretched * (1.0 - keep) + plain * keep, magnitude)


def _kept_share(config: ModelConfig, scaling: RopeScaling) -> NDArray[np.float64]:
    """1 for pairs that turn more than `beta_fast` times within the original context, 0 below `beta_slow`, a ramp between."""

    def pair_turning(times: float) -> float:
        span = scaling.original_context / (times * 2.0 * math.pi)
        return config.head_dim * math.log(span) / (2.0 * math.log(config.rope_base))

    low = max(0.0, math.floor(pair_turning(scaling.beta_fast)))
    high = min(config.head_dim - 1.0, math.ceil(pair_turning(scaling.beta_slow)))
    ramp = (np.arange(config.head_dim // 2) - low) / max(0.001, high - low)
    kept: NDArray[np.float64] = 1.0 - np.clip(ramp, 0.0, 1.0)
    return kept
