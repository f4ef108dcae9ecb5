"""The choice of a token on a card: what the reference draws, at both sides of every edge between two tokens."""

from __future__ import annotations

import numpy as np
import pytest

from appliance.engine.logits import Logits
from cuda_ext import _native as native
from tests.choice_reference import Rule, kept

INF = np.inf
MOST_EDGES = 15
RULES = [
    Rule(1.0),
    Rule(0.2),
    Rule(1e-30),
    Rule(100.0),
    Rule(0.7, top_k=20, top_p=0.8),
    Rule(1.0, top_k=1),
    Rule(1.0, top_k=600),
    Rule(1.0, top_p=0.0),
    Rule(1.0, top_p=0.95),
    Rule(1.3, min_offset=-2.5),
    Rule(1.3, min_offset=0.0),
    Rule(2.0, top_k=50, top_p=0.9, min_offset=-6.0),
    Rule(0.9, top_p=0.9, changes={3: (2.5, 1.0, 0.0), 11: (0.0, 1.3, 0.5), 12: (-1.0, 0.7, 0.0), 799: (0.0, 1.0, -2.0)}),
]


def random_logits(vocab: int, seed: int) -> Logits:
    logits = (np.random.default_rng(seed).standard_normal(vocab) * 3).astype(np.float32)
    logits[5:9] = logits[17]  # as likely as each other
    logits[19], logits[20] = 0.0, -0.0
    return logits


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_card_draws_what_the_reference_draws(rule: Rule) -> None:
    for vocab, seed in ((800, 1), (3000, 2)):
        logits = random_logits(vocab, seed)
        expected = kept(logits, rule)
        edges = expected.edges()
        fractions = edges[:: -(-len(edges) // MOST_EDGES)]
        chosen = native.card_choose([rule.chooser(fraction) for fraction in fractions], logits)
        assert chosen == [expected.drawn(fraction) for fraction in fractions]


def test_rules_may_differ_from_window_to_window() -> None:
    logits = random_logits(3000, 3)
    fractions = np.random.default_rng(1).integers(0, 2**53, len(RULES)).tolist()
    chosen = native.card_choose([rule.chooser(fraction) for rule, fraction in zip(RULES, fractions, strict=True)], logits)
    assert chosen == [kept(logits, rule).drawn(fraction) for rule, fraction in zip(RULES, fractions, strict=True)]


def test_a_large_vocabulary_is_drawn_from_as_the_host_does() -> None:
    logits = (np.random.default_rng(5).standard_normal(151_936) * 2.5).astype(np.float32)
    choosers = [rule.chooser(2**53 * place // 10) for rule, place in ((Rule(1.0), 6), (Rule(0.7, 20, 0.8), 9), (Rule(0.8, 0, 0.5), 1))]
    assert native.card_choose(choosers, logits) == [chooser.choose(logits) for chooser in choosers]


def test_the_likeliest_of_changed_logits() -> None:
    logits = random_logits(2000, 4)
    best = int(logits.argmax())
    moved = Rule(0.0, changes={7: (100.0, 1.0, 0.0)}), Rule(0.0, changes={best: (0.0, 1.0, 100.0)})
    second = int(np.argsort(-logits, kind="stable")[1])
    assert native.card_choose([Rule(0.0).chooser(), *(rule.chooser() for rule in moved)], logits) == [best, 7, second]


def test_too_many_to_choose_among_are_left_to_the_host() -> None:
    logits = np.zeros(20_000, np.float32)
    few, many = Rule(1.0, top_p=0.1), Rule(1.0)
    assert native.card_choose([many.chooser(5), few.chooser(5)], logits) == [None, None]
    logits[:3] = 40
    assert native.card_choose([many.chooser(5)], logits) == [0]


@pytest.mark.parametrize("bad", [np.nan, INF, -INF])
def test_damaged_logits_end_the_choice_as_well(bad: float) -> None:
    """What is said of them is the sampler's business."""
    logits = random_logits(3000, 5)
    logits[100] = bad
    native.card_choose([Rule(1.0, top_p=0.9).chooser(5), Rule(0.0, changes={1: (1.0, 1.0, 0.0)}).chooser()], logits)
    assert native.card_choose([Rule(1.0).chooser(0)], random_logits(3000, 6)) != [None]
