"""Attention on a card: windows with the bits of the host's operations, prompts against a formula in double precision."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cuda_ext import _native as native
from tests.card.attention_rig import H200, SMALL_CARD, AttentionRig, Floats, Heads, TokenRows
from tests.op_rig import same_bits

QWEN = Heads(query=8, kv=1, dim=128)
INT8 = Heads(query=8, kv=1, dim=128, dtype=np.int8)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def check_window(rig: AttentionRig, rows: TokenRows, position: int, **options: object) -> None:
    _, expected, expected_groups = rig.host(rows, position)
    out, groups = rig.window(rows, position, **options)  # type: ignore[arg-type]
    assert same_bits(out, expected)
    assert (groups == expected_groups).all()
    assert (rig.card.cache() == rig.host_cache()).all()


@pytest.mark.parametrize("dtype", [np.float16, np.int8])
@pytest.mark.parametrize("position", [0, 1, 63, 64, 255, 256, 700])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8])
def test_a_window_has_the_bits_of_the_host(num_rows: int, position: int, dtype: type, rng: np.random.Generator) -> None:
    heads = Heads(query=4, kv=2, dim=64, dtype=dtype)
    rig = AttentionRig(heads, 768, rng)
    rig.fill(position, rng)
    check_window(rig, TokenRows.random(heads, num_rows, rng), position, usual_spans=3)


@pytest.mark.parametrize("position", [0, 62, 250, 520])
@pytest.mark.parametrize(
    "heads",
    [
        Heads(query=4, kv=2, dim=64, dtype=np.float32),
        Heads(query=4, kv=2, dim=64, normed=False),
        Heads(query=8, kv=1, dim=128, dtype=np.float32, normed=False),
        QWEN,
        Heads(query=12, kv=2, dim=128),
        Heads(query=3, kv=1, dim=96),
        Heads(query=2, kv=1, dim=256),
        Heads(query=16, kv=1, dim=64),
        INT8,
        Heads(query=12, kv=2, dim=128, dtype=np.int8, normed=False),
        Heads(query=3, kv=1, dim=96, dtype=np.int8),
        Heads(query=2, kv=1, dim=192, dtype=np.int8),
        Heads(query=2, kv=1, dim=256, dtype=np.int8),
        Heads(query=16, kv=1, dim=64, dtype=np.int8),
    ],
    ids=str,
)
def test_every_shape_of_heads_has_the_bits_of_the_host(heads: Heads, position: int, rng: np.random.Generator) -> None:
    rig = AttentionRig(heads, 576, rng)
    rig.fill(position, rng)
    for num_rows in (1, 7):
        check_window(rig, TokenRows.random(heads, num_rows, rng), position)


@pytest.mark.parametrize("usual_spans", [1, 4, 64])
@pytest.mark.parametrize("card", [H200, SMALL_CARD, (1, 64 * 1024)])
@pytest.mark.parametrize("heads", [QWEN, INT8], ids=str)
def test_however_the_work_is_cut_the_bits_are_the_same(
    heads: Heads, card: tuple[int, int], usual_spans: int, rng: np.random.Generator
) -> None:
    rig = AttentionRig(heads, 1100, rng)
    rig.fill(1021, rng)
    for num_rows in (1, 2, 6):
        check_window(rig, TokenRows.random(heads, num_rows, rng), 1021, card=card, usual_spans=usual_spans)


@pytest.mark.parametrize(
    ("num_rows", "usual_spans", "plan"),
    [
        (1, 8, (2, 4, 4, 8)),  # heads are spread until the card is full; a whole span is fetched ahead
        (1, 128, (8, 1, 2, 64)),  # keys are read once for all heads; three blocks share a multiprocessor
        (8, 8, (2, 4, 4, 8)),  # sixteen queries are the most
    ],
)
def test_work_is_cut_to_the_card_and_the_context(
    num_rows: int, usual_spans: int, plan: tuple[int, int, int, int], rng: np.random.Generator
) -> None:
    heads = Heads(query=32, kv=4, dim=128)
    rig = AttentionRig(heads, 64, rng)
    rows = TokenRows.random(heads, num_rows, rng)
    assert rig.card.window(rows.query, rows.key, rows.value, 0, native.AttentionWindowShape(*H200, usual_spans))[2] == plan


@pytest.mark.parametrize("dtype", [np.float16, np.int8])
def test_more_than_thirty_two_spans_are_merged_in_order(dtype: type, rng: np.random.Generator) -> None:
    heads = Heads(query=2, kv=1, dim=64, dtype=dtype)
    rig = AttentionRig(heads, 68 * 256, rng)
    rig.fill(67 * 256 - 2, rng)
    check_window(rig, TokenRows.random(heads, 4, rng), 67 * 256 - 2, usual_spans=68)


@pytest.mark.parametrize("heads", [QWEN, INT8], ids=str)
def test_tokens_one_after_the_other_equal_windows(heads: Heads, rng: np.random.Generator) -> None:
    one, many = (AttentionRig(heads, 300, np.random.default_rng(3)) for _ in range(2))
    rows = TokenRows.random(heads, 8, rng)
    for rig in (one, many):
        rig.fill(252, np.random.default_rng(4))
    outs = [one.window(rows.part(row, row + 1), 252 + row)[0] for row in range(8)]
    assert same_bits(np.concatenate(outs), many.window(rows, 252)[0])
    assert (one.card.cache() == many.card.cache()).all()


def test_scores_and_values_without_spread_are_exact(rng: np.random.Generator) -> None:
    """A head of zeros sees every position alike, and the mean of equal values is that value."""
    heads = Heads(query=2, kv=1, dim=64, normed=False)
    rig = AttentionRig(heads, 320, rng)
    ones = np.ones((1, 64), np.float32)
    for position in range(260):
        out, _ = rig.window(TokenRows(np.zeros((1, 128), np.float32), ones, 3 * ones), position)
    assert np.allclose(out, 3.0, rtol=1e-6)


def test_a_tile_that_does_not_fit_is_refused(rng: np.random.Generator) -> None:
    heads = Heads(query=2, kv=1, dim=256, dtype=np.float32)
    rig = AttentionRig(heads, 64, rng)
    with pytest.raises(ValueError, match="bytes of shared memory; this card has"):
        rig.window(TokenRows.random(heads, 1, rng), 0, card=SMALL_CARD)


def test_heads_of_forty_eight_values_are_refused(rng: np.random.Generator) -> None:
    heads = Heads(query=2, kv=1, dim=48)
    rig = AttentionRig(heads, 64, rng)
    with pytest.raises(ValueError, match="heads of 48 values"):
        rig.window(TokenRows.random(heads, 1, rng), 0)


@pytest.mark.parametrize("position", [0, 50, 64])
@pytest.mark.parametrize(
    "heads",
    [
        QWEN,
        Heads(query=2, kv=2, dim=64, dtype=np.float32),
        Heads(query=2, kv=1, dim=96, normed=False),
        Heads(query=1, kv=1, dim=256),
        INT8,
        Heads(query=2, kv=2, dim=32, dtype=np.int8),
        Heads(query=2, kv=1, dim=160, dtype=np.int8, normed=False),
    ],
    ids=str,
)
def test_rotary_of_a_chunk_has_the_bits_of_the_host(heads: Heads, position: int, rng: np.random.Generator) -> None:
    rig = AttentionRig(heads, 256, rng, max_rows=90)
    rows = TokenRows.random(heads, 90, rng)
    expected, _, _ = rig.host(rows, position)
    turned, halves = rig.card.rotary(rows.query, rows.key, rows.value, position)
    assert same_bits(turned, expected)
    assert (halves.view(np.float16) == expected.astype(np.float16)).all()
    assert (rig.card.cache() == rig.host_cache()).all()


def attention_in_double(rig: AttentionRig, query: Floats, position: int) -> Floats:
    """softmax(scale * q . k) . v in double precision, over what the card's cache holds."""
    heads = rig.heads
    keys, values = (x.astype(np.float64) for x in rig.keys_and_values())
    out = np.empty((len(query), heads.query, heads.dim))
    for row, head in np.ndindex(out.shape[:2]):
        seen, kv = position + row + 1, head // (heads.query // heads.kv)
        scores = keys[:seen, kv] @ query[row].reshape(heads.query, heads.dim)[head].astype(np.float64) * rig.scale
        weights = np.exp(scores - scores.max())
        out[row, head] = weights @ values[:seen, kv] / weights.sum()
    return out.reshape(len(query), -1)


