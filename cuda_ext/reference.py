"""Every operation again, slow and plain, in numpy: the same bits as the native module, in code that can be read in one go.

The functions of operations take whole rows instead of memory and bear the name of the recorder's method. float32 everywhere;
`fmaf` rounds once. The orders of sums are those of the headers in `cuda_ext/src/ops` and of `docs/arithmetic.md`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

F32 = np.float32
Floats = NDArray[np.float32]
Values = Floats | NDArray[np.float64] | np.floating[Any] | float
Ints = NDArray[np.int64]
Dot = Callable[[Floats, Floats], Floats]
"""Rows of weights [num, columns] and one input [columns] -> [num], in the order of some weight type."""

KV_TILE = 64
KV_GROUP = 64
ATTENTION_SPAN = 256
_CHAINS = 32
_BLOCK = 32
_PLACES = 8
_GROUP = _BLOCK * _PLACES
_TREE = 8
_SMALLEST = F32(2.0**-100)
_ROUTER_GROUP = 16
_ROUTER_BOUND = 2.0**22
_ROUTER_SCALE = 2.0**28
_MOST_HALF = 65504
_FLOAT_TYPES = (0, 1, 30)
_MINIMA_FIELDS = {3: (20, 0, 2), 7: (24, 0, 2), 10: (84, 80, 82), 12: (144, 0, 2), 13: (176, 0, 2)}
"""Q4_1, Q5_1, Q2_K, Q4_K, Q5_K: bytes of a block, offsets of the f16 scale and of the f16 minimum in it."""

# ---- arithmetic ----


def fmaf(a: Values, b: Values, c: Values) -> Floats:
    """a * b + c of float32, rounded once.

    The product is exact in float64; the sum is rounded to odd there, so that rounding it to float32 is right (Boldo, Melquiond 2008).
    """
    product = np.asarray(a, dtype=np.float64) * np.asarray(b, dtype=np.float64)
    addend = np.asarray(c, dtype=np.float64)
    total = np.asarray(product + addend)
    back = total - product
    error = (product - (total - back)) + (addend - back)
    is_even = (np.ascontiguousarray(total).view(np.int64).reshape(total.shape) & 1) == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    odd = np.where((error != 0) & is_even & np.isfinite(total), np.nextafter(total, toward), total)
    return odd.astype(F32)


def exp(x: Values) -> Floats:
    """The polynomial of docs/arithmetic.md; the argument is clamped to [-87, 88]."""
    x = np.clip(np.asarray(x, dtype=F32), F32(-87), F32(88))
    magic = F32(12582912)
    n = fmaf(x, F32(1.44269504), magic) - magic
    r = fmaf(n, F32(-0.693359375), x)
    r = fmaf(n, F32(2.12194440e-4), r)
    p = np.full_like(x, F32(1.9875691500e-4))
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fmaf(p, r, F32(coefficient))
    p = fmaf(p, r * r, r + F32(1))
    return p * np.ldexp(F32(1), n.astype(np.int32)).astype(F32)


def sum8(x: Floats) -> np.float32:
    """Eight chains, element i in chain i % 8, then a tree."""
    a = [F32(0)] * 8
    for i, value in enumerate(x):
        a[i % 8] = F32(a[i % 8] + value)
    return F32(((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])))


def inverse_rms(x: Floats, eps: float) -> np.float32:
    """1 / sqrt(mean of squares + eps): 32 chains, then the tree 16, 8, 4, 2, 1."""
    acc = np.zeros(_CHAINS, F32)
    for first in range(0, x.size, _CHAINS):
        part = x[first : first + _CHAINS]
        acc[: part.size] += part * part
    half = _CHAINS // 2
    while half:
        acc[:half] += acc[half : 2 * half]
        half //= 2
    return F32(F32(1) / np.sqrt(acc[0] / F32(x.size) + F32(eps)))


def silu_times(gate: Floats, up: Floats) -> Floats:
    """silu(gate) * up."""
    return (gate / (F32(1) + exp(-gate))) * up


def dot_floats(weights: Floats, x: Floats) -> Floats:
    """Float weights: 32 chains of fmaf, then the tree 16, 8, 4, 2, 1."""
    acc = np.zeros((len(weights), _CHAINS), F32)
    for first in range(0, x.size, _CHAINS):
        part = slice(first, min(first + _CHAINS, x.size))
        width = part.stop - part.start
        acc[:, :width] = fmaf(weights[:, part], x[part], acc[:, :width])
    half = _CHAINS // 2
    while half:
        acc[:, :half] += acc[:, half : 2 * half]
        half //= 2
    return acc[:, 0] + F32(0)


# ---- quantised rows ----


@dataclass(frozen=True)
class ActivationRow:
    """q int8 [groups, 256], block scales d float32 [groups, 8], sums of sixteen q int16 [groups, 16]; zero beyond the row's end."""

    q: NDArray[np.int8]
    d: Floats
    sum16: NDArray[np.int16]


