"""The host tier alone: the test writes posts into the memory as a card would, and reads the answers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from cuda_ext import _native as native
from tests.card.experts_rig import GROUP_BYTES, Layer, Shape, random_layer
from tests.eventually import eventually
from tests.op_rig import Floats, same_bits

SHAPE = Shape(6, 3, 256, 64, "Q4_K", "IQ3_S", "Q8_0")
ROWS = 4
DEADLINE_S = 20.0


class PretendCard:
    """Posts by layer, and the rows as the row kernels give them."""

    def __init__(self, layers: list[Layer], num_threads: int, held: int = 0) -> None:
        self.layers = layers
        pool = native.Pool(num_threads)
        pool.hold(held)
        self.host = native.HostCard(pool, native.isas()[-1])
        self.at = native.post_offsets(ROWS, SHAPE.top_k, SHAPE.hidden)
        self.post = self.host.allocate("post", self.at["nbytes"])
        self.bytes = self.post.bytes()
        described = []
        for layer in layers:
            blobs = self.host.allocate("arena", layer.blobs.nbytes)
            blobs.bytes()[:] = layer.blobs.reshape(-1)
            described.append((blobs, layer.blobs.shape[1], layer.gate, layer.up, layer.down))
        self.tier = native.HostTier((ROWS, SHAPE.top_k, SHAPE.hidden), described, self.post, self.host)

    def words(self, part: str, num: int) -> NDArray[np.int32]:
        return self.bytes[self.at[part] :][: 4 * num].view(np.int32)

    def write_post(self, sequence: int, layer: int, x: Floats, experts: list[tuple[int, list[int]]]) -> None:
        """`experts`: (expert, its pairs)."""
        first = 0
        for i, (expert, pairs) in enumerate(experts):
            self.words("experts", 3 * (i + 1))[3 * i :] = expert, first, len(pairs)
            self.words("pair_rows", first + len(pairs))[first:] = [pair // SHAPE.top_k for pair in pairs]
            first += len(pairs)
        for row, values in enumerate(x):
            q, d, sums = native.quantise(values)
            group = np.concatenate([q.view(np.uint8), d.view(np.uint8), sums.view(np.uint8)], 1).reshape(-1)
            assert group.size == GROUP_BYTES
            self.bytes[self.at["groups"] + row * GROUP_BYTES :][:GROUP_BYTES] = group
        self.words("request", 4)[:] = layer, len(x), len(experts), first
        self.words("sequence", 1)[0] = sequence

    def done(self) -> int:
        return int(self.words("done", 1)[0])

    def rows(self, num: int) -> Floats:
        offset = self.at["rows"]
        return self.bytes[offset : offset + 4 * num * SHAPE.hidden].view(np.float32).reshape(num, SHAPE.hidden).copy()

    def expected(self, layer: int, x: Floats, experts: list[tuple[int, list[int]]]) -> Floats:
        rows = [self._row(self.layers[layer], expert, x[pair // SHAPE.top_k]) for expert, pairs in experts for pair in pairs]
        return np.stack(rows)

    def _row(self, layer: Layer, expert: int, x: Floats) -> Floats:
        blob, hidden = layer.blobs[expert], []
        half = 0
        for name in (SHAPE.gate, SHAPE.up):
            out, half = self._product(blob, name, half, SHAPE.width, x)
            hidden.append(out)
        inner = np.empty(SHAPE.width, np.float32)
        native.swiglu(*hidden, inner)
        return self._product(blob, SHAPE.down, half, SHAPE.hidden, inner)[0]

    def _product(self, blob: NDArray[np.uint8], name: str, offset: int, rows: int, x: Floats) -> tuple[Floats, int]:
        number, values, nbytes = native.quant_types()[name]
        row_bytes = x.size // values * nbytes
        out = np.empty((1, rows), np.float32)
        native.dot(number, blob[offset : offset + rows * row_bytes].reshape(rows, row_bytes), x.reshape(1, -1), out)
        end = offset + rows * row_bytes
        return out[0], end + -end % 32


@pytest.fixture
def service() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def serve(card: PretendCard, service: ThreadPoolExecutor) -> Future[None]:
    card.tier.begin()
    return service.submit(card.tier.serve, card.host)


def some_rows(num: int) -> Floats:
    return np.random.default_rng(num).standard_normal((num, SHAPE.hidden)).astype(np.float32)


@pytest.mark.parametrize(("num_threads", "held"), [(1, 0), (3, 0), (3, 2)])
def test_posts_of_a_window_are_answered_in_turn(num_threads: int, held: int, service: ThreadPoolExecutor) -> None:
    card = PretendCard([random_layer(SHAPE, seed) for seed in (1, 2)], num_threads, held)
    window = serve(card, service)
    posts = [(1, 0, [(4, [0, 5]), (1, [7])]), (2, 1, [(0, [2])]), (3, 0, [(5, [0, 3, 6, 9]), (2, [1])])]
    for sequence, layer, experts in posts:
        x = some_rows(ROWS)
        card.write_post(sequence, layer, x, experts)
        eventually(lambda: card.done() == sequence, "an answer", limit_s=DEADLINE_S)  # noqa: B023
        assert same_bits(card.rows(sum(len(pairs) for _, pairs in experts)), card.expected(layer, x, experts))
    card.tier.end()
    window.result(DEADLINE_S)
    assert (card.tier.num_posts, card.tier.num_rows) == (3, 9)


def test_the_card_itself_can_end_a_window(service: ThreadPoolExecutor) -> None:
    card = PretendCard([random_layer(SHAPE)], 2)
    window = serve(card, service)
    card.words("ended", 1)[0] = 1
    window.result(DEADLINE_S)
    assert not card.tier.aborted


def test_an_aborted_window_ends_and_its_post_is_forgotten(service: ThreadPoolExecutor) -> None:
    card = PretendCard([random_layer(SHAPE)], 2)
    window = serve(card, service)
    card.tier.abort()
    window.result(DEADLINE_S)
    assert card.tier.aborted
    x, experts = some_rows(2), [(3, [1, 4])]
    card.write_post(1, 0, x, experts)  # by a card that has not yet noticed
    window = serve(card, service)
    assert not card.tier.aborted
    card.write_post(2, 0, x, experts)
    eventually(lambda: card.done() == 2, "an answer", limit_s=DEADLINE_S)
    assert card.tier.num_posts == 1
    card.tier.end()
    window.result(DEADLINE_S)


def test_layers_that_do_not_fit_are_refused() -> None:
    card = PretendCard([random_layer(SHAPE)], 1)
    layer = card.layers[0]
    blobs = card.host.allocate("arena", layer.blobs.nbytes)
    with pytest.raises(ValueError, match="ends behind its blob"):
        native.HostTier((ROWS, 3, 256), [(blobs, 256, layer.gate, layer.up, layer.down)], card.post, card.host)
    with pytest.raises(ValueError, match="do not fit together"):
        native.HostTier((1, 3, 512), [(blobs, layer.blobs.shape[1], layer.gate, layer.up, layer.down)], card.post, card.host)
    with pytest.raises(ValueError, match="posts need"):
        native.HostTier((64, 3, 256), [], card.post, card.host)
