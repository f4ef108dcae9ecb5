"""The real engine process on a real (random, small) model: loader, arena, native code, lines."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from appliance.protocol import Fatal, Finished, FinishReason, PromptProgress, Ready, Started, Stats, Tokens, Word
from appliance.settings import load_settings
from tests.engine_rig import ROOT, EngineProcess
from tests.gguf_writing import ModelShape
from tests.random_models import RandomModel, greedy, open_runner, write_random_model

PROMPT = [7, 3, 19, 4, 30, 11, 2, 8, 25, 13]
SHAPE = ModelShape(layers=3, experts=8, vocab=320, context=2048)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return write_random_model(tmp_path_factory.mktemp("model") / "m.gguf", SHAPE, types={"ffn_down_exps": "Q8_0"})


@pytest.fixture(scope="module")
def shm_dir(model: RandomModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the arena, filled by the loader's process."""
    folder = tmp_path_factory.mktemp("shm")
    argv = [sys.executable, "-m", "appliance.memory.loader", "--model", str(model.path), "--shm-dir", str(folder)]
    subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120)
    return folder


Start = Callable[..., EngineProcess]


@pytest.fixture
def start(model: RandomModel, shm_dir: Path, tmp_path: Path) -> Iterator[Start]:
    engines: list[EngineProcess] = []

    def start_one(
        card: str = "host:0", lane: str = "lead", threads: int = 1, share: str = "0/1", more: Sequence[str] = (), **options: object
    ) -> EngineProcess:
        given = {
            "model": model.path,
            "shm_dir": shm_dir,
            "state_dir": tmp_path,
            "cards": "host:0,host:1",
            "chunk": 8,
            "slots": 6,
            **options,
        }
        argv = [sys.executable, "-m", "appliance.engine.process", "--settings", load_settings(given, environment={}).model_dump_json()]
        engines.append(EngineProcess([*argv, "--card", card, "--lane", lane, "--threads", str(threads), "--share", share, *more]))
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.clean_up()


def test_the_process_answers_what_the_runner_computes(model: RandomModel, shm_dir: Path, start: Start) -> None:
    with open_runner(model, shm_dir, slots=24, chunk=32, kv_type="f16") as runner:
        expected = greedy(runner, PROMPT, 20)
    lead, helper = start(), start("host:1", "helper", threads=2, share="1/2", slots=0)
    ready = Ready.model_validate_json(lead.wait_for(Word.READY))
    assert (ready.pid, ready.card, ready.context, ready.slots) == (lead.pid, "host:0", 2048, 6)
    for engine in (lead, helper):
        engine.generate(PROMPT, 20)
        assert engine.answer() == expected


def test_a_second_turn_gives_what_a_fresh_engine_gives(model: RandomModel, shm_dir: Path, start: Start) -> None:
    engine = start()
    engine.generate(PROMPT, 12)
    turn = [*PROMPT, *engine.answer(), 5, 6, 7]
    with open_runner(model, shm_dir, kv_type="f16") as runner:
        expected = greedy(runner, turn, 12)
    engine.generate(turn, 12, "b")
    started = engine.wait_until(lambda event: isinstance(event, Started))
    assert isinstance(started, Started)
    assert started.cached_tokens == len(PROMPT) + 11
    assert engine.answer() == expected


def test_stats_count_every_routed_row_in_one_tier(start: Start) -> None:
    engine = start(max_swaps=0)
    engine.generate(PROMPT, 5)
    engine.answer()
    engine.send("STATS\n")
    stats = Stats.model_validate_json(engine.wait_for(Word.CTL).removeprefix("STATS "))
    computed = len(PROMPT) + 4
    assert sum(stats.rows_by_tier.values()) == computed * SHAPE.layers * SHAPE.top_k
    assert stats.rows_by_tier["own"] > 0
    assert stats.rows_by_tier["host"] > 0
    assert (stats.windows, stats.prompt_tokens, stats.generated_tokens, stats.context_used) == (6, 10, 5, 14)


@pytest.mark.parametrize("phase", [PromptProgress, Tokens])
def test_a_cancel_in_each_phase_frees_the_engine_in_under_a_second(start: Start, phase: type) -> None:
    engine = start()
    engine.generate(PROMPT * 190, 100_000)
    engine.wait_until(lambda event: isinstance(event, phase))
    cancelled_at = time.monotonic()
    engine.send("CANCEL a\n")
    finished = engine.wait_until(lambda event: isinstance(event, Finished))
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.CANCELLED
    assert time.monotonic() - cancelled_at < 1


def test_threads_of_the_pool_sit_out(start: Start) -> None:
    engine = start(threads=3)
    engine.wait_for(Word.READY)
    engine.send("POOL_HOLD 2\nPOOL_HOLD 9\nPOOL_HOLD 0\n")
    assert [engine.wait_for(Word.CTL) for _ in range(3)] == ["HOLD 2", "HOLD 2", "HOLD 0"]


def stats_with_the_second_card(engine: EngineProcess) -> Stats:
    """Takes the second card, answers a request and asks for the counters."""
    engine.send("PEER_ATTACH\n")
    assert engine.wait_for(Word.CTL) == "PEER ON"
    engine.generate(PROMPT, 20)
    engine.answer()
    engine.send("STATS\n")
    return Stats.model_validate_json(engine.wait_for(Word.CTL).removeprefix("STATS "))


@pytest.mark.parametrize(("more", "expected"), [(("--peer-slots", "3"), 3), ((), 6)])
def test_the_second_card_has_slots_of_its_own_number(start: Start, more: tuple[str, ...], expected: int) -> None:
    engine = start(share="0/2", more=("--peer-device", "host:1", *more))
    stats = stats_with_the_second_card(engine)
    assert (stats.slots, stats.peer_experts, stats.is_filling) == (6, expected, False)


def test_a_card_may_be_its_own_second_card_in_tests(start: Start) -> None:
    engine = start(share="0/2", more=("--peer-device", "host:0", "--allow-self-peer", "--peer-slots", "4", "--peer-hot", "0.25"))
    stats = stats_with_the_second_card(engine)
    assert (stats.slots, stats.peer_experts) == (6, 4)


def test_a_killed_engine_is_replaced_from_the_same_arena(start: Start) -> None:
    first = start()
    first.generate(PROMPT, 1000)
    first.wait_until(lambda event: isinstance(event, Tokens))
    first.signal(signal.SIGKILL)
    assert first.exit_code() == -signal.SIGKILL
    second = start()
    second.generate(PROMPT, 3)
    assert len(second.answer()) == 3


def test_without_an_arena_the_start_fails_in_a_sentence(start: Start, tmp_path: Path) -> None:
    engine = start(shm_dir=tmp_path)
    fatal = Fatal.model_validate_json(engine.wait_for(Word.FATAL))
    assert fatal.code == "engine_error"
    assert engine.exit_code() == 1


def test_a_card_that_is_not_there_fails_in_a_sentence(start: Start) -> None:
    engine = start("cuda:7")
    assert "cuda:7" in Fatal.model_validate_json(engine.wait_for(Word.FATAL)).text
    assert engine.exit_code() == 1


def test_a_missing_model_fails_in_a_sentence(start: Start, tmp_path: Path) -> None:
    engine = start(model=tmp_path / "none.gguf")
    assert "none.gguf" in Fatal.model_validate_json(engine.wait_for(Word.FATAL)).text
    assert engine.exit_code() == 1
