"""Routers whose expert use is known beforehand: even, or skewed after Zipf's law.

A router sees rows that are, but for little, normed embeddings. Those have a mean along the vector of ones (which values of most block
types have, as their blocks are drawn) and are random beside it. Router rows are centred, so that this mean says nothing, and made
equally long, so that none wins more often than another. Then each gets a part along the ones again that shifts its logit by what its
expert's use asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

MOST_USED = 0.95
"""No expert is used by more rows than this."""
LEAST_MEAN = 0.2
"""Of normed embeddings; a smaller one cannot carry a skew."""


@dataclass(frozen=True)
class Routing:
    """`zipf`: use falls with rank to the power of this; 0 is even."""

    zipf: float = 0.0


def expected_uses(num_experts: int, top_k: int, zipf: float) -> NDArray[np.float64]:
    """Share of rows that use each rank; they add up to `top_k`."""
    weights = np.arange(1, num_experts + 1) ** -zipf
    uses = np.zeros(num_experts)
    capped = np.zeros(num_experts, bool)
    while True:
        rest = top_k - MOST_USED * capped.sum()
        uses = np.where(capped, MOST_USED, weights * rest / weights[~capped].sum())
        if not (over := (uses > MOST_USED) & ~capped).any():
            return uses
        capped |= over


def router_rows(drawn: NDArray[np.float32], top_k: int, routing: Routing, mean: float, rng: np.random.Generator) -> NDArray[np.float32]:
    """Random rows [experts, hidden] turned into a router. `mean`: of the values of normed embeddings.

    Raises SystemExit where the embeddings cannot carry the skew.
    """
    num_experts, hidden = drawn.shape
    rows: NDArray[np.float32] = drawn - drawn.mean(axis=1, keepdims=True)
    if routing.zipf and abs(mean) < LEAST_MEAN:
        raise SystemExit(f"embeddings of this type have a mean of {mean:.2f}, too small for a skewed router; take Q4_K")
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    rows *= lengths.mean() / lengths
    if routing.zipf == 0:
        return rows
    spread = float(np.sqrt(np.mean(rows.astype(np.float64) ** 2) * hidden * (1 - mean**2)))
    normal = NormalDist()
    shifts = np.array([spread * normal.inv_cdf(use) for use in expected_uses(num_experts, top_k, routing.zipf)])
    skewed: NDArray[np.float32] = (rows + (rng.permutation(shifts) / (mean * hidden))[:, None]).astype(np.float32)
    return skewed
