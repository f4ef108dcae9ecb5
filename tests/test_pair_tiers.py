"""Peer tier and link: the same logit bits as one card alone, whatever is attached, linked, swapped, or dies in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from appliance.engine.link_options import LinkOptions
from appliance.engine.model_runner import ModelRunner
from appliance.errors import EngineError, MemoryBudgetError
from appliance.gguf_file import open_gguf
from appliance.memory.layout import arena_layout
from appliance.memory.link_file import LinkFile, link_path, remove_unused_links
from appliance.memory.policy import AlwaysSwap, Policy, blob_bytes_table
from appliance.memory.workspace import KvType
from appliance.models.config import read_config
from tests.arena_rig import shm_folder
from tests.engine_rig import ROOT
from tests.op_rig import same_bits
from tests.random_models import RandomModel, fill, greedy, linked_runners, open_runner, prefill, write_random_model
from tests.test_placement import CONTINUATION, NUM_EXPERTS, PROMPT, SHAPE, TYPES

Logits = NDArray[np.float32]
ROUTED_ROWS = (len(PROMPT) + len(CONTINUATION)) * SHAPE.top_k * SHAPE.layers
SLOTS = NUM_EXPERTS * 2 // 5


@pytest.fixture(scope="module")
def shm_dir() -> Iterator[Path]:
    with shm_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return write_random_model(tmp_path_factory.mktemp("models") / "pair.gguf", SHAPE, types=TYPES)


def all_logits(runner: ModelRunner, ids: Sequence[int] = (*PROMPT, *CONTINUATION)) -> Logits:
    """A prompt in chunks, then tokens one by one; the logits of every row."""
    prompt = prefill(runner, ids[: len(PROMPT)], num_logits=runner.max_rows)
    steps = [prefill(runner, [token], num_logits=1, position=len(PROMPT) + step) for step, token in enumerate(ids[len(PROMPT) :])]
    return np.concatenate([prompt, *steps])


@pytest.fixture(scope="module")
def plain(model: RandomModel, shm_dir: Path) -> Logits:
    with open_runner(model, shm_dir, isa="portable") as runner:
        return all_logits(runner)


def always(model: RandomModel) -> Policy:
    gguf = open_gguf(model.path)
    return AlwaysSwap(blob_bytes_table(arena_layout(gguf, read_config(gguf))))


# The peer tier


def test_a_peer_card_computes_its_experts_and_changes_no_bit(model: RandomModel, shm_dir: Path, plain: Logits) -> None:
    with open_runner(model, shm_dir, slots=SLOTS, share=(0, 2), peer_slots=SLOTS) as runner:
        assert same_bits(all_logits(runner), plain)
        assert "peer" not in runner.stats()["rows_by_tier"]
        runner.attach_peer()
        fill(runner)
        before = runner.stats()["rows_by_tier"]["host"]
        assert same_bits(all_logits(runner), plain)
        rows = runner.stats()["rows_by_tier"]
        assert rows["peer"] > 0
        assert rows["host"] - before < before / 2, "the peer card takes rows off the host"
        assert sum(rows.values()) == 2 * ROUTED_ROWS


def test_both_cards_hold_different_experts_however_they_swap(model: RandomModel, shm_dir: Path, plain: Logits) -> None:
    with open_runner(model, shm_dir, slots=SLOTS, share=(0, 2), peer_slots=SLOTS, max_swaps=4) as runner:
        runner.attach_peer()
        fill(runner)
        assert same_bits(all_logits(runner), plain)
        stats = runner.stats()
        assert stats["swaps"] > 0
        assert runner.cache.num_resident + stats["peer_experts"] <= 2 * SLOTS
        assert runner.peer is not None
        assert not (runner.cache.resident & runner.peer.resident).any()
        assert runner.peer.resident.sum() > 0


def test_attaching_and_detaching_in_the_middle_changes_no_bit(model: RandomModel, shm_dir: Path, plain: Logits) -> None:
    ids = (*PROMPT, *CONTINUATION)
    with open_runner(model, shm_dir, slots=SLOTS, share=(0, 2), peer_slots=SLOTS, max_swaps=2, policy=always(model), chunk=8) as runner:
        parts = []
        for first in range(0, len(ids), 8):
            runner.attach_peer() if first // 24 % 2 == 0 else runner.detach_peer()
            rows = ids[first : first + 8]
            parts.append(prefill(runner, rows, num_logits=8, position=first))
        assert same_bits(np.concatenate(parts), plain)
        assert runner.stats()["rows_by_tier"]["peer"] > 0


def test_a_peer_whose_memory_is_gone_says_so_and_stays_detached(
    model: RandomModel, shm_dir: Path, plain: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    from appliance.engine.experts import ExpertCache

    def taken(*_: object) -> Iterator[None]:
        yield
        raise MemoryError

    with open_runner(model, shm_dir, slots=SLOTS, peer_slots=SLOTS) as runner:
        monkeypatch.setattr(ExpertCache, "taking_again", taken)
        with pytest.raises(MemoryBudgetError, match="host:1"):
            runner.attach_peer()
        assert runner.stats()["peer_experts"] == 0
        assert same_bits(all_logits(runner), plain)


# The link


def linked_pair(
    model: RandomModel, shm_dir: Path, *, slots: int = SLOTS, **more: object
) -> AbstractContextManager[tuple[ModelRunner, ModelRunner]]:
    return linked_runners(model, shm_dir, slots=slots, **more)


def test_each_computes_the_others_rows_and_no_bit_changes(model: RandomModel, shm_dir: Path, plain: Logits) -> None:
    with open_runner(model, shm_dir, slots=SLOTS, share=(0, 2)) as alone:
        all_logits(alone)
        unlinked = alone.stats()["rows_by_tier"]["host"]
    with linked_pair(model, shm_dir) as (lead, helper):
        assert same_bits(all_logits(lead), plain)
        assert same_bits(all_logits(helper), plain)
        for one, other in ((lead, helper), (helper, lead)):
            rows = one.stats()["rows_by_tier"]
            assert rows["linked"] == other.stats()["served_rows"] > 0
            assert sum(rows.values()) == ROUTED_ROWS
        assert lead.stats()["rows_by_tier"]["host"] <= 0.4 * unlinked, "host rows fall by 60 % at least"


def test_both_at_once_with_swaps_in_every_window(model: RandomModel, shm_dir: Path, plain: Logits) -> None:
    answers: dict[int, Logits] = {}
    with linked_pair(model, shm_dir, max_swaps=4) as pair:
        threads = [threading.Thread(target=lambda i=i: answers.update({i: all_logits(pair[i])})) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert same_bits(answers[0], plain)
        assert same_bits(answers[1], plain)
        stats = [runner.stats() for runner in pair]
        assert all(one["rows_by_tier"]["linked"] > 0 and one["swaps"] > 0 and one["link_losses"] == 0 for one in stats)


def test_turning_the_link_off_and_on_between_windows_changes_no_bit(model: RandomModel, shm_dir: Path, plain: Logits) -> None:
    ids = (*PROMPT, *CONTINUATION)
    with linked_pair(model, shm_dir) as (lead, helper):
        parts = []
        linked = []
        for first in range(0, len(ids), 8):
            helper.serve_link(first // 8 % 2 == 0)
            parts.append(prefill(lead, ids[first : first + 8], num_logits=8, position=first))
            linked.append(lead.stats()["rows_by_tier"].get("linked", 0))
        assert same_bits(np.concatenate(parts), plain)
        assert linked[0] == linked[1] < linked[2]


def test_giving_memory_back_withdraws_what_was_offered(model: RandomModel, shm_dir: Path, plain: Logits) -> None:
    with linked_pair(model, shm_dir) as (lead, helper):
        helper.free_memory(-(-helper.plan_bytes["expert slots"] // 2**20))
        assert helper.stats()["resident_experts"] == 0
        assert same_bits(all_logits(lead), plain)
        assert "linked" not in lead.stats()["rows_by_tier"]
        helper.take_memory()
        fill(helper)
        assert same_bits(all_logits(lead), plain)
        assert lead.stats()["rows_by_tier"]["linked"] > 0


def test_an_engine_that_starts_asleep_serves_while_its_cache_fills(model: RandomModel, shm_dir: Path, plain: Logits) -> None:
    with open_runner(model, shm_dir, slots=SLOTS, asleep=True) as runner:
        assert runner.stats()["resident_experts"] == 0
        assert same_bits(all_logits(runner), plain)
        runner.take_memory()
        first = runner.run(PROMPT[:8], 0, 1)[0].values().copy()
        assert runner.is_filling
        assert same_bits(first, plain[7])
        fill(runner)
        assert runner.stats()["resident_experts"] == SLOTS
        assert same_bits(all_logits(runner), plain)


PARTNER = """
import sys, signal
from pathlib import Path
from appliance.engine.link_options import LinkOptions
from tests.random_models import RandomModel, open_runner
from tests.test_pair_tiers import SHAPE, SLOTS
model, shm_dir, path = map(Path, sys.argv[1:])
with open_runner(RandomModel(model, SHAPE), shm_dir, slots=SLOTS, share=(1, 2), link=LinkOptions(path, 1)) as runner:
    runner.serve_link(True)
    print("serving", flush=True)
    sys.stdin.read()
