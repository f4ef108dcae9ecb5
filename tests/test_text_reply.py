"""Replies taken apart: reasoning, content, tool calls; nothing lost, however the text arrives."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.text.reply import Content, Reasoning, ReplyPart, ReplyStream, ToolCall, begun_call, without_open_think

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SHARDS = st.lists(
    st.sampled_from(
        [
            *("<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "<", "<t", "</", "\n", " ", "a", "é", "{", '"', "}"),
            *(
                '{"name": "f", "arguments": {}}',
                '{"name": "f", "arguments": "{}"}',
                '{"name": 1}',
                '{"name": "</tool_call>", "arguments": {}}',
            ),
        ]
    ),
    max_size=12,
).map("".join)


def parts_of(reply: str, step: int | None = None, **options: bool) -> list[ReplyPart]:
    stream = ReplyStream(**options)
    step = step or max(1, len(reply))
    parts = [part for begin in range(0, len(reply), step) for part in stream.feed(reply[begin : begin + step])]
    return parts + stream.finish()


def seen(parts: list[ReplyPart]) -> tuple[str, str, list[tuple[int, str, str]]]:
    """What a client sees: reasoning, content, calls."""
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    content = "".join(part.text for part in parts if isinstance(part, Content))
    return reasoning, content, [(part.index, part.name, part.arguments) for part in parts if isinstance(part, ToolCall)]


@given(SHARDS, st.integers(1, 7), st.booleans(), st.booleans())
def test_nothing_is_lost(reply: str, step: int, in_reasoning: bool, tools: bool) -> None:
    assert "".join(part.raw for part in parts_of(reply, step, in_reasoning=in_reasoning, tools=tools)) == reply


@given(SHARDS, st.integers(1, 7), st.booleans(), st.booleans())
def test_how_the_reply_arrives_makes_no_difference(reply: str, step: int, in_reasoning: bool, tools: bool) -> None:
    options = {"in_reasoning": in_reasoning, "tools": tools}
    assert seen(parts_of(reply, step, **options)) == seen(parts_of(reply, **options))


@given(st.text(st.characters(exclude_characters="<"), max_size=60), st.integers(1, 7))
def test_a_reply_without_tags_is_content(reply: str, step: int) -> None:
    assert seen(parts_of(reply, step)) == ("", reply, [])


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_whole_reply(step: int) -> None:
    reply = f"<think>\nHm.\nYes.\n</think>\n\nI add.\n{CALL}\n{CALL}"
    assert seen(parts_of(reply, step)) == ("Hm.\nYes.", "I add.", [(0, "add", '{"a": 1}'), (1, "add", '{"a": 1}')])


def test_reasoning_may_have_begun_in_the_prompt() -> None:
    assert seen(parts_of("\nHm.\n</think>\n\nYes", 2, in_reasoning=True)) == ("Hm.", "Yes", [])


def test_reasoning_without_an_end_stays_reasoning() -> None:
    assert seen(parts_of("<think>on and on", 2)) == ("on and on", "", [])


def test_empty_reasoning_leaves_only_content() -> None:
    assert seen(parts_of("<think>\n\n</think>\n\nYes", 2)) == ("", "Yes", [])


def test_a_think_tag_inside_the_answer_is_text() -> None:
    assert seen(parts_of("Write <think> and </think>.", 2)) == ("", "Write <think> and </think>.", [])


def test_calls_are_text_when_tools_are_off() -> None:
    assert seen(parts_of(CALL, 2, tools=False)) == ("", CALL, [])


MALFORMED = (
    *("", "add(1)", "{", "[1]", "[" * 100_000, '{"name": "f"}', '{"name": 1, "arguments": {}}', '{"name": "f", "arguments": [1]}'),
    *('{"name": "f", "arguments": {}} x', '{"name": "f", "arguments": "no"}', '{"a": ' * 50_000),
)


@pytest.mark.parametrize("body", MALFORMED)
def test_a_malformed_call_stays_text(body: str) -> None:
    reply = f"Now: <tool_call>{body}</tool_call> done"
    assert seen(parts_of(reply, 5)) == ("", reply, [])


def test_a_good_call_behind_a_malformed_one_is_found() -> None:
    reply = f"<tool_call>nonsense</tool_call>{CALL}"
    assert seen(parts_of(reply, 5)) == ("", "<tool_call>nonsense</tool_call>", [(0, "add", '{"a": 1}')])


def test_the_end_tag_inside_a_string_of_the_call_does_not_end_it() -> None:
    arguments = {"text": 'say "</tool_call>" \\', "é": 1}
    reply = f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>"
    assert [json.loads(call[2]) for call in seen(parts_of(reply, 3))[2]] == [arguments]


def test_arguments_may_be_json_in_a_string() -> None:
    reply = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert seen(parts_of(reply))[2] == [(0, "f", '{"a": 1}')]


def test_half_an_emoji_in_a_call_is_a_replacement_character() -> None:
    (call,) = parts_of(r'<tool_call>{"name": "f", "arguments": {"a": "\ud83d \ud83d\ude00"}}</tool_call>')
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == {"a": "\ufffd \U0001f600"}


@pytest.mark.parametrize(("name", "rest"), [("add", ' {"a": 1}}'), ('größe "x"', " {}}"), (None, ' "add", "arguments": {}}')])
def test_a_call_that_was_begun_for_the_model_is_one_with_what_it_writes(name: str | None, rest: str) -> None:
    (call,) = parts_of(begun_call(name) + rest + "\n</tool_call>")
    assert isinstance(call, ToolCall)
    assert call.name == (name or "add")


def test_reasoning_that_the_prompt_has_opened_can_be_closed() -> None:
    assert without_open_think("question <think>\n") == "question <think>\n\n</think>\n\n"
    assert without_open_think("<think> question\n") == "<think> question\n"


def test_a_complete_call_whose_end_tag_is_missing_counts() -> None:
    assert seen(parts_of('<tool_call>{"name": "f", "arguments": {}}', 3))[2] == [(0, "f", "{}")]


def test_a_call_that_breaks_off_is_text() -> None:
    assert seen(parts_of('<tool_call>{"name": "f", "argum', 3)) == ("", '<tool_call>{"name": "f", "argum', [])


def test_text_that_cannot_be_a_tag_is_not_held_back() -> None:
    stream = ReplyStream()
    assert [part.raw for part in stream.feed("a < b")] == ["a < b"]


def test_a_call_that_cannot_become_one_is_not_held_back() -> None:
    stream = ReplyStream()
    assert "".join(part.raw for part in stream.feed("<tool_call><function=f>")) == "<tool_call><function=f>"
