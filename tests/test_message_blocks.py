"""Replies as content blocks: what the events build up at the client is what the whole message has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import ContentBlock, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from appliance.web.message_blocks import MessageBlocks

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "tandem"}}\n</tool_call>'
RAW = f"<think>\nwhich word?\n</think>\n\nLooking.\n{CALL}\n{CALL}"
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
BLOCKS: TypeAdapter[Any] = TypeAdapter(list[ContentBlock])
SHARDS = st.lists(st.sampled_from(["<think>", "</think>", CALL, "<tool_call>", "a", " ", "\n", "é", "{", '"']), max_size=12).map("".join)


def blocks_for(*, tools: bool = True, one_call: bool = False, in_reasoning: bool = False) -> MessageBlocks:
    return MessageBlocks(tools=tools, one_call=one_call, in_reasoning=in_reasoning)


def fed(blocks: MessageBlocks, text: str, step: int) -> list[dict[str, Any]]:
    events = [event for at in range(0, len(text), step) for event in blocks.feed(text[at : at + step])]
    events += blocks.finish()
    for event in events:
        EVENT.validate_python(event)
    return events


def built_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a client makes of the events, which must come in the right order."""
    built: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(built)
            built.append({**event["content_block"], "json": ""})
        assert event["index"] == len(built) - 1
        is_open = event["type"] != "content_block_stop"
        match event.get("delta"):
            case {"type": "text_delta", "text": text}:
                built[-1]["text"] += text
            case {"type": "thinking_delta", "thinking": text}:
                built[-1]["thinking"] += text
            case {"type": "signature_delta", "signature": text}:
                built[-1]["signature"] += text
            case {"type": "input_json_delta", "partial_json": text}:
                built[-1]["json"] += text
    assert not is_open
    for block in built:
        parsed = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(parsed)
    return built


@given(reply=SHARDS, step=st.integers(1, 9), tools=st.booleans(), in_reasoning=st.booleans(), one_call=st.booleans())
def test_the_events_build_up_the_message(reply: str, step: int, tools: bool, in_reasoning: bool, one_call: bool) -> None:
    blocks = blocks_for(tools=tools, in_reasoning=in_reasoning, one_call=one_call)
    assert built_up(fed(blocks, reply, step)) == blocks.content()
    BLOCKS.validate_python(blocks.content())


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_reply_has_thinking_text_and_calls(step: int) -> None:
    blocks = blocks_for()
    fed(blocks, RAW, step)
    thinking, text, first, second = blocks.content()
    assert thinking["thinking"] == "which word?"
    assert thinking["signature"]
    assert text == {"type": "text", "text": "Looking."}
    assert (first["name"], first["input"]) == ("look_up", {"word": "tandem"})
    assert first["id"] != second["id"]
    assert blocks.calls_tools


def test_nothing_behind_the_first_call_counts_if_only_one_is_wanted() -> None:
    blocks = blocks_for(one_call=True)
    fed(blocks, RAW, 5)
    assert [block["type"] for block in blocks.content()] == ["thinking", "text", "tool_use"]


def test_without_tools_a_call_stays_text() -> None:
    blocks = blocks_for(tools=False)
    fed(blocks, CALL, 4)
    assert blocks.content() == [{"type": "text", "text": CALL}]


def test_a_reply_that_begins_inside_think_is_thinking_first() -> None:
    blocks = blocks_for(in_reasoning=True)
    fed(blocks, "because\n</think>\n\nyes", 3)
    assert [block["type"] for block in blocks.content()] == ["thinking", "text"]


@pytest.mark.parametrize("reply", ["", "<think>\n\n</think>\n\n"])
def test_a_reply_without_text_has_no_blocks(reply: str) -> None:
    blocks = blocks_for()
    assert fed(blocks, reply, 3) == []
    assert blocks.content() == []


@pytest.mark.parametrize("value", ["NaN", "[" * 300 + "]" * 300])
def test_arguments_that_cannot_be_sent_as_json_leave_the_call_text(value: str) -> None:
    reply = f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>'
    blocks = blocks_for()
    fed(blocks, reply, 1000)
    assert blocks.content() == [{"type": "text", "text": reply}]


def test_huge_numbers_in_arguments_can_be_sent() -> None:
    blocks = blocks_for()
    fed(blocks, f'<tool_call>{{"name": "f", "arguments": {{"a": {10**30}}}}}</tool_call>', 1000)
    assert blocks.content()[0]["input"] == {"a": 1e30}
