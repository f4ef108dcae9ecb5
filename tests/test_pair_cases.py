"""The pair's cases of scripts/gpu_check.py on host cards: two real engines keep off each other's card, and one that does not is found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from scripts.gpu_cases import pair_ids
from scripts.gpu_cases.findings import Findings
from scripts.gpu_cases.pair_ids import BOTH_LINKED, Answers, Size, State
from scripts.gpu_cases.pair_model import Place, place_of

SIZE = Size(num_prompts=4, num_tokens=64, num_kills=1, threads=1)


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with place_of(("host:0", "host:1"), threads=SIZE.threads) as made:
        yield made


@pytest.fixture(scope="module")
def expected(place: Place) -> Answers:
    answers, found = pair_ids.one_card(place, SIZE)
    assert found.failures == []
    return answers


@pytest.fixture
def both_busy() -> State:
    return next(state for state in pair_ids.states(SIZE) if state.name == BOTH_LINKED)


def test_two_engines_answer_as_one_and_compute_only_on_their_own_cards(place: Place, expected: Answers, both_busy: State) -> None:
    found = pair_ids.in_state(place, both_busy, SIZE, expected, {})
    assert found.failures == []
    assert int(str(found.notes["served for the other"])) > 0


def test_an_engine_that_goes_on_with_a_card_it_gave_back_is_found(place: Place, expected: Answers, both_busy: State) -> None:
    found = pair_ids.in_state(place, replace(both_busy, engine="tests.keeping_engine"), SIZE, expected, {})
    assert any("on the second card, which was not its own" in failure for failure in found.failures), found.failures
    assert any("held" in failure and "of the second card" in failure for failure in found.failures), found.failures


def test_another_token_and_other_log_probabilities_are_found(expected: Answers) -> None:
    tokens, logprobs = expected["r0"], expected["r2"]
    answers = {
        "r0": replace(tokens, ids=[*tokens.ids[:-1], tokens.ids[-1] + 1]),
        "r1": replace(expected["r1"], ids=expected["r1"].ids[:5]),
        "r2": replace(logprobs, logprobs=[*logprobs.logprobs[:-1], logprobs.logprobs[0]]),
    }
    found = Findings()
    pair_ids.compare(answers, expected, found)
    assert [failure.partition(":")[0] for failure in found.failures] == ["r0", "r2"], found.failures
