"""Which state of the last conversation a prompt may reuse, token for token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from appliance.engine.session import Session, common_prefix

tokens = st.lists(st.integers(0, 2), max_size=12)


def session_of(held: list[int]) -> Session:
    session = Session()
    session.extend(held)
    return session


@given(tokens, tokens)
def test_common_prefix_is_the_longest(left: list[int], right: list[int]) -> None:
    length = common_prefix(left, right)
    assert left[:length] == right[:length]
    assert length == min(len(left), len(right)) or left[length] != right[length]


def test_a_new_session_reuses_nothing() -> None:
    assert Session().reusable([1, 2, 3]) == 0


def test_a_longer_prompt_reuses_the_whole_conversation() -> None:
    assert session_of([1, 2, 3]).reusable([1, 2, 3, 4, 5]) == 3


def test_the_last_prompt_token_is_always_computed_again() -> None:
    assert session_of([1, 2, 3]).reusable([1, 2, 3]) == 2
    assert session_of([1, 2, 3, 4]).reusable([1, 2]) == 1
    assert session_of([1]).reusable([1]) == 0


def test_one_different_token_ends_the_reuse() -> None:
    assert session_of([1, 2, 3, 4]).reusable([1, 2, 9, 4, 5]) == 2


def test_state_after_a_truncation_is_never_reused() -> None:
    session = session_of([1, 2, 3, 4])
    session.truncate(2)
    assert session.reusable([1, 2, 3, 4, 5]) == 2


def test_a_gap_is_an_error() -> None:
    with pytest.raises(ValueError, match="gap"):
        session_of([1, 2]).truncate(3)


class RunnerAndSession(RuleBasedStateMachine):
    """A runner's memory as a list of what each position was computed from, beside a session that is to describe it."""

    def __init__(self) -> None:
        super().__init__()
        self.session = Session()
        self.memory: list[tuple[int, ...]] = []
        """At each position the token sequence whose state lies there."""

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        chunk=st.integers(1, 4),
        num_chunks=st.integers(0, 5),
        fails=st.booleans(),
    )
    def serve(self, prompt: list[int], chunk: int, num_chunks: int, fails: bool) -> None:
        """Computes some chunks of a prompt; the last may fail after it has overwritten part of the memory."""
        position = self.session.reusable(prompt)
        for index in range(num_chunks):
            part = prompt[position : position + chunk]
            if not part:
                return
            self.session.truncate(position)
            for offset in range(len(part)):
                del self.memory[position + offset :]
                self.memory.append(tuple(prompt[: position + offset + 1]))
                if fails and index == num_chunks - 1:
                    return
            self.session.extend(part)
            position += len(part)

    @invariant()
    def every_token_of_the_session_has_its_state_in_memory(self) -> None:
        for position in range(len(self.session)):
            assert self.memory[position] == tuple(self.session.tokens[: position + 1])


TestRunnerAndSession = RunnerAndSession.TestCase
TestRunnerAndSession.settings = settings(max_examples=50, stateful_step_count=15)
