"""Parks the conversation that a request displaces, and picks up the one that it continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import structlog

from appliance.engine.session import Session
from appliance.memory.parked import MIN_TOKENS, Bytes, Parked, ParkedStore

MIN_GAIN_TOKENS = 16
"""A parked prefix must be longer than the runner's own by this many tokens to be worth copying."""

_log = structlog.get_logger()


@runtime_checkable
class StateKeeper(Protocol):
    """A runner whose key/value state can be copied out and in. Confined to the engine loop."""

    @property
    def state_id(self) -> str:
        """64 hexadecimal digits that are equal exactly if states can be exchanged: model, shapes, type of the cache."""

    def state_bytes(self, num_tokens: int) -> int:
        """Size of the state of the first `num_tokens` positions."""

    def save_state(self, num_tokens: int, out: Bytes) -> None:
        """Copies the state of positions 0 to `num_tokens` - 1 out; `out` has `state_bytes(num_tokens)` bytes."""

    def load_state(self, num_tokens: int, saved_tokens: int, state: Bytes) -> None:
        """Copies positions 0 to `num_tokens` - 1 in, from a state that was saved with `saved_tokens` positions."""


class Parking:
    """The engine loop's side of the store. Confined to the engine loop."""

    def __init__(self, runner: StateKeeper, store: ParkedStore) -> None:
        self._runner = runner
        self._store = store
        self.num_parked = 0
        """Conversations that this engine has put into the store."""
        self.num_resumed = 0
        """Prompts that went on from the store."""
        self._has_failed = False
        """The last conversation could not be written, which was said."""

    @property
    def num_stored(self) -> int:
        """Conversations in the store, whoever put them there."""
        return self._store.num_stored

    @property
    def stored_bytes(self) -> int:
        return self._store.total_bytes

    def prepare(self, session: Session, prompt: Sequence[int]) -> None:
        """Before a request: keeps what `prompt` would overwrite, and brings back what it can go on from."""
        own = session.reusable(prompt)
        found = self._store.longest(prompt)
        is_better = found is not None and found[1] >= own + MIN_GAIN_TOKENS
        if found is not None and is_better:
            self._store.note_use(found[0])  # so that parking does not evict it
        if len(session) - own >= MIN_TOKENS:
            self.park(session)
        if found is not None and is_better:
            self._resume(session, found[0], prompt[: min(found[1], len(prompt) - 1)])

    def _resume(self, session: Session, parked: Parked, tokens: Sequence[int]) -> None:
        def load(state: Bytes) -> None:
            session.truncate(0)  # what is overwritten is not trusted, whatever happens
            self._runner.load_state(len(tokens), len(parked.tokens), state)

        if self._store.restore(parked, load):
            session.extend(tokens)
            self.num_resumed += 1

    def park(self, session: Session) -> None:
        """Keeps the conversation. What cannot be kept is computed again when it is wanted: nothing fails."""
        num_tokens = len(session)
        try:
            is_kept = self._store.park(
                session.tokens, self._runner.state_bytes(num_tokens), lambda out: self._runner.save_state(num_tokens, out)
            )
        except OSError as error:
            if not self._has_failed:
                _log.warning("conversations for which there is no room are not parked", tokens=num_tokens, reason=str(error))
            self._has_failed = True
            return
        self._has_failed = self._has_failed and not is_kept
        self.num_parked += is_kept