"""


@contextmanager
def partner_process(model: RandomModel, shm_dir: Path, path: Path) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", PARTNER, str(model.path), str(shm_dir), str(path)]
    process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        while (text := process.stdout.readline()) and text != "serving\n":
            pass
        assert text, "the partner did not start"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_partner_that_is_killed_in_mid_window_costs_that_window_only(model: RandomModel, shm_dir: Path, plain: Logits) -> None:
    path = link_path(shm_dir, "0" * 64, "killed")
    with open_runner(model, shm_dir, slots=SLOTS, share=(0, 2), link=LinkOptions(path, 0, stuck_after_s=60.0)) as lead:
        with partner_process(model, shm_dir, path) as partner:
            assert same_bits(all_logits(lead), plain)
            linked = lead.stats()["rows_by_tier"]["linked"]
            assert linked > 0
            os.kill(partner.pid, signal.SIGSTOP)  # the next window surely waits when it dies
            threading.Timer(0.3, lambda: os.kill(partner.pid, signal.SIGKILL)).start()
            assert same_bits(all_logits(lead), plain)
            assert lead.stats()["link_losses"] == 1
        with partner_process(model, shm_dir, path):  # a new one takes its place
            before = lead.stats()["rows_by_tier"]["linked"]
            assert same_bits(all_logits(lead), plain)
            assert lead.stats()["rows_by_tier"]["linked"] > before
            assert lead.stats()["link_losses"] == 1
    path.unlink()


def test_a_partner_that_hangs_is_given_up_and_taken_up_again(model: RandomModel, shm_dir: Path, plain: Logits) -> None:
    path = link_path(shm_dir, "0" * 64, "hangs")
    with (
        open_runner(model, shm_dir, slots=SLOTS, share=(0, 2), link=LinkOptions(path, 0, stuck_after_s=0.5)) as lead,
        partner_process(model, shm_dir, path) as partner,
    ):
        os.kill(partner.pid, signal.SIGSTOP)
        assert same_bits(all_logits(lead), plain)
        assert lead.stats()["link_losses"] == 1
        os.kill(partner.pid, signal.SIGCONT)
        deadline = time.monotonic() + 60
        before = lead.stats()["rows_by_tier"].get("linked", 0)
        while lead.stats()["rows_by_tier"].get("linked", 0) == before:
            assert time.monotonic() < deadline
            assert same_bits(all_logits(lead), plain)
    path.unlink()


def test_greedy_tokens_are_those_of_one_card(model: RandomModel, shm_dir: Path) -> None:
    with open_runner(model, shm_dir) as runner:
        expected = greedy(runner, PROMPT, 32)
    with linked_pair(model, shm_dir, max_swaps=4, kv_type="f32") as (lead, helper):
        assert greedy(lead, PROMPT, 32) == expected
        assert greedy(helper, PROMPT, 32) == expected


# The file


def test_one_engine_per_role_and_one_model_per_file(model: RandomModel, shm_dir: Path) -> None:
    path = link_path(shm_dir, "0" * 64, "roles")
    with open_runner(model, shm_dir, link=LinkOptions(path, 0)):
        code = f"from tests.test_pair_tiers import *; LinkFile(Path({str(path)!r}), 0, {path.stat().st_size}, print)"
        second = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True)
        assert "another engine has role 0" in second.stderr
        with pytest.raises(EngineError, match="other sizes"), open_runner(model, shm_dir, chunk=8, link=LinkOptions(path, 1)):
            pass
    path.unlink()


def test_what_dead_engines_left_is_made_anew(shm_dir: Path) -> None:
    path = link_path(shm_dir, "0" * 64, "stale")
    path.write_bytes(b"x" * 100)
    written: list[int] = []
    file = LinkFile(path, 0, 8192, lambda memory: written.append(int(memory.sum())))
    assert written == [0]
    remove_unused_links(shm_dir)
    assert path.exists(), "an engine holds it"
    file.close()
    remove_unused_links(shm_dir)
    assert not path.exists()


def test_without_space_the_file_is_refused_with_its_size(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryBudgetError, match="8192 bytes"):
        LinkFile(link_path(shm_dir, "0" * 64, "full"), 0, 8192, lambda _memory: None)
    remove_unused_links(shm_dir)


# Parked conversations with real state


@pytest.mark.parametrize("kv_type", ["f32", "f16", "int8"])
def test_a_restored_state_gives_the_bits_of_a_computed_one(model: RandomModel, shm_dir: Path, kv_type: KvType) -> None:
    with (
        open_runner(model, shm_dir, slots=SLOTS, context=150, kv_type=kv_type) as one,
        open_runner(model, shm_dir, context=140, kv_type=kv_type) as other,
    ):
        prefill(one, PROMPT, num_logits=0)
        assert one.state_id == other.state_id
        state = np.empty(one.state_bytes(len(PROMPT)), np.uint8)
        one.save_state(len(PROMPT), state)
        expected = prefill(one, [*PROMPT, *CONTINUATION], num_logits=one.max_rows)
        for shared in (len(PROMPT), 64, 63, 1):
            prefill(other, PROMPT[::-1], num_logits=0)
            other.load_state(shared, len(PROMPT), state)
            rest = prefill(other, [*PROMPT, *CONTINUATION][shared:], num_logits=other.max_rows, position=shared)
            assert same_bits(rest, expected[shared:])


def test_states_of_another_cache_type_or_model_are_told_apart(model: RandomModel, shm_dir: Path) -> None:
    with (
        open_runner(model, shm_dir) as one,
        open_runner(model, shm_dir, kv_type="f16") as half,
        open_runner(model, shm_dir, kv_type="int8") as small,
    ):
        assert len({one.state_id, half.state_id, small.state_id}) == 3
