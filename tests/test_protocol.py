"""The protocol: its page says what the code does, its messages survive the pipe, and no line can hurt an engine."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from appliance import protocol
from appliance.engine import pipes, process
from appliance.engine.commands import Cancel, EndOfInput, FreeMemory, HoldThreads, Refusal, ReportStats, parse_command
from appliance.protocol import (
    EVENT,
    ControlErrorCode,
    Fatal,
    Finished,
    FinishReason,
    Generate,
    LoadProgress,
    Message,
    PromptProgress,
    Queued,
    Ready,
    Reply,
    Sampling,
    Started,
    Stats,
    ThinkingLimit,
    Timings,
    TokenLogprobs,
    Tokens,
    Word,
    line,
)
from tests.fakes_engine import fake_engine_argv

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
EVENTS: dict[str, type[Message]] = {"queued": Queued, "started": Started, "prompt": PromptProgress, "tokens": Tokens, "finished": Finished}


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    match = re.search(rf"^#+ {re.escape(title)}$(.*?)(?=^#+ |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert match is not None, f"docs/protocol.md has no section {title}"
    return match.group(1)


def first_column(text: str) -> list[str]:
    """The first word of the first cell of each row of the tables in `text`, if it is code."""
    return re.findall(r"^\| `(\w+)[^|]*`? *\|", text.replace(r"\|", "/"), re.MULTILINE)


def code_words(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


class TestPage:
    def test_every_word_stands_in_one_of_the_tables_of_lines(self) -> None:
        words = first_column(section("Lines that an engine reads")) + first_column(section("Lines that an engine writes"))
        assert set(words) == set(Word)

    def test_every_reply_word_is_named(self) -> None:
        row = next(text for text in section("Lines that an engine writes").splitlines() if text.startswith("| `CTL"))
        assert code_words(row) >= set(Reply)
        assert code_words(row) <= {*Reply, "CTL"}

    def test_every_control_error_has_its_row(self) -> None:
        assert first_column(section("Codes of `CTL ERR code text`")) == list(ControlErrorCode)

    @pytest.mark.parametrize("message", [Generate, Sampling, ThinkingLimit])
    def test_every_request_field_has_its_row_and_its_default(self, message: type[Message]) -> None:
        text = section(message.__name__)
        assert set(first_column(text)) == set(message.model_fields)
        for name, field in message.model_fields.items():
            shown = re.search(rf"^\| `{name}` \| ?(.*?) ?\|", text, re.MULTILINE)
            assert shown is not None
            if isinstance(field.default, int | float) and not isinstance(field.default, bool):
                assert float(shown.group(1)) == field.default
            assert (shown.group(1) == "") == field.is_required()

    @pytest.mark.parametrize("message", [LoadProgress, Ready, Stats, Fatal])
    def test_every_field_of_the_other_messages_is_named(self, message: type[Message]) -> None:
        assert code_words(section(message.__name__)) >= set(message.model_fields)

    @pytest.mark.parametrize("name", EVENTS)
    def test_every_event_has_its_row_with_its_fields(self, name: str) -> None:
        row = next(text for text in section("Events").splitlines() if text.startswith(f"| `{name}`"))
        assert re.findall(r"`(\w+)`", row.split("|")[2]) == [field for field in EVENTS[name].model_fields if field != "event"]

    @pytest.mark.parametrize("message", [TokenLogprobs, Timings])
    def test_every_field_of_the_parts_of_events_is_named(self, message: type[Message]) -> None:
        paragraph = next(text for text in section("Events").split("\n\n") if text.startswith(f"`{message.__name__}`"))
        assert code_words(paragraph) >= set(message.model_fields)

    def test_every_reason_has_its_row(self) -> None:
        rows = set(first_column(section("Events"))) - set(EVENTS)
        assert rows == set(FinishReason)

    def test_every_message_class_is_covered_here(self) -> None:
        classes = {value for value in vars(protocol).values() if isinstance(value, type) and issubclass(value, Message)}
        assert classes == {
            Message,
            Generate,
            Sampling,
            ThinkingLimit,
            LoadProgress,
            Ready,
            Stats,
            Fatal,
            TokenLogprobs,
            Timings,
            *EVENTS.values(),
        }

    def test_numbers_are_those_of_the_code(self) -> None:
        assert f"at most {protocol.MAX_LINE_BYTES // 2**20} MiB" in PAGE
        assert f"until {pipes.HIGH_WATER_BYTES // 2**20} MiB of lines wait" in PAGE
        assert f"nothing for {pipes.STALL_LIMIT_S:g} s" in PAGE
        assert f"after {process.END_GRACE_S:g} s it ends" in PAGE
        assert f"`protocol` ({protocol.PROTOCOL_VERSION})" in PAGE
        codes = re.findall(r"^\| (\d) \|", PAGE, re.MULTILINE)
        assert {process.EXIT_START_FAILED, process.EXIT_SERVING_FAILED, process.EXIT_DESK_GONE} <= {int(code) for code in codes}


ids = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=128)
texts = st.text(max_size=50)
numbers = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**53)
samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 100),
    top_k=counts,
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 10),
    logit_bias=st.dictionaries(st.integers(), numbers, max_size=4),
    seed=st.integers(0, 2**64 - 1),
)
requests = st.builds(
    Generate,
    id=ids,
    prompt=st.lists(counts, min_size=1, max_size=8),
    max_tokens=counts,
    sampling=samplings,
    stop_ids=st.lists(counts, max_size=3),
    ignore_eos=st.booleans(),
    top_logprobs=st.none() | st.integers(0, 20),
    deadline_s=st.none() | st.floats(0.001, 1e6),
)
timings = st.builds(Timings, prompt_tokens=counts, cached_tokens=counts, generated_tokens=counts, prompt_ms=numbers, decode_ms=numbers)
logprobs = st.builds(TokenLogprobs, logprob=numbers, top=st.lists(st.tuples(counts, numbers), max_size=3))
events = st.one_of(
    st.builds(Queued, id=ids, place=st.integers(1, 1000)),
    st.builds(Started, id=ids, prompt_tokens=counts, cached_tokens=counts, lane=st.none() | texts),
    st.builds(PromptProgress, id=ids, done=counts, total=counts),
    st.builds(Tokens, id=ids, ids=st.lists(counts, max_size=5), logprobs=st.none() | st.lists(logprobs, max_size=3)),
    st.builds(
        Finished,
        id=ids,
        reason=st.sampled_from(FinishReason),
        error_code=st.none() | texts,
        error_text=st.none() | texts,
        timings=timings,
    ),
)
others = st.one_of(
    st.builds(LoadProgress, stage=texts, done_bytes=counts, total_bytes=counts, bytes_per_s=numbers, left_s=st.none() | numbers),
    st.builds(Ready, pid=counts, card=texts, context=counts, slots=counts, plan_bytes=st.dictionaries(texts, counts, max_size=3)),
    st.builds(Fatal, code=texts, text=texts),
)


class TestMessages:
    @given(requests)
    def test_a_request_survives_the_pipe(self, request: Generate) -> None:
        assert parse_command(line(Word.GEN, request).removesuffix("\n").encode()) == request

    @given(events)
    def test_an_event_survives_the_pipe(self, event: protocol.Event) -> None:
        text = line(Word.EV, event)
        assert text.count("\n") == 1
        assert EVENT.validate_json(text.removeprefix("EV ")) == event

    @given(others)
    def test_the_other_messages_survive_the_pipe(self, message: Message) -> None:
        assert type(message).model_validate_json(message.model_dump_json(exclude_none=True)) == message

    @pytest.mark.parametrize("message", [Generate, Sampling, Ready, Fatal, *EVENTS.values()])
    def test_an_unknown_field_is_an_error(self, message: type[BaseModel]) -> None:
        with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
            message.model_validate({"surprise": 1})


class TestCommands:
    @pytest.mark.parametrize(
        ("text", "command"),
        [
            ("CANCEL r1", Cancel("r1")),
            ("CANCEL r1\r", Cancel("r1")),
            ("POOL_HOLD 0", HoldThreads(0)),
            ("POOL_HOLD 12", HoldThreads(12)),
            ("VRAM", FreeMemory(None)),
            ("VRAM 2048", FreeMemory(2048)),
            ("STATS", ReportStats()),
        ],
    )
    def test_control_lines_are_read(self, text: str, command: object) -> None:
        assert parse_command(text.encode()) == command

    @pytest.mark.parametrize(
        ("text", "code"),
        [
            ("", ControlErrorCode.UNKNOWN),
            ("gen {}", ControlErrorCode.UNKNOWN),
            ("READY {}", ControlErrorCode.UNKNOWN),
            ("GEN", ControlErrorCode.MALFORMED),
            ("GEN {", ControlErrorCode.MALFORMED),
            ("GEN []", ControlErrorCode.MALFORMED),
            ("GEN " + "[" * 100_000, ControlErrorCode.MALFORMED),
            ('GEN {"id":"a","prompt":[],"max_tokens":1}', ControlErrorCode.MALFORMED),
            ('GEN {"id":"a","prompt":[-1],"max_tokens":1}', ControlErrorCode.MALFORMED),
            ('GEN {"id":"a b","prompt":[1],"max_tokens":1}', ControlErrorCode.MALFORMED),
            ('GEN {"id":"a","prompt":[1],"max_tokens":1,"stop":"x"}', ControlErrorCode.MALFORMED),
            ("CANCEL", ControlErrorCode.MALFORMED),
            ("CANCEL a b", ControlErrorCode.MALFORMED),
            ("POOL_HOLD", ControlErrorCode.MALFORMED),
            ("POOL_HOLD -1", ControlErrorCode.MALFORMED),
            ("POOL_HOLD ²", ControlErrorCode.MALFORMED),
            ("POOL_HOLD " + "9" * 5000, ControlErrorCode.MALFORMED),
            ("VRAM x", ControlErrorCode.MALFORMED),
            ("STATS now", ControlErrorCode.MALFORMED),
            ("PEER_DETACH now", ControlErrorCode.MALFORMED),
            ("PEER_ATTACH 1", ControlErrorCode.MALFORMED),
            ("LINK_SERVE", ControlErrorCode.MALFORMED),
            ("LINK_SERVE 2", ControlErrorCode.MALFORMED),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_anything_wrong_is_refused_with_a_code(self, text: str, code: ControlErrorCode) -> None:
        refusal = parse_command(text.encode())
        assert isinstance(refusal, Refusal)
        assert refusal.code is code
        assert 0 < len(refusal.text) < 300

    def test_a_refused_request_is_named(self) -> None:
        refusal = parse_command(b'GEN {"id":"r7","prompt":[1]}')
        assert isinstance(refusal, Refusal)
        assert refusal.text == "r7: max_tokens: Field required"

    @given(st.binary(max_size=200).filter(lambda line: b"\n" not in line))
    def test_no_bytes_raise(self, line: bytes) -> None:
        parse_command(line)

    @given(
        st.sampled_from(Word),
        st.recursive(st.none() | numbers | texts, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=5),
    )
    def test_no_json_behind_any_word_raises(self, word: Word, value: object) -> None:
        assert not isinstance(parse_command(f"{word} {json.dumps(value)}".encode()), EndOfInput)


def test_garbage_never_ends_an_engine_and_is_always_answered() -> None:
    """A real process, a thousand lines of noise; each gets its `CTL ERR` and the engine still answers afterwards."""
    random = Random(7)
    noise = [random.randbytes(length % 97 + 1).translate(None, b"\n") for length in range(500)]
    noise += [f"{word} {random.randbytes(4).hex()}{{".encode() for word in Word for _ in range(40)]
    with subprocess.Popen(fake_engine_argv(), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        output, _ = engine.communicate(b"".join(text + b"\n" for text in noise) + b"STATS\n", timeout=60)
    answers = [text for text in output.decode().splitlines() if not text.startswith(("LOAD", "READY"))]
    assert all(text.startswith("CTL ERR ") for text in answers[:-1])
    assert len(answers) == len(noise) + 1
    assert answers[-1].startswith("CTL STATS ")
    assert engine.returncode == 0
