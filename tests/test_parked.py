"""Parked conversations: exactly the request's prefix comes back, whatever is killed, full, damaged or of another model."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from appliance.engine.parking import Parking
from appliance.engine.session import Session
from appliance.memory.parked import HEADER_BYTES, Bytes, ParkedStore, parked_folder, remove_unused_folders
from tests.arena_rig import shm_folder
from tests.engine_rig import ROOT

STATE_ID = "ab" * 32
BYTES_PER_TOKEN = 100
ENTRY_BYTES = HEADER_BYTES + 4096
"""What an entry of up to 1024 tokens takes beside its state."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with shm_folder() as shm_dir:
        yield parked_folder(shm_dir, "0123456789abcdef" * 4, "1")


@pytest.fixture
def store(folder: Path) -> Iterator[ParkedStore]:
    opened = ParkedStore(folder, STATE_ID, budget_bytes=1 << 20)
    yield opened
    opened.close()


def state_of(tokens: list[int]) -> Bytes:
    """A state that belongs to exactly these tokens."""
    return np.concatenate([np.random.default_rng(tokens[: i + 1]).integers(0, 256, BYTES_PER_TOKEN, np.uint8) for i in range(len(tokens))])


def park(store: ParkedStore, tokens: list[int]) -> bool:
    def write(out: Bytes) -> None:
        out[:] = state_of(tokens)

    return store.park(tokens, BYTES_PER_TOKEN * len(tokens), write)


def restored(store: ParkedStore, prompt: list[int]) -> tuple[int, Bytes] | None:
    """(tokens, their state) of the longest parked prefix."""
    found = store.longest(prompt)
    if found is None:
        return None
    states: list[Bytes] = []
    assert store.restore(found[0], lambda state: states.append(state.copy()))
    return found[1], states[0][: BYTES_PER_TOKEN * found[1]]


def conversation(seed: int, length: int = 100) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 1000, length)]


def test_the_longest_prefix_comes_back_token_for_token(store: ParkedStore) -> None:
    first, second = conversation(1), conversation(2)
    assert park(store, first)
    assert park(store, first[:40] + second)
    prompt = [*first[:80], 7, 7, 7]
    found = restored(store, prompt)
    assert found is not None
    assert found[0] == 80
    np.testing.assert_array_equal(found[1], state_of(first[:80]))


def test_an_unrelated_prompt_finds_nothing(store: ParkedStore) -> None:
    park(store, conversation(1))
    assert store.longest(conversation(2)) is None
    assert store.longest([*conversation(1, 31), 5]) is None


def test_a_longer_conversation_replaces_its_own_beginning(store: ParkedStore) -> None:
    whole = conversation(1)
    assert park(store, whole[:50])
    assert park(store, whole)
    assert [len(entry.tokens) for entry in store.entries()] == [100]
    assert park(store, whole[:60])
    assert [len(entry.tokens) for entry in store.entries()] == [100]


def test_another_engine_finds_what_one_has_parked(store: ParkedStore, folder: Path) -> None:
    other = ParkedStore(folder, STATE_ID, 1 << 20)
    park(store, conversation(1))
    found = restored(other, conversation(1))
    assert found is not None
    assert found[0] == 100
    other.close()


def test_a_state_of_another_model_is_refused(store: ParkedStore, folder: Path) -> None:
    other = ParkedStore(folder, "cd" * 32, 1 << 20)
    park(other, conversation(1))
    assert store.longest(conversation(1)) is None
    assert store.entries() == []
    other.close()


def test_the_entry_not_used_for_longest_makes_room(folder: Path) -> None:
    size = ENTRY_BYTES + 100 * BYTES_PER_TOKEN
    store = ParkedStore(folder, STATE_ID, budget_bytes=2 * size)
    for seed in (1, 2):
        park(store, conversation(seed))
        time.sleep(0.02)  # the clock of a file system is coarse
    assert restored(store, conversation(1)) is not None
    time.sleep(0.02)
    park(store, conversation(3))
    assert [store.longest(conversation(seed)) is not None for seed in (1, 2, 3)] == [True, False, True]
    assert store.total_bytes <= 2 * size
    assert store.num_stored == 2
    store.close()


