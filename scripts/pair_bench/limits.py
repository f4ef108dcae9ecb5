"""What bytes and bandwidth allow a pair at best, when experts are used evenly."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.card_bench.limits import Bandwidths


@dataclass(frozen=True)
class TokenBytes:
    """Of weights that one decoded token reads."""

    dense: int
    experts: int


def one_limit(token: TokenBytes, own: float, peer: float, at: Bandwidths) -> float:
    """Tokens per second of one request that uses both cards. `own`, `peer`: shares of the experts that each card holds."""
    missing = max(0.0, 1 - own - peer) * token.experts
    return 1 / max((token.dense + own * token.experts) / at.card, peer * token.experts / at.card, missing / (2 * at.pcie + at.host))


def two_limit(token: TokenBytes, own: float, peer: float, at: Bandwidths) -> float:
    """Of two requests together: each card reads its dense weights once, and its experts for both."""
    missing = 2 * max(0.0, 1 - own - peer) * token.experts
    cards = [(token.dense + 2 * share * token.experts) / at.card for share in (own, peer)]
    return 2 / max(*cards, missing / (2 * at.pcie + at.host))
