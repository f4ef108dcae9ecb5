"""The desk with real engine processes, which speak the whole protocol around a tiny model."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from appliance.desk.config import Limits
from appliance.desk.desk import Desk
from appliance.desk.lane_state import LaneState
from appliance.desk.status import Phase
from appliance.errors import ContextLengthError, NotReadyError, QueueFullError, RequestError
from appliance.protocol import Finished, FinishReason, PromptProgress, Queued, Started, Tokens
from tests.desk_rig import ask, config, desk_of, finish, lane, next_event, nothing_left_behind, wait_for
from tests.eventually import eventually
from tests.fakes_engine import FakeModel, greedy_answer

SLOW = ("--window-ms", "20")
SLOW_PROMPT = ("--chunk-ms", "200", "--max-rows", "4")
LONG = 4000


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    with nothing_left_behind():
        yield


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


class TestAnswers:
    def test_answer_is_that_of_the_model(self) -> None:
        with desk_of(config((), ())) as desk:
            events = wait_for(desk.submit(ask("a", [7, 8, 9], max_tokens=12)), Finished)
        tokens = [token for event in events if isinstance(event, Tokens) for token in event.ids]
        assert tokens == greedy_answer(FakeModel(), [7, 8, 9], 12)
        assert [type(event) for event in events][:3] == [Started, PromptProgress, Tokens]

    def test_started_names_the_lane(self) -> None:
        with desk_of(config((), ())) as desk:
            started = next_event(desk.submit(ask("a")))
        assert isinstance(started, Started)
        assert started.lane == "lead"

    def test_one_lane_alone_serves_too(self) -> None:
        with desk_of(config(())) as desk:
            assert finish(desk.submit(ask("a"))).reason is FinishReason.LENGTH

    def test_two_requests_run_at_once_and_the_third_is_told_its_place(self) -> None:
        with desk_of(config(SLOW, SLOW)) as desk:
            first, second = (desk.submit(ask(name, max_tokens=LONG)) for name in "ab")
            wait_for(first, Tokens), wait_for(second, Tokens)
            third, fourth = desk.submit(ask("c")), desk.submit(ask("d"))
            assert next_event(third) == Queued(id="c", place=1)
            assert next_event(fourth) == Queued(id="d", place=2)
            assert desk.status().queue_length == 2
            first.cancel()
            assert isinstance(next_event(third), Started)
            assert next_event(fourth) == Queued(id="d", place=1)
            assert finish(fourth).reason is FinishReason.LENGTH

    def test_prompt_goes_to_the_lane_that_holds_its_conversation(self) -> None:
        with desk_of(config(SLOW, SLOW)) as desk:
            on_lead = desk.submit(ask("a", [1, 2, 3, 4], max_tokens=20))
            on_helper = desk.submit(ask("b", [5, 6, 7, 8], max_tokens=20))
            finish(on_lead), finish(on_helper)
            started = next_event(desk.submit(ask("c", [5, 6, 7, 8, *greedy_answer(FakeModel(), [5, 6, 7, 8], 20), 9])))
        assert isinstance(started, Started)
        assert started.lane == "helper"
        assert started.cached_tokens >= 23

    def test_engine_refusing_a_request_goes_on(self) -> None:
        with desk_of(config(("--reject-at", "5"))) as desk:
            refused = finish(desk.submit(ask("a", list(range(1, 10)))))
            assert (refused.reason, refused.error_code) == (FinishReason.ERROR, "invalid_request")
            assert finish(desk.submit(ask("b", [1, 2], max_tokens=1))).reason is FinishReason.LENGTH
            assert lane(desk, "lead").restarts == 0


class TestDoor:
    def test_line_full_is_refused_and_counted(self) -> None:
        with desk_of(config(SLOW, max_queue=1)) as desk:
            desk.submit(ask("a", max_tokens=LONG))
            desk.submit(ask("b"))
            with pytest.raises(QueueFullError, match="max_queue is 1"):
                desk.submit(ask("c"))
            assert desk.status().counters.rejected == 1

    def test_without_a_line_an_idle_lane_is_enough(self) -> None:
        with desk_of(config(SLOW, max_queue=0)) as desk:
            desk.submit(ask("a", max_tokens=LONG))
            with pytest.raises(QueueFullError):
                desk.submit(ask("b"))

    def test_id_in_use_is_refused(self) -> None:
        with desk_of(config(SLOW)) as desk:
            desk.submit(ask("a", max_tokens=LONG))
            with pytest.raises(RequestError, match="id a is in use"):
                desk.submit(ask("a"))

    def test_prompt_over_the_context_is_refused(self) -> None:
        with desk_of(config(("--context", "16"))) as desk, pytest.raises(ContextLengthError, match="17 tokens and the context holds 16"):
            desk.submit(ask("a", [1] * 17))

    def test_loading_desk_refuses_with_the_time_left(self) -> None:
        desk = Desk(config(("--load-s", "30"))).start()
        try:
            eventually(lambda: (load := desk.status().load) is not None and load.stage == "dense", "the engine loads", desk.status)
            with pytest.raises(NotReadyError, match="lead starting") as caught:
                desk.submit(ask("a"))
            assert caught.value.retry_after_s > 20
        finally:
            desk.stop(0)

    def test_desk_that_was_never_started_or_has_ended_refuses(self) -> None:
        desk = Desk(config(()))
        desk.stop(0)
        with pytest.raises(NotReadyError):
            desk.submit(ask("a"))
        with desk_of(config(())) as desk:
            pass
        with pytest.raises(NotReadyError):
            desk.submit(ask("a"))


class TestCancel:
    @pytest.mark.parametrize("phase", ["prompt", "decode"])
    def test_running_request_ends_and_frees_its_lane_within_a_second(self, phase: str) -> None:
        with desk_of(config((*SLOW, *SLOW_PROMPT))) as desk:
            ticket = desk.submit(ask("a", [1] * 200, max_tokens=LONG) if phase == "prompt" else ask("a", max_tokens=LONG))
            wait_for(ticket, PromptProgress if phase == "prompt" else Tokens)
            began = time.monotonic()
            ticket.cancel()
            assert finish(ticket).reason is FinishReason.CANCELLED
            assert time.monotonic() - began < 1
            assert lane(desk, "lead").state is LaneState.IDLE
            assert lane(desk, "lead").restarts == 0

    def test_waiting_request_disturbs_nobody(self) -> None:
        with desk_of(config(SLOW)) as desk:
            running, waiting, behind = (desk.submit(ask(name, max_tokens=40)) for name in "abc")
            assert next_event(waiting) == Queued(id="b", place=1)
            assert next_event(behind) == Queued(id="c", place=2)
            waiting.cancel()
            assert finish(waiting).reason is FinishReason.CANCELLED
            assert next_event(behind) == Queued(id="c", place=1)
            assert finish(running).reason is FinishReason.LENGTH
            assert finish(behind).reason is FinishReason.LENGTH

    def test_again_and_after_the_end_does_nothing(self) -> None:
        with desk_of(config(SLOW)) as desk:
            ticket = desk.submit(ask("a", max_tokens=LONG))
            threads = [threading.Thread(target=ticket.cancel) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            finish(ticket)
            ticket.cancel()
            assert ticket.next_event(0.2) is None
            assert desk.status().counters.cancelled == 1

    def test_engine_that_does_not_obey_is_killed_and_replaced(self) -> None:
        with desk_of(config(SLOW)) as desk:
            ticket = desk.submit(ask("a", max_tokens=LONG))
            wait_for(ticket, Tokens)
            pid = lane(desk, "lead").pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            ticket.cancel()
            assert finish(ticket).reason is FinishReason.CANCELLED
            eventually(lambda: lane(desk, "lead").state is LaneState.IDLE, "a new engine", desk.status)
            assert lane(desk, "lead").pid != pid
            assert lane(desk, "lead").restarts == 1

    def test_reader_that_fails_cancels(self) -> None:
        with desk_of(config(SLOW)) as desk:
            ticket = desk.submit(ask("a", max_tokens=LONG))
            with pytest.raises(ZeroDivisionError), ticket:
                _ = 1 / 0
            assert finish(ticket).reason is FinishReason.CANCELLED


class TestDeath:
    def test_killed_engine_ends_its_request_and_the_other_lane_does_not_notice(self) -> None:
        with desk_of(config(SLOW, SLOW)) as desk:
            doomed, lucky = desk.submit(ask("a", max_tokens=LONG)), desk.submit(ask("b", [4, 5], max_tokens=60))
            wait_for(doomed, Tokens), wait_for(lucky, Tokens)
            kill(lane(desk, "lead").pid)
            ended = finish(doomed)
            assert (ended.reason, ended.error_code) == (FinishReason.ERROR, "engine_died")
            assert "SIGKILL" in (ended.error_text or "")
            assert ended.timings.generated_tokens > 0
            assert finish(lucky).reason is FinishReason.LENGTH
            eventually(lambda: lane(desk, "lead").state is LaneState.IDLE, "the lead is back", desk.status)
            assert (lane(desk, "lead").restarts, lane(desk, "helper").restarts) == (1, 0)
            assert finish(desk.submit(ask("c"))).reason is FinishReason.LENGTH

    def test_both_killed_and_those_who_wait_are_served_later(self) -> None:
        with desk_of(config(SLOW, SLOW)) as desk:
            doomed = [desk.submit(ask(name, max_tokens=LONG)) for name in "ab"]
            for ticket in doomed:
                wait_for(ticket, Tokens)
            waiting = desk.submit(ask("c"))
            for name in ("lead", "helper"):
                kill(lane(desk, name).pid)
            assert [finish(ticket).error_code for ticket in doomed] == ["engine_died", "engine_died"]
            assert finish(waiting).reason is FinishReason.LENGTH

    def test_killed_while_it_starts_is_started_again(self) -> None:
        desk = Desk(config(("--load-s", "0.3"))).start()
        try:
            eventually(lambda: lane(desk, "lead").pid is not None, "an engine", desk.status)
            kill(lane(desk, "lead").pid)
            eventually(lambda: desk.status().phase is Phase.READY, "ready", desk.status)
            assert lane(desk, "lead").restarts == 1
        finally:
            desk.stop(0)

    def test_crash_loop_ends_with_the_last_words_and_ends_those_who_wait(self) -> None:
        with desk_of(config(("--die-at", "4", "--chunk-ms", "50"))) as desk:
            names = [f"r{number}" for number in range(6)]
            tickets = [desk.submit(ask(name)) for name in names]
            assert {finish(ticket).error_code for ticket in tickets} == {"engine_died"}
            eventually(lambda: desk.status().phase is Phase.FAILED, "failed", desk.status)
            assert "5 in a row" in (desk.status().reason or "")
            with pytest.raises(NotReadyError, match="no lane works"):
                desk.submit(ask("late"))

    def test_engine_that_fails_on_a_request_says_why_and_is_replaced(self) -> None:
        with desk_of(config(("--fail-at", "5"))) as desk:
            ended = finish(desk.submit(ask("a", max_tokens=10)))
            assert (ended.error_code, ended.error_text) == ("engine_error", "the fake card failed")
            eventually(lambda: lane(desk, "lead").restarts == 1, "a restart", desk.status)
            eventually(lambda: lane(desk, "lead").state is LaneState.IDLE, "ready again", desk.status)

    def test_silent_engine_is_killed(self) -> None:
        limits = Limits(answer_s=0.5, stats_period_s=0.1, restart_delays_s=(0.0,))
        with desk_of(config(("--hang-at", "5"), limits=limits)) as desk:
            ended = finish(desk.submit(ask("a", max_tokens=10)))
            assert (ended.reason, ended.error_code) == (FinishReason.ERROR, "engine_timeout")
            assert "did not answer within 0.5 s" in (ended.error_text or "")

    def test_overdue_request_ends_with_a_timeout(self) -> None:
        limits = Limits(overdue_s=0.2, restart_delays_s=(0.0,))
        with desk_of(config(("--hang-at", "5"), limits=limits)) as desk:
            assert finish(desk.submit(ask("a", max_tokens=10, deadline_s=0.2))).error_code == "engine_timeout"


class TestStart:
    def test_loader_that_fails_fails_the_desk_with_its_sentence(self) -> None:
        fatal = """import sys; print('FATAL {"code":"corrupt_model","text":"m.gguf is truncated"}'); sys.exit(1)"""
        with desk_of(config((), loader=(sys.executable, "-c", fatal)), until=Phase.FAILED) as desk:
            assert desk.status().reason == "the loader ended with exit code 1: m.gguf is truncated"

    def test_what_a_loader_complains_of_is_an_error_in_the_log_once(self) -> None:
        text = "m.gguf is truncated"
        said = (
            f"""print('{{"level":"error","event":"{text}"}}', file=sys.stderr); print('FATAL {{"code":"corrupt_model","text":"{text}"}}')"""
        )
        loader = (sys.executable, "-c", f"import sys; {said}; sys.exit(1)")
        with capture_logs() as logs, desk_of(config((), (), loader=loader), until=Phase.FAILED):
            pass
        assert [log["log_level"] for log in logs if text in str(log)] == ["error"]
        assert {log["log_level"] for log in logs if text not in str(log)} == {"info"}

    def test_loader_that_dies_without_an_error_of_its_own_is_one_of_its_lanes(self) -> None:
        with capture_logs() as logs, desk_of(config((), (), loader=(sys.executable, "-c", "boom")), until=Phase.FAILED):
            pass
        assert [log["log_level"] for log in logs if "boom" in str(log.get("reason"))] == ["error"] * 2

    def test_loader_that_cannot_be_started_fails_the_desk(self) -> None:
        with desk_of(config((), loader=("/no/such/program",)), until=Phase.FAILED) as desk:
            assert "the loader could not be started: /no/such/program" in (desk.status().reason or "")

    def test_engines_that_refuse_to_start_are_not_tried_again(self) -> None:
        with desk_of(config(("--load-error", "3 GiB do not fit"), ("--load-error", "nor do 4")), until=Phase.FAILED) as desk:
            assert desk.status().reason == "engine lead (host:0) ended with exit code 1: 3 GiB do not fit"
            assert [status.restarts for status in desk.status().lanes] == [0, 0]

    def test_one_lane_that_fails_leaves_the_other_in_service(self) -> None:
        desk = Desk(config(("--load-error", "no memory"), ())).start()
        try:
            eventually(lambda: desk.status().phase is Phase.READY, "ready", desk.status)
            eventually(lambda: lane(desk, "lead").state is LaneState.FAILED, "the lead failed", desk.status)
            started = next_event(desk.submit(ask("a")))
            assert isinstance(started, Started)
            assert started.lane == "helper"
            assert "no memory" in (lane(desk, "lead").reason or "")
        finally:
            desk.stop(0)

    def test_progress_of_loader_and_engines_is_shown(self) -> None:
        loader = (
            """import time; print('LOAD {"stage":"arena","done_bytes":1,"total_bytes":4,"bytes_per_s":2.0}', flush=True); time.sleep(0.3)"""
        )
        desk = Desk(config(("--load-s", "0.3"), loader=(sys.executable, "-c", loader))).start()
        try:
            eventually(lambda: (load := desk.status().load) is not None and load.stage == "arena", "the arena", desk.status)
            eventually(lambda: (load := desk.status().load) is not None and load.stage == "dense", "the engine", desk.status)
            eventually(lambda: desk.status().phase is Phase.READY, "ready", desk.status)
            assert desk.status().load is None
        finally:
            desk.stop(0)


class TestStop:
    def test_running_request_may_end_and_waiting_ones_are_sent_away(self) -> None:
        with desk_of(config(SLOW)) as desk:
            running, waiting = desk.submit(ask("a", max_tokens=25)), desk.submit(ask("b"))
            stopping = threading.Thread(target=desk.stop, args=(30.0,))
            stopping.start()
            sent_away = finish(waiting)
            assert (sent_away.reason, sent_away.error_code) == (FinishReason.ERROR, "not_ready")
            with pytest.raises(NotReadyError, match="shutting down"):
                desk.submit(ask("c"))
            assert desk.status().phase is Phase.DRAINING
            assert finish(running).reason is FinishReason.LENGTH
            stopping.join(10)
            assert not stopping.is_alive()
            assert {status.state for status in desk.status().lanes} == {LaneState.STOPPED}

    def test_request_that_takes_too_long_is_ended(self) -> None:
        with desk_of(config(SLOW)) as desk:
            running = desk.submit(ask("a", max_tokens=LONG))
            wait_for(running, Tokens)
            desk.stop(0.2)
            assert finish(running).error_code == "not_ready"
            assert running.next_event(0) is None

    def test_engine_that_ignores_the_end_of_file_is_killed(self) -> None:
        with desk_of(config(("--ignore-end",))) as desk:
            began = time.monotonic()
            desk.stop(0)
            assert time.monotonic() - began < 5

    @pytest.mark.parametrize("loader_s", [0, 30])
    def test_stop_while_loading_ends_everything(self, loader_s: int) -> None:
        loader = (sys.executable, "-c", f"import time; time.sleep({loader_s})")
        desk = Desk(config(("--load-s", "30"), ("--load-s", "30"), loader=loader)).start()
        if loader_s == 0:
            eventually(lambda: lane(desk, "helper").pid is not None, "engines start", desk.status)
        began = time.monotonic()
        desk.stop(30)
        assert time.monotonic() - began < 5

    def test_desk_that_is_broken_ends_every_request(self) -> None:
        with desk_of(config(SLOW)) as desk:
            running, waiting = desk.submit(ask("a", max_tokens=LONG)), desk.submit(ask("b"))
            desk._post("nonsense")  # type: ignore[arg-type]
            assert [finish(ticket).reason for ticket in (running, waiting)] == [FinishReason.ERROR] * 2
            eventually(lambda: desk.status().phase is Phase.FAILED, "failed", desk.status)


class TestStatus:
    def test_it_tells_what_a_lane_does_and_what_it_holds(self) -> None:
        with desk_of(config(SLOW)) as desk:
            ticket = desk.submit(ask("a", [1, 2, 3], max_tokens=30))
            wait_for(ticket, Tokens)
            eventually(lambda: (r := lane(desk, "lead").request) is not None and r.tokens_per_s > 0, "a speed", desk.status)
            request = lane(desk, "lead").request
            assert request is not None
            assert (request.prompt_tokens, request.prompt_done) == (3, 3)
            assert 5 < request.tokens_per_s < 60
            eventually(lambda: (s := lane(desk, "lead").stats) is not None and s.busy, "stats while busy", desk.status)
            finish(ticket)
            assert lane(desk, "lead").context_used == 33
            eventually(lambda: (s := lane(desk, "lead").stats) is not None and s.generated_tokens == 30, "stats after", desk.status)
            assert desk.status().counters.generated_tokens == 30
            assert desk.status().context == 4096

    def test_idle_engine_is_left_alone(self) -> None:
        with desk_of(config(())) as desk:
            finish(desk.submit(ask("a")))
            eventually(lambda: (s := lane(desk, "lead").stats) is not None and s.generated_tokens == 4, "last stats", desk.status)
            assert desk._state.next_timer_s is None

    def test_json_is_plain(self) -> None:
        import json

        with desk_of(config((), ())) as desk:
            finish(desk.submit(ask("a")))
            eventually(lambda: lane(desk, "lead").stats is not None, "stats", desk.status)
            shown = json.loads(json.dumps(desk.status().to_json()))
        assert shown["phase"] == "ready"
        assert shown["lanes"][0]["stats"]["slots"] == 8
        assert 0 <= shown["lanes"][0]["stats_age_s"] < 60
        assert "stats_at" not in shown["lanes"][0]
        assert shown["lanes"][1]["card"] == "host:1"