def test_what_is_larger_than_the_budget_is_not_parked_and_evicts_nothing(folder: Path) -> None:
    store = ParkedStore(folder, STATE_ID, budget_bytes=ENTRY_BYTES + 100 * BYTES_PER_TOKEN)
    assert park(store, conversation(1))
    assert not park(store, conversation(2, 101))
    assert store.longest(conversation(1)) is not None
    store.close()


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_shared_memory_keeps_nothing(store: ParkedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        park(store, conversation(1))
    assert store.total_bytes == 0


def test_a_writer_that_fails_leaves_nothing(store: ParkedStore) -> None:
    def fail(_out: Bytes) -> None:
        raise RuntimeError("the card failed")

    with pytest.raises(RuntimeError):
        store.park(conversation(1), 100, fail)
    assert store.total_bytes == 0


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from appliance.memory.parked import ParkedStore
store = ParkedStore(Path(sys.argv[1]), sys.argv[2], 1 << 20)
def write(out):
    out[: len(out) // 2] = 7
    print("half", flush=True)
    signal.pause()
store.park(list(range(100)), 10000, write)
"""


def test_a_writer_killed_half_way_leaves_an_entry_that_is_never_used(store: ParkedStore, folder: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", KILLED_WRITER, str(folder), STATE_ID], cwd=ROOT, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"half\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    assert len(list(folder.glob("*.new"))) == 1
    assert store.longest(list(range(100))) is None
    assert park(store, conversation(1))
    assert list(folder.glob("*.new")) == []


@pytest.mark.parametrize("cut", [10, HEADER_BYTES, HEADER_BYTES + 4096 + 5])
def test_a_cut_entry_is_never_used(cut: int, store: ParkedStore, folder: Path) -> None:
    park(store, conversation(1))
    (path,) = folder.glob("*.state")
    os.truncate(path, cut)
    fresh = ParkedStore(folder, STATE_ID, 1 << 20)
    assert fresh.longest(conversation(1)) is None
    fresh.close()


def test_an_entry_that_is_gone_by_now_is_computed_again(store: ParkedStore) -> None:
    park(store, conversation(1))
    found = store.longest(conversation(1))
    assert found is not None
    found[0].path.unlink()
    assert not store.restore(found[0], lambda _state: None)


@pytest.mark.usefixtures("store")
def test_folders_of_servers_that_are_gone_are_removed(folder: Path) -> None:
    gone = parked_folder(folder.parent, "0123456789abcdef" * 4, "2")
    ParkedStore(gone, STATE_ID, 1).close()
    (folder.parent / "somebody.parked").mkdir()
    remove_unused_folders(folder.parent)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["somebody.parked", folder.name]


class Keeper:
    """A runner's key/value memory: position -> the token whose state lies there."""

    state_id = STATE_ID

    def __init__(self) -> None:
        self.held = np.zeros(500, dtype=np.int32)

    def state_bytes(self, num_tokens: int) -> int:
        return 4 * num_tokens

    def save_state(self, num_tokens: int, out: Bytes) -> None:
        out[:] = self.held[:num_tokens].view(np.uint8)

    def load_state(self, num_tokens: int, saved_tokens: int, state: Bytes) -> None:
        assert state.size == 4 * saved_tokens
        self.held[:num_tokens] = state.view(np.int32)[:num_tokens]

    def compute(self, session: Session, prompt: list[int]) -> int:
        """As the engine does; returns how many tokens were reused."""
        reused = session.reusable(prompt)
        assert self.held[:reused].tolist() == prompt[:reused], "the state is another prefix's"
        session.truncate(reused)
        self.held[reused : len(prompt)] = prompt[reused:]
        session.extend(prompt[reused:])
        return reused


class Lane:
    def __init__(self, folder: Path, budget_bytes: int = 1 << 20) -> None:
        self.keeper, self.session = Keeper(), Session()
        self.parking = Parking(self.keeper, ParkedStore(folder, STATE_ID, budget_bytes))

    def serve(self, prompt: list[int]) -> int:
        self.parking.prepare(self.session, prompt)
        return self.keeper.compute(self.session, prompt)


def test_conversations_alternate_without_being_computed_again(folder: Path) -> None:
    lane = Lane(folder)
    one, other = conversation(1, 300), conversation(2, 300)
    assert [lane.serve(one[:100]), lane.serve(other[:100])] == [0, 0]
    assert [lane.serve(one[:150]), lane.serve(other[:150]), lane.serve(one)] == [100, 100, 150]
    assert (lane.parking.num_parked, lane.parking.num_resumed) == (4, 3)


def test_either_lane_resumes_a_conversation(folder: Path) -> None:
    lead, helper = Lane(folder), Lane(folder)
    lead.serve(conversation(1))
    lead.serve(conversation(2))
    assert helper.serve([*conversation(1), 1, 2]) == 100


def test_a_conversation_that_goes_on_is_neither_parked_nor_restored(folder: Path) -> None:
    lane = Lane(folder)
    whole = conversation(1, 300)
    assert [lane.serve(whole[:100]), lane.serve(whole[:200]), lane.serve(whole)] == [0, 100, 200]
    assert (lane.parking.num_parked, lane.parking.num_resumed) == (0, 0)


def test_the_entry_wanted_next_is_not_the_one_that_makes_room(folder: Path) -> None:
    lane = Lane(folder, budget_bytes=2 * (ENTRY_BYTES + 400))
    for seed in (1, 2, 3):
        lane.serve(conversation(seed))
        time.sleep(0.02)
    assert lane.serve([*conversation(1), 5]) == 100


def test_full_shared_memory_fails_nothing_and_is_said_once_until_it_has_worked_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane(folder)
    with capture_logs() as logs:
        for seed, is_full in enumerate((True, True, True, False, True, True)):
            with monkeypatch.context() as patch:
                if is_full:
                    patch.setattr(os, "posix_fallocate", full)
                lane.serve(conversation(seed))
    assert [(log["log_level"], log["reason"]) for log in logs] == [("warning", "[Errno 28] No space left on device")] * 2
    assert lane.parking.num_parked == 1


def test_one_writer_at_a_time(store: ParkedStore, folder: Path) -> None:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code = f"from tests.test_parked import *; print(park(ParkedStore(Path({str(folder)!r}), STATE_ID, 1 << 20), conversation(1)))"
        writer = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(1.5)
        assert list(folder.glob("*.state")) == []
    assert writer.communicate(timeout=60)[0] == "True\n"
    assert store.longest(conversation(1)) is not None


def test_a_folder_that_somebody_removed_holds_nothing(tmp_path: Path) -> None:
    store = ParkedStore(tmp_path / "gone", STATE_ID, 1 << 20)
    (tmp_path / "gone").rmdir()
    assert (store.num_stored, store.total_bytes) == (0, 0)
    store.close()