def put_rows(rig: AttentionRig, rows: TokenRows, position: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    """Keys and values into the card's cache; the rotated queries as halves."""
    halves: np.ndarray[tuple[int, ...], np.dtype[np.uint16]] = rig.card.rotary(rows.query, rows.key, rows.value, position)[1]
    return halves


@pytest.mark.parametrize(("position", "num_rows"), [(0, 1), (0, 80), (37, 40), (190, 66)])
@pytest.mark.parametrize(
    "heads",
    [
        QWEN,
        Heads(query=4, kv=2, dim=64),
        Heads(query=3, kv=1, dim=96),
        Heads(query=2, kv=2, dim=192),
        Heads(query=2, kv=1, dim=256),
        Heads(query=2, kv=1, dim=128, dtype=np.float32),
        INT8,
        Heads(query=4, kv=2, dim=64, dtype=np.int8),
        Heads(query=3, kv=1, dim=96, dtype=np.int8),
        Heads(query=2, kv=1, dim=256, dtype=np.int8),
    ],
    ids=str,
)
def test_a_prompt_is_close_to_double_precision(heads: Heads, position: int, num_rows: int, rng: np.random.Generator) -> None:
    rig = AttentionRig(heads, 256, rng)
    rig.fill(position, rng)
    query = put_rows(rig, TokenRows.random(heads, num_rows, rng), position)
    out, _ = rig.card.prompt(query, position)
    expected = attention_in_double(rig, query.view(np.float16), position)
    assert np.abs(out - expected).max() < 2e-3 * max(1.0, np.abs(expected).max())
    assert np.sqrt(np.mean((out - expected) ** 2) / np.mean(expected**2)) < 1e-3


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_a_prompt_reads_int8_as_the_halves_nearest_to_it(dim: int, rng: np.random.Generator) -> None:
    of_int8, of_halves = (AttentionRig(Heads(query=2, kv=1, dim=dim, dtype=dtype), 256, rng) for dtype in (np.int8, np.float16))
    of_int8.fill(150, rng)
    query = put_rows(of_int8, TokenRows.random(of_int8.heads, 40, rng), 150)
    of_halves.copy_cache(of_int8)
    assert same_bits(of_int8.card.prompt(query, 150)[0], of_halves.card.prompt(query, 150)[0])


@pytest.mark.parametrize("heads", [QWEN, Heads(query=6, kv=2, dim=64), Heads(query=2, kv=1, dim=256), INT8], ids=str)
def test_a_prompt_row_does_not_depend_on_its_chunk(heads: Heads, rng: np.random.Generator) -> None:
    """All rows at once, cut at odd places, and each alone: the same bits, though later rows were not there yet."""
    rows = TokenRows.random(heads, 150, rng)
    results = []
    for cuts in ([0, 150], [0, 1, 65, 83, 150], [0, 64, 128, 150]):
        rig = AttentionRig(heads, 192, np.random.default_rng(5))
        chunks = []
        for begin, end in itertools.pairwise(cuts):
            query = put_rows(rig, rows.part(begin, end), begin)
            chunks.append(rig.card.prompt(query, begin)[0])
        results.append(np.concatenate(chunks))
    assert all(same_bits(result, results[0]) for result in results[1:])


def test_a_prompt_of_unsupported_heads_is_refused(rng: np.random.Generator) -> None:
    heads = Heads(query=2, kv=1, dim=160)
    rig = AttentionRig(heads, 64, rng)
    query = put_rows(rig, TokenRows.random(heads, 2, rng), 0)
    with pytest.raises(ValueError, match="64, 96, 128, 192 and 256 are"):
        rig.card.prompt(query, 0)


@pytest.mark.parametrize("heads", [QWEN, INT8], ids=str)
def test_a_window_after_a_prompt_reads_the_prompts_keys(heads: Heads, rng: np.random.Generator) -> None:
    rig = AttentionRig(heads, 128, rng, max_rows=100)
    rows = TokenRows.random(heads, 102, rng)
    put_rows(rig, rows.part(0, 100), 0)
    rig.host(rows.part(0, 100), 0)
    assert native.KV_TILE == 64  # the window then crosses no tile, but reads a full one and a part
    check_window(rig, rows.part(100, 102), 100)
