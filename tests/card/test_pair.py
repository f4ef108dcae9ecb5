"""The pair on CUDA cards: a second card as the peer tier, and two engines that compute each other's rows. Windows keep the bits of one
card alone, whatever is attached, linked, swapped or gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from appliance.engine import experts
from appliance.engine.generation import WindowInterruptedError
from appliance.engine.link_options import LinkOptions
from appliance.engine.model_runner import ModelRunner
from appliance.memory.link_file import link_path
from appliance.memory.policy import AlwaysSwap, blob_bytes_table
from cuda_ext import _native as native
from tests.arena_rig import shm_folder
from tests.card.test_engine import DECODED, NUM_EXPERTS, PROMPT, SHAPE, TYPES, one_by_one
from tests.engine_rig import ROOT
from tests.op_rig import same_bits
from tests.random_models import RandomModel, fill, linked_runners, open_arena, open_runner, prefill, write_random_model

Logits = NDArray[np.float32]
SLOTS = NUM_EXPERTS // 3
EXPERTS_PER_TOKEN = SHAPE.top_k * SHAPE.layers
ROUTED_ROWS = len(DECODED) * EXPERTS_PER_TOKEN
GPU = {"kv_type": "f16", "max_logits": 8, "chunk": 64}

pytestmark = pytest.mark.skipif(native.cuda_device_count() < 2, reason="there is one GPU; a pair needs two")  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def shm_dir() -> Iterator[Path]:
    with shm_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return write_random_model(tmp_path_factory.mktemp("model") / "m.gguf", SHAPE, types=TYPES)


@pytest.fixture(scope="module")
def expected(model: RandomModel, shm_dir: Path) -> Logits:
    """Of a host card, every token a window."""
    with open_runner(model, shm_dir, kv_type="f16", max_logits=8) as runner:
        return one_by_one(runner, DECODED)


def always(model: RandomModel, shm_dir: Path) -> AlwaysSwap:
    with open_arena(model, shm_dir) as arena:
        return AlwaysSwap(blob_bytes_table(arena.layout))


# The peer tier


@contextmanager
def with_peer(model: RandomModel, shm_dir: Path, **options: object) -> Iterator[ModelRunner]:
    with open_runner(model, shm_dir, slots=SLOTS, share=(0, 2), peer_slots=SLOTS, card="cuda:0", **GPU, **options) as runner:  # type: ignore[arg-type]
        yield runner


@pytest.mark.parametrize("direct", [True, False])
def test_a_peer_card_computes_its_experts_and_changes_no_bit(model: RandomModel, shm_dir: Path, expected: Logits, direct: bool) -> None:
    with with_peer(model, shm_dir, peer_is_direct=direct) as runner:
        assert same_bits(one_by_one(runner, DECODED), expected)
        assert "peer" not in runner.stats()["rows_by_tier"]
        runner.attach_peer()
        fill(runner)
        before = runner.stats()["rows_by_tier"]
        assert same_bits(one_by_one(runner, DECODED), expected)
        rows = runner.stats()["rows_by_tier"]
        assert rows["peer"] > 0
        others = rows["host"] + rows["streamed"] - before["host"] - before["streamed"]
        assert others < (before["host"] + before["streamed"]) / 1.5, "the peer card takes rows off the host"
        assert sum(rows.values()) == 2 * ROUTED_ROWS


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_windows_of_several_rows_ask_the_peer_too(model: RandomModel, shm_dir: Path, expected: Logits, rows: int) -> None:
    with with_peer(model, shm_dir) as runner:
        runner.attach_peer()
        fill(runner)
        assert same_bits(prefill(runner, DECODED, num_logits=rows, chunk=rows), expected)
        assert runner.stats()["rows_by_tier"]["peer"] > 0


def test_with_everything_on_two_cards_the_host_is_not_asked(model: RandomModel, shm_dir: Path, expected: Logits) -> None:
    half = NUM_EXPERTS // 2
    with open_runner(model, shm_dir, slots=half, share=(0, 2), peer_slots=half, card="cuda:0", **GPU) as runner:  # type: ignore[arg-type]
        runner.attach_peer()
        fill(runner)
        assert same_bits(one_by_one(runner, DECODED), expected)
        rows = runner.stats()["rows_by_tier"]
        assert (rows["own"] > 0, rows["peer"] > 0, rows["host"]) == (True, True, 0)


def test_attaching_and_detaching_in_the_middle_with_swaps_changes_no_bit(model: RandomModel, shm_dir: Path, expected: Logits) -> None:
    with with_peer(model, shm_dir, max_swaps=3, policy=always(model, shm_dir)) as runner:
        parts = []
        for position, token in enumerate(DECODED):
            runner.attach_peer() if position // 6 % 2 == 0 else runner.detach_peer()
            parts.append(one_by_one(runner, [token], position))
        assert same_bits(np.concatenate(parts), expected)
        assert runner.stats()["rows_by_tier"]["peer"] > 0
        assert runner.stats()["swaps"] > 0


def between_steps(runner: ModelRunner, steps: Iterator[None]) -> Logits:
    """Logits of windows of one row each, with a step before each of them; no step is left then."""
    parts = []
    for position, token in enumerate(DECODED):
        next(steps, None)
        parts.append(one_by_one(runner, [token], position))
    assert next(steps, "the end") == "the end"
    return np.concatenate(parts)


def test_windows_between_the_parts_in_which_the_second_card_goes_and_comes_change_no_bit(
    model: RandomModel, shm_dir: Path, expected: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "PART_BYTES", 1 << 20)
    with with_peer(model, shm_dir) as runner:
        runner.attach_peer()
        fill(runner)
        assert same_bits(between_steps(runner, runner.detaching_peer()), expected)
        assert "peer" not in runner.stats()["rows_by_tier"]
        assert same_bits(between_steps(runner, runner.attaching_peer()), expected)
        fill(runner)
        assert same_bits(one_by_one(runner, DECODED), expected)
        assert runner.stats()["rows_by_tier"]["peer"] > 0


PROMPT_CHUNK = 10


@pytest.fixture(scope="module")
def alone(model: RandomModel, shm_dir: Path) -> Logits:
    """The last rows of each chunk of a prompt, of one card that holds everything."""
    with open_runner(model, shm_dir, slots=NUM_EXPERTS, card="cuda:0", **GPU) as runner:  # type: ignore[arg-type]
        return prefill(runner, PROMPT, num_logits=8, chunk=PROMPT_CHUNK)


def whole(runner: ModelRunner) -> Logits:
    return prefill(runner, PROMPT, num_logits=8, chunk=PROMPT_CHUNK)


def brought(runner: ModelRunner) -> tuple[int, int]:
    """Bytes that prompts took from the arena, and from the second card."""
    stats = runner.stats()
    return stats["prompt_bytes_from_arena"], stats["prompt_bytes_from_peer"]


def test_a_prompt_fetches_what_the_second_card_holds_from_there(model: RandomModel, shm_dir: Path, alone: Logits) -> None:
    with with_peer(model, shm_dir) as runner:
        assert brought(runner) == (0, 0), "the warm-up's are nobody's"
        assert same_bits(whole(runner), alone)
        from_arena, from_peer = brought(runner)
        streamed = runner.stats()["rows_by_tier"]["streamed"]
        assert from_peer == 0
        runner.attach_peer()
        fill(runner)
        assert same_bits(whole(runner), alone)
        rest, fetched = brought(runner)
        assert fetched > 0
        assert rest - from_arena + fetched == from_arena, "each expert comes once, from one of them"
        rows = runner.stats()["rows_by_tier"]
        assert rows["fetched"] > 0
        assert rows["streamed"] - streamed + rows["fetched"] == streamed
        assert "peer" not in rows, "the own card computes them"


def test_with_everything_on_two_cards_a_prompt_takes_nothing_from_the_arena(model: RandomModel, shm_dir: Path, alone: Logits) -> None:
    half = NUM_EXPERTS // 2
    with open_runner(model, shm_dir, slots=half, share=(0, 2), peer_slots=half, card="cuda:0", **GPU) as runner:  # type: ignore[arg-type]
        runner.attach_peer()
        fill(runner)
        assert same_bits(whole(runner), alone)
        from_arena, from_peer = brought(runner)
        assert from_arena == 0
        assert from_peer > 0
        assert "streamed" not in runner.stats()["rows_by_tier"]


def test_a_prompt_reads_the_second_cards_slots_themselves(model: RandomModel, shm_dir: Path, alone: Logits) -> None:
    """What is written over them shows in its logits."""
    half = NUM_EXPERTS // 2
    with open_runner(model, shm_dir, slots=half, share=(0, 2), peer_slots=half, card="cuda:0", **GPU) as runner:  # type: ignore[arg-type]
        assert runner.peer is not None
        runner.attach_peer()
        fill(runner)
        table = runner.peer._cache._table
        for slot in range(half):
            nbytes = table.slot(slot).nbytes
            runner.peer._card.write(table.slot(slot), np.zeros(nbytes, dtype=np.uint8))
        assert not same_bits(whole(runner), alone)


def test_cards_that_do_not_reach_each_other_fetch_nothing(model: RandomModel, shm_dir: Path, alone: Logits) -> None:
    with with_peer(model, shm_dir, peer_is_direct=False) as runner:
        runner.attach_peer()
        fill(runner)
        assert same_bits(whole(runner), alone)
        from_arena, from_peer = brought(runner)
        assert from_arena > 0
        assert from_peer == 0
        assert "fetched" not in runner.stats()["rows_by_tier"]


def test_a_prompt_whose_second_card_comes_and_goes_between_chunks_with_swaps(model: RandomModel, shm_dir: Path, alone: Logits) -> None:
    with with_peer(model, shm_dir, max_swaps=3, policy=always(model, shm_dir)) as runner:
        parts, fetched = [], []
        for begin in range(0, len(PROMPT), PROMPT_CHUNK):
            if begin // PROMPT_CHUNK % 2 == 0:
                runner.attach_peer()
                fill(runner)
            else:
                runner.detach_peer()
            before = brought(runner)[1]
            parts.append(prefill(runner, PROMPT[begin : begin + PROMPT_CHUNK], num_logits=8, position=begin))
            fetched.append(brought(runner)[1] > before)
        assert same_bits(np.concatenate(parts), alone)
        assert fetched == [True, False, True, False]
        assert runner.stats()["swaps"] > 0


def test_a_prompt_that_is_interrupted_anywhere_and_run_again_changes_no_bit(model: RandomModel, shm_dir: Path, alone: Logits) -> None:
    with with_peer(model, shm_dir) as runner:
        runner.attach_peer()
        fill(runner)
        for delay_s in (0.0, 0.005, 0.02, 0.05, 0.1):
            timer = threading.Timer(delay_s, runner.interrupt)
            timer.start()
            try:
                whole(runner)
            except WindowInterruptedError:
                runner.detach_peer()  # nothing reads its slots any more
                runner.attach_peer()
                fill(runner)
            timer.join()
            assert min(runner.stats()["rows_by_tier"].values()) >= 0
        with suppress(WindowInterruptedError):  # a late one
            whole(runner)
        assert same_bits(whole(runner), alone)


def test_a_card_may_be_its_own_second_card_in_tests(model: RandomModel, shm_dir: Path, expected: Logits, alone: Logits) -> None:
    with with_peer(model, shm_dir, peer_is_own=True) as runner:
        runner.attach_peer()
        fill(runner)
        assert same_bits(one_by_one(runner, DECODED), expected)
        assert same_bits(whole(runner), alone)
        rows = runner.stats()["rows_by_tier"]
        assert rows["peer"] > 0
        assert rows["fetched"] > 0


# The link


def linked_pair(model: RandomModel, shm_dir: Path, **options: object) -> AbstractContextManager[tuple[ModelRunner, ModelRunner]]:
    return linked_runners(model, shm_dir, ("cuda:0", "cuda:1"), slots=SLOTS, **GPU, **options)


def missed(runner: ModelRunner) -> int:
    rows = runner.stats()["rows_by_tier"]
    return rows.get("host", 0) + rows.get("streamed", 0)


def test_each_computes_the_others_rows_and_no_bit_changes(model: RandomModel, shm_dir: Path, expected: Logits) -> None:
    with open_runner(model, shm_dir, slots=SLOTS, share=(0, 2), card="cuda:0", **GPU) as alone:  # type: ignore[arg-type]
        one_by_one(alone, DECODED)
        unlinked = missed(alone)
    with linked_pair(model, shm_dir) as (lead, helper):
        assert same_bits(one_by_one(lead, DECODED), expected)
        assert same_bits(one_by_one(helper, DECODED), expected)
        for one, other in ((lead, helper), (helper, lead)):
            rows = one.stats()["rows_by_tier"]
            assert rows["linked"] == other.stats()["served_rows"] > 0
            assert sum(rows.values()) == ROUTED_ROWS
        assert missed(lead) < unlinked / 1.5


@pytest.mark.parametrize("rows", [3, 8])
def test_windows_of_several_rows_ask_the_partner_too(model: RandomModel, shm_dir: Path, expected: Logits, rows: int) -> None:
    with linked_pair(model, shm_dir) as (lead, helper):
        assert same_bits(prefill(lead, DECODED, num_logits=rows, chunk=rows), expected)
        assert lead.stats()["rows_by_tier"]["linked"] == helper.stats()["served_rows"] > 0


def test_both_at_once_with_swaps_in_every_window(model: RandomModel, shm_dir: Path, expected: Logits) -> None:
    answers: dict[int, Logits] = {}
    with linked_pair(model, shm_dir, max_swaps=3) as pair:
        threads = [threading.Thread(target=lambda i=i: answers.update({i: one_by_one(pair[i], DECODED)})) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert same_bits(answers[0], expected)
        assert same_bits(answers[1], expected)
        for runner in pair:
            stats = runner.stats()
            assert stats["rows_by_tier"]["linked"] > 0
            assert stats["swaps"] > 0
            assert stats["link_losses"] == 0


def test_nobody_is_asked_while_it_computes_a_prompt(model: RandomModel, shm_dir: Path, expected: Logits) -> None:
    with open_runner(model, shm_dir, slots=NUM_EXPERTS, card="cuda:0", **GPU) as runner:  # type: ignore[arg-type]
        alone = prefill(runner, PROMPT, num_logits=8)
    with linked_pair(model, shm_dir) as (lead, helper):
        assert same_bits(prefill(helper, PROMPT, num_logits=8), alone)
        assert helper.stats()["link_serving"]
        assert same_bits(one_by_one(lead, DECODED[:4]), expected[:4])
        assert lead.stats()["rows_by_tier"]["linked"] > 0


def test_an_interrupted_prompt_leaves_the_link_on(model: RandomModel, shm_dir: Path, expected: Logits) -> None:
    with linked_pair(model, shm_dir) as (lead, helper):
        helper.interrupt()
        with pytest.raises(WindowInterruptedError):
            prefill(helper, PROMPT, num_logits=8)
        assert same_bits(one_by_one(lead, DECODED[:4]), expected[:4])
        assert lead.stats()["rows_by_tier"]["linked"] > 0


def test_turning_the_link_off_and_on_between_windows_changes_no_bit(model: RandomModel, shm_dir: Path, expected: Logits) -> None:
    with linked_pair(model, shm_dir) as (lead, helper):
        parts, linked = [], []
        for position, token in enumerate(DECODED):
            helper.serve_link(position // 6 % 2 == 0)
            parts.append(one_by_one(lead, [token], position))
            linked.append(lead.stats()["rows_by_tier"].get("linked", 0))
        assert same_bits(np.concatenate(parts), expected)
        assert 0 < linked[5] == linked[11] < linked[17] == linked[23]


def test_memory_that_is_given_back_is_withdrawn_and_offered_again(model: RandomModel, shm_dir: Path, expected: Logits) -> None:
    with linked_pair(model, shm_dir) as (lead, helper):
        helper.free_memory(-(-helper.slots_bytes // 2**20))
        assert helper.stats()["resident_experts"] == 0
        assert same_bits(one_by_one(lead, DECODED), expected)
        assert "linked" not in lead.stats()["rows_by_tier"]
        helper.take_memory()
        fill(helper)
        assert same_bits(one_by_one(lead, DECODED), expected)
        assert lead.stats()["rows_by_tier"]["linked"] > 0


def test_lead_with_peer_and_link_goes_through_a_helpers_life(model: RandomModel, shm_dir: Path, expected: Logits) -> None:
    """The order of the desk: peer tier; detached while the helper wakes; linked; the helper sleeps; peer tier again."""
    path = link_path(shm_dir, "0" * 64, "life")
    links = [LinkOptions(path, role, stuck_after_s=20.0) for role in (0, 1)]
    with (
        with_peer(model, shm_dir, link=links[0], max_swaps=2) as lead,
        open_runner(model, shm_dir, slots=SLOTS, share=(1, 2), link=links[1], card="cuda:1", asleep=True, **GPU) as helper,  # type: ignore[arg-type]
    ):
        lead.serve_link(True)
        parts = []
        for round_number in range(2):
            position = 12 * round_number
            lead.attach_peer()
            fill(lead)
            parts.append(one_by_one(lead, DECODED[position : position + 4], position))
            lead.detach_peer()
            helper.take_memory()
            helper.serve_link(True)
            fill(helper)
            parts.append(one_by_one(lead, DECODED[position + 4 : position + 10], position + 4))
            assert same_bits(one_by_one(helper, DECODED[:8]), expected[:8])
            helper.serve_link(False)
            helper.free_memory(-(-helper.slots_bytes // 2**20))
            parts.append(one_by_one(lead, DECODED[position + 10 : position + 12], position + 10))
        assert same_bits(np.concatenate(parts), expected)
        rows = lead.stats()["rows_by_tier"]
        assert rows["peer"] > 0
        assert rows["linked"] > 0
    path.unlink()


PARTNER = """
import sys
from pathlib import Path
file, model, shm_dir, path = map(Path, sys.argv[1:])
from tests.card.native_module import load_native
load_native(file)
from cuda_ext import _native as native
from appliance.engine.link_options import LinkOptions
from tests.card.test_pair import GPU, SHAPE, SLOTS
from tests.random_models import RandomModel, open_runner
with open_runner(RandomModel(model, SHAPE), shm_dir, slots=SLOTS, share=(1, 2), link=LinkOptions(path, 1), card="cuda:1", **GPU) as runner:
    runner.serve_link(True)
    print("serving", flush=True)
    for line in sys.stdin:
        if line == "other card?\\n":
            assert not native.cuda_has_context(0)
        else:
            native.emulated_hang(line == "hang\\n")
        print("ok", flush=True)
