"""The engine loop over a fake model: one thread, commands put in at exact moments, events read from a file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engine.commands import (
    AttachPeer,
    Cancel,
    Command,
    DetachPeer,
    EndOfInput,
    FreeMemory,
    HoldThreads,
    ReportStats,
    ServeLink,
    parse_command,
)
from appliance.engine.generation import Runner, RunnerStats
from appliance.engine.logits import LogitsRow
from appliance.engine.loop import EngineLoop
from appliance.engine.pipes import Inbox, LineWriter
from appliance.errors import EngineError
from appliance.protocol import (
    EVENT,
    Event,
    Finished,
    FinishReason,
    Generate,
    PromptProgress,
    Sampling,
    Started,
    Stats,
    Tokens,
)
from cuda_ext import _native as native
from tests.fakes_engine import FakeModel, FakeRunner, greedy_answer

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


class Script(Inbox):
    """An inbox that holds the next of its commands whenever the loop has nothing to do, and the end after the last."""

    def __init__(self, commands: Sequence[Command]) -> None:
        super().__init__()
        self._script = iter(commands)

    def wait(self, timeout_s: float | None = None) -> Command:
        self.put(next(self._script, EndOfInput()))
        return super().wait() if timeout_s is None else super().wait(timeout_s)  # type: ignore[return-value]


class Served:
    """What an engine loop wrote while it obeyed a script.

    The commands of `during` come in while the run at their position is being computed, those of `at_boundary` at the boundary of
    their number.
    """

    def __init__(
        self,
        folder: Path,
        runner: Runner,
        *script: Command,
        during: Mapping[int, Sequence[Command]] | None = None,
        at_boundary: Mapping[int, Sequence[Command]] | None = None,
    ) -> None:
        self.runner = runner
        self.error: Exception | None = None
        inbox = Script(script)
        if isinstance(runner, FakeRunner):
            coming, between = dict(during or {}), dict(at_boundary or {})
            runner.on_run = lambda position: put_all(inbox, coming.pop(position, ()))
            runner.on_boundary = lambda number: put_all(inbox, between.pop(number, ()))
        output = folder / "output"
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            EngineLoop(runner, inbox, LineWriter(descriptor)).run()
        except EngineError as error:
            self.error = error
        finally:
            os.close(descriptor)
        self.lines = output.read_text().splitlines()

    def events(self, request_id: str = "a") -> list[Event]:
        events = [EVENT.validate_json(text.removeprefix("EV ")) for text in self.lines if text.startswith("EV ")]
        return [event for event in events if event.id == request_id]

    def answer(self, request_id: str = "a") -> list[int]:
        return [token for event in self.events(request_id) if isinstance(event, Tokens) for token in event.ids]

    def started(self, request_id: str = "a") -> Started:
        first = self.events(request_id)[0]
        assert isinstance(first, Started)
        return first

    def finished(self, request_id: str = "a") -> Finished:
        """The terminal event, which must be the only one and the last."""
        events = self.events(request_id)
        ends = [event for event in events if isinstance(event, Finished)]
        assert len(ends) == 1
        assert events[-1] is ends[0]
        return ends[0]

    def controls(self) -> list[str]:
        return [text.removeprefix("CTL ") for text in self.lines if text.startswith("CTL ")]


def put_all(inbox: Inbox, commands: Sequence[Command]) -> None:
    for command in commands:
        inbox.put(command)


def generate(prompt: Sequence[int] = PROMPT, max_tokens: int = 5, request_id: str = "a", **fields: object) -> Generate:
    return Generate.model_validate({"id": request_id, "prompt": list(prompt), "max_tokens": max_tokens, **fields})


class TestAnswers:
    def test_the_answer_is_that_of_the_model(self, tmp_path: Path) -> None:
        model = FakeModel(max_rows=4)
        served = Served(tmp_path, FakeRunner(model), generate(max_tokens=6))
        assert served.answer() == greedy_answer(model, PROMPT, 6)
        finished = served.finished()
        assert finished.reason is FinishReason.LENGTH
        assert (finished.timings.prompt_tokens, finished.timings.cached_tokens, finished.timings.generated_tokens) == (10, 0, 6)

    def test_a_prompt_is_computed_in_chunks_that_are_reported(self, tmp_path: Path) -> None:
        runner = FakeRunner(FakeModel(max_rows=4))
        served = Served(tmp_path, runner, generate(max_tokens=1))
        assert [(len(run.tokens), run.position, run.num_logits) for run in runner.runs] == [(4, 0, 0), (4, 4, 0), (2, 8, 1)]
        assert [event.done for event in served.events() if isinstance(event, PromptProgress)] == [4, 8, 10]

    def test_tokens_come_one_per_window(self, tmp_path: Path) -> None:
        runner = FakeRunner(FakeModel())
        served = Served(tmp_path, runner, generate(max_tokens=4))
        assert [len(event.ids) for event in served.events() if isinstance(event, Tokens)] == [1, 1, 1, 1]
        assert [run.position for run in runner.runs] == [0, 10, 11, 12]
        assert runner.num_boundaries == 4

    def test_max_tokens_zero_computes_the_prompt_and_answers_nothing(self, tmp_path: Path) -> None:
        runner = FakeRunner(FakeModel())
        served = Served(tmp_path, runner, generate(max_tokens=0))
        assert served.answer() == []
        assert served.finished().reason is FinishReason.LENGTH
        assert len(runner.runs) == 1

    def test_a_stop_token_is_reported_and_ends_the_answer(self, tmp_path: Path) -> None:
        served = Served(tmp_path, FakeRunner(FakeModel(answer=(5, 6, 7))), generate(max_tokens=9, stop_ids=[7]))
        assert served.answer() == [5, 6, 7]
        assert served.finished().reason is FinishReason.STOP

    def test_ignore_eos_goes_on_past_a_stop_token(self, tmp_path: Path) -> None:
        served = Served(tmp_path, FakeRunner(FakeModel(answer=(5, 6, 7))), generate(max_tokens=5, stop_ids=[7], ignore_eos=True))
        assert served.answer() == [5, 6, 7, 5, 6]
        assert served.finished().reason is FinishReason.LENGTH

    def test_logprobs_come_with_each_token_when_asked_for(self, tmp_path: Path) -> None:
        served = Served(tmp_path, FakeRunner(FakeModel()), generate(max_tokens=3, top_logprobs=2))
        for event in served.events():
            if isinstance(event, Tokens):
                assert event.logprobs is not None
                assert len(event.logprobs) == 1
                assert event.logprobs[0].top[0] == (event.ids[0], event.logprobs[0].logprob)

    @given(st.integers(1, 12), st.integers(0, 9), st.integers(0, 2**64 - 1))
    @settings(max_examples=25, deadline=None)
    def test_a_seed_gives_the_same_answer_whatever_the_chunks_and_the_reuse(
        self, tmp_path_factory: pytest.TempPathFactory, max_rows: int, num_shared: int, seed: int
    ) -> None:
        folder = tmp_path_factory.mktemp("seed")
        request = generate(max_tokens=8, sampling=Sampling(temperature=1.5, top_p=0.9, seed=seed).model_dump())
        before = generate([*PROMPT[:num_shared], 99], max_tokens=2, request_id="before")
        plain = Served(folder, FakeRunner(FakeModel()), request).answer()
        assert Served(folder, FakeRunner(FakeModel(max_rows=max_rows)), before, request).answer() == plain


class TestThinking:
    BEGIN, END, SAYS = 5, 6, 7

    def answer(self, folder: Path, *says: int, opened: bool = False) -> list[int]:
        """Six tokens of a model that says these again and again, and may think for three."""
        limit = {"max_tokens": 3, "begin": None if opened else self.BEGIN, "end": self.END}
        return Served(folder, FakeRunner(FakeModel(answer=says)), generate(max_tokens=6, thinking=limit)).answer()

    def test_thoughts_that_have_had_their_tokens_are_ended_once(self, tmp_path: Path) -> None:
        assert self.answer(tmp_path, self.SAYS, opened=True) == [7, 7, 7, self.END, 7, 7]
        assert self.answer(tmp_path, self.BEGIN, 7, 8, 9, 7, 7)[:4] == [self.BEGIN, 7, 8, self.END]

    def test_thoughts_that_end_by_themselves_are_left_alone(self, tmp_path: Path) -> None:
        assert self.answer(tmp_path, 7, self.END, 8, opened=True) == [7, self.END, 8, 7, self.END, 8]
        assert self.answer(tmp_path, self.BEGIN, self.END, 8, 9, 10, 11) == [self.BEGIN, self.END, 8, 9, 10, 11]

    def test_an_answer_without_thoughts_has_none_ended(self, tmp_path: Path) -> None:
        assert self.answer(tmp_path, self.SAYS) == [7] * 6
        assert self.answer(tmp_path, 7, self.BEGIN) == [7, self.BEGIN] * 3


class TestContext:
    def test_an_answer_is_clipped_to_the_context(self, tmp_path: Path) -> None:
        served = Served(tmp_path, FakeRunner(FakeModel(context=14)), generate(max_tokens=100))
        assert len(served.answer()) == 4
        assert served.finished().reason is FinishReason.LENGTH

    def test_a_prompt_that_leaves_one_place_gets_one_token(self, tmp_path: Path) -> None:
        served = Served(tmp_path, FakeRunner(FakeModel(context=11)), generate(max_tokens=100))
        assert len(served.answer()) == 1

    @pytest.mark.parametrize("num_tokens", [10, 11, 500])
    def test_a_prompt_that_does_not_fit_ends_with_both_numbers(self, tmp_path: Path, num_tokens: int) -> None:
        runner = FakeRunner(FakeModel(context=10))
        finished = Served(tmp_path, runner, generate([1] * num_tokens)).finished()
        assert finished.reason is FinishReason.ERROR
        assert finished.error_code == "context_length_exceeded"
        assert f"{num_tokens} tokens" in str(finished.error_text)
        assert "have 10" in str(finished.error_text)
        assert runner.runs == []

    def test_an_answer_ends_at_its_deadline(self, tmp_path: Path) -> None:
        served = Served(tmp_path, FakeRunner(FakeModel(window_s=0.02)), generate(max_tokens=1000, deadline_s=0.05))
        assert served.finished().reason is FinishReason.LENGTH
        assert 1 <= len(served.answer()) < 10

    def test_a_prompt_ends_at_its_deadline(self, tmp_path: Path) -> None:
        served = Served(tmp_path, FakeRunner(FakeModel(max_rows=2, chunk_s=0.02)), generate([1] * 500, deadline_s=0.05))
        assert served.finished().reason is FinishReason.LENGTH
        assert served.answer() == []


class TestReuse:
    def test_the_next_turn_computes_only_what_is_new(self, tmp_path: Path) -> None:
        model = FakeModel()
        turn = [*PROMPT, *greedy_answer(model, PROMPT, 5), 21, 22]
        runner = FakeRunner(model)
        served = Served(tmp_path, runner, generate(), generate(turn, request_id="b"))
        assert served.started("b").cached_tokens == 14, "the last token of an answer has not been computed"
        assert served.answer("b") == greedy_answer(model, turn, 5)
        assert runner.runs[5].position == 14

    def test_a_repeated_prompt_computes_its_last_token(self, tmp_path: Path) -> None:
        runner = FakeRunner(FakeModel())
        served = Served(tmp_path, runner, generate(), generate(request_id="b"))
        assert served.started("b").cached_tokens == 9
        assert served.answer("b") == served.answer("a")

    def test_an_unrelated_prompt_reuses_nothing(self, tmp_path: Path) -> None:
        model = FakeModel()
        served = Served(tmp_path, FakeRunner(model), generate(), generate([99, *PROMPT[1:]], request_id="b"))
        assert served.started("b").cached_tokens == 0
        assert served.answer("b") == greedy_answer(model, [99, *PROMPT[1:]], 5)

    def test_what_a_cancelled_request_computed_is_reused(self, tmp_path: Path) -> None:
        runner = FakeRunner(FakeModel(max_rows=4))
        served = Served(tmp_path, runner, generate(), generate(request_id="b"), during={4: [Cancel("a")]})
        assert served.finished("a").reason is FinishReason.CANCELLED
        assert served.started("b").cached_tokens == 4, "the chunk that was given up is not valid"
        assert served.answer("b") == greedy_answer(runner.model, PROMPT, 5)

    def test_a_request_cancelled_before_its_first_step_leaves_the_conversation(self, tmp_path: Path) -> None:
        runner = FakeRunner(FakeModel())
        during: dict[int, list[Command]] = {13: [Cancel("a"), generate([1, 2, 3], request_id="b"), Cancel("b")]}
        served = Served(tmp_path, runner, generate(max_tokens=50), generate(request_id="c"), during=during)
        assert served.finished("b").reason is FinishReason.CANCELLED
        assert served.started("c").cached_tokens == 9

    @given(st.data())
    @settings(max_examples=40, deadline=None)
    def test_every_conversation_answers_as_if_it_were_the_first(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        """Prompts over two tokens share many prefixes; some requests are cancelled at a random position, some fail."""
        prompts = data.draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=2, max_size=6))
        model = FakeModel(vocab=4, max_rows=data.draw(st.integers(1, 5)), reject_at=data.draw(st.none() | st.integers(0, 15)))
        requests = [generate(prompt, 4, str(index)) for index, prompt in enumerate(prompts)]
        cancelled = data.draw(st.dictionaries(st.integers(0, 15), st.sampled_from([Cancel(request.id) for request in requests])))
        during = {position: [cancel] for position, cancel in cancelled.items()}
        served = Served(tmp_path_factory.mktemp("reuse"), FakeRunner(model), *requests, during=during)
        for request in requests:
            expected = greedy_answer(model, request.prompt, 4)
            answer = served.answer(request.id)
            assert answer == expected[: len(answer)]
            assert len(answer) == 4 or served.finished(request.id).reason in (FinishReason.CANCELLED, FinishReason.ERROR)


class TestCancel:
    def test_before_the_first_step_nothing_is_computed(self, tmp_path: Path) -> None:
        runner = FakeRunner(FakeModel())
        during: dict[int, list[Command]] = {10: [Cancel("a"), generate(request_id="b"), Cancel("b")]}
        served = Served(tmp_path, runner, generate(max_tokens=50), during=during)
        assert [type(event) for event in served.events("b")] == [Started, Finished]
        assert served.finished("b").reason is FinishReason.CANCELLED
        assert runner.runs[-1].position == 10

    def test_in_the_prompt_it_takes_effect_after_the_chunk(self, tmp_path: Path) -> None:
        runner = FakeRunner(FakeModel(max_rows=2))
        served = Served(tmp_path, runner, generate([1] * 100), during={4: [Cancel("a")]})
        assert served.finished().reason is FinishReason.CANCELLED
        assert runner.runs[-1].position == 4

    def test_in_decode_it_takes_effect_after_the_window(self, tmp_path: Path) -> None:
        runner = FakeRunner(FakeModel())
        served = Served(tmp_path, runner, generate(max_tokens=100), during={15: [Cancel("a")]})
        assert served.finished().reason is FinishReason.CANCELLED
        assert runner.runs[-1].position == 15

    def test_the_next_request_is_served(self, tmp_path: Path) -> None:
        served = Served(tmp_path, FakeRunner(FakeModel()), generate(max_tokens=100), generate(request_id="b"), during={15: [Cancel("a")]})
        assert served.finished("b").reason is FinishReason.LENGTH

    def test_that_crosses_the_terminal_event_is_ignored(self, tmp_path: Path) -> None:
        script = (generate(), Cancel("a"), Cancel("a"), generate(request_id="b"))
        served = Served(tmp_path, FakeRunner(FakeModel()), *script)
        assert served.controls() == []
        assert len(served.answer("a")) == 5
        assert served.answer("b") == served.answer("a")

    def test_of_another_request_only_repeats_a_step(self, tmp_path: Path) -> None:
        runner = FakeRunner(FakeModel(max_rows=4))
        served = Served(tmp_path, runner, generate(), during={4: [Cancel("b")], 12: [Cancel("b")]})
        assert served.answer() == greedy_answer(runner.model, PROMPT, 5)
        assert [run.position for run in runner.runs] == [0, 4, 4, 8, 10, 11, 12, 12, 13]

    def test_of_an_unknown_request_is_refused_and_disturbs_nobody(self, tmp_path: Path) -> None:
        served = Served(tmp_path, FakeRunner(FakeModel()), generate(), during={11: [Cancel("b")]})
        assert served.controls() == ["ERR malformed CANCEL: request b is not running"]
        assert served.finished().reason is FinishReason.LENGTH


class TestOneAtATime:
    def test_a_second_request_is_busy_and_the_first_goes_on(self, tmp_path: Path) -> None:
        served = Served(tmp_path, FakeRunner(FakeModel()), generate(), during={11: [generate(request_id="b")]})
        assert served.controls() == ["ERR busy b: request a is running"]
        assert served.events("b") == []
        assert len(served.answer()) == 5

    def test_the_same_id_is_a_duplicate(self, tmp_path: Path) -> None:
        served = Served(tmp_path, FakeRunner(FakeModel()), generate(), during={11: [generate()]})
        assert served.controls() == ["ERR duplicate a: request a is running"]
        served.finished()

    def test_the_end_of_input_ends_the_running_request(self, tmp_path: Path) -> None:
        served = Served(tmp_path, FakeRunner(FakeModel()), generate(max_tokens=100), during={12: [EndOfInput()]})
        assert served.finished().reason is FinishReason.CANCELLED
        assert served.error is None


class TestErrors:
    @pytest.mark.parametrize(
        "fields",
        [{"prompt": [320]}, {"sampling": {"logit_bias": {320: 1.0}}}, {"sampling": {"logit_bias": {1: float("nan")}}}],
        ids=str,
    )
    def test_a_bad_request_ends_with_an_error_and_the_next_is_served(self, tmp_path: Path, fields: dict[str, object]) -> None:
        bad = Generate.model_validate({"id": "a", "prompt": [1], "max_tokens": 3, **fields})
        served = Served(tmp_path, FakeRunner(FakeModel()), bad, generate(request_id="b"))
        assert (served.finished("a").reason, served.finished("a").error_code) == (FinishReason.ERROR, "invalid_request")
        assert served.finished("b").reason is FinishReason.LENGTH

    def test_a_request_error_in_the_middle_costs_that_request_only(self, tmp_path: Path) -> None:
        model = FakeModel(reject_at=12)
        served = Served(tmp_path, FakeRunner(model), generate(), generate([1, 2], request_id="b"))
        assert (served.finished("a").reason, served.finished("a").error_code) == (FinishReason.ERROR, "invalid_request")
        assert served.answer("a") == greedy_answer(model, PROMPT, 5)[:3]
        assert served.answer("b") == greedy_answer(model, [1, 2], 5)
        assert served.error is None

    @pytest.mark.parametrize("model", [FakeModel(fail_at=3), FakeModel(fail_at=12), FakeModel(nan_at=11)], ids=["prompt", "decode", "nan"])
    def test_an_engine_error_ends_the_request_and_then_the_loop(self, tmp_path: Path, model: FakeModel) -> None:
        served = Served(tmp_path, FakeRunner(model), generate(), generate(request_id="b"))
        assert (served.finished("a").reason, served.finished("a").error_code) == (FinishReason.ERROR, "engine_error")
        assert served.events("b") == []
        assert isinstance(served.error, EngineError)

    def test_an_unexpected_exception_ends_the_request_and_then_the_loop(self, tmp_path: Path) -> None:
        class Broken(FakeRunner):
            def between_windows(self) -> None:
                raise ZeroDivisionError("swap policy")

        served = Served(tmp_path, Broken(), generate())
        assert served.finished().error_code == "engine_error"
        assert "ZeroDivisionError: swap policy" in str(served.finished().error_text)
        assert isinstance(served.error, EngineError)

    def test_a_failing_control_line_ends_the_running_request_too(self, tmp_path: Path) -> None:
        class Broken(FakeRunner):
            def hold_threads(self, num_threads: int) -> int:
                raise OSError(f"no thread {num_threads}")

        served = Served(tmp_path, Broken(), generate(max_tokens=50), during={12: [HoldThreads(1)]})
        assert served.finished().error_code == "engine_error"
        assert isinstance(served.error, EngineError)

    def test_an_engine_that_cannot_even_begin_ends_the_request_too(self, tmp_path: Path) -> None:
        class Broken(FakeRunner):
            @property
            def vocab(self) -> int:
                raise MemoryError

        served = Served(tmp_path, Broken(), generate())
        assert served.finished().error_code == "engine_error"
        assert isinstance(served.error, EngineError)


class PlainRunner:
    """A runner that offers nothing beyond `Runner`."""

    def __init__(self) -> None:
        self._runner = FakeRunner()
        self.max_rows, self.context, self.vocab = 32, 4096, 320
        self.plan_bytes: Mapping[str, int] = {}

    def run(self, tokens: Sequence[int], position: int, num_logits: int, chooser: native.Chooser | None = None) -> Sequence[LogitsRow]:
        return self._runner.run(tokens, position, num_logits, chooser)

    def between_windows(self) -> None: ...

    def stats(self) -> RunnerStats:
        return self._runner.stats()

    def close(self) -> None: ...


@dataclass
class FillingRunner(FakeRunner):
    """Its slots are full after so many boundaries; chunks wait for that."""

    num_fills: int = 6

    @property
    def is_filling(self) -> bool:
        return self.num_boundaries < self.num_fills

    def fills_before(self, num_rows: int) -> bool:
        return num_rows > 1 and self.is_filling


class TestSlotsThatAreFilledFirst:
    def test_a_prompt_waits_until_they_are_full(self, tmp_path: Path) -> None:
        runner = FillingRunner(FakeModel(max_rows=4))
        served = Served(tmp_path, runner, generate())
        assert len(served.answer()) == 5
        assert runner.num_boundaries == 6 + len(runner.runs)

    def test_a_window_does_not(self, tmp_path: Path) -> None:
        runner = FillingRunner(FakeModel(max_rows=4), num_fills=1000)
        assert len(Served(tmp_path, runner, generate([11])).answer()) == 5
        assert runner.num_boundaries < 1000

    def test_every_line_is_obeyed_meanwhile(self, tmp_path: Path) -> None:
        coming: dict[int, list[Command]] = {2: [HoldThreads(1)], 3: [AttachPeer(), DetachPeer()], 4: [ReportStats()]}
        served = Served(tmp_path, FillingRunner(FakeModel(max_rows=4)), generate(), at_boundary=coming)
        assert [text.split()[0] for text in served.controls()] == ["HOLD", "PEER", "PEER", "STATS"]
        stats = Stats.model_validate_json(served.controls()[-1].removeprefix("STATS "))
        assert (stats.busy, stats.windows) == (True, 0)
        assert len(served.answer()) == 5

    def test_a_cancelled_request_does_not_wait_for_the_rest(self, tmp_path: Path) -> None:
        runner = FillingRunner(FakeModel(max_rows=4), num_fills=1000)
        served = Served(tmp_path, runner, generate(), at_boundary={3: [Cancel("a")]})
        assert served.finished().reason is FinishReason.CANCELLED
        assert runner.runs == []
        assert runner.num_boundaries < 1000


class TestControls:
    def test_stats_while_busy_count_what_was_done(self, tmp_path: Path) -> None:
        served = Served(tmp_path, FakeRunner(FakeModel(max_rows=4)), generate(), during={12: [ReportStats()]})
        stats = Stats.model_validate_json(served.controls()[0].removeprefix("STATS "))
        assert (stats.busy, stats.prompt_tokens, stats.generated_tokens, stats.context_used, stats.windows) == (True, 10, 4, 13, 6)
        assert stats.rows_by_tier == {"own": 26, "host": 13}

    def test_stats_while_idle_add_up_over_requests(self, tmp_path: Path) -> None:
        served = Served(tmp_path, FakeRunner(), ReportStats(), generate(), generate(request_id="b"), ReportStats())
        before, after = (Stats.model_validate_json(text.removeprefix("STATS ")) for text in served.controls())
        assert (before.busy, before.windows, before.context_used) == (False, 0, 0)
        assert (after.busy, after.prompt_tokens, after.generated_tokens, after.context_used) == (False, 11, 10, 14)

    def test_threads_sit_out_and_come_back(self, tmp_path: Path) -> None:
        served = Served(tmp_path, FakeRunner(), HoldThreads(1), HoldThreads(0), HoldThreads(99))
        assert served.controls() == ["HOLD 1", "HOLD 0", "HOLD 1"]

    def test_memory_is_given_back_and_taken_again_while_a_request_runs(self, tmp_path: Path) -> None:
        during: dict[int, list[Command]] = {11: [FreeMemory(3)], 12: [FreeMemory(None)]}
        served = Served(tmp_path, FakeRunner(), generate(), during=during)
        assert served.controls() == ["VRAM 11 3", "VRAM 14 0"]
        assert len(served.answer()) == 5

    def test_more_memory_than_there_is_fails_in_a_sentence(self, tmp_path: Path) -> None:
        served = Served(tmp_path, FakeRunner(), FreeMemory(9))
        assert served.controls() == ["ERR failed VRAM: 9 MiB cannot be freed; all slots together have 8 MiB"]

    def test_the_second_card_comes_and_goes_between_windows_and_chunks(self, tmp_path: Path) -> None:
        during: dict[int, list[Command]] = {4: [DetachPeer()], 8: [AttachPeer()], 12: [DetachPeer()]}
        runner = FakeRunner(FakeModel(max_rows=4))
        served = Served(tmp_path, runner, AttachPeer(), generate(), during=during)
        assert served.controls() == ["PEER ON", "PEER OFF", "PEER ON", "PEER OFF"]
        assert runner.peer_experts == 0
        assert len(served.answer()) == 5

    def test_the_second_card_goes_in_parts_between_windows(self, tmp_path: Path) -> None:
        during: dict[int, list[Command]] = {11: [DetachPeer()], 12: [ReportStats()]}
        served = Served(tmp_path, FakeRunner(peer_parts=3), AttachPeer(), generate(), during=during)
        assert [text.split()[0] for text in served.controls()] == ["PEER", "STATS", "PEER"]
        assert len(served.answer()) == 5

    def test_the_second_card_comes_in_parts_between_windows(self, tmp_path: Path) -> None:
        runner = FakeRunner(peer_parts=3)
        during: dict[int, list[Command]] = {11: [AttachPeer()], 12: [ReportStats()]}
        served = Served(tmp_path, runner, generate(), during=during)
        assert [text.split()[0] for text in served.controls()] == ["STATS", "PEER"]
        assert (len(served.answer()), runner.peer_experts > 0) == (5, True)

    def test_a_second_card_that_is_taken_while_it_comes_fails_in_a_sentence_and_the_request_goes_on(self, tmp_path: Path) -> None:
        served = Served(tmp_path, FakeRunner(FakeModel(refuse_peer=True), peer_parts=3), generate(), during={11: [AttachPeer()]})
        assert served.controls() == ["ERR failed PEER_ATTACH: the fake second card is taken"]
        assert len(served.answer()) == 5

    @pytest.mark.parametrize("at", [4, 12, 13])  # in the prompt, in the answer, with its last window
    def test_what_is_left_of_the_second_card_goes_at_once_when_nobody_waits(self, tmp_path: Path, at: int) -> None:
        served = Served(tmp_path, FakeRunner(FakeModel(max_rows=4), peer_parts=1000), AttachPeer(), generate(), during={at: [DetachPeer()]})
        assert served.controls() == ["PEER ON", "PEER OFF"]
        assert len(served.answer()) == 5

    def test_a_second_card_that_is_wanted_again_goes_to_its_end_first(self, tmp_path: Path) -> None:
        runner = FakeRunner(peer_parts=1000)
        served = Served(tmp_path, runner, AttachPeer(), generate(), during={12: [DetachPeer(), AttachPeer()]})
        assert served.controls() == ["PEER ON", "PEER OFF", "PEER ON"]
        assert runner.peer_experts > 0

    def test_a_second_card_that_is_taken_fails_in_a_sentence(self, tmp_path: Path) -> None:
        served = Served(tmp_path, FakeRunner(FakeModel(refuse_peer=True)), AttachPeer())
        assert served.controls() == ["ERR failed PEER_ATTACH: the fake second card is taken"]

    def test_the_link_is_served_and_no_longer(self, tmp_path: Path) -> None:
        runner = FakeRunner()
        served = Served(tmp_path, runner, ServeLink(True), ReportStats(), ServeLink(False))
        stats = Stats.model_validate_json(served.controls()[1].removeprefix("STATS "))
        assert stats.link_serving
        assert (served.controls()[0], served.controls()[2], runner.link_serving) == ("LINK 1", "LINK 0", False)

    def test_without_second_card_and_link_both_are_unsupported(self, tmp_path: Path) -> None:
        served = Served(tmp_path, FakeRunner(has_peer=False, has_link=False), AttachPeer(), DetachPeer(), ServeLink(True))
        assert [answer.split(":")[0] for answer in served.controls()] == [
            f"ERR unsupported {name}" for name in ("PEER_ATTACH", "PEER_DETACH", "LINK_SERVE")
        ]

    def test_what_a_runner_cannot_do_is_unsupported(self, tmp_path: Path) -> None:
        lines = ["POOL_HOLD 1", "VRAM 5", "VRAM", "PEER_DETACH", "PEER_ATTACH", "LINK_SERVE 1"]
        served = Served(tmp_path, PlainRunner(), *(parse_command(text.encode()) for text in lines))
        assert [answer.split(":")[0] for answer in served.controls()] == [
            f"ERR unsupported {name}" for name in ("POOL_HOLD", "VRAM", "VRAM", "PEER_DETACH", "PEER_ATTACH", "LINK_SERVE")
        ]