def quantise_row(x: Floats, row_scale: float = 1.0) -> ActivationRow:
    """Values [values], a multiple of 32. A block with a value that is not finite has a NaN for its scale."""
    blocks = np.zeros((-(-x.size // _GROUP) * _PLACES, _BLOCK), F32)
    blocks[: x.size // _BLOCK] = x.reshape(-1, _BLOCK)
    is_finite = np.isfinite(blocks).all(-1, keepdims=True)
    amax = np.abs(np.where(is_finite, blocks, F32(0))).max(-1, keepdims=True)
    is_zero = amax < _SMALLEST
    inverse = np.where(is_zero, F32(0), F32(127) / np.where(is_zero, F32(1), amax))
    q = np.rint(np.where(is_finite, blocks, F32(0)) * inverse).astype(np.int8)
    d = np.where(is_zero, F32(0), (amax / F32(127)) * F32(row_scale))
    d = np.where(is_finite, d, F32(np.nan))
    sum16 = q.reshape(-1, 16).sum(-1, dtype=np.int16)
    return ActivationRow(q.reshape(-1, _GROUP), d.reshape(-1, _PLACES), sum16.reshape(-1, 2 * _PLACES))


def dot_rows(type_id: int, weights: NDArray[np.uint8], x: Floats) -> Floats:
    """Weight rows [rows, row bytes] of a GGML type and one input [values] -> [rows]."""
    if type_id in _FLOAT_TYPES:
        return dot_floats(dequantise(type_id, weights), x)
    act = quantise_row(x)
    q = act.q.reshape(-1)[: x.size].astype(np.float64)
    scaled, minima = _parts(type_id, weights)
    # The sums of a block are exact in float64; one rounding follows.
    sums = _block_sums(scaled, q)
    values = sums.astype(F32) if minima is None else fmaf(sums, 1.0, _block_sums(minima, q).astype(F32))
    return _sum_terms(values * act.d.reshape(-1)[: values.shape[1]])


def _block_sums(weights: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    sums: NDArray[np.float64] = (weights * q).reshape(len(weights), -1, _BLOCK).sum(-1)
    return sums


def _sum_terms(terms: Floats) -> Floats:
    """[rows, blocks] -> [rows]: trees over eight super-blocks, one after the other; then a tree over the eight places."""
    rows, blocks = terms.shape
    per_tree = _TREE * _PLACES
    padded = np.zeros((rows, -(-blocks // per_tree) * per_tree), F32)
    padded[:, :blocks] = terms
    places = np.zeros((rows, _PLACES), F32)
    for t in padded.reshape(rows, -1, _TREE, _PLACES).swapaxes(0, 1):
        pairs = t[:, 0::2] + t[:, 1::2]
        fours = pairs[:, 0::2] + pairs[:, 1::2]
        places = places + (fours[:, 0] + fours[:, 1])
    a = places.T
    total: Floats = ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])) + F32(0)
    return total


def dequantise(type_id: int, rows: NDArray[np.uint8]) -> Floats:
    """Values [rows, values] as gguf-py reads them; the two types that it does not read, here."""
    if type_id == 41:  # Q1_0
        blocks = rows.reshape(-1, 18)
        codes = np.unpackbits(blocks[:, 2:], axis=-1, bitorder="little").astype(F32) * F32(2) - F32(1)
    elif type_id == 42:  # Q2_0
        blocks = rows.reshape(-1, 18)
        codes = ((blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3).reshape(len(blocks), -1).astype(F32) - F32(1)
    else:
        values: Floats = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(type_id)).astype(F32, copy=False)
        return values
    scales = blocks[:, :2].copy().view(np.float16).astype(F32)
    return (scales * codes).reshape(len(rows), -1)


def _parts(type_id: int, rows: NDArray[np.uint8]) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """Scaled weights and, of types that have them, minima; [rows, values] each. Either is exact: it is read with the other at zero."""
    fields = _MINIMA_FIELDS.get(type_id)
    if fields is None:
        return dequantise(type_id, rows).astype(np.float64), None
    block_bytes, d, m = fields
    parts = []
    for silenced in (m, d):
        blocks = rows.reshape(-1, block_bytes).copy()
        blocks[:, silenced : silenced + 2] = 0
        parts.append(dequantise(type_id, blocks.reshape(rows.shape)).astype(np.float64))
    return parts[0], parts[1]


# ---- operations ----


def quantise(x: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Rows [rows, width] as int8 [rows, width] and block scales [rows, width / 32]."""
    rows = [quantise_row(row) for row in x]
    width = x.shape[1]
    return np.stack([row.q.reshape(-1)[:width] for row in rows]), np.stack([row.d.reshape(-1)[: width // _BLOCK] for row in rows])


def matmul(x: Floats, weights: Floats, residual: Floats | None = None, dot: Dot = dot_floats) -> Floats:
    """[rows, weight rows]: residual + x . weights, or without a residual the product alone."""
    product = np.stack([dot(weights, row) for row in x])
    return product if residual is None else residual + product


def angles(frequencies: Sequence[float], magnitude: float, position: int, num_rows: int) -> Floats:
    """[rows, head_dim]: cosine and sine of each pair, alternating."""
    out = np.empty((num_rows, 2 * len(frequencies)), F32)
    for row, (i, frequency) in itertools.product(range(num_rows), enumerate(frequencies)):
        angle = float(position + row) * frequency
        out[row, 2 * i] = math.cos(angle) * magnitude
        out[row, 2 * i + 1] = math.sin(angle) * magnitude
    return out


def embed(table: Floats, tokens: Sequence[int]) -> Floats:
    """Rows of the dequantised table [vocab, width]."""
    return table[list(tokens)]


def norm(x: Floats, gamma: Floats, eps: float) -> Floats:
    """RMS norm of rows [rows, width]. Its quantised form is `quantise_row(x * gamma, inverse_rms(x, eps))`."""
    return np.stack([(row * gamma) * inverse_rms(row, eps) for row in x])


def rotate(heads: Floats, gamma: Floats | None, eps: float, turned: Floats) -> Floats:
    """Norm and NeoX rotation of heads [rows, heads, head_dim]; `turned` as `angles` gives it."""
    out = np.empty_like(heads)
    half = heads.shape[2] // 2
    for row, head in np.ndindex(heads.shape[:2]):
        x = heads[row, head]
        y = x if gamma is None else (x * gamma) * inverse_rms(x, eps)
        cosine, sine = turned[row, 0::2], turned[row, 1::2]
        out[row, head, :half] = y[:half] * cosine - y[half:] * sine
        out[row, head, half:] = y[half:] * cosine + y[:half] * sine
    return out


def rotary(
    query: Floats, key: Floats, query_gamma: Floats | None, key_gamma: Floats | None, eps: float, turned: Floats, stored_as: type
) -> tuple[Floats, Floats]:
    """Rotated queries, and rotated keys as a cache of `stored_as` gives them back."""
    return rotate(query, query_gamma, eps, turned), stored(rotate(key, key_gamma, eps, turned), stored_as)


def stored(x: Floats, stored_as: type) -> Floats:
    """Rows [..., head_dim] of heads as the cache gives them back: `stored_as` is np.float32, np.float16 or np.int8."""
    if stored_as is not np.int8:
        return x.astype(stored_as).astype(F32)
    groups = [np.asarray(x[..., first : first + KV_GROUP]) for first in range(0, x.shape[-1], KV_GROUP)]
    return np.concatenate([q.astype(F32) * scale.astype(F32) for q, scale in map(quantise_kv, groups)], axis=-1)


def quantise_kv(x: Floats) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Groups [..., values] as int8 of that shape and their scales [..., 1], in the rule of ops/kv_cache.h."""
    is_finite = np.isfinite(x).all(-1, keepdims=True)
    amax = np.abs(np.where(is_finite, x, F32(0))).max(-1, keepdims=True)
    is_zero = amax < _SMALLEST
    exact = np.where(is_zero, F32(0), np.minimum(amax / F32(127), F32(_MOST_HALF)))
    nearest = exact.astype(np.float16)
    scale = np.where(nearest.astype(F32) < exact, np.nextafter(nearest, np.float16(_MOST_HALF)), nearest)
    inverse = np.where(is_zero, F32(0), F32(1) / np.where(is_zero, F32(1), scale.astype(F32)))
    q = np.rint(np.clip(np.where(is_finite, x, F32(0)) * inverse, F32(-127), F32(127)))
    return q.astype(np.int8), np.where(is_finite, scale, np.float16(np.nan))


def attention(query: Floats, keys: Floats, values: Floats, position: int, scale: float) -> Floats:
    """Causal attention: query [rows, heads, head_dim] at `position`, keys and values [positions, kv_heads, head_dim]."""
    out = np.empty_like(query)
    group = query.shape[1] // keys.shape[1]
    for row, head in np.ndindex(query.shape[:2]):
        seen = position + row + 1
        out[row, head] = _attend(query[row, head], keys[:seen, head // group], values[:seen, head // group], F32(scale))
    return out


def _attend(query: Floats, keys: Floats, values: Floats, scale: np.float32) -> Floats:
    most, total, out = F32(-np.inf), np.asarray(F32(0)), np.zeros(query.size, F32)
    for first in range(0, len(keys), ATTENTION_SPAN):
        span = slice(first, first + ATTENTION_SPAN)
        span_most, span_total, span_out = _attend_span(query, keys[span], values[span], scale)
        new_most = max(most, span_most)
        a, b = exp(most - new_most), exp(span_most - new_most)
        total = fmaf(total, a, span_total * b)
        out = fmaf(out, a, span_out * b)
        most = new_most
    return out * (F32(1) / total)


def _attend_span(query: Floats, keys: Floats, values: Floats, scale: np.float32) -> tuple[np.float32, Floats, Floats]:
    most, total, out = F32(-np.inf), np.asarray(F32(0)), np.zeros(query.size, F32)
    for first in range(0, len(keys), KV_TILE):
        tile_keys, tile_values = keys[first : first + KV_TILE], values[first : first + KV_TILE]
        scores = np.zeros(len(tile_keys), F32)
        for d in range(query.size):
            scores = fmaf(query[d], tile_keys[:, d], scores)
        scores = scores * scale
        new_most = max(most, scores.max())
        weights, before = exp(scores - new_most), exp(most - new_most)
        total = fmaf(total, before, sum8(weights))
        out = out * before
        for weight, value in zip(weights, tile_values, strict=True):
            out = fmaf(weight, value, out)
        most = new_most
    return most, total, out


def router(x: Floats, gamma: Floats, weights: Floats) -> Ints:
    """Sums [rows, experts] in units of 2^-28, before the norm's factor; `weights` [width, experts]."""
    sums = np.zeros((len(x), weights.shape[1]), np.int64)
    bound = F32(_ROUTER_BOUND)
    for row, y in enumerate(x * gamma):
        for first in range(0, y.size, _ROUTER_GROUP):
            dots = np.zeros(weights.shape[1], F32)
            for value, column in zip(y[first : first + _ROUTER_GROUP], weights[first : first + _ROUTER_GROUP], strict=True):
                dots = fmaf(column, value, dots)
            cut = np.maximum(np.where(dots < bound, dots, bound), -bound)
            sums[row] += np.rint(cut.astype(np.float64) * _ROUTER_SCALE).astype(np.int64)
    return sums


def route(sums: Ints, inverse: Floats, top_k: int, *, sigmoid: bool, renormalise: bool, scale: float) -> tuple[Ints, Floats]:
    """Ids and weights of the routed lists, [rows, top_k] each. `sums` as `router` gives them, `inverse` [rows]: 1 / rms."""
    scores = sums.astype(F32) * F32(1 / _ROUTER_SCALE)
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    weights = np.empty(ids.shape, F32)
    for row, chosen in enumerate(ids):
        logits = scores[row] * inverse[row]
        gates = F32(1) / (F32(1) + exp(-logits)) if sigmoid else exp(logits - logits[chosen[0]])
        picked, total = gates[chosen], F32(1)
        if renormalise:
            total = F32(0)
            for weight in picked:
                total = F32(total + weight)
        elif not sigmoid:
            total = sum8(gates)
        weights[row] = picked / total * F32(scale)
    return ids, weights


@dataclass(frozen=True)
class ExpertWeights:
    """gate and up [width, hidden], down [hidden, width]."""

    gate: Floats
    up: Floats
    down: Floats


def experts(x: Floats, ids: Ints, weights: Floats, blobs: Sequence[ExpertWeights], residual: Floats, dot: Dot = dot_floats) -> Floats:
    """Rows [rows, hidden]: residual + the weighted rows of each row's routed list, summed in its order by fmaf."""
    out = np.empty_like(residual)
    for row, (chosen, shares) in enumerate(zip(ids, weights, strict=True)):
        total = np.zeros(residual.shape[1], F32)
        for expert, share in zip(chosen, shares, strict=True):
            blob = blobs[expert]
            hidden = silu_times(dot(blob.gate, x[row]), dot(blob.up, x[row]))
            total = fmaf(share, dot(blob.down, hidden), total)
        out[row] = residual[row] + total
    return out