"""


@contextmanager
def partner_process(model: RandomModel, shm_dir: Path, path: Path) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", PARTNER, str(native.__file__), str(model.path), str(shm_dir), str(path)]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            while (text := process.stdout.readline()) and text != "serving\n":
                pass
            assert text, "the partner did not start"
            yield process
        finally:
            process.kill()


def test_a_partner_that_is_killed_in_mid_window_costs_that_window_only(model: RandomModel, shm_dir: Path, expected: Logits) -> None:
    path = link_path(shm_dir, "0" * 64, "killed")
    link = LinkOptions(path, 0, stuck_after_s=60.0)
    with open_runner(model, shm_dir, slots=SLOTS, share=(0, 2), link=link, card="cuda:0", **GPU) as lead:  # type: ignore[arg-type]
        with partner_process(model, shm_dir, path) as partner:
            assert same_bits(one_by_one(lead, DECODED), expected)
            assert lead.stats()["rows_by_tier"]["linked"] > 0
            losses = 0
            if native.cuda_build == "emulated":  # type: ignore[attr-defined]
                os.kill(partner.pid, signal.SIGSTOP)  # an emulated card stops with its process, so the next window surely waits
                losses = 1
            killer = threading.Timer(0.3, partner.kill)
            killer.start()
            while killer.is_alive():
                assert same_bits(one_by_one(lead, DECODED), expected)
            partner.wait()
            assert same_bits(one_by_one(lead, DECODED), expected)
            assert lead.stats()["link_losses"] >= losses
        with partner_process(model, shm_dir, path):  # a new one takes its place
            before = lead.stats()["rows_by_tier"]["linked"]
            assert same_bits(one_by_one(lead, DECODED), expected)
            assert lead.stats()["rows_by_tier"]["linked"] > before
    path.unlink()


def test_an_engine_has_no_memory_on_the_card_of_the_other(model: RandomModel, shm_dir: Path, expected: Logits) -> None:
    path = link_path(shm_dir, "0" * 64, "contexts")
    with (
        open_runner(model, shm_dir, slots=SLOTS, share=(0, 2), link=LinkOptions(path, 0), card="cuda:0", **GPU) as lead,  # type: ignore[arg-type]
        partner_process(model, shm_dir, path) as partner,
    ):
        assert same_bits(one_by_one(lead, DECODED), expected)
        assert lead.stats()["rows_by_tier"]["linked"] > 0
        tell(partner, "other card?")
    path.unlink()


def asked_again(lead: ModelRunner, expected: Logits) -> bool:
    """Whether the partner is, within some windows."""
    before = lead.stats()["rows_by_tier"].get("linked", 0)
    for _ in range(100):
        assert same_bits(one_by_one(lead, DECODED), expected)
        if lead.stats()["rows_by_tier"].get("linked", 0) > before:
            return True
    return False


def test_a_partner_that_hangs_is_given_up_and_taken_up_again(model: RandomModel, shm_dir: Path, expected: Logits) -> None:
    path = link_path(shm_dir, "0" * 64, "hangs")
    link = LinkOptions(path, 0, stuck_after_s=0.5)
    with (
        open_runner(model, shm_dir, slots=SLOTS, share=(0, 2), link=link, card="cuda:0", **GPU) as lead,  # type: ignore[arg-type]
        partner_process(model, shm_dir, path) as partner,
    ):
        os.kill(partner.pid, signal.SIGSTOP)
        assert same_bits(one_by_one(lead, DECODED), expected)
        os.kill(partner.pid, signal.SIGCONT)
        assert asked_again(lead, expected), "the partner goes on"
    path.unlink()


@pytest.mark.skipif(native.cuda_build != "emulated", reason="a GPU does not hang on demand")  # type: ignore[attr-defined]
def test_a_partner_whose_card_hangs_while_its_process_lives_is_given_up_as_soon(
    model: RandomModel, shm_dir: Path, expected: Logits
) -> None:
    path = link_path(shm_dir, "0" * 64, "card")
    link = LinkOptions(path, 0, stuck_after_s=0.5)
    with (
        open_runner(model, shm_dir, slots=SLOTS, share=(0, 2), link=link, card="cuda:0", **GPU) as lead,  # type: ignore[arg-type]
        partner_process(model, shm_dir, path) as partner,
    ):
        assert same_bits(one_by_one(lead, DECODED[:2]), expected[:2])
        tell(partner, "hang")
        began = time.monotonic()
        assert same_bits(one_by_one(lead, DECODED[2:3], 2), expected[2:3])
        assert lead.stats()["link_losses"] == 1
        assert time.monotonic() - began < 15, "the watchdog would have taken 20 seconds"
        tell(partner, "go on")
        assert asked_again(lead, expected), "the card goes on"
    path.unlink()


def tell(partner: subprocess.Popen[str], word: str) -> None:
    assert partner.stdin is not None
    assert partner.stdout is not None
    partner.stdin.write(word + "\n")
    partner.stdin.flush()
    while (text := partner.stdout.readline()) != "ok\n":
        assert text
