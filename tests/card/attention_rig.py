"""One layer's attention on a card and on the host card: the same rows through both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cuda_ext import _native as native
from cuda_ext import reference
from tests.op_rig import OpRig, floats

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

EPS = 1e-6
GROUP_BYTES = 320
H200 = (132, 227 * 1024)  # multiprocessors, shared memory of a block
SMALL_CARD = (36, 99 * 1024)


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of a layer's attention. dtype: what the cache holds."""

    query: int
    kv: int
    dim: int
    dtype: type = np.float16
    normed: bool = True

    @property
    def kv_type(self) -> native.KvType:
        return {np.float16: native.KvType.f16, np.float32: native.KvType.f32, np.int8: native.KvType.int8}[self.dtype]


class KeysOrValues:
    """Half of a layer's cache, as the rows of its heads. What is put there is written into `memory`: [bytes]."""

    def __init__(self, memory: Bytes, heads: Heads, *, are_keys: bool) -> None:
        num = native.KV_TILE * heads.dim
        tiles = memory.reshape(heads.kv, -1, num * np.dtype(heads.dtype).itemsize + self._scales_bytes(heads))
        shape = (heads.dim, native.KV_TILE) if are_keys else (native.KV_TILE, heads.dim)
        values = tiles[..., : num * np.dtype(heads.dtype).itemsize].view(heads.dtype).reshape(*tiles.shape[:2], *shape)
        self._values = values.swapaxes(2, 3) if are_keys else values
        self._scales: NDArray[np.float16] | None = None
        if heads.dtype is np.int8:
            self._scales = tiles[..., num:].view(np.float16).reshape(*tiles.shape[:2], -1, native.KV_TILE).swapaxes(2, 3)

    @staticmethod
    def _scales_bytes(heads: Heads) -> int:
        return 2 * native.KV_TILE * -(-heads.dim // reference.KV_GROUP) if heads.dtype is np.int8 else 0

    def put(self, position: int, rows: Floats) -> None:
        """Rows [kv heads, dim] of one position."""
        tile, within = divmod(position, native.KV_TILE)
        if self._scales is None:
            self._values[:, tile, within] = rows
            return
        for group, first in enumerate(range(0, rows.shape[1], reference.KV_GROUP)):
            part = slice(first, first + reference.KV_GROUP)
            q, scale = reference.quantise_kv(rows[:, part])
            self._values[:, tile, within, part] = q
            self._scales[:, tile, within, group] = scale[:, 0]

    def floats(self) -> Floats:
        """What the cache stands for: [positions, kv heads, dim]."""
        values = self._values.astype(np.float32)
        if self._scales is not None:
            values *= self._scales.astype(np.float32).repeat(reference.KV_GROUP, axis=3)[..., : values.shape[3]]
        return values.reshape(values.shape[0], -1, values.shape[3]).swapaxes(0, 1)


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows before norm and rotation: query [rows, query heads * dim], key and value [rows, kv heads * dim]."""

    query: Floats
    key: Floats
    value: Floats

    @staticmethod
    def random(heads: Heads, num: int, rng: np.random.Generator) -> TokenRows:
        return TokenRows(*(rng.standard_normal((num, n * heads.dim)).astype(np.float32) for n in (heads.query, heads.kv, heads.kv)))

    def part(self, begin: int, end: int) -> TokenRows:
        return TokenRows(*(np.ascontiguousarray(x[begin:end]) for x in (self.query, self.key, self.value)))


class AttentionRig:
    """The card's layer, and the twin of it on the host; both hold positions 0..context."""

    def __init__(self, heads: Heads, context: int, rng: np.random.Generator, *, max_rows: int = 8) -> None:
        self.heads, self.context, self._max_rows = heads, context, max_rows
        dim = heads.dim
        self.scale = float(np.float32(dim**-0.5))
        gammas = [rng.standard_normal(dim).astype(np.float32) if heads.normed else None for _ in range(2)]
        frequencies = [10.0 ** (-i / 4) for i in range(dim // 2)]
        self.angles = reference.angles(frequencies, 1.0, 0, context).reshape(context, dim)
        self.card = native.CudaAttention(heads.query, heads.kv, dim, context, heads.kv_type, *gammas, EPS, self.scale, self.angles)
        self._host = OpRig(max_rows, context=context)
        self._record(gammas, frequencies)
        self.clear()

    def _record(self, gammas: list[Floats | None], frequencies: list[float]) -> None:
        heads, rig, rows = self.heads, self._host, self._max_rows
        widths = [n * heads.dim for n in (heads.query, heads.kv, heads.kv)]
        self._inputs = [rig.take(4 * rows * width) for width in widths]
        turned = rig.take(4 * rows * heads.dim)
        self._cache = rig.card.allocate("kv", self.card.cache().size)
        kv = native.KvMemory.at(self._cache, heads.kv_type, heads.kv, heads.dim, self.context)
        given = [None if gamma is None else rig.give(gamma) for gamma in gammas]
        groups = -(-widths[0] // 256) * GROUP_BYTES
        self._out = native.RowsMemory(rig.take(4 * rows * widths[0]), rig.take(rows * groups), widths[0])
        spans = rig.take(8 * heads.query * -(-self.context // native.ATTENTION_SPAN) * (heads.dim + 2) * 4)
        rig.recorder.angles(frequencies, 1.0, turned)
        rig.recorder.rotary(native.Heads(*self._inputs, heads.query, *given, EPS, turned), kv)
        rig.recorder.attention(self._inputs[0], heads.query, kv, self.scale, spans, self._out.values)
        rig.recorder.quantise(self._out)

    def clear(self) -> None:
        """What nobody has written yet is NaN, in both caches."""
        blank = np.full(self.card.cache().size, 0xFF, np.uint8)
        self.card.set_cache(blank)
        self._cache.bytes()[:] = blank

    def fill(self, num: int, rng: np.random.Generator) -> None:
        """Random keys and values at positions 0..num, the same in both caches."""
        cache = self.card.cache()
        for half in self._halves(cache):
            for position, rows in enumerate(rng.standard_normal((num, self.heads.kv, self.heads.dim)).astype(np.float32)):
                half.put(position, rows)
        self.card.set_cache(cache)
        self._cache.bytes()[:] = cache

    def keys_and_values(self) -> tuple[Floats, Floats]:
        """The card's cache, [positions, kv heads, dim] each."""
        keys, values = self._halves(self.card.cache())
        return keys.floats(), values.floats()

    def copy_cache(self, other: AttentionRig) -> None:
        """Puts what the other's cache stands for into the card's."""
        cache = self.card.cache()
        for half, rows in zip(self._halves(cache), other.keys_and_values(), strict=True):
            for position in range(len(rows)):
                half.put(position, rows[position])
        self.card.set_cache(cache)

    def _halves(self, cache: Bytes) -> tuple[KeysOrValues, KeysOrValues]:
        keys, values = cache.reshape(2, -1)
        return KeysOrValues(keys, self.heads, are_keys=True), KeysOrValues(values, self.heads, are_keys=False)

    def host(self, rows: TokenRows, position: int) -> tuple[Floats, Floats, Bytes]:
        """Rotated queries, outputs and groups of the host card's operations."""
        num = len(rows.query)
        for view, array in zip(self._inputs, (rows.query, rows.key, rows.value), strict=True):
            view.bytes()[: array.nbytes] = array.view(np.uint8).reshape(-1)
        self._host.run(num, position=position)
        groups = self._out.groups.bytes()[: num * (self._out.groups.nbytes // self._max_rows)]
        width = rows.query.shape[1]
        return floats(self._inputs[0], num, width), floats(self._out.values, num, width), groups.reshape(num, -1, GROUP_BYTES).copy()

    def host_cache(self) -> Bytes:
        return self._cache.bytes().copy()

    def window(self, rows: TokenRows, position: int, *, card: tuple[int, int] = H200, usual_spans: int = 1) -> tuple[Floats, Bytes]:
        """Outputs and groups of the card's kernel."""
        shape = native.AttentionWindowShape(*card, usual_spans)
        out, groups, _, _ = self.card.window(rows.query, rows.key, rows.value, position, shape)
        return out, groups
